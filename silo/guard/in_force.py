"""Which policy is in force at a site, and what it takes to change it (threat T34).

In force is the site's own file, tightened by the federation's charter. It changes in two ways only:

    at a start    tighter or equal to the one last in force: taken. Looser: only with a proposal that its approvers
                  signed (proposals.py); else the silo does not start.
    at run time   `silo reload`: tighter or equal: taken between two messages. Looser, or broken: the old one stays.

Which one was last in force stands in the ledger, so an edited file is noticed, and the newest record of the audit log
has to agree, so a ledger that was restored from an older copy is noticed too (T42).

Does not stop: somebody who replaces ledger and audit log by older copies of both; the log's witnesses show that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from certs.commands import VerifiedCommand
from certs.roles import Roles
from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import TEXT_CHARACTERS_MAX
from fedsilo.audit.segments import read_records
from fedsilo.protocol.errors import FedSiloError, NotAllowedError
from fedsilo.protocol.text import harmless
from policies.compare import Change, compare
from policies.load import Policy
from silo.config import SiloConfig, load_config
from silo.guard.decisions import orders_of
from silo.guard.ledger import Ledger, PolicyInForce
from silo.guard.ledger_check import name_heads
from silo.guard.proposals import HOURS_UNKNOWN, PERSONS_UNKNOWN, PROPOSALS, Consent, People, find_consent
from silo.guard.startup import Site, check_policy, effective_policy, require_authority_files

RECORDS_LOOKED_AT = 1000  # newest ones, for the policy that the log names last
NAMES_SHOWN_MAX = 8
NAMES_RECORDED_MAX = 64

How = Literal["first", "same", "tighter", "approved"]


@dataclass(frozen=True)
class Step:
    """From the policy last in force to the one at hand.

    Attributes:
        how: it came; `approved` is a looser one with its approvals.
        changes: field by field.
        logged: digest that the newest record names.
        consent: with `approved`.
    """

    how: How
    changes: tuple[Change, ...]
    logged: str
    consent: Consent | None = None

    @property
    def detail(self) -> dict[str, Any]:
        """What the record of the change says of it: names of fields of this site's own file, no values."""
        names = [harmless(change.name, TEXT_CHARACTERS_MAX) for change in self.changes[:NAMES_RECORDED_MAX]]
        detail: dict[str, Any] = {"change": self.how, "fields": names, "fields_changed": len(self.changes)}
        if self.consent is not None:
            detail |= {"proposal": self.consent.proposal, "proposer": self.consent.proposer}
        return detail


@dataclass(frozen=True)
class Seen:
    """What the log of this site says: how many records, and the digest that the newest decision or load names."""

    records: int
    digest: str

    @classmethod
    def of(cls, audit: AuditLog) -> Seen:
        return cls(audit.size, _newest_digest(audit.records(max(0, audit.size - RECORDS_LOOKED_AT))))

    @classmethod
    def in_folder(cls, directory: Path) -> Seen:
        """Of a log that another process may have open: its newest segment."""
        segments = sorted(directory.glob("[0-9]*.jsonl"))
        records = list(read_records(directory, int(segments[-1].stem))) if segments else []
        return cls(int(records[-1]["seq"]) + 1 if records else 0, _newest_digest(iter(records)))


def step_to(
    policy: Policy, ledger: Ledger, seen: Seen, config: SiloConfig, people: tuple[bytes, Roles], now: float
) -> Step:
    """Whether `policy` may come into force at a start. Only reads.

    Args:
        policy: effective, of today's files.
        ledger: knows the one last in force.
        seen: of the audit log, before this start wrote into it.
        config: the site.
        people: PEM of the site CA, and the site's roles.
        now: UTC seconds that never go back (T41).

    Raises:
        NotAllowedError: it is looser and its approvals are not complete, or ledger and log disagree.
    """
    last = ledger.policy_in_force
    if last is None:
        if seen.records:
            raise NotAllowedError(
                f"the ledger of {config.silo} does not know which policy was last in force, though its log has "
                f"{seen.records} records",
                hint="the ledger was taken away or is another silo's; put it back",
                code="LEDGER_LOST",
            )
        return Step("first", (), "")
    if seen.digest and seen.digest not in (last.digest, last.logged):
        raise NotAllowedError(
            f"the log says that policy {seen.digest[:12]} decided last, the ledger says {last.digest[:12]}",
            hint="one of the two is an older copy; put the newer one back",
            code="LEDGER_BEHIND",
        )
    logged = seen.digest or last.logged
    before = last.file
    if before is None:
        changes: list[Change] = []
        looser = ["everything: this version cannot read the policy last in force"]
        needed, hours = PERSONS_UNKNOWN, HOURS_UNKNOWN
    else:
        changes = compare(before, policy.file)
        looser = loosened(changes)
        needed, hours = before.approvals.policy_change, before.approvals.expiry_hours
    if last.digest == policy.digest:
        return Step("same", (), logged)
    if not looser:
        return Step(_tighter_or_same(changes), tuple(changes), logged)
    pem, roles = people
    consent, why = find_consent(
        config.policy.parent / PROPOSALS, last.digest, policy.digest,
        People(config.silo, pem, roles, datetime.fromtimestamp(now, UTC), hours, config.federation),
        needed=needed, used=ledger.was_used,
    )  # fmt: skip
    if consent is None:
        raise NotAllowedError(
            f"{_files(policy)} would be looser than the policy last in force {last.digest[:12]}: {_names(looser)}",
            hint=f"put the former policy back, or: {propose_command(policy, config)} and "
            f"{needed} of the approvers `fedsilo policy activate` it{''.join(f'; {each}' for each in why)}",
            code="POLICY_LOOSER",
        )
    return Step("approved", tuple(changes), logged, consent)


