"""nf4 and fp8: what is stored against slow references, and that training and sampling read it as the decoder does."""

from __future__ import annotations

import copy
import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.tasks import LoadAdapter, PrivateStep
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.data import load_codec
from silo.trainer.decoder import stream_of, token_logp
from silo.trainer.quantised import (
    BLOCK,
    FP8_MAX,
    LOADS,
    NF4_LEVELS,
    Load,
    QuantisedLinear,
    QuantisedWeight,
    load_quantised,
    quantise,
    side_by_side,
)
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import Question
from silo.trainer.worker import load_model
from tests.algorithms.tiny import make_model, make_session, make_shape, make_tokenizer, random_factors, start_payload

pytestmark = pytest.mark.torch


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.randn(rows, columns)


# ---- numbers -------------------------------------------------------------------------------------------


def test_the_levels_are_the_quantiles_of_the_normal_distribution() -> None:
    """QLoRA, appendix E: eight quantiles at or below zero and nine at or above, from an offset that leaves as much
    outside on both sides (1/2 of 1/32 and 1/30), zero once, all over the largest."""
    offset = 0.5 * ((1 - 1 / 32) + (1 - 1 / 30))
    quantile = NormalDist().inv_cdf
    above = [quantile(offset + (0.5 - offset) * place / 8) for place in range(8)]
    below = [-quantile(offset + (0.5 - offset) * place / 7) for place in range(7)]
    computed = sorted([*above, 0.0, *below])
    # the published table was computed in float32
    assert np.allclose([each / computed[-1] for each in computed], NF4_LEVELS, atol=1e-6, rtol=0)


def slow_nf4(weight: torch.Tensor) -> np.ndarray[Any, Any]:
    found = np.zeros(weight.shape)
    for row, numbers in enumerate(weight.double().tolist()):
        for start in range(0, len(numbers), BLOCK):
            block = numbers[start : start + BLOCK]
            largest = max(abs(each) for each in block)
            for place, each in enumerate(block):
                level = min(NF4_LEVELS, key=lambda level: abs(level * largest - each))
                found[row, start + place] = level * largest
    return found


def all_of_e4m3() -> list[float]:
    values = [0.0]
    for exponent in range(16):
        for mantissa in range(8):
            if exponent == 15 and mantissa == 7:
                continue  # not a number
            values.append(mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return sorted({*values, *(-each for each in values)})


def slow_fp8(weight: torch.Tensor) -> np.ndarray[Any, Any]:
    values = all_of_e4m3()
    found = np.zeros(weight.shape)
    for row, numbers in enumerate(weight.double().tolist()):
        scale = max(abs(each) for each in numbers) / FP8_MAX
        for place, each in enumerate(numbers):
            found[row, place] = min(values, key=lambda value: abs(value * scale - each)) * scale
    return found


def error_bound(weight: QuantisedWeight) -> torch.Tensor:
    """Most by which a stored number can be off, [M, D]: nf4: half the widest gap between two levels, times the block's
    scale; fp8: half a unit in the last place, 2^-4 of the number, and 2^-10 of the scale below the smallest normal."""
    if weight.load == "fp8":
        return torch.maximum(weight.whole(torch.float32).abs() * 2.0**-4, weight.scales * 2.0**-10)
    gap = max(after - before for before, after in pairwise(NF4_LEVELS))
    return (weight.scales * gap / 2).repeat_interleave(BLOCK, dim=1)[:, : weight.shape[1]]


@pytest.mark.parametrize(("load", "slow"), [("nf4", slow_nf4), ("fp8", slow_fp8)])
@pytest.mark.parametrize("columns", [64, 192, 100, 7])  # whole blocks, and a last one that is not full
def test_what_is_stored_is_the_nearest_that_can_be(load: Load, slow: Any, columns: int) -> None:
    weight = drawn(9, columns)
    stored = quantise(weight, load)
    # float32 against double: a few units in the last place of the scale
    assert np.allclose(stored.whole(torch.float32).numpy(), slow(weight), atol=1e-5)
    assert bool(((stored.whole(torch.float32) - weight).abs() <= error_bound(stored) * (1 + 1e-5)).all())
    # half the bound would not hold, so the bound says something
    assert not bool(((stored.whole(torch.float32) - weight).abs() <= error_bound(stored) / 2).all())


@pytest.mark.parametrize("load", LOADS)
def test_zeros_stay_zero_and_what_is_not_finite_is_refused(load: Load) -> None:
    weight = torch.zeros(3, 70)
    weight[1, 65] = 2.5
    # one number in its block: it is the scale itself, exactly
    assert torch.equal(quantise(weight, load).whole(), weight)
    weight[0, 3] = math.inf
    with pytest.raises(UsageError, match="not finite"):
        quantise(weight, load)


@pytest.mark.parametrize(("load", "bits"), [("nf4", 4.5), ("fp8", 8.0625)])
def test_how_many_bits_a_number_takes(load: Load, bits: float) -> None:
    """With its scales: 32 bits for 64 numbers, and for a row of 512."""
    assert quantise(drawn(256, 512), load).size_bytes * 8 / (256 * 512) == bits


@pytest.mark.parametrize("load", LOADS)
def test_weights_side_by_side_are_their_rows(load: Load) -> None:
    parts = [quantise(drawn(rows, 100, rows), load) for rows in (3, 8)]
    joined = side_by_side(parts)
    assert joined.shape == (11, 100)
    assert torch.equal(joined.whole(), torch.cat([each.whole() for each in parts]))
    assert torch.equal(joined.part(3, 11).whole(), parts[1].whole())


# ---- a model -------------------------------------------------------------------------------------------


def other_model(architecture: str) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.4, "pad_token_id": 0,
        "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        if architecture == "llama":
            return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).eval()
        if architecture == "llama with biases":
            config = LlamaConfig(**sizes, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)
            model: Any = LlamaForCausalLM(config).eval()
        else:
            model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero, where a lost one would not show
                torch.nn.init.normal_(parameter)
        return model


