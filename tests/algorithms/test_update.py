"""The update against per-answer forwards of the plain model: shared prompts, parts, epochs, round starts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsilo.protocol.errors import OperationError
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.decoder import stream_of, token_logp
from silo.trainer.grpo import Answer, Group, Learner
from tests.algorithms.tiny import make_adapter, make_plan, peft_twin, random_factors

pytestmark = pytest.mark.torch
LOOSE = {"optimiser__grad_norm_max": 1e9}


def answer(ids: list[int], reward: float, *, finished: bool = True, donor: str = "") -> Answer:
    return Answer(tuple(ids), "", finished, reward, donor)


def own(one: Answer) -> Answer:
    return replace(one, donor="")


GROUPS = [
    Group((5, 9, 20, 7), (answer([4, 6, 1], 1.0), answer([3], 0.0), answer([8, 8, 8, 8, 8], 0.0, finished=False))),
    Group((11,), (answer([12, 1], 0.0), answer([13, 14, 1], 1.0, donor="b"))),
    Group((6, 7), (answer([4, 1], 1.0), answer([5, 1], 1.0))),
]


def plain_logp(model: Any, prompt: tuple[int, ...], ids: tuple[int, ...], temperature: float = 1.0) -> torch.Tensor:
    """One answer, no padding, no cache: what any textbook would do."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0] / temperature
    logp = logits.log_softmax(-1)
    return torch.stack([logp[len(prompt) - 1 + place, token] for place, token in enumerate(ids)])


def slow_gradient(adapter: LoraAdapter, groups: list[Group], temperature: float = 1.0) -> list[torch.Tensor]:
    """Oracle (d): mean over prompts of (1/K) sum_k A_k mean_t grad logp, sign turned to a loss."""
    total = torch.zeros(())
    twin = peft_twin(adapter)
    for group in groups:
        rewards = [one.reward for one in group.answers]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        for one in group.answers:
            advantage = (one.reward - mean) / (deviation + 1e-6) if deviation else 0.0
            logp = plain_logp(twin, group.prompt_ids, one.ids, temperature)
            total = total - advantage * logp.mean() / (len(rewards) * len(groups))
    return list(torch.autograd.grad(total, adapter.parameters))


def gradient_of(adapter: LoraAdapter, groups: list[Group], microbatch_tokens: int = 10_000, **changes: Any) -> Any:
    """What the first epoch hands to the optimiser."""
    plan = make_plan(**{**LOOSE, "optimiser__epochs": 1, **changes})
    held = [parameter.detach().clone() for parameter in adapter.parameters]
    figures = Learner(adapter, plan, microbatch_tokens=microbatch_tokens).update(groups)
    gradients = [parameter.grad.clone() for parameter in adapter.parameters if parameter.grad is not None]
    with torch.no_grad():
        for parameter, value in zip(adapter.parameters, held, strict=True):
            parameter.copy_(value)
    return gradients, figures


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    scale = max(float(tensor.abs().max()) for tensor in expected)
    assert scale > 0
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5 * scale)


