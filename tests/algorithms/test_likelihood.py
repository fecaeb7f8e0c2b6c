"""A supervised step against torch's own cross-entropy, advantages from outside, and the method that is made of them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from fedsilo.protocol.codec import decode_factors
from fedsilo.protocol.tasks import ExportDelta, LikelihoodStep, LoadAdapter
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.grpo import Answer, Group, Learner, batch_of
from tests.algorithms.test_objective_gradients import random_groups
from tests.algorithms.test_trl_agreement import lora_factors, our_epochs, write_factors
from tests.algorithms.tiny import (
    first_character_grader,
    make_adapter,
    make_codec,
    make_model,
    make_plan,
    make_rows,
    make_session,
    make_shape,
    peft_twin,
    random_factors,
    start_payload,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]
TOLERANCE = 1e-6
IGNORED = -100


def taught(seed: int) -> list[Group]:
    return [replace(group, advantages=(1.0,) * len(group.answers)) for group in random_groups(seed)]


def rows_of(groups: list[Group]) -> list[tuple[Group, Answer]]:
    return [(group, answer) for group in groups for answer in group.answers]


def cross_entropy(model: Any, groups: list[Group], temperature: float, aggregation: str) -> torch.Tensor:
    """Torch's, over one padded batch in which prompts and padding are ignored."""
    rows = [(group, answer) for group, answer in rows_of(groups) if answer.ids]
    width = max(len(group.prompt_ids) + len(answer.ids) for group, answer in rows)
    ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), IGNORED)
    seen = torch.zeros(len(rows), width, dtype=torch.long)
    for place, (group, answer) in enumerate(rows):
        start, end = len(group.prompt_ids), len(group.prompt_ids) + len(answer.ids)
        ids[place, :end] = torch.tensor([*group.prompt_ids, *answer.ids])
        labels[place, start:end] = torch.tensor(answer.ids)
        seen[place, :end] = 1
    logits = model(input_ids=ids, attention_mask=seen).logits[:, :-1] / temperature
    if aggregation == "token-mean":
        return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    shares = {id(answer): 1 / len(group.answers) / len(groups) for group, answer in rows}
    means = [
        functional.cross_entropy(logits[place], labels[place, 1:], ignore_index=IGNORED) * shares[id(answer)]
        for place, (_, answer) in enumerate(rows)
    ]
    return torch.stack(means).sum()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("aggregation", ["response-mean", "token-mean"])
def test_the_gradient_is_that_of_cross_entropy_in_every_epoch(aggregation: str, temperature: float) -> None:
    """In the second epoch too, where a ratio would differ from 1 and a clip would hold."""
    changes = {
        "objective__token_aggregation": aggregation,
        "rollout__temperature": temperature,
    }
    groups = taught(4)
    ours = our_epochs(groups, changes, likelihood=True)
    assert len(ours) == 2
    exact = make_adapter()
    names, twin = sorted(exact.shape.shapes), peft_twin(exact).double()  # float32 would add a rounding of its own
    live = lora_factors(twin)
    for place, epoch in enumerate(ours, 1):
        write_factors(twin, epoch.factors)
        loss = cross_entropy(twin, groups, temperature, aggregation)
        gradients = torch.autograd.grad(loss, [live[name] for name in names])
        assert epoch.loss == pytest.approx(float(loss.detach()), rel=TOLERANCE)
        expected = torch.cat([each.flatten() for each in gradients])
        found = torch.cat([epoch.gradients[name].flatten() for name in names])
        print(f"relative difference {float((found - expected).norm() / expected.norm()):.1e}")
        # float32 rounds more at the factors that the first epoch has reached
        assert (found - expected).norm() <= place * TOLERANCE * expected.norm()


def test_a_supervised_step_clips_nothing() -> None:
    learner = Learner(make_adapter(), make_plan(optimiser__learning_rate=0.05), microbatch_tokens=10_000)
    figures = learner.update(taught(4), likelihood=True)
    assert figures.clip_share == 0.0 and figures.ratio_deviation_last > 0.25
    plain = Learner(make_adapter(), make_plan(optimiser__learning_rate=0.05), microbatch_tokens=10_000)
    assert plain.update(taught(4)).clip_share > 0


