"""What the rules compare a message with: where its run stands, and what its round asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping

from sqlalchemy.orm import Session

from coordinator import store as db
from coordinator.aggregate import l2_norm
from coordinator.blobs import Blobs
from coordinator.ingress import Arrived, OpenPlace
from coordinator.runs import ActiveRun
from fedsilo.protocol.donor_pool import rows_answered
from policies.asked import Asked

NORMS_KEPT = 16  # of adapters that were noted last; any other is read for its norm


class Places:
    """Used under the driver's lock.

    Args:
        blobs: where adapters are.
        runs: those that have a plan and have not ended.
    """

    def __init__(self, blobs: Blobs, runs: Mapping[str, ActiveRun]) -> None:
        self._blobs = blobs
        self._runs = runs
        self._norms: dict[str, float] = {}
        self._asked: dict[str, tuple[int, str, dict[int, tuple[int, ...]]]] = {}  # by run, of its open round

    def of(self, session: Session, arrived: Arrived) -> OpenPlace:
        """The open round, or the newest for what may come after a round."""
        run, envelope = self._runs.get(arrived.envelope.run), arrived.envelope
        if run is None:
            return OpenPlace()
        number = run.life.open_round
        step, indices, evaluated, digest = 0, tuple[int, ...](), "", ""
        if number:
            digest, asked = self._opened(session, run.name, number)
            if (found := rows_answered(run.plan, number, asked).get(envelope.step)) is not None:
                step, indices = envelope.step, found
        if envelope.kind == "metrics.eval":
            of_round = session.get(db.Round, (run.name, envelope.round))
            evaluated = of_round.adapter_digest if of_round else ""
        if envelope.kind == "metrics.eval" or envelope.kind.startswith("control."):
            number = run.life.round
        norm = self._norm(digest) if arrived.tensors is not None else None
        asked_of = run.asked.get(arrived.silo, Asked())
        return OpenPlace(run.plan, digest, norm, number, step, indices, evaluated, asked_of)

    def _opened(self, session: Session, run: str, number: int) -> tuple[str, dict[int, tuple[int, ...]]]:
        """Adapter that a round starts from, and rows of its public steps; neither changes once it is open."""
        known = self._asked.get(run)
        if known is None or known[0] != number:
            row = session.get_one(db.Round, (run, number))
            steps = {int(place): tuple(rows) for place, rows in json.loads(row.public_steps).items()}
            self._asked = {name: kept for name, kept in self._asked.items() if name in self._runs}
            known = self._asked[run] = number, row.base_digest, steps
        return known[1], known[2]

    def note_norm(self, digest: str, norm: float) -> None:
        """L2 of an adapter that was just made: it need not be read for it."""
        self._norms = {**dict(list(self._norms.items())[1 - NORMS_KEPT :]), digest: norm}

    def _norm(self, digest: str) -> float | None:
        if not digest:
            return None
        if digest not in self._norms:
            self.note_norm(digest, l2_norm(self._blobs.get(digest)))
        return self._norms[digest]
