"""What the coordinator's socket answers about its log, what it took in and what it sent: against a slow reading of the
log and the database, under changes, with hostile arguments; and its certificates and settings as they are on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from certs.roles import Roles
from coordinator import store as db
from coordinator.answers.queries import Panel, SentView
from coordinator.config import load_config
from coordinator.main import Coordinator, check
from fedsilo.audit.checkpoint import Checkpoint, cosign, sign_checkpoint
from fedsilo.audit.merkle import leaf_hash
from fedsilo.audit.segments import segments
from fedsilo.control.answers import to_json
from fedsilo.control.audit_queries import with_rules
from fedsilo.control.server import ControlServer
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import NotFoundError, UsageError
from policies.engine import History, decide
from tests.coordinator_folder import write_coordinator
from tests.simulated.coordinator_parts import (
    COORDINATOR,
    FEDERATION,
    SILOS,
    House,
    SimulatedSilo,
    federation,
    until_quiet,
)
from tests.simulated.queries import all_pages, as_json, in_json, same, settled, slow

NAMES = tuple(f"spiffe://{FEDERATION}/silo/{name}" for name in SILOS)


def panel_of(house: House, desk: ControlServer | None = None) -> Panel:
    return Panel(
        house.audit, house.store, desk or desk_of(), house.driver.services.relay, charter=house.policy, silos=NAMES,
        now_seconds=house.clock,
    )  # fmt: skip


def desk_of() -> ControlServer:
    return ControlServer("main", b"", Roles("main", {}), lambda: datetime(2027, 1, 15, 8, tzinfo=UTC))


def deny(silo: SimulatedSilo) -> Any:
    """Answers that name another public set than the charter."""
    return silo.say("public.responses", pb.PublicResponses(public_set_sha256="0" * 64), run="run-1", number=1, step=2)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """After a run of two rounds, with a message that was denied and a stranger who was refused."""
    house, silos = federation(tmp_path_factory.mktemp("house"))
    with closing(house):
        for silo in silos:
            silo.join()
        house.submit()
        until_quiet(silos)
        deny(silos[1])
        SimulatedSilo(house, "stranger").join()
        yield house


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with closing(House(tmp_path / "house")) as made:
        yield made


# ---- what came in ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_inbox_is_what_a_slow_reading_of_the_log_gives(ended: House) -> None:
    inbox = as_json(panel_of(ended))["inbox"]
    answer = inbox({"limit": 500})
    expected = slow(ended.audit, "ingress")
    assert same(answer["messages"], expected) and {row["verdict"] for row in expected} == {"allow", "deny"}
    assert {row["kind"] for row in expected} >= {"public.responses", "lora.factors", "metrics.eval", "unknown"}
    assert {row["peer"] for row in answer["messages"]} >= set(NAMES)
    assert (answer["total"], answer["denied"]) == (len(expected), sum(row["verdict"] == "deny" for row in expected))
    assert same(all_pages(inbox, {"limit": 7, "control": True}), slow(ended.audit, "ingress", control=True))
    assert inbox({"kind": "lora.factors", "verdict": "deny"})["messages"] == []


def test_one_message_has_the_verdict_of_every_rule_although_the_log_has_only_the_facts(ended: House) -> None:
    inbox = as_json(panel_of(ended))["inbox"]
    record = next(
        each for each in ended.audit.records() if each.get("decision") == "deny" and each["kind"] != "unknown"
    )
    assert "rules" not in record
    shown = inbox({"seq": record["seq"]})
    facts = record["facts"]
    decided = decide(facts["final"], ended.policy, History.from_json(facts["history"]))
    deciding = [result for result in decided.results if result.outcome == "deny"]
    assert [rule["rule"] for rule in shown["message"]["rules"] if rule["outcome"] == "deny"] == [
        result.rule for result in deciding
    ]
    assert len(shown["would_pass"]) == len(deciding) and all(
        str(result.line) in sentence for result, sentence in zip(deciding, shown["would_pass"], strict=True)
    )
    assert shown["message"]["detail"]["rules_not_applicable"] > 0
    good = next(each["seq"] for each in ended.audit.records() if each.get("kind") == "lora.factors")
    answer = inbox({"seq": good})
    assert answer["would_pass"] == [] and {rule["outcome"] for rule in answer["message"]["rules"]} == {"ok"}


def test_rules_are_shown_only_where_they_are_those_that_decided(ended: House) -> None:
    record = next(each for each in ended.audit.records() if each.get("kind") == "lora.factors")
    assert with_rules(record, ended.policy)["rules"]
    another_policy = {**record, "policy": {"effective": "0" * 64}}
    another_verdict = {**record, "decision": "deny", "reasons": ["TENSOR_SET"]}
    another_version = {**record, "facts": {"final": {"kind": "lora.factors"}, "history": {}}}
    no_facts = {name: value for name, value in record.items() if name != "facts"}
    for changed in (another_policy, another_verdict, another_version, no_facts):
        assert with_rules(changed, ended.policy) == changed


def test_who_was_refused_before_any_rule_is_told_so(ended: House) -> None:
    inbox = as_json(panel_of(ended))["inbox"]
    row = next(row for row in inbox({})["messages"] if row["peer"].endswith("/silo/stranger"))
    assert (row["verdict"], row["kind"]) == ("deny", "unknown")
    assert "before a rule of the policy" in inbox({"seq": row["seq"]})["would_pass"][0]
    with pytest.raises(NotFoundError) as refused:
        inbox({"seq": 10**9})
    assert "coordinator inbox list" in refused.value.hint


# ---- what was sent ---------------------------------------------------------------------------------


def sent(house: House, *, control: bool = False) -> dict[tuple[str, int, str, str], tuple[int, int]]:
    """Every count of the database, read one by one."""
    rows = house.rows(lambda session: list(session.scalars(select(db.Traffic))))
    return {
        (row.run, row.round, row.kind, row.silo): (row.messages, row.payload_bytes)
        for row in rows
        if row.direction == "out" and (control or not row.kind.startswith("control."))
    }


def place(row: Mapping[str, Any]) -> tuple[str, int, str, str]:
    return row["run"], row["round"], row["kind"], row["peer"]


def test_the_outbox_is_what_the_database_counted(ended: House) -> None:
    outbox = as_json(panel_of(ended))["outbox"]
    for control in (False, True):
        answer = outbox({"limit": 500, "control": control})
        expected = sent(ended, control=control)
        assert {place(row): (row["messages"], row["bytes"]) for row in answer["messages"]} == expected
        assert answer["sent"] == sum(messages for messages, _ in expected.values()) and answer["next"] is None
        assert answer["total"] == len(expected)
        rounds = [row["round"] for row in answer["messages"] if row["run"]]
        assert rounds == sorted(rounds, reverse=True) and {1, 2} <= set(rounds)
    outcomes = {row["kind"]: row["outcome"] for row in answer["messages"]}
    assert outcomes["run.plan"] == outcomes["round.open"] == "acked"
    assert outcomes["global.adapter"] == outcomes["control.ack"] == "sent"  # nobody acknowledges a reply
    opened = outbox({"kind": "round.open", "silo": "hospital_b", "run": "run-1"})["messages"]
    assert [(row["round"], row["peer"]) for row in opened] == [(2, "hospital_b"), (1, "hospital_b")]
    shown = outbox({"seq": opened[1]["seq"]})
    assert shown == {"message": opened[1], "waiting": []}
    assert outbox({"run": "run-2"})["messages"] == []


def test_pages_of_what_was_sent_are_the_whole_whatever_comes_meanwhile(ended: House) -> None:
    ask, added = in_json(SentView(ended.store.transaction).outbox), iter(range(3, 100))

    def another() -> None:
        with ended.store.transaction() as session:
            db.count_message(
                session, silo="hospital_a", run="run-1", round_number=next(added), kind="round.open", direction="out",
                payload_bytes=7,
            )  # fmt: skip

    whole = ask({"limit": 500, "control": True})["messages"]
    rows, before = list[Any](), None
    while rows == [] or before is not None:
        answer = ask({"limit": 3, "control": True, "before": before})
        rows, before = rows + answer["messages"], answer["next"]
        assert len(answer["messages"]) <= 3
        another()
    assert [row["seq"] for row in rows] == [row["seq"] for row in whole]
    with ended.store.transaction() as session:
        for row in session.scalars(select(db.Traffic).where(db.Traffic.round > 2)):
            session.delete(row)


def test_what_waits_for_a_silo_is_told_until_the_silo_acknowledges_it(house: House) -> None:
    outbox, silos = as_json(panel_of(house))["outbox"], [SimulatedSilo(house, name) for name in SILOS]
    assert outbox({}) == {"messages": [], "total": 0, "sent": 0, "waiting": 0, "next": None}
    for silo in silos:
        silo.join()
    house.submit()
    answer = outbox({"waiting": True})
    assert [(row["kind"], row["peer"], row["messages"], row["waiting"]) for row in answer["messages"]] == [
        ("run.plan", name, 0, 1) for name in sorted(SILOS)
    ]
    assert answer["waiting"] == 4 and {row["outcome"] for row in answer["messages"]} == {""}
    row = answer["messages"][-1]["seq"]
    assert [item["delivered"] for item in outbox({"seq": row})["waiting"]] == [False]
    assert silos[3].poll() is not None  # taken in, and acknowledged with the next poll
    shown = outbox({"seq": row})
    assert (shown["message"]["outcome"], shown["message"]["messages"]) == ("sent", 1)
    (item,) = shown["waiting"]
    assert item["delivered"] and item["bytes"] == shown["message"]["bytes"] and len(item["sha256"]) == 64
    silos[3].poll()
    shown = outbox({"seq": row})
    assert (shown["message"]["outcome"], shown["waiting"]) == ("acked", [])
    assert [row["peer"] for row in outbox({"waiting": True, "kind": "run.plan"})["messages"]] == list(SILOS[:3])


# ---- the audit log ---------------------------------------------------------------------------------


def test_the_audit_pages_are_the_whole_log_and_it_is_verified(ended: House) -> None:
    queries = as_json(panel_of(ended))
    whole = list(ended.audit.records())[::-1]
    assert all_pages(queries["audit"], {"limit": 9}) == whole
    assert all_pages(queries["audit"], {"limit": 9, "event": "ingress."}) == [
        record for record in whole if record["event"].startswith("ingress.")
    ]
    assert queries["audit.status"]({})["verified_to"] is None
    queries["audit.verify"]({})
    shown = settled(queries["audit.status"])
    assert (shown["verified_to"], shown["broken"]) == (ended.audit.size, None) and "coordinator" not in shown


def exchange(silo: SimulatedSilo, cosigned_note: str = "", *, signer: SimulatedSilo | None = None) -> Any:
    """A silo shows its own log, of one record, and what it countersigned of the coordinator's."""
    root = leaf_hash(silo.name.encode())  # of a tree of one
    note = sign_checkpoint(Checkpoint(silo.peer.spiffe_id, 1, root), (signer or silo).key)
    return silo.say("control.checkpoint", pb.Checkpoint(note=note, cosigned_note=cosigned_note))


