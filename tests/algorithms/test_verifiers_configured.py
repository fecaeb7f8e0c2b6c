"""A verifier from the file to the learner: mixtures, those of packages, and programs in the trainer's sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from fedsilo.files.site_policy import read_effective
from fedsilo.grading.own_verifiers import AnyVerifier, OwnPartsVerifier, own_verifiers_sha256
from fedsilo.grading.worker import full_check, our_parts_check
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.randomness import generator
from fedsilo.protocol.strict_yaml import load, validate
from silo.guard.site import _check_verifiers, trained_with
from silo.guard.trainer_process import probing, sandbox
from silo.guard.trainer_process.sandbox import trainer_environment
from silo.link import Link, LinkMessage, Listener
from silo.trainer.data import Mark, grade_distinct
from silo.trainer.grpo import Group
from silo.trainer.resume import _answer_fields
from silo.trainer.run import OwnAnswers, reward_metrics
from silo.trainer.tasks.public_answers import offered_answers
from tests.algorithms.hostile_programs import GOOD, REFUSED, TEST
from tests.algorithms.test_grading_mixture import installed
from tests.algorithms.test_public_step import CODEC, Answer, DonorIntake, Prompt, donor
from tests.algorithms.test_worker import ask, configuration, folder, guard_end
from tests.policies import setting

pytestmark = pytest.mark.torch
__all__ = ["folder", "guard_end", "installed"]


class Site(BaseModel):
    model_config = ConfigDict(extra="forbid")
    verifier: AnyVerifier


class Centre(BaseModel):
    model_config = ConfigDict(extra="forbid")
    verifier: OwnPartsVerifier


def in_file(text: str, model: type[Any] = Site) -> str:
    name: str = validate(model, load(f"verifier: {text}\n".encode(), "silo.yaml")).verifier
    return name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("math", "math"),
        ("math*0.9+format*0.1", "math*0.9+format*0.1"),
        ("{numeric: 0.9, format: 0.1}", "numeric*0.9+format*0.1"),
        ("{format: 0.1, numeric: 0.9}", "format*0.1+numeric*0.9"),
    ],
)
def test_a_verifier_is_a_name_a_mixture_or_a_mapping_in_its_order(text: str, name: str) -> None:
    assert in_file(text) == in_file(text, Centre) == name


@pytest.mark.parametrize(
    "text",
    [
        "maths",
        "{math: 0.9, format: 0.2}",
        "{math: true}",
        "{math: a}",
        "{}",
        "[math]",
        "3",
        "os.system",
        "../grader.py",
    ],
)
def test_a_wrong_one_is_told_with_file_and_line(text: str) -> None:
    for model in (Site, Centre):
        with pytest.raises(UsageError, match=r"silo\.yaml:1: verifier: "):
            in_file(text, model)
    with pytest.raises(UsageError, match=r"^silo\.yaml:1: verifier: unknown verifier 'maths'$") as told:
        in_file("maths")
    assert told.value.hint.startswith("one of math, choice, exact, final, numeric, format, code")


def test_a_packages_name_is_a_silos_alone(installed: Path) -> None:
    assert in_file("dosage*0.5+exact*0.5") == "dosage*0.5+exact*0.5"
    with pytest.raises(UsageError, match="unknown verifier 'dosage'"):
        in_file("dosage*0.5+exact*0.5", Centre)


def test_packages_are_looked_through_only_for_a_name_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[Any] = []

    def scan(**asked: Any) -> tuple[()]:
        scans.append(asked)
        return ()

    monkeypatch.setattr(metadata, "entry_points", scan)
    in_file("math*0.9+format*0.1")
    assert not scans
    with pytest.raises(UsageError):
        in_file("dosage")
    assert scans


def test_references_of_a_package_are_asked_in_its_process_and_not_in_the_guard(installed: Path) -> None:
    with full_check("dosage*0.5+numeric*0.5") as check:
        assert (check("5"), check("x")) == (True, False)
    with full_check("exact*0.5+dosage*0.5") as check:
        assert (check("5"), check("x")) == (True, False)
    check = our_parts_check("dosage*0.5+exact*0.5")
    assert check("x") and not check("")
    assert "dosage" not in sys.modules


@pytest.mark.slow
def test_bad_references_of_a_package_are_left_out_and_counted_by_the_trainer(
    folder: Path, installed: Path, request: pytest.FixtureRequest
) -> None:
    link: Link = request.getfixturevalue("guard_end")  # after the package is there
    fields = configuration(folder) | {"verifier": "dosage*0.9+exact*0.1"}
    rows = [{"id": f"n{n}", "prompt": "1?", "answer": "x" if n == 7 else str(n), "topic": "t"} for n in range(40)]
    (folder / "private.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said, _ = ask(link, "configure", **fields, own_verifiers_sha256="a" * 64)
    assert (said.type, said.fields["code"]) == ("failed", "VERIFIER_MISMATCH")  # another package than beside the guard
    fields["own_verifiers_sha256"] = own_verifiers_sha256([fields["verifier"]])
    ready, _ = ask(link, "configure", **fields)
    assert ready.type == "ready", ready.fields
    assert (ready.fields["private_rows"], ready.fields["dropped"]) == (39, {"unparseable reference answer": 1})


def site_with(private: str, public: str) -> Any:
    data = SimpleNamespace(verifier=private, public=SimpleNamespace(verifier=public, sha256="5" * 64))
    return SimpleNamespace(
        data=data, held_out_verifier=private, source=Path("silo.yaml"), model=SimpleNamespace(load="fp32")
    )


def policy_with(programs: str) -> Any:
    pins = {"other": SimpleNamespace(sha256="6" * 64, programs="sandbox"),
            "public": SimpleNamespace(sha256="5" * 64, programs=programs)}  # fmt: skip
    return SimpleNamespace(file=SimpleNamespace(public_sets=pins), source="policy.yaml", line_of=lambda path: 47)


def test_T22_strangers_programs_are_run_only_where_the_policy_says_so_for_this_set(installed: Path) -> None:
    for programs in ("refuse", "sandbox"):
        policy = policy_with(programs)
        _check_verifiers(site_with("code*0.9+dosage*0.1", "math*0.9+format*0.1"), policy)
        for public in ("dosage", "exact*0.9+dosage*0.1", "code*0.9+dosage*0.1"):
            with pytest.raises(UsageError, match=r"data\.public\.verifier .* hospital-graders 1\.2"):
                _check_verifiers(site_with("exact", public), policy)
    for public in ("code", "exact*0.9+code*0.1"):
        _check_verifiers(site_with("exact", public), policy_with("sandbox"))
        with pytest.raises(UsageError, match=r"policy\.yaml:47: public_sets\.public\.programs is refuse") as caught:
            _check_verifiers(site_with("exact", public), policy_with("refuse"))
        assert caught.value.code == "VERIFIER_EXECUTES"


@pytest.mark.parametrize("charter", ["refuse", "sandbox"])
def test_T22_a_site_lets_in_no_programs_that_the_charter_keeps_out(tmp_path: Path, charter: str) -> None:
    text = setting.policy_text()
    line = next(line for line in text.partition("public_sets:")[2].splitlines() if line.strip().startswith("rows:"))
    for name, programs in (("policy.yaml", "sandbox"), ("charter.yaml", charter)):
        (tmp_path / name).write_text(text.replace(line, f"{line}\n    programs: {programs}", 1))
    policy = read_effective(tmp_path / "policy.yaml", tmp_path / "charter.yaml")
    site = site_with("exact", "code")
    site.data.public.sha256 = next(iter(policy.file.public_sets.values())).sha256
    if charter == "sandbox":
        _check_verifiers(site, policy)
        return
    with pytest.raises(UsageError, match=r"public_sets\.\w+\.programs is refuse") as caught:
        _check_verifiers(site, policy)
    assert caught.value.code == "VERIFIER_EXECUTES"


def test_T22_the_run_remembers_name_and_package_and_no_path(installed: Path) -> None:
    said = json.loads(trained_with(site_with("dosage", "exact")))
    assert said == {
        "load": "fp32", "verifier": "dosage", "public_verifier": "exact", "verifier_origin": "hospital-graders 1.2",
        "own_verifiers_sha256": own_verifiers_sha256(["dosage"]),
    }  # fmt: skip
    assert "verifier_origin" not in json.loads(trained_with(site_with("math", "exact")))


# ---- correct and reward --------------------------------------------------------------------------------


def mixed(pairs: Sequence[tuple[str, str]]) -> list[Mark]:
    """As `first*0.4+format*0.6`: the reward of a right answer in no form is below 1/2, of a wrong one in form above."""
    return [Mark(text[0] == "1", 0.4 if text[0] == "1" else 0.6) for text, _ in pairs]


def test_bools_and_marks_are_the_same_to_who_asks() -> None:
    assert grade_distinct(lambda pairs: [True, False], [("a", ""), ("b", "")]) == [Mark(True, 1.0), Mark(False, 0.0)]
    assert grade_distinct(mixed, [("1", ""), ("0", "")]) == [Mark(True, 0.4), Mark(False, 0.6)]


def test_offers_donors_and_counts_go_by_correctness_and_the_learner_by_reward() -> None:
    def own(texts: Sequence[str]) -> OwnAnswers:
        marks = grade_distinct(mixed, [(text, "1") for text in texts])
        answers = [
            Answer(CODEC.answer_ids(text, finished=True), text, True, **mark._asdict())
            for text, mark in zip(texts, marks, strict=True)
        ]
        return OwnAnswers(Prompt(0, "q", (5,), "1", "all"), tuple(answers))

    mine = own(["11", "02", "03", "04"])
    assert [answer.text for answer in offered_answers(mine, "correct")] == ["11"]
    assert reward_metrics([Group((5,), mine.answers)])["correct_histogram"] == {"1": 1}
    assert _answer_fields(mine.answers[0])[-2:] == [0.4, True]
    donors = {0: [donor("05", "s1"), donor("12", "s2")]}
    groups, figures = DonorIntake("s0", CODEC, mixed, 6).balanced([mine], donors, lambda prompt: generator(7))
    taken = [answer for answer in groups[0].answers if answer.donor]
    assert [(answer.text, answer.correct, answer.reward) for answer in taken] == [("12", True, 0.4)]
    assert mine.answers[0] in groups[0].answers  # correct, so it stays, though its reward is below those of wrong ones
    assert figures.rejected == {"s1": 1}


# ---- programs in a sandbox -----------------------------------------------------------------------------

INSIDE = """
import json, sys
from silo.trainer.worker import Refusals
from silo.trainer.worker import Worker
refusals = Refusals()
worker = Worker(None, refusals)
grade = worker._grader("code")
refusals.install()
asked = json.load(sys.stdin)
print("MARKS" + json.dumps(grade([(text, asked["test"]) for text in asked["programs"]])), flush=True)
for process in worker._grading:
    process.close()
