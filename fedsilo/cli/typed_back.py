"""What a person is shown on a terminal before it is signed, and types back; scripts name its digest instead."""

from __future__ import annotations

import sys
import time

import typer

from fedsilo.protocol.errors import ConflictError, UsageError
from fedsilo.protocol.text import harmless

CHARACTERS = 4


def require_terminal(options: str, hint: str) -> None:
    """Raises UsageError: nobody can be asked, and `options` were not given."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(f"without a terminal this needs {options}", hint=hint)


def type_back(digest: str) -> None:
    """Ask for the end of what stands on the screen. Raises UsageError: something else was typed."""
    if typer.prompt(f"type its last {CHARACTERS} characters").strip().lower() != digest[-CHARACTERS:]:
        raise UsageError(
            f"these are not the last {CHARACTERS} characters of what stands above",
            hint="nothing was changed; ask again",
        )


def confirm(digest: str, expected: str, shown: str, *, hint: str, json_output: bool = False) -> None:
    """Nobody signs what was not shown.

    Args:
        digest: of what is there now.
        expected: what the person names; empty: it is shown and typed back.
        shown: text.
        hint: where the digest is found.
        json_output: nothing but JSON may be printed, so nobody can be asked.

    Raises:
        ConflictError: another digest was named (STALE_VIEW).
        UsageError: none was named and there is no terminal, or something else was typed.
    """
    if expected:
        if expected.removeprefix("sha256:") != digest:
            raise ConflictError(f"what is there now has the digest {digest}", hint="read it again", code="STALE_VIEW")
        return
    if json_output:
        raise UsageError("with --json this needs --expect-digest", hint=hint)
    require_terminal("--expect-digest", hint)
    typer.echo(harmless(f"{shown}\nsha256:{digest}", lines=True))
    type_back(digest)


def clock_now() -> str:
    """A line on this machine's clock, as it is accepted."""
    return f"this machine's clock shows {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}: that is what is accepted"
