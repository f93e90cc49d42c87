import re

import pytest
from hypothesis import given, settings, strategies as st

from apportion.data import RunningSums, UsageError, Verdict

TASK = RunningSums(train_prompts=20, validation_prompts=5)


def verdict(completion: str, *terms: int) -> Verdict:
    return TASK.verify(completion, {"terms": list(terms), "answer": sum(terms) % 10})


def test_a_right_completion_by_hand():
    v = verdict("3+5=8;8+9=7;", 3, 5, 9)
    assert v.terms == {"accuracy": 1.0}
    assert v.steps == [(0, 6), (6, 12)]
    assert v.step_rewards == [1.0, 1.0]
    assert v.answer_span == (10, 11)
    assert v.missing is None


def test_a_wrong_step_makes_the_steps_that_go_on_from_it_wrong():
    v = verdict("3+5=7;7+9=6;6+1=7;", 3, 5, 9, 1)
    assert v.step_rewards == [0.0, 0.0, 0.0]
    assert v.terms["accuracy"] == 0.0


def test_a_step_that_starts_from_the_true_sum_again_is_right():
    v = verdict("3+5=7;8+9=7;", 3, 5, 9)
    assert v.step_rewards == [0.0, 1.0]
    assert v.terms["accuracy"] == 1.0


def test_a_shortcut_has_the_right_answer_and_a_wrong_step():
    v = verdict("0+7=7;", 3, 5, 9)
    assert (v.terms["accuracy"], v.step_rewards, v.answer_span) == (1.0, [0.0], (4, 5))


def test_steps_beyond_the_true_number_are_wrong_and_the_last_one_is_the_answer():
    v = verdict("3+5=8;8+9=7;7+0=7;", 3, 5, 9)
    assert (v.terms["accuracy"], v.step_rewards) == (1.0, [1.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("completion", "steps", "rewards"),
    [
        ("", [], []),
        ("3+5", [(0, 3)], [0.0]),  # no delimiter at all: one step
        ("3+5=8;8+9=7", [(0, 11)], [0.0]),  # cut off: the rest belongs to the last complete step
        ("3+5=8;8+9=7;x", [(0, 6), (6, 13)], [1.0, 0.0]),
        ("3+5=8;8+9=7;\n", [(0, 6), (6, 13)], [1.0, 0.0]),
        (";", [(0, 1)], [0.0]),
        ("3+5=8;;", [(0, 6), (6, 7)], [1.0, 0.0]),
        ("3+5=8;8+9=17;", [(0, 6), (6, 13)], [1.0, 0.0]),
        ("3+5=8;８+9=7;", [(0, 6), (6, 12)], [1.0, 0.0]),  # a full-width digit is no digit
    ],
)
def test_no_well_formed_end_is_no_answer(completion, steps, rewards):
    v = verdict(completion, 3, 5, 9)
    assert v.terms == {"accuracy": 0.0}
    assert v.answer_span is None
    assert (v.steps, v.step_rewards) == (steps, rewards)


def independent(completion: str, terms: list[int]) -> tuple[float, list[float], tuple[int, int] | None]:
    """The same rules, written another way: regular expressions over the text, arithmetic over prefixes."""
    spans = [match.span() for match in re.finditer(r"[^;]*;", completion)]
    if not spans and completion:
        spans = [(0, len(completion))]
    if spans:
        spans[-1] = (spans[-1][0], len(completion))
    rewards = []
    for j, (start, stop) in enumerate(spans):
        match = re.fullmatch(r"(\d)\+(\d)=(\d);", completion[start:stop], flags=re.ASCII)
        rewards.append(
            1.0
            if match is not None
            and j + 1 < len(terms)
            and int(match[1]) == sum(terms[: j + 1]) % 10
            and int(match[2]) == terms[j + 1]
            and int(match[3]) == sum(terms[: j + 2]) % 10
            else 0.0
        )
    end = re.search(r"(?:^|;)\d\+\d=(\d);\Z", completion, flags=re.ASCII)
    return float(end is not None and int(end[1]) == sum(terms) % 10), rewards, end.span(1) if end else None


steps = st.builds("{}+{}={};".format, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))


