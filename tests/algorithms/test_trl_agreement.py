"""Our update against TRL's GRPOTrainer, each through its own whole path, on the same ragged answers.

TRL builds the batch (padding, advantages, old and reference log-probabilities), the loss and the gradients with its
own code; only the sampler is replaced, by one that hands out fixed answers. The trainer's model is the same tiny
Qwen3 with the same LoRA factors, in float32 on the CPU. Two epochs are compared: the first, where every ratio is 1,
and the second, taken at the factors that our optimiser reached, where ratios leave the band on both sides. The
differences found are printed: `pytest tests/algorithms/test_trl_agreement.py -rP`.

How TRL's words map to ours:

| TRL | plan |
|---|---|
| `loss_type="grpo"` | `token_aggregation: response-mean` |
| `loss_type="dapo"` | `token_aggregation: token-mean`, one mean over all tokens of the step |
| `loss_type="bnpo"` | equals token-mean for a step in one piece; else it is the mean of the pieces' own means |
| `epsilon`, `epsilon_high`, `delta` | `clip_low`, `clip_high`, `dual_clip` |
| `beta` with `use_bias_correction_kl=False` | `kl_coefficient` |
| `entropy_coef` (always one mean over tokens) | `entropy_coefficient` under token-mean |
| `mask_truncated_completions` | `mask_truncated` |
| `scale_rewards="group"` | `advantage_std: sample`, `advantage_epsilon: 1e-4` (TRL's constant; our default is 1e-6) |
| `num_iterations`, `temperature` | `optimiser.epochs`, `rollout.temperature` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from silo.trainer import grpo
from silo.trainer.grpo import Answer, Group, Learner
from tests.algorithms.tiny import ALPHA, RANK, make_adapter, make_model, make_plan, make_shape, make_tokenizer

pytestmark = [
    pytest.mark.torch,
    # TRL 1.16 and peft 0.21 use names that transformers 5.23 is giving up
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]

END = 1
# Absolute, for the loss and for every number of every gradient; the largest gradients here are between 0.2 and 1.
# Both sides compute in float32 and add in different orders (TRL runs prompt and answer as one padded sequence, we
# share the prompt's keys and values), which costs between 2e-7 and 4e-6.
TOLERANCE = 1e-5
# What any mistake in a mask, a weight, the band or the reference exceeds in some gradient (seen: 0.048 and more).
FAR = 100 * TOLERANCE
# Large enough that one step of AdamW drives ratios out of the band on both sides, small enough that gradients,
# which grow with the ratio, stay about 1.
LEARNING_RATE = 0.0015
KL = 0.02
ANSWERS_PER_PROMPT = 4
WHOLE = 10_000  # microbatch_tokens that leave the step in one piece


def answers(*written: tuple[float, list[int]]) -> tuple[Answer, ...]:
    """An answer is finished when its last token is END; the others were cut off."""
    return tuple(Answer(tuple(ids), "", ids[-1] == END, reward) for reward, ids in written)


GROUPS = [
    Group((5, 9, 20, 7), answers((1.0, [4, 6, END]), (0.0, [3]), (0.0, [8, 8, 9, 8, 8, 12, 3]), (0.0, [10, END]))),
    Group((11,), answers((0.0, [12, END]), (1.0, [13, 14, END]), (1.0, [7, 21, 16, 5, 5]), (1.0, [6, 19, 4, END]))),
    Group((6, 7, 3, 3, 18, 22), answers((1.0, [4, END]), (1.0, [5, END]), (1.0, [END]), (1.0, [9, 8, 7, 6, 5, 4, 3]))),
    Group((15, 4), answers((1.0, [17, 6, 6]), (0.0, [17, 6, END]), (0.0, [23, 22, 21, END]), (1.0, [3, 14, 15, 9]))),
]
# The same as TRL's data loader would hand over: a row for each answer.
ROWS = [
    {"prompt": str(place), "verdict": answer.reward} for place, group in enumerate(GROUPS) for answer in group.answers
]


@dataclass(frozen=True)
class Epoch:
    """The loss of one epoch, its gradients, and the factors they were taken at, by wire name."""

    loss: float
    factors: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences between two sides."""

    loss: float
    gradient: float


@dataclass(frozen=True)
class Case:
    """The same choice in both languages. pieces: how many parts TRL cuts the step into."""

    theirs: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    pieces: int = 1


@dataclass(frozen=True)
class Breach:
    case: Case
    ours_trains_on: Callable[[Sequence[Group]], Sequence[Group]] = list


