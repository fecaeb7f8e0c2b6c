"""Checkpoints at the coordinator: it countersigns each silo's log, hands out its own, and carries between silos (T38).

What a silo shows is a chain: each checkpoint with the proof from the one it showed before. Other silos get the part of
it that they have not countersigned, and their cosignatures go back to its owner. The coordinator is a carrier here and
can forge nothing: a silo believes another's checkpoint by that silo's own signature and the proofs.

The database has the steps of each log, but not as long as the memory of having countersigned their ends is kept: a kill
leaves it one step behind, and a restored backup any number. Where that is remembered and the step that leads there is
lost, nobody who stands before it can follow any more, for the owner proves from what was countersigned here last. So a
step is on disk before its end is remembered:

    AUDIT_FOLDER/shown/SILO/SIZE.step     the wire message LogStep that leads to SIZE records

What this does not do: judge. A step without a memory behind it is one that a kill left, and no other begins at its end.
Nor does it help who is more than `KEPT_MIN` steps behind, if the database does not know that this one needs them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from sqlalchemy import bindparam, delete, func, insert, select, tuple_
from sqlalchemy.orm import Session

from certs.identity import PeerIdentity
from coordinator import store as db
from fedsilo.audit.checkpoint import (
    Checkpoint,
    checkpoint_in,
    cosigned_at,
    cosigner_key,
    merge_signatures,
    only_signed_by,
)
from fedsilo.audit.log import AuditLog
from fedsilo.audit.merkle import HASH_BYTES
from fedsilo.audit.witness import OWN_HISTORY_LOST, store_note
from fedsilo.files.durable import fsync_directory
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.clocks import TOLD_SECONDS, apart
from fedsilo.protocol.errors import OperationError, PeerError, VerificationError, WireCode

log = logging.getLogger("fedsilo.coordinator")

STEPS_MAX = 16  # of one log in one reply; whoever is further behind catches up over several
ANSWER_BYTES_MAX = 30_000  # shipped policies let control messages in up to 32,768
CHAIN_MAX = 10_000  # steps kept of one log while some silo lags behind

# As in `store`: made once, and past the unit of work.
_SHOWN_ROWS, _SIGNED_ROWS = db.table_of(db.ShownCheckpoint), db.table_of(db.Countersigned)
_SHOWN = select(_SHOWN_ROWS.c.silo, _SHOWN_ROWS.c.size, _SHOWN_ROWS.c.note).where(
    tuple_(_SHOWN_ROWS.c.silo, _SHOWN_ROWS.c.size).in_(bindparam("wanted", expanding=True))
)
_NEWEST = select(_SHOWN_ROWS.c.silo, func.max(_SHOWN_ROWS.c.size).label("size")).group_by(_SHOWN_ROWS.c.silo)
_SIGNED = select(_SIGNED_ROWS.c.silo, _SIGNED_ROWS.c.size).where(_SIGNED_ROWS.c.witness == bindparam("witness"))
_COSIGNATURES = (
    select(_SIGNED_ROWS.c.size, _SIGNED_ROWS.c.note)
    .where(_SIGNED_ROWS.c.silo == bindparam("owner"))
    .order_by(_SIGNED_ROWS.c.witness)
)
_SIGN = db.upsert(db.Countersigned, "size = excluded.size, note = excluded.note")
_UNSEEN = (
    select(_SHOWN_ROWS)
    .where(_SHOWN_ROWS.c.silo == bindparam("owner"), _SHOWN_ROWS.c.size > bindparam("seen"))
    .order_by(_SHOWN_ROWS.c.size)
    .limit(STEPS_MAX)
)
_CHAIN = select(
    func.min(_SHOWN_ROWS.c.size).label("oldest"),
    func.max(_SHOWN_ROWS.c.size).label("newest"),
    func.count().label("steps"),
).where(_SHOWN_ROWS.c.silo == bindparam("owner"))
_SHOW = insert(_SHOWN_ROWS)
_SLOWEST = select(func.min(_SIGNED_ROWS.c.size)).where(_SIGNED_ROWS.c.silo == _SHOWN_ROWS.c.silo).scalar_subquery()
_PRUNE = delete(_SHOWN_ROWS).where(
    _SHOWN_ROWS.c.silo.in_(bindparam("owners", expanding=True)), _SHOWN_ROWS.c.size < _SLOWEST
)
_LAST = select(_SHOWN_ROWS).where(_SHOWN_ROWS.c.silo == bindparam("owner")).order_by(_SHOWN_ROWS.c.size.desc()).limit(1)


class Relay:
    """Carries out `control.checkpoint`. Used under the driver's lock.

    Args:
        silos: all listed ones.

    Attributes:
        clocks: by silo, seconds by which its clock was ahead of this one when both countersigned last; of a silo by
            files, how long one was on its way. Not kept over a restart.
        waiting: silos for which others have shown or countersigned something since they last asked. Not kept over a
            restart: the next checkpoint says it again.
        contradicting: SPIFFE ids of silos whose last exchange showed a note signed with this log's key for a history
            that the log does not have. Not kept over a restart, since they show it with each exchange.
    """

    def __init__(self, audit: AuditLog, silos: tuple[str, ...]) -> None:
        self._audit = audit
        self._silos = silos
        self._steps = ShownSteps(audit.directory)
        self._introduced: set[tuple[str, str]] = set()  # witness, owner: the newest step was handed out
        self._handed: dict[str, int] = {}  # silo -> size of our log as it was shown last, in this process
        self.clocks: dict[str, int] = {}
        self.waiting: set[str] = set()
        self.contradicting: set[str] = set()

    def contradiction(self) -> OperationError | None:
        """Return whether a silo countersigned records under this key that are not in this log: another copy went on
        (T38)."""
        if not self.contradicting:
            return None
        names = ", ".join(sorted(self.contradicting))
        cause = f"{names} has seen more of this log, or another: it was restored from an older copy, or runs twice"
        return OperationError(cause, code=OWN_HISTORY_LOST)

    def take_in(self, peer: PeerIdentity, theirs: pb.Checkpoint) -> Checkpoint | None:
        """Countersign what a silo sent of its own log. Returns the checkpoint, as `AuditLog.take`.

        Args:
            peer: the sender; its log and key bear the name of its certificate.
            theirs: what it sent.

        Raises:
            PeerError: its log lost or changed records, or a signature does not verify; nothing is countersigned.
            OperationError: our memory of its log cannot be stored.
        """
        try:
            self._audit.trust_peer(peer.spiffe_id, peer.signing_public_key)
            self._compare_clocks(peer, theirs.cosigned_note)
            return self._audit.take(
                theirs, peer.spiffe_id, growing=lambda checkpoint: self._steps.keep(peer.name, checkpoint.size, theirs)
            )
        except VerificationError as error:
            if error.code == OWN_HISTORY_LOST:
                self.contradicting.add(peer.spiffe_id)
                log.critical("%s shows that this log lost records: %s", peer.spiffe_id, error.message)
            raise PeerError(
                WireCode.CHECKPOINT_INCONSISTENT, f"checkpoint of {peer.spiffe_id}: {error.message}"
            ) from error

    def _compare_clocks(self, peer: PeerIdentity, note: str) -> None:
        """What of our log the silo countersigned in the last exchange says what its clock showed then (T41)."""
        if not note or checkpoint_in(note).size != self._handed.pop(peer.name, None):
            return
        if (ahead := self._audit.clock_of(peer.spiffe_id, note)) is None:
            return
        before, self.clocks[peer.name] = self.clocks.get(peer.name, 0), ahead
        if abs(ahead) > TOLD_SECONDS and abs(ahead - before) > TOLD_SECONDS:
            log.warning("the clock of %s is %s this machine's", peer.spiffe_id, apart(ahead))

    def answer(
        self, session: Session, peer: PeerIdentity, theirs: pb.Checkpoint, taken: Checkpoint | None
    ) -> pb.Checkpoint:
        """Answer a checkpoint with ours, and with what others have for the silo; keep the cosignatures that it brought.
        taken: of `take_in`, in the caller's transaction."""
        answer = self._audit.offer(peer.spiffe_id)
        self._handed[peer.name] = self._audit.offered_size
        self.contradicting.discard(peer.spiffe_id)
        others = tuple(silo for silo in self._silos if silo != peer.name)
        self.waiting.discard(peer.name)
        if taken is not None and _keep_step(session, self._steps, peer, theirs, taken.size):
            self.waiting |= set(others)
        owners = _keep_cosignatures(session, peer, theirs.countersigned, others)
        self.waiting |= owners
        _prune(session, owners)
        answer.countersigned.extend(_for_owner(session, peer.name))
        while answer.ByteSize() > ANSWER_BYTES_MAX and answer.countersigned:
            del answer.countersigned[0]  # of the oldest checkpoint; witnesses countersign a later one, too
        for silo, seen in _news_for(session, peer.name, others):
            shown = _for_witness(session, silo, seen)
            if seen is None and (peer.name, silo) in self._introduced:
                # Nothing came of it. At a first contact it is taken as it is, so this is none: the database, being an
                # older one, does not know of a cosignature, and whoever gave it follows from where that was.
                self._lead(silo, shown)
            while answer.ByteSize() + shown.ByteSize() > ANSWER_BYTES_MAX and len(shown.steps) > 1 and not answer.peers:
                del shown.steps[0 if seen is None else -1]  # or it would never fit
            if answer.ByteSize() + shown.ByteSize() > ANSWER_BYTES_MAX:
                self.waiting.add(peer.name)  # what it gets now it need not be given again: the rest fits next time
                break
            answer.peers.append(shown)
            self._introduced.add((peer.name, silo))
        return answer

    def _lead(self, owner: str, shown: pb.PeerLog) -> None:
        """Put those steps before the newest one that lead there."""
        size = checkpoint_in(shown.steps[-1].note).size
        steps = self._steps.leading_to(owner, size, since=lambda _size: False, most=STEPS_MAX)
        if steps:
            del shown.steps[:]
            shown.steps.extend(step for _, step in steps)


