"""A silo's state folder read without its daemon, by the guard's own readers: ledger, held releases, messages.

The ledger is opened read-only and nothing is locked, so a daemon that works on the folder is not disturbed; then what
is read may be of two moments. What only the configuration file or the running guard knows is named as missing.
Does not verify anything: the ledger carries no signature, only the audit log does.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from console.offline import FolderView, LogFacts, Query, log_only, silo_state
from fedsilo.edge.audit_pages import LogPages
from fedsilo.edge.message_index import MessageIndex
from fedsilo.edge.message_view import MessageView
from fedsilo.edge.query_arguments import Asked
from fedsilo.treaty.errors import OperationError
from policies.load import Policy
from policies.model import PolicyFile
from silo.guard.curve_view import CurveView
from silo.guard.figure_history import FILE, FigureHistory
from silo.guard.gate import Gate
from silo.guard.ledger import Ledger, Release
from silo.guard.release_pages import ledger_page, release_page
from silo.guard.release_view import given_of
from silo.guard.releases import Releases
from silo.guard.site_view import SiteView
from silo.guard.startup import LEDGER, Site

MISSING = (
    "what the trainer does, and its isolation: kept in memory only; its figures are under Curves",
    "the coordinator's address and certificate: in the configuration file, and seen by the running guard",
    "limits, settings and certificates: the running guard answers them",
)
UNREAD = "what held releases are made of: the policy in force was written by another version"

FAR_END = ("address", "certificate")  # rows of a comparison
FAR_END_UNKNOWN = "the coordinator's address and certificate are not on disk, so they are not compared"


@dataclass(frozen=True)
class _InForce:
    """As much of a policy as showing a release or a message asks for: the ledger keeps its content, not its lines."""

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


@dataclass(frozen=True)
class _Folder:
    """As much of a configuration as reading the log file asks for."""

    state_dir: Path


@dataclass(frozen=True)
class _OfFolder:
    """In place of a site that was started: its configuration is not in the folder."""

    config: _Folder


class _FiguresRead(FigureHistory):
    """The figures as they are: a torn last line is left to the guard."""

    def _mend(self, entries: list[dict[str, Any]]) -> None:
        return


def read_silo(facts: LogFacts) -> FolderView:
    """What the folder around a silo's log holds.

    Raises:
        OperationError: the ledger cannot be read.
    """
    path = facts.directory.parent / LEDGER
    if facts.owner.role != "silo" or not path.is_file():
        return log_only(facts)
    reader = _Reader(path, facts)
    state = silo_state(facts) | reader.state()
    missing = MISSING if reader.shows_held else (*MISSING, UNREAD)
    as_of = max(facts.last_time, reader.latest_time)
    return FolderView(state, reader.policy_digest, as_of, missing, reader.queries())


class _Reader:
    """Opens the ledger for each question: a connection belongs to one thread, and questions come from several."""

    def __init__(self, path: Path, facts: LogFacts) -> None:
        self._path = path
        self._facts = facts
        with self._ledger() as ledger:
            self.latest_time = ledger.latest_time
            policy = ledger.policy_in_force
        self._content: dict[str, Any] = policy.content if policy else {}
        self._policy = _InForce(policy.file if policy else None, policy.digest if policy else "")

    @property
    def policy_digest(self) -> str:
        return self._policy.digest

    @property
    def shows_held(self) -> bool:
        """Whether the policy in force can be read by this version."""
        return self._policy.file is not None

    def state(self) -> dict[str, Any]:
        run, view, plan = "", dict[str, Any](), dict[str, Any]()
        with self._ledger() as ledger:
            if (opened := ledger.open_run()) is not None:
                run, text, view = opened
                plan = json.loads(text)
            last_run, last_state = ledger.last_run()
            held = [self._view(ledger, release) for release in ledger.releases("held")]
        return {
            "run": run,
            "last_run": {"run": last_run, "state": last_state},
            "method": plan.get("method", ""),
            "rounds": plan.get("rounds", 0),
            "local_steps": plan.get("local_steps", 0),
            "round": view.get("round", 0),
            "step": view.get("open_step", 0),
            "phase": "held: approval" if held else "offline",
            "policy": {
                "name": str(self._content.get("name", "")), "digest": self._policy.digest,
                "mode": str(self._content.get("mode", "")),
            },
            "held": held,
            "coordinator": {
                "id": str((self._content.get("federation") or {}).get("coordinator", "")), "link": "not asked",
                "last_contact": self._facts.last_contact,
            },
        }  # fmt: skip

    def queries(self) -> Mapping[str, Query]:
        pages = LogPages(self._facts.directory)
        index = MessageIndex(pages, lambda: self._facts.size)
        messages = MessageView(index, pages, lambda: cast(Policy, self._policy))
        return {
            "approvals": self._approvals,
            "approval": self._approval,
            "approval.comparison": self._comparison,
            "ledger": self._remembered,
            "outbox": messages.outbox,
            "inbox": messages.inbox,
            "curves": self._curves,
            "logs": SiteView(cast(Site, _OfFolder(_Folder(self._path.parent))), lambda: 0.0).logs,
        }

    @contextmanager
    def _ledger(self) -> Iterator[Ledger]:
        ledger = Ledger(self._path, read_only=True)
        try:
            yield ledger
        except sqlite3.Error as error:
            hint = "is it a ledger of this version?"
            raise OperationError(f"cannot read {self._path}: {error}", hint=hint) from error
        finally:
            ledger.close()

    def _releases(self, ledger: Ledger) -> Releases:
        return Releases(cast(Gate, _NoGate(self._policy)), ledger, silo=self._facts.owner.name, destination={})

    def _view(self, ledger: Ledger, release: Release) -> dict[str, Any]:
        """As the daemon shows it; of a policy that cannot be read, only what the ledger alone knows, with `missing`."""
        if self.shows_held:
            return self._releases(ledger).view(release)
        answers = ledger.approvals(release.id)
        return {
            "id": release.id, "digest": release.digest, "revision": release.revision, "state": release.state,
            "run": release.run, "round": release.round, "step": release.step, "held_since": release.requested_at,
            "expires_at": release.expires_at, "policy": {"digest": release.policy_digest, "rules": release.rules},
            "approvers": {"needed": release.persons, "roles": [], "people": [], "given": given_of(answers)},
            "missing": UNREAD,
        }  # fmt: skip

    def _approval(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        with self._ledger() as ledger:
            return self._view(ledger, ledger.release(Asked(arguments, "release").text("release")))

    def _comparison(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Without the far end: where the next message goes is not in the folder, so it is not called changed."""
        with self._ledger() as ledger:
            told = self._releases(ledger).comparison(ledger.release(Asked(arguments, "release").text("release")))
        known = [row for row in told["rows"] if row["what"] not in FAR_END]
        if len(known) < len(told["rows"]):
            told["note"] = "; ".join(filter(None, (told["note"], FAR_END_UNKNOWN)))
        return told | {"rows": known}

    def _approvals(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        with self._ledger() as ledger:
            return release_page(ledger, arguments)

    def _curves(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        history = _FiguresRead(self._path.parent / FILE)
        with self._ledger() as ledger:
            return CurveView(lambda: self._facts.owner.name, ledger, history).curves(arguments)

    def _remembered(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        with self._ledger() as ledger:
            return ledger_page(ledger, arguments)