"""


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize("level", ["namespaces", "user"])
def test_T10_programs_are_graded_inside_the_trainers_sandbox(level: str) -> None:
    if reason := probing.sandbox_trial(level):
        pytest.skip(f"this machine cannot build it: {reason}")
    wrong = GOOD.replace("x + 1", "x + 3")
    programs = [GOOD, wrong, REFUSED["network"] + GOOD, "import os\nos._exit(0)\n"]
    process = sandbox.launch_in_sandbox(
        [sys.executable, "-P", "-c", INSIDE], level=level, env={"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    texts = [f"```python\n{program}```" for program in programs]
    output, _ = process.communicate(json.dumps({"programs": texts, "test": TEST}).encode(), 120)
    marks = json.loads(output.decode().rpartition("MARKS")[2])
    assert marks == [[True, 1.0], [False, 0.0], [False, 0.0], [False, 0.0]]


def code_rows(folder: Path) -> dict[str, Any]:
    fields = configuration(folder) | {"verifier": "code*0.9+format*0.1"}
    rows = [{"id": f"n{n}", "prompt": "1?", "answer": TEST, "topic": "t"} for n in range(40)]
    (folder / "private.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return fields


@pytest.mark.slow
@pytest.mark.parametrize("level", ["namespaces", "user"])
def test_T10_a_sandboxed_trainer_makes_ready_to_run_programs(folder: Path, level: str) -> None:
    if reason := probing.sandbox_trial(level):
        pytest.skip(f"this machine cannot build it: {reason}")
    fields = code_rows(folder)
    sockets, scratch = folder / "link", folder / "scratch"
    sockets.mkdir()
    scratch.mkdir()
    listener = Listener(f"unix:{sockets}/t.sock", user_ids=frozenset({os.getuid()}))
    process = sandbox.launch_in_sandbox(
        [sys.executable, "-P", "-m", "silo.trainer.worker", "--address", f"unix:{sockets}/t.sock"],
        level=level, readable=[folder / "model", *map(Path, fields["private"]), *sorted(folder.glob("*.jsonl"))],
        writable=[scratch], socket_dir=sockets,
        env=trainer_environment(os.environ, threads=1, scratch=scratch),
    )  # fmt: skip
    link = listener.accept(60.0)
    try:
        ready, _ = ask(link, "configure", **fields)
        assert ready.type == "ready" and ready.fields["private_rows"] == 40, ready.fields
        link.send(LinkMessage("stop"))
        assert process.wait(20) == 0
    finally:
        process.kill()
        link.close()
        listener.close()


@pytest.mark.slow
def test_T22_a_trainer_that_can_build_no_sandbox_refuses_before_any_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import fedsilo.grading.code_sandbox as sandbox\nsandbox.readable_paths = lambda: ['/nowhere/at/all']\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    link: Link = request.getfixturevalue("guard_end")
    said, _ = ask(link, "configure", **code_rows(folder))
    assert (said.type, said.fields["code"]) == ("failed", "NO_SANDBOX")
    said, _ = ask(link, "task", task="PrivateStep", round=1, step=1, rows=[0])
    assert said.type == "failed"
    said, _ = ask(link, "configure", **(code_rows(folder) | {"verifier": "exact"}))
    assert said.type == "ready", said.fields
