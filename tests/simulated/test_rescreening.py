"""`audit replay --rescreen`: another policy's screens over the archived texts, by a signed command (T15, T40).

Each changed decision stands beside its counterpart, and beside a row of which nobody can tell any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from certs.roles import may
from fedsilo.audit.record import Record
from fedsilo.cli import audit as cli_audit
from fedsilo.cli.audit_report import LogStatistics
from fedsilo.control.server import ControlServer
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UsageError
from policies import screens
from policies.replay import replay
from policies.screens import ScreenFailed
from silo.guard import screens as guard_screens
from silo.guard.messages import Allowed, Denied
from silo.guard.screens import COMMAND, Rescreening, Screens
from tests.policies import setting
from tests.simulated import screening as site
from tests.world import Bench, command

LOOSE, STRICT = site.policy_text(["charset"]), site.policy_text(["charset", "canary"])
PLANTED, CLEAN = site.PLANTED["canary"], "ten and two make 12"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Two messages have left under a policy that screens for characters alone: the first one with a canary."""
    with closing(site.bench(tmp_path, setting.policy_of(LOOSE))) as made:
        for step, text in ((2, PLANTED), (4, CLEAN)):
            made.judge.view = replace(made.judge.view, open_step=step)
            rows = {2: (1, 4, 7), 4: (0, 2, 3)}[step]
            offered = made.responses((rows[0], (text, "12")), (rows[1], ()), (rows[2], ()), step=step)
            assert isinstance(offered, Allowed)
            made.gate.transmit(offered)
        yield made


def asked(bench: Bench, policy: str = STRICT, *, screens: Screens | None = None, **arguments: Any) -> dict[str, Any]:
    found = Rescreening(bench.ledger, bench.audit, screens or bench.screens).rescreen(
        command(COMMAND, {"policy": policy, "charter": "", "since": 0, **arguments}, person="carol", roles=("auditor",))
    )
    assert found["policy"] == setting.policy_of(policy).digest
    return found


def verdicts(bench: Bench, rows: list[dict[str, Any]], policy: str = STRICT) -> dict[int, tuple[str, tuple[str, ...]]]:
    """What a replay over the whole log says of the answers that left, by record."""
    told = {row["seq"]: row.get("facts") or row["why"] for row in rows}
    return {
        row.seq: (row.decision.verdict, row.decision.reasons) if row.decision else ("", (row.why,))
        for row in replay(bench.audit.records(), setting.policy_of(policy), told)
        if row.record["kind"] == "public.responses"
    }


def test_T15_a_message_that_passed_is_denied_by_further_screens_and_its_neighbour_is_not(bench: Bench) -> None:
    first, second = (record["seq"] for record in bench.events("egress.decision"))
    # Without the texts nobody knows, and says so.
    unknown = verdicts(bench, []).values()
    assert all("canary did not run then: this takes the archived text" in why for _, (why,) in unknown)
    rows = asked(bench)["rows"]
    assert verdicts(bench, rows) == {first: ("deny", ("SCREEN_HIT",)), second: ("allow", ())}
    found = {row["seq"]: row["facts"]["screen_hits"] for row in rows}
    assert found == {first: {"canary/canary": 1}, second: {}}
    again = list(replay(bench.audit.records(), setting.policy_of(STRICT), {row["seq"]: row["facts"] for row in rows}))
    assert [(row.seq, row.rescreened) for row in again if row.changed] == [(first, True)]
    assert [row.seq for row in again if row.to_json()["rescreened"]] == [first, second]


def test_T15_other_settings_of_a_screen_take_the_text_and_the_same_ones_do_not(bench: Bench) -> None:
    first, second = (record["seq"] for record in bench.events("egress.decision"))
    assert asked(bench, LOOSE)["rows"] == [] and bench.events("payload.read") == []
    narrow = LOOSE.replace("allow: [latin, digits, punctuation, math]", "allow: [latin, punctuation, math]")
    assert narrow != LOOSE
    found = verdicts(bench, asked(bench, narrow)["rows"], narrow)
    assert found == {first: ("deny", ("SCREEN_HIT",)), second: ("deny", ("SCREEN_HIT",))}  # both say 12
    wide = LOOSE.replace("max_run_nonword: 40", "max_run_nonword: 41")
    assert verdicts(bench, asked(bench, wide)["rows"], wide) == {first: ("allow", ()), second: ("allow", ())}