@settings(max_examples=300, deadline=None)
@given(
    terms=st.lists(st.integers(0, 9), min_size=2, max_size=6),
    edits=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["", ";", "1", "+", "=", "x", "\n"])), max_size=2),
    extra=st.lists(steps, max_size=2),
    garbage=st.text(alphabet="0123456789+=; x", max_size=12),
    replaced=st.booleans(),
)
def test_verdicts_agree_with_an_independent_checker(terms, edits, extra, garbage, replaced):
    """From the right completion: some characters replaced, steps and garbage appended; or garbage alone."""
    text = garbage
    if not replaced:
        text, total = "", terms[0]
        for term in terms[1:]:
            text, total = text + f"{total}+{term}={(total + term) % 10};", (total + term) % 10
        for place, put in edits:
            text = text[:place] + put + text[place + 1 :]
        text += "".join(extra)
    v = verdict(text, *terms)
    assert (v.terms["accuracy"], v.step_rewards, v.answer_span) == independent(text, terms)
    assert v.steps is not None
    assert v.step_rewards is not None
    assert "".join(text[a:b] for a, b in v.steps) == text
    if v.step_rewards == [1.0] * (len(terms) - 1):
        assert v.terms["accuracy"] == 1.0


def test_prompts_are_deterministic_disjoint_and_of_the_right_numbers():
    task, again = (RunningSums(train_prompts=300, validation_prompts=100, seed=3) for _ in range(2))
    train, validation = task.prompts("train"), task.prompts("validation")
    assert train.to_dict() == again.prompts("train").to_dict()
    assert validation.to_dict() == again.prompts("validation").to_dict()
    assert len(set(train["prompt"])) == len(train) == 300
    assert len(set(validation["prompt"])) == len(validation) == 100
    assert not set(train["prompt"]) & set(validation["prompt"])
    other = RunningSums(train_prompts=300, validation_prompts=100, seed=4)
    assert other.prompts("train")["prompt"][:] != train["prompt"][:]
    for row in train:
        assert row["prompt"] == "+".join(map(str, row["terms"])) + "="
        assert row["answer"] == sum(row["terms"]) % 10
    counts = [sum(len(terms) == k for terms in [*train["terms"], *validation["terms"]]) for k in (3, 4, 5, 6)]
    assert counts == [100, 100, 100, 100]


def test_a_small_space_is_used_up_without_repeats():
    task = RunningSums(min_terms=2, max_terms=3, train_prompts=1000, validation_prompts=100)
    prompts = [*task.prompts("train")["prompt"], *task.prompts("validation")["prompt"]]
    assert len(set(prompts)) == 1100
    assert sum(len(prompt) == 4 for prompt in prompts) == 100


def test_more_prompts_than_exist_is_an_error():
    with pytest.raises(UsageError, match="1001 training and 99 validation prompts, but only 1000 different ones"):
        RunningSums(min_terms=3, max_terms=3, train_prompts=1001, validation_prompts=99)


@pytest.mark.parametrize(
    "options",
    [{"min_terms": 1}, {"min_terms": 4, "max_terms": 3}, {"train_prompts": 0}, {"validation_prompts": 0}],
)
def test_impossible_options_are_errors_of_one_line(options):
    with pytest.raises(UsageError) as error:
        RunningSums(**options)
    assert "\n" not in str(error.value)


def test_demonstrations_without_error_are_right_and_never_of_a_validation_prompt():
    task = RunningSums(min_terms=2, max_terms=3, train_prompts=50, validation_prompts=600)
    rows = task.demonstrations(400, seed=1, error=0.0)
    assert rows.to_dict() == task.demonstrations(400, seed=1, error=0.0).to_dict()
    assert rows["prompt"][:] != task.demonstrations(400, seed=2, error=0.0)["prompt"][:]
    assert not set(rows["prompt"]) & set(task.prompts("validation")["prompt"])
    for row in rows:
        terms = [int(digit) for digit in row["prompt"][:-1].split("+")]
        v = task.verify(row["completion"], {"terms": terms})
        assert v.terms["accuracy"] == 1.0
        assert v.step_rewards == [1.0] * (len(terms) - 1)


def test_the_teacher_errs_in_the_stated_share_of_steps_and_goes_on_from_the_wrong_value():
    wrong = total = 0
    for row in TASK.demonstrations(2000, seed=0, error=0.2):
        terms = [int(digit) for digit in row["prompt"][:-1].split("+")]
        left = terms[0]
        pieces = row["completion"].split(";")[:-1]
        assert len(pieces) == len(terms) - 1
        for piece, term in zip(pieces, terms[1:], strict=True):
            a, b, c = map(int, re.fullmatch(r"(\d)\+(\d)=(\d)", piece).groups())  # type: ignore[union-attr]
            assert (a, b) == (left, term)
            wrong += (a + b) % 10 != c
            total += 1
            left = c
    assert wrong / total == pytest.approx(0.2, abs=0.02)  # 7000 steps: a standard error of 0.005


def test_an_error_share_outside_0_to_1_is_refused():
    with pytest.raises(UsageError, match="between 0 and 1"):
        TASK.demonstrations(1, 0, 1.5)


def test_the_task_judges_steps():
    assert RunningSums.judges_steps
