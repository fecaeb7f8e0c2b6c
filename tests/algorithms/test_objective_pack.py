"""The further objectives: hand numbers, numeric gradients, and TRL's own trainer where it computes the same.

On a tiny decoder the engine's probabilities are the trainer's, and every ratio is 1. So the tests shift them by known
amounts: the engine's log-probabilities by those of `SHIFTS`, in the first epoch, and the policy's own by an optimiser
step that drives ratios out of the band, in the second.

| TRL | plan |
|---|---|
| `loss_type="dr_grpo"`, `scale_rewards="none"` | `token_aggregation: constant`, `advantage_std: none` |
| `importance_sampling_level="sequence"` | `ratio: sequence` |
| `loss_type="cispo"`, `epsilon_high` (the bound itself, 1 + ours) | `clip: cispo`, `token_aggregation: token-mean` |
| `vllm_importance_sampling_mode="token_truncate"`, `"token_mask"` | `importance_correction: truncate`, `mask` |
| `vllm_importance_sampling_clip_max` | `importance_cap` |

A token without the engine's log-probability has the weight 1 there and 0 here. So TRL gets one of which its own rule
makes 0, for that token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode_factors
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.tasks import ExportDelta, GeneratePublic, LoadAdapter, PublicStep
from silo.trainer import grpo
from silo.trainer.agreement import Limits
from silo.trainer.grpo import Answer, Group, Learner
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import Rollout
from tests.algorithms import test_trl_agreement as trl_agreement
from tests.algorithms.ratios import clipped_of, gain_of
from tests.algorithms.test_objective_gradients import token_terms
from tests.algorithms.test_trl_agreement import (
    FAR,
    GROUPS,
    TOLERANCE,
    Epoch,
    MakePeer,
    Peer,
    difference,
    make_peer,
    our_epochs,
)
from tests.algorithms.tiny import make_adapter, make_plan, make_session, peft_twin, start_payload

pytestmark = trl_agreement.pytestmark
_ = make_peer  # the fixture
CAP = 1.5
SHIFTS = (0.5, 0.8, 1.0, 1.3, 2.0, 3.0)  # weights exp(logp_old - logp_engine), in turn
NAN_AT = 4  # this token of all has no log-probability
MAX_TOKENS = 16  # what the peer calls max_completion_length

OUR_WORDS: dict[str, dict[str, Any]] = {
    "constant, no std": {
        "objective__advantage_std": "none",
        "objective__token_aggregation": "constant",
        "rollout__max_new_tokens": MAX_TOKENS,
    },
    "no std": {"objective__advantage_std": "none"},
    "sequence": {"objective__ratio": "sequence"},
    "sequence, dual clip": {"objective__ratio": "sequence", "objective__dual_clip": 1.3},
    "cispo": {"objective__clip": "cispo", "objective__token_aggregation": "token-mean"},
}
THEIR_WORDS: dict[str, dict[str, Any]] = {
    "constant, no std": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "no std": {"loss_type": "grpo", "scale_rewards": "none"},
    "sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "sequence, dual clip": {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.3},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.25},
}


@pytest.mark.parametrize("name", OUR_WORDS)
def test_loss_and_gradients_agree_with_trl(name: str, make_peer: MakePeer) -> None:
    ours = our_epochs(GROUPS, OUR_WORDS[name])
    peer = make_peer(THEIR_WORDS[name])
    theirs = [peer.epoch(epoch.factors) for epoch in ours]
    found = difference(ours, theirs)
    print(found)
    assert found.loss <= TOLERANCE and found.gradient <= TOLERANCE
    plain = our_epochs(GROUPS, {})
    at_same = make_peer({"loss_type": "grpo"})
    moved = difference(ours, [at_same.epoch(epoch.factors) for epoch in ours])
    assert moved.gradient > FAR and len(plain) == len(ours), "the option changes something"


# ---- the engine's log-probabilities ----------------------------------------------------------------------


def trainer_logp(groups: Sequence[Group]) -> list[list[float]]:
    """Log-probability of every answer's tokens before the update, by transformers and peft."""
    twin = peft_twin(make_adapter())
    with torch.no_grad():
        return [
            [float(each) for each in token_terms(twin, group, answer, 1.0)[0]]
            for group in groups
            for answer in group.answers
        ]


def shifted(logp: Sequence[Sequence[float]]) -> tuple[list[list[float]], list[list[float]]]:
    """The engine's log-probabilities, and the weight of each token; NaN for the one that has none."""
    engine, weights, place = [], [], 0
    for row in logp:
        of_row = [SHIFTS[(place + at) % len(SHIFTS)] for at in range(len(row))]
        of_row = [math.nan if place + at == NAN_AT else each for at, each in enumerate(of_row)]
        place += len(row)
        weights.append(of_row)
        engine.append(
            [math.nan if math.isnan(w) else value - math.log(w) for value, w in zip(row, of_row, strict=True)]
        )
    return engine, weights


