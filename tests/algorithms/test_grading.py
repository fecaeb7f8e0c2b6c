"""The graders: the shared example file, an independent exact grader, and bounds on hostile text."""

from __future__ import annotations

import json
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.grading import VERIFIERS, VerdictCode, check_reference, choice, code, grade, numeric
from fedsilo.protocol.errors import UsageError

EXAMPLES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "vectors" / "math_grading_examples.jsonl").read_text("utf-8").splitlines()
]


def response_of(example: dict[str, Any]) -> str:
    if "response" in example:
        return str(example["response"])
    return "".join(text * count for text, count in example["response_parts"])


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{row['id']}-{row['tier']}" for row in EXAMPLES])
def test_T22_shared_examples(example: dict[str, Any]) -> None:
    verifier = "choice" if example["category"] == "choice" else "math"
    began = time.monotonic()
    verdict = grade(verifier, response_of(example), example["gold"])
    assert verdict.correct == example["expected_correct"], example["why"]
    assert time.monotonic() - began < example.get("max_seconds", 10)


@pytest.mark.parametrize(
    ("gold", "response", "correct"),
    [
        ("-2*x**2 + 3", "3-2x^2", True),
        ("2, 3, 7", "7,3,2", True),
        ("2, 3, 7", "2, 3", False),
        ("y**(-67/3)", "y^{-67/3}", True),
        ("True", r"\boxed{\text{True}}", True),
        ("False", "The answer is True.", False),
        (r"4\pi^2-1", r"\boxed{(2\pi-1)(2\pi+1)}", True),
        ("-2*l**2 + 4*l + 32", "-2*l**2+4*l+31", False),
        ("40301200 - 633600*sqrt(13)", r"\boxed{40301200-633600\sqrt{13}}", True),
        ("25", r"\boxed{25\%}", True),
        ("25", r"\boxed{0.25}", False),
        (r"\pm 3", r"\boxed{3, -3}", True),
        (r"\pm 3", r"\boxed{3}", False),
        ("(2,4)", r"\boxed{2<x<4}", True),
        ("[2,4)", r"\boxed{2<x<4}", False),
        ("f(x)=2x", r"\boxed{2x}", True),
        ("1/3", "0.3333", False),
        ("12", "\\boxed{\uff11\uff12}", True),
        ("(1,2)", r"\boxed{1,2}", False),
        ("3", r"\boxed{3", False),
        ("3", r"<think>\boxed{3}", False),
        ("3", r"<think>\boxed{4}</think>\boxed{3}", True),
        ("72", "We get 70 first.\nNatalia sold 72 clips in total for the year", True),
    ],
)
def test_math_policy(gold: str, response: str, correct: bool) -> None:
    assert grade("math", response, gold).correct is correct


@pytest.mark.parametrize(
    "response",
    [r"\boxed{10^{10^{10}}}", r"\boxed{100000!}", r"\boxed{((9^{400})^{400})^{400}}", r"\boxed{\sum_{k=1}^{9999} k}"],
)
def test_T22_costly_answers_are_not_evaluated(response: str) -> None:
    began = time.monotonic()
    assert grade("math", response, "6").code is VerdictCode.TOO_COSTLY
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "response", [r"\boxed{\spadesuit}", r"\boxed{6_8}", "\\boxed{6 \u4e2d}", r"\boxed{\phantom{6}}"]
)
def test_what_cannot_be_read_is_no_answer_and_not_a_costly_one(response: str) -> None:
    assert grade("math", response, "6").code is VerdictCode.NO_ANSWER
    assert grade("math", r"\boxed{7}", r"6 \spadesuit").code is VerdictCode.WRONG  # the reference's fault


@pytest.mark.parametrize("reference", ["1/0", r"\frac{5}{0}", r"\dfrac50", "x/0", "0/0", r"\frac{x+1}{0.0}"])
def test_T22_nothing_over_zero_is_a_reference(reference: str) -> None:
    assert not check_reference("math", reference)
    assert grade("math", rf"\boxed{{{reference}}}", reference).code is VerdictCode.BAD_REFERENCE


@pytest.mark.parametrize("reference", ["0/1", "1/0.5", "10/05", r"\frac{0}{5}", r"\frac{1}{01}", "1/(x-0)"])
def test_a_zero_elsewhere_is_one(reference: str) -> None:
    assert grade("math", rf"\boxed{{{reference}}}", reference).correct


