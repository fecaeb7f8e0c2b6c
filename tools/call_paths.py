"""How much code one message runs through: `python -m tools.call_paths` prints it as JSON.

Each path lies between two edges of the guard that the tests run in memory, and has all functions of the product that
are called between them, in whichever package:

- delta: from taking up that the trainer is done with `ExportDelta` to handing `lora.factors` to the channel;
- response: from taking up that it is done with `GeneratePublic` to handing `public.responses` to the channel;
- adapter: from the channel's answer to `control.fetch` to telling the trainer `LoadAdapter`;
- private_step: the first private step of a round in the trainer, without the link to the guard and what the guard does
  before it: drawing the rows.

The edges are what the harness of the tests puts in place of the world: the queue of events, the channel and the
trainer. So a path does not depend on how the product calls its own parts. Each is the first of its kind in a fresh
process, where nothing is cached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.tasks import LoadAdapter, PrivateStep
from silo.guard.trainer_process.supervisor import TrainerSaid
from silo.link import LinkMessage
from tests.policies import setting
from tests.world import ADAPTER, Loop
from tools.call_tracer import Tracer
from tools.source_counts import ROOT

TASKS_MAX = 50


class TracedRound:
    """One round of a guard in memory, with a trainer that is done with each task as soon as it is given it."""

    def __init__(self, folder: Path) -> None:
        self._figures: dict[str, dict[str, int]] = {}
        self._traced, self._tracer = "", Tracer()
        self._task: dict[str, Any] = {}  # what the trainer was told last
        # No time passes, else what is due by the clock would be done in between.
        self._loop = Loop(folder, setting.policy_of(setting.policy_text()), turn_seconds=0.0)
        self._watch_edges()

    def play(self) -> dict[str, dict[str, int]]:
        """Run the round until the delta has left, and return the figures of each path.

        Raises:
            RuntimeError: another message leaves than the one that a path ends with, or no delta does.
        """
        loop = self._loop
        loop.offer_plan()
        loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run=setting.PLAN.run, round=1)
        loop.open_round()
        loop.base_evaluated()
        for _ in range(TASKS_MAX):
            self._finish_task()
            if "delta" in self._figures:
                loop.close()
                return self._figures
        raise RuntimeError(f"no delta leaves in {TASKS_MAX} tasks; the trainer was given {loop.trainer.tasks()}")

    def _finish_task(self) -> None:
        """Have the trainer say that it is done with what it was told last; donors come with the next poll."""
        loop = self._loop
        self._task = next(message.fields for message in reversed(loop.trainer.told) if message.type == "task")
        loop.coordinator.script.pop("control.poll", None)
        if self._task["task"] == "GeneratePublic":
            place = {"run": setting.PLAN.run, "round": 1, "step": self._task["step"]}
            loop.coordinator.says("control.poll", "public.donors", _donors(self._task), **place)
        loop.trainer_says("done", _result(self._task), task=self._task["task"], round=1, metrics={})

    # ---- edges -------------------------------------------------------------------------------------

    def _watch_edges(self) -> None:
        """Begin and end the paths where the guard meets what the harness puts in place of the world."""
        harness: Any = self._loop
        take, exchange, tell = harness.events.get, harness.coordinator.exchange, harness.trainer.send

        def taken(*arguments: Any, **options: Any) -> Any:
            event = take(*arguments, **options)
            if isinstance(event, TrainerSaid):
                self._begin(_BEGINS.get(self._task.get("task", ""), ""))
            return event

        def exchanged(envelope: pb.Envelope, payload: Any, **options: Any) -> Any:
            self._end(_ENDS.get(envelope.kind, envelope.kind))
            reply = exchange(envelope, payload, **options)
            if envelope.kind == "control.fetch":
                self._begin("adapter")
            return reply

        def told(message: LinkMessage) -> None:
            if message.fields.get("task") == "LoadAdapter":
                self._end("adapter")
            tell(message)

        harness.events.get, harness.coordinator.exchange, harness.trainer.send = taken, exchanged, told

    def _begin(self, path: str) -> None:
        if path and path not in self._figures:
            self._traced, self._tracer = path, Tracer()
            self._tracer.start()

    def _end(self, path: str) -> None:
        self._tracer.stop()
        if self._traced and self._traced != path:
            raise RuntimeError(f"the path of the {self._traced} meets {path!r} first")
        if self._traced:
            self._figures[self._traced], self._traced = self._tracer.figures(), ""


_BEGINS = {"GeneratePublic": "response", "ExportDelta": "delta"}  # by task
_ENDS = {"public.responses": "response", "lora.factors": "delta"}  # by kind


def _donors(task: dict[str, Any]) -> pb.PublicDonors:
    donors = pb.PublicDonors()
    for prompt in task["prompt_indices"]:
        donor = donors.prompts.add(prompt_index=prompt).donors.add(origin="hospital_b")
        donor.response.CopyFrom(pb.Response(text="12", finish=pb.FINISH_STOP))
    return donors


def _result(task: dict[str, Any]) -> bytes:
    """Return what the trainer offers: two right answers and none by turns, or a small delta."""
    if task["task"] == "GeneratePublic":
        texts = [("12", "12") if place % 2 == 0 else () for place in range(len(task["prompt_indices"]))]
        return codec.encode(setting.responses_body(*zip(task["prompt_indices"], texts, strict=True)))
    if task["task"] == "ExportDelta":
        adapter = codec.decode_factors(ADAPTER).tensors
        return codec.encode_factors(
            {name: values * np.float32(1e-3) for name, values in adapter.items()},
            base_digest=codec.sha256_hex(ADAPTER),
            schema_sha256=setting.SCHEMA.digest,
            rank=2,
            scale=2.0,
            dtype="float32",
        )
    return b""


def private_step() -> dict[str, int]:
    """Return the figures of a trainer's first private step, on the small model of its tests."""
    from silo.trainer.session import Session  # torch takes seconds to load
    from tests.algorithms.tiny import make_session, start_payload

    session, shape = make_session()
    adapter, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), adapter)
    task, tracer = session.giver.with_rows_drawn(PrivateStep(1, 1)), Tracer()  # its rows are drawn by the guard
    tracer.start()
    Session.carry_out(session, task)
    tracer.stop()
    return tracer.figures()


def in_fresh_process() -> dict[str, dict[str, int]]:
    """Return the figures of all paths, the same in each run: no cache is warm, and sets have one order."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"the paths cannot be traced:\n{done.stderr}")
    figures: dict[str, dict[str, int]] = json.loads(done.stdout)
    return figures


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fedsilo-paths-") as folder:
        figures = TracedRound(Path(folder) / "silo").play()
    sys.stdout.write(json.dumps({**figures, "private_step": private_step()}) + "\n")


if __name__ == "__main__":
    main()