GRPO: dict[str, Any] = {"loss_type": "grpo"}
DAPO: dict[str, Any] = {"loss_type": "dapo"}
BNPO: dict[str, Any] = {"loss_type": "bnpo"}
TOKEN_MEAN: dict[str, Any] = {"objective__token_aggregation": "token-mean"}


def with_kl(theirs: dict[str, Any], ours: dict[str, Any], **changes: Any) -> Case:
    return Case({**theirs, "beta": KL}, {**ours, "objective__kl_coefficient": KL}, **changes)


CASES = {
    "grpo": Case(GRPO),
    "grpo with KL": with_kl(GRPO, {}),
    "grpo with KL in pieces": with_kl(GRPO, {}, pieces=4),
    "grpo at temperature 0.7": with_kl({**GRPO, "temperature": 0.7}, {"rollout__temperature": 0.7}),
    "grpo, truncated masked": with_kl(
        {**GRPO, "mask_truncated_completions": True}, {"objective__mask_truncated": True}
    ),
    "grpo, dual clip": Case({**GRPO, "delta": 1.5}, {"objective__dual_clip": 1.5}),
    "token mean": Case(DAPO, TOKEN_MEAN),
    "token mean with KL": with_kl(DAPO, TOKEN_MEAN),
    "token mean with KL in pieces": with_kl(DAPO, TOKEN_MEAN, pieces=4),
    "token mean at temperature 0.7": with_kl({**DAPO, "temperature": 0.7}, {**TOKEN_MEAN, "rollout__temperature": 0.7}),
    "token mean, truncated masked": with_kl(
        {**DAPO, "mask_truncated_completions": True}, {**TOKEN_MEAN, "objective__mask_truncated": True}
    ),
    "token mean with entropy": Case(
        {**DAPO, "entropy_coef": 0.05}, {**TOKEN_MEAN, "objective__entropy_coefficient": 0.05}
    ),
    "token mean, bnpo in one piece": with_kl(BNPO, TOKEN_MEAN),
}


def our_epochs(
    groups: Sequence[Group], changes: dict[str, Any], microbatch_tokens: int = WHOLE, *, likelihood: bool = False
) -> list[Epoch]:
    """What Learner.update does: losses as handed to backward, gradients as handed to the optimiser."""
    settings = {
        "objective__clip_low": 0.2,
        "objective__clip_high": 0.25,
        "objective__advantage_epsilon": 1e-4,
        "optimiser__epochs": 2,
        "optimiser__learning_rate": LEARNING_RATE,
        "optimiser__grad_norm_max": 1e9,  # clipping would hide the gradients' size
    }
    adapter = make_adapter()
    names = sorted(adapter.shape.shapes)  # the order of `parameters`
    losses: list[float] = []
    epochs: list[Epoch] = []
    backward, clip = Tensor.backward, torch.nn.utils.clip_grad_norm_

    def recording_backward(loss: Tensor) -> None:
        losses.append(loss.item())
        backward(loss)

    def recording_clip(parameters: list[torch.nn.Parameter], norm_max: float) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        epochs.append(epoch_at(named, sum(losses)))
        losses.clear()
        return clip(parameters, norm_max)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Tensor, "backward", recording_backward)
        patched.setattr(torch.nn.utils, "clip_grad_norm_", recording_clip)
        plan = make_plan(**{**settings, **changes})
        Learner(adapter, plan, microbatch_tokens=microbatch_tokens).update(groups, likelihood=likelihood)
    return epochs


def epoch_at(factors: dict[str, torch.nn.Parameter], loss: float) -> Epoch:
    gradients = {name: value.grad.clone() for name, value in factors.items() if value.grad is not None}
    assert gradients.keys() == factors.keys()
    return Epoch(loss, {name: value.detach().clone() for name, value in factors.items()}, gradients)


