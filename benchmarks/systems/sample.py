"""Sampling alone, by apportion's engines. Options: sampler (shared or generate)."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from apportion.data.sampler import Limits
from apportion.modules import GenerateSampler, Policy, SharedPrefixSampler
from benchmarks.work import answer, job

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def main() -> None:
    work = job()
    policy = Policy(work.model, dtype=DTYPES[work.precision])  # type: ignore[arg-type]
    sampler = {"shared": SharedPrefixSampler, "generate": GenerateSampler}[work.options["sampler"]]()
    prefixes = [policy.encode_prompt(prompt) for prompt in work.prompts]
    seconds = []
    for step in range(work.warm_up + work.steps):
        start = time.perf_counter()
        samples = sampler.sample(
            policy,
            prefixes,
            work.group_size,
            "rollout",
            Limits(work.tokens),
            prompt_ids=range(len(prefixes)),
            step=step,
        )
        seconds.append(time.perf_counter() - start)
    answer(seconds={"sample": seconds[work.warm_up :]}, tokens=int(samples.mask.sum()))


main()
