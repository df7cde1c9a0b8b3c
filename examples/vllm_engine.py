"""vLLM over aioarena: an environment variable, and nothing else.

Run it:     python examples/vllm_engine.py MODEL
Expect:     a line of the log in the engine core and in each worker that says so, and what the model makes of a prompt.
            Needs vllm (here it was 0.32) and a model that two workers can share.
"""

import asyncio
import os
import sys

os.environ["AIOARENA_VLLM"] = "1"  # before vLLM starts its processes, which inherit it

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


async def main(model: str) -> None:
    arguments = AsyncEngineArgs(
        model=model,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        enforce_eager=True,
        enable_shm_tensor_arena=True,  # large tensors through the arena
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        parameters = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        async for output in engine.generate("word1 word2 word3", parameters, request_id="first"):
            tokens = output.outputs[0].token_ids
        print(f"done, {len(tokens)} tokens")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
