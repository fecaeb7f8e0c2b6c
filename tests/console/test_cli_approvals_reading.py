"""`silo approvals` with a real guard's releases behind a real desk: findings named, payload, later, diff, history."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import release_site
from fedsilo.cli import approvals as cli_approvals
from fedsilo.cli import approvals as cli_approvals_reading
from fedsilo.cli.approvals import UNREAD
from fedsilo.protocol.clocks import utc
from fedsilo.views.lines import to_text
from fedsilo.views.releases import comparison_lines
from silo.guard.answers.queries import release_page
from silo.guard.commands import HeldPayloads
from silo.guard.ledger import PolicyInForce
from tests.console.test_real_desk import Site, site
from tests.simulated.test_release_view import earlier, say_no
from tests.world import command

__all__ = ["site"]  # a fixture is found by its name

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture
def silo(tmp_path: Path) -> Iterator[release_site.Site]:
    with closing(release_site.Site(tmp_path / "guarded", "run-1", 3, release_site.policy())) as made:
        earlier(made)
        made.bench.releases.destination["address"] = "198.51.100.23:7443"
        yield made


def test_the_names_behind_the_roles_are_told_where_they_are_known() -> None:
    approvers = {"needed": 2, "roles": ["approver", "site-admin"], "people": ["alice", "bob"], "given": []}
    (line,) = cli_approvals_reading.answered_lines(approvers)
    assert line == "approvals 0 of 2 given, by approver or site-admin: alice, bob"
    (line,) = cli_approvals_reading.answered_lines(approvers | {"people": [f"p{number}" for number in range(10)]})
    assert line.endswith(": p0, p1, p2, p3, p4, p5, p6, p7, and 2 more")


def test_a_rejection_is_no_approval_and_says_whose_it_is() -> None:
    approvers = {"needed": 1, "roles": ["approver"], "given": [
        {"person": "bob", "verdict": "reject", "at": 1_796_119_200.0, "reason": "CONTENT"},
    ]}  # fmt: skip
    assert cli_approvals_reading.answered_lines(approvers) == [
        "approvals 0 of 1 given, by approver", "  REJECTED by bob at 2026-12-01T10:00:00Z reason CONTENT",
    ]  # fmt: skip
    approvers["given"] = [{"person": "alice", "verdict": "approve", "at": 1_796_119_200.0}]
    assert cli_approvals_reading.answered_lines(approvers) == [
        "approvals 1 of 1 given, by approver", "  approved by alice at 2026-12-01T10:00:00Z",
    ]  # fmt: skip


@pytest.fixture
def ask(site: Site, silo: release_site.Site, monkeypatch: pytest.MonkeyPatch) -> Ask:
    bench, now = silo.bench, lambda work: work()
    releases, ledger = bench.releases, bench.ledger

    def approve(command: Any) -> Any:
        release, settled = releases.approve(command)
        given = [item.person for item in ledger.approvals(release.id) if item.verdict == "approve"]
        state = settled.outcome if settled else "held"
        return {"release": release.id, "state": state, "given": given, "needed": release.persons}

    def defer(command: Any) -> Any:
        release, _ = releases.defer(command)
        return {
            "release": release.id, "deferred_until": ledger.deferred(release.id)[command.person],
            "expires_at": release.expires_at,
        }  # fmt: skip

    desk = site.desk
    desk.register_command("approvals.defer", "release.defer", defer)
    del desk._commands["approvals.approve"]  # the one that the fixture's desk has
    desk.register_command("approvals.approve", "release.approve", approve)
    desk.register_query("approval", lambda arguments: releases.view(ledger.release(arguments["release"])))
    desk.register_query("approvals", lambda arguments: release_page(ledger, arguments))
    desk.register_query(
        "approval.comparison", lambda arguments: releases.comparison(ledger.release(arguments["release"]))
    )
    desk.register_query("halts", lambda arguments: {"halts": []})
    HeldPayloads(ledger, bench.audit, lambda: bench.judge.site.public.tasks.rows).register(desk, now)
    config = SimpleNamespace(
        silo="hospital_a", federation="cardio-net", control=SimpleNamespace(socket=site.socket),
        state_dir=silo.folder / "state", coordinator=SimpleNamespace(address="198.51.100.23:7443"),
        identity=SimpleNamespace(certificate=site.folder / "hospital_a.crt"),
    )  # fmt: skip
    for module in (cli_approvals, cli_approvals_reading):
        monkeypatch.setattr(module, "load_site", lambda path: config)

    def run(*arguments: str, text: bool = False) -> tuple[int, Any]:
        result = CliRunner().invoke(cli_approvals.app, [*arguments, *([] if text else ["--json"])])
        return result.exit_code, result.output if text else json.loads(result.output)

    return run


def test_a_release_that_is_over_says_who_answered_what_and_when(ask: Ask, silo: release_site.Site) -> None:
    bench, held = silo.bench, silo.hold_factors(1.0)
    now = utc(bench.clock_now)
    code, text = ask("show", held.id, text=True)
    assert code == 0 and "approvals 0 of 1 given" in text and "; expires 20" in text and "\nreject: " in text
    shown = {"release": held.id, "digest": held.digest, "policy_digest": held.policy_digest}
    bench.releases.reject(command("approvals.reject", shown | {"reason_code": "CONTENT"}, person="carol"))
    code, text = ask("show", held.id, text=True)
    assert code == 0 and "rejected, revision" in text and f"\n  REJECTED by carol at {now}" in text
    assert "approvals 0 of 1 given" in text and "; its time was until 20" in text and "\nreject: " not in text
    sent = next(one for one in bench.ledger.releases() if one.state == "approved")
    text = ask("show", sent.id, text=True)[1]
    assert "approvals 1 of 1 given" in text and "\n  approved by bob at 20" in text
    late = silo.hold_factors(1.0)
    bench.clock_now = late.expires_at + 1.0
    bench.releases.expire()
    text = ask("show", late.id, text=True)[1]
    assert f"its time was until {utc(late.expires_at)}" in text and "approvals 0 of 1 given" in text


def test_without_a_daemon_the_state_folder_answers(ask: Ask, silo: release_site.Site, site: Site) -> None:
    policy, held = silo.bench.judge.policy, silo.hold_factors(2.0)
    content = policy.file.model_dump(mode="json", by_alias=True)
    silo.bench.ledger.put_in_force(PolicyInForce(policy.digest, content, policy.digest))
    told = ask("diff", held.id)[1]["data"]
    pages = ask("history", "--all")[1]["data"]
    daemons = ask("show", held.id)[1]["data"]
    site.socket.unlink()  # as of a daemon that is not running
    assert ask("diff", held.id)[0] == 3
    code, answer = ask("diff", held.id, "--offline")
    found = answer["data"]
    assert code == 0 and answer["warnings"][0].startswith("OFFLINE, as of ")
    (certificate,) = [row for row in told["rows"] if row["what"] == "certificate"]  # which a folder does not hold
    assert found["rows"] == [row for row in told["rows"] if row != certificate] and len(found["rows"]) > 4
    assert found["against"] == told["against"] and "is not compared" in found["note"]
    assert ask("history", "--all", "--offline")[1]["data"] == pages
    assert ask("diff", "r9/none/0", "--offline")[0] == 8
    shown = ask("show", held.id, "--offline")[1]["data"]
    assert shown.pop("leaves")["kinds"] == daemons.pop("leaves")["kinds"]
    # no payload is read, and the policy's lines are in its file
    assert [part for part in shown["difference"].split("; ") if part not in daemons["difference"]] == [
        "cosine unknown: not archived"
    ]
    policies = shown.pop("policy"), daemons.pop("policy")
    assert policies[0]["digest"] == policies[1]["digest"] and policies[0]["counts"] == policies[1]["counts"]
    other = ("difference", "shown", "shown_facts")
    assert {name: value for name, value in shown.items() if name not in other} == {
        name: value for name, value in daemons.items() if name not in other
    }


def test_reading_a_folder_changes_nothing_in_it(ask: Ask, silo: release_site.Site) -> None:
    held, state = silo.hold_factors(2.0), silo.folder / "state"
    (state / "payloads" / ("0" * 64)).write_bytes(b"a daemon that starts takes this away: no row refers to it")

    def files() -> dict[str, bytes]:
        # SQLite's shared memory, which a reader of a database in WAL mode makes beside it, holds nothing
        return {
            str(path): path.read_bytes()
            for path in sorted(state.rglob("*"))
            if path.is_file() and not path.name.endswith(("-shm", "-wal"))
        }

    before = files()
    for asked in (("show", held.id), ("diff", held.id), ("history", "--all")):
        ask(*asked, "--offline")
    assert files() == before and len(before) > 3


def test_a_folder_without_a_ledger_or_with_a_damaged_one_is_said(
    ask: Ask, silo: release_site.Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = SimpleNamespace(
        silo="hospital_a", state_dir=tmp_path / "elsewhere", coordinator=SimpleNamespace(address="")
    )
    monkeypatch.setattr(cli_approvals_reading, "load_site", lambda path: elsewhere)
    code, answer = ask("history", "--offline")
    assert code == 8 and "holds no ledger" in answer["error"]["message"]
    elsewhere.state_dir.mkdir()
    (elsewhere.state_dir / "ledger.sqlite3").write_bytes(b"no database at all" * 1000)
    code, answer = ask("history", "--offline")
    assert code == 1 and "ledger.sqlite3" in answer["error"]["message"]


def test_a_folder_whose_policy_is_of_another_version_shows_what_it_can(ask: Ask, silo: release_site.Site) -> None:
    held = silo.hold_factors(2.0)
    policy = silo.bench.judge.policy
    silo.bench.ledger.put_in_force(PolicyInForce(policy.digest, {"a_word_of_a_later_version": 1}, ""))
    code, text = ask("show", held.id, "--offline", text=True)
    assert code == 0 and f"not told here: {UNREAD}" in text and held.digest in text
    assert "leaves" not in text and "\napprove: " not in text and "approvals 0 of 1 given\n" in text
    shown = ask("show", held.id, "--offline")[1]["data"]
    assert (shown["state"], shown["missing"], shown["approvers"]["given"]) == ("held", UNREAD, [])
    silo.bench.ledger.put_in_force(PolicyInForce(policy.digest, policy.file.model_dump(mode="json", by_alias=True), ""))
    assert "missing" not in ask("show", held.id, "--offline")[1]["data"]
    silo.bench.ledger.put_in_force(PolicyInForce(policy.digest, {"a_word_of_a_later_version": 1}, ""))
    no = {"release": held.id, "digest": held.digest, "policy_digest": held.policy_digest, "reason_code": "CONTENT"}
    silo.bench.releases.reject(command("approvals.reject", no, person="carol"))
    code, text = ask("show", held.id, "--offline", text=True)
    assert code == 0 and "\n  REJECTED by carol at 20" in text and "its time was until" in text


def test_T36_an_approval_names_each_finding(ask: Ask, silo: release_site.Site) -> None:
    held = silo.hold_factors(3.0)
    shown = ask("show", held.id)[1]["data"]
    named = [one["id"] for one in shown["noticed"]]
    assert len(named) == 2
    code, text = ask("show", held.id, text=True)
    assert code == 0 and "FINDINGS 2" in text and all(name in text for name in named)
    assert "address: coordinator.example:7443 -> 198.51.100.23:7443" in text
    proof = ("--operator", "alice", "--expect-digest", held.digest, "--expect-policy", shown["policy"]["digest"],
             "--expect-shown", shown["shown"])  # fmt: skip
    for given in ([], named[:1], [named[0], "X-1"]):
        code, told = ask("approve", held.id, *proof, *(word for one in given for word in ("--ack-finding", one)))
        assert (code, told["error"]["code"]) == (6, "FINDINGS_UNREAD") and "--ack-finding" in told["error"]["hint"]
    code, told = ask("approve", held.id, *proof, *(word for one in named for word in ("--ack-finding", one)))
    assert code == 0 and told["data"]["state"] == "allowed"


def test_T36_on_a_terminal_each_finding_is_shown_alone_and_typed_back(
    ask: Ask, silo: release_site.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = silo.hold_factors(3.0)
    named = silo.bench.opened(held.id)["acknowledged"]
    said: list[str] = []
    monkeypatch.setattr(cli_approvals, "require_terminal", lambda options, hint: None)
    monkeypatch.setattr(cli_approvals.typer, "echo", said.append)
    typed: list[str] = []
    monkeypatch.setattr(cli_approvals.typer, "prompt", lambda text: typed.pop(0))
    config = cli_approvals.load_site(Path())
    typed[:] = [named[0][-4:], named[1][-4:], held.digest[-4:]]
    shown = cli_approvals.digests_shown(config, held.id, "", "", acknowledged=[])
    assert shown["acknowledged"] == named and said[1].endswith(named[0]) and said[2].endswith(named[1])
    typed[:] = [named[1][-4:], held.digest[-4:]]
    assert cli_approvals.digests_shown(config, held.id, "", "", acknowledged=named[:1])["acknowledged"] == named
    typed[:] = ["none"]
    with pytest.raises(cli_approvals.UsageError, match="not the last 4 characters"):
        cli_approvals.digests_shown(config, held.id, "", "", acknowledged=[])
    typed[:] = [held.digest[-4:]]
    assert "acknowledged" not in cli_approvals.digests_shown(config, held.id, "", "")  # a no needs none


def test_what_would_leave_is_read_by_who_may_and_recorded(ask: Ask, silo: release_site.Site) -> None:
    held = silo.hold_responses(3, 5, planted="\x1b]0;owned\x07 12")
    assert ask("payload", held.id, "--operator", "bob")[0] == 4  # a viewer
    assert silo.bench.events("payload.read") == []
    code, text = ask("payload", held.id, "--operator", "alice", text=True)
    assert code == 0 and "\u241b]0;owned" in text and "\x1b" not in text and "| prompt " in text
    assert [record["detail"]["person"] for record in silo.bench.events("payload.read")] == ["alice"]
    factors = silo.hold_factors(1.0)
    code, text = ask("payload", factors.id, "--operator", "alice", text=True)
    assert code == 0 and "below 0" in text and "float32" in text
    assert ask("payload", "r9/none/0", "--operator", "alice")[0] == 8


def test_diff_says_of_one_that_was_rejected_that_it_did_not_leave(tmp_path: Path) -> None:
    with closing(release_site.Site(tmp_path / "site", "run-1", 3, release_site.policy())) as site:
        say_no(site, site.hold_factors(1.0))
        site.open_round(2)
        text = to_text(comparison_lines(site.bench.releases.comparison(site.hold_factors(1.0)), 200))
    assert "rejected by bob: it did not leave" in text and ", left " not in text and "differs: " in text


def test_diff_and_history_and_list_walk_every_page(
    ask: Ask, silo: release_site.Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = silo.hold_factors(2.0)
    code, text = ask("diff", held.id, text=True)
    assert code == 0 and "approved by bob" in text and "differs: " in text and "largest change first" in text
    assert ask("diff", "r9/none/0")[0] == 8
    monkeypatch.setattr(cli_approvals_reading, "PAGE_ROWS", 1)
    whole = ask("list", "--all")[1]["data"]["releases"]
    kept = [one.id for one in reversed(silo.bench.ledger.releases())]
    assert [row["id"] for row in whole] == kept and len(whole) == 3
    assert [row["id"] for row in ask("list")[1]["data"]["releases"]] == [held.id]
    page = ask("history", "--limit", "2")[1]["data"]
    rest = ask("history", "--limit", "2", "--before", str(page["next"]))[1]["data"]
    assert page["releases"] + rest["releases"] == whole == ask("history", "--all")[1]["data"]["releases"]
    code, text = ask("history", "--kind", "lora.factors", "--limit", "1", text=True)
    assert code == 0 and "older ones: --before" in text and "public.responses" not in text
    assert "bob approve 20" in ask("history", text=True)[1]


def test_later_is_signed_by_who_may_answer(ask: Ask, silo: release_site.Site, monkeypatch: pytest.MonkeyPatch) -> None:
    held = silo.hold_factors(1.0)
    clock = SimpleNamespace(time=lambda: silo.bench.clock_now, gmtime=cli_approvals.time.gmtime,
                            strftime=cli_approvals.time.strftime)  # fmt: skip
    monkeypatch.setattr(cli_approvals, "time", clock)
    shown = ["--expect-policy", held.policy_digest]
    digests = ["--expect-digest", held.digest, *shown]
    assert ask("defer", held.id, "--operator", "bob", "--minutes", "5", *digests)[0] == 4  # a viewer
    code, told = ask("defer", held.id, "--operator", "alice", "--minutes", "600", *digests)
    assert (code, told["error"]["code"]) == (6, "TOO_LATE")
    code, told = ask("defer", held.id, "--operator", "alice", "--minutes", "5", "--expect-digest", "0" * 64, *shown)
    assert (code, told["error"]["code"]) == (6, "STALE_VIEW")
    code, told = ask("defer", held.id, "--operator", "alice", "--minutes", "5")  # of what, nobody was shown
    assert code == 2 and "--expect-digest" in told["error"]["message"]
    for wrong in ([], ["--minutes", "5", "--until", "2099-01-01T00:00:00Z"], ["--until", "soon"],
                  ["--until", "2099-01-01T00:00:00"], ["--minutes", "5", "--request-id", "r1"]):  # fmt: skip
        assert ask("defer", held.id, "--operator", "alice", *wrong, *digests)[0] == 2
    code, told = ask("defer", held.id, "--operator", "nobody", "--minutes", "5", *digests)
    assert code == 8 and told["error"]["hint"] == "there are keys of: alice, bob (--operator NAME)"
    far = ("--minutes", "1e300", "--request-id", "r1")
    assert ask("defer", held.id, "--operator", "alice", *far, *digests, text=True)[0] == 2
    assert silo.bench.events("release.defer") == []
    until = f"{datetime.fromtimestamp(int(silo.bench.clock_now) + 300, UTC):%Y-%m-%dT%H:%M:%SZ}"
    again = ["--until", until, "--request-id", "request-0001"]
    code, told = ask("defer", held.id, "--operator", "alice", *again, *digests)
    assert code == 0 and told["data"]["deferred_until"] == int(silo.bench.clock_now) + 300
    assert ask("defer", held.id, "--operator", "alice", *again, *digests) == (code, told)
    assert len(silo.bench.events("release.defer")) == 1
    code, told = ask("defer", held.id, "--operator", "alice", "--minutes", "5", *digests)
    assert code == 0 and told["data"]["deferred_until"] == pytest.approx(silo.bench.clock_now + 300)
    assert "put off by alice until" in ask("show", held.id, text=True)[1]
