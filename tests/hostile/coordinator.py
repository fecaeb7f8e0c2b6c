"""A coordinator that is honest but for what it is told to try: the X9 tests use it.

    python -m tests.hostile.coordinator --config coordinator.yaml --attack NAME ... --target SILO --report FILE

It is the real coordinator, with its real keys and its real rounds; only what seals its replies is another one, which
changes a reply before it is signed, or its envelope afterwards. So a silo must find everything out by itself.
What each attempt was is written to --report for the tests to look up in the silo's audit log.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message
from sqlalchemy.orm import Session

from coordinator import outbox
from coordinator.blobs import AnyPayload, BytesPayload
from coordinator.outbox import Replies, Reply
from fedsilo.protocol import codec
from fedsilo.protocol.place import Place
from tests.hostile.deviations import DEVIATIONS, Memory, Said


class HostileReplies(Replies):
    """Seals as the honest one does, but for what it is told to try, each once.

    Args:
        federation, sender, key, undone: as of `Replies`.
        attacks: names. Each that belongs to plans takes a run of its own.
        targets: silos that they are tried on.
        plan_targets: silos that get a changed plan; by default the same.
        report: told {name, silo, kind, run, round, step, sequence} of each attempt.
    """

    def __init__(
        self,
        federation: str,
        sender: str,
        key: Ed25519PrivateKey,
        undone: Callable[[Callable[[], None]], None],
        *,
        attacks: Sequence[str],
        targets: Sequence[str],
        plan_targets: Sequence[str] = (),
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(federation, sender, key, undone)
        self._left = sorted(attacks, key=lambda name: DEVIATIONS[name].stage)
        self._targets = (frozenset(plan_targets or targets), frozenset(targets))
        self._of_run: dict[str, str] = {}
        self._attacked: set[str] = set()
        self._report = report
        self.memory = Memory(sender, key)

    def seal(
        self,
        session: Session,
        silo: str,
        place: Place,
        *,
        body: Message | None,
        payload: AnyPayload | None,
    ) -> Reply:
        def sealed(said: Said) -> Reply:
            return super(HostileReplies, self).seal(
                session, silo, Place(said.run, said.round, said.step, said.kind), body=None,
                payload=BytesPayload(said.payload),
            )  # fmt: skip

        content = codec.encode(body) if body is not None else b""
        if payload is not None:
            content = bytes(payload.read_at(0, payload.size_bytes))
        honest = Said(silo, place.kind, content, place.run, place.round, place.step)
        name, said = self._changed(honest)
        if silo not in self.memory.spare:
            self.memory.spare[silo] = sealed(honest.as_idle())
        reply = sealed(said)
        tamper = DEVIATIONS[name].tamper if name else None
        if tamper is not None and not said.is_prepared:
            reply = tamper(said, reply, self.memory, self._key)
        if name and DEVIATIONS[name].displaces and not honest.is_idle:
            _queue_again(session, silo)
        if name:
            self.memory.just_attacked.add(silo)
        elif honest.answers_poll:
            self.memory.just_attacked.discard(silo)
        if not name:
            self.memory.note(said)
            self.memory.delivered.setdefault(silo, reply)
        elif not said.is_prepared:
            self._left = [each for each in self._left if each != name]
            # an answer to a poll for which nothing waits names no run
            self._attacked.add(self.memory.opened[silo].run if DEVIATIONS[name].displaces else said.run)
            envelope = reply.envelope
            self._report(
                {"name": name, "silo": silo, "kind": envelope.kind, "run": envelope.run,
                 "round": said.of_round or envelope.round, "step": envelope.step, "sequence": envelope.sequence}
            )  # fmt: skip
        return reply

    def _changed(self, said: Said) -> tuple[str, Said]:
        """The next attack that this reply can carry, and the reply with it; no name where there is none."""
        if said.run in self._of_run and said.kind == "run.plan" and said.silo in self._targets[0]:
            name = self._of_run[said.run]
            return name, DEVIATIONS[name].change(said, self.memory) or said
        stage = min((DEVIATIONS[name].stage for name in self._left), default=0)
        for name in self._left:
            deviation = DEVIATIONS[name]
            if deviation.stage != stage or said.silo not in self._targets[min(stage, 1)]:
                continue
            if deviation.displaces and not self.memory.lets_displace(said):
                continue
            if deviation.stage == 3 and said.run in self._attacked:
                continue
            changed = deviation.change(said, self.memory)
            if changed is not None:
                if deviation.stage == 0:
                    self._of_run[said.run] = name
                return name, changed
        return "", said


def _queue_again(session: Session, silo: str) -> None:
    """Queue all that waits for a silo anew, in its order, since what it is given now is no message of the queue: once
    it acknowledges that number or a later one, the coordinator would take the message as received."""
    for item in outbox.items(session, silo):
        outbox.queue(session, silo, Place(item.run, item.round, item.step, item.kind), item.payload)
        session.delete(item)


def main(arguments: Sequence[str] | None = None) -> int:
    # gRPC reads this when it loads, and what it says of failed handshakes becomes lines of the log.
    from coordinator.native_log import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    from coordinator.main import Ready, run_coordinator
    from fedsilo.cli.output import emit, guarded

    parser = argparse.ArgumentParser(prog="python -m tests.hostile.coordinator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="coordinator.yaml")
    parser.add_argument("--attack", action="append", default=[], choices=DEVIATIONS, help="may be repeated")
    parser.add_argument("--target", action="append", default=[], help="silo to try it on; may be repeated")
    parser.add_argument("--plan-target", action="append", default=[], help="silo that gets a changed plan")
    parser.add_argument("--report", type=Path, required=True, help="gets a JSON line for each attempt")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")

    def report(attempt: dict[str, Any]) -> None:
        with options.report.open("a", encoding="utf-8") as out:
            out.write(json.dumps(attempt) + "\n")

    with guarded("coordinator start", json_output=True):

        def replies(*given: Any) -> HostileReplies:
            return HostileReplies(
                *given, attacks=options.attack, targets=options.target,
                plan_targets=options.plan_target, report=report,
            )  # fmt: skip

        def ready(where: Ready) -> None:
            data = {"address": where.address, "control_socket": where.control_socket}
            emit(data)

        run_coordinator(options.config, ready=ready, replies=replies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
