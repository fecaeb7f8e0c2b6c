"""Roles of people at one site: `roles.yaml`, and the table of the actions that each role may do.

A certificate says who a person is; this file says what the person may do. The file is the site's own:

    site: hospital_a
    people:
      alice: [approver]
      bob: [operator, auditor]

Does not cover: two approvers' signatures on the file itself. Until then its protection is the file's owner and mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedsilo.protocol import strict_yaml
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.plan import Name

Role = Literal["viewer", "auditor", "operator", "approver", "site-admin"]
ROLES: tuple[Role, ...] = ("viewer", "auditor", "operator", "approver", "site-admin")

# Action -> the roles that may do it. An action that is not here may be done by nobody.
ACTIONS: Mapping[str, frozenset[Role]] = {
    "watch": frozenset({"viewer", "auditor", "operator", "approver", "site-admin"}),
    "audit.read": frozenset({"auditor", "approver", "site-admin"}),
    "payload.read": frozenset({"auditor", "approver"}),
    "silo.pause": frozenset({"operator", "approver", "site-admin"}),
    "silo.resume": frozenset({"operator", "approver", "site-admin"}),
    "silo.leave": frozenset({"operator", "approver", "site-admin"}),
    "silo.stop": frozenset({"operator", "approver", "site-admin"}),  # drain
    # At either site, where messages are carried in files: what is written was let out by the policy before.
    "transfer.export": frozenset({"operator", "approver", "site-admin"}),
    "transfer.import": frozenset({"operator", "approver", "site-admin"}),
    "adapter.accept": frozenset({"approver"}),
    "adapter.refuse": frozenset({"operator", "approver", "site-admin"}),
    "adapter.rollback": frozenset({"operator", "approver", "site-admin"}),
    "release.approve": frozenset({"approver"}),
    "release.reject": frozenset({"approver"}),
    "release.defer": frozenset({"approver"}),  # for oneself; whoever may answer
    "change.propose": frozenset({"operator", "approver", "site-admin"}),
    "change.approve": frozenset({"approver"}),
    "halt.release": frozenset({"approver"}),
    "certificates.manage": frozenset({"site-admin"}),
    # At the coordinator's own site: what starts, steers or ends a run of the whole federation.
    "run.submit": frozenset({"operator", "approver"}),
    "run.start": frozenset({"operator", "approver"}),
    "run.pause": frozenset({"operator", "approver"}),
    "run.resume": frozenset({"operator", "approver"}),
    "run.abort": frozenset({"operator", "approver"}),
}


@dataclass(frozen=True)
class Roles:
    """The people of one site. Somebody not listed has no role, whatever certificate he holds."""

    site: str
    people: Mapping[str, frozenset[Role]]
    digest: str = field(default="", compare=False)  # SHA-256 of the file

    def of(self, person: str) -> frozenset[Role]:
        return self.people.get(person, frozenset())

    def who_may(self, action: str) -> tuple[str, ...]:
        """Names of those who may do it, for hints and for "needs 1 of alice, bob"."""
        return tuple(sorted(person for person, roles in self.people.items() if may(roles, action)))


def may(roles: Iterable[str], action: str) -> bool:
    """Return whether one of `roles` may do `action`. An unknown action or role is a no."""
    return not ACTIONS.get(action, frozenset()).isdisjoint(roles)


def load_roles(text: bytes, source: str) -> Roles:
    """Read `roles.yaml`.

    Raises:
        UsageError: not strict YAML, an unknown key, role or name; with file and line.
    """
    parsed = strict_yaml.validate(_RolesFile, strict_yaml.load(text, source))
    people = {person: frozenset(roles) for person, roles in parsed.people.items()}
    return Roles(parsed.site, people, sha256_hex(text))


def render_roles(site: str, people: Mapping[str, Iterable[Role]]) -> str:
    """The commented text of a `roles.yaml`; `load_roles` reads it back."""
    lines = [
        "# Who may do what at this site. A certificate says who somebody is; this file says what they may do.",
        f"# Roles: {', '.join(ROLES)}. Somebody not listed may do nothing that changes anything.",
        f"site: {site}",
        "people:" if people else "people: {}",
    ]
    lines += [
        f"  {person}: [{', '.join(role for role in ROLES if role in set(roles))}]"
        for person, roles in sorted(people.items())
    ]
    return "\n".join(lines) + "\n"


class _RolesFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    site: Name
    people: dict[Name, Annotated[list[Role], Field(min_length=1)]]
