"""The command line as its users see it: what it prints, how it fails, and what it leaves when it is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from aioarena import __version__, _demo, _picture, cli
from aioarena._bench._scenarios import SCENARIOS
from aioarena._bench._workers import Team, WorkerError, run
from aioarena._bench.compare import ALTERNATIVES

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
COMMAND = [sys.executable, "-m", "aioarena"]
# Two workers and a few pictures of 0.8 MB: seconds, most of them to import torch.
SMALL = ["--readers", "2", "--size", "256", "--pictures", "2"]

# Seconds for what takes about one: ending after Ctrl-C, also on a machine that is busy with something else.
SOON = 10.0 * float(os.environ.get("AIOARENA_TEST_PATIENCE", "1"))


def aioarena(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=10 * SOON, check=False
    )


# Pictures ---------------------------------------------------------------------------------------------------------


def picture(height: int, width: int, channels: int = 3, seed: int = 0) -> _picture.Pixels:
    """Smooth, with noise on top, so that PNG's filters have something to predict and something to miss."""
    rng = np.random.default_rng(seed)
    smooth = np.add.outer(np.arange(height), np.arange(width))[:, :, None] + np.arange(channels) * 40
    return ((smooth + rng.integers(0, 30, (height, width, channels))) % 256).astype(np.uint8)


def png(
    pixels: _picture.Pixels, filters: tuple[int, ...] = (0, 1, 2, 3, 4), *, depth: int = 8, interlaced: int = 0
) -> bytes:
    """A PNG whose rows use the filters in turn, written byte by byte as the specification says."""
    height, width, channels = pixels.shape
    rows = pixels.reshape(height, width * channels).astype(int)
    body = bytearray()
    for y in range(height):
        body.append(filters[y % len(filters)])
        for x in range(width * channels):
            left = rows[y, x - channels] if x >= channels else 0
            up = rows[y - 1, x] if y else 0
            corner = rows[y - 1, x - channels] if y and x >= channels else 0
            estimate = left + up - corner
            nearest = min((left, up, corner), key=lambda value: abs(estimate - value))
            predicted = (0, left, up, (left + up) // 2, nearest)[filters[y % len(filters)]]
            body.append((rows[y, x] - predicted) % 256)
    colour = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(bytes(body)))
        + png_chunk(b"IEND", b"")
    )


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def ppm(pixels: _picture.Pixels) -> bytes:
    height, width, channels = pixels.shape
    return b"P%d\n# a comment\n%d %d\n255\n" % ({1: 5, 3: 6}[channels], width, height) + pixels.tobytes()


