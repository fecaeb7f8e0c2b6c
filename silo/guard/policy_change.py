"""The policy in force at a site, and what it takes to change it (threats T34, T36).

In force is the site's own file, tightened by the federation's charter. It changes in two ways only:

    at a start    tighter or equal to the one last in force: taken. Looser: only with a proposal that its approvers
                  signed; else the silo does not start.
    at run time   `silo reload`: tighter or equal: taken between two messages. Looser, or broken: the old one stays.

A proposal of one person, approved by others, lies in files beside the policy (`signed_files.py`):

    PROPOSALS/ID.json             what is proposed and by whom: the text, signed with the digests before and after
    PROPOSALS/ID.PERSON.approval  one approver's signature over that proposal

Its signatures live for `approvals.expiry_hours` in place of an hour.

The ledger keeps which policy was last in force, so an edited file is noticed, and the newest record of the audit log
has to agree, so a ledger that was restored from an older copy is noticed too (T42).

Does not stop: as many approvers as the policy asks for, who agree with the proposer, and whom the log then names;
somebody who replaces ledger and audit log by older copies of both, which the log's witnesses show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from certs.commands import VerifiedCommand
from certs.roles import Roles
from fedsilo.audit.log import AuditLog
from fedsilo.audit.reader import read_records
from fedsilo.audit.record import TEXT_CHARACTERS_MAX
from fedsilo.files.durable import write_durably
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    NotAllowedError,
    UsageError,
)
from fedsilo.protocol.text import harmless
from policies.compare import Change, compare, effective
from policies.load import Beside, load_policy, name_of_custom_file
from policies.model import Policy
from silo.config import SiloConfig, load_config
from silo.guard.decisions import orders_of
from silo.guard.ledger import Ledger, PolicyInForce
from silo.guard.ledger_check import name_heads
from silo.guard.signed_files import (
    APPROVE,
    HOURS_UNKNOWN,
    PERSONS_UNKNOWN,
    PROPOSALS,
    PROPOSE,
    People,
    keep_signed,
    read_signed_beside,
    signed_by,
)
from silo.guard.site import Site, check_policy, effective_policy, require_authority_files

# ---- proposals and approvals -------------------------------------------------------------------------------------

MAY_PROPOSE, MAY_APPROVE = "change.propose", "change.approve"
ID_CHARACTERS = 16  # of a proposal's id, in the names of its files
FILES_MAX = 1000  # in the folder; what is beyond is not looked at


class Texts(NamedTuple):
    """Files that a proposal brings: the site's policy, the charter that shall come with it, and the file of own
    patterns that the policy names; None where there is none."""

    policy: str
    charter: str | None = None
    custom_file: str | None = None


@dataclass(frozen=True)
class Proposal:
    """A proposal whose signature holds.

    Attributes:
        id: digest of the signed statement and the certificate; its beginning names the files.
        before: digest of the effective policy in force; the proposal is for no other.
        after: digest of the effective policy that shall be in force.
        order: what the proposer signed, as the audit log keeps it.
    """

    id: str
    texts: Texts
    before: str
    after: str
    proposer: str
    expires: datetime
    order: Mapping[str, str]

    def policy(self, charter: Policy | None) -> Policy:
        """The effective policy it stands for.

        Args:
            charter: the site's present one, for a proposal that brings none.

        Raises:
            UsageError: a mistake in it.
            ConflictError: with this charter it is another policy than was signed.
        """
        site = load_policy(self.texts.policy.encode(), f"proposal {self.id}", self._beside)
        if self.texts.charter is not None:
            charter = load_policy(self.texts.charter.encode(), f"charter of proposal {self.id}")
        policy = effective(site, charter)
        if policy.digest != self.after:
            raise ConflictError(
                f"proposal {self.id} is for the effective policy {self.after}; with the charter of today it gives "
                f"{policy.digest}",
                hint="propose it again",
            )
        return policy

    @property
    def _beside(self) -> Beside | None:
        text = self.texts.custom_file
        return None if text is None else lambda name: (text.encode(), f"{name} of proposal {self.id}")


@dataclass(frozen=True)
class Consent:
    """A proposal with every approval that it needs. `orders`: what proposer and approvers signed."""

    proposal: str
    proposer: str
    approvers: tuple[str, ...]
    orders: tuple[Mapping[str, str], ...] = ()


def proposal_arguments(texts: Texts, before: str, after: str) -> dict[str, Any]:
    """Return what the proposer signs."""
    digests = {
        f"{name}_sha256": "" if text is None else sha256_hex(text.encode()) for name, text in texts._asdict().items()
    }
    return {**digests, "before": before, "after": after}


def approval_arguments(proposal: Proposal) -> dict[str, Any]:
    """Return what an approver signs."""
    return {"proposal": proposal.id, "before": proposal.before, "after": proposal.after}


def write_proposal(folder: Path, texts: Texts, command: control_pb2.Command, people: People) -> tuple[Path, Proposal]:
    """Keep a proposal. Raises as `read_proposal`, before anything is written; OperationError: the disk refused."""
    proposal = _verified(texts, command, people, "the proposal")
    return keep_signed(folder / f"{proposal.id[:ID_CHARACTERS]}.json", command, texts._asdict()), proposal


def write_approval(path: Path, proposal: Proposal, signed: control_pb2.Command, people: People) -> Path:
    """Keep one person's approval beside the proposal at `path`.

    Raises:
        NotAllowedError: not signed by an approver, over something else, or by the proposer.
        ConflictError: this person has approved it already; nobody counts twice.
    """
    command = _approver(proposal, signed, people)
    place = path.with_name(f"{path.stem}.{command.person}.approval")
    if command.person in approvers_of(path, proposal, people)[0]:
        raise ConflictError(f"{command.person} has approved {path.stem} already: {place}")
    return keep_signed(place, signed)


def _approver(proposal: Proposal, signed: control_pb2.Command, people: People) -> VerifiedCommand:
    command = people.verify(signed, APPROVE, MAY_APPROVE)
    if command.arguments != approval_arguments(proposal):
        raise NotAllowedError(f"{command.person} approved something else")
    if command.person == proposal.proposer:
        raise NotAllowedError(
            f"{command.person} proposed it, so another person has to approve it",
            hint=f"approvers at this site: {', '.join(people.roles.who_may(MAY_APPROVE)) or 'nobody'}",
        )
    return command


def read_proposal(path: Path, people: People) -> Proposal:
    """A proposal from its file.

    Raises:
        NotFoundError, UsageError: no such file, or it is no proposal.
        NotAllowedError: not signed by somebody who may propose, changed after that, or expired.
    """
    signed, content = read_signed_beside(path, Texts._fields)
    texts = Texts(**content)
    if not isinstance(texts.policy, str) or not all(isinstance(each, str | None) for each in texts):
        raise UsageError(f"{path}: policy, charter and custom_file are texts")
    return _verified(texts, signed, people, str(path))


def _verified(texts: Texts, signed: control_pb2.Command, people: People, source: str) -> Proposal:
    command = people.verify(signed, PROPOSE, MAY_PROPOSE)
    before, after = (str(command.arguments.get(key, "")) for key in ("before", "after"))
    if command.arguments != proposal_arguments(texts, before, after):
        raise NotAllowedError(f"{source}: {command.person} signed another text than the one that stands there")
    return Proposal(command.digest, texts, before, after, command.person, command.expires, command.order)


def approvers_of(path: Path, proposal: Proposal, people: People) -> tuple[dict[str, VerifiedCommand], list[str]]:
    """Return who has approved a proposal and with what, each person once and never the proposer; and why the other
    signatures do not count.

    Args:
        path: of the proposal; the approvals lie beside it.
        proposal: from that file.
        people: as for the proposal.
    """
    files = _files(path.parent, f"{path.stem}.*.approval")
    return signed_by(files, lambda signed: _approver(proposal, signed, people))


def find_consent(
    folder: Path, before: str, after: str, people: People, *, needed: int, used: Callable[[str], bool]
) -> tuple[Consent | None, list[str]]:
    """The proposal for exactly this change that has its approvals; and why the others do not do.

    Args:
        folder: where proposals lie; it need not be there.
        before: digest of the effective policy last in force.
        after: of the one that shall be.
        people: who may sign, now.
        needed: approvers that the policy in force asks for.
        used: whether a proposal, by its id, was used before.
    """
    why: list[str] = []
    for path in _files(folder, "*.json"):
        try:
            proposal = read_proposal(path, people)
        except FedSiloError as error:
            why.append(f"{path.name}: {error.message}")
            continue
        if (proposal.before, proposal.after) != (before, after):
            why.append(f"{path.name}: it is for another change")
        elif used(proposal.id):
            why.append(f"{path.name}: it was used already")
        else:
            approvers, refused = approvers_of(path, proposal, people)
            why += refused
            if len(approvers) >= needed:
                orders = (proposal.order, *(approval.order for approval in approvers.values()))
                return Consent(proposal.id, proposal.proposer, tuple(approvers), orders), why
            why.append(f"{path.name}: {len(approvers)} of {needed} approvals")
    return None, why


def put_in_place(path: Path, proposal: Proposal, policy: Path, charter: Path | None) -> None:
    """Write the proposed texts over the site's files; what stood there is kept beside the proposal.

    Raises:
        UsageError: it brings a charter, and the configuration names no place for one.
        OperationError: a file cannot be written.
    """
    proposed = proposal.texts
    texts = [(policy, proposed.policy, "policy")]
    name = name_of_custom_file(proposed.policy.encode(), str(path))
    if proposed.custom_file is not None and name:
        # before the policy that names it: in between, the old policy with other patterns is none that was in force
        texts.insert(0, (policy.parent / name, proposed.custom_file, "patterns"))
    if proposed.charter is not None:
        if charter is None:
            raise UsageError("the proposal brings a charter, and the configuration names none", hint="charter: PATH")
        texts.append((charter, proposed.charter, "charter"))
    for place, text, name in texts:
        if place.is_file() and place.read_bytes() != text.encode():
            write_durably(path.with_name(f"{path.stem}.{name}.replaced.yaml"), place.read_bytes())
        write_durably(place, text.encode())


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    yield from sorted(folder.glob(pattern))[:FILES_MAX]


# ---- the policy in force -----------------------------------------------------------------------------------------

RECORDS_LOOKED_AT = 1000  # newest ones, for the policy that the log names last
NAMES_SHOWN_MAX = 8
NAMES_RECORDED_MAX = 64

How = Literal["first", "same", "tighter", "approved"]


@dataclass(frozen=True)
class Step:
    """The change from the policy last in force to the present one.

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
        """Return the change for its record: names of fields of this site's own file, no values."""
        names = [harmless(change.name, TEXT_CHARACTERS_MAX) for change in self.changes[:NAMES_RECORDED_MAX]]
        detail: dict[str, Any] = {"change": self.how, "fields": names, "fields_changed": len(self.changes)}
        if self.consent is not None:
            detail |= {"proposal": self.consent.proposal, "proposer": self.consent.proposer}
        return detail


