"""No GPU in use: the receiver makes no call to the runtime and opens nothing for it."""

from __future__ import annotations

import os
from pathlib import Path

import aioarena
from tests.gpu_seam.channel import channel, frames, pass_on
from tests.gpu_seam.fake import FakeGpu
from tests.gpu_seam.loops import a_while, both_loops


def descriptors() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return sorted(links)


@both_loops
async def test_nothing_is_called_and_no_descriptor_opened(gpu: FakeGpu) -> None:
    """As long as nobody initialised CUDA: no pinning, no event, no eventfd, and slots come back at once."""
    async with channel() as (sender, receiver):
        assert receiver._ledger is not None
        before = descriptors()
        for value in range(20):
            kept = await pass_on(sender, receiver, value)
            view = kept[5:]
            del kept
            assert view[0] == value
            del view
            assert receiver.statistics().spans_held == 0
        assert frames(sender) == 0
        assert descriptors() == before
        assert receiver._ledger._poke_fd < 0
        assert receiver.statistics().pinned == "no"
        kept = await pass_on(sender, receiver)
    assert gpu.calls == []
    del kept
    await a_while()
    assert gpu.calls == []
    assert sender.statistics().slots_used == 0


@both_loops
async def test_a_channel_without_an_arena_never_asks(gpu: FakeGpu) -> None:
    """No arena, nothing to pin, even when the GPU is in use."""
    gpu.initialize()
    async with aioarena.Sender(1, arena=None) as sender, aioarena.Receiver(sender.handle, 0) as receiver:
        await sender.send(b"x" * 100_000)
        assert len(await receiver.recv()) == 100_000
        assert receiver.statistics().pinned == "no"
    assert gpu.calls == []


def test_the_package_names_cuda_only_in_the_seam() -> None:
    """All calls to the GPU go through one module, so that the tests here mean something."""
    package = Path(aioarena.__file__).parent
    seam = package / "_platform" / "accelerator.py"
    users = [path for path in package.rglob("*.py") if path != seam and "torch.cuda." in code_of(path)]
    assert users == []


def code_of(path: Path) -> str:
    """A module without its comments and docstrings."""
    import ast

    return ast.unparse(without_docstrings(ast.parse(path.read_text())))


def without_docstrings(tree):  # type: ignore[no-untyped-def]
    import ast

    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return tree
