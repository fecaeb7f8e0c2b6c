"""The set of thirty releases: made by the real gate, replayed as it was made, and scored against its truth."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import releases
from benchmarks.release_cases import cases
from console.feed import Store
from console.recording import Replay
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.views.state import Release

pytestmark = pytest.mark.slow  # the set takes a third of a minute to make
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


def test_each_is_held_by_the_policy_and_can_be_answered(folder: Path, truth: dict[str, Any]) -> None:
    rows = truth["releases"]
    assert [row["number"] for row in rows] == list(range(1, 31)) and sum(row["bad"] for row in rows) == 10
    assert {row["name"] for row in rows} == {case.name for case in cases()}
    everything = Replay(folder / "releases.fedrec", clock=still)
    for row in rows:
        assert bool(row["what"]) == row["bad"]
        alone = Replay(folder / f"{row['number']:02}.fedrec", clock=still)
        release = shown(alone)
        everything.seek((row["number"] - 1) * truth["stretch_seconds"] + 30.0)
        assert shown(everything) == release
        assert (release.id, release.digest, release.run) == (row["release"], row["digest"], row["run"])
        assert release.answerable and release.count("deny") == 0 and release.count("hold") >= 1
        assert alone.query("approval", {"release": release.id})["digest"] == release.digest
        assert not alone.share_safe
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

    def of(name: str) -> dict[str, Any]:
        number = next(row["number"] for row in truth["releases"] if row["name"] == name)
        (held,) = Replay(folder / f"{number:02}.fedrec").snapshot().state["held"]
        return dict(held)

    def measured(name: str, rule: str) -> float:
        row = next(row for row in of(name)["policy"]["rules"] if row["rule"] == rule)
        return float(row["measured"] / row["limit"])

    usual = of("usual-update-3")
    assert "no hit" in of("usual-answers-3")["findings"] and "overlap/" in of("near-match")["findings"]
    assert of("norm-outlier")["norm"] > 1.7 * usual["norm"]
    assert of("changed-policy")["policy"]["digest"] != usual["policy"]["digest"]
    assert of("usual-update-5")["policy"]["digest"] == usual["policy"]["digest"]
    assert measured("budget-jump", "day bytes") > 0.85 and measured("usual-update-3", "day bytes") < 0.4
    assert of("new-destination")["leaves"]["destination"]["address"] != usual["leaves"]["destination"]["address"]
    assert "rank 16" in of("another-form")["leaves"]["kinds"][0]["items"]
    assert of("longer-answers")["leaves"]["bytes"] > 3 * of("usual-answers-3")["leaves"]["bytes"]
    sets = "factor sets per round"
    assert measured("second-of-the-round", sets) == 2 * measured("usual-update-3", sets) > 0


def answers(truth: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    found = [
        {"number": row["number"], "answer": "reject" if row["bad"] else "approve", "seconds": 30.0}
        for row in truth["releases"]
    ]
    for row, name in zip(found, (row["name"] for row in truth["releases"]), strict=True):
        row["answer"] = changes.get(name.replace("-", "_"), row["answer"])
    return found


def test_scoring(truth: dict[str, Any]) -> None:
    yes, no = "approve", "reject"
    for changes, passed, caught in (
        ({}, True, 10),
        ({"near_match": yes, "budget_jump": yes, "usual_update_1": no}, True, 8),
        ({"near_match": yes, "budget_jump": yes, "norm_outlier": yes}, False, 7),
        ({"usual_update_1": no, "usual_update_2": no}, False, 10),
    ):
        score = releases.score(truth, answers(truth, **changes))
        assert (score["passed"], score["caught"], len(score["missed"])) == (passed, caught, 10 - caught)
    for bad in ([{**row, "seconds": 60.0} for row in answers(truth)], answers(truth)[:-1], []):
        assert not releases.score(truth, bad)["passed"]
    first = answers(truth)[0]
    for name, values in (("number", (31, True, [])), ("answer", ("maybe", None)), ("seconds", (True, -1, math.nan))):
        for value in values:
            with pytest.raises(UsageError, match=f"answer 1: {name} .* is n") as refused:
                releases.score(truth, [{**first, name: value}])
            assert refused.value.hint == f"a line reads {releases.ANSWER}"
        with pytest.raises(UsageError, match=f"answer 1: {name} is missing"):
            releases.score(truth, [{key: value for key, value in first.items() if key != name}])
    with pytest.raises(UsageError, match="answer 2: number 1 was answered before"):
        releases.score(truth, [first] * 2)


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
