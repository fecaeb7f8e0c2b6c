"""The hostile trainer by itself, and how its attempts are judged: none counts that was not made, or was denied by
another rule than the one made for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsilo.launch.demo_leak import check_attacks, fault
from fedsilo.launch.demo_report import report
from fedsilo.launch.demo_result import _worse
from fedsilo.launch.leaking_trainer import ATTACKS, HostileLink
from fedsilo.treaty.errors import OperationError, UsageError, VerificationError
from fedsilo.treaty.wire import codec
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from policies.rules import RULES
from silo.link import LinkMessage

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
    link = HostileLink(wire, attacks or tuple(ATTACKS), made.append, crash=crash)  # type: ignore[arg-type]
    link._prompts = ["a private prompt"]
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


def test_an_attempt_is_told_after_it_was_made() -> None:
    class Broken(Wire):
        def send(self, message: LinkMessage) -> None:
            raise OperationError("the link is closed")

    link, made = hostile(Broken(), "prompt_as_response")
    with pytest.raises(OperationError):
        link.send(done("GeneratePublic", responses(1), step=2))
    assert made == []


def test_the_failure_comes_in_place_of_the_last_evaluation() -> None:
    plan = LinkMessage("plan", {"canonical_json": '{"rounds": 2}'})
    tasks = [LinkMessage("task", {"task": "Evaluate", "round": number}) for number in (0, 1, 2)]
    stop = LinkMessage("stop")
    wire = Wire(plan, *tasks, stop)
    link, _ = hostile(wire, crash="canary-1")
    assert [link.receive() for _ in range(4)] == [plan, tasks[0], tasks[1], stop]
    assert [(message.type, message.fields["message"]) for message in wire.heard] == [("failed", "canary-1")]


# ---- judging -----------------------------------------------------------------------------------------


def row(name: str, decision: str = "deny", rule: str = "") -> dict[str, Any]:
    rule = rule or ATTACKS[name].rule
    return {"name": name, "decision": decision, "rule": rule, "rules": [rule], "round": 1, "step": 0, "record": 3}


def test_the_rules_that_count_are_rules() -> None:
    assert {attack.rule for attack in ATTACKS.values()} <= {rule.name for rule in RULES}


def test_only_a_denial_by_the_rule_made_for_it_counts() -> None:
    good = [row(name) for name in ATTACKS]
    assert fault(good, []) == ("", "")
    for worse, code in (
        (row("extra_tensor", "allow"), "LEAKED"),
        (row("extra_tensor", "hold"), "LEAKED"),
        (row("extra_tensor", "not made"), "NOT_SHOWN"),
        (row("extra_tensor", "none"), "NOT_SHOWN"),
        (row("extra_tensor", rule="messages per minute"), "NOT_SHOWN"),
    ):
        found, why = fault([*good[:2], worse, good[3]], [])
        assert found == code and "extra_tensor" in why
    assert fault(good, ["off_grid_number"])[0] == "LEAKED"


@pytest.mark.parametrize(
    ("attacks", "changes", "words"),
    [
        (("no_such",), {}, "no attack"),
        (tuple(ATTACKS), {"rounds": 1}, "2 rounds"),
        (("off_grid_number",), {"rounds": 1}, "2 rounds"),
        (("extra_tensor",), {"silos": 1}, "another silo"),
        (("prompt_as_response",), {"method": "fedavg-grpo", "kinds": {"lora.factors"}}, "public.responses"),
    ],
)
def test_a_run_that_could_not_show_it_is_refused(attacks: tuple[str, ...], changes: dict[str, Any], words: str) -> None:
    shape: dict[str, Any] = {"rounds": 2, "silos": 2, "method": "pubswap", "kinds": KINDS}
    check_attacks([name for name in attacks if name in ATTACKS], **shape)  # the counterpart
    with pytest.raises(UsageError, match=words):
        check_attacks(attacks, **shape | changes)


def test_what_got_out_comes_before_a_log_that_does_not_verify_and_that_before_the_rest() -> None:
    leaked, broken, other = OperationError("x", code="LEAKED"), VerificationError("y"), OperationError("z")
    assert _worse(broken, other) is broken and _worse(other, broken) is broken
    assert _worse(broken, leaked) is leaked and _worse(None, other) is other and _worse(None, None) is None


def test_the_report_says_only_what_was_seen() -> None:
    wire: dict[str, Any] = {"messages": 1, "bytes": 1, "canaries": 200, "forms": ["raw"], "found": [], "unreadable": ""}
    rate = {"before": 0.1, "after": 0.2}
    data: dict[str, Any] = {
        "method": "pubswap", "rounds": [{"round": 1, "participants": ["a"]}], "pass_at_1": rate,
        "pass_at_1_greedy": rate, "per_silo": {}, "per_topic": {}, "rows_left_out": {}, "left": [], "audit": [],
        "donors_trained": {}, "attacks": [row("extra_tensor")], "attacker": "b", "not_stopped": "", "wire": wire,
        "canaries_on_wire": 0, "positive_control_found": True, "adapter": "", "base_model": "", "run_record": "",
        "isolation": {}, "processes": 1, "seconds": 1.0,
    }  # fmt: skip
    text = report(data)
    assert "sent none of it" in text and "0 found" in text and "committed without b: round 1" in text
    data["attacks"] = [row("extra_tensor", "allow")]
    data["wire"] = wire | {"unreadable": "a message on the wire is compressed"}
    text = report(data)
    assert "sent none of it" not in text and "ALLOW" in text
    assert "NOT SEARCHED" in text and "0 found" not in text
