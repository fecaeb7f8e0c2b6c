"""What is signed was shown: named by its digest, or shown on a terminal and typed back."""

from __future__ import annotations

import io
import sys

import pytest
import typer

from fedsilo.cli.daemons import confirm
from fedsilo.cli.output import Call, as_running
from fedsilo.protocol.errors import ConflictError, FedSiloError, UsageError

DIGEST = "ab" * 31 + "c0de"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard input and output are terminals, and this is what is written."""
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", made := Terminal())
    return made


@pytest.mark.parametrize(
    ("named", "json_output", "terminal", "refusal"),
    [
        (DIGEST, True, False, None),
        (f"sha256:{DIGEST}", True, False, None),
        ("ff" * 32, False, True, ConflictError),
        (DIGEST[:-1], False, True, ConflictError),
        ("", True, False, UsageError),
        ("", False, False, UsageError),
    ],
)
def test_T36_a_digest_is_enough_another_is_a_stale_view_and_without_one_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    json_output: bool,
    terminal: bool,
    refusal: type[FedSiloError] | None,
) -> None:
    screen = on_terminal(monkeypatch) if terminal else io.StringIO()
    if refusal is None:
        with as_running(Call(json_output=json_output)):
            confirm(DIGEST, named, "words", hint="there")
        return
    with pytest.raises(refusal) as refused, as_running(Call(json_output=json_output)):
        confirm(DIGEST, named, "words", hint="there")
    assert refused.value.code == {ConflictError: "STALE_VIEW", UsageError: "INVALID_INPUT"}[refusal]
    assert not screen.getvalue() and (refusal is ConflictError or refused.value.hint == "there")


@pytest.mark.parametrize(("typed", "taken"), [("c0de", True), (" C0DE ", True), ("", False), ("c0d", False)])
def test_T36_on_a_terminal_it_is_shown_and_typed_back(monkeypatch: pytest.MonkeyPatch, typed: str, taken: bool) -> None:
    screen = on_terminal(monkeypatch)
    monkeypatch.setattr(typer, "prompt", lambda text: typed)
    if taken:
        confirm(DIGEST, "", "words\x1b[2J", hint="there")
    else:
        with pytest.raises(UsageError):
            confirm(DIGEST, "", "words\x1b[2J", hint="there")
    assert "words" in screen.getvalue() and DIGEST in screen.getvalue() and "\x1b" not in screen.getvalue()