def test_advantages_from_outside_are_taken_as_they_are() -> None:
    groups = random_groups(4)
    given = [replace(group, advantages=tuple(0.25 * (place + 1) for place, _ in enumerate(group.answers)))
             for group in groups]  # fmt: skip
    batch = batch_of(given, make_plan())
    assert batch.advantages.tolist() == [each for group in given for each in group.advantages or ()]
    own = batch_of(groups, make_plan())
    again = [
        replace(group, advantages=tuple(own.advantages[[at for at, (place, _) in enumerate(own.answers) if place == n]]
                                        .tolist()))
        for n, group in enumerate(groups)
    ]  # fmt: skip
    one, other = our_epochs(groups, {"objective__advantage_epsilon": 1e-6}), our_epochs(again, {})
    assert all(torch.equal(one[0].gradients[name], other[0].gradients[name]) for name in one[0].gradients)
    with pytest.raises(ValueError, match="2 advantages for 1"):
        batch_of([Group((3,), (Answer((4,), "", True),), (1.0, 1.0))], make_plan())


# ---- public-sft ------------------------------------------------------------------------------------------

KEY, WORK = "7", "7ab"
PROMPTS = (4, 0, 9)


def stepped(public: list[Any], **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of a supervised step on three public prompts, and the update after it."""
    session, shape = make_session(plan=make_plan(**{"method": "public-sft", **changes}), public=public)
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    done = session.carry_out(LikelihoodStep(1, 2, PROMPTS))
    return done.metrics, decode_factors(bytes(session.carry_out(ExportDelta(1)).body)).tensors


@pytest.mark.parametrize("solved", [False, True])
def test_it_trains_on_the_solution_where_there_is_one_and_else_on_the_answer(solved: bool) -> None:
    public = [replace(row, answer=KEY, solution=WORK if solved else "") for row in make_rows(10, "q")]
    metrics, update = stepped(public)
    codec, text = make_codec(), WORK if solved else KEY
    answer = Answer(codec.answer_ids(text, finished=True), text, finished=True, reward=1.0)
    groups = [Group(codec.prompt_ids(public[row].prompt), (answer,), (1.0,)) for row in PROMPTS]
    model = make_model()
    adapter = LoraAdapter(model, make_shape(model))
    adapter.load(random_factors(adapter.shape))
    Learner(adapter, make_plan(), microbatch_tokens=10_000).update(groups, likelihood=True)
    for name, live, start in zip(adapter.trained_names, adapter.parameters, adapter.start, strict=True):
        assert (update[name] == (live - start).detach().numpy()).all()
    assert (metrics["answers_refused"], metrics["trained_tokens"]) == (0, len(PROMPTS) * (len(text) + 1))


@pytest.mark.parametrize("bad", ["aa7", "7" * 9, "7<pad>"])
def test_what_is_not_right_or_does_not_fit_is_left_out_and_counted(bad: str) -> None:
    rows = [dataclasses.replace(row, answer=KEY) for row in make_rows(10, "q")]
    wrong = [dataclasses.replace(row, solution=bad) if place == 4 else row for place, row in enumerate(rows)]
    assert first_character_grader([(bad, KEY)]) == [bad != "aa7"]
    metrics, update = stepped(wrong)
    assert metrics["answers_refused"] == 1
    assert metrics["trained_tokens"] == 2 * (len(KEY) + 1)
    _, whole = stepped(rows)
    assert any((update[name] != whole[name]).any() for name in update)


def test_a_step_without_anything_to_train_on_moves_nothing() -> None:
    rows = [dataclasses.replace(row, answer=KEY, solution="aa") for row in make_rows(10, "q")]
    metrics, update = stepped(rows, optimiser__weight_decay=0.0)
    assert metrics["answers_refused"] == 3 and metrics["trained_tokens"] == 0
    assert all(not value.any() for value in update.values())
