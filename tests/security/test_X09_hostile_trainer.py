"""X9: every attack that a hostile trainer knows, made against a real guard: what stopped it, what left in its place,
and that this very rule stands in the way. Each stands beside the same kind of message honestly made.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedsilo.demo import attacks as demo_attacks
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from policies.engine import History, decide
from policies.rules import RULES
from silo.trainer.data import TextCodec
from silo.trainer.tasks.public_answers import responses_message
from tests.hostile.attacks import ATTACKS, TRAINER
from tests.hostile.trainer import FORGERIES, read_low_bits
from tests.hostile.verdicts import found_in
from tests.policies import setting
from tests.world import PROMPTS, World, small_factors

ENDING = tuple(attack.name for attack in TRAINER if attack.outcome == "stopped")
WHOLE_RUN = ("one_record",)
TOGETHER = tuple(attack.name for attack in TRAINER if attack.name not in (*ENDING, *WHOLE_RUN))
ROUNDS = 1 + sum(ATTACKS[name].kind == "lora.factors" for name in TOGETHER)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One run in which the trainer makes every attack that the run outlives; its last round is honest."""
    made = World(tmp_path_factory.mktemp("trainer"), trainer_attacks=TOGETHER)
    assert made.run(rounds=ROUNDS) == "finished"
    yield made
    made.close()


def attempt(federation: World, name: str) -> dict[str, Any]:
    (row,) = (row for row in federation.made if row["name"] == name)
    return row


def decided(federation: World, name: str) -> dict[str, Any]:
    """The guard's record of the message that carried an attack."""
    row = attempt(federation, name)
    place = (row["kind"], row["round"], row["step"])
    (record,) = (
        record
        for record in federation.records("egress.decision")
        if (record["kind"], record["round"], record["step"]) == place
    )
    return record


def of(*threats: str, outcome: str = "denied") -> list[str]:
    return [
        attack.name
        for attack in TRAINER
        if set(threats) & set(attack.threats) and attack.outcome == outcome and attack.name in TOGETHER
    ]


def denied_by_its_rule(federation: World, name: str) -> None:
    attack, record, row = ATTACKS[name], decided(federation, name), attempt(federation, name)
    denying = [rule["rule"] for rule in record["rules"] if rule["outcome"] == "deny"]
    assert record["decision"] == "deny" and attack.rule in denying
    # nothing of it left, and the coordinator heard that something was declined, not why
    place = (row["round"], row["step"])
    assert not [1 for envelope, _ in federation.left(attack.kind) if (envelope.round, envelope.step) == place]
    declined = [pb.Declined.FromString(payload) for _, payload in federation.left("control.declined")]
    assert (attack.kind, *place) in [(body.kind, body.round, body.step) for body in declined]
    # the same kind, honestly made, leaves
    assert federation.left(attack.kind)
    # the rule is what stands in the way: alone it denies, and without those that denied nothing does
    facts, history = record["facts"]["final"], History.from_json(record["facts"]["history"])
    policy = federation.loop.policy
    without = [rule for rule in RULES if rule.name not in denying]
    assert decide(facts, policy, history, rules=without).verdict == "allow"
    (made_for_it,) = (rule for rule in RULES if rule.name == attack.rule)
    alone = decide(facts, policy, history, rules=[*without, made_for_it])
    assert (alone.verdict, alone.reasons) == ("deny", (made_for_it.reason,))


def sent_factors(federation: World, name: str) -> codec.Factors:
    number = attempt(federation, name)["round"]
    (payload,) = (payload for envelope, payload in federation.left("lora.factors") if envelope.round == number)
    return codec.decode_factors(payload)


