"""`silo approvals` against a control server: with answers given by hand, and with a real guard's releases behind it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import release_site
from console.orders import approval
from fedsilo.cli import approvals as cli_approvals
from fedsilo.cli.approvals import UNREAD
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import NotFoundError
from fedsilo.views.lines import to_text
from fedsilo.views.releases import comparison_lines
from fedsilo.views.rule_words import reason_text
from fedsilo.views.state import HIDDEN, release_of
from silo.guard.answers.queries import ledger_page, release_page
from silo.guard.commands import HeldPayloads
from silo.guard.ledger import PolicyInForce
from tests.console.commands import ALICE, Site, failed, printed, run
from tests.console.states import DIGEST, POLICY_DIGEST, SHOWN, release, rule, silo
from tests.console.test_typed_back import on_terminal
from tests.simulated.test_release_view import earlier, say_no
from tests.world import command

APP = cli_approvals.app
HELD, OVER = "r1/hospital_a/0", "r0/hospital_a/0"
PROOF = ("--expect-digest", DIGEST, "--expect-policy", POLICY_DIGEST)


@pytest.fixture
def answering(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site of which one release is held and another was approved."""
    policy = release()["policy"] | {"counts": {"ok": 23, "look": 0, "hold": 1, "deny": 0}}

    def approval(arguments: Any) -> Any:
        name = arguments["release"]
        if name not in (HELD, OVER):
            raise NotFoundError(f"there is no release {name}")
        return release(policy=policy, id=name, state="held" if name == HELD else "approved")

    site.answer(approval=approval)
    site.desk.set_state(silo(release()), policy_digest=POLICY_DIGEST)
    site.configure(monkeypatch, cli_approvals)
    return site


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("reject", HELD, "--reason", "WRONG"), 2, {"CONTENT, TIMING"}),
        (("reject", "r9/hospital_a/9", "--reason", "WRONG"), 2, {"CONTENT, TIMING"}),  # before anything else
        (("reject", HELD, "--reason", "TIMING"), 2, {"--expect-digest", "--expect-policy"}),
        (("approve", HELD), 2, {"--expect-digest", "--expect-policy", "--expect-shown"}),
        (("approve", HELD, *PROOF), 2, {"--expect-shown"}),  # T36: a yes that does not say what was shown
        (("approve", "r9/hospital_a/9"), 8, {"there is no release"}),
        (("reject", "r9/hospital_a/9", "--reason", "TIMING"), 8, {"there is no release"}),
        (("approve", OVER), 6, {"approved"}),
        (("reject", OVER, "--reason", "TIMING"), 6, {"approved"}),
    ],
)
def test_T36_what_cannot_be_signed_names_what_is_wrong_with_it(
    answering: Site, words: tuple[str, ...], status: int, says: set[str]
) -> None:
    told, text = printed(APP, *words, *ALICE)
    assert told == status and all(each in text for each in says) and answering.approved == []
    assert ("--expect-shown" in text) is ("--expect-shown" in says)


def test_T36_an_approval_says_what_was_shown_and_one_that_is_not_the_last_ends_with_9(answering: Site) -> None:
    proof = (HELD, *PROOF, "--expect-shown", SHOWN, *ALICE)
    assert printed(APP, "approve", *proof)[0] == 0
    assert [command.arguments["shown"] for command in answering.approved] == [SHOWN]
    counted = {"release": HELD, "state": "held", "given": ["alice"], "needed": 2, "audit_size": 8}
    answers = [counted, counted | {"state": "sent", "given": ["alice", "bob"]}]
    answering.approve = lambda command: answers.pop(0)  # type: ignore[method-assign]
    status, told = run(APP, "approve", *proof)
    assert (status, told["ok"], told["error"]["code"], told["data"]) == (9, False, "HELD", counted)
    status, told = run(APP, "approve", *proof)
    assert status == 0 and told["data"]["state"] == "sent"


