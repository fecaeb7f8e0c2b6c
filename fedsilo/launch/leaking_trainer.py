"""A trainer that tries to get private data out: what `fedsilo demo --leak` puts beside one silo's guard.

    python -m fedsilo.launch.leaking_trainer --address unix:PATH --attack NAME ... --report FILE

It is the real trainer with a hostile link: it trains as agreed, and in the messages of its choice puts values of its
own. It runs as the site's own user without walls and may read everything there, so only the guard stands in its way.
What each attempt was is written to --report for the demo to look up in the guard's audit log.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.edge.task_files import read_tasks
from fedsilo.treaty.errors import FedSiloError
from fedsilo.treaty.wire import codec
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from silo.link import Link, LinkMessage


@dataclass(frozen=True)
class Attack:
    """Attributes:
    task: of the trainer, whose result it changes.
    kind: of the message that comes of it.
    rule: made against it; the guard's verdict counts only if this one is among those that deny.
    """

    task: str
    kind: str
    rule: str


ATTACKS = {
    "prompt_as_response": Attack("GeneratePublic", "public.responses", "answers graded again"),
    "prompt_in_tensor_name": Attack("ExportDelta", "lora.factors", "tensor set"),
    "extra_tensor": Attack("ExportDelta", "lora.factors", "tensor set"),
    "off_grid_number": Attack("Evaluate", "metrics.eval", "metric grid"),
}
_OFF_GRID = 0.0000123456789


class HostileLink:
    """A link that changes what its trainer says.

    Args:
        link: to the guard.
        attacks: names, each tried once, at the first message it fits.
        report: told {name, kind, round, step} of each attempt.
        crash: text of the failure reported in place of the last evaluation; empty for none.
    """

    def __init__(
        self, link: Link, attacks: Sequence[str], report: Callable[[dict[str, Any]], None], *, crash: str
    ) -> None:
        self._link = link
        self._left = list(attacks)
        self._report = report
        self._crash = crash
        self._prompts: list[str] = []
        self._rounds = 0

    def receive(self) -> LinkMessage:
        message = self._link.receive()
        if self._crash and _is_last_evaluation(message, self._rounds):
            # as a trainer does whose exception quotes what it was working on
            self._link.send(LinkMessage("failed", {"code": self._crash, "message": self._crash, "hint": self._crash}))
            return self._link.receive()
        if message.type == "configure":
            tasks = [task for path in message.fields["private"] for task in read_tasks(Path(path)).rows]
            self._prompts = [task.prompt for task in reversed(tasks)]
        elif message.type == "plan":
            self._rounds = int(json.loads(message.fields["canonical_json"])["rounds"])
        return message

    def send(self, message: LinkMessage) -> None:
        name = self._attack_for(message)
        if not name:
            self._link.send(message)
            return
        body = self._changed(name, message.body)
        if body == message.body:
            self._link.send(message)  # nothing to speak through here, such as a step without prompts
            return
        self._link.send(LinkMessage(message.type, message.fields, body))
        self._left.remove(name)
        step = int(message.fields["step"]) if ATTACKS[name].task == "GeneratePublic" else 0
        self._report({"name": name, "kind": ATTACKS[name].kind, "round": int(message.fields["round"]), "step": step})

    def _attack_for(self, message: LinkMessage) -> str:
        """The next attack that this message could carry; empty for none. The base model's evaluation carries none."""
        if message.type != "done" or not int(message.fields["round"]):
            return ""
        return next((name for name in self._left if ATTACKS[name].task == message.fields["task"]), "")

    def _changed(self, name: str, body: bytes) -> bytes:
        return {
            "prompt_as_response": self._prompt_as_response,
            "prompt_in_tensor_name": self._prompt_in_tensor_name,
            "extra_tensor": self._extra_tensor,
            "off_grid_number": self._off_grid_number,
        }[name](body)

    def _prompt_as_response(self, body: bytes) -> bytes:
        message = codec.decode(pb.PublicResponses, body)
        for row, prompt in zip(message.prompts, self._prompts, strict=False):
            del row.responses[:]
            row.responses.add(text=prompt, finish=pb.FINISH_STOP)
        return codec.encode(message)

    def _prompt_in_tensor_name(self, body: bytes) -> bytes:
        return self._with_tensor(body, self._prompts[0], rename=True)

    def _extra_tensor(self, body: bytes) -> bytes:
        return self._with_tensor(body, "model.layers.0.self_attn.q_proj.notes", rename=False)

    def _with_tensor(self, body: bytes, name: str, *, rename: bool) -> bytes:
        """All tensors with the first one renamed, or with one more that holds a prompt in its values."""
        factors = codec.decode_factors(body)
        tensors = dict(factors.tensors)
        if rename:
            tensors[name] = tensors.pop(sorted(tensors)[0])
        else:
            text = self._prompts[0].encode()
            tensors[name] = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), dtype="<f4")
        header = factors.header
        return codec.encode_factors(
            tensors, base_digest=header.base_digest, schema_sha256=header.schema_sha256, rank=header.rank,
            scale=header.scale, dtype=header.dtype,
        )  # fmt: skip

    def _off_grid_number(self, body: bytes) -> bytes:
        message = codec.decode(pb.MetricsEval, body)
        message.metrics[0].value += _OFF_GRID
        return codec.encode(message)


def _is_last_evaluation(message: LinkMessage, rounds: int) -> bool:
    fields = message.fields
    return message.type == "task" and fields["task"] == "Evaluate" and 0 < rounds == int(fields["round"])


def main(arguments: Sequence[str] | None = None) -> int:
    from silo.trainer.fences import set_offline
    from silo.trainer.worker import Worker, dial_patiently

    parser = argparse.ArgumentParser(prog="python -m fedsilo.launch.leaking_trainer", description="A hostile trainer.")
    parser.add_argument("--address", required=True, help="the guard: unix:PATH")
    parser.add_argument("--attack", action="append", default=[], choices=ATTACKS, help="what to try; may be repeated")
    parser.add_argument("--report", type=Path, required=True, help="gets a JSON line for each attempt")
    parser.add_argument("--crash", default="", help="text of a failure in place of the last evaluation")
    parser.add_argument("--wait-seconds", type=float, default=0.0, help="keep dialling so long until the guard listens")
    options = parser.parse_args(arguments)
    set_offline(os.environ)

    def report(attempt: dict[str, Any]) -> None:
        with options.report.open("a", encoding="utf-8") as out:
            out.write(json.dumps(attempt) + "\n")

    try:
        link = dial_patiently(options.address, None, options.wait_seconds)
        try:
            Worker(HostileLink(link, options.attack, report, crash=options.crash), None).run()
        finally:
            link.close()
    except FedSiloError as error:
        sys.stderr.write(f"error: {error.message} [{error.code}]\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
