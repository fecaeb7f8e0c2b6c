"""The denominator of donors' tokens: hand numbers, the formulas differentiated, and who may ask for what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import FedSiloError, UsageError
from fedsilo.protocol.methods import METHODS, require_exchange
from fedsilo.protocol.plan import parameters_of
from fedsilo.protocol.tasks import AnswerAhead, GeneratePublic, LoadAdapter, PublicStep
from silo.trainer import grpo
from silo.trainer.grpo import Group, Learner
from tests.algorithms.test_objective_gradients import token_terms
from tests.algorithms.test_trl_agreement import GROUPS, LEARNING_RATE, TOLERANCE, our_epochs
from tests.algorithms.tiny import make_adapter, make_codec, make_plan, make_rows, make_session, peft_twin, start_payload
from tests.policies import setting
from tests.simulated.coordinator_parts import RUN_YAML, House
from tests.world import Loop

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


@pytest.mark.parametrize("advantage", [2.0, -0.5])
def test_an_answer_of_two_tokens_by_hand(advantage: float) -> None:
    """Probabilities .9 and .02: the shaped ratios are .9 and 1/6, their slopes .09 and .139."""
    logp = torch.tensor([math.log(0.9), math.log(0.02)], requires_grad=True)
    advantages = torch.full((2,), advantage)
    unit, shaped = (grpo.donor_gain(logp, advantages, kind) for kind in ("unit", "shaped"))  # type: ignore[arg-type]
    assert unit.tolist() == pytest.approx([0.9 * advantage, 0.02 * advantage])
    assert shaped.tolist() == pytest.approx([0.9 * advantage, advantage / 6])
    (slopes,) = torch.autograd.grad(unit.sum(), logp)
    assert slopes.tolist() == pytest.approx([0.9 * advantage, 0.02 * advantage])
    (slopes,) = torch.autograd.grad(shaped.sum(), logp)  # 0.1 p / (p + 0.1)^2
    assert slopes.tolist() == pytest.approx([0.09 * advantage, 0.002 / 0.0144 * advantage])


# ---- the whole update ------------------------------------------------------------------------------------


def with_donors(groups: Sequence[Group]) -> list[Group]:
    """Every third answer is a donor's, who wrote its tokens with known probabilities."""
    number, made = 0, []
    for group in groups:
        answers = []
        for answer in group.answers:
            foreign = number % 3 == 0
            logp = tuple(-0.3 - 0.7 * ((number + at) % 4) for at in range(len(answer.ids)))
            answers.append(replace(answer, donor="b", logp=logp) if foreign else answer)
            number += 1
        made.append(replace(group, answers=tuple(answers)))
    return made


def written_out(model: Any, groups: Sequence[Group], denominator: str, old: dict[tuple[int, int], list[float]]) -> Any:
    """The loss token by token. old: log-probabilities of the first epoch, filled where it is empty."""
    loss = torch.zeros(())
    for at, group in enumerate(groups):
        rewards = torch.tensor([answer.reward for answer in group.answers])
        if not rewards.std() > 0:
            continue
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
        for number, (answer, advantage) in enumerate(zip(group.answers, advantages, strict=True)):
            logps = token_terms(model, group, answer, 1.0)[0]
            first = old.setdefault((at, number), [float(each.detach()) for each in logps])
            for place, logp in enumerate(logps):
                if answer.donor and denominator == "unit":
                    gain = logp.exp() * advantage
                elif answer.donor and denominator == "shaped":
                    gain = logp.exp() / (logp.exp() + 0.1) * advantage
                else:
                    below = answer.logp[place] if answer.donor and denominator == "donor" else first[place]
                    ratio = (logp - below).exp()
                    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.25) * advantage)
                loss = loss - gain / len(logps) / len(group.answers) / len(groups)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("denominator", ["local", "donor", "unit", "shaped"])
