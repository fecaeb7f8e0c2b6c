"""Weighted mixtures, the forms of `format`, and verifiers that a site brings itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fedsilo.grading import VerdictCode, grade, mixture, require_verifier
from fedsilo.grading.own_verifiers import find_verifier, own_names
from fedsilo.grading.worker import GradingProcess
from fedsilo.protocol.errors import UsageError

TAGGED = "<think>2 + 3</think>\n<answer>5</answer>"
DOSAGE = """
def check_reference(reference):
    return reference.isdigit()

def grade(response, reference):
    if response == "raise":
        raise RuntimeError("no")
    if response == "number":
        return 1
    return response == reference + " mg"
"""


def test_a_mixture_is_correct_as_its_first_part_says_and_rewards_by_weight() -> None:
    name = "math*0.9+format*0.1"
    assert mixture.name_of({"math": 0.9, "format": 0.1}) == name
    with GradingProcess(name) as process:
        for response, correct, reward in (
            (TAGGED, True, 1.0), ("5", True, 0.9), (TAGGED.replace("5", "6"), False, 0.1), ("6", False, 0.0),
        ):  # fmt: skip
            verdict = grade(name, response, "5")
            assert verdict.correct is correct
            assert verdict.reward == pytest.approx(reward, abs=1e-12)  # float sums
            assert process.grade(response, "5") == verdict


@pytest.mark.parametrize(
    "name",
    ["math*0.9+format*0.2", "math*0+format*1", "math*-1+format*2", "math+format", "math*0.5+math*0.5", "math*0.5",
     "math:boxed", "format:verse", "math*0.9+", "+", "math*0.5+guess*0.5", "math*1e0", "math*0.5 + ../x*0.5"],
)  # fmt: skip
def test_what_is_no_mixture_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="unknown verifier"):
        find_verifier(name)
    with pytest.raises(UsageError, match="unknown verifier"):
        require_verifier(name)
    require_verifier("math*0.9+format:boxed*0.1")


def test_the_reward_of_a_plain_verifier_is_its_verdict() -> None:
    assert grade("exact", "a", "a").reward == 1.0
    assert grade("exact", "a", "b").reward == 0.0


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        (TAGGED, True),
        (f"  {TAGGED}\n", True),
        ("<answer>5</answer>", False),
        ("<think>a</think>5", False),
        ("<think>a</think><answer></answer>", False),
        ("<think>a</think><answer>5", False),
        ("<answer>5</answer><think>a</think>", False),
        (f"{TAGGED} and more", False),
        (f"first {TAGGED}", False),
        (f"{TAGGED}<answer>6</answer>", False),
        ("<think>a</think> so <answer>5</answer>", False),
        ("", False),
    ],
)
def test_format_asks_for_thinking_and_answer_tags_unless_the_reference_names_a_form(
    response: str, correct: bool
) -> None:
    assert grade("format", response, "any answer").correct is correct
    assert grade("format", response, "tags").correct is correct
    assert grade("format:boxed", "\\boxed{1}", "any answer").correct


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with verifiers, as pip would leave it."""
    package = tmp_path / "site"
    info = package / "hospital_graders-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hospital-graders\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[fedsilo.verifiers]\ndosage = dosage\nexact = dosage\nempty = json\nbroken = no_such_module\n"
    )
    (package / "dosage.py").write_text(DOSAGE)
    monkeypatch.syspath_prepend(str(package))
    repository = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), repository]))
    return package


def test_an_own_verifier_is_found_by_name_and_runs_in_the_grading_process(installed: Path) -> None:
    assert own_names()["dosage"] == "hospital-graders 1.2"
    assert find_verifier("dosage*0.5+exact*0.5").origin == ("hospital-graders 1.2",)
    with GradingProcess("dosage") as process:
        pairs = [("5 mg", "5"), ("6 mg", "5"), ("5 mg", "x"), ("raise", "5"), ("number", "5")]
        assert [verdict.code for verdict in process.grade_many(pairs)] == [
            VerdictCode.CORRECT,
            VerdictCode.WRONG,
            VerdictCode.BAD_REFERENCE,
            VerdictCode.ERROR,
            VerdictCode.ERROR,
        ]
        assert process.origin == ("hospital-graders 1.2",)
    with GradingProcess("dosage*0.75+format*0.25") as process:
        assert process.grade("5 mg", "5").reward == 0.75


def test_why_a_verifier_failed_is_kept_for_its_author_alone(installed: Path, tmp_path: Path) -> None:
    with GradingProcess("dosage", reports=True) as process:
        process.grade_many([("5 mg", "5"), ("raise", "5")])
        assert process.take_report().startswith("the verifier 'dosage' raised RuntimeError: no, at ")
        assert process.take_report() == ""
        process.grade_many([("number", "5")])
        assert process.take_report() == "the verifier 'dosage' returned 1 of type int: not True, False or a Verdict"
        process.grade_many([("5 mg", "5")])
        assert process.take_report() == ""
    log = tmp_path / "log"

    def launch(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with log.open("wb") as errors:
            pipe = subprocess.PIPE
            return subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=errors, env=environment, bufsize=0)

    with GradingProcess("dosage", launch=launch) as process:
        assert process.grade("raise", "5").code is VerdictCode.ERROR and process.take_report() == ""
    assert b"RuntimeError" not in log.read_bytes()  # such a text may quote an answer


def test_a_name_of_ours_cannot_be_taken(installed: Path) -> None:
    assert "exact" not in own_names()
    with GradingProcess("exact") as process:
        assert process.grade("5", "5").correct


def test_an_unknown_name_is_told_with_the_list(installed: Path) -> None:
    with pytest.raises(UsageError, match="unknown verifier 'dosages'") as raised:
        GradingProcess("dosages")
    assert "math" in raised.value.hint and "dosage" in raised.value.hint
    with pytest.raises(UsageError, match="unknown verifier"):
        require_verifier("dosage")  # the verifiers of the protocol look nothing up


@pytest.mark.parametrize(("name", "why"), [("empty", "has no grade"), ("broken", "cannot be loaded")])
def test_a_verifier_that_is_none_is_refused_before_the_first_item(installed: Path, name: str, why: str) -> None:
    with GradingProcess(name) as process, pytest.raises(UsageError, match=why):
        process.wait_ready()