@pytest.mark.parametrize("state", ["sent", "waits"])
def test_T36_what_waits_in_the_outbox_after_the_last_yes_is_not_called_sent(answering: Site, state: str) -> None:
    answer = {"release": HELD, "state": state, "given": ["alice"], "needed": 1, "audit_size": 8}
    answering.approve = lambda command: answer  # type: ignore[method-assign]
    proof = (HELD, *PROOF, "--expect-shown", SHOWN, *ALICE)
    status, text = printed(APP, "approve", *proof)
    in_console = approval(release_of(release())).told("alice", answer)
    for each in (text, in_console):
        assert status == 0 and ("sent" in each, "outbox" in each) == (state == "sent", state == "waits")
    assert run(APP, "approve", *proof)[1]["data"]["state"] == state


@pytest.mark.parametrize(("typed", "taken"), [(DIGEST[-4:], True), (DIGEST[:4], False), ("", False)])
def test_at_80x24_all_that_is_asked_for_stands_above_the_prompt(
    answering: Site, monkeypatch: pytest.MonkeyPatch, typed: str, taken: bool
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
    screen, asked = on_terminal(monkeypatch), []

    def prompt(text: str) -> str:
        asked.append(screen.getvalue())
        return typed

    monkeypatch.setattr(cli_approvals.typer, "prompt", prompt)
    config = cli_approvals.load_site(Path("silo.yaml"))
    if taken:
        shown = cli_approvals.digests_shown(config, HELD, "", "")
        assert (shown["digest"], shown["policy_digest"], shown["revision"]) == (DIGEST, POLICY_DIGEST, 1)
    else:
        with pytest.raises(cli_approvals.UsageError):
            cli_approvals.digests_shown(config, HELD, "", "")
    (text,) = asked
    lines = text.splitlines()
    assert lines[-1] == f"sha256:{DIGEST}" and max(map(len, lines)) < 80
    whole = " ".join(text.split())  # the digest is far inside the 24 rows, and every fact is there
    for fact in (
        *("people's approvals: 0 given, 1 needed", "L2 of base and delta 7.9 of 12", "message bytes", "rank and scale"),
        *("18 of your 78 private records", "coordinator hub of cardio-net", "coordinator.example:7443", "DP off"),
        *("cannot be called back", "first release", POLICY_DIGEST, "epsilon covers it: NO"),
    ):
        assert fact in whole, fact
    assert len(lines) <= 36 and len(cli_approvals.release_text(release()).splitlines()) > len(lines)


def test_a_limit_that_binds_from_below_is_told_as_the_least() -> None:
    shown = release()
    shown["policy"]["rules"] += [rule("records of the round", 8, 2), rule("message bytes", 7, 8)]
    whole = " ".join(cli_approvals.release_text(shown).split())
    assert "private records behind it: 8, at least 2" in whole and "message bytes: 7 of at most 8" in whole


@pytest.mark.parametrize(
    ("later", "state", "told"),
    [("rounds 2 to 4 LEAVE UNASKED", "held", True), ("rounds 2 to 4 LEAVE UNASKED", "approved", False),
     ("", "held", False)],
)  # fmt: skip
def test_T36_show_says_what_leaves_unasked_after_a_yes_while_it_can_be_answered(
    later: str, state: str, told: bool
) -> None:
    consequences = {"approve": "sent once", "reject": "no", "later": later}
    lines = cli_approvals.release_text(release(consequences=consequences, state=state)).splitlines()
    assert any(line.startswith("later ") for line in lines) is told


AT = {"at": 1_796_119_200.0, "time": "2026-12-01T10:00:00Z"}
GIVEN = {"person": "alice", "verdict": "approve", **AT}
REFUSED = {"person": "bob", "verdict": "reject", "reason": "CONTENT", "note": "odd", **AT}


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"roles": ["approver", "admin"], "people": ["alice", "bob"]},
         ["approvals 0 of 1 given, by approver or admin", "may approve alice, bob"]),
        ({"given": [REFUSED]}, ["approvals 0 of 1 given", f"no bob {reason_text('CONTENT')} {AT['time']} \"odd\""]),
        ({"given": [GIVEN]}, ["approvals 1 of 1 given: alice", f"yes alice {AT['time']}"]),
    ],
)  # fmt: skip
def test_who_answered_and_who_may_still_is_told(changes: dict[str, Any], lines: list[str]) -> None:
    shown = release(approvers={"needed": 1, "roles": ["approver"], "given": []} | changes)
    text = " ".join(cli_approvals.release_text(shown).split())
    assert all(line in text for line in lines), text


