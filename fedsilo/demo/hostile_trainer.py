"""A trainer that tries to get private data out: `fedsilo demo --leak` and `--attack NAME`.

    python -m fedsilo.demo.hostile_trainer --address unix:PATH --attack NAME ... --report FILE

It is the real trainer with a hostile link: it trains as agreed, and in the messages of its choice puts values of its
own. It runs as the site's own user without a sandbox and may read everything there, so only the guard stands in its
way. What each attempt was is written to --report for the demo to look up in the guard's audit log.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.files.task_files import read_tasks
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array
from fedsilo.protocol.errors import FedSiloError
from silo.link import LinkMessage, MessageLink

_OFF_GRID = 0.0000123456789

Prompts = Sequence[str]


def factors_of(header: pb.Factors, arrays: Sequence[Array], *, beside: bytes = b"") -> bytes:
    """A tensor payload exactly as given: what `codec.encode_factors` would make canonical stays as it is."""
    head = codec.encode(header) + beside
    return (
        len(head).to_bytes(8, "little") + head + b"".join(array.astype("<f4", copy=False).tobytes() for array in arrays)
    )


def with_tensors(change: Callable[[dict[str, Array], Prompts], None]) -> Callable[[bytes, Prompts], bytes]:
    """`change` is given a copy of the tensors by name."""

    def changed(body: bytes, prompts: Prompts) -> bytes:
        factors = codec.decode_factors(body)
        tensors = {name: np.array(values, np.float32) for name, values in factors.tensors.items()}
        change(tensors, prompts)
        header = header_like(factors.header)
        for name in sorted(tensors):
            header.tensors.add(name=name, shape=tensors[name].shape)
        return factors_of(header, [tensors[name] for name in sorted(tensors)])

    return changed


def header_like(header: pb.Factors) -> pb.Factors:
    """A copy of a header that names no tensor."""
    made = pb.Factors()
    made.CopyFrom(header)
    del made.tensors[:]
    return made


def rename_first(tensors: dict[str, Array], name_of: Callable[[str], str]) -> None:
    first = sorted(tensors)[0]
    tensors[name_of(first)] = tensors.pop(first)


def _one_more(tensors: dict[str, Array], prompts: Prompts) -> None:
    text = prompts[0].encode()
    tensors["model.layers.0.self_attn.q_proj.notes"] = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), dtype="<f4")


def with_answers(change: Callable[[pb.PublicResponses, Prompts], object]) -> Callable[[bytes, Prompts], bytes]:
    """`change` is given the message with the answers."""

    def changed(body: bytes, prompts: Prompts) -> bytes:
        message = codec.decode(pb.PublicResponses, body)
        change(message, prompts)
        return codec.encode(message)

    return changed


def _prompts_as_answers(message: pb.PublicResponses, prompts: Prompts) -> None:
    for row, prompt in zip(message.prompts, prompts, strict=False):
        del row.responses[:]
        row.responses.add(text=prompt, finish=pb.FINISH_STOP)


def with_metrics(change: Callable[[pb.MetricsEval, Prompts], object]) -> Callable[[bytes, Prompts], bytes]:
    """`change` is given the message with the metrics."""

    def changed(body: bytes, prompts: Prompts) -> bytes:
        message = codec.decode(pb.MetricsEval, body)
        change(message, prompts)
        return codec.encode(message)

    return changed


def _off_grid(message: pb.MetricsEval, prompts: Prompts) -> None:
    message.metrics[0].value += _OFF_GRID


# ---- which message carries what ----------------------------------------------------------------------


@dataclass(frozen=True)
class Forgery:
    """The messages of one attack: the trainer's message that comes of `task` is replaced by those that `forge`
    makes."""

    task: str
    forge: Callable[[LinkMessage, Prompts], Iterable[LinkMessage]]


def of_body(task: str, change: Callable[[bytes, Prompts], bytes]) -> Forgery:
    """A forgery of the message's body alone."""
    return Forgery(task, lambda said, prompts: [LinkMessage(said.type, said.fields, change(bytes(said.body), prompts))])


