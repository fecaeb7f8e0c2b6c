"""What the coordinator has asked of one silo: the only things an answer of that silo may be about.

Both parties keep it in the same way, the silo from what it has let in and the coordinator from what it has sent, so
both judge an answer alike (X3). Nothing asked is the strictest: any answer is about something else then.
What this does not stop: questions chosen so that honest answers say much (methods 4.9); per-day limits bound that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from google.protobuf.message import Message

from fedsilo.protocol._generated import federation_pb2 as pb


@dataclass(frozen=True)
class Asked:
    """Attributes:
    step: of the open round, that the questions below belong to; 0 is none.
    exemplars: question -> rows of the exemplar set, in the order of the step's competence.ask.
    candidates: question -> number of candidate answers, in the order of the step's reward.ask.
    match, peer, part: of the last match.directive; part is "give" or "take".
    """

    step: int = 0
    exemplars: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    candidates: Mapping[int, int] = field(default_factory=dict)
    match: int = 0
    peer: str = ""
    part: str = ""

    def after(self, body: Message, step: int = 0) -> Asked:
        """With what a message from the coordinator asks; the same where it asks nothing.

        Args:
            body: of the message.
            step: of its envelope.
        """
        match body:
            case pb.RoundOpen():
                return self._at(0)
            case pb.CompetenceAsk():
                return replace(self._at(step), exemplars={row.question: tuple(row.exemplars) for row in body.questions})
            case pb.RewardAsk():
                return replace(self._at(step), candidates={row.question: len(row.candidates) for row in body.questions})
            case pb.MatchDirective():
                return replace(self, match=body.match, peer=body.peer, part=body.part)
        return self

    def _at(self, step: int) -> Asked:
        """A step's questions end when the next step asks."""
        return self if step == self.step else replace(self, step=step, exemplars={}, candidates={})

    @property
    def exemplar_rows(self) -> tuple[int, ...]:
        """Every row asked for, each once, in the order of its first question."""
        return tuple(dict.fromkeys(row for rows in self.exemplars.values() for row in rows))

    def to_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "exemplars": [[question, list(rows)] for question, rows in self.exemplars.items()],
            "candidates": [[question, count] for question, count in self.candidates.items()],
            "match": self.match,
            "peer": self.peer,
            "part": self.part,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Asked:
        return Asked(
            step=int(value.get("step", 0)),
            exemplars={int(question): tuple(rows) for question, rows in value.get("exemplars", ())},
            candidates={int(question): int(count) for question, count in value.get("candidates", ())},
            match=int(value.get("match", 0)),
            peer=str(value.get("peer", "")),
            part=str(value.get("part", "")),
        )
