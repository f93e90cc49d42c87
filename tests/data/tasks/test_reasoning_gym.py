import json
import random
import re
import time
from fractions import Fraction

import numpy
import pytest

from apportion.data import ReasoningGym, RunError, UsageError
from apportion.data.tasks import reasoning_gym as module

SUMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def chain_sum(**options) -> ReasoningGym:
    return ReasoningGym("chain_sum", SUMS, **{"train_prompts": 60, "validation_prompts": 20, **options})


def test_prompts_are_deterministic_and_disjoint():
    task, again = chain_sum(seed=5), chain_sum(seed=5)
    train, validation = task.prompts("train"), task.prompts("validation")
    assert train.to_dict() == again.prompts("train").to_dict()
    assert validation.to_dict() == again.prompts("validation").to_dict()
    assert len(train) == 60
    assert len(set(validation["question"])) == 20
    assert not set(train["question"]) & set(validation["question"])
    assert chain_sum(seed=6, train_prompts=61).prompts("validation")["question"][:] != validation["question"][:]


def test_training_prompts_keep_the_mixture_of_the_data_set():
    """Half of the sums have two terms, though there are only 200 of these and 4000 longer ones. Those in the validation
    split are left out: about 40 of 200, and about 2 in 100 of the longer ones."""
    metadata = chain_sum(train_prompts=1000, validation_prompts=80).prompts("train")["metadata"]
    short = sum(json.loads(row)["num_terms"] == 2 for row in metadata) / 1000
    expected = 0.5 * 160 / 200 / (0.5 * 160 / 200 + 0.5 * 0.98)
    assert abs(short - expected) < 0.06  # four standard errors


def test_more_training_prompts_leave_the_validation_prompts_as_they_are():
    assert chain_sum().prompts("validation").to_dict() == chain_sum(train_prompts=90).prompts("validation").to_dict()


def test_neighbouring_seeds_share_few_questions():
    """reasoning-gym seeds row i with seed + i."""
    options = {"options": {"min_digits": 6, "max_digits": 6}, "train_prompts": 40, "validation_prompts": 1}
    one, two = (ReasoningGym("chain_sum", seed=seed, **options).prompts("train")["question"] for seed in (0, 1))
    assert not set(one) & set(two)


def test_too_few_distinct_questions_is_an_error_of_one_line():
    task = ReasoningGym("coin_flip", {"min_trials": 3, "max_trials": 3}, train_prompts=200, validation_prompts=50)
    with pytest.raises(
        UsageError,
        match=r"'coin_flip' gave \d+ different questions .* and 0 others .* 2600 draws, but 50 and 200 are",
    ) as error:
        task.prompts("train")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "chain_sums"}, "no data set 'chain_sums': did you mean chain_sum"),
        ({"name": "chain_sum", "options": {"min_term": 2}}, "has no option 'min_term': did you mean min_terms"),
        ({"name": "chain_sum", "options": {"seed": 2}}, "the task sets it"),
        ({"name": "chain_sum", "options": {"min_terms": 3, "max_terms": 2}}, "refuses the options"),
        ({"name": "chain_sum", "strict_extract": "boxd"}, "strict_extract is 'boxd': did you mean boxed"),
        ({"name": "chain_sum", "train_prompts": 0}, "train_prompts=0"),
        ({"name": "chain_sum", "question_format": "Solve it."}, "must contain {question}"),
        ({"name": "composite", "options": {"datasets": [{"nam": "chain_sum"}]}}, "give a list of {name, weight"),
    ],
)
def test_wrong_requests_are_errors_of_one_line(arguments, message):
    with pytest.raises(UsageError, match=message) as error:
        ReasoningGym(**arguments)
    assert "\n" not in str(error.value)


def test_an_extractor_that_cannot_read_the_answers_is_an_error():
    task = ReasoningGym("word_sorting", train_prompts=5, validation_prompts=2, extract="last_number")
    with pytest.raises(UsageError, match="no answer of 'word_sorting' is a number"):
        task.prompts("train")


