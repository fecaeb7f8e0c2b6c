"""beta and the omega proxy against gradients of whole groups, each by transformers and peft alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.tasks import LoadAdapter, PrivateStep, PublicStep
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.grpo import Answer, Group
from silo.trainer.run import memory_peak_bytes, rate
from silo.trainer.tasks.public_step import SwapBound, SwapFigures, gradient_change, is_due, swap_bound, swap_metrics
from tests.algorithms.test_session import begun, generated
from tests.algorithms.test_update import plain_logp
from tests.algorithms.tiny import make_adapter, make_plan, make_session, peft_twin, start_payload

pytestmark = pytest.mark.torch
PROMPT = (5, 9, 20, 7)
OWN = Group(
    PROMPT,
    (
        Answer((4, 6, 1), "", True, 1.0),
        Answer((3,), "", False, 0.0),
        Answer((8, 8, 9), "", False, 0.0),
        Answer((12, 1), "", True, 0.0),
    ),
)
DONOR = Answer((10, 11, 4, 1), "", True, 1.0, donor="b")
SWAPPED = Group(PROMPT, (OWN.answers[0], DONOR, *OWN.answers[2:]))
STUCK = Group((6, 7), (Answer((4, 1), "", True, 1.0), Answer((5, 1), "", True, 1.0)))


def slow_gradient(adapter: LoraAdapter, group: Group, settings: dict[str, Any]) -> list[Tensor]:
    """Of one group's loss at rho = 1, answer by answer."""
    twin = peft_twin(adapter)
    rewards = [answer.reward for answer in group.answers]
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    kept = [answer for answer in group.answers if answer.finished or not settings.get("objective__mask_truncated")]
    tokens = sum(len(answer.ids) for answer in kept)
    total = torch.zeros(())
    for answer in kept:
        logp = plain_logp(twin, group.prompt_ids, answer.ids, settings.get("rollout__temperature", 1.0))
        share = tokens if "objective__token_aggregation" in settings else len(answer.ids) * len(group.answers)
        total = total - (answer.reward - mean) / (deviation + 1e-6) * logp.sum() / share
    return list(torch.autograd.grad(total, adapter.parameters))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"objective__token_aggregation": "token-mean"},
        {"objective__mask_truncated": True},
        {"rollout__temperature": 0.7},
    ],
    ids=["mean per answer", "mean over tokens", "truncated masked", "temperature"],
)
def test_beta_is_the_norm_of_what_the_exchange_does_to_the_gradient(settings: dict[str, Any]) -> None:
    adapter = make_adapter()
    changes = zip(slow_gradient(adapter, OWN, settings), slow_gradient(adapter, SWAPPED, settings), strict=True)
    expected = math.sqrt(sum(float((one - other).square().sum()) for one, other in changes))
    got = gradient_change(adapter, make_plan(**settings), OWN, SWAPPED)
    assert got == pytest.approx(expected, rel=1e-4)  # float32, another order of adding
    assert expected > 0.05
    assert gradient_change(adapter, make_plan(**settings), OWN, OWN) == 0.0


def test_the_same_answer_twice_counts_twice() -> None:
    adapter = make_adapter()
    twice = Group(PROMPT, (OWN.answers[0], OWN.answers[0], *OWN.answers[2:]))
    changes = zip(slow_gradient(adapter, OWN, {}), slow_gradient(adapter, twice, {}), strict=True)
    expected = math.sqrt(sum(float((one - other).square().sum()) for one, other in changes))
    assert gradient_change(adapter, make_plan(), OWN, twice) == pytest.approx(expected, rel=1e-4)


def test_measuring_leaves_factors_and_gradients_alone() -> None:
    adapter = make_adapter()
    before = [each.detach().clone() for each in adapter.parameters]
    bound = swap_bound(adapter, make_plan(), [STUCK, OWN, OWN], [STUCK, SWAPPED, OWN], [0.0, 0.25, 0.0])
    assert bound is not None
    assert bound.beta_mean == bound.beta_max == gradient_change(adapter, make_plan(), OWN, SWAPPED)
    assert bound.omega == pytest.approx(4 * (0.25 / 3) * bound.beta_mean)  # K * mean(alpha) * beta, by hand
    assert all(torch.equal(one, other) for one, other in zip(adapter.parameters, before, strict=True))
    assert all(each.grad is None for each in adapter.parameters)


