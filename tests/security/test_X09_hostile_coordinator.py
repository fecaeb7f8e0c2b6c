"""X9: every attack that a hostile coordinator knows, made on a real guard by a real coordinator with its own keys: what
refused it, that nothing was generated, trained or sent for it, and that the rule named is what stands in the way. Each
stands beside the same kind of message as an honest coordinator says it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from policies.engine import History, decide
from policies.rules import RULES
from silo.guard import gate
from silo.guard.ledger import Ledger
from tests.hostile.attacks import ATTACKS, COORDINATOR
from tests.hostile.deviations import DEVIATIONS, ESCAPES, TEXT
from tests.hostile.verdicts import found_in, rounds_needed
from tests.world import ANSWER, LastToBeReady, World

PLANS = tuple(name for name, deviation in DEVIATIONS.items() if deviation.stage == 0)
# Two silos with two adapters cannot end a round together: this one has a run of its own.
APART = "adapter_of_one_silo"
IN_A_RUN = tuple(name for name in DEVIATIONS if name not in (*PLANS, APART))
ROUNDS = 4 + sum(DEVIATIONS[name].stage == 2 for name in IN_A_RUN)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A run for each plan, and one long one for everything else; its last round is honest."""
    federation = World(tmp_path_factory.mktemp("coordinator"), (*PLANS, *IN_A_RUN))
    for number, _ in enumerate(PLANS):
        assert federation.run(f"plan-{number}", quorum=2) == "failed"
    assert federation.run("run-1", rounds=ROUNDS) == "finished"
    yield federation
    federation.close()


def attempt(federation: World, name: str) -> dict[str, Any]:
    (row,) = (row for row in federation.made if row["name"] == name)
    return row


def decided(federation: World, name: str) -> dict[str, Any]:
    """The guard's record of the message that carried an attack."""
    row = attempt(federation, name)
    (record,) = (
        record
        for record in federation.records()
        if (record["kind"], record.get("sequence")) == (row["kind"], row["sequence"])
    )
    return record


def of(threat: str, outcome: str = "denied") -> list[str]:
    return [
        attack.name
        for attack in COORDINATOR
        if threat in attack.threats and attack.outcome == outcome and attack.name != APART
    ]


def content(federation: World, run: str, number: int | None = None) -> list[str]:
    """Kinds of what hospital_a gave to a run, or to one round of it."""
    return [
        envelope.kind
        for envelope, _ in federation.channel.sent
        if envelope.run == run and number in (None, envelope.round) and not envelope.kind.startswith("control.")
    ]


def denied_by_its_rule(federation: World, name: str) -> None:
    attack, record = ATTACKS[name], decided(federation, name)
    denying = [rule["rule"] for rule in record["rules"] if rule["outcome"] == "deny"]
    assert record["decision"] == "deny" and attack.rule in denying
    # the same kind, as the honest coordinator says it, is let in
    assert [row for row in federation.records() if row["kind"] == record["kind"] and row["decision"] == "allow"]
    # the rule is what stands in the way: alone it denies, and without those that denied nothing does
    facts, history = record["facts"]["final"], History.from_json(record["facts"]["history"])
    without = [rule for rule in RULES if rule.name not in denying]
    assert decide(facts, federation.loop.policy, history, rules=without).verdict == "allow"
    (made_for_it,) = (rule for rule in RULES if rule.name == attack.rule)
    alone = decide(facts, federation.loop.policy, history, rules=[*without, made_for_it])
    assert (alone.verdict, alone.reasons) == ("deny", (made_for_it.reason,))


@pytest.mark.slow
def test_X09_every_attack_of_a_coordinator_is_known_made_and_came_to_what_the_list_says(attacked: World) -> None:
    assert set(DEVIATIONS) == {attack.name for attack in COORDINATOR}
    assert sorted(row["name"] for row in attacked.made) == sorted((*PLANS, *IN_A_RUN))
    lines = list(attacked.loop.bench.audit.records())
    for name in (*PLANS, *IN_A_RUN):
        found, attack = found_in(lines, ATTACKS[name], attempt(attacked, name)), ATTACKS[name]
        assert (found["decision"], found["rule"], found["obeyed"]) == (attack.decision, attack.rule, 0), name


