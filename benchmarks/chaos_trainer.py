"""A trainer without torch, for `benchmarks.chaos` and `benchmarks.soak`: a guard's child, over the real link.

Its update is one number in every place, drawn from the digest of all that the round gave it to do: adapter, rows,
steps, donors. Like the product's, it keeps its state after each task, goes on from there when asked to, and forgets
it when a plan begins anew. So an adapter that equals an undisturbed run's says that every silo was given the same, in
the same order, once. Its answers to public prompts are the right ones, so that they leave and are donors.

    python -P -m benchmarks.chaos_trainer --address unix:PATH --deaths FILE

It dies by SIGKILL where the file says so: {"deaths": [[n, how], ...]}, at the n-th message that any life of it has
heard, `before` it does anything, or `after` its answer has left.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.transport_trainer import ConstantTrainer
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import encode, encode_factors
from silo.link import LinkClosed, LinkMessage
from silo.trainer.worker import dial_patiently, set_offline

WAIT_SECONDS = 60.0
UNIT = 2.0**-20  # an update is a whole number of these, at most 64: far below what a policy clips
CHANGING = ("LoadAdapter", "PrivateStep", "GeneratePublic", "PublicStep")


class DigestTrainer(ConstantTrainer):
    def __init__(self, link: Any, deaths: Path) -> None:
        super().__init__(link, 0.0)
        self._deaths = deaths
        self._given, self._silo, self._samples = b"", "", 0
        self._kept: Path | None = None
        self._answers: list[str] = []
        self._public_sha256 = ""

    def run(self) -> None:
        with contextlib.suppress(LinkClosed):
            while (message := self._link.receive()).type != "stop":
                number = self._heard()
                self._die(number, "before")
                self._link.send(self._answer(message))
                self._die(number, "after")

    def _heard(self) -> int:
        if not self._deaths.exists():
            return 0
        told = json.loads(self._deaths.read_text())
        told["heard"] += 1
        self._deaths.write_text(json.dumps(told))
        return int(told["heard"])

    def _die(self, number: int, how: str) -> None:
        if number and [number, how] in (told := json.loads(self._deaths.read_text()))["deaths"]:
            told["died"].append([number, how])
            self._deaths.write_text(json.dumps(told))
            os.kill(os.getpid(), signal.SIGKILL)

    def _answer(self, message: LinkMessage) -> LinkMessage:
        if message.type == "configure":
            rows = Path(message.fields["public"]["path"]).read_text(encoding="utf-8").splitlines()
            self._answers = [str(json.loads(row)["answer"]) for row in rows]
            self._silo = str(message.fields["silo"])
            if not self._deaths.with_name("keeps_nothing").exists():
                self._kept = Path(message.fields["scratch"]) / "digest.json"
        if message.type == "plan":
            plan = json.loads(message.fields["canonical_json"])
            self._public_sha256, self._samples = plan["public_set_sha256"], plan["samples_per_prompt"]
        answer = super()._answer(message)
        if message.type != "plan":
            return answer
        if message.fields.get("resume") is True:
            return LinkMessage("planned", {**answer.fields, "resumed": self._resumed()})
        if self._kept is not None:
            self._kept.unlink(missing_ok=True)  # it is an earlier run's
        return answer

    def _resumed(self) -> dict[str, Any] | None:
        if self._kept is None or not self._kept.exists():
            return None
        told = json.loads(self._kept.read_text())
        self._given, self._base_digest = bytes.fromhex(told["given"]), told["base_digest"]
        return {**told["position"], "exact": True}

    def _keep(self, task: str, fields: dict[str, Any]) -> None:
        if self._kept is None:
            return
        position = {"task": task, "round": fields["round"], "step": fields.get("step", 0)}
        told = {"position": position, "given": self._given.hex(), "base_digest": self._base_digest}
        part = self._kept.with_suffix(".part")
        part.write_text(json.dumps(told))
        part.rename(self._kept)

    def _task(self, message: LinkMessage) -> LinkMessage:
        fields, task = message.fields, message.fields["task"]
        if task in CHANGING:
            if task == "LoadAdapter":
                self._given = self._silo.encode()
            told = json.dumps(fields, sort_keys=True).encode()
            given = hashlib.sha256(self._given + told + hashlib.sha256(message.body).digest()).digest()
            # answers are drawn, and change nothing: they may be asked for again
            self._given = self._given if task == "GeneratePublic" else given
        answer = self._answer_of(message, task, fields)
        if task in CHANGING:
            self._keep(task, fields)
        return answer

    def _answer_of(self, message: LinkMessage, task: str, fields: dict[str, Any]) -> LinkMessage:
        if task == "ExportDelta":
            body = self._export()
        elif task in ("GeneratePublic", "AnswerAhead"):
            body = encode(self._responses(fields["prompt_indices"]))
        else:
            return super()._task(message)
        told = {"task": task, "round": fields["round"], "step": fields.get("step", 0), "metrics": {}}
        return LinkMessage("done", told, body)

    def _export(self) -> bytes:
        number = (1 + self._given[0] % 64) * UNIT
        return encode_factors(
            {name: 0 * array + array.dtype.type(number) for name, array in self._update.items()},
            base_digest=self._base_digest, schema_sha256=self._schema_sha256, rank=self._schema["rank"],
            scale=self._schema["alpha"] / self._schema["rank"], dtype="float32",
        )  # fmt: skip

    def _responses(self, indices: Sequence[int]) -> pb.PublicResponses:
        message = pb.PublicResponses(public_set_sha256=self._public_sha256)
        for index in indices:
            row = message.prompts.add(prompt_index=index, samples=self._samples)
            row.responses.add(text=self._answers[index], finish=pb.FINISH_STOP)
        return message


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address", required=True, help="the guard: unix:PATH")
    parser.add_argument("--deaths", type=Path, required=True, help="where it dies; the file may be missing")
    given = parser.parse_args(arguments)
    set_offline(os.environ)
    with contextlib.suppress(LinkClosed):
        link = dial_patiently(given.address, None, WAIT_SECONDS)
        try:
            DigestTrainer(link, given.deaths).run()
        finally:
            link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