# ---- with a guard's own releases ---------------------------------------------------------------------

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture
def guard(tmp_path: Path) -> Iterator[release_site.Site]:
    with closing(release_site.Site(tmp_path / "guarded", "run-1", 3, release_site.policy())) as made:
        earlier(made)
        made.bench.releases.destination["address"] = "198.51.100.23:7443"
        yield made


@pytest.fixture
def ask(site: Site, guard: release_site.Site, monkeypatch: pytest.MonkeyPatch) -> Ask:
    bench = guard.bench
    releases, ledger = bench.releases, bench.ledger

    def approve(command: Any) -> Any:
        approved, settled = releases.approve(command)
        given = [item.person for item in ledger.approvals(approved.id) if item.verdict == "approve"]
        state = settled.outcome if settled else "held"
        return {"release": approved.id, "state": state, "given": given, "needed": approved.persons}

    def defer(command: Any) -> Any:
        later, _ = releases.defer(command)
        until = ledger.deferred(later.id)[command.person]
        return {"release": later.id, "deferred_until": until, "expires_at": later.expires_at}

    site.approve = approve  # type: ignore[method-assign]
    site.desk.register_command("approvals.defer", "release.defer", defer)
    site.answer(
        approval=lambda arguments: bench.view_of(ledger.release(arguments["release"])),
        approvals=lambda arguments: release_page(ledger, arguments),
        approval_comparison=lambda arguments: bench.comparison(ledger.release(arguments["release"])),
        halts={"halts": []},
        ledger=lambda arguments: ledger_page(ledger, arguments),
    )
    HeldPayloads(ledger, bench.audit, lambda: bench.judge.site.public.tasks.rows, record=bench.judge.record).register(
        site.desk, lambda work: work()
    )
    coordinator = SimpleNamespace(address="198.51.100.23:7443")
    site.configure(monkeypatch, cli_approvals, state_dir=guard.folder / "state", coordinator=coordinator)
    return lambda *words, text=False: printed(APP, *words) if text else run(APP, *words)


def test_list_names_what_may_leave_and_still_waits_in_the_outbox(ask: Ask, guard: release_site.Site) -> None:
    bench, held = guard.bench, guard.hold_factors(1.0)
    assert ask("list")[1].get("warnings", []) == []
    settled = bench.approve(held, "bob")
    assert settled is not None and settled.allowed is not None
    (line,) = ask("list")[1]["warnings"]
    assert f"lora.factors of round {held.round} of run {held.run}" in line and utc(bench.clock_now) in line
    bench.gate.transmit(settled.allowed)
    assert ask("list")[1].get("warnings", []) == []


def no(held: Any) -> Any:
    shown = {"release": held.id, "digest": held.digest, "policy_digest": held.policy_digest}
    return command("approvals.reject", shown | {"reason_code": "CONTENT"}, person="carol")


def test_a_release_that_is_over_says_who_answered_what_and_when(ask: Ask, guard: release_site.Site) -> None:
    bench, held = guard.bench, guard.hold_factors(1.0)
    now = utc(bench.clock_now)
    status, text = ask("show", held.id, text=True)
    assert status == 0 and "approvals 0 of 1 given" in text and ", expires 20" in text and "\nreject  " in text
    bench.releases.reject(no(held))
    status, text = ask("show", held.id, text=True)
    assert status == 0 and "rejected, revision" in text and f"carol {reason_text('CONTENT')}  {now}" in text
    assert "approvals 0 of 1 given" in text and ", its time was until 20" in text and "\nreject  " not in text
    sent = next(one for one in bench.ledger.releases() if one.state == "approved")
    text = ask("show", sent.id, text=True)[1]
    assert "approvals 1 of 1 given" in text and "yes bob  20" in text
    late = guard.hold_factors(1.0)
    bench.clock_now = late.expires_at + 1.0
    bench.releases.expire()
    assert f"its time was until {utc(late.expires_at)}" in ask("show", late.id, text=True)[1]


