"""The decoder against transformers' own forward of each architecture, and through autograd its gradients."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fedsilo.protocol.errors import UsageError
from silo.trainer.decoder import Decoder, stream_of, token_logp
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import Question

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
SCALE, RANK, TEMPERATURE = 2.0, 3, 0.7
SIDES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
MODELS: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config(**SIDES, head_dim=8), Qwen3ForCausalLM),
    "qwen3, wide heads, tied": (Qwen3Config(**SIDES, head_dim=16, tie_word_embeddings=True), Qwen3ForCausalLM),
    "qwen2": (Qwen2Config(**SIDES), Qwen2ForCausalLM),
    "llama": (LlamaConfig(**SIDES), LlamaForCausalLM),
    "llama, every head its own keys": (LlamaConfig(**SIDES | {"num_key_value_heads": 4}), LlamaForCausalLM),
    "mistral": (MistralConfig(**SIDES, head_dim=8, sliding_window=None), MistralForCausalLM),
    "llama 3 positions, biases": (
        LlamaConfig(**SIDES, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True), LlamaForCausalLM,
    ),
}  # fmt: skip
# Prompts of one token have no prefix of their own; answers of one token are the shortest there are.
PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9], [11, 12]]
ANSWERS = [(0, [10, 11, 12]), (0, [13]), (1, [14, 15, 16, 17, 18, 19]), (2, [20, 21]), (2, [22, 23, 24, 25]), (3, [1])]
# float32, other orders of addition than transformers'; seen: 2e-6 of the largest number
TOLERANCE = 1e-5


def make(name: str) -> Any:
    config, kind = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = kind(config).float().eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)  # biases and norms that matter
    return model


def make_factors(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(5)
    return {
        name: (
            torch.randn(RANK, module.in_features, generator=draws).mul_(0.2).requires_grad_(),
            torch.randn(module.out_features, RANK, generator=draws).mul_(0.2).requires_grad_(),
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def plain_logits(model: Any, factors: Any, ids: list[int]) -> torch.Tensor:
    """transformers' forward with W + s B A in the place of W. [len(ids), V]."""
    merged = {f"{name}.weight": model.get_submodule(name).weight + SCALE * b @ a for name, (a, b) in factors.items()}
    logits: torch.Tensor = functional_call(model, merged, (torch.tensor([ids]),)).logits[0]
    return logits