def test_prompt_is_text_or_chat_messages():
    plain = chain_sum(question_format="Q: {question}\nA:").prompts("train")[0]
    assert plain["prompt"] == f"Q: {plain['question']}\nA:"
    chat = chain_sum(system_prompt="Be brief.").prompts("train")[0]
    assert chat["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": chat["question"]},
    ]


def test_own_scorer_under_the_lenient_and_the_strict_extractor():
    task = chain_sum(strict_extract="answer_tags")
    row = task.prompts("train")[0]
    right = row["answer"]
    wrong = str(int(right) + 1)
    v = task.verify(f"It is <answer>{right}</answer>", row)
    assert v.terms == {"accuracy": 1.0, "score": 1.0, "accuracy_strict": 1.0}
    assert v.answer_span == (14, 14 + len(right))
    assert task.verify(f"It is {right}.", row).terms == {"accuracy": 1.0, "score": 1.0, "accuracy_strict": 0.0}
    assert task.verify(f"<answer>{wrong}</answer> not {right}", row).terms["accuracy_strict"] == 0.0
    v = task.verify("I do not know", row)
    assert v.terms == {"accuracy": 0.0, "score": 0.0, "accuracy_strict": 0.0}
    assert v.answer_span is None


def test_partial_credit_of_a_scorer_is_no_accuracy():
    """power_function gives 0.01 for any answer that it can read."""
    task = ReasoningGym("power_function", train_prompts=3, validation_prompts=1)
    v = task.verify("123456789", task.prompts("train")[0])
    assert v.terms == {"accuracy": 0.0, "score": 0.01}


def test_an_answer_that_the_scorer_cannot_read_is_wrong():
    """prime_factorization raises ValueError on anything but numbers and ×."""
    task = ReasoningGym("prime_factorization", train_prompts=3, validation_prompts=1, extract="text")
    row = task.prompts("train")[0]
    assert task.verify("two times three", row).terms == {"accuracy": 0.0, "score": 0.0}
    assert task.verify(row["answer"], row).terms == {"accuracy": 1.0, "score": 1.0}


def test_a_scorer_that_fails_on_the_reference_too_raises(monkeypatch):
    task = chain_sum()
    row = task.prompts("train")[0]

    def broken(answer, entry):
        raise KeyError("metadata")

    monkeypatch.setattr(task._scorer, "score_answer", broken)
    with pytest.raises(KeyError):
        task.verify("5", row)


def test_a_scorer_that_hangs_is_stopped(monkeypatch):
    task = chain_sum()
    row = task.prompts("train")[0]
    monkeypatch.setattr(module, "JUDGE_SECONDS", 0.05)
    monkeypatch.setattr(task._scorer, "score_answer", lambda answer, entry: time.sleep(60))
    with pytest.raises(TimeoutError, match="the scorer of 'chain_sum' took longer than"):
        task.verify("5", row)


def test_metadata_survives_json_exactly():
    """Scorers compare tuples; JSON has only lists."""
    value = {"a": (1, [2, (3,)]), "b": {1: "x", (0, 1): None}, "c": numpy.int64(4), "d": {}, "e": Fraction(1, 3)}
    packed = json.loads(json.dumps(module._pack(value), default=module._plain))
    assert module._unpack(packed) == {**value, "c": 4}


def test_other_integers_are_stored_as_plain_ones():
    from sympy import Integer

    large = 3**90
    packed = json.dumps(module._pack({"a": (Integer(large), Integer(-2)), "b": 2**70}), default=module._plain)
    found = module._unpack(json.loads(packed))
    assert found == {"a": (large, -2), "b": 2**70}
    assert all(type(number) is int for number in found["a"])


@pytest.fixture
def chain_sum_with(monkeypatch):
    """Sums whose row i is changed by `change(i, entry)`."""
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    original = ChainSumDataset.__getitem__

    def changed_by(change) -> ReasoningGym:
        def changed(self, index):
            entry = original(self, index)
            change(index, entry)
            return entry

        monkeypatch.setattr(ChainSumDataset, "__getitem__", changed)
        return chain_sum()

    return changed_by