def with_logp(groups: Sequence[Group], engine: Sequence[Sequence[float]]) -> list[Group]:
    rows = iter(engine)
    return [
        replace(group, answers=tuple(replace(answer, logp=tuple(next(rows))) for answer in group.answers))
        for group in groups
    ]


def peer_with_engine(make: MakePeer, correction: str, engine: list[list[float]], **settings: Any) -> Peer:
    peer = make({
        "loss_type": "grpo", "vllm_importance_sampling_mode": f"token_{correction}",
        "vllm_importance_sampling_clip_max": CAP, **settings,
    })  # fmt: skip
    given = peer.trainer.rollout_func
    gone = 80.0 if correction == "truncate" else -80.0  # a weight of exp(-80), or one far beyond the cap
    rows = [[gone if math.isnan(each) else each for each in row] for row in engine]
    peer.trainer.rollout_func = lambda prompts, trainer: {**given(prompts, trainer), "logprobs": rows}
    peer.trainer.use_vllm = True
    peer.trainer._last_loaded_step = peer.trainer.state.global_step  # there is no server to bring the weights to
    return peer


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_importance_weights_agree_with_trl(correction: str, ratio: str, make_peer: MakePeer) -> None:
    engine, _ = shifted(trainer_logp(GROUPS))
    changes = {
        "objective__importance_correction": correction,
        "objective__importance_cap": CAP,
        "objective__ratio": ratio,
    }
    ours = our_epochs(with_logp(GROUPS, engine), changes)
    peer = peer_with_engine(make_peer, correction, engine, importance_sampling_level=ratio)
    theirs = [peer.epoch(epoch.factors) for epoch in ours]
    found = difference(ours, theirs)
    print(found)
    assert found.loss <= TOLERANCE and found.gradient <= TOLERANCE
    uncorrected = make_peer({"loss_type": "grpo", "importance_sampling_level": ratio})
    without = [uncorrected.epoch(epoch.factors) for epoch in ours]
    assert difference(ours, without).gradient > FAR


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_the_gradient_of_the_first_epoch_is_the_weighted_sum_written_out(correction: str) -> None:
    """Every ratio is 1 there, so each token pulls with its weight times its advantage."""
    engine, weights = shifted(trainer_logp(GROUPS))
    adapter = make_adapter()
    twin = peft_twin(adapter)
    total = torch.zeros(())
    rows = iter(weights)
    for group in GROUPS:
        rewards = torch.tensor([answer.reward for answer in group.answers])
        for answer, advantage in zip(group.answers, (rewards - rewards.mean()).tolist(), strict=True):
            for logp, weight in zip(token_terms(twin, group, answer, 1.0)[0], next(rows), strict=True):
                kept = min(weight, CAP) if correction == "truncate" else weight * (weight <= CAP)
                factor = 0.0 if math.isnan(weight) else kept
                total = total - factor * advantage * logp / len(answer.ids) / len(group.answers) / len(GROUPS)
    expected = torch.autograd.grad(total, adapter.parameters)
    changes = {
        "objective__importance_correction": correction,
        "objective__importance_cap": CAP,
        "objective__advantage_std": "none",
    }
    first: Epoch = our_epochs(with_logp(GROUPS, engine), changes)[0]
    for name, gradient in zip(sorted(adapter.shape.shapes), expected, strict=True):
        assert torch.allclose(first.gradients[name], gradient, rtol=0, atol=TOLERANCE), name


def test_what_the_cap_cut_and_what_was_missing_is_counted() -> None:
    engine, weights = shifted(trainer_logp(GROUPS))
    plan = make_plan(objective__importance_correction="mask", objective__importance_cap=CAP)
    signal = [len({answer.reward for answer in group.answers}) > 1 for group in GROUPS for _ in group.answers]
    flat = [weight for row, trained in zip(weights, signal, strict=True) if trained for weight in row]
    figures = Learner(make_adapter(), plan, microbatch_tokens=20).update(with_logp(GROUPS, engine))
    beyond = sum(weight > CAP for weight in flat)
    assert figures.importance_truncated_share == pytest.approx(beyond / len(flat))
    assert figures.importance_missing == 1
    short = [tuple(row[:-1]) for row in engine]  # not as many as tokens: of none it can be told whose they are
    figures = Learner(make_adapter(), plan, microbatch_tokens=20).update(with_logp(GROUPS, short))
    assert figures.importance_missing == len(flat)
    plain = Learner(make_adapter(), make_plan(), microbatch_tokens=20).update(GROUPS)
    assert plain.importance_truncated_share is None and plain.importance_missing is None