def countersigned(silo: SimulatedSilo, note: str) -> str:
    return cosign(note, silo.peer.spiffe_id, silo.key, 1_800_000_000)


def test_T38_each_silo_has_its_own_word_and_who_contradicts_the_log_is_named(house: House, tmp_path: Path) -> None:
    status, silos = as_json(panel_of(house))["audit.status"], [SimulatedSilo(house, name) for name in SILOS]
    for silo in silos:
        silo.join()
    assert status({})["witnesses"] == dict.fromkeys(NAMES, "not seen")
    answer = exchange(silos[0])
    exchange(silos[0], countersigned(silos[0], answer.note))
    assert status({})["witnesses"] == {**dict.fromkeys(NAMES, "not seen"), NAMES[0]: "matches"}
    assert status({})["checkpoint"]["cosigned_by"] == [NAMES[0]]
    with closing(House(tmp_path / "elsewhere")) as elsewhere:  # the same key, another history
        elsewhere.audit.append("start")
        foreign = elsewhere.audit.checkpoint()
    # another fault of what a silo shows contradicts nothing
    assert exchange(silos[2], signer=silos[3]).code == "CHECKPOINT_INCONSISTENT"
    assert status({})["witnesses"][NAMES[2]] == "not seen" and not house.driver.halted
    refused = exchange(silos[1], countersigned(silos[1], foreign))
    assert refused.code == "CHECKPOINT_INCONSISTENT"
    assert status({})["witnesses"][NAMES[1]] == "differs" and status({})["witnesses"][NAMES[0]] == "matches"
    # a log that lost records, or runs twice, signs nothing more
    assert house.driver.halted == "OWN_HISTORY_LOST" and exchange(silos[0]).code == "HALTED"