def _keep_step(session: Session, steps: ShownSteps, peer: PeerIdentity, offer: pb.Checkpoint, size: int) -> bool:
    """Add a checkpoint that was countersigned to its silo's chain; whether it was not in it."""
    session.merge(db.ShownCertificate(silo=peer.name, pem=peer.certificate_pem.decode("ascii")))

    connection = session.connection()
    chain = connection.execute(_CHAIN, {"owner": peer.name}).one()

    def is_known(end: int) -> bool:
        if not chain.steps or end > chain.newest:
            return False  # as mostly
        return end == chain.newest or session.get(db.ShownCheckpoint, (peer.name, end)) is not None

    if is_known(size):
        return False
    own = db.ShownCheckpoint.silo == peer.name
    lacking = steps.leading_to(peer.name, size, since=is_known) or [(size, _step_of(offer))]
    if chain.steps and chain.newest != lacking[0][1].previous_size:
        # Across a hole there is no proof, so the chain begins behind it. Nobody needs what is before: steps are removed
        # once all have gone on.
        session.execute(delete(db.ShownCheckpoint).where(own))
    connection.execute(
        _SHOW,
        [
            {
                "silo": peer.name,
                "size": end,
                "previous_size": step.previous_size,
                "note": step.note,
                "consistency": b"".join(step.consistency),
            }
            for end, step in lacking
        ],
    )
    if chain.steps + len(lacking) > CHAIN_MAX:
        # also where nobody countersigns it: its owner alone decides how often it shows one
        newest = select(db.ShownCheckpoint.size).where(own).order_by(db.ShownCheckpoint.size.desc())
        oldest = session.scalar(newest.offset(CHAIN_MAX - 1).limit(1)) or 0
        session.execute(delete(db.ShownCheckpoint).where(own, db.ShownCheckpoint.size < oldest))
    _prune(session, {peer.name})
    steps.forget(peer.name, connection.execute(_CHAIN, {"owner": peer.name}).one().oldest or 0)
    return True


