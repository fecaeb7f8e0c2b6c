"""The newest answers of screens that are no longer on top, for when the daemon is lost: what was read stays readable.

While it answers, a screen that comes on again is asked for anew, and nothing from here is shown. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from console.feed import Question
from console.recording import NEVER_RECORDED
from console.values import Snapshot

ANSWERS_MAX = 64  # of every place some, and the pages somebody went through last
BYTES_MAX = 8 << 20  # as JSON; what the daemon holds in objects is some times that


@dataclass
class Remembered:
    """Answers of one daemon by key, with the question that they are to and when they came."""

    _answers: dict[str, tuple[Question, Any, float]] = field(default_factory=dict)
    _sizes: dict[str, int] = field(default_factory=dict)  # bytes, of the same keys
    _site: str = ""
    _whose: tuple[object, ...] = ()

    def with_answers(self, snapshot: Snapshot, wanted: Mapping[str, Question], *, keep: bool = True) -> Snapshot:
        """The snapshot; of a daemon that is lost, with what it last answered to the questions that are wanted.

        Args:
            snapshot: as the reader gave it.
            wanted: questions of the screen on top, by key.
            keep: the snapshot's answers are to these questions; false where a screen has only now begun to ask.
        """
        whose = (type(snapshot.state), snapshot.state.federation) if snapshot.state is not None else self._whose
        if snapshot.site != self._site or whose != self._whose:
            self._answers, self._sizes, self._site, self._whose = {}, {}, snapshot.site, whose
        if snapshot.link.state != "disconnected":
            for key in wanted.keys() & snapshot.answered_at.keys() & snapshot.answers.keys() if keep else ():
                if wanted[key][0] in NEVER_RECORDED:
                    continue  # what people were shown of a payload stays with the screen that showed it
                self._keep(key, wanted[key], snapshot.answers[key], snapshot.answered_at[key])
            return snapshot
        known = {
            key: self._answers[key]
            for key, question in wanted.items()
            if key not in snapshot.answers and key in self._answers and self._answers[key][0] == question
        }
        if not known:
            return snapshot
        return replace(
            snapshot,
            answers={**snapshot.answers, **{key: value for key, (_, value, _) in known.items()}},
            answered_at={**snapshot.answered_at, **{key: at for key, (_, _, at) in known.items()}},
        )

    def _keep(self, key: str, question: Question, answer: Any, at: float) -> None:
        """As the newest; the oldest go, as many as are too many or too large."""
        known = self._answers.pop(key, None)
        size = self._sizes.pop(key, 0)
        if known is None or known[2] != at:
            size = len(json.dumps(answer))
        if size > BYTES_MAX:
            return
        self._answers[key], self._sizes[key] = (question, answer, at), size
        total = sum(self._sizes.values())
        for oldest in list(self._answers):
            if len(self._answers) <= ANSWERS_MAX and total <= BYTES_MAX:
                break
            total -= self._sizes.pop(oldest)
            del self._answers[oldest]