def saved(folder: Path, architecture: str) -> tuple[Path, Any]:
    """A folder, and the model in it as the trainer loads it in bfloat16."""
    (make_model() if architecture == "qwen3" else other_model(architecture)).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder, load_model(folder, "bf16")


def written_out(model: Any, load: Load) -> Any:
    """The plain bfloat16 model whose numbers are those that the quantised one stands for."""
    plain = copy.deepcopy(model)
    for name, module in plain.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = quantise(module.weight.data, load).whole()
    return plain


def adapter_of(model: Any) -> LoraAdapter:
    shape = make_shape(model)
    adapter = LoraAdapter(model, shape)
    adapter.load(random_factors(shape, 3, b_scale=0.3))
    return adapter


PROMPTS = ((4, 5, 6), (9, 9))
ANSWERS = ((0, (7, 8, 9, 1)), (0, (8, 3)), (1, (4, 4, 1)))


def logp_and_gradients(adapter: LoraAdapter, checkpointing: bool = False) -> list[torch.Tensor]:
    decoder = adapter.decoder
    stream = stream_of(PROMPTS, ANSWERS, decoder.device)
    logp, _ = token_logp(decoder.hidden(stream, checkpointing=checkpointing), decoder.head, stream.targets, 0.7)
    gradients = torch.autograd.grad(logp.sum(), adapter.parameters)
    return [logp.detach(), *gradients]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "llama with biases"])