def in_force(guard: release_site.Site, content: dict[str, Any] | None = None) -> None:
    """Put the guard's policy in force, or other content under its digest."""
    policy = guard.bench.judge.policy
    whole = content or policy.file.model_dump(mode="json", by_alias=True)
    guard.bench.ledger.put_in_force(PolicyInForce(policy.digest, whole, policy.digest))


def test_without_a_daemon_the_state_folder_answers_and_is_not_changed(
    ask: Ask, guard: release_site.Site, site: Site
) -> None:
    held, state = guard.hold_factors(2.0), guard.folder / "state"
    in_force(guard)
    told, pages, daemons = (
        ask(*words)[1]["data"] for words in (("diff", held.id), ("history", "--all"), ("show", held.id))
    )
    site.socket.unlink()  # as of a daemon that is not running
    (state / "payloads" / ("0" * 64)).write_bytes(b"a daemon that starts takes this away: no row refers to it")

    def files() -> dict[str, bytes]:
        # SQLite's shared memory, which a reader of a database in WAL mode makes beside it, holds nothing
        kept = (path for path in sorted(state.rglob("*")) if path.is_file())
        return {str(path): path.read_bytes() for path in kept if not path.name.endswith(("-shm", "-wal"))}

    before = files()
    assert ask("diff", held.id)[0] == 3
    status, answer = ask("diff", held.id, "--offline")
    found = answer["data"]
    assert status == 0 and answer["warnings"][0].startswith("OFFLINE, as of ")
    (certificate,) = [row for row in told["rows"] if row["what"] == "certificate"]  # which a folder does not hold
    assert found["rows"] == [row for row in told["rows"] if row != certificate] and len(found["rows"]) > 4
    assert found["against"] == told["against"] and found["note"]
    assert ask("history", "--all", "--offline")[1]["data"] == pages
    assert ask("diff", "r9/none/0", "--offline")[0] == 8
    shown = ask("show", held.id, "--offline")[1]["data"]
    assert files() == before and len(before) > 3
    assert shown.pop("leaves")["kinds"] == daemons.pop("leaves")["kinds"]
    # no payload is read, and the policy's lines are in its file
    differs = set(shown["difference"].split("; ")) - set(daemons["difference"].split("; "))
    assert differs == {"cosine unknown: not archived"}
    policies = shown.pop("policy"), daemons.pop("policy")
    assert policies[0]["digest"] == policies[1]["digest"] and policies[0]["counts"] == policies[1]["counts"]
    for data in (shown, daemons):
        for name in ("difference", "shown", "shown_facts"):
            data.pop(name, None)
    assert shown == daemons


