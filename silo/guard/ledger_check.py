"""Checks at the start, before anything is written into it, that the ledger is the one that the audit log names (T42).

The log names the ledger's newest head (`ledger.py`). The ledger is as the log says, or one group ahead of it where a
kill came between the two. If it is missing, behind or changed by hand, the silo does not start: halts would vanish, and
budgets begin anew. A log that names no head yet, since an earlier version wrote it, says nothing.

A legitimate restore goes on where two approvers signed for exactly this ledger beside exactly this log
(`silo ledger accept`). Their signatures lie beside the policy, like those for a looser one; the guard verifies them
anew, records who they are, and raises the ledger to what the log shows. The record that follows names another head, so
that the same signatures serve no second time.

Nothing is set to a lower value. Budgets and counters become the larger of what the ledger says and what the log shows
to have been allowed; a kind that either of them says is halted is halted; every run and every proposal that the log
names is spent (L4). What waited in the older copy may have left since: holds end, what lay in its outbox is dropped,
and a run that is open in it is left.

Does not count: answers to empty polls, which stand in no record; what retention has reduced to hashes; what stood in a
newer ledger alone, such as approvals that had not had their effect yet. People give those again.

Does not stop: older copies of ledger and log together, which the log's witnesses show; the daemon's user, who may
write a ledger of his own choice; two approvers who agree on it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from certs.commands import VerifiedCommand
from fedsilo.audit.log import AuditLog, latest_t
from fedsilo.audit.polls import count_in, permitted_by
from fedsilo.audit.reader import read_records
from fedsilo.audit.record import Record
from fedsilo.audit.segments import segments
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.clocks import judge
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import ConflictError, NotAllowedError
from fedsilo.protocol.kinds import TENSOR_KINDS
from silo.config import SiloConfig
from silo.guard.decisions import orders_of
from silo.guard.ledger import Head, Ledger, PolicyInForce, Recount
from silo.guard.signed_files import HOURS_UNKNOWN, PROPOSALS, People, keep_signed, signed_by
from silo.guard.site import AUDIT, LEDGER, Site

_log = logging.getLogger("fedsilo.silo")

ACCEPT, MAY_ACCEPT = "ledger.accept", "halt.release"  # the command; who may give it
PERSONS = 2
BEHIND, CHANGED, LOST = "LEDGER_BEHIND", "LEDGER_CHANGED", "LEDGER_LOST"
RESTORED = "LEDGER_RESTORED"  # reason in the record


@dataclass(frozen=True)
class Disagreement:
    """A ledger that is not the one that the log names.

    Attributes:
        code: of the refusal.
        ledger: its newest head; None where there is none.
        log: the head that the log names last.
        latest: UTC seconds that the ledger has seen last; 0 where there is none.
        clock_halted: the ledger keeps a halt of the clock that nobody has ended.
    """

    code: str
    ledger: Head | None
    log: Head
    latest: float = 0.0
    clock_halted: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Return what an approver signs: exactly this ledger beside exactly this log."""
        return {"code": self.code, "ledger": self.ledger and self.ledger._asdict(), "log": self.log._asdict()}

    @property
    def digest(self) -> str:
        return sha256_hex(canonical_json(self.arguments))

    def error(self, config: SiloConfig, why: Iterable[str] = ()) -> NotAllowedError:
        held = self.ledger.groups if self.ledger else 0
        texts = {
            LOST: f"there is no ledger, and the log names group {self.log.groups} of one",
            CHANGED: f"group {held} of the ledger was changed by something else than this silo",
            BEHIND: f"the log names group {self.log.groups} of the ledger, this one holds {held}: it is an older copy"
            if held < self.log.groups
            else f"the log names another group {self.log.groups} than this ledger: it is another copy's or silo's",
        }[self.code]
        return NotAllowedError(
            f"{config.state_dir / LEDGER}: {texts}",
            hint=f"put the newest one back; a restored backup takes {PERSONS} approvers: silo ledger accept "
            f"--config {config.source} --operator NAME{''.join(f'; {each}' for each in why)}",
            code=self.code,
        )


