"""A looser policy, proposed by one person and approved by others: files beside the site's policy (threats T34, T36).

    PROPOSALS/ID.json             what is proposed and by whom: the text, signed with the digests before and after
    PROPOSALS/ID.PERSON.approval  one approver's signature over that proposal

A signature is a control command under the site CA (certs/commands.py) whose life is `approvals.expiry_hours` in place
of an hour. Files are only carried: whoever reads them verifies each signature anew, against the people of today, with
a time that never runs backwards (T41). So nothing here needs to be kept from being copied, and a proposal, an approval
or a text that anybody changed counts for nothing.

Does not stop: as many approvers as the policy asks for, who agree with the proposer. The log then names them.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from certs.commands import VerifiedCommand, verify_command
from certs.roles import ACTIONS, Roles, may
from fedsilo.files.durable import FOLDER_MODE, write_durably
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UsageError,
)
from fedsilo.protocol.strict_yaml import BYTES_MAX
from policies.compare import effective
from policies.custom_file import Beside, name_of_custom_file
from policies.load import Policy, load_policy

PROPOSALS = "proposals"  # folder beside the site's policy
PROPOSE, APPROVE = "policy.propose", "policy.approve"
MAY_PROPOSE, MAY_APPROVE = "change.propose", "change.approve"
ID_CHARACTERS = 16  # of a proposal's id, in the names of its files
HOURS_MAX = 24 * 366
# Where the policy last in force cannot be read by this version: its persons and hours are not known.
PERSONS_UNKNOWN, HOURS_UNKNOWN = 2, 24
FILE_BYTES_MAX = 6 * BYTES_MAX  # three files as JSON strings, and a certificate
FILES_MAX = 1000  # in the folder; what is beyond is not looked at


@dataclass(frozen=True)
class People:
    """Who may sign at this site, and when it is.

    Attributes:
        now: timezone-aware; never earlier than a time that was seen before.
        hours: `approvals.expiry_hours` of the policy in force.
        federation: that the site's guard is in, and that an order names. Only a proposal and its approvals may name
            none, as an earlier version signed them: their digests are of policies of one federation, and fit no other.
    """

    site: str
    site_ca_pem: bytes
    roles: Roles
    now: datetime
    hours: int
    federation: str

    def verify(self, command: control_pb2.Command, name: str, action: str) -> VerifiedCommand:
        """Raises NotAllowedError: not signed by a person of this site, expired, or by one who may not."""
        as_before = not command.federation and name in (PROPOSE, APPROVE)
        verified = verify_command(
            command, federation="" if as_before else self.federation, site=self.site,
            site_ca_pem=self.site_ca_pem, roles=self.roles, now=self.now,
            lifetime_max=timedelta(hours=min(self.hours, HOURS_MAX)),
        )  # fmt: skip
        if verified.name != name:
            raise NotAllowedError(f"{verified.person} signed {verified.name!r}, not {name!r}")
        if not may(verified.roles, action):
            raise NotAllowedError(
                f"{verified.person} may not {action} at {self.site}",
                hint=f"it takes {' or '.join(sorted(ACTIONS[action]))}",
            )
        return verified


@dataclass(frozen=True)
class Proposal:
    """A proposal whose signature holds.

    Attributes:
        id: digest of the signed statement and the certificate; its beginning names the files.
        text: of the proposed site policy; `charter_text` of the charter that shall come with it, if any;
            `custom_text` of the file of own patterns that the policy names, if it names one.
        before: digest of the effective policy in force; the proposal is for no other.
        after: digest of the effective policy that shall be in force.
        order: what the proposer signed, as the audit log keeps it.
    """

    id: str
    text: str
    charter_text: str | None
    before: str
    after: str
    proposer: str
    expires: datetime
    custom_text: str | None = None
    order: Mapping[str, str] = field(default_factory=dict)

    def policy(self, charter: Policy | None) -> Policy:
        """The effective policy it stands for.

        Args:
            charter: the site's present one, for a proposal that brings none.

        Raises:
            UsageError: a mistake in it.
            ConflictError: with this charter it is another policy than was signed.
        """
        site = load_policy(self.text.encode(), f"proposal {self.id}", self._beside)
        if self.charter_text is not None:
            charter = load_policy(self.charter_text.encode(), f"charter of proposal {self.id}")
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
        text = self.custom_text
        return None if text is None else lambda name: (text.encode(), f"{name} of proposal {self.id}")


@dataclass(frozen=True)
class Consent:
    """A proposal with every approval that it needs. `orders`: what proposer and approvers signed."""

    proposal: str
    proposer: str
    approvers: tuple[str, ...]
    orders: tuple[Mapping[str, str], ...] = ()


def proposal_arguments(
    text: str, charter_text: str | None, before: str, after: str, custom_text: str | None = None
) -> dict[str, Any]:
    """What the proposer signs."""
    return {
        "policy_sha256": sha256_hex(text.encode()),
        "charter_sha256": "" if charter_text is None else sha256_hex(charter_text.encode()),
        "custom_file_sha256": "" if custom_text is None else sha256_hex(custom_text.encode()),
        "before": before,
        "after": after,
    }


def approval_arguments(proposal: Proposal) -> dict[str, Any]:
    """What an approver signs."""
    return {"proposal": proposal.id, "before": proposal.before, "after": proposal.after}


def write_proposal(
    folder: Path,
    text: str,
    charter_text: str | None,
    command: control_pb2.Command,
    people: People,
    custom_text: str | None = None,
) -> tuple[Path, Proposal]:
    """Keep a proposal. Raises as `read_proposal`, before anything is written; OperationError: the disk refused."""
    proposal = _verified((text, charter_text, custom_text), command, people, "the proposal")
    path = folder / f"{proposal.id[:ID_CHARACTERS]}.json"
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(f"cannot create {folder}: {error.strerror}") from error
    content = {"policy": text, "charter": charter_text, "custom_file": custom_text, "command": _packed(command)}
    write_durably(path, _dump(content))
    return path, proposal


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
    content = _read(path, {"policy", "charter", "custom_file", "command"})
    text, charter_text, custom_text = content["policy"], content["charter"], content["custom_file"]
    if not isinstance(text, str) or not all(isinstance(each, str | None) for each in (charter_text, custom_text)):
        raise UsageError(f"{path}: policy, charter and custom_file are texts")
    signed = _unpacked(path, content["command"])
    return _verified((text, charter_text, custom_text), signed, people, str(path))


def _verified(
    texts: tuple[str, str | None, str | None], signed: control_pb2.Command, people: People, source: str
) -> Proposal:
    text, charter_text, custom_text = texts
    command = people.verify(signed, PROPOSE, MAY_PROPOSE)
    before, after = (str(command.arguments.get(key, "")) for key in ("before", "after"))
    if command.arguments != proposal_arguments(text, charter_text, before, after, custom_text):
        raise NotAllowedError(f"{source}: {command.person} signed another text than the one that stands there")
    return Proposal(
        id=command.digest, text=text, charter_text=charter_text, before=before, after=after,
        proposer=command.person, expires=command.expires, custom_text=custom_text, order=command.order,
    )  # fmt: skip


def approvers_of(path: Path, proposal: Proposal, people: People) -> tuple[dict[str, VerifiedCommand], list[str]]:
    """Who has approved a proposal by what, each person once and never the proposer; and why the other signatures do not
    count.

    Args:
        path: of the proposal; the approvals lie beside it.
        proposal: from that file.
        people: as for the proposal.
    """
    files = _files(path.parent, f"{path.stem}.*.approval")
    return signed_by(files, lambda signed: _approver(proposal, signed, people))


def signed_by(
    files: Iterable[Path], check: Callable[[control_pb2.Command], VerifiedCommand]
) -> tuple[dict[str, VerifiedCommand], list[str]]:
    """Read signed approvals: what each person signed, by name, and why others do not count.

    Args:
        files: one signed command each.
        check: returns the verified command; a FedSiloError says why it does not count.
    """
    given: dict[str, VerifiedCommand] = {}
    refused: list[str] = []
    for file in files:
        try:
            command = check(read_signed(file))
            given[command.person] = command
        except FedSiloError as error:
            refused.append(f"{file.name}: {error.message}")
    return dict(sorted(given.items())), refused


def keep_signed(place: Path, signed: control_pb2.Command) -> Path:
    """Keep one person's signature as a file. Raises OperationError: the disk refused."""
    try:
        place.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(f"cannot create {place.parent}: {error.strerror}") from error
    write_durably(place, _dump({"command": _packed(signed)}))
    return place