EXPORT, GENERATE, EVALUATE = "ExportDelta", "GeneratePublic", "Evaluate"
FORGERIES: dict[str, Forgery] = {
    "prompt_as_response": of_body(GENERATE, with_answers(_prompts_as_answers)),
    "prompt_in_tensor_name": of_body(
        EXPORT, with_tensors(lambda tensors, prompts: rename_first(tensors, lambda _: prompts[0]))
    ),
    "extra_tensor": of_body(EXPORT, with_tensors(_one_more)),
    "off_grid_number": of_body(EVALUATE, with_metrics(_off_grid)),
}


# ---- the link ----------------------------------------------------------------------------------------


class HostileLink:
    """A link that changes what its trainer says.

    Args:
        link: to the guard.
        attacks: names, each tried once, at the first message it fits.
        report: told {name, run, round, step} of each attempt.
        crash: text of the failure reported in place of the last evaluation; empty for none.
    """

    forgeries: Mapping[str, Forgery] = FORGERIES
    step_tasks: tuple[str, ...] = (GENERATE,)

    def __init__(
        self, link: MessageLink, attacks: Sequence[str], report: Callable[[dict[str, Any]], None], *, crash: str
    ) -> None:
        self._link = link
        self._left = list(attacks)
        self._report = report
        self._crash = crash
        self.prompts: list[str] = []
        self._rounds = 0
        self._run = ""

    def receive(self) -> LinkMessage:
        message = self._link.receive()
        if self._crash and _is_last_evaluation(message, self._rounds):
            # as a trainer does whose exception quotes what it was working on
            self._link.send(LinkMessage("failed", {"code": self._crash, "message": self._crash, "hint": self._crash}))
            return self._link.receive()
        if message.type == "configure":
            tasks = [task for path in message.fields["private"] for task in read_tasks(Path(path)).rows]
            self.prompts = [task.prompt for task in reversed(tasks)]
        elif message.type == "plan":
            plan = json.loads(message.fields["canonical_json"])
            self._rounds, self._run = int(plan["rounds"]), str(plan["run"])
        return message

    def send(self, message: LinkMessage) -> None:
        name = self.attack_for(message)
        said = []
        for each in self.forgeries[name].forge(message, self.prompts) if name else [message]:
            self._link.send(each)
            said.append(each)
        if not name or said == [message]:
            return  # nothing to speak through here, such as a step without prompts
        self._left.remove(name)
        of_step = self.forgeries[name].task in self.step_tasks
        self._report(
            {
                "name": name, "run": self._run, "round": int(message.fields.get("round", 1)),
                "step": int(message.fields["step"]) if of_step else 0,
            }
        )  # fmt: skip

    def attack_for(self, message: LinkMessage) -> str:
        """Return the next attack that this message could carry; empty for none. The base model's evaluation carries
        none."""
        if message.type != "done" or not int(message.fields["round"]):
            return ""
        return self.next_attack(message.fields["task"])

    def next_attack(self, task: str) -> str:
        """Return the next attack on a task that was not made yet; empty for none."""
        return next((name for name in self._left if self.forgeries[name].task == task), "")


def _is_last_evaluation(message: LinkMessage, rounds: int) -> bool:
    fields = message.fields
    return message.type == "task" and fields["task"] == EVALUATE and 0 < rounds == int(fields["round"])


def main(arguments: Sequence[str] | None = None, link_class: type[HostileLink] = HostileLink) -> int:
    """Dial the guard and train, with a link of that class."""
    from silo.trainer.worker import Worker, dial_patiently, set_offline

    parser = argparse.ArgumentParser(description="A hostile trainer.")
    parser.add_argument("--address", required=True, help="the guard: unix:PATH")
    parser.add_argument(
        "--attack", action="append", default=[], choices=link_class.forgeries, help="what to try; may be repeated"
    )
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
            Worker(link_class(link, options.attack, report, crash=options.crash), None).run()
        finally:
            link.close()
    except FedSiloError as error:
        sys.stderr.write(f"error: {error.message} [{error.code}]\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