def disagreement(
    config: SiloConfig, named: Mapping[str, Any] | None, give_up: Callable[[], bool] = lambda: False
) -> Disagreement | None:
    """Return what the ledger and the log of a site do not agree on. Only reads.

    Args:
        config: the site.
        named: field `ledger` of the newest record with one; None: there is none.
        give_up: asked while the ledger is locked: whether to wait no longer.

    Raises:
        OperationError: the ledger cannot be read.
    """
    if named is None:
        return None
    log, path = Head.named(named), config.state_dir / LEDGER
    if not path.is_file():
        return Disagreement(LOST, None, log)
    with contextlib.closing(Ledger(path, read_only=True, give_up=give_up)) as ledger:
        heads, seen = ledger.heads, (ledger.latest_time, bool(ledger.clock_halt))
        if heads is None or not heads.agree_with(log):
            return Disagreement(BEHIND, None if heads is None else heads.newest, log, *seen)
        return None if ledger.is_unchanged() else Disagreement(CHANGED, heads.newest, log, *seen)


def named_in_folder(directory: Path) -> dict[str, Any] | None:
    """The newest head that a log names, whoever has it open. Nothing is verified: whoever opens the log does that."""
    for _, path in reversed(segments(directory) if directory.is_dir() else []):
        for line in reversed(path.read_bytes().split(b"\n")):
            if b'"ledger":{' in line:
                with contextlib.suppress(ValueError):  # the end of a line that was being written
                    if named := json.loads(line).get("ledger"):
                        return dict(named)
    return None


def since(records: Iterable[Record], found: Disagreement) -> list[Record]:
    """Records of what the ledger does not know: behind the last one that names its newest head; all, where none does.

    records: of the log, oldest first.
    """
    later: list[Record] = []
    for record in records:
        later.append(record)
        if (ledger := record.fields.get("ledger")) is not None and Head.named(ledger) == found.ledger:
            later.clear()
    return later


def latest_in_folder(directory: Path) -> float:
    """The latest UTC second in the newest two segments of a log; not verified, as in `named_in_folder`.

    Raises:
        VerificationError: a line is no record.
    """
    latest, newest = 0, segments(directory)[-2:]
    for record in read_records(directory, newest[0][0]) if newest else ():
        latest = latest_t(latest, record["event"], record["t"])
    return latest / 1000


def open_ledger(
    site: Site,
    open_log: Callable[[Callable[[], float]], AuditLog],
    wall: float,
    give_up: Callable[[], bool] = lambda: False,
) -> Ledger:
    """The site's ledger, once it is the one that the log names.

    Args:
        site: whose.
        open_log: opens the log with this clock, for the record, where it is another one.
        wall: UTC seconds that the clock shows; nobody has vouched for it yet.
        give_up: asked while the ledger is locked: whether to wait no longer.

    Raises:
        NotAllowedError: it is another one, and its approvers have not signed; recorded.
        OperationError: it cannot be read or written.
    """
    config = site.config
    named = named_in_folder(config.state_dir / AUDIT)
    if (difference := disagreement(config, named, give_up)) is not None:
        at = _time_to_record(config, difference, wall)
        with open_log(lambda: at) as audit:
            try:
                _restore(site, audit, difference, max(wall, audit.latest_time, difference.latest), give_up)
            except NotAllowedError as error:
                audit.append("ledger.check", reasons=[error.code], detail=_groups(difference))
                raise
    ledger = Ledger(config.state_dir / LEDGER, give_up=give_up)
    ledger.agree(Head.named(named) if named else None)
    return ledger


def _time_to_record(config: SiloConfig, found: Disagreement, wall: float) -> float:
    """UTC seconds that the records of this start go by, as `ClockWatch.time` gives them to one whose ledger agrees: a
    time that only this machine's clock shows is not stored (T41)."""
    stored = max(found.latest, latest_in_folder(config.state_dir / AUDIT))
    if found.clock_halted:
        return stored
    return judge(wall, stored=stored, offline=config.coordinator.by_files).time


