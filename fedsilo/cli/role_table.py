"""Who may give which command, as a table for people: made from the commands' facts and the table of actions, so that
neither can be changed without the other.

Does not show what needs no signature: a command that only reads is open to whoever may open the daemon's socket, or the
file that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from certs.roles import ACTIONS, ROLES
from fedsilo.cli.contract import COMMANDS, Facts

OPTION = {"fedsilo audit show": "--payload", "fedsilo audit replay": "--rescreen"}  # only with it they are signed


def role_table() -> str:
    """Markdown: a line for each command that a person signs, a column for each role that may sign one."""
    signed = {name: facts for name, facts in COMMANDS.items() if facts.action}
    roles = [role for role in ROLES if any(role in ACTIONS[facts.action] for facts in signed.values())]
    head = f"| command | action | {' | '.join(roles)} |\n|---|---|{'---|' * len(roles)}\n"
    return head + "".join(_line(name, facts, roles) for name, facts in signed.items())


def _line(name: str, facts: Facts, roles: Sequence[str]) -> str:
    command = f"{name} {OPTION[name]}" if name in OPTION else name
    cells = ("yes" if role in ACTIONS[facts.action] else "" for role in roles)
    return f"| `{command}` | `{facts.action}` | {' | '.join(cells)} |\n"