def test_T38_a_break_before_what_a_silo_countersigned_differs_and_one_behind_it_does_not(house: House) -> None:
    queries, silos = as_json(panel_of(house)), [SimulatedSilo(house, name) for name in SILOS]
    for silo in silos:
        silo.join()
    answer = exchange(silos[0])
    exchange(silos[0], countersigned(silos[0], answer.note))
    for _ in range(2):
        silos[0].join()  # what nobody countersigned yet
    (_, path), *_ = segments(house.audit.directory)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for number, word in ((0, "differs"), (len(lines) - 2, "matches")):
        bent = [line.replace(b'"round":0', b'"round":1', 1) if at == number else line for at, line in enumerate(lines)]
        assert bent != lines
        path.write_bytes(b"".join(bent))
        queries["audit.verify"]({})
        shown = settled(queries["audit.status"])
        assert shown["broken"]["seq"] == number and shown["witnesses"][NAMES[0]] == word
    path.write_bytes(whole)


# ---- who asks --------------------------------------------------------------------------------------

HOSTILE: list[Any] = [
    -1, 2**53, 10**400, 1.5, True, "1", "run-1/x/k/s", "a/1/b/", "\ud800", "\x1b[2J", "x" * 600, [], {}, [[]], 1e308,
]  # fmt: skip