def test_loss_and_gradients_are_those_of_the_formula(denominator: str) -> None:
    groups = with_donors(GROUPS)
    ours = our_epochs(groups, {"donor_denominator": denominator})
    adapter = make_adapter()
    names, twin, old = sorted(adapter.shape.shapes), peft_twin(adapter), {}  # type: ignore[var-annotated]
    for epoch in ours:
        with torch.no_grad():
            for name, live in zip(names, adapter.parameters, strict=True):
                live.copy_(epoch.factors[name])
        loss = written_out(twin, groups, denominator, old)
        assert epoch.loss == pytest.approx(float(loss.detach()), abs=TOLERANCE)
        for name, gradient in zip(names, torch.autograd.grad(loss, adapter.parameters), strict=True):
            assert torch.allclose(epoch.gradients[name], gradient, rtol=0, atol=TOLERANCE), name
    own = our_epochs(GROUPS, {})
    moved = max(float((own[0].gradients[name] - ours[0].gradients[name]).abs().max()) for name in names)
    if denominator == "local":
        assert all(torch.equal(own[1].gradients[name], ours[1].gradients[name]) for name in names), "bit for bit"
    else:
        assert moved > 100 * TOLERANCE


@pytest.mark.parametrize("denominator", ["unit", "shaped"])
def test_own_answers_are_trained_on_as_ever_and_only_they_are_clipped(denominator: str) -> None:
    own = our_epochs(GROUPS, {})
    ours = our_epochs(GROUPS, {"donor_denominator": denominator})
    assert all(torch.equal(own[1].gradients[name], ours[1].gradients[name]) for name in own[1].gradients)
    foreign = [replace(group, answers=tuple(replace(each, donor="b") for each in group.answers)) for group in GROUPS]
    plan = make_plan(donor_denominator=denominator, optimiser__learning_rate=10 * LEARNING_RATE)
    assert Learner(make_adapter(), plan, microbatch_tokens=1000).update(foreign).clip_share == 0.0
    assert Learner(make_adapter(), plan, microbatch_tokens=1000).update(GROUPS).clip_share > 0.0


# ---- in sessions -----------------------------------------------------------------------------------------

PROMPTS = (4, 0, 9)


def graded_by(text: str) -> Any:
    return lambda pairs: [answer.startswith(text) for answer, _ in pairs]


def test_a_session_remembers_what_it_offered_with_its_probabilities() -> None:
    plan = make_plan(donor_denominator="donor", samples_per_prompt=8)
    session, shape = make_session("b", plan, donor_logp=lambda *place: ())
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    sent = pb.PublicResponses.FromString(bytes(session.carry_out(GeneratePublic(1, 2, PROMPTS, "correct")).body))
    model, texts, seen = peft_twin(make_adapter(b_scale=0.0)), make_codec(), 0
    for row in sent.prompts:
        prompt = texts.prompt_ids(make_rows(10, "q")[row.prompt_index].prompt)
        for position, response in enumerate(row.responses):
            ids = texts.answer_ids(response.text, finished=response.finish == pb.FINISH_STOP)
            answer = grpo.Answer(ids, response.text, True)
            with torch.no_grad():
                expected = [float(each) for each in token_terms(model, Group(prompt, (answer,)), answer, 1.0)[0]]
            assert session.logp_of(1, 2, row.prompt_index, position) == pytest.approx(expected, abs=1e-4)
            seen += 1
        assert session.logp_of(1, 2, row.prompt_index, len(row.responses)) == ()
    assert seen > 3
    assert session.logp_of(1, 4, PROMPTS[0], 0) == session.logp_of(2, 2, PROMPTS[0], 0) == ()
    ahead = pb.PublicResponses.FromString(bytes(session.carry_out(AnswerAhead(1, 2, PROMPTS)).body))
    place = (2, 2, next(row.prompt_index for row in ahead.prompts if row.responses), 0)
    answered = session.logp_of(*place)
    assert answered, "of the round in which they are donors"
    session.carry_out(LoadAdapter(2, digest), payload)
    session.carry_out(GeneratePublic(2, 2, PROMPTS, "none"))
    assert session.logp_of(*place) == answered, "own answers to the same prompts are offered to nobody"


