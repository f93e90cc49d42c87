"""DatasetTask: questions with reference answers from anything that `datasets.load_dataset` reads."""

import json
import logging
import random
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.data_files import EmptyDatasetError

from ..errors import UsageError, nearest
from .answers import Extract, check_extract, check_readable, extract, one_line, same_answer
from .base import Split, Task, Verdict

log = logging.getLogger(__name__)

Convention = Literal["plain", "gsm8k", "math"]

_FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_LENIENT: dict[Convention, Extract] = {"plain": "last_number", "gsm8k": "last_number", "math": "boxed"}
_KINDS = "a name on the hub, a folder, or .jsonl, .json, .csv or .parquet files"


class DatasetTask(Task):
    r"""Questions and reference answers of a data set; answers are judged by math-verify.

    Terms: "accuracy" (the answer read by `extract` equals the reference), and "accuracy_strict" under `strict_extract`.
    Equality is that of `apportion.data.tasks.answers.same_answer`; a judgement that takes longer than 5 seconds is a
    missing verdict. The answer span is that of `extract`.

    All columns of the data set are kept for reward callables; "prompt" (as the policy gets it) and "reference" (the
    bare answer) are added, over columns of these names if there are any. Rows without a question or an answer are left
    out, and so are training rows whose prompt is in the validation split too; both are logged, and counted in
    `left_out`.

    Args:
        path: a name on the hub, a local folder (also one written by save_to_disk), or one or several .jsonl, .json,
            .csv or .parquet files.
        name: the configuration of the data set, where it has several.
        train_split: the split to train on. Files are one split, "train".
        validation_split: the split to validate on; null holds `validation_share` of the training split out.
        validation_share: the share of different prompts that is held out when there is no validation_split.
        prompt_column: holds the question, as text or as a list of chat messages.
        answer_column: holds the answer, as the convention says.
        prompt_template: a template around the question, with {prompt} where it goes. Not for chat messages.
        system_prompt: a system message that says how to answer. With one, a prompt is a list of chat messages, else it
            is what the column holds.
        convention: how the answer stands in answer_column: "plain" (the answer alone), "gsm8k" (a solution with the
            answer after ####), "math" (a solution with the answer in \boxed{}).
        extract: how the answer is read from a completion: last_number, answer_tags, hashes, boxed or text. Null goes by
            the convention: last_number for plain and gsm8k, boxed for math.
        strict_extract: a second, stricter way to read it, judged too and logged as "accuracy_strict".
        limit: at most this many rows of each split, chosen by the seed.
        seed: which rows are held out, and which are within the limit.
    """

    verify_is_pure = True

    def __init__(
        self,
        path: str | list[str],
        name: str | None = None,
        train_split: str = "train",
        validation_split: str | None = None,
        validation_share: float = 0.1,
        prompt_column: str = "question",
        answer_column: str = "answer",
        prompt_template: str | None = None,
        system_prompt: str | None = None,
        convention: Convention = "plain",
        extract: Extract | None = None,
        strict_extract: Extract | None = None,
        limit: int | None = None,
        seed: int = 0,
    ) -> None:
        if prompt_template is not None and "{prompt}" not in prompt_template:
            raise UsageError(f"DatasetTask has prompt_template={prompt_template!r}: it must contain {{prompt}}")
        if validation_split == train_split:
            raise UsageError(
                f"DatasetTask trains and validates on the split '{train_split}': name another validation_split, or "
                "set it to null to hold out a share"
            )
        if not 0 < validation_share < 1:
            raise UsageError(f"DatasetTask has validation_share={validation_share}: give a share between 0 and 1")
        if limit is not None and limit < 1:
            raise UsageError(f"DatasetTask has limit={limit}: give at least 1, or null for all rows")
        self.paths = [str(Path(p).expanduser()) if p.startswith("~") else p for p in _listed(path)]
        if not self.paths:
            raise UsageError(f"DatasetTask has an empty path: give {_KINDS}")
        self.source = f"data set '{self.paths[0]}'" + (f" and {len(self.paths) - 1} more" if self.paths[1:] else "")
        self.name = name
        self.train_split = train_split
        self.validation_split = validation_split
        self.validation_share = validation_share
        self.prompt_column = prompt_column
        self.answer_column = answer_column
        self.prompt_template = prompt_template
        self.system_prompt = system_prompt
        if convention not in _LENIENT:
            raise UsageError(f"convention is '{convention}': {nearest(convention, _LENIENT)}")
        self.convention: Convention = convention
        check_extract(extract, "extract")
        check_extract(strict_extract, "strict_extract")
        self.extract: Extract = extract or _LENIENT[convention]
        self.strict_extract: Extract | None = strict_extract
        self.limit = limit
        self.seed = seed
        self.left_out: dict[str, int] = {}

    def prompts(self, split: Split) -> Dataset:
        return self._splits[split]

    def verify(self, completion: str, example: dict[str, Any]) -> Verdict:
        answer = extract(completion, self.extract)
        terms = {"accuracy": float(answer is not None and same_answer(answer.text, example["reference"]))}
        if self.strict_extract is not None:
            strict = extract(completion, self.strict_extract)
            same = (strict and strict.text) == (answer and answer.text)
            right = terms["accuracy"] if same else strict is not None and same_answer(strict.text, example["reference"])
            terms["accuracy_strict"] = float(right)
        return Verdict(terms=terms, answer_span=answer.span if answer else None)

    @cached_property
    def _splits(self) -> dict[Split, Dataset]:
        loaded = self._load()
        train = self._prepared(self._named(loaded, self.train_split, "train_split"))
        if self.validation_split is not None:
            validation = self._prepared(self._named(loaded, self.validation_split, "validation_split"))
            held_out = set(_keys(validation))
        else:
            different = list(dict.fromkeys(_keys(train)))
            if len(different) < 2:
                raise UsageError(
                    f"{self.source} has {len(different)} different prompt: it takes two to hold one out for validation"
                )
            count = min(len(different) - 1, max(1, round(self.validation_share * len(different))))
            held_out = set(random.Random(f"{self.seed}/validation").sample(different, count))
            validation = train.select([row for row, key in enumerate(_keys(train)) if key in held_out])
        kept = [row for row, key in enumerate(_keys(train)) if key not in held_out]
        if self.validation_split is not None and len(kept) < len(train):
            self._leave_out("training rows whose prompt is in the validation split too", len(train) - len(kept))
        if not kept:
            raise UsageError(
                f"every training prompt of {self.source} is in its split '{self.validation_split}' too: nothing is "
                "left to train on; name another train_split or validation_split"
            )
        check_readable(train["reference"], self.extract, self.source)
        return {"train": self._limited(train.select(kept)), "validation": self._limited(validation)}

    def _load(self) -> DatasetDict:
        suffixes = {Path(path).suffix for path in self.paths}
        kinds = {_FILES.get(suffix) for suffix in suffixes}
        files = None not in kinds
        missing = [path for path in self.paths if (files or _looks_local(path)) and not Path(path).exists()]
        if missing:
            raise UsageError(f"no file or folder '{missing[0]}' (data.task.path): give {_KINDS}")
        if len(self.paths) > 1 and (not files or len(kinds) > 1):
            raise UsageError(f"data.task.path is {self.paths}: a list must be files of one kind ({', '.join(_FILES)})")
        folder = Path(self.paths[0])
        try:
            if files:
                loaded = load_dataset(str(kinds.pop()), name=self.name, data_files=self.paths)
            elif (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
                loaded = load_from_disk(self.paths[0])
            else:
                loaded = load_dataset(self.paths[0], name=self.name)
        except Exception as error:  # the builders raise a zoo
            if isinstance(error, StopIteration | EmptyDatasetError) or "corresponds to no data" in str(error):
                raise UsageError(f"{self.source} is empty: give a data set with at least one row") from error
            reason = one_line(error.__cause__ or error)
            raise UsageError(f"cannot load {self.source} ({reason}): give {_KINDS}") from error
        return loaded if isinstance(loaded, DatasetDict) else DatasetDict({"train": loaded})

    def _named(self, loaded: DatasetDict, split: str, option: str) -> Dataset:
        if split not in loaded:
            raise UsageError(
                f"{self.source} has no split '{split}' (data.task.{option}); its splits: {', '.join(map(str, loaded))}"
            )
        if not len(loaded[split]):
            raise UsageError(f"the split '{split}' of {self.source} is empty: give one with at least one row")
        return loaded[split]

    def _prepared(self, rows: Dataset) -> Dataset:
        """The rows that have a question and an answer, with the columns "prompt" and "reference"."""
        for option in ("prompt_column", "answer_column"):
            column = getattr(self, option)
            if column not in rows.column_names:
                raise UsageError(
                    f"{self.source} has no column '{column}' (data.task.{option}): {nearest(column, rows.column_names)}"
                )
        kept, prompts, references = [], [], []
        for row, (question, answer) in enumerate(zip(rows[self.prompt_column], rows[self.answer_column], strict=True)):
            prompt, reference = self._prompt(question), self._reference(answer)
            if prompt is not None and reference is not None:
                kept.append(row)
                prompts.append(prompt)
                references.append(reference)
        if not kept:
            raise UsageError(
                f"no row of {self.source} has both a question in '{self.prompt_column}' and an answer in "
                f"'{self.answer_column}' by the convention '{self.convention}': set data.task.convention or the columns"
            )
        if len(kept) < len(rows):
            self._leave_out("rows without a question or an answer", len(rows) - len(kept))
        chosen = rows.select(kept)
        chosen = chosen.remove_columns([name for name in ("prompt", "reference") if name in chosen.column_names])
        return chosen.add_column("prompt", prompts).add_column("reference", references)  # type: ignore[arg-type]

    def _prompt(self, question: Any) -> str | list[dict[str, str]] | None:
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        if isinstance(question, list):
            if not all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in question):
                raise UsageError(
                    f"column '{self.prompt_column}' of {self.source} holds lists that are no chat messages: give text, "
                    "or messages with role and content"
                )
            if self.prompt_template is not None:
                raise UsageError(
                    f"column '{self.prompt_column}' of {self.source} holds chat messages, around which "
                    "data.task.prompt_template cannot go: leave it out"
                )
            messages = [{"role": message["role"], "content": message["content"]} for message in question]
            return system + messages if messages else None
        text = "" if question is None else str(question)
        if not text.strip():
            return None
        if self.prompt_template is not None:
            text = self.prompt_template.replace("{prompt}", text)
        return [*system, {"role": "user", "content": text}] if system else text

    def _reference(self, answer: Any) -> str | None:
        if isinstance(answer, list | dict):
            raise UsageError(
                f"column '{self.answer_column}' of {self.source} holds a {type(answer).__name__}: give a column of "
                "text or numbers"
            )
        text = "" if answer is None else str(answer)
        how: dict[Convention, Extract] = {"plain": "text", "gsm8k": "hashes", "math": "boxed"}
        found = extract(text, how[self.convention])
        return found.text if found else None

    def _limited(self, rows: Dataset) -> Dataset:
        if self.limit is None or len(rows) <= self.limit:
            return rows
        return rows.select(sorted(random.Random(f"{self.seed}/limit").sample(range(len(rows)), self.limit)))

    def _leave_out(self, what: str, count: int) -> None:
        self.left_out[what] = self.left_out.get(what, 0) + count
        log.warning("%s: %d %s were left out", self.source, count, what)


def _listed(path: str | list[str]) -> list[str]:
    return [path] if isinstance(path, str) else list(path)


def _looks_local(path: str) -> bool:
    """A hub name is `name` or `owner/name`."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or "\\" in path


def _keys(rows: Dataset) -> Iterable[str]:
    """A prompt's text, by which two prompts are the same."""
    return [json.dumps(prompt) for prompt in rows["prompt"]]
