import contextlib
import os
import threading
import time

import pytest
from hypothesis import given, strategies as st

from apportion.data.errors import UsageError
from apportion.data.tasks import answers
from apportion.data.tasks.answers import check_readable, extract, same_answer, time_limit


@pytest.mark.parametrize(
    ("completion", "how", "text"),
    [
        ("so 3 - 5 = -2.", "last_number", "-2"),
        ("3-5", "last_number", "5"),  # a minus between numbers is no sign
        ("total: 1,234,567 dollars", "last_number", "1234567"),
        ("it costs -$5", "last_number", "-5"),
        ("1,2,3", "last_number", "3"),
        ("pi is 3.14", "last_number", "3.14"),
        ("about 1.5e-3", "last_number", "1.5e-3"),
        ("half is .5", "last_number", ".5"),
        ("x = −7", "last_number", "-7"),
        ("no numbers", "last_number", None),
        ("", "last_number", None),
        ("<answer>1</answer> no, <answer> a b </answer>.", "answer_tags", "a b"),
        ("<answer>1<answer>2</answer>", "answer_tags", "2"),
        ("<answer>1", "answer_tags", None),
        ("1</answer>", "answer_tags", None),
        ("<answer> </answer>", "answer_tags", None),
        ("work\n#### 1,000\nmore", "hashes", "1,000"),
        ("#### 1\n#### 2", "hashes", "2"),
        ("####", "hashes", None),
        ("1", "hashes", None),
        (r"\boxed{1}, so \boxed{\frac{1}{2}}.", "boxed", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", "boxed", r"\{1,2\}"),
        (r"$\boxed 5$", "boxed", "5"),
        (r"\fbox{7}", "boxed", "7"),
        (r"\boxed{1} \boxed{2", "boxed", None),  # the last one was cut off
        (r"\boxed", "boxed", None),
        ("  all of it \n", "text", "all of it"),
        ("  \n", "text", None),
    ],
)
def test_every_extractor(completion, how, text):
    answer = extract(completion, how)
    assert (answer.text if answer else None) == text


@given(st.text(alphabet="0123456789,.-$ eE<>/answer#\\boxd{}\n", max_size=60))
def test_the_span_is_the_answer_in_the_completion(completion):
    for how in answers._FINDERS:
        answer = extract(completion, how)  # type: ignore[arg-type]
        if answer is None:
            continue
        start, stop = answer.span
        found = completion[start:stop]
        assert found
        assert found == found.strip()
        if how == "last_number":
            assert answer.text == found.replace(",", "").replace("$", "")
        else:
            assert answer.text == found


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("18", "18"),
        ("18.0", "18"),
        ("1,234", "1234"),
        ("$18", "18"),
        ("18.", "18"),
        (r"\$18", "18"),
        ("0.5", r"\frac{1}{2}"),
        ("1/2", "0.5"),
        ("0.333333", "1/3"),
        ("1+x", "x+1"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        ("(1, 2)", "(1,2)"),
        ("10**2", "100"),
        ("North", "north"),
        (r"\text{east}", "east"),
        ("$x = 5$", "5"),
    ],
)
def test_equal_answers(answer, reference):
    assert same_answer(answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("17", "18"),
        ("1000001", "1000000"),  # whole numbers are compared exactly, however large
        ("north", "thorn"),  # not a product of letters
        ("9**9", "9"),
        ("1/0", "2"),
        ("garbage {{{", "5"),
        ("x+2", "x+1"),
        ("(2,1)", "(1,2)"),
        ("", "5"),
        ("1e999999999", "5"),  # would be a number of a billion digits
        ("1" * 5000, "5"),
    ],
)
def test_unequal_answers(answer, reference):
    start = time.monotonic()
    assert not same_answer(answer, reference)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "9^{9^{9^{9}}}"])
def test_math_verify_is_under_a_time_limit_that_holds(answer, monkeypatch):
    """A power is one call of C code: no signal stops it, and it would take hours. The judge goes on afterwards."""
    same_answer("x", "y")  # start it first
    monkeypatch.setattr(answers, "JUDGE_SECONDS", 2.0)
    with pytest.raises((TimeoutError, RuntimeError), match=r"longer than 2 s|MemoryError"):
        same_answer(answer, "3")
    monkeypatch.undo()
    assert same_answer("1+x", "x+1")


def test_judging_works_outside_the_main_thread(monkeypatch):
    found = []

    def judge():
        found.append(same_answer("1+x", "x+1"))
        monkeypatch.setattr(answers, "JUDGE_SECONDS", 1.0)
        with pytest.raises((TimeoutError, RuntimeError)):
            same_answer("9^{9^{9}}", "3")
        found.append(True)

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    assert found == [True, True]


def test_a_forked_program_starts_a_judge_of_its_own():
    assert same_answer("1+x", "x+1")
    child = os.fork()
    if child == 0:
        os._exit(0 if same_answer("2x+y", "y+2x") and not same_answer("x+2", "x+1") else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert not same_answer("x+2", "x+1")


def test_the_time_limit_ends_a_loop_that_catches_everything_and_leaves_no_alarm():
    def stubborn():
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(TimeoutError, match="the loop took longer than"), time_limit(0.05, "the loop"):
        stubborn()
    with time_limit(0.05, "nothing"):
        pass
    time.sleep(0.1)  # an alarm left behind would strike here


def test_a_reference_that_the_extractor_can_never_match_is_an_error():
    with pytest.raises(UsageError, match="no answer of 'x' is a number \\(the first: 'red'\\)"):
        check_readable(["red", "1/2", None], "last_number", "'x'")
    check_readable(["red", "7"], "last_number", "'x'")
    check_readable(["red"], "text", "'x'")
    check_readable([None], "last_number", "'x'")
