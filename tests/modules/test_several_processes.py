"""Two processes that hold the weights of one policy together do what one process does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.modules.one_of_two import LENGTHS

ROOT = Path(__file__).parents[2]
SECONDS = 55


def run_all(folder: Path) -> dict[str, dict]:
    """What each process found, by rank. All are killed when the time is up or one of them fails."""
    running = {}
    for rank in ("0", "1", "alone"):
        place = {} if rank == "alone" else {"LOCAL_RANK": rank}
        with (folder / f"{rank}.txt").open("w") as log:
            running[rank] = subprocess.Popen(
                [sys.executable, "-m", "tests.modules.one_of_two", str(folder), rank],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **place},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    deadline = time.monotonic() + SECONDS
    try:
        while any(process.poll() is None for process in running.values()):
            if time.monotonic() > deadline or any(process.poll() for process in running.values()):
                break
            time.sleep(0.1)
        codes = {rank: process.poll() for rank, process in running.items()}
    finally:
        for process in running.values():
            process.kill()  # one that waits for the other does not listen to less
            process.wait()
    if any(code != 0 for code in codes.values()):
        said = "\n".join(f"---- {rank}, code {codes[rank]}\n{(folder / f'{rank}.txt').read_text()}" for rank in codes)
        pytest.fail(f"codes {codes} (None: killed, at most after {SECONDS} s)\n{said}")
    return {rank: torch.load(folder / f"{rank}.pt") for rank in running}


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    found = run_all(tmp_path)
    alone = found["alone"]
    for rank, tokens in LENGTHS.items():
        ours, theirs = found[rank][rank], alone[rank]
        assert ours["decoded leanly"]
        assert theirs["decoded leanly"]
        for part in ("same", "own", "scores"):
            for name, value in ours[part].items():
                torch.testing.assert_close(value, theirs[part][name], rtol=0, atol=1e-10)
        assert ours["own"]["ids"].shape[1] == tokens
        for signal in ("score_norms", "answer_influence"):
            assert float(theirs[signal].sum()) > 0
            torch.testing.assert_close(ours[signal], theirs[signal], rtol=1e-10, atol=1e-12)
        assert len(alone["gradients"]) == 4  # two steps on each of two rollout batches
        for gradient, expected in zip(found[rank]["gradients"], alone["gradients"], strict=True):
            assert float((gradient - expected).norm() / expected.norm()) < 1e-10
        assert float((found[rank]["weights"] - alone["weights"]).norm() / alone["weights"].norm()) < 1e-12
    assert found["0"]["micro_batches"] != found["1"]["micro_batches"]