def as_rgb(pixels: _picture.Pixels) -> _picture.Pixels:
    return np.repeat(pixels[:, :, :1], 3, axis=2) if pixels.shape[2] < 3 else pixels[:, :, :3]


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 9, 3), (9, 1, 3), (13, 29, 3), (31, 12, 1), (17, 17, 4), (8, 9, 2)])
def test_png_is_read_whatever_its_filters(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    for filters in ((0,), (1,), (2,), (3,), (4,), (4, 0, 3, 1, 2)):
        pixels = picture(*shape)
        (tmp_path / "x.png").write_bytes(png(pixels, filters))
        np.testing.assert_array_equal(_picture.load(tmp_path / "x.png"), as_rgb(pixels))


def test_png_with_a_palette_is_read(tmp_path: Path) -> None:
    palette = picture(1, 7)[0]
    indices = picture(5, 6, 1) % 7
    grey = png(indices)
    header = struct.pack(">IIBBBBB", 6, 5, 8, 3, 0, 0, 0)
    start = grey.index(b"IDAT") - 4
    (tmp_path / "x.png").write_bytes(
        grey[:8] + png_chunk(b"IHDR", header) + png_chunk(b"PLTE", palette.tobytes()) + grey[start:]
    )
    np.testing.assert_array_equal(_picture.load(tmp_path / "x.png"), palette[indices[:, :, 0]])


@pytest.mark.parametrize("channels", [1, 3])
def test_ppm_and_pgm_are_read(tmp_path: Path, channels: int) -> None:
    pixels = picture(7, 5, channels)
    (tmp_path / "x.ppm").write_bytes(ppm(pixels))
    np.testing.assert_array_equal(_picture.load(tmp_path / "x.ppm"), as_rgb(pixels))


def test_pgm_of_16_bits_is_read(tmp_path: Path) -> None:
    pixels = picture(7, 5, 1)
    (tmp_path / "x.pgm").write_bytes(b"P5 5 7 65535\n" + (pixels.astype(">u2") * 257).tobytes())
    np.testing.assert_array_equal(_picture.load(tmp_path / "x.pgm"), as_rgb(pixels))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (png(picture(9, 9))[:-30], "broken"),
        (png(picture(9, 9))[:40] + b"?" + png(picture(9, 9))[41:], "broken"),
        (png(picture(9, 9))[:20], "broken"),
        (ppm(picture(9, 9))[:-1], "ends after"),
        (b"P6 0 5 255\n", "0 x 5 pixels"),
        (b"P6 99999 99999 255\n", "more than"),
        (b"P6 x", "broken"),
        (b"P6", "broken"),
        (b"P6 # no end", "broken"),
        (b"", "pip install pillow"),
        (b"hello", "pip install pillow"),
        (b"\xff\xd8\xff\xe0 a photo", "a JPEG"),
        (png(picture(9, 9), interlaced=1), "interlaced"),
        (png(picture(9, 9), depth=16), "16 bits"),
    ],
)
def test_bad_picture_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, why: str) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)  # as if Pillow were not installed
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(_picture.PictureError, match=why):
        _picture.load(tmp_path / "x")