def name_heads(config: SiloConfig, ledger: Ledger, audit: AuditLog) -> None:
    """Record the heads of the ledger in the log, which was verified when it was opened.

    Raises:
        NotAllowedError: it names another one than was looked at before it was verified.
    """
    named, heads = Head.named(audit.ledger) if audit.ledger else None, ledger.heads
    if named is not None and (heads is None or not heads.agree_with(named)):
        raise Disagreement(BEHIND, None if heads is None else heads.newest, named).error(config)
    ledger.agree(named)
    audit.name_heads(ledger.naming)


def _restore(site: Site, audit: AuditLog, found: Disagreement, now: float, give_up: Callable[[], bool]) -> None:
    config, moment = site.config, datetime.fromtimestamp(now, UTC)
    people = People(config.silo, site.site_ca_pem, site.roles, moment, HOURS_UNKNOWN, config.federation)
    given, why = approvals_of(site.config, found, people)
    if len(given) < PERSONS:
        raise found.error(site.config, [*why, f"{len(given)} of {PERSONS} have signed"])
    counts = recounted(audit.records())
    policy = _policy_to_follow(site, counts.decided_by)
    # Recorded first, and without a head: killed in between, the same signatures are found again, and count once.
    if found.digest not in counts.restored:
        audit.append(
            "ledger.check",
            reasons=[RESTORED],
            link={"approvals": list(given)},
            detail={"code": found.code, "shown": found.digest, **_groups(found)},
            **orders_of(*(command.order for command in given.values())),
        )
        for fields in counts.waiting.values():
            audit.append("approval.expire", reasons=[RESTORED], **fields)
    with contextlib.closing(Ledger(site.config.state_dir / LEDGER, give_up=give_up)) as ledger:
        ended = ledger.raise_to(found.log, counts, policy)
    _log.warning(
        "the restored ledger was accepted by %s: its budgets and counters are no lower than the log says; %s",
        " and ".join(given),
        ", ".join(f"{name.replace('_', ' ')}: {count}" for name, count in ended.items()),
    )


def _policy_to_follow(site: Site, named: str) -> PolicyInForce | None:
    """The policy that the log names last: today's files have to be that one, or an older ledger would bring an older
    policy back. None: retention left no record that names one."""
    if not named:
        return None
    if site.policy.digest != named:
        raise NotAllowedError(
            f"the log says that policy {named[:12]} decided last; {site.policy.source} is another one",
            hint="put that policy back beside its charter, and start again; it can be changed from there",
            code=BEHIND,
        )
    return PolicyInForce(named, site.policy.file.model_dump(mode="json", by_alias=True), named)


def _groups(found: Disagreement) -> dict[str, int]:
    return {"ledger_groups": found.ledger.groups if found.ledger else 0, "log_groups": found.log.groups}


# ---- approvals ---------------------------------------------------------------------------------------------------


def approvals_of(
    config: SiloConfig, found: Disagreement, people: People
) -> tuple[dict[str, VerifiedCommand], list[str]]:
    """Return who has signed for this ledger, each with what was signed; and why other signatures do not count."""
    files = sorted((config.policy.parent / PROPOSALS).glob(f"{_stem(found)}.*.approval"))
    return signed_by(files, lambda signed: _approver(found, signed, people))


def write_approval(config: SiloConfig, found: Disagreement, signed: control_pb2.Command, people: People) -> Path:
    """Keep one approver's signature beside the policy.

    Raises:
        NotAllowedError: it is not one of an approver of this site, over exactly this ledger and log.
        ConflictError: this person has signed already.
    """
    person = _approver(found, signed, people).person
    if person in approvals_of(config, found, people)[0]:
        raise ConflictError(f"{person} has signed already", hint="another approver signs, then: silo start")
    return keep_signed(config.policy.parent / PROPOSALS / f"{_stem(found)}.{person}.approval", signed)


def _approver(found: Disagreement, signed: control_pb2.Command, people: People) -> VerifiedCommand:
    command = people.verify(signed, ACCEPT, MAY_ACCEPT)
    if command.arguments != found.arguments:
        raise NotAllowedError(f"{command.person} signed for another ledger or log")
    return command