def test_a_shared_prompt_gives_what_a_plain_forward_gives() -> None:
    adapter = make_adapter()
    pairs = [(place, one.ids) for place, group in enumerate(GROUPS) for one in group.answers]
    stream = stream_of([group.prompt_ids for group in GROUPS], pairs, torch.device("cpu"))
    assert len(stream.ids) == sum(len(group.prompt_ids) - 1 for group in GROUPS) + sum(len(ids) for _, ids in pairs)
    logp, _ = token_logp(adapter.decoder.hidden(stream), adapter.decoder.head, stream.targets, 1.0)
    twin = peft_twin(adapter)
    for got, (place, ids) in zip(logp.split(stream.lengths.tolist()), pairs, strict=True):
        assert torch.allclose(got, plain_logp(twin, GROUPS[place].prompt_ids, ids), atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_d_first_update_gradient(temperature: float) -> None:
    adapter = make_adapter()
    expected = slow_gradient(adapter, GROUPS, temperature)
    got, figures = gradient_of(adapter, GROUPS, rollout__temperature=temperature)
    assert_close(got, expected)
    assert figures.ratio_deviation_first == 0.0


def test_parts_add_up_to_the_whole() -> None:
    adapter = make_adapter()
    whole, figures = gradient_of(adapter, GROUPS, objective__kl_coefficient=0.1)
    parts, figures_of_parts = gradient_of(adapter, GROUPS, microbatch_tokens=10, objective__kl_coefficient=0.1)
    assert_close(parts, whole)
    assert figures_of_parts.trained_tokens == figures.trained_tokens == 18
    assert figures_of_parts.kl == pytest.approx(figures.kl, rel=1e-4)


def test_f_order_and_padding_change_nothing() -> None:
    adapter = make_adapter()
    plain, _ = gradient_of(adapter, GROUPS)
    turned = [Group(group.prompt_ids, tuple(reversed(group.answers))) for group in reversed(GROUPS)]
    shuffled, _ = gradient_of(adapter, turned)
    assert_close(shuffled, plain)
    # a long group without signal, in the same place of every denominator, adds padding only when KL keeps it
    tail = Group(tuple(range(3, 15)), (answer([3] * 9 + [1], 0.0), answer([4, 1], 0.0)))
    longer = [*GROUPS[:2], tail]
    padded, _ = gradient_of(adapter, longer, objective__entropy_coefficient=1e-12)
    assert_close(padded, plain)


def test_groups_without_signal_stay_in_the_denominator_but_not_in_the_forward() -> None:
    adapter = make_adapter()
    all_groups, figures = gradient_of(adapter, GROUPS)
    two_groups, _ = gradient_of(adapter, GROUPS[:2])
    assert figures.trained_tokens == 14
    assert_close(all_groups, [gradient * 2 / 3 for gradient in two_groups])


def test_kl_is_to_the_base_with_the_adapter_off() -> None:
    adapter = make_adapter()
    _, figures = gradient_of(adapter, GROUPS, objective__kl_coefficient=0.1)
    with torch.no_grad():
        values = []
        twin = peft_twin(adapter)
        for group in GROUPS:
            for one in group.answers:
                new = plain_logp(twin, group.prompt_ids, one.ids)
                with twin.disable_adapter():
                    reference = plain_logp(twin, group.prompt_ids, one.ids)
                values += [math.exp(r - n) - (r - n) - 1 for n, r in zip(new.tolist(), reference.tolist(), strict=True)]
    assert figures.kl == pytest.approx(sum(values) / len(values), rel=1e-4)
    assert figures.kl is not None and figures.kl > 0.01


def test_local_denominator_ratio_is_one_on_epoch_one_and_not_on_epoch_two() -> None:
    donors_only = [Group((5, 9), (answer([4, 6, 1], 1.0, donor="b"), answer([3, 1], 0.0)))]
    plan = make_plan(optimiser__epochs=2, optimiser__learning_rate=1e-2)
    figures = Learner(make_adapter(), plan, microbatch_tokens=1000).update(donors_only)
    assert figures.ratio_deviation_first == 0.0
    assert figures.ratio_deviation_last > 1e-3
    assert figures.logp_donor is not None and figures.logp_own is not None


@pytest.mark.parametrize("donors", [False, True])
def test_log_probabilities_are_of_own_answers_and_of_donors_apart(donors: bool) -> None:
    adapter = make_adapter()
    groups = GROUPS if donors else [Group(each.prompt_ids, tuple(map(own, each.answers))) for each in GROUPS]
    _, figures = gradient_of(adapter, groups)
    found: dict[bool, list[float]] = {True: [], False: []}
    with torch.no_grad():
        for group in groups[:2]:  # the third has no signal and is not trained on
            for one in group.answers:
                found[bool(one.donor)] += plain_logp(peft_twin(adapter), group.prompt_ids, one.ids).tolist()
    assert figures.logp_own == pytest.approx(sum(found[False]) / len(found[False]), rel=1e-4)
    if donors:
        assert figures.logp_donor == pytest.approx(sum(found[True]) / len(found[True]), rel=1e-4)
    else:
        assert figures.logp_donor is None and not found[True]


@pytest.mark.parametrize("dual_clip", [None, 1.001])
def test_clip_share_is_that_of_the_second_epochs_ratios(dual_clip: float | None) -> None:
    """With a band of two unlike sides, so that each is told from the other."""
    changes: dict[str, Any] = {
        "optimiser__epochs": 2, "optimiser__learning_rate": 3e-2, "objective__clip_low": 0.9,
        "objective__clip_high": 0.02, "objective__dual_clip": dual_clip, **LOOSE,
    }  # fmt: skip
    # a word that both begin with: the short answer pulls its probability up, in the one that is pushed down too
    shared = Group((5, 9), (answer([4, 1], 1.0), answer([4, 6, 7, 8, 9, 3], 0.0)))
    groups = [*GROUPS[:2], shared]
    adapter, once = make_adapter(), make_adapter()
    figures = Learner(adapter, make_plan(**changes), microbatch_tokens=1000).update(groups)
    before, after = peft_twin(make_adapter()), peft_twin(once)
    Learner(once, make_plan(**{**changes, "optimiser__epochs": 1}), microbatch_tokens=1000).update(groups)
    clipped: list[bool] = []
    turned: list[bool] = []
    bounded: list[bool] = []
    with torch.no_grad():
        for group in groups:
            mean = sum(one.reward for one in group.answers) / len(group.answers)
            for one in group.answers:
                ratios = (
                    plain_logp(after, group.prompt_ids, one.ids) - plain_logp(before, group.prompt_ids, one.ids)
                ).exp()
                for ratio in ratios.tolist():
                    beyond = dual_clip is not None and ratio > dual_clip
                    clipped.append(ratio > 1.02 if one.reward > mean else ratio < 0.1 or beyond)
                    turned.append(ratio > 1.9 if one.reward > mean else ratio < 0.98 or beyond)
                    bounded.append(one.reward < mean and beyond)
    assert figures.clip_share == pytest.approx(sum(clipped) / len(clipped))
    assert 0 < sum(clipped) != sum(turned)  # so that a band turned round would be seen
    assert any(bounded) is (dual_clip is not None)


@pytest.mark.parametrize("settings", [(), (0.5, 0.9, 1e-3)])  # the first and the last move a factor by more than 2e-5
def test_two_epochs_equal_two_hand_made_adamw_steps(settings: tuple[float, ...]) -> None:
    """Old log-probabilities stay those of the first forward; state carries from epoch to epoch."""
    adapter, twin = make_adapter(), make_adapter()
    named = dict(
        zip(("optimiser__adam_beta1", "optimiser__adam_beta2", "optimiser__adam_epsilon"), settings, strict=False)
    )
    plan = make_plan(optimiser__epochs=2, optimiser__learning_rate=1e-3, optimiser__grad_norm_max=0.05, **named)
    learner = Learner(adapter, plan, microbatch_tokens=1000)
    learner.update(GROUPS)
    beta1, beta2, epsilon = settings or (0.9, 0.999, 1e-8)
    assert learner._optimiser.param_groups[0]["betas"] == (beta1, beta2)  # two steps hardly feel the second
    optimiser = torch.optim.AdamW(twin.parameters, lr=1e-3, betas=(beta1, beta2), eps=epsilon, weight_decay=0.01)
    old: list[torch.Tensor] = []
    plain = peft_twin(twin)
    for _ in range(2):
        loss, place = torch.zeros(()), 0
        for group in GROUPS[:2]:
            rewards = torch.tensor([one.reward for one in group.answers])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for one, advantage in zip(group.answers, advantages, strict=True):
                logp = plain_logp(plain, group.prompt_ids, one.ids)
                if len(old) <= place:
                    old.append(logp.detach())
                rho = (logp - old[place]).exp()
                place += 1
                gain = torch.minimum(rho * advantage, rho.clamp(0.8, 1.25) * advantage).mean()
                loss = loss - gain / (len(group.answers) * len(GROUPS))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters, 0.05)
        optimiser.step()
    for one, other in zip(adapter.parameters, twin.parameters, strict=True):
        assert torch.allclose(one, other, atol=2e-5)
    assert adapter.drift() > 1e-3