def test_omega_is_the_mean_of_each_prompts_product() -> None:
    """K * mean(alpha * beta) by hand: of unlike prompts another number than K times the product of the means."""
    adapter, other = make_adapter(), Answer((2, 14, 1), "", True, 1.0, donor="c")
    twice = Group(PROMPT, (OWN.answers[0], DONOR, other, OWN.answers[3]))
    back = Group(PROMPT, (OWN.answers[0], OWN.answers[1], other, OWN.answers[3]))
    betas = []
    for swapped, without in ((SWAPPED, OWN), (twice, back)):
        changes = zip(slow_gradient(adapter, swapped, {}), slow_gradient(adapter, without, {}), strict=True)
        betas.append(math.sqrt(sum(float((one - two).square().sum()) for one, two in changes)))
    bound = swap_bound(adapter, make_plan(), [OWN, STUCK, OWN], [SWAPPED, STUCK, twice], [0.25, 0.0, 0.5])
    assert bound is not None and (bound.beta_mean, bound.beta_max) == pytest.approx(
        (sum(betas) / 2, max(betas)), rel=1e-4
    )
    assert bound.omega == pytest.approx(4 * (0.25 * betas[0] + 0.0 + 0.5 * betas[1]) / 3, rel=1e-4)
    assert abs(bound.omega / (4 * 0.25 * bound.beta_mean) - 1) > 0.01


def test_without_a_swap_there_is_no_bound() -> None:
    assert swap_bound(make_adapter(), make_plan(), [OWN], [OWN], [0.0]) is None


def test_it_is_measured_at_the_first_public_step_and_every_eighth_after_it() -> None:
    assert [step for step in range(2, 60, 2) if is_due(step, 2)] == [2, 18, 34, 50]
    assert [step for step in range(3, 60, 3) if is_due(step, 3)] == [3, 27, 51]


def test_alphas_are_counted_by_value() -> None:
    figures = SwapFigures(wanted=4, found=3, used=3, alphas=[0.5, 0.25, 0.0, 0.0])
    found = swap_metrics(figures, SwapBound(1.0, 2.0, 3.0))
    assert found["alpha_histogram"] == {"0.000": 2, "0.250": 1, "0.500": 1}
    assert (found["alpha_mean"], found["alpha_max"], found["swapped_share"]) == (0.1875, 0.5, 0.5)
    assert (found["beta_mean"], found["beta_max"], found["omega"]) == (1.0, 2.0, 3.0)
    assert "beta_mean" not in swap_metrics(figures, None)


def test_memory_is_at_least_what_was_taken_and_speed_what_was_done() -> None:
    before = memory_peak_bytes()
    taken = bytearray(64 << 20)
    taken[::4096] = b"x" * len(taken[::4096])
    assert memory_peak_bytes() >= max(before, 64 << 20)
    del taken
    assert (rate(300, 1.5), rate(3, 0.0)) == (200.0, 0.0)


def test_a_public_step_says_all_of_it() -> None:
    receiver, _ = begun("a", public_grader=lambda pairs: [text.startswith("7") for text, _ in pairs])
    good = pb.Response(text="7a", finish=pb.FINISH_STOP)
    donors = pb.PublicDonors()
    for row in generated(receiver).prompts:
        donors.prompts.add(prompt_index=row.prompt_index, donors=[pb.Donor(origin="b", position=0, response=good)])
    metrics = receiver.carry_out(PublicStep(1, 2, "replace", donors)).metrics
    assert metrics["beta_max"] >= metrics["beta_mean"] > 0
    assert metrics["zero_variance_share"] < metrics["zero_variance_share_before"]
    assert metrics["logp_donor"] < 0 > metrics["logp_own"]
    assert metrics["omega"] == pytest.approx(4 * metrics["alpha_mean"] * metrics["beta_mean"])
    assert sum(metrics["alpha_histogram"].values()) == 3
    assert metrics["update_tokens_per_second"] > 0 and metrics["memory_peak_bytes"] > 64 << 20


def test_a_private_step_reports_its_groups_without_variance() -> None:
    session, shape = make_session()
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    found = session.carry_out(PrivateStep(1, 1)).metrics
    equal = sum(times for count, times in found["correct_histogram"].items() if count in ("0", "4"))  # of 4 answers
    assert found["zero_variance_share"] == pytest.approx(equal / 3)
    assert not {"zero_variance_share_before", "logp_donor"} & set(found)
