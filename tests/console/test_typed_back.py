"""What is signed was shown: named by its digest, or shown on a terminal and typed back."""

from __future__ import annotations

import io
import sys

import pytest
import typer

from fedsilo.cli.daemons import confirm
from fedsilo.protocol.errors import ConflictError, UsageError

DIGEST = "ab" * 31 + "c0de"


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    made = Screen()
    monkeypatch.setattr(sys, "stdin", Screen())
    monkeypatch.setattr(sys, "stdout", made)
    return made


@pytest.mark.parametrize("named", [DIGEST, f"sha256:{DIGEST}"])
def test_T36_its_digest_is_enough_without_a_terminal(named: str) -> None:
    confirm(DIGEST, named, "words", hint="there", json_output=True)


@pytest.mark.parametrize("named", ["ff" * 32, DIGEST[:-1]])
def test_T36_another_digest_is_a_stale_view_also_on_a_terminal(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    screen = terminal(monkeypatch)
    with pytest.raises(ConflictError) as refused:
        confirm(DIGEST, named, "words", hint="there")
    assert refused.value.code == "STALE_VIEW" and not screen.getvalue()


@pytest.mark.parametrize("json_output", [True, False])
def test_T36_without_terminal_or_with_json_nobody_is_asked(json_output: bool) -> None:
    with pytest.raises(UsageError, match="--expect-digest") as refused:
        confirm(DIGEST, "", "words", hint="there", json_output=json_output)
    assert refused.value.hint == "there"


@pytest.mark.parametrize(("typed", "taken"), [("c0de", True), (" C0DE ", True), ("", False), ("c0d", False)])
def test_T36_on_a_terminal_it_is_shown_and_typed_back(monkeypatch: pytest.MonkeyPatch, typed: str, taken: bool) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setattr(typer, "prompt", lambda text: typed)
    if taken:
        confirm(DIGEST, "", "words\x1b[2J", hint="there")
    else:
        with pytest.raises(UsageError):
            confirm(DIGEST, "", "words\x1b[2J", hint="there")
    assert "words" in screen.getvalue() and DIGEST in screen.getvalue() and "\x1b" not in screen.getvalue()