def test_a_payload_that_is_gone_says_so_and_the_others_are_still_asked(bench: Bench) -> None:
    first, second = bench.ledger.outbox()
    (bench.folder / "payloads" / second.digest).write_bytes(b"something else")
    bench.ledger.drop_payloads([first.digest], archived=True)
    rows = {row["seq"]: row for row in asked(bench)["rows"]}
    assert "retention has deleted it" in rows[first.decision_seq]["why"]
    assert "changed on the disk" in rows[second.decision_seq]["why"]
    assert bench.events("payload.read") == []  # nothing was read
    said = verdicts(bench, list(rows.values()))
    assert all(verdict == "" and "canary did not run then: " in why for verdict, (why,) in said.values())


def test_what_never_left_or_came_in_is_in_no_archive(tmp_path: Path) -> None:
    policy = site.policy_text(["charset"], on_hit="hold")
    with closing(site.bench(tmp_path, setting.policy_of(policy))) as bench:
        assert not isinstance(bench.responses((1, (site.PLANTED["charset"],)), (4, ()), (7, ())), Allowed | Denied)
        (row,) = asked(bench, site.policy_text(["charset", "canary"], on_hit="hold"))["rows"]
        assert "did not leave" in row["why"]
    plain = site.policy_text(["charset"])
    with closing(site.bench(tmp_path / "in", setting.policy_of(plain))) as bench:
        bench.channel.routing = {"run": "run-1", "round": 1, "step": 2}
        bench.channel.answer = ("public.donors", setting.donors_message((1, "hospital_b", "12")).body)
        bench.gate.send(bench.judge.view.place("control.poll"), pb.Poll())
        (row,) = asked(bench, site.policy_text(["charset"], donor_screens=["charset"]))["rows"]
        assert row["why"] == "what came in is not archived"
        assert asked(bench, plain)["rows"] == []


def test_T40_each_reading_is_recorded_with_the_person_and_no_text_goes_back_or_into_the_log(bench: Bench) -> None:
    answer = asked(bench)
    reads = bench.events("payload.read")
    assert [record["link"]["decision"] for record in reads] == [row["seq"] for row in answer["rows"]]
    for record in reads:
        assert record["detail"]["person"] == "carol" and record["detail"]["command"] == COMMAND
        assert record["detail"]["screened_by"] == answer["policy"] and record["kind"] == "public.responses"
    written = json.dumps([answer, list(bench.audit.records())])
    assert not any(text[:12] in written for text in (PLANTED, CLEAN, site.CANARY))
    counted = LogStatistics()
    for record in bench.audit.records():
        counted.add(Record(record))
    assert [read["person"] for read in counted.retention["reads"]] == ["carol", "carol"]


def test_a_screen_that_cannot_run_here_is_named_and_nothing_is_read(bench: Bench, tmp_path: Path) -> None:
    for own, names, said in (
        (Screens(), ["charset", "canary"], "screen canary cannot run: data.canaries names no file"),
        (
            Screens(canaries=(site.CANARY,)),
            ["charset", "overlap"],
            "screen overlap cannot run: the trainer has made no",
        ),
        (bench.screens, ["charset", "overlap"], "made with other settings"),
    ):
        policy = site.policy_text(names).replace("n: 8,", "n: 5," if "other settings" in said else "n: 8,")
        rows = asked(bench, policy, screens=own)["rows"]
        assert len(rows) == 2 and all(said in row["why"] for row in rows)
    assert bench.events("payload.read") == []
    # the counterpart: with the index as the policy wants it, both are judged
    assert len([row for row in asked(bench, site.policy_text(["charset", "overlap"]))["rows"] if "facts" in row]) == 2


def test_one_command_looks_at_so_many_and_says_where_to_go_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = asked(bench)
    assert whole["next"] is None
    for name in ("PAYLOADS_MAX", "RECORDS_MAX"):
        with monkeypatch.context() as patch:
            patch.setattr(guard_screens, name, 1)
            rows, since = [], 0
            while since is not None:
                part = asked(bench, since=since)
                assert len(part["rows"]) <= 1 and (part["next"] is None or part["next"] > since)
                rows, since = rows + part["rows"], part["next"]
            assert rows == whole["rows"]


@pytest.mark.parametrize(
    "arguments", [{"policy": None}, {"policy": 3}, {"policy": ""}, {"policy": "a: 1"}, {"since": -1}, {"since": True}]
)
def test_a_command_without_a_policy_or_a_number_is_refused(bench: Bench, arguments: dict[str, Any]) -> None:
    given = {"policy": STRICT, "charter": "", "since": 0, **arguments}
    with pytest.raises(UsageError):
        Rescreening(bench.ledger, bench.audit, bench.screens).rescreen(command(COMMAND, given))
    assert bench.events("payload.read") == []


def test_T36_the_charter_has_its_part_in_what_is_asked(bench: Bench) -> None:
    found = Rescreening(bench.ledger, bench.audit, bench.screens).rescreen(
        command(COMMAND, {"policy": LOOSE, "charter": STRICT, "since": 0})
    )
    assert [bool(row["facts"]["responses_hit"]) for row in found["rows"]] == [True, False]


