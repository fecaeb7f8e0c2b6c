"""The real gate and every kind: under each shipped ruleset what it names leaves and comes in, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from policies.engine import Message
from policies.render import RULESETS
from silo.guard.decisions import RunView
from silo.guard.messages import Allowed, Denied, Held, IngressDenied
from silo.sampling import Training
from tests.policies import setting
from tests.policies.kinds import (
    ASKED,
    FURTHER_INBOUND,
    NAMED,
    OFFERED_KINDS,
    PROBE,
    SCHEMAS,
    TAKES,
    a_method_that_sends_everything,
    good,
    policy_named,
)
from tests.simulated.screening import screens
from tests.world import STEPS, Bench

# These have tests of their own with real screens, donors and transforms.
_ELSEWHERE = {"public.responses"}


@pytest.fixture(autouse=True, scope="module")
def _probe() -> Iterator[None]:
    with a_method_that_sends_everything():
        yield


def bench_of(folder: Path, ruleset: str, part: str = "give") -> Bench:
    bench = Bench(
        folder / "state", policy_named(ruleset), schema=SCHEMAS.get(ruleset, setting.SCHEMA),
        screens=screens(folder / "scratch"),
    )  # fmt: skip
    bench.gate.view = RunView(
        setting.PLAN.model_copy(update={"method": PROBE}), 1, setting.BASE_DIGEST, 1.0, STEPS, 2,
        {1: setting.BASE_DIGEST}, training=Training(64, 1, 4), asked=ASKED if part == "give" else TAKES,
        usable_records=10,
    )  # fmt: skip
    return bench


def offered(bench: Bench, message: Message) -> Allowed | Denied | Held:
    tensors = None if message.tensors is None else dict(message.tensors)
    return bench.gate.offer(bench.gate.view.place(message.kind, 1, message.step), message.body, tensors=tensors)


@pytest.mark.parametrize("ruleset", [*RULESETS, "further"])
def test_the_gate_lets_out_what_its_ruleset_names(tmp_path: Path, ruleset: str) -> None:
    policy, made = policy_named(ruleset), {}
    bench = bench_of(tmp_path, ruleset)
    for kind in sorted(set(OFFERED_KINDS) - _ELSEWHERE):
        view = bench.gate.view
        if kind == "bandit.reward":
            bench.gate.view = RunView(**{**vars(view), "asked": TAKES})
        made[kind] = offered(bench, good(kind, ruleset).message)
        bench.gate.view = view
    for kind, outcome in made.items():
        if getattr(policy.file.egress, kind.replace(".", "_")) is None:
            assert isinstance(outcome, Denied), kind
            assert "KIND_NOT_ALLOWED" in outcome.decision.reasons
        elif ruleset == "pubswap-strict" and kind == "lora.factor_b":
            assert isinstance(outcome, Held)
        else:
            assert isinstance(outcome, Allowed), (kind, outcome)
            bench.gate.transmit(outcome)
    allowed = [kind for kind, outcome in made.items() if isinstance(outcome, Allowed)]
    assert bench.channel.kinds() == allowed
    for envelope, payload in bench.channel.sent:
        if envelope.kind not in ("lora.factors", "lora.factor_a", "lora.factor_b", "lora.core_r"):
            # rebuilt from values: the bytes of the message that was offered
            assert len(payload) == good(envelope.kind, ruleset).message.payload_bytes
    bench.close()


@pytest.mark.parametrize("ruleset", sorted({*RULESETS} - {"deny_all"}))  # that one does not even poll
@pytest.mark.parametrize("kind", FURTHER_INBOUND)
def test_the_entrance_lets_in_what_its_ruleset_names(tmp_path: Path, ruleset: str, kind: str) -> None:
    bench = bench_of(tmp_path, ruleset, part="take")
    message = good(kind, ruleset, inbound=True).message
    payload: pb.Factors | bytes = message.body  # type: ignore[assignment]
    if message.tensors is not None:
        header = message.body
        assert isinstance(header, pb.Factors)
        payload = codec.encode_factors(
            message.tensors, base_digest="", schema_sha256="", rank=header.rank, scale=header.scale, dtype=header.dtype
        )
    bench.channel.routing = {"run": "run-1", "round": 1, "step": message.step}
    bench.channel.answer = (kind, payload)
    if getattr(NAMED[ruleset].file.ingress, kind.replace(".", "_")) is None:
        with pytest.raises(IngressDenied, match="KIND_NOT_ALLOWED"):
            bench.gate.send(bench.gate.view.place("control.poll"), pb.Poll())
    else:
        taken = bench.gate.send(bench.gate.view.place("control.poll"), pb.Poll())
        assert (taken.kind, taken.body) == (kind, message.body)
    bench.close()


def test_a_question_that_was_let_in_is_what_may_be_answered(tmp_path: Path) -> None:
    """The silo's side of `asked`, from one real message to the next: first nothing, then what the coordinator asked."""
    bench = bench_of(tmp_path, "fedgrpo")
    bench.gate.view = RunView(**{**vars(bench.gate.view), "asked": type(ASKED)()})
    refused = offered(bench, good("competence.score", "fedgrpo").message)
    assert isinstance(refused, Denied) and "NOT_ASKED" in refused.decision.reasons
    body = good("competence.ask", "fedgrpo", inbound=True).message.body
    bench.gate.view = bench.gate.view.asking(body, 2)
    assert isinstance(offered(bench, good("competence.score", "fedgrpo").message), Allowed)
    # and it outlasts a restart of the guard, as the rest of the view does
    view = bench.gate.view
    assert view.plan is not None
    assert RunView.from_json(view.plan, view.to_json()).asked == view.asked
    bench.close()