def _keep_cosignatures(
    session: Session, witness: PeerIdentity, texts: Iterable[str], others: Collection[str]
) -> set[str]:
    """Keep a witness's cosignatures for the logs' owners. Returns whose were later ones than those that were kept.

    One that is none by this witness, of a checkpoint that its owner showed, is told of and passed over. Few statements
    for all of them: N silos bring N - 1 each in a round.
    """
    domain = witness.spiffe_id.rpartition("/silo/")[0]
    origins = {f"{domain}/silo/{silo}": silo for silo in others}
    parsed = list[tuple[str, Checkpoint, str]]()
    for text in texts:
        with _worth_nothing_is_told(witness):
            checkpoint = checkpoint_in(text)
            parsed.append((origins.get(checkpoint.origin, ""), checkpoint, text))
    if not parsed:
        return set()
    connection, key = session.connection(), cosigner_key(witness.spiffe_id, witness.signing_public_key)
    wanted = [(owner, checkpoint.size) for owner, checkpoint, _ in parsed]
    shown = {(row.silo, row.size): row.note for row in connection.execute(_SHOWN, {"wanted": wanted})}
    before = {row.silo: row.size for row in connection.execute(_SIGNED, {"witness": witness.name})}
    later = dict[str, tuple[int, str]]()
    for owner, checkpoint, text in parsed:
        with _worth_nothing_is_told(witness):
            newest = later[owner][0] if owner in later else before.get(owner, -1)
            if (owner, checkpoint.size) not in shown:
                if newest >= checkpoint.size:
                    continue  # an older one, sent again
                raise VerificationError(f"no such checkpoint of {checkpoint.origin} was carried")
            if cosigned_at(text, key) is None:
                raise VerificationError("it is not signed by the sender")
            if newest < checkpoint.size:
                # of the very text that was shown, or an error
                note = merge_signatures(shown[owner, checkpoint.size], only_signed_by(text, [key]))
                later[owner] = checkpoint.size, note
    if later:
        rows = [{"silo": owner, "size": size, "note": note} for owner, (size, note) in later.items()]
        connection.execute(_SIGN, [row | {"witness": witness.name} for row in rows])
    return set(later)


