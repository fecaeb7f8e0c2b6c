"""The set of thirty releases: made by the real gate, replayed as it was made, and scored against its truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import releases
from benchmarks.release_cases import cases
from console.feed import Store
from console.recording import Replay
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.views.state import Release

SEED = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("set") / "out"
    releases.write_set(out, SEED)
    return out


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, Any]:
    return releases.read_truth(folder)


def still() -> float:
    """A clock that stands."""
    return 0.0


def shown(replay: Replay) -> Release:
    """The one release that a console would show."""
    store = Store()
    store.read(replay.snapshot(), 0.0, wall_time=replay.wall_time())
    assert abs(store.snapshot.skew_seconds) < 0.002  # times are written to the millisecond
    (release,) = store.snapshot.held
    return release


def raw(folder: Path, truth: dict[str, Any], name: str) -> dict[str, Any]:
    """The held release of a case, as the guard showed it."""
    number = next(row["number"] for row in truth["releases"] if row["name"] == name)
    held = Replay(folder / f"{number:02}.fedrec").snapshot().state["held"]
    assert isinstance(held[0], dict)
    return dict(held[0])


def test_there_are_thirty_and_ten_of_them_are_bad(truth: dict[str, Any]) -> None:
    assert [row["number"] for row in truth["releases"]] == list(range(1, 31))
    assert sum(row["bad"] for row in truth["releases"]) == 10
    assert {row["name"] for row in truth["releases"]} == {case.name for case in cases()}
    assert all(bool(row["what"]) == row["bad"] for row in truth["releases"])


def test_each_is_held_by_the_policy_and_can_be_answered(folder: Path, truth: dict[str, Any]) -> None:
    everything = Replay(folder / "releases.fedrec", clock=still)
    for row in truth["releases"]:
        alone = Replay(folder / f"{row['number']:02}.fedrec", clock=still)
        release = shown(alone)
        everything.seek((row["number"] - 1) * truth["stretch_seconds"] + 30.0)
        assert shown(everything) == release
        assert (release.id, release.digest, release.run) == (row["release"], row["digest"], row["run"])
        assert release.run.startswith(f"release-{row['number']:02}")
        assert release.answerable and release.count("deny") == 0 and release.count("hold") >= 1
        assert alone.query("approval", {"release": release.id})["digest"] == release.digest
        assert not alone.header.share_safe
        alone.seek(5.0)
        assert next(alone.watch(0)).name in ("release.held", "sent")


def test_a_seed_gives_the_same_releases_in_the_same_order(
    folder: Path, truth: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = releases.cases()
    monkeypatch.setattr(releases, "cases", lambda: [case for case in known if case.name.endswith("-1")])
    monkeypatch.setattr(releases, "QUESTIONS", ())
    again, other = (releases.write_set(tmp_path / name, seed) for name, seed in (("a", SEED), ("b", SEED + 1)))
    once_more = releases.write_set(tmp_path / "c", SEED)

    def facts(found: dict[str, Any]) -> list[tuple[str, str]]:
        return [(row["name"], row["digest"]) for row in found["releases"]]

    assert facts(again) == facts(once_more) != facts(other)


def test_what_was_planted_is_in_what_the_guard_shows(folder: Path, truth: dict[str, Any]) -> None:
    """Those of which the view itself tells something; the others are told by queries, or by nothing yet."""

    def measured(release: dict[str, Any], rule: str) -> Any:
        return next(row for row in release["policy"]["rules"] if row["rule"] == rule)

    def of(name: str) -> dict[str, Any]:
        return raw(folder, truth, name)

    usual = of("usual-update-3")
    assert "no hit" in of("usual-answers-3")["findings"]
    assert "overlap/" in of("near-match")["findings"]
    assert of("norm-outlier")["norm"] > 1.7 * usual["norm"]
    assert of("changed-policy")["policy"]["digest"] != usual["policy"]["digest"]
    assert of("usual-update-5")["policy"]["digest"] == usual["policy"]["digest"]
    day = measured(of("budget-jump"), "day bytes")
    assert day["measured"] > 0.85 * day["limit"] and measured(usual, "day bytes")["measured"] < 0.4 * day["limit"]
    assert of("new-destination")["leaves"]["destination"]["address"] != usual["leaves"]["destination"]["address"]
    assert "rank 16" in of("another-form")["leaves"]["kinds"][0]["items"]
    assert of("longer-answers")["leaves"]["bytes"] > 3 * of("usual-answers-3")["leaves"]["bytes"]
    sets = measured(of("second-of-the-round"), "factor sets per round")
    assert sets["measured"] == 2 and measured(usual, "factor sets per round")["measured"] == 1


def answers(truth: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    found = [
        {"number": row["number"], "answer": "reject" if row["bad"] else "approve", "seconds": 30.0}
        for row in truth["releases"]
    ]
    for row, name in zip(found, (row["name"] for row in truth["releases"]), strict=True):
        row["answer"] = changes.get(name.replace("-", "_"), row["answer"])
    return found


def test_scoring(truth: dict[str, Any]) -> None:
    score = releases.score
    perfect = score(truth, answers(truth))
    assert perfect["passed"] and (perfect["caught"], perfect["good_refused"]) == (10, 0)
    two_missed = score(truth, answers(truth, near_match="approve", budget_jump="approve", usual_update_1="reject"))
    assert two_missed["passed"] and sorted(two_missed["missed"]) == ["budget-jump", "near-match"]
    missed = {"near_match": "approve", "budget_jump": "approve", "norm_outlier": "approve"}
    assert not score(truth, answers(truth, **missed))["passed"]
    assert not score(truth, answers(truth, usual_update_1="reject", usual_update_2="reject"))["passed"]
    slow = [{**row, "seconds": 60.0} for row in answers(truth)]
    assert not score(truth, slow)["passed"]
    assert not score(truth, answers(truth)[:-1])["passed"]
    assert not score(truth, [])["passed"]
    for wrong in (
        {"number": 31}, {"number": True}, {"number": []}, {"answer": "maybe"}, {"answer": None}, {"seconds": True},
        {"seconds": -1}, {"seconds": float("nan")},
    ):  # fmt: skip
        (name,) = wrong
        with pytest.raises(UsageError, match=f"answer 1: {name} .* is n") as refused:
            score(truth, [{**answers(truth)[0], **wrong}])
        assert refused.value.hint == f"a line reads {releases.ANSWER}"
        with pytest.raises(UsageError, match=f"answer 1: {name} is missing"):
            score(truth, [{key: value for key, value in answers(truth)[0].items() if key != name}])
    with pytest.raises(UsageError, match="answer 2: number 1 was answered before"):
        score(truth, [answers(truth)[0]] * 2)


def test_the_help_says_what_an_answer_looks_like(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        releases.main(["--help"])
    assert " ".join(releases.ANSWER.split()) in " ".join(capsys.readouterr().out.split())


def test_the_command_scores_and_says_what_is_wrong(
    folder: Path, truth: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in answers(truth)))
    assert releases.main(["--out", str(folder), "--score", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["caught"] == 10
    path.write_text("".join(json.dumps(row | {"answer": "approve"}) + "\n" for row in answers(truth)))
    assert releases.main(["--out", str(folder), "--score", str(path)]) == 1
    path.write_text("approve\n")
    assert releases.main(["--out", str(folder), "--score", str(path)]) == 2
    assert "answers.jsonl:1" in capsys.readouterr().err
    assert releases.main(["--out", str(tmp_path), "--score", str(path)]) == 8
    assert releases.main(["--out", str(folder)]) == 6  # it replaces no set
    with pytest.raises(NotFoundError):
        releases.read_answers(tmp_path / "no.jsonl")
