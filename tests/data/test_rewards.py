import logging
import math

import numpy
import pytest
import torch
from hypothesis import given, strategies as st

from apportion.data import (
    CallableReward,
    Reward,
    RunError,
    RunningSums,
    Task,
    TaskVerdict,
    UsageError,
    Verdict,
    combine,
    describe,
    verify_all,
)

FUNCTIONS = """
import math

def length(completions, **columns):
    return [float(len(text)) for text in completions]

def from_column(completions, level):
    return [value * 10 for value in level]

def all_arguments(prompts, completions, **columns):
    assert columns == {"level": columns["level"], "tag": columns["tag"]}
    return [len(p) + len(c) + v for p, c, v in zip(prompts, completions, columns["level"])]

def fails_on_bad(completions):
    if "bad" in completions:
        raise ValueError("bad row")
    return [1.0] * len(completions)

def odd_values(completions):
    odd = {"none": None, "nan": math.nan, "inf": math.inf, "huge": -1e300, "text": "1", "bool": True}
    return [odd.get(text, 2.0) for text in completions]

def sum_of_all(completions):
    return float(len(completions))

def too_short(completions):
    return [1.0] * min(len(completions), 1)

def no_completions(prompts):
    return [0.0] * len(prompts)

class Holder:
    @staticmethod
    def one(completions):
        return [1.0] * len(completions)

NUMBER = 3
"""