def test_nothing_to_learn_leaves_only_weight_decay() -> None:
    adapter = make_adapter()
    plan = make_plan(optimiser__epochs=1, optimiser__learning_rate=1e-2, optimiser__weight_decay=0.5)
    before = [parameter.detach().clone() for parameter in adapter.parameters]
    figures = Learner(adapter, plan, microbatch_tokens=1000).update([GROUPS[2]])
    assert figures.trained_tokens == 0
    for parameter, value in zip(adapter.parameters, before, strict=True):
        assert torch.allclose(parameter, value * (1 - 1e-2 * 0.5), rtol=1e-6)


def test_proximal_term_adds_mu_times_the_drift() -> None:
    adapter = make_adapter()
    with torch.no_grad():
        for parameter in adapter.parameters:
            parameter.add_(0.1)
    plain, _ = gradient_of(adapter, GROUPS)
    pulled, _ = gradient_of(adapter, GROUPS, objective__proximal_mu=0.5)
    assert_close(pulled, [gradient + 0.5 * 0.1 for gradient in plain])


@pytest.mark.parametrize(("state", "same"), [("reset", True), ("keep", False)])
def test_optimiser_state_is_reset_or_kept_over_rounds(state: str, same: bool) -> None:
    adapter = make_adapter()
    factors = random_factors(adapter.shape, 3, 0.3)
    learner = Learner(adapter, make_plan(optimiser__state=state), microbatch_tokens=1000)
    deltas = []
    for _ in range(2):
        adapter.load(factors)
        learner.start_round()
        learner.update(GROUPS[:2])
        deltas.append(adapter.delta())
    equal = all((deltas[0][name] == deltas[1][name]).all() for name in factors)
    assert equal is same