@dataclass(frozen=True)
class Seen:
    """State of this site's log: how many records, and the digest that the newest decision or load names."""

    records: int
    digest: str

    @classmethod
    def of(cls, audit: AuditLog) -> Seen:
        return cls(audit.size, _newest_digest(audit.records(max(0, audit.size - RECORDS_LOOKED_AT))))

    @classmethod
    def in_folder(cls, directory: Path) -> Seen:
        """Read a log that another process may have open, from its newest segment."""
        segments = sorted(directory.glob("[0-9]*.jsonl"))
        records = list(read_records(directory, int(segments[-1].stem))) if segments else []
        return cls(int(records[-1]["seq"]) + 1 if records else 0, _newest_digest(iter(records)))


def step_to(
    policy: Policy, ledger: Ledger, seen: Seen, config: SiloConfig, people: tuple[bytes, Roles], now: float
) -> Step:
    """Return whether `policy` may come into force at a start. Only reads.

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
        config.policy.parent / PROPOSALS,
        last.digest,
        policy.digest,
        People(config.silo, pem, roles, datetime.fromtimestamp(now, UTC), hours, config.federation),
        needed=needed,
        used=ledger.was_used,
    )
    if consent is None:
        raise NotAllowedError(
            f"{_files_of(policy)} would be looser than the policy last in force {last.digest[:12]}: {_names(looser)}",
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
                f"{_files_of(policy)} would be looser than the policy in force {in_force.digest[:12]}, which stays in "
                f"force: {_names(looser)}",
                hint=f"a running silo only tightens: {propose_command(policy, config)}",
                code="POLICY_LOOSER",
            )
        check_policy(site, policy)
    except FedSiloError as error:
        if error.code != "POLICY_LOOSER":
            error.message += f"; the policy in force {in_force.digest[:12]} stays in force"
        record(
            "policy.reload_refused",
            policy=in_force.digests,
            reasons=[error.code],
            detail={"at": "reload", **who},
            **orders_of(command.order),
        )
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


def _files_of(policy: Policy) -> str:
    return " with ".join(part.source for part in policy.parts) or policy.source


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
    return ", ".join(names[:NAMES_SHOWN_MAX]) + more