def test_rows_that_cannot_be_made_or_stored_are_left_out_with_one_warning(chain_sum_with, caplog):
    def change(index, entry):
        if index % 10 == 3:
            raise ZeroDivisionError(f"in row {index}")
        if index % 10 == 5:
            entry["metadata"]["odd"] = object()
        if index % 10 == 6:
            entry["metadata"]["odd"] = 10**5000
        if index % 10 == 7:
            entry["answer"] = 2**70
        if index % 10 == 8:
            entry["question"] += chr(0xD800)  # half a character

    task = chain_sum_with(change)
    train, validation = task.prompts("train"), task.prompts("validation")
    assert (len(train), len(validation)) == (60, 20)
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    left_out, drawn = map(int, re.findall("[0-9]+", message)[:2])
    assert abs(left_out - drawn / 2) <= 3
    assert "'chain_sum' could not be made or stored and are left out (the first, row 3: Zero" in message


def test_too_few_rows_are_left(chain_sum_with, caplog):
    def change(index, entry):
        if index >= 30:
            raise ValueError("no more")

    with pytest.raises(UsageError, match=r"20 different .* and \d+ others .* in 900 draws"):
        chain_sum_with(change).prompts("train")
    assert "870 of 900 rows" in caplog.text


def test_an_error_if_every_row_fails(chain_sum_with, caplog):
    def change(index, entry):
        raise ValueError("never")

    with pytest.raises(RunError, match=r"failed on each of 100 rows \(row 0: ValueError\('never'\)\)"):
        chain_sum_with(change).prompts("train")
    assert not caplog.records


def test_rearc_scores_its_own_answer():
    """Its scorer compares with tuples of tuples in the metadata."""
    task = ReasoningGym("rearc", train_prompts=2, validation_prompts=1, extract="text")
    row = task.prompts("train")[0]
    assert task.verify(row["answer"], row).terms["accuracy"] == 1.0


def test_generating_neither_uses_nor_changes_the_global_generators():
    """list_functions draws from `random`, pool_matrix seeds numpy."""
    for name in ("list_functions", "pool_matrix"):
        options = {"train_prompts": 6, "validation_prompts": 2, "extract": "text"}
        random.seed(1)
        numpy.random.seed(1)
        before = random.getstate(), repr(numpy.random.get_state())
        one = ReasoningGym(name, **options).prompts("train").to_dict()
        assert (random.getstate(), repr(numpy.random.get_state())) == before
        random.seed(2)
        assert ReasoningGym(name, **options).prompts("train").to_dict() == one


def test_a_composite_of_two():
    parts = [{"name": "chain_sum", "weight": 1.0, "config": SUMS}, {"name": "gcd", "weight": 1.0, "config": {}}]
    task = ReasoningGym("composite", {"datasets": parts}, train_prompts=20, validation_prompts=4)
    rows = task.prompts("train")
    assert {json.loads(row["metadata"])["source_dataset"] for row in rows} == {"chain_sum", "gcd"}
    assert all(task.verify(row["answer"], row).terms["accuracy"] == 1.0 for row in rows)


def test_data_sets_that_depend_on_the_hash_seed_are_warned_of(monkeypatch, caplog):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    ReasoningGym("ransom_note", train_prompts=2, validation_prompts=1, extract="text").prompts("train")
    assert "set PYTHONHASHSEED=0" in caplog.text
    caplog.clear()
    chain_sum().prompts("train")
    assert not caplog.records


@pytest.mark.slow
def test_every_data_set_gives_prompts_and_accepts_its_own_answers():
    from reasoning_gym.factory import DATASETS

    for name in sorted(set(DATASETS) - {"composite"}):
        task = ReasoningGym(name, train_prompts=3, validation_prompts=1, extract="text")
        for row in task.prompts("train"):
            if row["answer"] is not None:
                assert task.verify(row["answer"], row).terms["accuracy"] == 1.0, name