def plain(model: Any, factors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of every answer token, an answer at a time."""
    found = []
    for place, ids in ANSWERS:
        prompt = PROMPTS[place]
        logp = (plain_logits(model, factors, prompt + ids)[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        found.append((logp[torch.arange(len(ids)), torch.tensor(ids)], -(logp.exp() * logp).sum(-1)))
    return torch.cat([logp for logp, _ in found]), torch.cat([entropy for _, entropy in found])


def ours(decoder: Decoder, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    stream = stream_of(PROMPTS, ANSWERS, CPU)
    hidden = decoder.hidden(stream, **options)
    logp, entropy = token_logp(hidden, decoder.head, stream.targets, TEMPERATURE, with_entropy=True)
    assert entropy is not None
    return logp, entropy


def weighted(logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """A loss in which every place counts otherwise."""
    weights = torch.linspace(-1, 1, 2 * len(logp))
    return (logp * weights[: len(logp)]).sum() + (entropy * weights[len(logp) :]).sum()


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.quick(keep=6)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_every_gradient_are_those_of_transformers(
    name: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silo.trainer.decoder.LOGITS_MAX", 5 * 64)  # so that logits come in several pieces
    model = make(name)
    factors = make_factors(model)
    flat = [factor for pair in factors.values() for factor in pair]
    values = plain(model, factors)
    gradients = torch.autograd.grad(weighted(*values), flat)
    decoder = Decoder(model, factors, SCALE)
    found = ours(decoder, checkpointing=checkpointing)
    for got, expected in zip(found, values, strict=True):
        assert relative(got, expected) < TOLERANCE
    largest = max(float(gradient.abs().max()) for gradient in gradients)
    for got, expected in zip(torch.autograd.grad(weighted(*found), flat), gradients, strict=True):
        assert float((got - expected).abs().max()) < TOLERANCE * largest
    with decoder.base_only():
        base = plain(model, {})
        assert all(relative(got, expected) < TOLERANCE for got, expected in zip(ours(decoder), base, strict=True))
    assert relative(base[0], values[0]) > 1e-2  # the factors do something


@pytest.mark.quick(keep=3)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_those_of_transformers(name: str) -> None:
    model = make(name)
    factors = make_factors(model)
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(plain_logits(model, factors, ids)[-1].argmax()))
        expected.append(tuple(ids[len(prompt) :]))
    engine = EmbeddedEngine(Decoder(model, factors, SCALE), stop_ids=(63,))
    questions = [Question(tuple(prompt), (None, None)) for prompt in PROMPTS]
    answers = engine.generate(questions, temperature=1.0, max_new_tokens=12)
    for row, whole in zip(answers, expected, strict=True):
        until_stop = whole[: whole.index(63) + 1] if 63 in whole else whole
        assert [answer.ids for answer in row] == [until_stop] * 2


def test_the_model_itself_still_works_and_holds_no_second_copy() -> None:
    model = make("qwen2")
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        before = model(ids).logits
        decoder = Decoder(model, {}, SCALE)
        assert torch.equal(model(ids).logits, before)
    attention = model.model.layers[1].self_attn
    joined = decoder.layers[1].qkv.weight
    assert {
        each.weight.untyped_storage().data_ptr() for each in (attention.q_proj, attention.k_proj, attention.v_proj)
    } == {joined.untyped_storage().data_ptr()}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_no_gradient_is_made_for_a_frozen_factor() -> None:
    model = make("llama")
    factors = make_factors(model)
    for a, _ in factors.values():
        a.requires_grad_(False)
    weighted(*ours(Decoder(model, factors, SCALE))).backward()
    assert all(a.grad is None and b.grad is not None and b.grad.abs().sum() > 0 for a, b in factors.values())


def test_logits_never_exist_for_all_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the head's function allocates at its peak, by torch's own count, stays below one matrix of all logits."""
    tokens, words, width = 4_096, 2_048, 8
    monkeypatch.setattr("silo.trainer.decoder.LOGITS_MAX", 64 * words)
    hidden = torch.randn(tokens, width, requires_grad=True)
    head, targets = torch.randn(words, width), torch.randint(words, (tokens,))
    with torch.profiler.profile(profile_memory=True) as profiler:
        token_logp(hidden, head, targets, 1.0)[0].sum().backward()
    largest = max(event.cpu_memory_usage for event in profiler.events())
    assert 0 < largest < tokens * words * 4 / 8


class Disguised(nn.Linear):
    """As libraries for quantised weights or adapters derive theirs."""


def changed(name: str, module: nn.Module) -> Any:
    model = make("llama")
    model.set_submodule(name, module)
    return model


def quantised() -> Any:
    model = make("llama")
    model.config = copy.deepcopy(model.config)  # it is shared
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def decoded() -> Any:
    model = make("llama")
    Decoder(model, {}, SCALE)
    return model


@pytest.mark.parametrize("act", ["silu", "swish"])
def test_both_names_of_the_activation_are_known(act: str) -> None:
    Decoder(LlamaForCausalLM(LlamaConfig(**SIDES, hidden_act=act)), {}, SCALE)


@pytest.mark.parametrize(
    ("model", "factors", "words"),
    [
        (lambda: GemmaForCausalLM(GemmaConfig(**SIDES)), {}, "is a GemmaForCausalLM"),
        (lambda: MistralForCausalLM(MistralConfig(**SIDES)), {}, "sliding"),
        (lambda: Qwen2ForCausalLM(Qwen2Config(**SIDES, use_sliding_window=True, max_window_layers=1)), {}, "sliding"),
        (
            lambda: LlamaForCausalLM(LlamaConfig(**SIDES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4,
                                                                           "factor": 2.0})), {}, "'dynamic'",
        ),
        (lambda: make("llama"), {"lm_head": (torch.zeros(2, 24), torch.zeros(64, 2))}, "'lm_head'"),
        (lambda: LlamaForCausalLM(LlamaConfig(**SIDES, hidden_act="gelu")), {}, "activation is 'gelu'"),
        (lambda: changed("model.layers.1.mlp.up_proj", Disguised(24, 40, bias=False)), {}, "up_proj is a Disguised"),
        (lambda: changed("lm_head", Disguised(24, 64, bias=False)), {}, "lm_head is a Disguised"),
        (
            lambda: changed("model.layers.0.self_attn.o_proj", nn.Linear(24, 24, bias=False, dtype=torch.bfloat16)), {},
            "o_proj.weight is torch.bfloat16, its embedding torch.float32",
        ),
        (quantised, {}, "quantised"),
        (
            lambda: LlamaForCausalLM(
                LlamaConfig(**SIDES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0,
                                                      "partial_rotary_factor": 0.5}),
            ), {},
            "turns 4 of a head's 6 numbers",
        ),
        (decoded, {}, "has a decoder already"),
        (
            lambda: make("llama"), {"model.layers.9.mlp.up_proj": (torch.zeros(2, 24), torch.zeros(40, 2))},
            "'model.layers.9.mlp.up_proj', which is no layer",
        ),
    ],
    ids=["architecture", "a Mistral with its window", "sliding window",
         "positions", "head", "activation", "another linear layer", "another head",
         "dtypes", "quantised", "part of a head", "twice", "no such layer"],
)  # fmt: skip
def test_what_the_decoder_does_not_compute_is_refused(model: Any, factors: Any, words: str) -> None:
    """Each beside a model of `MODELS` that differs in nothing else, which the tests above compute."""
    with pytest.raises(UsageError, match=words):
        Decoder(model(), factors, SCALE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_and_who_else_is_in_the_batch(dtype: torch.dtype) -> None:
    """Rounding of a product with another number of rows flips draws near an edge: of 128 none in float32, and some in
    bfloat16, of which no more is promised than that the same batch gives the same answers."""
    decoder = Decoder(make("qwen3").to(dtype), {}, SCALE)
    engine = EmbeddedEngine(decoder, stop_ids=(63,))

    def ask(*places: int) -> list[Any]:
        questions = [
            Question(tuple(PROMPTS[place]), tuple(np.random.default_rng([place, sample]) for sample in range(32)))
            for place in places
        ]
        return engine.generate(questions, temperature=1.0, max_new_tokens=40)

    together = ask(0, 1, 2, 3)
    assert ask(0, 1, 2, 3) == together
    alone = [ask(place)[0] for place in range(4)]
    flips = sum(
        one != other for row, rest in zip(alone, together, strict=True) for one, other in zip(row, rest, strict=True)
    )
    # seen: 0 and 45
    assert (flips == 0) if dtype is torch.float32 else (flips > 0)
    assert len({answer.ids for row in together for answer in row}) > 100
