"""Sampling alone, by vLLM on the CPU, compiled."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import vllm

from benchmarks.work import answer, job

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def main() -> None:
    work = job()
    engine = vllm.LLM(
        work.model,
        dtype=DTYPES[work.precision],
        max_model_len=512,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.3,
    )
    limits = vllm.SamplingParams(
        n=work.group_size, temperature=1.0, max_tokens=work.tokens, ignore_eos=True, logprobs=0
    )
    messages = [[{"role": "user", "content": prompt}] for prompt in work.prompts]
    seconds, tokens = [], 0
    for _ in range(work.warm_up + work.steps):
        start = time.perf_counter()
        outputs = engine.chat(messages, limits, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    answer(seconds={"sample": seconds[work.warm_up :]}, tokens=tokens, versions={"vllm": vllm.__version__})


if __name__ == "__main__":
    main()