def read_signed(path: Path) -> control_pb2.Command:
    """What `keep_signed` kept; nothing is verified. Raises NotFoundError, UsageError: no such file, or another."""
    return _unpacked(path, _read(path, {"command"})["command"])


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
    texts = [(policy, proposal.text, "policy")]
    name = name_of_custom_file(proposal.text.encode(), str(path))
    if proposal.custom_text is not None and name:
        # before the policy that names it: in between, the old policy with other patterns is none that was in force
        texts.insert(0, (policy.parent / name, proposal.custom_text, "patterns"))
    if proposal.charter_text is not None:
        if charter is None:
            raise UsageError("the proposal brings a charter, and the configuration names none", hint="charter: PATH")
        texts.append((charter, proposal.charter_text, "charter"))
    for place, text, name in texts:
        if place.is_file() and place.read_bytes() != text.encode():
            write_durably(path.with_name(f"{path.stem}.{name}.replaced.yaml"), place.read_bytes())
        write_durably(place, text.encode())


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    yield from sorted(folder.glob(pattern))[:FILES_MAX]


def _dump(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode() + b"\n"


def _read(path: Path, keys: set[str]) -> dict[str, Any]:
    if not path.is_file():
        raise NotFoundError(f"{path}: there is no such file", hint="fedsilo policy propose NEW.yaml")
    if path.stat().st_size > FILE_BYTES_MAX:
        raise UsageError(f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON") from error
    if not isinstance(value, dict) or value.keys() != keys:
        raise UsageError(f"{path} does not hold exactly {', '.join(sorted(keys))}")
    return value


def _packed(command: control_pb2.Command) -> str:
    return base64.b64encode(command.SerializeToString(deterministic=True)).decode("ascii")


def _unpacked(path: Path, text: object) -> control_pb2.Command:
    try:
        return control_pb2.Command.FromString(base64.b64decode(str(text), validate=True))
    except (binascii.Error, ValueError, DecodeError) as error:
        raise UsageError(f"{path}: command is no signed command") from error