def test_patches_are_those_of_qwen2_vl() -> None:
    """Against the transposition that its image processor does, written down as there."""
    pixels = picture(96, 64)
    mean, std = torch.tensor(_picture.CLIP_MEAN), torch.tensor(_picture.CLIP_STD)
    image = ((torch.from_numpy(pixels) / 255 - mean) / std).permute(2, 0, 1)
    frames = torch.stack([image, image])
    size, merge = _picture.PATCH, _picture.MERGE
    grid_h, grid_w = 96 // size, 64 // size
    patches = frames.reshape(1, 2, 3, grid_h // merge, merge, size, grid_w // merge, merge, size)
    expected = patches.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(grid_h * grid_w, 3 * 2 * size * size)
    torch.testing.assert_close(_picture.to_patches(pixels).float(), expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize(
    ("size", "expected"), [((640, 480), (256, 192)), ((100, 5000), (32, 256)), ((32, 32), (256, 256)), ((256, 256),) * 2]
)
def test_resizing_keeps_proportions_and_ends_on_whole_patches(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert _picture.fitting(*size, 256) == expected
    assert _picture.resize(picture(size[1], size[0]), *expected).shape == (expected[1], expected[0], 3)


def test_digest_sees_changed_and_moved_bytes() -> None:
    tensor = torch.arange(3 * 8192 + 16, dtype=torch.int64)
    changed, moved = tensor.clone(), tensor.clone()
    changed[5] += 1
    moved[:8192], moved[8192:16384] = tensor[8192:16384], tensor[:8192]
    assert len({_demo.digest(each) for each in (tensor, changed, moved)}) == 3


# The demo ---------------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_demo_says_what_happened(loop: str) -> None:
    done = aioarena("demo", *SMALL, "--loop", loop)
    assert done.returncode == 0, done.stderr
    assert "made here" in done.stdout
    assert re.search(r"digests that agree +4 of 4 +4 of 4", done.stdout)
    assert re.search(r"copies of a picture's bytes +1 +5 ", done.stdout)
    assert re.search(r"most slots in use +\d+ +none", done.stdout)
    assert "usable at reader 1 after" in done.stdout
    assert "sending without the arena" in done.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "encode"), [("cat.png", png), ("cat.ppm", ppm)])
def test_demo_takes_a_picture_of_the_user(tmp_path: Path, name: str, encode: type) -> None:
    (tmp_path / name).write_bytes(encode(picture(60, 80)))
    done = aioarena("demo", *SMALL, "--image", str(tmp_path / name))
    assert done.returncode == 0, done.stderr
    assert f"{name}, 80 x 60, resized to 256 x 192" in " ".join(done.stdout.split())
    assert "digests that agree" in done.stdout


@pytest.mark.multiprocess
def test_demo_with_a_picture_too_small_for_the_arena_says_so() -> None:
    done = aioarena("demo", "--readers", "1", "--size", "32", "--pictures", "1")
    assert done.returncode == 0, done.stderr
    assert "below the arena's min_bytes" in " ".join(done.stdout.split())


def test_demo_without_its_picture_fails_with_one_line() -> None:
    done = aioarena("demo", "--image", "/nowhere/cat.png")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "aioarena: error: /nowhere/cat.png does not exist\n"


@pytest.mark.multiprocess
def test_demo_with_a_broken_picture_fails_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(png(picture(60, 80))[:200])
    done = aioarena("demo", *SMALL, "--image", str(tmp_path / "cat.png"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "cat.png is broken" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.multiprocess
def test_demo_fails_when_a_reader_reads_something_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The workers compute the digest themselves, so a wrong one of the sender looks like wrong bytes."""
    right = _demo.digest
    monkeypatch.setattr(_demo, "digest", lambda tensor: right(tensor) ^ 1)
    monkeypatch.setattr(_demo, "_READERS_SHOWN", 1)  # as with so many readers that not each gets a line
    threads = torch.get_num_threads()
    try:
        assert cli.main(["demo", *SMALL]) == 1
    finally:
        torch.set_num_threads(threads)
    output = capsys.readouterr().out
    assert "FAILED: with the arena on, readers [0, 1] read other bytes than were sent" in output
    assert "0 of 4" in output
    assert "usable at the last reader after" in output


def test_demo_stops_quietly_when_nobody_reads_its_output() -> None:
    with subprocess.Popen(
        [*COMMAND, "demo", *SMALL], env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(6 * SOON) == 1


# Ctrl-C -----------------------------------------------------------------------------------------------------------


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        fresh = children.get(todo.pop(), [])
        found += fresh
        todo += fresh
    return found


def _alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(pid)
    return found


def _files_of(pids: list[int]) -> list[str]:
    """Sockets and shared memory with a name, of these processes."""
    directories = [Path(tempfile.gettempdir()) / f"aioarena-{os.getuid()}", Path("/dev/shm")]
    return [
        str(path)
        for directory in directories
        if directory.is_dir()
        for path in directory.glob("aioarena-*")
        if any(f"-{pid}-" in path.name for pid in pids)
    ]


@contextlib.contextmanager
def running(*arguments: str, until: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, as a terminal starts it, once it has said something."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env=ENVIRONMENT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if until in line:
                break
        else:
            pytest.fail(f"it never said {until!r}")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("arguments", "until", "code", "whole_group"),
    [
        pytest.param(["demo", "--size", "2048"], "starting", 130, True, id="starting"),
        pytest.param(["demo", "--size", "4096"], "making", 130, True, id="preprocessing"),
        pytest.param(["demo", "--size", "512", "--pictures", "2000"], "with the", 130, True, id="arena on"),
        pytest.param(["demo", "--size", "1024", "--pictures", "9"], "without the", 130, True, id="arena off"),
        pytest.param(["demo", "--size", "512", "--pictures", "2000"], "with the", 130, False, id="parent only"),
        pytest.param(
            ["demo", "--size", "512", "--pictures", "2000", "--loop", "uvloop"], "with the", 130, True, id="uvloop"
        ),
        pytest.param(["demo", "--size", "512", "--pictures", "2000"], "with the", 143, False, id="SIGTERM"),
        pytest.param(["bench", "small"], "to 1 readers", 130, True, id="bench"),
        pytest.param(["bench", "compare"], "small, 2 readers", 130, True, id="compare"),
        pytest.param(
            ["bench", "compare", "--scenarios", "burst"], "burst, 2 readers", 143, False, id="compare, parent only"
        ),
    ],
)
def test_interrupted_command_leaves_nothing_behind(arguments: list[str], until: str, code: int, whole_group: bool) -> None:
    """As a Ctrl-C in a terminal, which goes to all processes of the group, or as a supervisor does."""
    with running(*arguments, until=until) as process:
        time.sleep(0.2)  # into the middle of it
        pids = [process.pid, *_descendants(process.pid)]
        assert len(pids) > 1, "nothing was running"
        sent = signal.SIGTERM if code == 128 + signal.SIGTERM else signal.SIGINT
        began = time.monotonic()
        if whole_group:
            os.killpg(process.pid, sent)
        else:
            os.kill(process.pid, sent)
        output, errors = process.communicate(timeout=3 * SOON)
        assert time.monotonic() - began < SOON
        assert process.returncode == code
        assert "Traceback" not in errors
        assert output == ""
        deadline = time.monotonic() + SOON  # multiprocessing's resource tracker goes last, by itself
        while _alive(pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _alive(pids) == []
        assert _files_of(pids) == []


@pytest.mark.multiprocess
def test_workers_of_a_killed_demo_end_by_themselves() -> None:
    with running("demo", "--size", "512", "--pictures", "2000", until="with the") as process:
        pids = _descendants(process.pid)
        assert len(pids) >= 4
        process.kill()
        process.wait()
        deadline = time.monotonic() + SOON
        while _alive(pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _alive(pids) == []


# Workers ----------------------------------------------------------------------------------------------------------


def _raise(rank: int, pipe: object) -> None:
    raise ValueError(f"worker {rank} cannot go on")


def _die(rank: int, pipe: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("target", "why"), [(_raise, "worker 0 cannot go on"), (_die, "was killed by SIGKILL")])
def test_failure_of_a_worker_is_the_parents_error(target: object, why: str) -> None:
    with Team(1, target) as team, pytest.raises(WorkerError, match=why):  # type: ignore[arg-type]
        run(team.answers())


# Benchmarks -------------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_bench_small_prints_tables() -> None:
    done = aioarena("bench", "small", "--quick", "--readers", "1", "2")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if re.match(r"[12] +[\d,]+ ", line)]
    assert len(rows) == 4
    assert "pickle alone" in done.stdout


@pytest.mark.multiprocess
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_bench_small_prints_json(loop: str) -> None:
    done = aioarena("bench", "small", "--quick", "--readers", "1", "--json", "--loop", loop)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["machine"]["aioarena"] == __version__
    assert document["settings"]["loop"] == loop
    records = [record for section in document["sections"] for record in section["records"]]
    assert [(record["readers"], record["way"]) for record in records] == [(1, "alone"), (1, "together")]
    assert all(record[key] > 0 for record in records for key in ("sender_seconds", "reader_cpu_seconds"))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("copy", "Handing over alone"),
        ("placement", "The default min_bytes is"),
        ("faults", "SenderLostError"),
        ("memory", "prefault"),
    ],
)
def test_other_benches_print_tables(name: str, expected: str) -> None:
    done = aioarena("bench", name, "--quick")
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


# Arguments --------------------------------------------------------------------------------------------------------


def test_version() -> None:
    assert aioarena("--version").stdout == f"aioarena {__version__}\n"


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        cli.main([*command, "--help"])
    assert exit_.value.code == 0
    return capsys.readouterr().out


def examples_in(text: str) -> list[list[str]]:
    """Arguments of the commands that a text shows, without what is piped on and what is said beside them."""
    lines = re.findall(r"^(?:  |\$ )aioarena ([^|>\n]*?)(?:   .*|  .*| [|>].*)?$", text, re.MULTILINE)
    return [shlex.split(line) for line in lines if "COMMAND" not in line]


COMMANDS = ["demo", "bench", "ps", "top", "inspect", "doctor", "clean", "relay", "completion"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_work_and_exit_codes(capsys: pytest.CaptureFixture[str], command: str) -> None:
    text = help_of(capsys, command)
    examples = examples_in(text)
    assert len(examples) >= 2
    for example in examples:
        assert example[0] == command
        cli._parser().parse_args(example)
    assert re.search(r"^exit codes?: 0", text, re.MULTILINE)


def test_help_names_all_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys)
    (listed,) = [action.choices for action in cli._parser()._actions if action.choices]
    assert {*COMMANDS} <= {*listed}  # type: ignore[misc]
    assert {example[0] for example in examples_in(text)} >= {"demo", "bench", "ps", "top", "inspect", "doctor", "clean"}
    for example in examples_in(text):
        cli._parser().parse_args(example)
    assert re.findall(r"^  (\d+) ", text[text.index("exit codes:") :], re.MULTILINE) == ["0", "1", "2", "130", "143"]


def test_examples_in_the_documentation_work() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    examples = examples_in(text)
    assert {example[0] for example in examples} >= {*COMMANDS} - {"demo", "bench"}
    for example in examples:
        cli._parser().parse_args(example)


def test_what_the_system_refuses_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(**_: object) -> int:
        raise PermissionError(13, "Permission denied", "/proc")

    monkeypatch.setattr("aioarena._look.commands.ps", refused)
    assert cli.main(["ps"]) == 1
    assert capsys.readouterr().err == "aioarena: error: [Errno 13] Permission denied: '/proc'\n"


# Completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["ins"], ["inspect"]),
        (["bench", "pl"], ["placement"]),
        (["top", "--o"], ["--once"]),
        (["demo", "--loop", "uv"], ["uvloop"]),
        (["demo", "--image", "README"], ["README.md"]),
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], words: list[str], completed: list[str]) -> None:
    """Commands, options, choices, and files where a file is asked for."""
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    ask = "COMP_WORDS=(aioarena {}); COMP_CWORD={}; COMPREPLY=(); _shtab_aioarena; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", script + "\n" + ask.format(shlex.join(words), len(words))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=SOON,
    )
    assert done.stdout.split() == completed


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_scripts(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert cli.main(["completion", shell]) == 0
    assert "inspect" in capsys.readouterr().out


def test_without_shtab_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip install 'aioarena[cli]'" in captured.err
    assert captured.err.count("\n") == 1


def test_help_of_compare_names_what_there_is() -> None:
    done = aioarena("bench", "compare", "--help")
    assert done.returncode == 0
    assert {*SCENARIOS, *ALTERNATIVES, "--svg", "--limit"} <= set(re.findall(r"[\w-]+", done.stdout))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["demo", "--readers", "0"], "must be at least 1, not 0"),
        (["demo", "--size", "31"], "must be at least 32, not 31"),
        (["demo", "--size", "large"], "invalid number value: 'large'"),
        (["demo", "--loop", "trio"], "invalid choice: 'trio'"),
        (["bench"], "required: BENCH"),
        (["inspect"], "required: PID|NAME"),
        (["top", "--interval", "0"], "must be from 0.05 to 3600, not 0"),
        (["ps", "--interval", "nan"], "must be from 0.05 to 3600, not nan"),
        (["ps", "--interval", "often"], "invalid number value: 'often'"),
        (["completion", "cmd.exe"], "invalid choice: 'cmd.exe'"),
        (["bench", "compare", "--readers", "0"], "must be at least 1, not 0"),
        (["bench", "compare", "--scenarios", "all"], "invalid choice: 'all'"),
        (["bench", "compare", "--alternatives", "pigeon"], "invalid choice: 'pigeon'"),
    ],
)
def test_wrong_arguments_are_explained(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
