"""The hostile parties of demo and tests by themselves, and how their attempts are judged: none counts that was not
made, or came to something else than the list of attacks says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsilo.cli.demo import report
from fedsilo.demo import attacks as demo_attacks
from fedsilo.demo.attacks import LEAK, check_attacks
from fedsilo.demo.run import _worse
from fedsilo.grading import grade
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError, UsageError, VerificationError
from policies.capacity import PROGRESS_SECONDS
from policies.rules import RULES
from silo.link import LinkMessage
from tests.hostile import trainer
from tests.hostile.attacks import ATTACKS, COORDINATOR, TRAINER, named
from tests.hostile.trainer import HostileLink
from tests.hostile.verdicts import phases, rounds_needed

KINDS = {"lora.factors", "public.responses", "metrics.eval"}
TENSORS = {"a.lora_A": np.ones((2, 3), np.float32), "a.lora_B": np.zeros((3, 2), np.float32)}


class Wire:
    """The guard's end."""

    def __init__(self, *told: LinkMessage) -> None:
        self.told = list(told)
        self.heard: list[LinkMessage] = []

    def receive(self) -> LinkMessage:
        return self.told.pop(0)

    def send(self, message: LinkMessage) -> None:
        self.heard.append(message)


def hostile(wire: Wire, *attacks: str, crash: str = "") -> tuple[HostileLink, list[dict[str, Any]]]:
    made: list[dict[str, Any]] = []
    link = HostileLink(wire, attacks or tuple(LEAK), made.append, crash=crash)  # type: ignore[arg-type]
    link.prompts = ["a private prompt"]
    return link, made


def responses(prompts: int) -> bytes:
    return codec.encode(pb.PublicResponses(prompts=[pb.PromptResponses(prompt_index=row) for row in range(prompts)]))


def factors() -> bytes:
    return codec.encode_factors(
        TENSORS, base_digest="ab" * 32, schema_sha256="cd" * 32, rank=2, scale=2.0, dtype="float32"
    )


def done(task: str, body: bytes, *, round_number: int = 1, step: int = 0) -> LinkMessage:
    return LinkMessage("done", {"task": task, "round": round_number, "step": step}, body)


def test_each_attack_speaks_through_the_message_it_is_made_for_and_once() -> None:
    wire = Wire()
    link, made = hostile(wire)
    evaluation = codec.encode(pb.MetricsEval(split="held_out", metrics=[pb.Metric(name="pass_at_1", value=0.25)]))
    link.send(done("Evaluate", evaluation, round_number=0))  # the base model's: nothing yet
    link.send(done("PrivateStep", b"", step=1))
    link.send(done("GeneratePublic", responses(2), step=2))
    link.send(done("GeneratePublic", responses(2), step=4))
    link.send(done("ExportDelta", factors()))
    link.send(done("Evaluate", evaluation))
    link.send(done("ExportDelta", factors(), round_number=2))
    link.send(done("ExportDelta", factors(), round_number=3))
    assert [(row["name"], row["round"], row["step"]) for row in made] == [
        ("prompt_as_response", 1, 2), ("prompt_in_tensor_name", 1, 0), ("off_grid_number", 1, 0),
        ("extra_tensor", 2, 0),
    ]  # fmt: skip
    bodies = [message.body for message in wire.heard]
    assert bodies[0] == evaluation and bodies[3] == responses(2) and bodies[7] == factors()
    (first, second) = codec.decode(pb.PublicResponses, bodies[2]).prompts
    assert [response.text for response in first.responses] == ["a private prompt"] and not second.responses
    assert "a private prompt" in codec.decode_factors(bodies[4]).tensors
    assert 0 < codec.decode(pb.MetricsEval, bodies[5]).metrics[0].value - 0.25 < 1e-4  # between two points of its grid
    extra = codec.decode_factors(bodies[6]).tensors
    (name,) = set(extra) - set(TENSORS)
    assert extra[name].tobytes().startswith(b"a private prompt")


def test_what_cannot_carry_an_attack_is_no_attempt() -> None:
    wire = Wire()
    link, made = hostile(wire, "prompt_as_response")
    link.send(done("GeneratePublic", responses(0), step=2))  # a step without prompts
    assert made == [] and wire.heard[0].body == responses(0)
    link.send(done("GeneratePublic", responses(1), step=4))
    assert [row["step"] for row in made] == [4]


