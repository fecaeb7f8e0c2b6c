"""When a guard sends, while its trainer works, is a matter of its own clock: no word of the trainer moves it (T11)."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from silo.guard.trainer_process.supervisor import TrainerSaid
from silo.link import LinkMessage
from tests.policies import setting
from tests.world import ADAPTER, Loop, TimedQueue

POLICY = setting.policy_of(setting.policy_text())
FEDAVG = setting.PLAN.model_copy(update={"method": "fedavg-grpo"})
EACH_SECONDS = 0.01  # what an event takes the guard
STEP = LinkMessage("step", {"round": 1, "step": 1, "phase": "rollout"})
PLANNED = LinkMessage("planned", {"overlong": {}, "private_prompts": 40})
DONE = LinkMessage("done", {"task": "PrivateStep", "round": 1, "metrics": {}})
SECONDS = 32.0

Said = list[tuple[float, LinkMessage]]  # when, after the trainer was given its first step
WORDS: dict[str, Said] = {
    "4.3": [(4.3, STEP)],
    "4.6": [(4.6, STEP)],
    "4.9": [(4.9, STEP)],
    "often": [(at / 7, STEP) for at in range(200)],
    "always": [(0.0, STEP)] * 3000,
    "planned": [(4.4, PLANNED), (11.7, PLANNED)],
    "of no kind": [(5.5, LinkMessage("shout", {})), (19.2, LinkMessage("shout", {}))],
    "step after step": [(4.3, DONE), (9.9, DONE), (14.6, DONE)],
}


def moments(folder: Path, words: Said, *, waiting: bool = False) -> list[tuple[str, float]]:
    """What leaves, and when after the trainer was given its first step, by the guard's clock.

    waiting: the first heartbeat is answered with word of other silos' checkpoints, which are then fetched.
    """
    with closing(Loop(folder, POLICY, events_of=partial(TimedQueue, each_seconds=EACH_SECONDS))) as loop:
        loop.offer_plan(FEDAVG)
        loop.open_round(plan=FEDAVG, public=False)
        loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run=FEDAVG.run, round=1)
        loop.base_evaluated()
        loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
        assert loop.trainer.tasks()[-1] == "PrivateStep"
        if waiting:
            loop.coordinator.says("control.heartbeat", "control.ack", pb.Ack(checkpoints=True))
        events: Any = loop.events
        begun, before = loop.clock, len(loop.coordinator.sent)
        for at, message in words:
            events.put_at(begun + at, TrainerSaid(message))
        left: list[tuple[str, float]] = []
        loop.coordinator.on_send = lambda: left.append(("", round(loop.clock - begun, 1)))
        loop.live(SECONDS)
        assert loop.trainer.tasks()[-1] == "PrivateStep" and not loop.bench.gate.halted
        kinds = [envelope.kind for envelope, _ in loop.coordinator.sent[before:]]
        return [(kind, at) for kind, (_, at) in zip(kinds, left, strict=True)]


@pytest.mark.parametrize("waiting", [False, True], ids=["", "checkpoints wait"])
@pytest.mark.parametrize("words", list(WORDS))
def test_T11_no_word_of_a_trainer_that_works_moves_a_message(tmp_path: Path, words: str, waiting: bool) -> None:
    silent = moments(tmp_path / "silent", [], waiting=waiting)
    assert [at for kind, at in silent if kind == "control.heartbeat"][:2] == [5.0, 15.0]
    assert ("control.checkpoint" in dict(silent)) == waiting
    assert moments(tmp_path / "speaks", WORDS[words], waiting=waiting) == silent