def test_hostile_arguments_are_refused_in_words_and_never_fail(ended: House) -> None:
    desk = desk_of()
    queries = as_json(panel_of(ended, desk))
    for name, answer in queries.items():
        desk.register_query(name, answer)
    names = ("seq", "before", "limit", "control", "verdict", "kind", "run", "silo", "waiting", "event", "lines", "x")
    for query in queries:
        for name in names:
            for value in HOSTILE:
                reply = desk.query(query, json.dumps({name: value}))
                code = reply.error_code.partition(":")[0]
                assert code in ("", "INVALID_INPUT", "NOT_FOUND"), (query, name, value)
                assert reply.error_message.isprintable()
    for query, wrong in (
        ("outbox", {"limit": 501}), ("outbox", {"seq": "run-1/1/run.plan/x", "limit": 2}), ("outbox", {"before": "x"}),
        ("inbox", {"verdict": "perhaps"}), ("audit", {"limit": 201}), ("logs", {"source": "x"}),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            queries[query](wrong)
    with pytest.raises(NotFoundError):
        queries["outbox"]({"seq": "run-1/1/no.such/hospital_a"})


def test_the_log_is_the_newest_events_and_no_trainer_has_one_here(ended: House) -> None:
    desk = desk_of()
    asked = panel_of(ended, desk).queries()["logs"]

    def logs(arguments: dict[str, Any]) -> Any:
        return to_json(asked(arguments))

    assert logs({}) == {"lines": [], "left_out": 0}
    for number in range(3):
        desk.publish("round.opened", {"run": "run-1", "round": number})
    desk.publish("silo.error", {"silo": "hospital_a", "code": "\x1b[2J" + "x" * 600})
    lines = logs({"lines": 2})["lines"]
    assert lines[0] == '2027-01-15T08:00:00.000Z INFO round.opened {"run":"run-1","round":2}'
    assert " WARNING silo.error " in lines[1] and lines[1].isprintable() and len(lines[1]) == 500
    hostile = "\x9b2J\u202e\u2028\x7f\u200b"  # CSI as one character, bidi, a line break, DEL, nothing to see (T37)
    desk.publish("silo.refused", {"silo": hostile, "field": "Grüße"})
    (line,) = logs({"lines": 1})["lines"]
    assert line.isascii() and line.isprintable() and not set(hostile) - {"2", "J"} & set(line)
    assert json.loads(line.partition("silo.refused ")[2]) == {"silo": hostile, "field": "Grüße"}
    assert logs({"source": "guard"}) == logs({"source": "coordinator"}) == logs({}) != {"lines": [], "left_out": 0}
    with pytest.raises(NotFoundError):
        logs({"source": "trainer"})


# ---- its files -------------------------------------------------------------------------------------


def test_certificates_and_settings_of_a_real_coordinator(tmp_path: Path) -> None:
    init_ca(tmp_path / "ca", name="cardio-net", kind="federation")
    people: dict[str, Any] = {"alice": ["operator"]}
    provision_site(tmp_path / "main", site="main", federation_ca=tmp_path / "ca", people=people, is_coordinator=True)
    path = write_coordinator(tmp_path / "main", SILOS)
    with Coordinator(check(load_config(path))) as coordinator:
        reply = coordinator.control_server.query("certificates", "")
        rows = {row["whose"]: row for row in json.loads(reply.data_json)}
        assert rows["this coordinator"]["role"] == "coordinator" and rows["this coordinator"]["in_use"]
        assert rows["this coordinator"]["names"][0] == COORDINATOR
        assert rows["the federation CA"]["pinned"] and rows["the operator alice"]["role"] == "operator"
        pem = (tmp_path / "main" / "id" / "main.crt").read_text()
        with coordinator.store.transaction() as session:
            session.add(db.ShownCertificate(silo="hospital_a", pem=pem))
            session.add(db.ShownCertificate(silo="hospital_b", pem="nothing"))
        shown = {
            row["whose"]: row for row in json.loads(coordinator.control_server.query("certificates", "").data_json)
        }
        assert shown["the silo hospital_a"]["fingerprint"] == rows["this coordinator"]["fingerprint"]
        assert shown["the silo hospital_b"]["fault"] and shown["the silo hospital_a"]["file"] == ""
        listed = json.loads(coordinator.control_server.query("settings", "").data_json)
        settings = {row["key"]: row for row in listed}
        assert settings["coordinator"] == {"key": "coordinator", "value": "main", "origin": "coordinator.yaml:1"}
        assert settings["limits.poll_wait_seconds_max"]["origin"] == "default" and "source" not in settings
        assert "PRIVATE" not in json.dumps([listed, list(shown.values())])
        for name in ("audit", "audit.status", "inbox", "outbox", "logs"):
            assert not coordinator.control_server.query(name, "").error_code, name
        assert coordinator.control_server.query("settings", '{"x": 1}').error_code == "INVALID_INPUT"