# ---- the list itself ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_X09_every_attack_of_a_trainer_is_known_made_and_came_to_what_the_list_says(together: World) -> None:
    assert set(FORGERIES) == {attack.name for attack in TRAINER}
    assert {row["name"] for row in together.made} == set(TOGETHER)
    lines = list(together.loop.bench.audit.records())
    for name in TOGETHER:
        found = found_in(lines, ATTACKS[name], attempt(together, name))
        assert (found["decision"], found["rule"]) == (ATTACKS[name].decision, ATTACKS[name].rule), name
        if name in demo_attacks.LEAK:  # and the demo reads the same in the log
            shown = demo_attacks.found_in(lines, demo_attacks.LEAK[name], attempt(together, name))
            assert shown == {key: found[key] for key in ("decision", "rule", "rules", "record")}


@pytest.mark.slow
def test_X09_nothing_private_left_in_all_of_it(together: World) -> None:
    crossed = b"\0".join(payload for _, payload in together.channel.sent)
    for prompt in PROMPTS:
        for form in (prompt.encode(), prompt.encode().hex().encode(), prompt[8:20].encode()):
            assert form not in crossed
    assert b"pass_at_1" in crossed  # what may leave is found by the same search


# ---- one threat after the other ----------------------------------------------------------------------


@pytest.mark.parametrize("name", of("T1"))
def test_T01_a_tensor_added_left_out_or_renamed(together: World, name: str) -> None:
    denied_by_its_rule(together, name)


@pytest.mark.parametrize("name", of("T2"))
def test_T02_a_shape_or_a_thousand_names(together: World, name: str) -> None:
    denied_by_its_rule(together, name)


@pytest.mark.parametrize("name", of("T3"))
def test_T03_a_header_that_says_something_else(together: World, name: str) -> None:
    denied_by_its_rule(together, name)


def test_T03_what_stood_in_the_header_is_written_anew(together: World) -> None:
    honest = small_factors()
    factors = sent_factors(together, "header_of_its_own")
    assert (factors.header.schema_sha256, factors.header.rank, factors.header.scale) == (setting.SCHEMA.digest, 2, 2.0)
    assert all(np.array_equal(factors.tensors[name], honest[name]) for name in honest)


@pytest.mark.parametrize("name", of("T4"))
def test_T04_bits_that_a_number_does_not_need(together: World, name: str) -> None:
    denied_by_its_rule(together, name)


def test_T04_signs_of_zero_and_denormals_leave_as_zero(together: World) -> None:
    factors = sent_factors(together, "signs_of_zero")
    assert all(not values.view(np.uint32).any() for values in factors.tensors.values())


