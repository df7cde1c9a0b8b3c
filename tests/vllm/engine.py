"""Runs vLLM's AsyncLLM with a tiny model and two workers, and tells as JSON what it did. Needs vllm, see `make_env.sh`.

    python engine.py MODEL_DIRECTORY [--arena] [--kill] [--idle SECONDS]

Whether the channels are vLLM's or aioarena's is said by the environment, as for any vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

# Before anything of vLLM is imported: one core a worker, no network.
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
}

HIDDEN = 4096
WORDS = 4000
# Bytes of a prompt of embeddings: HIDDEN values of bfloat16 a token.
TOKENS_LARGE = 4500  # 36.9 MB
TOKENS_SMALL = 300  # 2.5 MB


def make_model(directory: Path) -> None:
    """A Llama of one layer with random weights, and a tokenizer trained on the spot."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"], vocab_size=WORDS)
    tokenizer.train_from_iterator((f"word{number}" for number in range(WORDS)), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def workers() -> list[int]:
    """Processes of the workers: named by vLLM, found among our descendants."""
    return [pid for pid in children(os.getpid()) if "Worker" in Path(f"/proc/{pid}/comm").read_text()]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def generate(engine: Any, prompt: Any, name: str, tokens: int = 8) -> dict[str, Any]:
    from vllm import SamplingParams

    began, first, output = time.monotonic(), None, []
    parameters = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
    async for result in engine.generate(prompt, parameters, request_id=name):
        first = first or time.monotonic() - began
        output = list(result.outputs[0].token_ids)
    return {"name": name, "tokens": output, "first": first}


def embeddings(tokens: int, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {"prompt_embeds": (torch.randn(tokens, HIDDEN, generator=generator) * 0.02).to(torch.bfloat16)}


async def work(engine: Any, idle: float) -> dict[str, Any]:
    report: dict[str, Any] = {}
    words = [" ".join(f"word{(seed * 37 + i * 11) % WORDS}" for i in range(20)) for seed in range(4)]
    await generate(engine, words[0], "warm up")
    small = await asyncio.gather(*(generate(engine, prompt, f"small {i}") for i, prompt in enumerate(words)))
    large = [await generate(engine, embeddings(TOKENS_LARGE, seed), f"large {seed}") for seed in range(2)]
    mixed = await asyncio.gather(
        *(generate(engine, embeddings(TOKENS_SMALL, 10 + seed), f"embeddings {seed}") for seed in range(3)),
        *(generate(engine, prompt, f"beside {i}") for i, prompt in enumerate(words)),
    )
    report["requests"] = [*small, *large, *mixed]
    if idle:
        pids = workers()
        before = [cpu_seconds(pid) for pid in pids]
        await asyncio.sleep(idle)
        report["idle"] = [(cpu_seconds(pid) - start) / idle for pid, start in zip(pids, before, strict=True)]
    return report


async def kill_a_worker(engine: Any) -> dict[str, Any]:
    """What a request sees whose worker is killed."""
    from vllm.v1.engine.exceptions import EngineDeadError

    await generate(engine, "word1 word2", "warm up")
    request = asyncio.create_task(generate(engine, "word3 word4", "cut off", tokens=6000))
    await asyncio.sleep(1.0)
    victim = workers()[-1]
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    try:
        async with asyncio.timeout(60):
            await request
    except EngineDeadError as error:
        return {"error": type(error).__name__, "seconds": time.monotonic() - began}
    return {"error": None}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--arena", action="store_true")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--idle", type=float, default=0.0)
    options = parser.parse_args()
    if not (options.model / "config.json").exists():
        make_model(options.model)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    began = time.monotonic()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(options.model),
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
            enforce_eager=True,
            enable_prompt_embeds=True,
            enable_shm_tensor_arena=options.arena,
            max_model_len=8192,
            max_num_seqs=8,
            dtype="bfloat16",
            seed=0,
        )
    )
    report: dict[str, Any] = {"started": time.monotonic() - began}
    try:
        report |= await kill_a_worker(engine) if options.kill else await work(engine, options.idle)
    finally:
        engine.shutdown()
    sys.stdout.write("\nREPORT " + json.dumps(report) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