def lora_factors(model: Any) -> dict[str, torch.nn.Parameter]:
    """The trainable factors of a peft model, by wire name."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): value
        for name, value in model.named_parameters()
        if name.endswith(".default.weight")
    }


def write_factors(model: Any, factors: Mapping[str, Tensor]) -> None:
    own = lora_factors(model)
    assert own.keys() == factors.keys()
    with torch.no_grad():
        for name, value in factors.items():
            own[name].copy_(value)


@dataclass(frozen=True)
class Peer:
    """A GRPOTrainer over GROUPS."""

    trainer: Any

    def epoch(self, factors: dict[str, Tensor]) -> Epoch:
        """One epoch over the step, at these factors. The first one also builds the batch, as TRL's own loop does."""
        model = self.trainer.model
        write_factors(model, factors)
        model.zero_grad()
        pieces = self.trainer.args.gradient_accumulation_steps
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # TRL shuffles answers before it cuts the step into pieces
            loss = sum(float(self.trainer.training_step(model, ROWS, None)) for _ in range(pieces))
        return epoch_at(lora_factors(model), loss)

    def ratios_and_advantages(self) -> tuple[Tensor, Tensor]:
        """rho at the factors that the model holds, and A, of every answer token. Both [tokens]."""
        ratios, advantages = [], []
        for batch in self.trainer._buffered_inputs:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            kept = batch["completion_mask"].bool()
            with torch.no_grad():
                logp = self.trainer._get_per_token_logps_and_entropies(self.trainer.model, ids, mask, kept.shape[1])[0]
            ratios.append((logp - batch["old_per_token_logps"]).exp()[kept])
            advantages.append(batch["advantages"].unsqueeze(1).expand_as(kept)[kept])
        return torch.cat(ratios), torch.cat(advantages)


def fixed_answers(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """TRL's rollout function: what a sampler would have written."""
    assert prompts == [row["prompt"] for row in ROWS]
    return {
        "prompt_ids": [list(group.prompt_ids) for group in GROUPS for _ in group.answers],
        "completion_ids": [list(answer.ids) for group in GROUPS for answer in group.answers],
        "logprobs": None,
    }


def given_verdicts(verdict: list[float], **_: Any) -> list[float]:
    """TRL's reward function."""
    return verdict


MakePeer = Callable[..., Peer]


@pytest.fixture
def make_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakePeer:
    """TRL is imported here and not by the module, so that collecting the suite does not wait for it."""
    import datasets
    import huggingface_hub.constants
    import peft
    import trl

    # a trainer that is made reports its own use to the model hub, unless these say not to
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is marked as experimental

    def make(settings: dict[str, Any], pieces: int = 1, *, loaded_before: Mapping[str, Tensor] | None = None) -> Peer:
        model = make_model()
        modules = list(make_shape(model).modules)
        lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, task_type="CAUSAL_LM")
        matching = {
            "scale_rewards": "group",
            "epsilon": 0.2,
            "epsilon_high": 0.25,
            "beta": 0.0,
            "use_bias_correction_kl": False,
            "num_iterations": 2,
            "temperature": 1.0,
        }
        arguments = trl.GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            per_device_train_batch_size=len(ROWS) // pieces,
            gradient_accumulation_steps=pieces,
            num_generations=ANSWERS_PER_PROMPT,
            max_completion_length=16,
            **{**matching, **settings},
        )
        with torch.random.fork_rng(devices=[]):  # the trainer seeds the global generator
            if loaded_before is not None:
                model = peft.get_peft_model(model, lora)
                write_factors(model, loaded_before)
            trainer = trl.GRPOTrainer(
                model=model,
                reward_funcs=given_verdicts,
                args=arguments,
                train_dataset=datasets.Dataset.from_list(ROWS),
                processing_class=make_tokenizer(),
                peft_config=lora if loaded_before is None else None,
                rollout_func=fixed_answers,
            )
        trainer.current_gradient_accumulation_steps = pieces  # set by the loop around training_step
        return Peer(trainer)

    return make


def difference(ours: list[Epoch], theirs: list[Epoch]) -> Difference:
    """Largest over the epochs, and over every number of every gradient."""
    pairs = list(zip(ours, theirs, strict=True))
    return Difference(
        loss=max(abs(one.loss - other.loss) for one, other in pairs),
        gradient=max(
            float((value - other.gradients[name]).abs().max())
            for one, other in pairs
            for name, value in one.gradients.items()
        ),
    )


@pytest.mark.quick(keep=6)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_lora_gradient_agree(name: str, make_peer: MakePeer) -> None:
    case = CASES[name]
    ours = our_epochs(GROUPS, case.ours, WHOLE if case.pieces == 1 else 40)
    peer = make_peer(case.theirs, case.pieces)
    theirs = [peer.epoch(epoch.factors) for epoch in ours]
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        largest = max(float(gradient.abs().max()) for gradient in one.gradients.values())
        print(f"epoch {place}: loss {one.loss:+.4f}, largest gradient {largest:.3f}, {difference([one], [other])}")

    ratio, advantage = peer.ratios_and_advantages()
    assert ((advantage > 0) & (ratio > 1.25)).any()
    assert ((advantage < 0) & (ratio < 0.8)).any()
    assert ((advantage != 0) & (ratio > 0.8) & (ratio < 1.25) & (ratio != 1)).any()
    if "delta" in case.theirs:
        assert ((advantage < 0) & (ratio > case.theirs["delta"])).any()
    for epoch in ours:  # B is not zero, so every A has a gradient too
        assert min(float(value.abs().max()) for value in epoch.gradients.values()) > FAR
    found = difference(ours, theirs)
    assert found.loss <= TOLERANCE
    assert found.gradient <= TOLERANCE


