"""`fedsilo demo --leak`: a hostile trainer beside a real guard, and a search of all that crossed for what it knew."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from fedsilo.audit.polls import KINDS
from fedsilo.demo.wire import Canary, make_canaries, search_recordings
from fedsilo.demo.wire_recorder import recordings
from tests.loopback.federation import SHORT, Demo, command, counted, demo, living, records

ATTACKS = {
    "prompt_as_response": ("public.responses", "answers graded again"),
    "prompt_in_tensor_name": ("lora.factors", "tensor set"),
    "extra_tensor": ("lora.factors", "tensor set"),
    "off_grid_number": ("metrics.eval", "metric grid"),
}
ATTACKER = "hospital_c"
SILOS = ["hospital_a", "hospital_b", ATTACKER]
SEED = 2

pytestmark = [pytest.mark.demo, pytest.mark.slow]


@pytest.fixture(scope="module")
def leak(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    options = ("--leak", "--silos", "3", "--rounds", "2", "--seed", str(SEED), *SHORT)
    return demo(tmp_path_factory.mktemp("leak") / "out", *options)


def test_each_attempt_is_denied_by_the_rule_made_for_it_and_recorded(leak: Demo) -> None:
    assert leak.reply.exit_code == 0, leak.reply.stderr
    attacks = {row["name"]: row for row in leak.data["attacks"]}
    assert list(attacks) == list(ATTACKS)
    log = records(leak.out / ATTACKER / "state" / "audit")
    for name, (kind, rule) in ATTACKS.items():
        row = attacks[name]
        assert row["decision"] == "deny" and row["rule"] == rule and rule in row["rules"]
        line = log[row["record"]]
        assert (line["event"], line["kind"], line["decision"]) == ("egress.decision", kind, "deny")
        assert not [later for later in log if later["link"].get("decision") == row["record"]]  # never sent
    assert living(leak.seen) == []


def test_the_coordinator_saw_none_of_it_and_the_rounds_went_on_without_that_silo(leak: Demo) -> None:
    came_in = [
        (line["kind"], line["round"], line["step"])
        for line in records(leak.out / "coordinator" / "state" / "audit")
        if line["event"] == "ingress.decision" and line["peer"].endswith(f"/silo/{ATTACKER}")
    ]
    for row in leak.data["attacks"]:
        assert (row["kind"], row["round"], row["step"]) not in came_in
        assert ("control.declined", row["round"], row["step"]) in came_in
    rounds = [(row["state"], row["participants"]) for row in leak.data["rounds"]]
    assert rounds == [("committed", ["hospital_a", "hospital_b"])] * 2
    # and what the same silo said rightly in between did arrive
    assert any(kind == "public.responses" for kind, _, _ in came_in)


def test_a_failure_that_quotes_private_data_stays_in_the_silos_own_log(leak: Demo) -> None:
    quoted = [
        canary.text
        for canary in make_canaries(SEED, SILOS, tokenizer="digits")
        if canary.silo == ATTACKER and canary.place == "exception"
    ]
    assert quoted[0] in (leak.out / "logs" / f"{ATTACKER}.log").read_text()
    assert quoted[0] not in (leak.out / "logs" / "coordinator.log").read_text()
    last = [line for line in records(leak.out / ATTACKER / "state" / "audit") if line["event"] == "egress.sent"]
    assert "control.error" in {line["kind"] for line in last}


def test_two_hundred_planted_texts_are_not_on_the_wire_and_the_control_is(leak: Demo) -> None:
    data = leak.data
    assert (data["canaries_on_wire"], data["positive_control_found"]) == (0, True)
    assert data["wire"]["canaries"] == 200 and not data["wire"]["found"] and not data["wire"]["unreadable"]
    assert data["wire"]["messages"] == sum(row["messages"] for row in data["left"])
    assert "text screens" in data["not_stopped"]


def test_planted_texts_really_are_where_the_silo_works_on_them(leak: Demo) -> None:
    """What is not there cannot be found on the wire, and would prove nothing."""
    for canary in make_canaries(SEED, SILOS, tokenizer="digits"):
        site = leak.out / canary.silo
        if canary.place == "config":
            texts = [(site / "silo.yaml").read_text(), (site / "policy.yaml").read_text()]
            assert any(canary.text in text for text in texts)
        elif canary.place != "environment":
            (rows,) = site.glob("canary-*/canary-*/*.jsonl")
            assert canary.text in rows.read_text()
    assert leak.data["rows_left_out"]["hospital_a"] == {"broken JSON": 4}


def test_the_same_bytes_with_a_name_changed_into_a_planted_text_are_caught(leak: Demo, tmp_path: Path) -> None:
    """The counterpart: a recording in which the end of the run's name is the id of a private row."""
    planted = make_canaries(SEED, SILOS, tokenizer="digits")
    shutil.copytree(leak.out / "wire", tmp_path / "wire")
    path = next(
        path for path in sorted((tmp_path / "wire").glob("*.up")) if b"spiffe://demo/silo/" in path.read_bytes()
    )
    raw = path.read_bytes()
    control = leak.data["wire"]["control"].encode()
    text = next(canary.text for canary in planted if canary.place == "id").encode()
    assert len(text) <= len(control)
    path.write_bytes(raw.replace(control, text.ljust(len(control), b"."), 1))
    verdict = search_recordings(tmp_path / "wire", planted, [leak.data["wire"]["control"]])
    assert {finding.canary for finding in verdict.found} == {Canary(text.decode(), "hospital_a", "id")}


def test_the_wire_holds_exactly_the_messages_that_the_logs_know(leak: Demo) -> None:
    """Payload by payload: the digest of each tensor payload on the wire is one that the silo's log says was sent."""
    for silo in SILOS:
        crossed = [
            message
            for recording in recordings(leak.out / "wire")
            if recording.upward and recording.silo == silo
            for message in recording.messages
        ]
        sent = [line for line in records(leak.out / silo / "state" / "audit") if line["event"] == "egress.sent"]
        singly = [line for line in sent if line["kind"] not in KINDS]
        assert sorted(
            (message.envelope.kind, len(message.payload)) for message in crossed if message.envelope.kind not in KINDS
        ) == sorted((line["kind"], line["payload"]["bytes"]) for line in singly)
        for kind in KINDS:  # many of which share a record
            polls = [len(message.payload) for message in crossed if message.envelope.kind == kind]
            assert counted(sent, "egress.sent").get(kind, [0, 0]) == [len(polls), sum(polls)]
        digests = {line["payload"]["sha256"] for line in sent if line["kind"] == "lora.factors"}
        assert digests == {
            hashlib.sha256(message.payload).hexdigest()
            for message in crossed
            if message.envelope.kind == "lora.factors"
        }


def test_what_cannot_be_shown_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for options, words in (
        (("--leak", "--rounds", "1"), "2 rounds"),
        (("--leak", "--silos", "2"), "--silos 3"),
        (("--attack", "no_such"), "no attack"),
        (("--leak", "--compare", "public-no-swap"), "--compare"),
        (("--leak", "--exchange", "round_end"), "--exchange step"),
        (("--method", "fedavg-grpo", "--exchange", "round_end"), "has no exchange"),
    ):
        reply = command("fedsilo", "demo", "--no-console", "--out", tmp_path / "out", *options)
        assert reply.exit_code in (2, 8) and words in json.dumps(reply.envelope["error"])
        assert not (tmp_path / "out").exists()