def test_T28_who_may_read_payloads_may_ask(bench: Bench) -> None:
    registered: dict[str, str] = {}

    class Desk:
        def register_command(self, name: str, action: str, handler: Any) -> None:
            registered[name] = action

    desk: ControlServer = Desk()  # type: ignore[assignment]
    Rescreening(bench.ledger, bench.audit, bench.screens).register(desk, lambda work: work())
    assert registered == {COMMAND: "payload.read"}
    assert may(["auditor"], "payload.read") and not may(["viewer"], "payload.read")


# ---- the command line --------------------------------------------------------------------------------


@pytest.fixture
def answering(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`fedsilo audit` beside this bench: the command arrives at the real work, without socket and signature."""
    people: list[str] = []

    class Config:
        state_dir = bench.folder

    def carry_out(config: Any, operator: str, name: str, arguments: Mapping[str, Any], request_id: str) -> Any:
        people.append(operator)
        given = command(name, dict(arguments), person=operator)
        return Rescreening(bench.ledger, bench.audit, bench.screens).rescreen(given)

    monkeypatch.setattr(cli_audit, "silo_command", carry_out)
    monkeypatch.setattr(cli_audit, "load_site", lambda path: Config())
    return people


def run(*arguments: object) -> tuple[int, Any]:
    done = CliRunner().invoke(cli_audit.app, ["replay", *map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_the_command_lists_what_changes_with_the_archived_texts(
    bench: Bench, answering: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_screens, "PAYLOADS_MAX", 1)
    draft = tmp_path / "new.yaml"
    draft.write_text(STRICT)
    first, _ = (record["seq"] for record in bench.events("egress.decision"))
    code, answer = run("--policy", draft, "--log", bench.folder)
    assert code == 0 and answer["data"]["changed"] == [] and len(answer["data"]["not_replayed"]) == 2
    code, answer = run("--policy", draft, "--rescreen", "--operator", "carol")
    assert code == 0 and answer["data"]["not_replayed"] == [] and answer["data"]["rescreened"] == 2
    changed = answer["data"]["changed"]
    assert [(row["seq"], row["recorded"], row["replayed"]) for row in changed] == [(first, "allow", "deny")]
    assert set(answering) == {"carol"} and len(answering) > 1  # so many at a time
    text = CliRunner().invoke(cli_audit.app, ["replay", "--policy", str(draft), "--rescreen", "--operator", "carol"])
    assert "2 of them with their archived texts screened again; 1 change" in text.stdout
    assert f"(record {first}): a guard under this policy would have left out those with a hit first" in text.stdout
    assert changed[0]["withheld_first"] and not changed[0]["clipped_first"]
    draft.write_text(site.policy_text(["charset", "canary"], on_hit="hold"))
    (held,) = run("--policy", draft, "--rescreen", "--operator", "carol")[1]["data"]["changed"]
    assert (held["replayed"], held["withheld_first"]) == ("hold", False)


def test_the_command_asks_for_a_log_or_a_person_and_refuses_another_partys_log(
    bench: Bench, answering: list[str], tmp_path: Path
) -> None:
    draft = tmp_path / "new.yaml"
    draft.write_text(STRICT)
    assert run("--policy", draft)[1]["error"]["message"] == "which log? --log DIR"
    assert "--operator" in run("--policy", draft, "--rescreen")[1]["error"]["message"]
    with closing(site.bench(tmp_path / "other", setting.policy_of(LOOSE))) as other:
        other.gate.transmit(other.responses((1, ("12",)), (4, ()), (7, ())))
        code, answer = run("--policy", draft, "--rescreen", "--operator", "carol", "--log", other.folder)
        assert code != 0 and "not the one that the silo has screened again" in answer["error"]["message"]
    assert run("--policy", draft, "--rescreen", "--operator", "carol", "--log", bench.folder)[0] == 0


def test_T23_a_run_of_screens_that_fails_counts_as_a_payload_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_screens, "PAYLOADS_MAX", 1)

    def failing(*_: object) -> None:
        raise ScreenFailed("so it is")

    monkeypatch.setattr(screens, "screen_texts", failing)
    answer = asked(bench)
    assert [row["why"] for row in answer["rows"]] == ["screens canary, charset failed here"]
    assert answer["next"] is not None and len(bench.events("payload.read")) == 1


def test_T23_a_long_rescreening_stops_after_its_time_and_says_where_to_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 31.0])
    monkeypatch.setattr(guard_screens, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # its own alone
    assert asked(bench)["next"] == 1
