"""What a silo's ledger tells of releases while its daemon does not run, by the guard's own readers.

The ledger is opened read-only and nothing is locked, so a daemon that works on the folder is not disturbed. Nothing can
be answered. Does not verify anything: the ledger carries no signature, only the audit log does (`fedsilo audit
verify`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fedsilo.control.server import QueryArguments
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import NotFoundError, OperationError
from policies.model import PolicyFile
from silo.guard.answers.queries import release_page
from silo.guard.answers.release import given_of
from silo.guard.gate import Gate
from silo.guard.ledger import Ledger, Release
from silo.guard.releases import Releases
from silo.guard.site import LEDGER

UNREAD = "what held releases are made of: the policy in force was written by another version"

CERTIFICATE = "certificate"  # a row of a comparison
CERTIFICATE_UNKNOWN = "the coordinator's certificate is not on disk, so it is not compared"


@dataclass(frozen=True)
class _InForce:
    """As much of a policy as showing a release asks for: the ledger keeps its content, not its lines."""

    file: PolicyFile | None
    digest: str
    source: str = "the site's policy"
    charter: None = None

    @property
    def own(self) -> _InForce:
        return self


@dataclass(frozen=True)
class _NoGate:
    """In place of the gate for showing a release. Anything else that a release does with a gate fails."""

    policy: _InForce


class SiloFolder:
    """A silo's state folder as the source of the queries `approval`, `approval.comparison` and `approvals`.

    Args:
        state_dir: the silo's.
        silo: its name.
        address: of its coordinator, as its configuration says.

    Raises:
        NotFoundError: there is no ledger. OperationError: it cannot be read.
    """

    def __init__(self, state_dir: Path, silo: str, address: str) -> None:
        self._path = state_dir / LEDGER
        self._silo = silo
        self._destination = {"address": address}
        if not self._path.is_file():
            raise NotFoundError(f"{state_dir} holds no ledger", hint="did this silo ever start?")
        with self._ledger() as ledger:
            self._as_of = ledger.latest_time
            policy = ledger.policy_in_force
        self._policy = _InForce(policy.file if policy else None, policy.digest if policy else "")

    def banner(self) -> str:
        """What people are told of answers that no daemon gave."""
        return f"OFFLINE, as of {utc(self._as_of)}: what the folder holds; no daemon was asked"

    def query(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One answer. Raises NotFoundError: no such release. OperationError: the ledger cannot be read."""
        with self._ledger() as ledger:
            if name == "approvals":
                return release_page(ledger, arguments)
            release = ledger.release(QueryArguments(arguments, "release").text("release"))
            return self._view(ledger, release) if name == "approval" else self._comparison(ledger, release)

    @contextmanager
    def _ledger(self) -> Iterator[Ledger]:
        try:
            ledger = Ledger(self._path, read_only=True)
            try:
                yield ledger
            finally:
                ledger.close()
        except sqlite3.Error as error:
            hint = "is it a ledger of this version?"
            raise OperationError(f"cannot read {self._path}: {error}", hint=hint) from error

    def _releases(self, ledger: Ledger) -> Releases:
        return Releases(cast(Gate, _NoGate(self._policy)), ledger, silo=self._silo, destination=self._destination)

    def _view(self, ledger: Ledger, release: Release) -> dict[str, Any]:
        """As the daemon shows it; of a policy that cannot be read, only what the ledger alone knows, with `missing`."""
        if self._policy.file is not None:
            return self._releases(ledger).view(release)
        answers = ledger.approvals(release.id)
        return {
            "id": release.id, "digest": release.digest, "revision": release.revision, "state": release.state,
            "run": release.run, "round": release.round, "step": release.step, "held_since": release.requested_at,
            "expires_at": release.expires_at, "policy": {"digest": release.policy_digest, "rules": release.rules},
            "approvers": {"needed": release.persons, "roles": [], "people": [], "given": given_of(answers)},
            "missing": UNREAD,
        }  # fmt: skip

    def _comparison(self, ledger: Ledger, release: Release) -> dict[str, Any]:
        """Without the far end's certificate, which the running guard alone has seen, so it is not called changed."""
        told = self._releases(ledger).comparison(release)
        known = [row for row in told["rows"] if row["what"] != CERTIFICATE]
        if len(known) < len(told["rows"]):
            told["note"] = "; ".join(filter(None, (told["note"], CERTIFICATE_UNKNOWN)))
        return told | {"rows": known}
