"""`silo approvals` on a terminal of 80x24 and without one, against a real desk."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.cli import approvals as cli_approvals
from fedsilo.protocol.errors import NotFoundError
from tests.console.states import DIGEST, POLICY_DIGEST, SHOWN, release, rule, silo
from tests.console.test_real_desk import Site, site

__all__ = ["site"]  # a fixture is found by its name


@pytest.fixture
def answering(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The site's desk answers questions about its releases, and its configuration names the socket."""
    policy = release()["policy"] | {"counts": {"ok": 23, "look": 0, "hold": 1, "deny": 0}}
    known = {"r1/hospital_a/0": release(policy=policy), "r0/hospital_a/0": release(policy=policy, state="approved")}

    def approval(arguments: Any) -> Any:
        if arguments["release"] not in known:
            raise NotFoundError(f"there is no release {arguments['release']}")
        return known[arguments["release"]] | {"id": arguments["release"]}

    site.desk.register_query("approval", approval)
    site.desk.set_state(silo(release()), policy_digest=POLICY_DIGEST)
    config = SimpleNamespace(
        silo="hospital_a", federation="cardio-net", control=SimpleNamespace(socket=site.socket),
        identity=SimpleNamespace(certificate=site.folder / "hospital_a.crt"),
    )  # fmt: skip
    monkeypatch.setattr(cli_approvals, "load_site", lambda path: config)
    return site


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ask(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli_approvals.app, [*arguments, "--operator", "alice"])
    return result.exit_code, result.output


def test_a_wrong_reason_is_told_before_anything_else(answering: Site) -> None:
    for name in ("r1/hospital_a/0", "r9/hospital_a/9"):
        code, text = ask("reject", name, "--reason", "WRONG")
        assert code == 2 and "reason code 'WRONG' is not known" in text and "CONTENT, TIMING" in text
    code, text = ask("reject", "r1/hospital_a/0", "--reason", "TIMING")
    assert code == 2 and "reason code" not in text and "--expect-digest" in text


def test_an_approval_that_is_not_the_last_one_needed_ends_with_9(answering: Site) -> None:
    counted = {"release": "r1/hospital_a/0", "state": "held", "given": ["alice"], "needed": 2, "audit_size": 8}
    answers = [counted, counted | {"state": "sent", "given": ["alice", "bob"]}]
    del answering.desk._commands["approvals.approve"]  # the one that the fixture's desk has
    answering.desk.register_command("approvals.approve", "release.approve", lambda command: answers.pop(0))
    proof = ["--expect-digest", DIGEST, "--expect-policy", POLICY_DIGEST, "--expect-shown", SHOWN, "--json"]
    code, text = ask("approve", "r1/hospital_a/0", *proof)
    told = json.loads(text)
    assert (code, told["ok"], told["error"]["code"], told["data"]) == (9, False, "HELD", counted)
    code, text = ask("approve", "r1/hospital_a/0", *proof)
    assert code == 0 and json.loads(text)["data"]["state"] == "sent"


@pytest.mark.parametrize("verb", ["approve", "reject"])
def test_an_unknown_or_settled_release_is_told_before_missing_digests(answering: Site, verb: str) -> None:
    reason = ["--reason", "TIMING"] if verb == "reject" else []
    assert ((found := ask(verb, "r9/hospital_a/9", *reason))[0], "there is no release" in found[1]) == (8, True)
    code, text = ask(verb, "r0/hospital_a/0", *reason)
    assert code == 6 and "approved, no longer held" in text
    code, text = ask(verb, "r1/hospital_a/0", *reason)
    asked = {name for name in ("digest", "policy", "shown") if f"--expect-{name}" in text}
    assert code == 2 and asked == {"digest", "policy", *(["shown"] if verb == "approve" else [])}
    assert answering.approved == []


def test_T36_off_a_terminal_a_yes_that_does_not_say_what_was_shown_is_not_signed(answering: Site) -> None:
    proof = ["--expect-digest", DIGEST, "--expect-policy", POLICY_DIGEST]
    assert ask("approve", "r1/hospital_a/0", *proof)[0] == 2 and answering.approved == []
    assert ask("approve", "r1/hospital_a/0", *proof, "--expect-shown", SHOWN)[0] == 0
    assert [command.arguments["shown"] for command in answering.approved] == [SHOWN]


@pytest.mark.parametrize(("typed", "approved"), [(DIGEST[-4:], 1), (DIGEST[:4], 0), ("", 0)])
def test_at_80x24_all_that_is_asked_for_stands_above_the_prompt(
    answering: Site, monkeypatch: pytest.MonkeyPatch, typed: str, approved: int
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
    screen, asked = Terminal(), []
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", screen)

    def prompt(text: str) -> str:
        asked.append(screen.getvalue())
        return typed

    monkeypatch.setattr(cli_approvals.typer, "prompt", prompt)
    config = cli_approvals.load_site(Path("silo.yaml"))
    if approved:
        shown = cli_approvals.digests_shown(config, "r1/hospital_a/0", "", "")
        assert (shown["digest"], shown["policy_digest"], shown["revision"]) == (DIGEST, POLICY_DIGEST, 1)
    else:
        with pytest.raises(cli_approvals.UsageError, match="not the last 4 characters of what stands above"):
            cli_approvals.digests_shown(config, "r1/hospital_a/0", "", "")
    (text,) = asked
    lines = text.splitlines()
    assert lines[-1] == f"sha256:{DIGEST}" and max(map(len, lines)) < 80
    # the digest is far inside the 24 rows, and every fact is there
    whole = " ".join(text.split())
    for fact in (
        "hold approvals: 0 (at least 1)", "L2 of base and delta 7.9 of 12", "message bytes,",
        "18 of your 78 private records", "coordinator hub of cardio-net at coordinator.example:7443",
        "rank and scale", "DP off", "cannot be called back", "first release", POLICY_DIGEST, "epsilon covers it: NO",
    ):  # fmt: skip
        assert fact in whole, fact
    assert len(lines) <= 36 and len(cli_approvals.release_text(release()).splitlines()) > len(lines)


def test_a_limit_that_binds_from_below_is_told_as_the_least() -> None:
    shown = release()
    shown["policy"]["rules"] += [rule("records of the round", 8, 2), rule("message bytes", 7, 8)]
    brief, whole = (" ".join(cli_approvals.release_text(shown, columns=each).split()) for each in (500, None))
    assert "records of the round 8, at least 2" in brief and "message bytes 7 of 8" in brief
    assert "records of the round: 8 (at least 2)" in whole and "message bytes: 7 (limit 8)" in whole


@pytest.mark.parametrize("later", ["lora.factors of rounds 2 to 4 LEAVES UNASKED (site.yaml:7)", ""])
def test_T36_show_says_what_leaves_unasked_after_a_yes_while_it_can_be_answered(later: str) -> None:
    consequences = {"approve": "sent once", "reject": "no", "later": later}
    lines = cli_approvals.release_text(release(consequences=consequences)).splitlines()
    assert (f"later: {later}" in lines) is bool(later)
    over = cli_approvals.release_text(release(consequences=consequences, state="approved"))
    assert "UNASKED" not in over