def test_donors_have_no_importance_weight() -> None:
    """No engine of this silo's wrote them."""
    engine, _ = shifted(trainer_logp(GROUPS))
    changes = {"objective__importance_correction": "truncate", "objective__importance_cap": CAP}
    foreign = [
        replace(group, answers=tuple(replace(answer, donor="b") for answer in group.answers)) for group in GROUPS
    ]
    corrected, plain = our_epochs(with_logp(foreign, engine), changes), our_epochs(GROUPS, {})
    assert all(torch.equal(corrected[0].gradients[name], plain[0].gradients[name]) for name in plain[0].gradients)


# ---- by hand ---------------------------------------------------------------------------------------------


def test_factors_by_hand() -> None:
    weights = [0.5, 1.0, 1.5, 3.0, math.nan, math.inf]
    old = torch.full((6,), -2.0)
    engine = torch.tensor([-2.0 - math.log(each) for each in weights])  # log inf: an engine that says probability 0
    truncated, beyond, missing = grpo.importance_factor(old, engine, correction="truncate", cap=1.6)
    masked, _, _ = grpo.importance_factor(old, engine, correction="mask", cap=1.6)
    assert truncated.tolist() == pytest.approx([0.5, 1.0, 1.5, 1.6, 0.0, 0.0])
    assert masked.tolist() == pytest.approx([0.5, 1.0, 1.5, 0.0, 0.0, 0.0])
    assert beyond.tolist() == [False, False, False, True, False, False]
    assert missing.tolist() == [False] * 4 + [True] * 2


def test_constant_divides_by_the_longest_answer_there_may_be() -> None:
    counts, sizes = torch.tensor([3, 0, 5, 2]), torch.tensor([2, 2, 2, 2])
    weights = grpo.row_weights(counts, sizes, 2, "constant", tokens_max=8)
    assert weights.tolist() == [1 / 32, 0.0, 1 / 32, 1 / 32]
    kept = torch.tensor([True, True, False, True])
    assert grpo.row_weights(counts, sizes, 2, "constant", kept=kept, tokens_max=8).tolist() == [1 / 32, 0, 0, 1 / 32]


def test_no_std_leaves_the_difference_from_the_mean() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert grpo.group_advantages(rewards, std="none", epsilon=1.0).tolist() == [0.75, -0.25, -0.25, -0.25]
    assert grpo.group_advantages(torch.ones(3), std="none", epsilon=1.0).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("advantage", "log_ratios", "gain", "slope"),
    [
        (1.0, (0.3, -0.1), math.exp(0.1), math.exp(0.1) / 2),  # inside: the mean's exponential
        (1.0, (0.9, -0.1), 1.25, 0.0),  # of a mean of .4, beyond 1.25
        (-1.0, (-0.9, 0.1), -0.8, 0.0),  # of a mean of -.4, below .8
        (-1.0, (0.9, -0.1), -math.exp(0.4), -math.exp(0.4) / 2),  # not on the side that A pushes to
    ],
)
def test_the_ratio_of_a_sequence_by_hand(
    advantage: float, log_ratios: tuple[float, float], gain: float, slope: float
) -> None:
    """Beside it an answer of one token, whose ratio is its own. Both tokens have the mean's term and half its slope."""
    logp = torch.tensor([*log_ratios, 0.0], requires_grad=True)
    lengths = torch.tensor([2, 1])
    options: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.25, "lengths": lengths}
    found = gain_of(logp, torch.zeros(3), torch.full((3,), advantage), **options)
    assert found.tolist() == pytest.approx([gain, gain, advantage])
    (gradient,) = torch.autograd.grad(found[:2].sum() / 2, logp)
    assert gradient.tolist() == pytest.approx([slope, slope, 0.0])
    clipped = clipped_of(logp.detach(), torch.zeros(3), torch.full((3,), advantage), **options)
    assert clipped.tolist() == [slope == 0.0, slope == 0.0, False]


@pytest.mark.parametrize("advantage", [1.0, -2.0])
@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.5), (1.0, 1.0), (1.2, 1.2), (3.0, 1.25)])
def test_cispo_takes_weight_and_never_the_gradient(advantage: float, ratio: float, weight: float) -> None:
    logp = torch.tensor([-1.5], requires_grad=True)
    old = torch.tensor([-1.5 - math.log(ratio)])
    options: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.25, "clip": "cispo"}
    gain = gain_of(logp, old, torch.tensor([advantage]), **options)
    assert gain.item() == pytest.approx(weight * advantage * -1.5)
    (slope,) = torch.autograd.grad(gain.sum(), logp)
    assert slope.item() == pytest.approx(weight * advantage)
    clipped = clipped_of(logp.detach(), old, torch.tensor([advantage]), **options)
    assert clipped.item() is (ratio > 1.25)


