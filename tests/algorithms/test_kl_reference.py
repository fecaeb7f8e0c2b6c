"""What the KL term is against: the base model, or the adapter that the run starts from, in all rounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsilo.protocol.codec import encode_factors, sha256_hex
from fedsilo.protocol.errors import OperationError, PeerError
from fedsilo.protocol.plan import Plan, parameters_of, plan_from_canonical
from fedsilo.protocol.tasks import ExportDelta, LoadAdapter, LoadReference, PrivateStep
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.grpo import Answer, Group, Learner
from silo.trainer.resume import StateFile
from silo.trainer.session import Session
from tests.algorithms.tiny import (
    ZERO_DIGEST,
    make_adapter,
    make_model,
    make_plan,
    make_session,
    make_shape,
    payload_of,
    peft_twin,
    random_factors,
)  # fmt: skip

pytestmark = pytest.mark.torch
BETA = 0.3
TWO_TOKENS = Group((5, 9, 20), (Answer((4, 6), "", finished=True, reward=1.0),))  # alone: no policy gradient
SHAPE = make_shape(make_model())
START = random_factors(SHAPE, 7, 0.25)
OTHER = random_factors(SHAPE, 8, 0.25)


def plan_of(reference: str, **changes: Any) -> Plan:
    started = {"start_adapter_sha256": "ab" * 32} if reference == "start_adapter" else {}
    settings = {"objective": {"kl_coefficient": BETA, "kl_reference": reference}, **started}
    return make_plan(**{**settings, "optimiser__grad_norm_max": 1e9, "optimiser__epochs": 1, **changes})


def learner_of(adapter: LoraAdapter, reference: str, factors: Any = START, **changes: Any) -> Learner:
    learner = Learner(adapter, plan_of(reference, **changes), microbatch_tokens=1000)
    learner.reference = factors
    return learner


def two_log_probabilities(model: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """log pi(4 | 5 9 20) and log pi(6 | 5 9 20 4), by transformers."""
    logits = model(input_ids=torch.tensor([[5, 9, 20, 4, 6]])).logits[0] / temperature
    first, second = logits[2].log_softmax(-1), logits[3].log_softmax(-1)
    return first[4], second[6]


def loaded_with(factors: Mapping[str, Any]) -> LoraAdapter:
    adapter = make_adapter()
    adapter.load(factors, 1)
    return adapter


@pytest.mark.parametrize("reference", ["frozen_base", "start_adapter"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_of_two_tokens_is_that_of_the_formula_written_out(reference: str, temperature: float) -> None:
    adapter = make_adapter()
    twin = peft_twin(adapter)
    with torch.no_grad():
        if reference == "frozen_base":
            with twin.disable_adapter():
                against = two_log_probabilities(twin, temperature)
        else:
            against = two_log_probabilities(peft_twin(loaded_with(START)), temperature)
    one, two = (
        (other - own).exp() - (other - own) - 1
        for own, other in zip(two_log_probabilities(twin, temperature), against, strict=True)
    )
    expected = torch.autograd.grad(BETA * (one + two) / 2, adapter.parameters)
    figures = learner_of(adapter, reference, rollout__temperature=temperature).update([TWO_TOKENS])
    assert figures.kl == pytest.approx(float((one + two).detach()) / 2, rel=1e-4)
    largest = max(float(each.abs().max()) for each in expected)
    assert largest > 1e-3
    for parameter, gradient in zip(adapter.parameters, expected, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=1e-3, atol=1e-5 * largest)


def test_at_the_start_adapter_itself_there_is_no_pull_and_against_the_base_there_is() -> None:
    pulls = {}
    for reference in ("frozen_base", "start_adapter"):
        adapter = loaded_with(START)
        learner_of(adapter, reference).update([TWO_TOKENS])
        pulls[reference] = max(float(each.grad.abs().max()) for each in adapter.parameters if each.grad is not None)
    assert pulls["start_adapter"] < 1e-6 < 1e-3 < pulls["frozen_base"]


def test_reference_passes_leave_the_factors_as_they_were_bit_for_bit() -> None:
    """At a learning rate of nearly 0 nothing else moves them."""
    adapter = loaded_with(OTHER)
    learner_of(adapter, "start_adapter", optimiser__learning_rate=1e-45, optimiser__weight_decay=0.0).update(
        [TWO_TOKENS]
    )
    for name, values in OTHER.items():
        assert np.array_equal(adapter.factors[name].detach().numpy(), values)


def test_without_it_no_step_is_taken() -> None:
    adapter = make_adapter()
    before = [each.detach().clone() for each in adapter.parameters]
    with pytest.raises(OperationError) as refused:
        learner_of(adapter, "start_adapter", None).update([TWO_TOKENS])
    assert refused.value.code == "BAD_TASK"
    assert all(torch.equal(one, other) for one, other in zip(before, adapter.parameters, strict=True))


# ---- a session -----------------------------------------------------------------------------------------------


def payload(factors: dict[str, Any]) -> tuple[bytes, str]:
    content = payload_of(SHAPE, factors)
    return content, sha256_hex(content)


def begun(reference: str, *, load: bool = True) -> Session:
    session, _ = make_session(plan=plan_of(reference, optimiser__epochs=2, rounds=2))
    if load:
        content, digest = payload(START)
        session.carry_out(LoadReference(1, digest), content)
    return session


def a_round(session: Session, number: int, start: dict[str, Any]) -> bytes:
    content, digest = payload(start)
    session.carry_out(LoadAdapter(number, digest), content)
    for step in (1, 2):
        session.carry_out(PrivateStep(number, step))
    return bytes(session.carry_out(ExportDelta(number)).body)


@pytest.mark.slow
def test_it_holds_in_later_rounds_and_trains_otherwise_than_the_base() -> None:
    session = begun("start_adapter")
    first = a_round(session, 1, START)
    assert first != a_round(begun("frozen_base", load=False), 1, START)
    later = a_round(session, 2, OTHER)
    run = session._run
    assert run is not None and run.learner.reference is not None
    assert all(np.array_equal(run.learner.reference[name], values) for name, values in START.items())
    other_reference, _ = make_session(plan=plan_of("start_adapter", optimiser__epochs=2, rounds=2))
    content, digest = payload(OTHER)  # what the second round starts from, in the place of what the run does
    other_reference.carry_out(LoadReference(1, digest), content)
    a_round(other_reference, 1, START)
    assert later != a_round(other_reference, 2, OTHER)


def test_a_killed_trainer_that_is_given_it_again_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    whole = begun("start_adapter")
    content, digest = payload(START)
    whole.carry_out(LoadAdapter(1, digest), content)
    rows = whole.giver.with_rows_drawn(PrivateStep(1, 1)), whole.giver.with_rows_drawn(PrivateStep(1, 2))  # type: ignore[attr-defined]
    file = StateFile(tmp_path, b"secret")
    Session.carry_out(whole, rows[0])
    file.save(whole.state())
    Session.carry_out(whole, rows[1])
    expected = bytes(Session.carry_out(whole, ExportDelta(1)).body)

    def again(*, load: bool) -> Session:
        session, state = begun("start_adapter", load=load), file.load()
        assert state is not None and session.restore(state) is True
        return session

    with pytest.raises(OperationError):
        Session.carry_out(again(load=False), rows[1])  # it is in no state that is kept
    session = again(load=True)
    Session.carry_out(session, rows[1])
    assert bytes(Session.carry_out(session, ExportDelta(1)).body) == expected


def test_one_of_another_schema_is_refused_when_it_comes() -> None:
    session = begun("start_adapter", load=False)
    fewer = dict(list(START.items())[2:])
    content = encode_factors(
        fewer, base_digest="", schema_sha256=ZERO_DIGEST, rank=SHAPE.rank, scale=SHAPE.scale, dtype="float32"
    )
    with pytest.raises(PeerError):
        session.carry_out(LoadReference(1, sha256_hex(content)), content)


# ---- the plan ------------------------------------------------------------------------------------------------


def test_a_plan_that_says_nothing_of_it_keeps_its_digest() -> None:
    plain, named = plan_of("frozen_base"), plan_of("start_adapter")
    assert "kl_reference" not in plain.canonical() and "kl_reference" not in parameters_of(plain)
    assert plan_from_canonical(named.canonical()) == named
    assert parameters_of(named)["kl_reference"] == "start_adapter"
    assert (plain.reference_sha256, named.reference_sha256) == ("", "ab" * 32)
    no_term = named.objective.model_copy(update={"kl_coefficient": 0.0})
    without_term = named.model_copy(update={"objective": no_term})
    assert without_term.reference_sha256 == ""


def test_a_plan_without_a_start_adapter_has_none_to_be_against() -> None:
    with pytest.raises(ValueError, match="kl_reference"):
        make_plan(objective={"kl_coefficient": BETA, "kl_reference": "start_adapter"})