@pytest.mark.slow
def test_X09_every_attack_is_made_on_a_silo_that_is_never_told_to_wait(
    tmp_path: Path, sampled: Callable[[Sequence[str], int], list[str]]
) -> None:
    """No poll of it within a round is answered with nothing, and the rounds are as many as the demo takes."""
    names = sampled(IN_A_RUN, 8)
    federation = LastToBeReady(tmp_path, names)
    rounds = rounds_needed([ATTACKS[name] for name in names], public_steps=2)
    assert federation.run(rounds=rounds) == "finished"
    assert sorted(row["name"] for row in federation.made) == sorted(names)
    lines = list(federation.loop.bench.audit.records())
    for name in names:
        found, attack = found_in(lines, ATTACKS[name], attempt(federation, name)), ATTACKS[name]
        assert (found["decision"], found["rule"], found["obeyed"]) == (attack.decision, attack.rule, 0), name
    # each message in whose place one of them came has come after it
    results = [row["round"] for row in federation.records() if row["kind"] == "round.result"]
    assert list(dict.fromkeys(results)) == list(range(1, rounds + 1))
    given = [m.fields for m in federation.trainer.told if m.fields.get("task") == "PublicStep"]
    asked = [m.fields for m in federation.trainer.told if m.fields.get("task") == "GeneratePublic"]
    assert [(row["round"], row["step"]) for row in given] == [(row["round"], row["step"]) for row in asked]
    federation.close()


def test_X09_an_honest_coordinator_is_refused_nothing(tmp_path: Path) -> None:
    federation = World(tmp_path)
    assert federation.run(rounds=1) == "finished" and not federation.made
    assert not [row for row in federation.records() if row["decision"] != "allow"]
    federation.close()


def test_X09_the_honest_coordinator_has_no_key_that_makes_it_hostile() -> None:
    from coordinator.config import CoordinatorConfig

    named = CoordinatorConfig.model_json_schema()
    assert not [word for word in ("replies", "attack", "hostile", "deviation") if word in str(named).lower()]


# ---- plans -------------------------------------------------------------------------------------------


def nothing_was_done_for_its_run(federation: World, name: str) -> None:
    run = attempt(federation, name)["run"]
    assert content(federation, run) == []
    said = [pb.Abstain.FromString(raw) for envelope, raw in federation.left("control.abstain") if envelope.run == run]
    assert [(body.round, body.step) for body in said] == [(0, 0)]
    assert federation.loop.bench.ledger.run_state(run) == "declined"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PLANS if "T12" in ATTACKS[name].threats])
def test_T12_a_plan_with_another_public_set_or_with_text(attacked: World, name: str) -> None:
    denied_by_its_rule(attacked, name) if name == "wrong_public_set" else unreadable(attacked, name)
    nothing_was_done_for_its_run(attacked, name)


def unreadable(federation: World, name: str) -> None:
    """No facts can be taken of it at all, and its words are in no record."""
    record = decided(federation, name)
    assert (record["decision"], record["reasons"][0]) == ("deny", "NOT_MEASURED")
    assert TEXT not in str(record) and "patient-17" not in str(record)


@pytest.mark.parametrize("name", [name for name in PLANS if "T13" in ATTACKS[name].threats])
def test_T13_each_generation_field_out_of_range(attacked: World, name: str) -> None:
    denied_by_its_rule(attacked, name)
    nothing_was_done_for_its_run(attacked, name)


@pytest.mark.parametrize("name", [name for name in PLANS if {"T19", "T48"} & set(ATTACKS[name].threats)])
def test_T19_T48_steps_rates_subsets_and_strangers(attacked: World, name: str) -> None:
    unreadable(attacked, name) if name == "subset_plan" else denied_by_its_rule(attacked, name)
    nothing_was_done_for_its_run(attacked, name)


def test_T13_a_plan_changed_within_its_ranges_in_the_middle_of_its_run_changes_nothing(attacked: World) -> None:
    denied_by_its_rule(attacked, "plan_changed")
    plans = [message for message in attacked.trainer.told if message.type == "plan"]
    assert len(plans) == 1 and '"temperature":0.7' in plans[0].fields["canonical_json"]
    # and it is not taken for a reason to leave: the run that was accepted goes on
    assert len(content(attacked, "run-1")) > ROUNDS


# ---- prompts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unknown_prompt_index", "same_prompt_twice", "too_many_prompts", "unplanned_step"])
def test_T12_T18_prompts_that_no_round_may_ask(attacked: World, name: str) -> None:
    denied_by_its_rule(attacked, name)
    number = attempt(attacked, name)["round"]
    assert content(attacked, "run-1", number) == []
    tasks = [message.fields for message in attacked.trainer.told if message.type == "task"]
    assert not [task for task in tasks if task["round"] == number]
    said = [pb.Abstain.FromString(raw).round for _, raw in attacked.left("control.abstain")]
    assert number in said


