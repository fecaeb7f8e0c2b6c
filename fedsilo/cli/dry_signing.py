"""What can be said here of a command that a dry run did not sign: who, for whom, and whether the roles allow it.

Does not stop a refusal by the daemon: it judges by its own copy of roles and CA, at its own time, and it may have
changed what the command is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fedsilo.control.dry_run import Signing
from fedsilo.protocol.errors import NotAllowedError

# Command -> action of certs/roles.py, where they are not called the same. The daemons register them
# (silo/guard/commands.py); a test compares.
ACTIONS_OF_COMMANDS: Mapping[str, str] = {
    "pause": "silo.pause", "resume": "silo.resume", "stop": "silo.stop", "leave": "silo.leave",
    "policy.reload": "change.propose", "policy.propose": "change.propose", "policy.approve": "change.approve",
    "audit.rescreen": "payload.read", "clock.accept": "halt.release",
    "approvals.approve": "release.approve", "approvals.reject": "release.reject",
    "approvals.release": "halt.release", "approvals.defer": "release.defer", "approvals.payload": "payload.read",
}  # fmt: skip
SITE_CA, ROLES = "site_ca.crt", "roles.yaml"


def told_of(signing: Signing) -> dict[str, Any]:
    """The command, and the person's roles as the files beside the certificate have them (none there: none told).

    Raises:
        NotAllowedError: the certificate is not of that site or is over, or no role of the person allows the command.
        UsageError: roles.yaml is wrong.
    """
    from certs.identity import operator_identity
    from certs.roles import may
    from fedsilo.files.identity_files import load_site, read_public

    folder = signing.certificate.parent
    told: dict[str, Any] = {
        "site": signing.site, "person": signing.certificate.stem, "roles": [], "name": signing.name,
        "arguments": {key: value for key, value in signing.arguments.items() if key != "text"},
    }  # fmt: skip
    if not (folder / SITE_CA).exists() or not (folder / ROLES).exists():
        return told
    ca, roles = load_site(folder / SITE_CA, folder / ROLES, site=signing.site)
    person = operator_identity(read_public(signing.certificate), ca, datetime.now(UTC)).person
    held = roles.of(person)
    action = ACTIONS_OF_COMMANDS.get(signing.name, signing.name)
    if not may(held, action):
        raise NotAllowedError(
            f"{person} may not {action} at {signing.site}: roles {', '.join(sorted(held)) or 'none'}",
            hint=f"may: {', '.join(roles.who_may(action)) or 'nobody'}",
        )
    return told | {"person": person, "roles": sorted(held)}