def test_a_later_epoch_that_is_not_finite_takes_the_earlier_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, twin = make_adapter(), make_adapter()
    plan = make_plan(optimiser__epochs=2, optimiser__state="keep")
    learner, other = Learner(adapter, plan, microbatch_tokens=1000), Learner(twin, plan, microbatch_tokens=1000)
    for one in (learner, other):
        one.update(GROUPS)  # so that the optimiser has a state worth keeping
    before = [parameter.detach().clone() for parameter in adapter.parameters]
    clip = torch.nn.utils.clip_grad_norm_
    norms: list[float] = []

    def second_is_infinite(parameters: Any, norm_max: float) -> torch.Tensor:
        norms.append(float(clip(parameters, norm_max)))
        return torch.tensor(norms[-1] if len(norms) == 1 else math.inf)

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.utils, "clip_grad_norm_", second_is_infinite)
        with pytest.raises(OperationError) as caught:
            learner.update(GROUPS)
    assert caught.value.code == "NOT_FINITE" and len(norms) == 2
    assert all(torch.equal(parameter, value) for parameter, value in zip(adapter.parameters, before, strict=True))
    # the optimiser forgot the taken-back epoch too: both go on alike
    for one in (learner, other):
        one.update(GROUPS)
    assert all(torch.equal(one, same) for one, same in zip(adapter.parameters, twin.parameters, strict=True))
    assert not all(torch.equal(one, value) for one, value in zip(adapter.parameters, before, strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    adapter = make_adapter()
    name = "model.layers.0.mlp.down_proj.lora_B"
    factors = random_factors(adapter.shape, 3, 0.3)
    factors[name] = factors[name] * float("inf")
    adapter.load(factors)
    with pytest.raises(OperationError) as caught:
        Learner(adapter, make_plan(), microbatch_tokens=1000).update(GROUPS)
    assert caught.value.code == "NOT_FINITE"
    assert all((adapter.delta()[key] == 0).all() for key in factors if key != name)