def test_hidden_characters_leave_an_answer_short_enough_to_be_graded() -> None:
    link, _ = hostile(wire := Wire(), "hidden_characters")
    rows = [pb.PromptResponses(prompt_index=1, responses=[pb.Response(text="4 2 1"), pb.Response(text="4 2 1")])]
    link.send(done("GeneratePublic", codec.encode(pb.PublicResponses(prompts=rows)), step=2))
    texts = [each.text for each in codec.decode(pb.PublicResponses, wire.heard[0].body).prompts[0].responses]
    # the demo's policy lets an answer have 96 bytes
    assert all(text.startswith("4 2 1") and len(text.encode()) <= 96 for text in texts)
    bits = ["".join(str(int(mark == "\u200c")) for mark in text[5:]) for text in texts]
    assert [int(byte, 2) for byte in bits] == list(b"a ")  # the prompt begins "a private"
    assert not grade("exact", texts[0], "4 2 1").correct and grade("exact", "4 2 1", "4 2 1").correct


def test_a_burst_lasts_until_the_guard_speaks_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(trainer, "pause", pauses.append)
    link, made = hostile(wire := Wire(), "burst_of_progress")
    link.send(done("PrivateStep", b"", step=1))
    assert sum(pauses) > PROGRESS_SECONDS and sum(pauses) < 2 * PROGRESS_SECONDS
    assert [message.type for message in wire.heard] == [*["step"] * len(pauses), "done"] and len(pauses) > 100
    assert [(row["round"], row["step"]) for row in made] == [(1, 1)]


def test_an_attempt_is_told_after_it_was_made() -> None:
    class Broken(Wire):
        def send(self, message: LinkMessage) -> None:
            raise OperationError("the link is closed")

    link, made = hostile(Broken(), "prompt_as_response")
    with pytest.raises(OperationError):
        link.send(done("GeneratePublic", responses(1), step=2))
    assert made == []


def test_the_failure_comes_in_place_of_the_last_evaluation() -> None:
    plan = LinkMessage("plan", {"canonical_json": '{"run": "run-1", "rounds": 2}'})
    tasks = [LinkMessage("task", {"task": "Evaluate", "round": number}) for number in (0, 1, 2)]
    stop = LinkMessage("stop")
    wire = Wire(plan, *tasks, stop)
    link, _ = hostile(wire, crash="canary-1")
    assert [link.receive() for _ in range(4)] == [plan, tasks[0], tasks[1], stop]
    assert [(message.type, message.fields["message"]) for message in wire.heard] == [("failed", "canary-1")]


# ---- the list ----------------------------------------------------------------------------------------


def test_the_rules_that_count_are_rules() -> None:
    rules = {rule.name for rule in RULES}
    assert {attack.rule for attack in ATTACKS.values() if attack.outcome in ("denied", "dropped", "clipped")} <= rules


def test_the_demos_attacks_are_asked_for_by_name_and_are_the_same_four() -> None:
    asked = demo_attacks.named(["extra_tensor", "prompt_as_response", "extra_tensor"])
    assert [attack.name for attack in asked] == ["prompt_as_response", "extra_tensor"] and demo_attacks.named([]) == ()
    for name in ("no_such", "wrong_key", "all-trainer"):
        with pytest.raises(UsageError, match="no attack") as refused:
            demo_attacks.named([name])
        assert all(known in refused.value.hint for known in LEAK)
    first = [(attack.name, attack.kind, attack.outcome, attack.rule) for attack in TRAINER[: len(LEAK)]]
    assert first == [(attack.name, attack.kind, "denied", attack.rule) for attack in LEAK.values()]


def test_a_changed_plan_has_a_run_of_its_own() -> None:
    of_coordinator = phases(named("wrong_key", "other_template", "plan_changed"))
    assert [(phase.attacks, phase.is_main) for phase in of_coordinator] == [
        (("other_template",), False), (("plan_changed", "wrong_key"), True),
    ]  # fmt: skip


