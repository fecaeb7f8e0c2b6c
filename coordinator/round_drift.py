"""How far the silos of a committed round drifted apart, as a note of the run record (methods 2.8).

Read from the uploads that were averaged, one module at a time. The figures are the coordinator's own, which has every
upload anyway: they tell a reader of the run record how much two silos' updates differ, and nothing of a single one.

No message waits for it: a round is committed without, and `DriftNotes` works it out, one round after the other, while
the driver's lock is free. What a stop or a kill left over is taken up at the next start. What is left when a run ends,
as a rule its last round's, is worked out for its record, which is signed at once: there the lock is held, and other
runs of this coordinator wait for about a second where 16 silos sent 70 MB each.

Of a model with many modules, `MODULES_MAX` are read, the same in every round: those whose names have the smallest
SHA-256, so no kind or depth is preferred. Distances are then scaled to all modules; the note says of how many they are.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from sqlalchemy.orm import Session

from coordinator.aggregate import LazyTensors, read_factors
from coordinator.blobs import AnyPayload, Blobs
from coordinator.store import Store
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.drift import DriftSums, Pair
from fedsilo.protocol.errors import FedSiloError, OperationError

NAME = "drift"
MODULES_MAX = 28  # of all 196 of a 28-layer model it took a quarter of a round's time here with 4 silos, half with 16
DIGITS = 6  # that mean something
log = logging.getLogger("fedsilo.coordinator")


@dataclass(frozen=True)
class Undrifted:
    """A committed round whose drift is not noted yet. uploads: digests, in the order of the silos."""

    run: str
    round: int
    silos: tuple[str, ...]
    base_digest: str
    uploads: tuple[str, ...]

    def note(self, blobs: Blobs) -> dict[str, Any] | None:
        """Fields of the note; None where a payload cannot be read, which is told: the round stands without it."""
        try:
            payloads = [blobs.get(digest) for digest in (self.base_digest, *self.uploads)]
            note = drift_note(self.silos, payloads[0], payloads[1:])
            for payload in payloads:  # averaged, and the adapter before the newest: this was their last reader
                payload.leave_memory()
            return note
        except (FedSiloError, OSError, ValueError) as error:  # the disk's, too: read_at passes them on
            place = {"run": self.run, "round": self.round}
            log.warning("run %s round %d: its drift cannot be told: %s", self.run, self.round, error, extra=place)
            return None


class Noting(Protocol):
    """A run, as `runs.ActiveRun` is one."""

    undrifted: tuple[Undrifted, ...]

    def note_drift(self, session: Session, due: Undrifted, fields: Mapping[str, Any] | None) -> None: ...


class DriftNotes:
    """Args:
    blobs: of the coordinator.
    store: of the coordinator.
    runs: those that have not ended, by name.
    changed: the driver's lock; notified when something changed.
    is_over: whether the coordinator stops; what is left over then is taken up at the next start.
    halt: called with what the database has against a note.
    """

    def __init__(
        self, blobs: Blobs, store: Store, runs: Mapping[str, Noting], changed: threading.Condition,
        is_over: Callable[[], bool], halt: Callable[[OperationError], None],
    ) -> None:  # fmt: skip
        self._blobs = blobs
        self._store = store
        self._runs = runs
        self._changed = changed
        self._is_over = is_over
        self._halt = halt

    def keep_noting(self) -> None:
        """Note what is committed until the coordinator stops, in a thread of its own."""
        while not self._is_over():
            if not self.note():
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over() or self._next() is not None)

    def note(self) -> bool:
        """Note the drift of one committed round. False: there is none."""
        with self._changed:
            due = self._next()
        if due is None:
            return False
        fields = due.note(self._blobs)
        try:
            with self._changed, self._store.transaction() as session:
                if (run := self._runs.get(due.run)) is not None and not self._is_over():
                    run.note_drift(session, due, fields)
        except OperationError as error:
            self._halt(error)
        return True

    def _next(self) -> Undrifted | None:
        return next((each for run in self._runs.values() for each in run.undrifted), None)


def drift_note(silos: Sequence[str], master: AnyPayload, uploads: Sequence[AnyPayload]) -> dict[str, Any]:
    """Fields of the note: distances between silos by factors and by products, and what averaging factors apart costs.

    Args:
        silos: in the order of the uploads.
        master: the adapter that the round began with.
        uploads: differences to it, in float32 or bfloat16; a factor that is frozen is in none of them.

    Returns:
        silos, factors, products and aggregation_error as `fedsilo.protocol.drift.Drift` has them; modules, of_modules:
        how many were read, of how many.
    """
    base, readers = read_factors(master), [read_factors(upload) for upload in uploads]
    own, *others = (LazyTensors(reader) for reader in (base, *readers))
    sums = DriftSums(len(readers), base.header.scale)
    stems = [name.removesuffix(".lora_A") for name in own if name.endswith(".lora_A")]
    modules = [stem for stem in stems if f"{stem}.lora_B" in own]
    read = sorted(modules, key=lambda module: sha256_hex(module.encode()))[:MODULES_MAX]
    for module in sorted(read):
        factors = own[f"{module}.lora_A"], own[f"{module}.lora_B"]
        sums.add(factors, [_change(module, factors, other) for other in others])
    drift, whole = sums.drift(), math.sqrt(len(modules) / max(1, len(read)))  # squares of distances add up over modules
    return {
        "silos": list(silos),
        "factors": [[_rounded(whole * value) for value in row] for row in drift.factors.tolist()],
        "products": [[_rounded(whole * value) for value in row] for row in drift.products.tolist()],
        "aggregation_error": _rounded(drift.aggregation_error),
        "modules": len(read),
        "of_modules": len(modules),
    }


def _change(module: str, factors: Pair, upload: LazyTensors) -> Pair:
    """What a silo added to a module's factors; 0 for one that is frozen."""
    a, b = (
        upload[name] if (name := f"{module}.{side}") in upload else np.zeros_like(own)
        for side, own in zip(("lora_A", "lora_B"), factors, strict=True)
    )
    return a, b


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
