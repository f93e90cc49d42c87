"""The Python environments of the systems that apportion is held against, each in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

PINS = Path(__file__).parent / "peers"
FOLDER = Path("build/peers")
VARIABLES = {"vllm": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}}


def python(name: str) -> str:
    """The interpreter that has the peer, installed from peers/<name>.txt on first use. Raises CalledProcessError."""
    if name == "own":
        return sys.executable
    pins, place = PINS / f"{name}.txt", FOLDER / name
    installed = place / "installed.txt"
    if not installed.exists() or installed.read_text() != pins.read_text():
        print(f"installing {name} (pinned in {pins}) …", flush=True)
        pip = [str(place / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        torch = [line for line in pins.read_text().splitlines() if line.startswith("torch==")]
        subprocess.run([*pip, "install", *torch], check=True)  # alone first: a CPU build stays the one that is used
        subprocess.run([*pip, "install", "--no-deps", "--requirement", str(pins)], check=True)
        installed.write_text(pins.read_text())
    return str(place / "bin/python")


def environment(name: str) -> dict[str, str]:
    """The variables that a system's process runs with."""
    return dict(os.environ) | VARIABLES.get(name, {})