def without_the_end(groups: Sequence[Group]) -> list[Group]:
    """A mask one token short: END of a finished answer is not trained."""
    return [
        Group(group.prompt_ids, tuple(replace(one, ids=one.ids[:-1]) if one.finished else one for one in group.answers))
        for group in groups
    ]


# One thing wrong on one side each, everything else as in the test above.
BREACHES: dict[str, Breach] = {
    "their mean per answer, our mean over tokens": Breach(Case(GRPO, TOKEN_MEAN)),
    "their mean over tokens, our mean per answer": Breach(Case(DAPO)),
    "their mean over tokens of each piece": Breach(Case(BNPO, TOKEN_MEAN, pieces=4)),
    "our mask a token short, mean per answer": Breach(Case(GRPO), ours_trains_on=without_the_end),
    "our mask a token short, mean over tokens": Breach(Case(DAPO, TOKEN_MEAN), ours_trains_on=without_the_end),
    "our population std": Breach(Case(GRPO, {"objective__advantage_std": "population"})),
    "our band symmetrical": Breach(Case(GRPO, {"objective__clip_high": 0.2})),
    "our KL left out": Breach(Case({**GRPO, "beta": KL})),
    "their KL weighted by the ratio": Breach(with_kl({**GRPO, "use_bias_correction_kl": True}, {})),
    "their temperature": Breach(Case({**GRPO, "temperature": 0.7})),
}


@pytest.mark.quick(keep=5)
@pytest.mark.parametrize("name", BREACHES)
def test_a_mistake_on_either_side_is_far_outside_the_tolerance(name: str, make_peer: MakePeer) -> None:
    breach = BREACHES[name]
    ours = our_epochs(breach.ours_trains_on(GROUPS), breach.case.ours)
    peer = make_peer(breach.case.theirs, breach.case.pieces)
    found = difference(ours, [peer.epoch(epoch.factors) for epoch in ours])
    print(found)
    assert found.gradient > FAR


def test_an_adapter_loaded_before_the_trainer_becomes_its_reference(make_peer: MakePeer) -> None:
    """Why the reference of the KL is said at all: a trainer rebuilt around a received adapter measures KL to that
    adapter, which is 0 at the round's start. Ours is to the base model, in every round."""
    ours = our_epochs(GROUPS, {"objective__kl_coefficient": KL})
    rebuilt = make_peer({**GRPO, "beta": KL}, loaded_before=ours[0].factors)
    found = rebuilt.epoch(ours[0].factors)
    without = our_epochs(GROUPS, {})
    assert abs(found.loss - without[0].loss) <= TOLERANCE
    assert ours[0].loss - found.loss > FAR


def test_advantages_agree_and_are_those_of_the_formula(make_peer: MakePeer) -> None:
    peer = make_peer(GRPO)
    peer.epoch(our_epochs(GROUPS, {})[0].factors)
    theirs = {}
    (batch,) = peer.trainer._buffered_inputs  # shuffled
    for place, advantage in enumerate(batch["advantages"].tolist()):
        prompt = batch["prompt_ids"][place][batch["prompt_mask"][place].bool()]
        ids = batch["completion_ids"][place][batch["completion_mask"][place].bool()]
        theirs[tuple(prompt.tolist()), tuple(ids.tolist())] = advantage
    # K = 4: one right 0.75 / 0.5 and -0.25 / 0.5, two right 0.5 / sqrt(1/3), three right as one with the sign turned
    by_hand = {1: (1.5, -0.5), 2: (0.8660254, -0.8660254), 3: (0.5, -1.5), 4: (0.0, 0.0)}
    for group in GROUPS:
        rewards = torch.tensor([answer.reward for answer in group.answers])
        ours = grpo.group_advantages(rewards, std="sample", epsilon=1e-4)
        right, wrong = by_hand[int(rewards.sum())]
        for answer, advantage in zip(group.answers, ours.tolist(), strict=True):
            assert theirs[group.prompt_ids, answer.ids] == pytest.approx(advantage, abs=1e-6)  # float32
            # epsilon 1e-4 beside a deviation of at least 0.5 takes up to 2e-4 of it away
            assert advantage == pytest.approx(right if answer.reward else wrong, rel=2.1e-4)