def test_each_round_and_each_step_carries_one() -> None:
    assert demo_attacks.rounds_needed(tuple(LEAK.values()), public_steps=10) == 2
    assert demo_attacks.rounds_needed((LEAK["prompt_as_response"],), public_steps=2) == 1
    # 9 take a round each, and one leaves its round; 6 are made in donors, 12 in place of donors or of a round's result
    assert rounds_needed(COORDINATOR, public_steps=2) == 2 + 9 + 1 + 6 // 2 + 12 // 3
    assert rounds_needed(COORDINATOR, public_steps=10) == 2 + 9 + 1 + 2
    assert rounds_needed(named("wrong_key", "other_run"), public_steps=0) == 2 + 2  # a result in each round


# ---- judging -----------------------------------------------------------------------------------------


def row(name: str, decision: str = "deny", rule: str = "") -> dict[str, Any]:
    rule = rule or LEAK[name].rule
    return {
        "name": name, "decision": decision, "rule": rule, "rules": [rule], "round": 1, "step": 0, "record": 3,
        "run": "run-1", "silo": "b",
    }  # fmt: skip


def test_of_the_demo_only_a_denial_by_the_rule_made_for_it_counts() -> None:
    good = [row(name) for name in LEAK]
    assert demo_attacks.fault(good, []) == ("", "")
    for place, name in enumerate(LEAK):
        for worse, code in (
            (row(name, "not made"), "NOT_SHOWN"), (row(name, "none"), "NOT_SHOWN"), (row(name, "allow"), "LEAKED"),
            (row(name, "hold"), "LEAKED"), (row(name, rule="messages per minute"), "NOT_SHOWN"),
        ):  # fmt: skip
            found, why = demo_attacks.fault([*good[:place], worse, *good[place + 1 :]], [])
            assert found == code and name in why
        assert demo_attacks.fault(good, [name]) == ("LEAKED", f"{name} was not stopped by the guard")


@pytest.mark.parametrize(
    ("attacks", "changes", "words"),
    [
        (tuple(LEAK), {"rounds": 1}, "2 rounds"),
        (("off_grid_number",), {"rounds": 1}, "2 rounds"),
        (("extra_tensor",), {"silos": 2}, "two others"),
        (("prompt_as_response",), {"method": "fedavg-grpo", "kinds": {"lora.factors"}}, "public.responses"),
    ],
)
def test_a_run_that_could_not_show_it_is_refused(attacks: tuple[str, ...], changes: dict[str, Any], words: str) -> None:
    shape: dict[str, Any] = {"rounds": 4, "silos": 3, "method": "pubswap", "kinds": KINDS, "public_steps": 10}
    check_attacks(demo_attacks.named(attacks), **shape)  # the counterpart
    with pytest.raises(UsageError, match=words):
        check_attacks(demo_attacks.named(attacks), **shape | changes)


def test_what_got_out_comes_before_a_log_that_does_not_verify_and_that_before_the_rest() -> None:
    leaked, broken, other = OperationError("x", code="LEAKED"), VerificationError("y"), OperationError("z")
    assert _worse(broken, other) is broken and _worse(other, broken) is broken
    assert _worse(broken, leaked) is leaked and _worse(None, other) is other and _worse(None, None) is None


def test_the_report_says_only_what_was_seen() -> None:
    wire: dict[str, Any] = {"messages": 1, "bytes": 1, "canaries": 200, "forms": ["raw"], "found": [], "unreadable": ""}
    rate = {"before": 0.1, "after": 0.2}
    data: dict[str, Any] = {
        "method": "pubswap", "rounds": [{"round": 1, "participants": ["a"]}, {"round": 2, "participants": []}],
        "pass_at_1": rate, "pass_at_1_greedy": rate, "per_silo": {}, "per_topic": {}, "rows_left_out": {}, "left": [],
        "audit": [], "donors_trained": {"a": 0, "b": 0}, "attacks": [row("extra_tensor")], "attacker": "b",
        "not_stopped": "", "wire": wire, "canaries_on_wire": 0, "positive_control_found": True, "adapter": "",
        "base_model": "", "run_record": "", "isolation": {}, "processes": 1, "seconds": 1.0,
    }  # fmt: skip
    text = report(data)
    assert "sent none of it" in text and "0 found" in text and "b had no part in round 1\n" in text
    assert "a had no part" not in text
    data["attacks"] = [row("extra_tensor", "allow")]
    data["wire"] = wire | {"unreadable": "a message on the wire is compressed"}
    text = report(data)
    assert "sent none of it" not in text and "ALLOW" in text
    assert "NOT SEARCHED" in text and "0 found" not in text
