"""Results of a run: a signed run record with every choice and figure, and the adapter folder."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import runs
from coordinator import store as db
from coordinator.aggregate import write_peft_folder
from coordinator.blobs import Blobs
from fedsilo import __version__
from fedsilo.files.durable import disk_error, write_durably
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.services import PROTOCOL_VERSION
from fedsilo.protocol.transcript import RECORD_PREFIX
from policies.schema import LoraSchema

RECORD_VERSION = 1
_LIBRARIES = ("cryptography", "fsspec", "grpcio", "numpy", "protobuf", "pydantic", "SQLAlchemy")


def versions() -> dict[str, str]:
    return {
        "fedsilo": __version__,
        "protocol": str(PROTOCOL_VERSION),
        "python": platform.python_version(),
        **{name.lower(): metadata.version(name) for name in _LIBRARIES},
    }


def run_record(session: Session, run: db.Run, *, charter_digest: str) -> dict[str, Any]:
    """Return everything that describes a run to a person, as plain JSON.

    Args:
        session: the database.
        run: the run; it may still be going on.
        charter_digest: identity of the coordinator's own policy.
    """
    plan = json.loads(run.plan) if run.plan else None
    numbers = [row.number for row in session.scalars(select(db.Round).where(db.Round.run == run.name))]
    return {
        "record_version": RECORD_VERSION,
        "run": run.name,
        "state": run.state,
        "reason": run.reason,
        "submitted_by": run.submitted_by,
        "submitted_at": run.submitted_at,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "plan": plan,
        "seed": plan["seed"] if plan else None,
        "base_adapter_sha256": run.base_digest,
        "adapter_sha256": run.adapter_digest,
        "charter_sha256": charter_digest,
        "versions": versions(),
        "silos": [
            {"silo": member.silo, "certificate": member.fingerprint, **json.loads(member.hello)}
            for member in session.scalars(select(db.Member).order_by(db.Member.silo))
        ],
        "certificates": _certificates(session, run.name),
        "isolation": db.isolation_of(session, run.name),
        "silo_errors": db.errors_of(session, run.name),
        "before": _round_figures(session, run.name, 0),
        "rounds": [_round_figures(session, run.name, number) for number in sorted(numbers)],
        "traffic": db.traffic_table(session, run.name),
        "traffic_outside_runs": db.traffic_table(session, ""),
    }


def _certificates(session: Session, run: str) -> list[str]:
    """Return the certificates of the silos that signed a round's transcript: who has the federation's CA needs nobody's
    word on their keys."""
    query = select(db.RoundSignature.certificate).where(db.RoundSignature.run == run)
    return sorted(set(session.scalars(query)) - {""})


def _round_figures(session: Session, run: str, number: int) -> dict[str, Any]:
    """One round; number 0 is what came before the first: the base model's evaluation, the plan."""
    row = session.get(db.Round, (run, number))
    uploads = select(db.Upload).where(db.Upload.run == run, db.Upload.round == number)
    figures = select(db.Figure).where(db.Figure.run == run, db.Figure.round == number).order_by(db.Figure.id)
    donors: dict[str, int] = {}
    metrics: dict[str, dict[str, dict[str, float]]] = {}
    notes: list[dict[str, Any]] = []
    for figure in session.scalars(figures):
        fields = json.loads(figure.fields)
        if figure.name.startswith("metric."):
            by_topic = metrics.setdefault(figure.silo, {}).setdefault(figure.name.removeprefix("metric."), {})
            by_topic[fields["topic"]] = fields["value"]
        else:
            notes.append({"name": figure.name, "step": figure.step, **fields})
            if figure.name == "donors_sent":
                donors[figure.silo] = donors.get(figure.silo, 0) + int(fields["donors"])
    return {
        "round": number,
        "state": row.state if row else "",
        "seconds": row.seconds if row else 0.0,
        "opened_at": row.opened_at if row else "",
        "closed_at": row.closed_at if row else "",
        "base_sha256": row.base_digest if row else "",
        "adapter_sha256": row.adapter_digest if row else "",
        **_kept_results(session, run, number),
        "participants": json.loads(row.participants) if row else [],
        "public_steps": json.loads(row.public_steps) if row else {},
        "transcript": runs.figures(session, run, number),
        "uploads": [
            {
                "silo": upload.silo,
                "kind": upload.kind,
                "step": upload.step,
                "sha256": upload.digest,
                "bytes": upload.payload_bytes,
                "l2": upload.norm,
            }
            for upload in sorted(session.scalars(uploads), key=lambda item: (item.silo, item.kind, item.step))
        ],
        "donors_sent": donors,
        "metrics": metrics,
        "traffic": db.traffic_table(session, run, number),
        "notes": notes,
    }


def _kept_results(session: Session, run: str, number: int) -> dict[str, Any]:
    """Return the fields that only some methods and plans have: results of single silos, and the server's state."""
    results = {
        receiver: {"sha256": row.digest, "participants": json.loads(row.participants)}
        for receiver, row in db.results_of(session, run, number).items()
    }
    state = session.get(db.ServerState, (run, number))
    return ({"results": results} if results else {}) | ({"server_state_sha256": state.digest} if state else {})


def sign_record(record: Mapping[str, Any], signer: str, key: Ed25519PrivateKey) -> bytes:
    """The record with the coordinator's Ed25519 signature over its canonical JSON."""
    signature = key.sign(RECORD_PREFIX + canonical_json(dict(record)))
    document = {
        "record": record,
        "signer": signer,
        "public_key": key.public_key().public_bytes_raw().hex(),
        "signature": signature.hex(),
    }
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


@dataclass
class Outcome:
    """Writes `runs/<run>/`: run_record.json always, adapter/ once a round has been committed.

    Attributes:
        folder: the `runs` folder.
        base_model: what the adapter folder calls its base.
        charter_digest: identity of the coordinator's own policy.
    """

    folder: Path
    blobs: Blobs
    schema: LoraSchema
    base_model: str
    signer: str
    key: Ed25519PrivateKey
    charter_digest: str

    def folder_of(self, run: str) -> Path:
        return self.folder / run

    def write(self, session: Session, run: db.Run) -> None:
        """Write the record and the adapter; none where each silo has an own part of it, without which what is shared
        computes nothing. Raises OperationError: the disk refused."""
        folder = self.folder_of(run.name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(f"cannot create {folder}", error) from error
        is_whole = not run.plan or method_named(json.loads(run.plan)["method"]).stays == "none"
        if run.adapter_digest and run.adapter_digest != run.base_digest and is_whole:
            write_peft_folder(folder / "adapter", self.blobs.get(run.adapter_digest), self.schema, self.base_model)
        record = run_record(session, run, charter_digest=self.charter_digest)
        write_durably(folder / "run_record.json", sign_record(record, self.signer, self.key))