def take_over(
    site: Site, ledger: Ledger, audit: AuditLog, *, now: float, started: dict[str, Any], program: str,
    shows: float = 0.0,
) -> Step:  # fmt: skip
    """The first two records of a start: that it began, and the policy that is in force from here on.

    Args:
        site: with the effective policy.
        ledger: of this site.
        audit: its log.
        now: UTC seconds by the clock, as far as it is believed.
        shows: what it shows while nobody vouches for it: a consent that is over by it is over (T41).
        started: detail of the record `start`.
        program: hash of the code.

    Raises:
        NotAllowedError: as `step_to`; recorded, and nothing else happened.
    """
    policy = site.policy
    latest = max(ledger.now(now), audit.latest_time, shows)
    try:
        step = step_to(policy, ledger, Seen.of(audit), site.config, (site.site_ca_pem, site.roles), latest)
    except NotAllowedError as error:
        audit.append("policy.reload_refused", policy=policy.digests, reasons=[error.code], detail={"at": "start"})
        raise
    name_heads(site.config, ledger, audit)  # not before: the record of a refusal vouches for no ledger
    # Before the first record: a log without this row in the ledger is a ledger that was taken away.
    _put_in_force(policy, ledger, step)
    audit.append("start", detail=started)
    audit.append(
        "policy.load",
        policy={**policy.digests, "code": program, "schema": site.schema.digest},
        detail={"name": policy.file.name, "mode": policy.file.mode, **step.detail},
        link={"approvals": list(step.consent.approvers)} if step.consent else None,
        **orders_of(*(step.consent.orders if step.consent else ())),
    )
    return step


def reload(
    site: Site, in_force: Policy, ledger: Ledger, record: Callable[..., int], command: VerifiedCommand
) -> tuple[Policy, Step, int]:
    """Read the files again, strictly, and put them in force if nothing in them is looser.

    Only the places and the pin of policy and charter are taken from the configuration again; all else of it counts from
    the next start.

    Args:
        site: as at the start.
        in_force: the policy that decides now.
        ledger: of this site.
        record: the gate's, into the log.
        command: who asked.

    Returns:
        The policy in force, the step to it, and the number of the record of it.

    Raises:
        UsageError, NotAllowedError: the files are broken, do not fit this site, or are looser. Recorded; the policy
            that was in force stays in force.
    """
    who = {"person": command.person, "certificate": command.certificate_fingerprint}
    try:
        config = load_config(site.config.source)
        require_authority_files(config)
        policy = effective_policy(config)
        changes = compare(in_force.file, policy.file)
        if looser := loosened(changes):
            raise NotAllowedError(
                f"{_files(policy)} would be looser than the policy in force {in_force.digest[:12]}, which stays in "
                f"force: {_names(looser)}",
                hint=f"a running silo only tightens: {propose_command(policy, config)}",
                code="POLICY_LOOSER",
            )
        check_policy(site, policy)
    except FedSiloError as error:
        if error.code != "POLICY_LOOSER":
            error.message += f"; the policy in force {in_force.digest[:12]} stays in force"
        record(
            "policy.reload_refused", policy=in_force.digests, reasons=[error.code], detail={"at": "reload", **who},
            **orders_of(command.order),
        )  # fmt: skip
        raise
    step = Step(_tighter_or_same(changes), tuple(changes), in_force.digest)
    _put_in_force(policy, ledger, step)
    number = record(
        "policy.load",
        policy={**policy.digests, "schema": site.schema.digest},
        detail={"name": policy.file.name, "mode": policy.file.mode, **step.detail, **who},
        **orders_of(command.order),
    )
    return policy, step, number


def loosened(changes: Sequence[Change]) -> list[str]:
    """Names of the fields that are looser, or that cannot be compared and therefore count as looser."""
    return [change.name for change in changes if change.direction in ("looser", "incomparable")]


def propose_command(policy: Policy, config: SiloConfig) -> str:
    return f"fedsilo policy propose {policy.source} --config {config.source} --operator NAME"


def _tighter_or_same(changes: Sequence[Change]) -> How:
    return "tighter" if any(change.direction == "tighter" for change in changes) else "same"


def _put_in_force(policy: Policy, ledger: Ledger, step: Step) -> None:
    content = policy.file.model_dump(mode="json", by_alias=True)
    ledger.put_in_force(
        PolicyInForce(policy.digest, content, step.logged), proposal=step.consent.proposal if step.consent else ""
    )


def _newest_digest(records: Iterator[dict[str, Any]]) -> str:
    digest = ""
    for record in records:
        if record["event"] in ("policy.load", "egress.decision", "ingress.decision"):
            digest = str(record.get("policy", {}).get("effective", digest))
    return digest


def _files(policy: Policy) -> str:
    return " with ".join(part.source for part in policy.parts) or policy.source


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return ", ".join(names[:NAMES_SHOWN_MAX]) + more