def test_T18_the_open_round_again_with_other_prompts(attacked: World) -> None:
    denied_by_its_rule(attacked, "round_opened_again")
    generated = [
        (message.fields["round"], message.fields["step"])
        for message in attacked.trainer.told
        if message.fields.get("task") == "GeneratePublic"
    ]
    assert len(generated) == len(set(generated))  # no step was answered twice


def test_T18_the_same_prompts_in_every_round_survive_within_the_budgets(attacked: World) -> None:
    """The documented limit: a row of the public set may be asked again in a later round. Texts of the coordinator's own
    stay impossible, and how much is answered in a round and a run is bounded by the policy."""
    record, number = decided(attacked, "same_prompts_each_round"), attempt(attacked, "same_prompts_each_round")["round"]
    assert record["decision"] == "allow" and number > 1
    asked = {
        message.fields["round"]: message.fields["prompt_indices"]
        for message in attacked.trainer.told
        if message.fields.get("task") == "GeneratePublic" and message.fields["step"] == 2
    }
    assert asked[number] == asked[1]


@pytest.mark.parametrize("name", of("T3", "refused"))
def test_T12_T03_text_where_no_text_belongs_is_not_even_parsed(tmp_path: Path, name: str) -> None:
    federation = World(tmp_path, [name])
    assert federation.run(rounds=1) == "finished"
    (record,) = (row for row in federation.records() if row["decision"] != "allow")
    assert record["reasons"] == ["UNKNOWN_FIELD"] and record["kind"] == attempt(federation, name)["kind"]
    assert TEXT not in str(record)
    assert "lora.factors" in content(federation, "run-1", 1)  # what it stood beside came again without it
    federation.close()


def test_T12_T37_escapes_in_a_refusal(attacked: World) -> None:
    denied_by_its_rule(attacked, "text_in_refusal")
    assert ESCAPES[0] not in str(decided(attacked, "text_in_refusal"))


# ---- envelopes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", of("T29", "refused"))
def test_T29_T30_a_reply_that_is_not_this_one_of_this_coordinator(attacked: World, name: str) -> None:
    rule = ATTACKS[name].rule
    refused = [row["kind"] for row in attacked.records() if (row["decision"], row["reasons"]) == ("deny", [rule])]
    expected = [attempt(attacked, other)["kind"] for other in IN_A_RUN if ATTACKS[other].rule == rule]
    assert sorted(refused) == sorted(expected)


@pytest.mark.parametrize("name", ["other_federation", "wrong_key", "other_payload"])
def test_T29_T30_without_the_check_of_the_envelope_it_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(gate, "check_answer", lambda *_, **__: None)
    without_a_control(tmp_path, name)


def test_T30_without_the_check_of_the_envelope_a_rule_still_knows_the_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "check_answer", lambda *_, **__: None)
    federation = World(tmp_path, ["other_sender"])
    federation.run(rounds=1)
    (record,) = (row for row in federation.records() if row["decision"] == "deny")
    assert "SENDER" in record["reasons"]
    federation.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replayed_reply", "reordered_replies"])
def test_T29_without_the_sequence_it_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Ledger, "accept_sequence", lambda *_, **__: None)
    without_a_control(tmp_path, name)


def without_a_control(folder: Path, name: str) -> None:
    federation = World(folder, [name])
    federation.run(rounds=1)
    assert [row["name"] for row in federation.made] == [name]
    assert not [row for row in federation.records() if row["decision"] == "deny"]
    federation.close()


@pytest.mark.parametrize("name", ["other_run", "donors_of_another_round"])
def test_T29_a_message_of_another_run_or_round(attacked: World, name: str) -> None:
    denied_by_its_rule(attacked, name)


# ---- donors ------------------------------------------------------------------------------------------


def donors_given(federation: World, name: str) -> pb.PublicDonors | None:
    """What the trainer was given to train on in the step that an attack was made on."""
    row = attempt(federation, name)
    (body,) = (
        message.body
        for message in federation.trainer.told
        if message.fields.get("task") == "PublicStep"
        and (message.fields["round"], message.fields["step"]) == (row["round"], row["step"])
    )
    return codec.decode(pb.PublicDonors, body)


@pytest.mark.parametrize("name", of("T21", "dropped"))
def test_T21_T37_wrong_answers_and_escapes_are_dropped_and_counted(attacked: World, name: str) -> None:
    dropped = decided(attacked, name)["facts"]["transform"]["donors_dropped"]
    assert list(dropped) == ["hospital_b"] and dropped["hospital_b"] > 0
    given = donors_given(attacked, name)
    assert given is not None and not [donor for row in given.prompts for donor in row.donors]