@contextlib.contextmanager
def _worth_nothing_is_told(witness: PeerIdentity) -> Iterator[None]:
    try:
        yield
    except VerificationError as error:
        log.warning("a cosignature by %s is worth nothing: %s", witness.spiffe_id, error.message)


def _prune(session: Session, owners: Collection[str]) -> None:
    """Keep of each chain what the slowest witness still needs, and its end. One statement: N silos bring N - 1
    cosignatures each in a round."""
    if owners:
        session.connection().execute(_PRUNE, {"owners": sorted(owners)})


def _news_for(session: Session, witness: str, others: Sequence[str]) -> list[tuple[str, int | None]]:
    """Return whose log has something for `witness` to countersign, and what it has countersigned of it; None: nothing
    yet."""
    connection = session.connection()
    seen = {row.silo: row.size for row in connection.execute(_SIGNED, {"witness": witness})}
    sizes = {row.silo: row.size for row in connection.execute(_NEWEST)}
    return [(each, seen.get(each)) for each in others if each in sizes and sizes[each] > seen.get(each, -1)]


def _for_witness(session: Session, owner: str, seen: int | None) -> pb.PeerLog:
    """Return what may be countersigned of the log of `owner`. seen: its size that was countersigned before, if any."""
    its: dict[str, Any] = {"owner": owner} if seen is None else {"owner": owner, "seen": seen}
    certificate = session.get(db.ShownCertificate, owner) if seen is None else None
    return pb.PeerLog(
        certificate_pem=certificate.pem if certificate else "",
        steps=[
            pb.LogStep(note=row.note, previous_size=row.previous_size, consistency=_hashes(row.consistency))
            for row in session.connection().execute(_LAST if seen is None else _UNSEEN, its)
        ],
    )


def _for_owner(session: Session, owner: str) -> list[str]:
    """The cosignatures of its log that others gave last: one note for each checkpoint."""
    notes: dict[int, str] = {}
    for row in session.connection().execute(_COSIGNATURES, {"owner": owner}):
        notes[row.size] = merge_signatures(notes[row.size], row.note) if row.size in notes else row.note
    return [notes[size] for size in sorted(notes)]


def _hashes(packed: bytes) -> list[bytes]:
    return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]


def _step_of(offer: pb.Checkpoint) -> pb.LogStep:
    return pb.LogStep(note=offer.note, previous_size=offer.previous_size, consistency=offer.consistency)


# ---- steps on disk -----------------------------------------------------------------------------------------------

FOLDER = "shown"
KEPT_MIN = 16  # newest steps of a log, which are kept whoever needs them


class ShownSteps:
    """Stores the steps between the checkpoints that were shown of each silo's log.

    Args:
        audit_folder: of the log that remembers what was countersigned.
    """

    def __init__(self, audit_folder: Path) -> None:
        self._folder = audit_folder / FOLDER

    def keep(self, silo: str, size: int, offer: pb.Checkpoint) -> None:
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
        store_note(folder / f"{size:012d}.step", _step_of(offer).SerializeToString(deterministic=True))

    def leading_to(
        self, silo: str, size: int, *, since: Callable[[int], bool], most: int | None = None
    ) -> list[tuple[int, pb.LogStep]]:
        """The steps to a countersigned size and their ends, in order: from the newest end at which `since` says yes, or
        as far back as they are kept; of more than `most` the last ones. None at all where the last is missing."""
        steps: list[tuple[int, pb.LogStep]] = []
        while len(steps) != most and not since(size) and (step := self._read(silo, size)) is not None:
            steps.append((size, step))
            if step.previous_size >= size:
                break
            size = step.previous_size
        return steps[::-1]

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
