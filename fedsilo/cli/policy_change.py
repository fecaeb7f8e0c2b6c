"""`fedsilo policy propose|activate`: the way to a looser policy. Files only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.output import JsonOption, emit, existing, existing_policy, guarded, table
from fedsilo.cli.silo_control import CONFIG_DEFAULT, ConfigOption, OperatorOption, load_site
from fedsilo.cli.typed_back import confirm
from fedsilo.protocol.errors import ConflictError, HeldError, NotFoundError, OperationError, UsageError

if TYPE_CHECKING:
    from policies.compare import Change
    from policies.model import PolicyFile
    from silo.config import SiloConfig
    from silo.guard.ledger import PolicyInForce
    from silo.guard.signed_files import People

OVERLAP_WORDS = 8  # in a row that count as a passage of a private record, where the policy says nothing of it
_CLOCKS_DIFFER = timedelta(minutes=5)  # a guard whose clock is behind must not find it valid for too long


@guarded("policy propose")
def propose(
    new: Annotated[Path, typer.Argument(metavar="NEW.yaml", help="The policy that shall take the site's place.")],
    operator: OperatorOption,
    config: ConfigOption = CONFIG_DEFAULT,
    charter: Annotated[
        Path | None, typer.Option("--charter", help="A changed federation charter that shall come with it.")
    ] = None,
    public: Annotated[
        list[Path] | None,
        typer.Option("--public", help="File of a public set that NEW.yaml pins anew, where it does not lie beside it."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Propose a looser policy, signed by the person who proposes it. It takes approvals by others, and a restart.

    A file of own patterns that NEW.yaml names, and that lies beside it, is part of the proposal.

    A public set that the policy in force does not pin is linted first (`fedsilo public lint`), with this site's records
    and canaries; where anything is found, nothing is signed. `policy activate` lints again for each approver. Nobody
    else does: a proposer and approvers who all sign with another program bring in a set that was never linted.
    """
    from fedsilo.control.client import sign_as
    from fedsilo.files.site_policy import files_beside
    from policies.compare import effective
    from policies.load import load_policy
    from silo.guard import policy_change, signed_files
    from silo.guard.policy_change import loosened

    site = load_site(config)
    last, before, people = _in_force(site)
    text = _text(new)
    charter_text = None if charter is None else _text(charter)
    place = charter or site.charter
    beside = None if place is None else load_policy(_text(place).encode(), str(place))
    policy = effective(load_policy(text.encode(), str(new), files_beside(new)), beside)
    custom_text = None if policy.own.custom_text is None else policy.own.custom_text.decode()
    changes = _changes(before, policy.file)
    looser = loosened(changes)
    if before is not None and not looser:
        raise UsageError(
            f"{new} is not looser than the policy in force {last.digest[:12]}, so nobody has to approve it",
            hint=f"put it at {site.policy}, then: silo reload --config {config} --operator NAME",
            code="NOT_LOOSER",
        )
    linted = _linted(site, before, policy.file, [new.parent, site.policy.parent], public or [])
    needed = before.approvals.policy_change if before else signed_files.PERSONS_UNKNOWN
    signed = sign_as(
        _operator(site, operator), signed_files.PROPOSE,
        policy_change.proposal_arguments(text, charter_text, last.digest, policy.digest, custom_text),
        expires=people.now + timedelta(hours=people.hours) - _CLOCKS_DIFFER,
    )  # fmt: skip
    path, proposal = policy_change.write_proposal(
        site.policy.parent / signed_files.PROPOSALS, text, charter_text, signed, people, custom_text
    )
    data = {
        "proposal": str(path), "id": proposal.id, "proposer": proposal.proposer, "before": proposal.before,
        "after": proposal.after, "expires": _utc(proposal.expires), "needed": needed, "looser": looser,
        "changes": [_row(change) for change in changes], "linted": linted,
    }  # fmt: skip
    emit(
        "policy propose", data, json_output=json_output,
        text=lambda: f"{_table(changes)}\n{_lint_lines(linted)}"
        f"proposal {path} by {proposal.proposer}, until {_utc(proposal.expires)}\n"
        f"after {proposal.after}\n"
        f"next: {needed} of {', '.join(_others(people, proposal.proposer)) or 'nobody: no other approver'}: "
        f"fedsilo policy activate {path} --config {config} --operator NAME",
    )  # fmt: skip