@pytest.mark.parametrize("load", LOADS)
def test_a_loaded_model_computes_what_its_numbers_written_out_compute(
    tmp_path: Path, architecture: str, load: Load
) -> None:
    """Bit for bit, in training and in the library's own forward pass: only storage differs."""
    folder, model = saved(tmp_path, architecture)
    plain, loaded = written_out(model, load), load_quantised(folder, load)
    ids = torch.tensor([[4, 5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, plain(ids).logits)
        # the rounding is there: it is not the model as it was saved
        assert not torch.equal(loaded(ids).logits, model(ids).logits)
    quantised, whole = adapter_of(loaded), adapter_of(plain)
    expected = logp_and_gradients(whole)
    for checkpointing in (False, True):
        found = logp_and_gradients(quantised, checkpointing)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert all(float(each.abs().sum()) > 0 for each in expected[1:])  # gradients reach every factor
    with torch.no_grad():  # and it still works by itself, with what is stored now lying side by side
        assert torch.equal(loaded(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("load", LOADS)
def test_a_layer_without_factors_passes_the_gradient_on(tmp_path: Path, load: Load) -> None:
    folder, model = saved(tmp_path, "qwen3")
    found = []
    for each in (load_quantised(folder, load), written_out(model, load)):
        shape = make_shape(each)
        first = {name: sides for name, sides in shape.shapes.items() if "layers.0.self_attn.q_proj" in name}
        adapter = LoraAdapter(each, type(shape)(shape.rank, shape.alpha, first))
        adapter.load(random_factors(adapter.shape, 3, b_scale=0.3))
        found.append(logp_and_gradients(adapter))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(float(each.abs().sum()) > 0 for each in found[0][1:])


@pytest.mark.parametrize("load", LOADS)
def test_sampling_reads_the_same_weights(tmp_path: Path, load: Load) -> None:
    folder, model = saved(tmp_path, "qwen3")

    def answers(base: Any) -> Any:
        engine = EmbeddedEngine(adapter_of(base).decoder, stop_ids=[1])
        questions = [
            Question(prompt, (None, *[np.random.default_rng((place, draw)) for draw in range(4)]))
            for place, prompt in enumerate(PROMPTS)
        ]
        return engine.generate(questions, temperature=1.0, max_new_tokens=12)

    assert answers(load_quantised(folder, load)) == answers(written_out(model, load))
    assert answers(load_quantised(folder, load)) != answers(model)


@pytest.mark.parametrize("load", LOADS)
def test_a_session_trains_on_it_and_leaves_the_base_as_it_is(tmp_path: Path, load: Load) -> None:
    base = load_quantised(saved(tmp_path, "qwen3")[0], load)

    def even(pairs: Any) -> list[bool]:  # about half of whatever a random model says
        return [sum(map(ord, text)) % 2 == 0 for text, _ in pairs]

    session, shape = make_session(model=base, private_grader=even)
    before = {
        name: (module.stored.numbers.view(torch.uint8).clone(), module.stored.scales.clone())
        for name, module in base.named_modules()
        if isinstance(module, QuantisedLinear)
    }
    assert len(before) == 2 * 7
    payload, digest = start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    done = session.carry_out(PrivateStep(1, 1))
    assert done.metrics["grad_norm"] > 0
    delta = session._run.adapter.delta()  # type: ignore[union-attr]
    assert any(np.abs(each).max() > 0 for each in delta.values())
    for name, (numbers, scales) in before.items():
        stored = base.get_submodule(name).stored
        assert torch.equal(stored.numbers.view(torch.uint8), numbers) and torch.equal(stored.scales, scales)


@pytest.mark.parametrize("load", LOADS)
def test_nothing_wide_is_kept_for_the_backward_pass(tmp_path: Path, load: Load) -> None:
    """Else every layer's weight would be held as plain numbers at once, and nothing would be won."""
    adapter = adapter_of(load_quantised(saved(tmp_path, "qwen3")[0], load))
    kept: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    wide = {torch.Size(layer.gate_up.weight.shape) for layer in adapter.decoder.layers}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        adapter.decoder.hidden(stream_of(PROMPTS, ANSWERS, adapter.decoder.device))
    assert kept and not wide & set(kept)
    plain = adapter_of(make_model())
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        plain.decoder.hidden(stream_of(PROMPTS, ANSWERS, plain.decoder.device))
    assert wide & set(kept)  # where weights are plain they are kept, so the question is a real one


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_folder_that_lacks_a_weight_or_a_bias_is_refused(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file, save_file

    folder, _ = saved(tmp_path, "llama with biases")
    path = folder / "model.safetensors"
    load_quantised(folder, "nf4")
    tensors = load_file(path)
    del tensors[f"model.layers.1.mlp.up_proj.{kind}"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UsageError, match=rf"lacks model\.layers\.1\.mlp\.up_proj\.{kind}"):
        load_quantised(folder, "nf4")


def test_what_ends_an_answer_is_read_from_the_generation_settings(tmp_path: Path) -> None:
    """Chat models name more tokens there than in config.json: without them an answer would run on to the limit."""
    folder, _ = saved(tmp_path, "qwen3")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, 7]}))
    assert load_codec(folder).stop_ids == {1, 7}
    path.unlink()
    assert load_codec(folder).stop_ids == {1}