def _stem(found: Disagreement) -> str:
    return f"ledger-{found.digest[:16]}"


# ---- what the log says -------------------------------------------------------------------------------------------

_NEVER_HALTS = 1 << 52  # as a limit of hits: the log has a record of each halt


_OF_RELEASE = ("kind", "run", "round", "step", "payload", "detail")


def recounted(records: Iterable[Mapping[str, Any]]) -> Recount:
    """Read them once, oldest first."""
    recount, granted, windows = Recount(), dict[int, str](), dict[int, Mapping[str, Any]]()
    for record in records:
        event, run, detail = record["event"], record.get("run", ""), record.get("detail", {})
        recount.runs |= {run} - {""}
        match event:
            case "plan.accept":
                recount.open = run
            case "silo.leave" if run == recount.open:
                recount.open = ""
            case "egress.decision" | "egress.sent" | "egress.indeterminate":
                recount.sent[run] = max(recount.sent.get(run, 0), record.get("sequence", 0))
                if record.get("decision") == "allow" and (facts := record.get("facts", {}).get("final")):
                    recount.book.record(facts)
                    if permitted_by(Record(record)):
                        windows[record["seq"]] = facts
                if (facts := windows.pop(record["link"].get("decision", -1), None)) is not None:
                    _close_window(recount, record, facts)
            case "ingress.decision":
                _take_in(recount, record)
            case "clock.accept":
                recount.book.turn_back(record["t"] / 1000)
            case "ledger.check" if "shown" in detail:
                recount.restored.add(detail["shown"])
            case "screen.hit":
                recount.book.count_hits(record["kind"], record["t"] / 1000, detail.get("responses", 0), _NEVER_HALTS)
            case "halt" if "SCREEN_HALT" in record.get("reasons", ()):
                recount.book.screen_halts[record["kind"]] = record["t"] / 1000
            case "release" if "SCREEN_HALT" in record.get("reasons", ()):
                recount.book.lift_halt(record["kind"], record["t"] / 1000)
            case "approval.request":
                stem, _, number = detail["release"].rpartition("/")
                recount.releases[stem] = max(recount.releases.get(stem, 0), int(number) + 1)
                recount.waiting[detail["release"]] = {name: record[name] for name in _OF_RELEASE if name in record}
            case "approval.grant" if "release" in detail:
                granted[record["seq"]] = detail["release"]
            case "approval.deny" | "approval.expire":
                recount.waiting.pop(detail["release"], None)
        if event in ("egress.decision", "ingress.decision"):
            for number in record["link"].get("approvals", ()):
                recount.waiting.pop(granted.get(number, ""), None)
        if "proposal" in detail:
            recount.proposals.add(str(detail["proposal"]))
        if event in ("policy.load", "egress.decision", "ingress.decision"):
            recount.decided_by = str(record.get("policy", {}).get("effective", recount.decided_by))
    return recount


def _close_window(recount: Recount, record: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Count the polls of a window. One was counted with its decision. After a crash as many count as were permitted,
    and the record does not know their last number."""
    detail, run = record.get("detail", {}), record.get("run", "")
    most = max(count_in(detail, "polls") or 0, count_in(detail, "polls_most") or 0)
    recount.book.add_bytes(facts["now"], max(0, most - 1) * facts["payload_bytes"])
    if "polls_most" in detail and record.get("sequence") == detail.get("first"):
        recount.sent[run] += most


def _take_in(recount: Recount, record: Mapping[str, Any]) -> None:
    kind, sequence = record["kind"], record.get("sequence", 0)
    recount.received = max(recount.received, sequence)
    # A number of an answer (control.*, an adapter) stands for no item of the coordinator's outbox.
    if record["decision"] == "allow" and not kind.startswith("control.") and kind not in TENSOR_KINDS:
        recount.taken = max(recount.taken, sequence)
        if kind == "run.end" and record.get("run") == recount.open:
            recount.open = ""
