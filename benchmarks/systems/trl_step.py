"""Steps of TRL's GRPOTrainer. Options: batch (completions in a forward pass), gradient_checkpointing."""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from benchmarks.work import answer, distinct_characters, job


class Steps(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def main() -> None:
    work = job()
    rows = len(work.prompts) * work.group_size
    batch = work.options["batch"]
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=rows // batch,
            num_generations=work.group_size,
            max_completion_length=work.tokens,
            max_steps=work.warm_up + work.steps,
            gradient_checkpointing=work.options["gradient_checkpointing"],
            bf16=work.precision == "bf16",
            model_init_kwargs={"dtype": "float32"},
            use_cpu=True,
            beta=0.0,
            learning_rate=1e-6,
            loss_type="dapo",
            save_strategy="no",
            report_to=[],
            logging_steps=1000,
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            work.model,
            distinct_characters,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": p}]} for p in work.prompts]),
            processing_class=AutoTokenizer.from_pretrained(work.model),
            callbacks=[steps],
        )
        generation: list[float] = []
        tokens: list[int] = []
        own = trainer._generate

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = own(*args, **options)
            generation.append(time.perf_counter() - start)
            tokens.append(sum(len(ids) for ids in result[1]))
            return result

        trainer._generate = timed
        trainer.train()
    sampled, whole = generation[work.warm_up :], steps.seconds[work.warm_up :]
    answer(
        seconds={"step": whole, "rollout": sampled, "update": [a - b for a, b in zip(whole, sampled, strict=True)]},
        tokens=tokens[-1],
        versions={"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
    )


main()