@pytest.fixture(autouse=True)
def _functions(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    (tmp_path / "broken_rewards.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    import sys

    sys.modules.pop("my_rewards", None)


class Fixed(Reward):
    def __init__(self, values, name="fixed", weight=1.0):
        super().__init__(name, weight)
        self.values = values

    def __call__(self, prompts, completions, verdicts, columns):
        return self.values


def run(rewards, completions, verdicts=None, **columns):
    verdicts = verdicts or [Verdict(terms={"accuracy": 1.0}) for _ in completions]
    return combine(rewards, ["p"] * len(completions), completions, verdicts, columns)


def test_the_weighted_sum_by_hand_and_every_term_on_its_own():
    verdicts = [Verdict(terms={"accuracy": 1.0, "score": 0.5}), Verdict(terms={"accuracy": 0.0, "score": 0.25})]
    rewards = [TaskVerdict(), CallableReward("my_rewards.length", weight=-0.1), Fixed([7.0, 8.0], "watched", 0.0)]
    result = run(rewards, ["abc", "ab"], verdicts)
    assert result.reward == pytest.approx([0.7, -0.2])
    assert result.valid == [True, True]
    assert result.terms == {
        "accuracy": [1.0, 0.0],
        "score": [0.5, 0.25],  # no reward, but logged
        "length": [3.0, 2.0],
        "watched": [7.0, 8.0],
    }
    assert result.failures == {}


def test_a_callable_gets_prompts_completions_and_the_columns():
    columns = {"level": [5, 6], "tag": ["x", "y"]}
    assert run([CallableReward("my_rewards.all_arguments")], ["a", "bb"], **columns).reward == [7.0, 9.0]
    assert run([CallableReward("my_rewards.from_column")], ["a", "bb"], **columns).reward == [50.0, 60.0]
    assert run([CallableReward("my_rewards.Holder.one")], ["a", "bb"], **columns).reward == [1.0, 1.0]


def test_a_column_called_prompts_does_not_take_their_place():
    columns = {"prompts": ["from the data set"], "completions": ["z" * 9]}
    result = combine([CallableReward("my_rewards.length")], ["p"], ["abc"], [Verdict(terms={"accuracy": 1.0})], columns)
    assert result.reward == [3.0]


def test_pitfall_08_only_the_rows_of_a_failing_callable_are_missing(caplog):
    reward = CallableReward("my_rewards.fails_on_bad")
    result = run([reward], ["good", "bad", "good", "bad"])
    assert result.valid == [True, False, True, False]
    assert result.reward[0] == result.reward[2] == 1.0
    assert math.isnan(result.reward[1])
    assert math.isnan(result.terms["fails_on_bad"][3])
    assert result.failures == {"fails_on_bad: raised ValueError": 2}
    run([reward], ["bad", "good"])
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "bad row" in warnings[0].getMessage()


def test_pitfall_08_none_nan_infinite_and_text_are_missing_and_counted_by_reason():
    result = run([CallableReward("my_rewards.odd_values")], ["none", "nan", "inf", "huge", "text", "bool", "fine"])
    assert result.valid == [False, False, False, False, False, True, True]
    assert result.reward[5:] == [1.0, 2.0]
    assert result.failures == {
        "odd_values: None": 1,
        "odd_values: NaN": 1,
        "odd_values: infinite": 1,
        "odd_values: beyond 1e+18": 1,
        "odd_values: a str, not a number": 1,
    }


def test_pitfall_08_a_wrong_shape_is_judged_one_by_one(caplog):
    result = run([CallableReward("my_rewards.too_short")], ["a", "b"])
    assert result.reward == [1.0, 1.0]  # alone, each call returns a list of one
    assert "returned 1 values for 2 completions" in caplog.text
    result = run([CallableReward("my_rewards.sum_of_all")], ["a", "b"])
    assert result.valid == [False, False]
    assert result.failures == {"sum_of_all: returned no list of one number a completion": 2}


def test_pitfall_08_a_missing_term_of_weight_0_leaves_the_row_in():
    result = run([TaskVerdict(), Fixed([None, 1.0], weight=0.0)], ["a", "b"])
    assert result.valid == [True, True]
    assert result.failures == {"fixed: None": 1}
    result = run([TaskVerdict(), Fixed([None, 1.0], weight=0.5)], ["a", "b"])
    assert result.valid == [False, True]
    assert result.reward[1] == 1.5


def test_pitfall_08_a_missing_verdict_is_missing_with_its_reason():
    verdicts = [Verdict(missing="verifier raised KeyError"), Verdict(terms={"accuracy": 0.0})]
    result = run([TaskVerdict()], ["a", "b"], verdicts)
    assert result.valid == [False, True]
    assert result.failures == {"accuracy: verifier raised KeyError": 1}
    result = run([TaskVerdict()], ["a"], [Verdict(missing="x")])
    assert result.valid == [False]
    result = run([CallableReward("my_rewards.length")], ["a", "b"], verdicts)  # does not need the verdict
    assert result.valid == [True, True]
    assert math.isnan(result.terms["accuracy"][0])


def test_pitfall_08_a_verifier_that_raises_gives_a_missing_verdict(caplog):
    class Fragile(RunningSums):
        def verify(self, completion, example):
            if completion == "bad":
                raise TimeoutError("took too long")
            return super().verify(completion, example)

    example = {"terms": [1, 2], "answer": 3}
    verdicts = verify_all(Fragile(train_prompts=1, validation_prompts=1), ["bad", "1+2=3;", "bad"], [example] * 3)
    assert [v.missing for v in verdicts] == ["verifier raised TimeoutError", None, "verifier raised TimeoutError"]
    assert verdicts[1].terms == {"accuracy": 1.0}
    assert verdicts[0].terms == {}
    assert caplog.text.count("took too long") == 1


@pytest.mark.parametrize("error", [UsageError, RunError])
def test_errors_for_the_user_pass_through(error):
    class Stops(Reward):
        def __call__(self, prompts, completions, verdicts, columns):
            raise error("stop here")

    class StopsToo(RunningSums):
        def verify(self, completion, example):
            raise error("stop here")

    with pytest.raises(error, match="stop here"):
        run([Stops("stops")], ["a"])
    with pytest.raises(error, match="stop here"):
        verify_all(StopsToo(train_prompts=1, validation_prompts=1), ["a"], [{}])


@pytest.mark.parametrize(
    "values",
    [
        numpy.array([1, 2]),
        torch.tensor([1.0, 2.0]),
        (1, 2),
        [numpy.float32(1), torch.tensor(2)],
        [numpy.array([1.0]), torch.tensor([2])],
    ],
)
def test_arrays_and_tensors_are_lists_of_numbers(values):
    assert run([Fixed(values)], ["a", "b"]).reward == [1.0, 2.0]


def test_values_that_are_no_numbers():
    result = run([Fixed([torch.ones(2), 10**400])], ["a", "b"])
    assert result.failures == {"fixed: a Tensor, not a number": 1, "fixed: infinite": 1}


@given(
    st.lists(st.tuples(*[st.none() | st.floats(-5, 5) | st.just(math.nan)] * 2), min_size=1, max_size=6),
    st.sampled_from([0.0, 1.0, -2.0]),
)
def test_pitfall_08_missing_is_never_a_number_and_other_rows_do_not_matter(rows, weight):
    rewards = [Fixed([a for a, _ in rows], "a"), Fixed([b for _, b in rows], "b", weight)]
    result = run(rewards, ["x"] * len(rows))
    for (a, b), reward, valid in zip(rows, result.reward, result.valid, strict=True):
        known = [value is not None and not math.isnan(value) for value in (a, b)]
        assert valid == (known[0] and (known[1] or weight == 0))
        if valid:
            assert reward == pytest.approx(a + (weight * b if weight else 0.0))
        else:
            assert math.isnan(reward)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("length", "give an import path like package.module.function"),
        ("my rewards.length", "give an import path"),
        ("no_such_module_here.f", "there is no module 'no_such_module_here'"),
        ("my_rewards.lenght", "'my_rewards' has no 'lenght': did you mean length"),
        ("my_rewards.Holder.two", "'my_rewards.Holder' has no 'two'"),
        ("my_rewards.length.x.y", "'my_rewards.length' has no 'x'"),
        ("my_rewards.NUMBER", "is of type int"),
        ("broken_rewards.f", "importing 'broken_rewards' failed .*not_installed_anywhere"),
        ("my_rewards.no_completions", "takes no keyword argument 'completions'"),
    ],
)
def test_a_callable_that_cannot_be_used_is_an_error_of_one_line(path, message):
    with pytest.raises(UsageError, match=message) as error:
        CallableReward(path)
    assert path in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_verdict_term_is_an_error():
    with pytest.raises(UsageError, match=r"no term 'acuracy'.*did you mean accuracy"):
        run([TaskVerdict("acuracy")], ["a"])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "empty list"),
        ([TaskVerdict(), Fixed([1.0], "accuracy")], "two rewards are called 'accuracy'"),
        ([TaskVerdict(weight=0.0)], "every weight"),
    ],
)
def test_terms_that_cannot_be_summed_are_errors(rewards, message):
    with pytest.raises(UsageError, match=message):
        run(rewards, ["a"])


def test_a_weight_is_finite():
    with pytest.raises(UsageError, match="finite"):
        TaskVerdict(weight=math.nan)


def test_rewards_and_tasks_can_be_described():
    reward = CallableReward("my_rewards.length", weight=0.5)
    assert describe(reward)["init_args"] == {"function": "my_rewards.length", "weight": 0.5, "name": None}
    assert reward.name == "length"
    assert CallableReward("my_rewards.length", name="n").name == "n"
    assert describe(RunningSums(seed=3))["init_args"]["seed"] == 3


def test_a_task_without_demonstrations_says_what_to_do():
    class Bare(Task):
        def prompts(self, split):
            raise NotImplementedError

        def verify(self, completion, example):
            raise NotImplementedError

    with pytest.raises(UsageError, match="Bare has no worked demonstrations"):
        Bare().demonstrations(1, 0, 0.0)
