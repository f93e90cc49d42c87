"""What this machine can do: matrix products by dtype, and copying."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.work import answer

SIZE, FLOATS, REPEATS = 2048, 2**27, 7


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    gemm = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        left, right = torch.randn(SIZE, SIZE, dtype=dtype), torch.randn(SIZE, SIZE, dtype=dtype)
        gemm[name] = 2 * SIZE**3 / best(lambda a=left, b=right: a @ b) / 1e9
    source = torch.ones(FLOATS)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size()  # read and written
    answer(cores=os.cpu_count(), gemm_gflops=gemm, copy_gbs=copied / best(lambda: target.copy_(source)) / 1e9)


main()