@pytest.mark.parametrize("name", of("T21"))
def test_T21_donors_that_no_policy_lets_in(attacked: World, name: str) -> None:
    record = decided(attacked, name)
    if name != "too_many_donors":  # its surplus was dropped before, since one peer may not give so much
        denied_by_its_rule(attacked, name)
    assert record["decision"] == "deny" and TEXT not in str(record)
    given = donors_given(attacked, name)
    assert given is not None and not given.prompts  # the step went on with own answers


def test_T21_right_donors_of_a_peer_are_trained_on(attacked: World) -> None:
    """The counterpart: in a step that was not attacked."""
    bodies = [
        codec.decode(pb.PublicDonors, message.body)
        for message in attacked.trainer.told
        if message.fields.get("task") == "PublicStep"
    ]
    texts = {donor.response.text for body in bodies for row in body.prompts for donor in row.donors}
    assert texts == {ANSWER}


# ---- adapters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adapter_beside_transcript", "transcript_unsigned"])
def test_T20_an_adapter_that_is_not_in_the_transcript_of_the_round(attacked: World, name: str) -> None:
    rule, number = ATTACKS[name].rule, attempt(attacked, name)["round"]
    (record,) = (row for row in attacked.records() if row["reasons"] == [rule])
    assert (record["decision"], record["kind"], record["round"]) == ("deny", "round.open", number)
    assert content(attacked, "run-1", number) == []
    loaded = [m.fields["round"] for m in attacked.trainer.told if m.fields.get("task") == "LoadAdapter"]
    assert number not in loaded
    said = [pb.Abstain.FromString(raw).round for _, raw in attacked.left("control.abstain")]
    assert number in said


def test_T20_bytes_that_the_round_does_not_name_are_not_loaded(attacked: World) -> None:
    (record,) = (
        row for row in attacked.records() if row["reasons"] == ["DIGEST_MISMATCH"] and row["kind"] == "global.adapter"
    )
    assert record["decision"] == "deny" and len(record["payload"]["sha256"]) == 64
    named = {m.fields["digest"] for m in attacked.trainer.told if m.fields.get("digest")}
    assert record["payload"]["sha256"] not in named


@pytest.mark.slow
def test_T20_another_adapter_for_one_silo_trains_neither(tmp_path: Path) -> None:
    """Each silo signs what it is shown; neither can be given the other's signature under it, so neither trains."""
    federation = World(tmp_path, [APART])
    assert federation.run(rounds=1, round_deadline_seconds=8.0) == "failed"
    assert attempt(federation, APART)["round"] == 1
    assert [(row["kind"], row["reasons"]) for row in federation.records() if row["decision"] == "deny"] == [
        ("round.agreed", ["TOO_FEW_SIGNATURES"]),
        ("round.result", ["TRANSCRIPT_DIFFERS"]),  # the end of what the others were shown
    ]
    shown = {row["detail"]["sha256"] for row in federation.records("round.transcript")}
    stated = {row["detail"]["sha256"] for row in federation.house.audit.records() if row["event"] == "round.transcript"}
    assert len(shown) == len(stated) == 1 and shown != stated
    assert content(federation, "run-1") == []
    assert not [message for message in federation.trainer.told if message.type == "task"]
    taken = [line for line in federation.house.audit.records() if line.get("kind") in ("lora.factors", "metrics.eval")]
    assert taken == []
    # the counterpart: told the same, both sign, and both train
    honest = World(tmp_path / "honest")
    assert honest.run(rounds=1) == "finished"
    givers = {line["peer"] for line in honest.house.audit.records() if line.get("kind") == "lora.factors"}
    assert len(givers) == 2 and [len(row["detail"]["signatures"]) for row in honest.records("round.agreed")] == [2]
    honest.close()
    federation.close()


@pytest.mark.slow
def test_T20_another_adapter_for_one_silo_comes_in_a_run_of_its_own_after_the_others(tmp_path: Path) -> None:
    federation = World(tmp_path, ["wrong_key", APART])
    assert federation.run("run-1", rounds=2) == "finished"
    assert [row["name"] for row in federation.made] == ["wrong_key"]
    assert federation.run("run-2", rounds=1, round_deadline_seconds=8.0) == "failed"
    assert attempt(federation, APART)["run"] == "run-2"
    federation.close()