@guarded("policy activate")
def activate(
    proposal: Annotated[Path, typer.Argument(metavar="PROPOSAL", help="File that `policy propose` wrote.")],
    operator: OperatorOption,
    config: ConfigOption = CONFIG_DEFAULT,
    expect_digest: Annotated[
        str, typer.Option("--expect-digest", help="Digest of the policy that you were shown.")
    ] = "",
    public: Annotated[
        list[Path] | None,
        typer.Option(
            "--public",
            help="File of a public set that the proposal pins anew, where it does not lie beside the policy.",
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Approve a proposed policy as another person than its proposer; the last one needed puts it in place.

    It comes into force at the next start of the silo, which verifies the signatures again. A public set that the policy
    in force does not pin is linted here too, whatever the proposer's program did; where anything is found, nothing is
    signed. The start compares its hash alone, so approvers who sign with another program put an unlinted set in place.
    """
    from fedsilo.control.client import sign_as
    from policies.load import load_policy
    from silo.guard import policy_change, signed_files

    site = load_site(config)
    last, before, people = _in_force(site)
    found = policy_change.read_proposal(proposal, people)
    if found.before != last.digest:
        raise ConflictError(
            f"{proposal} is for the policy {found.before[:12]}; in force is {last.digest[:12]}",
            hint="propose it again",
            code="STALE_PROPOSAL",
        )
    charter = None if site.charter is None else load_policy(existing(site.charter).read_bytes(), str(site.charter))
    policy = found.policy(charter)
    changes = _changes(before, policy.file)
    # The proposer is the one whom an approver must not have to trust: their lint may never have run (T12).
    linted = _linted(site, before, policy.file, [proposal.parent, site.policy.parent], public or [])
    confirm(
        found.after, expect_digest, f"{_table(changes)}\n\nthe policy:",
        hint="the proposer's `fedsilo policy propose` printed it as `after`", json_output=json_output,
    )  # fmt: skip
    needed = before.approvals.policy_change if before else signed_files.PERSONS_UNKNOWN
    signed = sign_as(
        _operator(site, operator), signed_files.APPROVE, policy_change.approval_arguments(found), expires=found.expires
    )
    given = policy_change.write_approval(proposal, found, signed, people)
    approvers, refused = policy_change.approvers_of(proposal, found, people)
    complete = len(approvers) >= needed
    if complete:
        policy_change.put_in_place(proposal, found, site.policy, site.charter)
    warnings = list(refused)
    if complete and policy.charter is not None and site.charter_sha256 not in (None, policy.charter.digest):
        warnings.append(f"set charter_sha256 in {config} to {policy.charter.digest}, or the silo does not start")
    data = {
        "proposal": str(proposal), "approval": str(given), "approvers": list(approvers), "needed": needed,
        "in_place": complete, "after": found.after, "expires": _utc(found.expires),
        "changes": [_row(change) for change in changes], "linted": linted,
    }  # fmt: skip
    waits = HeldError(
        f"{needed - len(approvers)} more of {needed} approvals are needed before {found.after[:12]} is put in place",
        hint=f"fedsilo policy activate {proposal} --config {config} --operator NAME",
    )
    emit(
        "policy activate", data, json_output=json_output, warnings=warnings, error=None if complete else waits,
        text=_lint_lines(linted) + f"{len(approvers)} of {needed} approvals: {', '.join(approvers)}"
        + (
            f"\n{site.policy} is in place; it comes into force at the next start, before {_utc(found.expires)}: "
            f"silo stop, then silo start --config {config}"
            if complete
            else ""
        ),
    )  # fmt: skip


def _linted(
    site: SiloConfig, before: PolicyFile | None, after: PolicyFile, folders: Sequence[Path], given: Sequence[Path]
) -> list[dict[str, str]]:
    """Lint each public set that `after` pins and `before` does not (threat T12).

    What this does not stop: people who propose and approve with another program than this one (the guard compares
    hashes, and lints nothing), a set that is first in force without any proposal (the site's first start), and what the
    lint itself does not find (fedsilo/cli/public_lint.py).

    Args:
        site: whose records and canaries it is compared with.
        before: the policy in force; None: every set counts as new.
        after: the policy that is proposed.
        folders: where the file that a pin names is looked for.
        given: files by hand, told apart by their hashes.

    Raises:
        NotFoundError: the set's file is not there, or is another one.
        OperationError: the lint found something.
    """
    from fedsilo.cli.public_lint import lint
    from fedsilo.files.task_files import read_tasks
    from silo.guard.screens import read_canaries

    known = {pin.sha256 for pin in before.public_sets.values()} if before is not None else set()
    pins = {name: pin for name, pin in after.public_sets.items() if pin.sha256 not in known}
    linted = []
    for name, pin in pins.items():
        places = [*given, *(folder / pin.file for folder in folders)]
        file = next((each for each in places if each.is_file() and read_tasks(each).sha256 == pin.sha256), None)
        if file is None:
            raise NotFoundError(
                f"public set {name} is not pinned by the policy in force, and no file with its SHA-256 {pin.sha256} is "
                f"at {' or '.join(dict.fromkeys(map(str, places)))}, so nobody can look at it",
                hint="--public FILE, the set that the federation agreed on", code="PUBLIC_SET_MISSING",
            )  # fmt: skip
        overlap = after.text_screens.overlap
        canaries = read_canaries(site.data.canaries) if site.data.canaries is not None else ()
        findings = lint(file, private=site.data.private, canaries=canaries, n=overlap.n if overlap else OVERLAP_WORDS)
        if findings:
            codes = sorted({finding.code for finding in findings})
            private = " ".join(f"--private {path}" for path in site.data.private)
            raise OperationError(
                f"public set {name} ({file}): lint found {', '.join(codes)} in "
                f"{len({finding.line for finding in findings})} lines; a set enters only where it finds nothing",
                hint=f"fedsilo public lint {file} {private}", code="LINT_FINDINGS",
            )  # fmt: skip
        linted.append({"set": name, "file": str(file), "sha256": pin.sha256})
    return linted


def _lint_lines(linted: list[dict[str, str]]) -> str:
    return "".join(f"public set {row['set']} ({row['file']}): lint found nothing\n" for row in linted)


def _in_force(site: SiloConfig) -> tuple[PolicyInForce, PolicyFile | None, People]:
    """The policy last in force, what it says (None: not in this version's words), and who may sign.

    Raises:
        NotFoundError: none was ever in force here.
    """
    from fedsilo.files.identity_files import load_site as load_people
    from silo.guard import signed_files
    from silo.guard.ledger import Ledger
    from silo.guard.site import LEDGER

    path = site.state_dir / LEDGER
    last, latest = None, 0.0
    if path.is_file():
        ledger = Ledger(path, read_only=True)
        last, latest = ledger.policy_in_force, ledger.latest_time
        ledger.close()
    if last is None:
        raise NotFoundError(
            f"no policy has been in force at {site.silo} yet", hint="the first `silo start` takes the one that is there"
        )
    before = last.file
    hours = before.approvals.expiry_hours if before else signed_files.HOURS_UNKNOWN
    pem, roles = load_people(site.identity.site_ca, site.identity.operators, site=site.silo)
    now = datetime.fromtimestamp(max(time.time(), latest), UTC)
    return (
        last,
        before,
        signed_files.People(site.silo, pem, roles, now, min(hours, signed_files.HOURS_MAX), site.federation),
    )


def _operator(site: SiloConfig, name: str) -> Any:
    from fedsilo.control.client import Operator

    folder = site.identity.certificate.parent
    return Operator(site.silo, folder / f"{name}.crt", folder / f"{name}.key", site.federation)


def _others(people: People, proposer: str) -> list[str]:
    return [person for person in people.roles.who_may("change.approve") if person != proposer]


def _changes(before: PolicyFile | None, after: PolicyFile) -> list[Change]:
    from policies.compare import compare

    return compare(before, after) if before is not None else []


def _row(change: Change) -> dict[str, Any]:
    return {"field": change.name, "before": change.before, "after": change.after, "direction": change.direction}


def _table(changes: list[Change]) -> str:
    if not changes:
        return "the policy in force cannot be read by this version: every field may be another"
    rows = [(change.name, str(change.before), str(change.after), change.direction) for change in changes]
    return table(("field", "before", "after", ""), rows)


def _text(path: Path) -> str:
    from fedsilo.files.site_policy import read_plain_file

    try:
        return read_plain_file(existing_policy(path), "policy file").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}", hint="save it as UTF-8 text") from error


def _utc(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