@pytest.mark.parametrize("known", ["all", "none", "short", "nan"])
def test_a_donor_counts_by_the_policy_that_wrote_it_or_is_refused(known: str) -> None:
    text, asked = "7a", []

    def donor_logp(*place: Any) -> tuple[float, ...]:
        asked.append(place)
        return {"all": (-0.5, -1.5, -2.5), "none": (), "short": (-0.5,), "nan": (-0.5, math.nan, -2.5)}[known]

    session, shape = make_session(
        "a", make_plan(donor_denominator="donor"), public_grader=graded_by(text), donor_logp=donor_logp
    )
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    session.carry_out(GeneratePublic(1, 2, PROMPTS, "correct"))
    answer = pb.Response(text=text, finish=pb.FINISH_STOP)
    donors = pb.PublicDonors(
        prompts=[
            pb.PromptDonors(prompt_index=row, donors=[pb.Donor(origin="b", position=3, response=answer)])
            for row in PROMPTS
        ]
    )
    metrics = session.carry_out(PublicStep(1, 2, "replace", donors)).metrics
    assert asked == [("b", 1, 2, row, 3) for row in PROMPTS]
    if known == "all":
        assert metrics["donors_used"] == len(PROMPTS) and metrics["ratio_deviation_first"] > 0.01
    else:
        assert metrics["donors_used"] == 0 and metrics["donors_rejected"] == {"b": len(PROMPTS)}
        assert metrics["ratio_deviation_first"] == 0.0


# ---- who may ask for it ----------------------------------------------------------------------------------


def test_a_trainer_that_does_not_know_them_refuses_the_plan() -> None:
    with pytest.raises(UsageError) as refused:
        make_session("a", make_plan(donor_denominator="donor"))
    assert refused.value.code == "DONOR_DENOMINATOR"
    for other in ("local", "unit", "shaped"):
        make_session("a", make_plan(donor_denominator=other))


@pytest.mark.parametrize(("denominator", "known"), [("donor", False), ("donor", True), ("unit", False)])
def test_a_silo_declines_a_plan_that_takes_what_no_message_carries(
    tmp_path: Path, denominator: str, known: bool
) -> None:
    loop = Loop(tmp_path, setting.policy_of(setting.policy_text()))
    loop.trainer.donor_logp = known
    loop.offer_plan(setting.PLAN.model_copy(update={"donor_denominator": denominator}))
    refused = denominator == "donor" and not known
    assert (loop.guard.runs.run is None) is refused
    denied = [row["reasons"] for row in loop.bench.events("ingress.decision") if row["decision"] == "deny"]
    assert denied == ([["DONOR_DENOMINATOR"]] if refused else [])
    loop.close()


def test_a_run_without_other_silos_answers_has_no_donors_policy(tmp_path: Path) -> None:
    one = House(tmp_path)
    text = RUN_YAML + "donor_denominator: donor\n"
    with pytest.raises(FedSiloError, match=r"run\.yaml:\d+: self-swap takes no other silo's answers") as told:
        one.submit(text.replace("method: pubswap", "method: self-swap"))
    assert told.value.hint == "donor_denominator: local"
    one.submit(text)
    one.close()
    for name, method in METHODS.items():
        plan = make_plan(method=name, donor_denominator="donor")
        if method.swaps:
            require_exchange(plan)
        else:
            with pytest.raises(UsageError) as refused:
                require_exchange(plan)
            assert refused.value.code == "DONOR_DENOMINATOR"


def test_what_differs_is_shown_and_the_default_keeps_its_digest() -> None:
    assert "donor_denominator" not in parameters_of(make_plan())
    assert parameters_of(make_plan(donor_denominator="shaped"))["donor_denominator"] == "shaped"
    assert '"donor_denominator":"local"' in make_plan().canonical(), "as it always stood there"