@pytest.mark.parametrize("seed", range(5))
def test_the_slope_of_a_sequence_is_the_numeric_one(seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([3, 1, 4])
    logp, old = (-3 * torch.rand(8, generator=draws, dtype=torch.float64) for _ in range(2))
    advantages = torch.tensor([1.0, -1.0, -0.5], dtype=torch.float64).repeat_interleave(lengths)

    def total(at: torch.Tensor) -> torch.Tensor:
        return gain_of(at, old, advantages, clip_low=0.2, clip_high=0.25, dual_clip=3.0, lengths=lengths).sum()

    live = logp.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(total(live), live)
    step = 1e-6
    for place, slope in enumerate(slopes.tolist()):
        nudge = torch.zeros(8, dtype=torch.float64)
        nudge[place] = step
        assert slope == pytest.approx(float(total(logp + nudge) - total(logp - nudge)) / (2 * step), abs=1e-6)


# ---- the plan --------------------------------------------------------------------------------------------


def test_an_option_is_absent_at_its_default_and_shown_where_it_differs() -> None:
    from fedsilo.protocol.plan import parameters_of, plan_from_canonical

    later = {"ratio": "sequence", "importance_correction": "mask", "importance_cap": 3.0}
    plain, changed = make_plan(), make_plan(**{f"objective__{name}": value for name, value in later.items()})
    assert not any(f'"{name}"' in plain.canonical() for name in (*later, "clip"))
    assert not any(name in parameters_of(plain) for name in (*later, "clip", "advantage_std"))
    assert later.items() <= parameters_of(changed).items()
    assert plan_from_canonical(changed.canonical()) == changed and changed.digest != plain.digest
    assert parameters_of(make_plan(objective__clip="cispo"))["clip"] == "cispo"
    assert parameters_of(make_plan(objective__advantage_std="none"))["advantage_std"] == "none"


@pytest.mark.parametrize(
    "changes",
    [
        {"objective__clip": "cispo", "objective__dual_clip": 3.0},
        {"objective__importance_cap": 3.0},
        {"objective__importance_correction": "mask", "objective__importance_cap": 0.5},
    ],
)
def test_options_that_do_not_go_together_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make_plan(**changes)


def test_an_answer_of_no_token_weighs_nothing_under_any_of_them() -> None:
    empty = [replace(GROUPS[0], answers=(*GROUPS[0].answers[1:], Answer((), "", False, 1.0, logp=())))]
    for changes in OUR_WORDS.values():
        assert all(math.isfinite(epoch.loss) for epoch in our_epochs(empty, changes))


# ---- in a session ----------------------------------------------------------------------------------------


def corrected_plan() -> Any:
    return make_plan(objective__importance_correction="truncate", objective__importance_cap=CAP)


def test_the_embedded_engines_own_probabilities_are_the_trainers() -> None:
    """So a corrected step is the plain one to rounding; and what the open step holds survives a kill."""
    updates, metrics = [], {}
    for plan, killed in ((corrected_plan(), False), (corrected_plan(), True), (make_plan(), False)):
        session, shape = make_session(plan=plan)
        payload, digest = start_payload(shape)
        session.carry_out(LoadAdapter(1, digest), payload)
        session.carry_out(GeneratePublic(1, 2, (4, 0, 9), "none"))
        if killed:
            state = session.state()
            session, _ = make_session(plan=plan)
            session.restore(state)
        metrics = session.carry_out(PublicStep(1, 2, "none", pb.PublicDonors())).metrics
        if plan.wants_logp:
            assert (metrics["importance_missing"], metrics["importance_truncated_share"]) == (0, 0.0)
        factors = decode_factors(bytes(session.carry_out(ExportDelta(1)).body)).tensors
        updates.append(torch.cat([torch.tensor(factors[name]).flatten() for name in sorted(factors)]))
    assert torch.equal(updates[0], updates[1])
    assert "importance_missing" not in metrics
    # AdamW's first steps go by signs, which rounding turns where a gradient is almost 0
    assert (updates[0] - updates[2]).abs().median() < 1e-6 < updates[2].abs().median()


@pytest.mark.parametrize("corrected", [True, False])
def test_an_engine_without_log_probabilities_is_refused_where_they_are_taken(
    corrected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = EmbeddedEngine.generate

    def silent(*given: Any, **options: Any) -> list[tuple[Rollout, ...]]:
        return [tuple(replace(each, logp=()) for each in row) for row in generate(*given, **options)]

    monkeypatch.setattr(EmbeddedEngine, "generate", silent)
    session, shape = make_session(
        plan=corrected_plan() if corrected else make_plan(), agreement=Limits(share=0.0, marker_pushes=0)
    )
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    if not corrected:
        session.carry_out(GeneratePublic(1, 2, (4, 0), "none"))
        return
    with pytest.raises(OperationError) as refused:
        session.carry_out(GeneratePublic(1, 2, (4, 0), "none"))
    assert refused.value.code == "ENGINE_LOGP"