def test_a_folder_without_a_ledger_or_with_a_damaged_one_is_said(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    elsewhere = SimpleNamespace(silo="hospital_a", state_dir=folder, coordinator=SimpleNamespace(address=""))
    monkeypatch.setattr(cli_approvals, "load_site", lambda path: elsewhere)
    assert failed(APP, "history", "--offline") == (8, "NOT_FOUND")
    folder.mkdir()
    (folder / "ledger.sqlite3").write_bytes(b"no database at all" * 1000)
    status, answer = ask("history", "--offline")
    assert status == 1 and "ledger.sqlite3" in answer["error"]["message"]


def test_a_folder_whose_policy_is_of_another_version_shows_what_it_can(ask: Ask, guard: release_site.Site) -> None:
    held, later = guard.hold_factors(2.0), {"a_word_of_a_later_version": 1}
    in_force(guard)
    assert "missing" not in ask("show", held.id, "--offline")[1]["data"]
    in_force(guard, later)
    status, text = ask("show", held.id, "--offline", text=True)
    assert status == 0 and f"not told here: {UNREAD}" in text and held.digest in text
    assert f"\nleaves   {HIDDEN}" in text and f"\napprove  {HIDDEN}" in text and "approvals 0 of 1 given" in text
    shown = ask("show", held.id, "--offline")[1]["data"]
    assert (shown["state"], shown["missing"], shown["approvers"]["given"]) == ("held", UNREAD, [])
    guard.bench.releases.reject(no(held))
    status, text = ask("show", held.id, "--offline", text=True)
    assert status == 0 and f"carol {reason_text('CONTENT')}  20" in text and "its time was until" in text


def test_T36_an_approval_names_each_finding(ask: Ask, guard: release_site.Site) -> None:
    held = guard.hold_factors(3.0)
    shown = ask("show", held.id)[1]["data"]
    named = [one["id"] for one in shown["noticed"]]
    status, text = ask("show", held.id, text=True)
    assert status == 0 and "--ack-finding ID" in text and len(named) == 2 and all(name in text for name in named)
    assert "  before coordinator.example:7443\n  now    198.51.100.23:7443" in text
    proof = ("--expect-digest", held.digest, "--expect-policy", shown["policy"]["digest"])
    for given in ([], named[:1], [named[0], "X-1"], named):
        words = (word for one in given for word in ("--ack-finding", one))
        status, told = ask("approve", held.id, *ALICE, *proof, "--expect-shown", shown["shown"], *words)
        if given != named:
            assert (status, told["error"]["code"]) == (6, "FINDINGS_UNREAD")
            assert "--ack-finding" in told["error"]["hint"]
    assert status == 0 and told["data"]["state"] == "allowed"


def test_T36_on_a_terminal_each_finding_is_shown_alone_and_typed_back(
    ask: Ask, guard: release_site.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = guard.hold_factors(3.0)
    first, second = named = guard.bench.opened(held.id)["acknowledged"]
    said: list[str] = []
    monkeypatch.setattr(cli_approvals, "require_terminal", lambda options, hint: None)
    monkeypatch.setattr(cli_approvals.typer, "echo", said.append)

    def shown(*typed: str, **acknowledged: Any) -> dict[str, Any]:
        words = list(typed)
        monkeypatch.setattr(cli_approvals.typer, "prompt", lambda text: words.pop(0))
        return dict(cli_approvals.digests_shown(cli_approvals.load_site(Path()), held.id, "", "", **acknowledged))

    whole = held.digest[-4:]
    assert shown(first[-4:], second[-4:], whole, acknowledged=[])["acknowledged"] == named
    assert said[1].endswith(first) and said[2].endswith(second)
    assert shown(second[-4:], whole, acknowledged=[first])["acknowledged"] == named
    with pytest.raises(cli_approvals.UsageError):
        shown("none", acknowledged=[])
    assert "acknowledged" not in shown(whole)  # a no needs none


def test_what_would_leave_is_read_by_who_may_and_recorded(ask: Ask, guard: release_site.Site) -> None:
    held = guard.hold_responses(3, 5, planted="\x1b]0;owned\x07 12")
    assert ask("payload", held.id, "--operator", "bob")[0] == 4  # a viewer
    assert guard.bench.events("payload.read") == []
    status, text = ask("payload", held.id, *ALICE, text=True)
    assert status == 0 and "\u241b]0;owned" in text and "\x1b" not in text and "| prompt " in text
    assert [record["detail"]["person"] for record in guard.bench.events("payload.read")] == ["alice"]
    status, text = ask("payload", guard.hold_factors(1.0).id, *ALICE, text=True)
    assert status == 0 and "below 0" in text and "float32" in text
    assert ask("payload", "r9/none/0", *ALICE)[0] == 8


def test_diff_says_of_one_that_was_rejected_that_it_did_not_leave(tmp_path: Path) -> None:
    with closing(release_site.Site(tmp_path / "site", "run-1", 3, release_site.policy())) as site:
        say_no(site, site.hold_factors(1.0))
        site.open_round(2)
        text = to_text(comparison_lines(site.bench.comparison(site.hold_factors(1.0)), 200))
    assert "rejected by bob: it did not leave" in text and ", left " not in text and "differs: " in text


def test_diff_and_history_and_list_walk_every_page(
    ask: Ask, guard: release_site.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = guard.hold_factors(2.0)
    status, text = ask("diff", held.id, text=True)
    assert status == 0 and "approved by bob" in text and "differs: " in text and "largest change first" in text
    assert ask("diff", "r9/none/0")[0] == 8
    monkeypatch.setattr(cli_approvals, "PAGE_ROWS", 1)
    whole = ask("list", "--all")[1]["data"]["releases"]
    kept = [one.id for one in reversed(guard.bench.ledger.releases())]
    assert [row["id"] for row in whole] == kept and len(whole) == 3
    assert [row["id"] for row in ask("list")[1]["data"]["releases"]] == [held.id]
    page = ask("history", "--limit", "2")[1]["data"]
    rest = ask("history", "--limit", "2", "--before", str(page["next"]))[1]["data"]
    assert page["releases"] + rest["releases"] == whole == ask("history", "--all")[1]["data"]["releases"]
    status, text = ask("history", "--kind", "lora.factors", "--limit", "1", text=True)
    assert status == 0 and "older ones: --before" in text and "public.responses" not in text
    assert "bob yes" in ask("history", text=True)[1]


def test_later_is_signed_by_who_may_answer(ask: Ask, guard: release_site.Site, monkeypatch: pytest.MonkeyPatch) -> None:
    held, bench, real = guard.hold_factors(1.0), guard.bench, cli_approvals.time
    clock = SimpleNamespace(time=lambda: bench.clock_now, gmtime=real.gmtime, strftime=real.strftime)
    monkeypatch.setattr(cli_approvals, "time", clock)
    policy, digest = ("--expect-policy", held.policy_digest), ("--expect-digest", held.digest)
    minutes = ("--minutes", "5")
    for person, words, refusal in (
        ("bob", (*minutes, *digest, *policy), (4, "NOT_ALLOWED")),  # a viewer
        ("alice", ("--minutes", "600", *digest, *policy), (6, "TOO_LATE")),
        ("alice", (*minutes, "--expect-digest", "0" * 64, *policy), (6, "STALE_VIEW")),
        ("alice", minutes, (2, "INVALID_INPUT")),  # of what, nobody was shown
        ("alice", (*digest, *policy), (2, "INVALID_INPUT")),
        ("alice", (*minutes, "--until", "2099-01-01T00:00:00Z", *digest, *policy), (2, "INVALID_INPUT")),
        ("alice", ("--until", "soon", *digest, *policy), (2, "INVALID_INPUT")),
        ("alice", ("--until", "2099-01-01T00:00:00", *digest, *policy), (2, "INVALID_INPUT")),
        ("alice", (*minutes, "--request-id", "r1", *digest, *policy), (2, "INVALID_INPUT")),
        ("nobody", (*minutes, *digest, *policy), (8, "NOT_FOUND")),
    ):
        assert failed(APP, "defer", held.id, "--operator", person, *words) == refusal, words
    far = ("--minutes", "1e300", "--request-id", "r1")
    assert printed(APP, "defer", held.id, *ALICE, *far, *digest, *policy)[0] == 2
    assert bench.events("release.defer") == []
    until = f"{datetime.fromtimestamp(int(bench.clock_now) + 300, UTC):%Y-%m-%dT%H:%M:%SZ}"
    again = ("defer", held.id, *ALICE, "--until", until, "--request-id", "request-0001", *digest, *policy)
    status, told = ask(*again)
    assert status == 0 and told["data"]["deferred_until"] == int(bench.clock_now) + 300
    assert ask(*again) == (status, told) and len(bench.events("release.defer")) == 1
    status, told = ask("defer", held.id, *ALICE, *minutes, *digest, *policy)
    assert status == 0 and told["data"]["deferred_until"] == pytest.approx(bench.clock_now + 300)
    assert "put off  by alice until" in ask("show", held.id, text=True)[1]