@pytest.mark.parametrize("response", ["The answer is 7_8.", "7_8", r"\boxed{7_{8}}", "7_{18}", "we get x_7"])
def test_numeric_takes_no_number_from_below_another_nor_one_with_a_base(response: str) -> None:
    assert not any(grade("numeric", response, gold).correct for gold in ("7", "8", "18"))
    assert grade("numeric", "It is _7_ then", "7").correct


def test_a_costly_answer_that_is_the_reference_letter_by_letter_counts() -> None:
    assert grade("math", r"\boxed{ 100! }", "100!").correct


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("B", "b"),
        ("(B)", "b"),
        ("B. Report it", "b"),
        ("Answer: (B) Report it", "b"),
        ("The answer is **B**.", "b"),
        ("The answer is A.", "a"),
        ("the answer is a lie", None),
        ("A or B", None),
        ("Answer: B or C", None),
        ("A child has a cough", None),
        ("final answer: yes", "yes"),
        ("", None),
    ],
)
def test_choice_extraction(response: str, expected: str | None) -> None:
    assert choice.extract(response) == expected


def plain_exact(response: str, reference: str) -> bool:
    """Another way to say `exact` for ASCII text: compare lower-case words split by white space."""
    words = [re.findall(r"[^ \t\n\r\x0b\x0c\x1c-\x1f]+", text.lower()) for text in (response, reference)]
    return words[0] == words[1] and bool(words[1])


ascii_text = st.text(st.characters(max_codepoint=127), max_size=12)


@pytest.mark.slow
@given(ascii_text, ascii_text)
def test_exact_against_an_independent_one(response: str, reference: str) -> None:
    assert grade("exact", response, reference).correct == plain_exact(response, reference)


@pytest.mark.slow
@given(st.text(max_size=20), st.sampled_from(["", " ", "\n", "\t "]))
def test_exact_accepts_the_reference_with_white_space_around(reference: str, around: str) -> None:
    assert grade("exact", around + reference + around, reference).correct == check_reference("exact", reference)


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_numeric_is_exact(units: int, places: int) -> None:
    value = Fraction(units, 10**places)
    digits = str(abs(units)).rjust(places + 1, "0")
    written = f"{'-' if units < 0 else ''}{digits[: len(digits) - places]}{'.' + digits[-places:] if places else ''}"
    assert numeric.parse(written) == value
    assert grade("numeric", f"So the answer is {written}.", f"{value.numerator}/{value.denominator}").correct
    assert not grade("numeric", f"\\boxed{{{written}}}", str(value + 1) if places == 0 else f"{units}1").correct


def test_numeric_refuses_a_list_for_a_number() -> None:
    assert not grade("numeric", "#### 3,5", "5").correct
    assert grade("numeric", "#### 45,000", "45000").correct


def test_code_is_extracted_and_never_run() -> None:
    assert code.extract("Here:\n```python\nprint(1)\n```\n") == "print(1)\n"
    assert VERIFIERS["code"].executes
    with pytest.raises(UsageError, match="sandbox"):
        grade("code", "print(1)", "assert True")


@pytest.mark.parametrize(
    ("verifier", "good", "bad"),
    [("math", "\\frac{1}{2}", "{"), ("choice", "C", "CD"), ("exact", "x", " "), ("numeric", "1/2", "1/0")],
)
def test_unparseable_references_are_told(verifier: str, good: str, bad: str) -> None:
    assert check_reference(verifier, good)
    assert not check_reference(verifier, bad)
    assert grade(verifier, bad, bad).code is VerdictCode.BAD_REFERENCE


def test_format_judges_the_form_only() -> None:
    assert grade("format", "so \\boxed{wrong}", "boxed").correct
    assert not grade("format", "so wrong", "boxed").correct
    assert grade("format", '{"a": 1}', "json").correct
    assert not grade("format", "{a: 1}", "json").correct


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["math", "choice", "exact", "numeric"])
@given(response=st.text(max_size=60))
def test_no_response_raises(verifier: str, response: str) -> None:
    grade(verifier, response, "7")
    grade(verifier, f"\\boxed{{{response}", "A")