def test_T05_low_bits_survive_and_are_as_many_as_the_list_says(together: World) -> None:
    """The documented limit N1: nobody may claim that the rules stop it. Strict rulesets overwrite such bits."""
    factors = sent_factors(together, "low_bits")
    bits = sum(values.size for values in factors.tensors.values())
    assert bits == 20
    assert read_low_bits(factors.tensors, bits // 8) == PROMPTS[0].encode()[: bits // 8]
    # an honest update spells nothing
    last = codec.decode_factors(together.left("lora.factors")[-1][1])
    assert read_low_bits(last.tensors, 2) != PROMPTS[0].encode()[:2]


def test_T07_an_update_of_a_million_times_the_size_is_clipped(together: World) -> None:
    record, factors = decided(together, "norm_blow_up"), sent_factors(together, "norm_blow_up")
    squares = sum(
        float(np.dot(v.reshape(-1).astype(float), v.reshape(-1).astype(float))) for v in factors.tensors.values()
    )
    block = together.loop.policy.file.egress.lora_factors
    assert block is not None and squares**0.5 <= block.max_l2 < 1.0 < record["facts"]["transform"]["l2_before"]
    assert record["facts"]["transform"]["clipped"] is True


def test_T07_an_update_of_one_record_stays_here(tmp_path: Path) -> None:
    federation = World(tmp_path, trainer_attacks=["one_record"])
    assert federation.run(rounds=1) == "failed"  # the other silo's update alone is no round's result (T58)
    record = decided(federation, "one_record")
    denying = {rule["rule"] for rule in record["rules"] if rule["outcome"] == "deny"}
    assert record["decision"] == "deny" and "records of the round" in denying
    assert not federation.left("lora.factors")
    federation.close()


@pytest.mark.parametrize("name", of("T9"))
def test_T09_numbers_names_and_orders_that_are_free_to_say_something(together: World, name: str) -> None:
    denied_by_its_rule(together, name)


def test_T11_a_burst_of_progress_leaves_as_a_few_messages_that_say_what_the_guard_knows(together: World) -> None:
    row = attempt(together, "burst_of_progress")
    place = (row["round"], row["step"])
    said = [pb.Progress.FromString(payload) for envelope, payload in together.left("control.progress")]
    of_step = [body for body in said if (body.round, body.step) == place]
    # one a second at most, and the bench's clock goes on by a tenth of a second with each of 150 messages
    assert 1 <= len(of_step) <= 32
    assert all(1 <= body.round <= ROUNDS and 0 <= body.step <= 4 for body in said)


@pytest.mark.parametrize("name", of("T12"))
def test_T12_answers_to_prompts_that_nobody_asked_for(together: World, name: str) -> None:
    denied_by_its_rule(together, name)


@pytest.mark.parametrize("name", of("T14", "T16", "T17"))
def test_T14_T16_T17_private_text_in_an_answer(together: World, name: str) -> None:
    denied_by_its_rule(together, name)


def test_T17_another_spelling_in_tokens_makes_the_same_bytes() -> None:
    """Ids that no tokenizer would choose for a text carry nothing: what leaves is the text."""
    spelled = {10: "1", 11: "2", 12: "12"}

    class Tokenizer:
        eos_token_id, all_special_ids, chat_template = 0, [0], None

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(spelled.get(token, "") for token in ids)

    codec_of_text = TextCodec(Tokenizer())

    def message(ids: tuple[int, ...]) -> bytes:
        answer: Any = SimpleNamespace(text=codec_of_text.text_of(ids), finished=True, correct=True)
        own: Any = {1: SimpleNamespace(answers=(answer,))}
        return codec.encode(responses_message("0" * 64, [1], own, "correct"))

    assert message((12, 0)) == message((10, 11, 0)) != message((11, 10, 0))


@pytest.mark.quick(keep=3)
@pytest.mark.parametrize("name", ENDING)
def test_T02_T03_T08_T11_T17_what_is_no_message_ends_the_trainer(tmp_path: Path, name: str) -> None:
    """Recorded, told to nobody but as a code from the closed list, and the round goes on without this silo."""
    federation = World(tmp_path, trainer_attacks=[name])
    federation.run(rounds=1)
    attack = ATTACKS[name]
    assert federation.failed == attack.rule and [row["name"] for row in federation.made] == [name]
    (record,) = (row for row in federation.records("egress.decision") if row["reasons"] == [attack.rule])
    assert record["decision"] == "deny"
    (error,) = (pb.ErrorReport.FromString(payload) for _, payload in federation.left("control.error"))
    assert error.code == "INTERNAL"
    leaving = [pb.Abstain.FromString(payload) for envelope, payload in federation.left("control.abstain")]
    assert [(body.round, body.step) for body in leaving] == [(0, 0)]
    crossed = b"\0".join(payload for _, payload in federation.channel.sent)
    assert not any(prompt.encode() in crossed for prompt in PROMPTS)
    sent = [payload for _, payload in federation.left(attack.kind)] if attack.kind == "lora.factors" else []
    assert len(sent) == (name == "second_update")  # the first of two was an honest one
    federation.close()


def test_an_honest_trainer_ends_nothing(tmp_path: Path) -> None:
    """The counterpart of all of the above: the same federation without an attack."""
    federation = World(tmp_path)
    assert federation.run(rounds=1) == "finished" and not federation.failed and not federation.made
    assert not [row for row in federation.records("egress.decision") if row["decision"] != "allow"]
    assert not [row for row in federation.records() if row["decision"] != "allow"]
    assert [envelope.round for envelope, _ in federation.left("lora.factors")] == [1]
    federation.close()
