"""The steps by which each silo's log grew, kept beside the memory of having countersigned their ends (T38).

Other silos follow a log by the proofs that its owner made from one checkpoint to the next, and the owner proves from
what was countersigned here last. So where that is remembered and the step that leads there is lost, nobody who stands
before it can follow any more. The database has the steps, but not as long as the memory is kept: a kill leaves it one
step behind, and one that was restored from a backup any number. Here a step is on disk before its end is remembered.

    AUDIT_FOLDER/shown/SILO/SIZE.step     the wire message LogStep that leads to SIZE records

What this does not do: judge. A step without a memory behind it is one that a kill left, and no other begins at its end.
Nor does it help who is more than `KEPT_MIN` steps behind, if the database does not know that this one needs them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError

from fedsilo.audit.checkpoint import Offer
from fedsilo.audit.witness import store_note
from fedsilo.files.durable import fsync_directory
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError

log = logging.getLogger("fedsilo.coordinator")

FOLDER = "shown"
KEPT_MIN = 16  # newest steps of a log, which are kept whoever needs them


class ShownSteps:
    """Args:
    audit_folder: of the log that remembers what was countersigned.
    """

    def __init__(self, audit_folder: Path) -> None:
        self._folder = audit_folder / FOLDER

    def keep(self, silo: str, size: int, offer: Offer) -> None:
        """Store the step to a silo's checkpoint of `size` records, durably.

        Raises:
            OperationError: the disk refused.
        """
        folder = self._folder / silo
        if not folder.is_dir():
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                for above in (self._folder, self._folder.parent):
                    fsync_directory(above)
            except OSError as error:
                raise OperationError(f"cannot create {folder}: {error.strerror}") from error
        step = pb.LogStep(note=offer.note, previous_size=offer.previous_size, consistency=offer.consistency)
        store_note(folder / f"{size:012d}.step", step.SerializeToString(deterministic=True))

    def leading_to(
        self, silo: str, size: int, *, since: Callable[[int], bool], most: int | None = None
    ) -> list[tuple[int, pb.LogStep]]:
        """The steps to a countersigned size and their ends, in order: from the newest end at which `since` says yes, or
        as far back as they are kept; of more than `most` the last ones. None at all where the last is missing."""
        found: list[tuple[int, pb.LogStep]] = []
        while len(found) != most and not since(size) and (step := self._read(silo, size)) is not None:
            found.append((size, step))
            if step.previous_size >= size:
                break
            size = step.previous_size
        return found[::-1]

    def forget(self, silo: str, before: int) -> None:
        """Remove the steps to smaller sizes than this one, but never the newest few."""
        for path in sorted((self._folder / silo).glob("*.step"))[:-KEPT_MIN]:
            if int(path.stem) < before:
                path.unlink(missing_ok=True)

    def _read(self, silo: str, size: int) -> pb.LogStep | None:
        path = self._folder / silo / f"{size:012d}.step"
        try:
            return pb.LogStep.FromString(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, DecodeError) as error:
            log.warning("%s cannot be read, so nobody is led over this step: %s", path, error)
            return None
