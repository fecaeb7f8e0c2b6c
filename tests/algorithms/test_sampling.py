"""The guard draws the rows, and so knows on how many records a round was trained, how often and how long (T7, T19)."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import ExportDelta, GeneratePublic, LoadAdapter, PrivateStep, PublicStep
from silo.sampling import TaskGiver, Training
from tests.simulated.paper_federation import PaperFederation, plan_of

SECRET = b"secret"


def giver(count: int, state_path: Path | None = None, *, secret: bytes = SECRET, **plan: object) -> TaskGiver:
    return TaskGiver(plan_of(**{"prompts_per_step": 3, **plan}), count, secret, state_path)


def rows_of_round(given: TaskGiver, number: int, private_steps: int) -> list[tuple[int, ...]]:
    given.with_rows_drawn(LoadAdapter(number, ""))
    rows = []
    for step in range(1, private_steps + 1):
        task = given.with_rows_drawn(PrivateStep(number, step))
        assert isinstance(task, PrivateStep) and (task.round, task.step) == (number, step)
        rows.append(task.rows)
    given.with_rows_drawn(ExportDelta(number))
    return rows


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 40])
@pytest.mark.parametrize("private_steps", [0, 1, 2, 5])
def test_T07_what_is_counted_is_what_was_given(count: int, private_steps: int) -> None:
    given = giver(count)
    for number in (1, 2, 3):
        times = Counter(row for rows in rows_of_round(given, number, private_steps) for row in rows)
        assert given.training == Training(len(times), max(times.values(), default=0), private_steps, count)
        assert all(0 <= row < count for row in times)
        # a round begins and ends inside a pass: a row comes at most once in each pass that it touches
        drawn = sum(times.values())
        assert max(times.values(), default=0) <= max(0, drawn - 2) // count + 2
        assert max(times.values(), default=0) <= private_steps + 1, "what ruleset pubswap allows"


def test_T07_public_steps_count_as_steps_and_as_no_record() -> None:
    given = giver(40)
    given.with_rows_drawn(LoadAdapter(1, ""))
    for step in (1, 2):
        given.with_rows_drawn(GeneratePublic(1, step, (0,), "correct"))
        given.with_rows_drawn(PublicStep(1, step, "none", pb.PublicDonors()))
    assert given.training is None, "nothing is said of a round that has not ended"
    given.with_rows_drawn(ExportDelta(1))
    assert given.training == Training(0, 0, 2, 40)


def test_a_round_begins_with_nothing_counted() -> None:
    given = giver(40)
    rows_of_round(given, 1, 5)
    given.with_rows_drawn(LoadAdapter(2, ""))
    assert given.training is None
    given.with_rows_drawn(PrivateStep(2, 1))
    given.with_rows_drawn(ExportDelta(2))
    assert given.training == Training(3, 1, 1, 40)


def test_T19_rows_follow_from_the_site_secret_and_no_method_names_any() -> None:
    ours = [rows_of_round(giver(1000), 1, 3) for _ in range(2)]
    assert ours[0] == ours[1]
    assert rows_of_round(giver(1000, secret=b"another"), 1, 3) != ours[0]
    assert rows_of_round(giver(1000, seed=8), 1, 3) != ours[0]
    for method in METHODS.values():
        played = PaperFederation(plan_of(method=method.name), method, lambda ready: 0)
        played.run()
        private = [task for tasks in played.trained.values() for task in tasks if isinstance(task, PrivateStep)]
        assert private and all(task.rows == () for task in private)


def test_a_guard_that_is_started_again_repeats_a_round_and_goes_on_after_it(tmp_path: Path) -> None:
    undisturbed = giver(50)
    whole = [rows_of_round(undisturbed, number, 4) for number in (1, 2, 3)]
    state = tmp_path / "deep" / "sampler.json"
    assert rows_of_round(giver(50, state), 1, 4) == whole[0]
    torn = giver(50, state)
    torn.with_rows_drawn(LoadAdapter(2, ""))
    torn.with_rows_drawn(PrivateStep(2, 1))
    assert rows_of_round(giver(50, state), 2, 4) == whole[1]
    again = giver(50, state)
    assert rows_of_round(again, 3, 4) == whole[2] and again.training == Training(12, 1, 4, 50)
    assert state.stat().st_mode & 0o777 == 0o600 and state.parent.stat().st_mode & 0o777 == 0o700


def test_training_as_json() -> None:
    training = Training(64, 2, 20, 100)
    assert Training.from_json(asdict(training)) == training and Training.from_json(None) is None
    # what an earlier version kept does not say how many rows there are
    assert Training.from_json({"records": 64, "epochs": 2, "steps": 20}) == Training(64, 2, 20, 0)
    assert isinstance(plan_of(), Plan)
