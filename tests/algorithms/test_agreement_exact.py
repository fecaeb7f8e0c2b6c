"""The float32 pass against the same rounded model in float32, and what an engine says it drew against the trainer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from silo.trainer import agreement
from silo.trainer.adapters.lora import BASE_NAME, LoraAdapter
from silo.trainer.agreement import ExactDecoder
from silo.trainer.decoder import Stream, stream_of, token_logp
from silo.trainer.quantised import Load, load_quantised
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import Question
from tests.algorithms.test_quantised import adapter_of, saved, written_out
from tests.algorithms.tiny import make_model, make_shape, random_factors

pytestmark = pytest.mark.torch
PROMPTS = [(5, 9, 20, 7), (11,), (6, 7, 3)]
ANSWERS = [(0, (4, 6, 1)), (0, (3,)), (1, (12, 1)), (2, (8, 8, 9, 8, 8, 12, 3))]
# Both sides compute in float32 and add in different orders; what a wrong dtype anywhere costs is a thousand times more.
FLOAT32 = 5e-6


def stream() -> Stream:
    return stream_of(PROMPTS, ANSWERS, torch.device("cpu"))


def adapter(dtype: torch.dtype, b_scale: float = 0.3) -> LoraAdapter:
    model = make_model().to(dtype)
    made = LoraAdapter(model, make_shape(model))
    made.load(random_factors(made.shape, 0, b_scale))
    return made


def rounded_twin(of: LoraAdapter) -> LoraAdapter:
    """The same numbers as a bfloat16 engine holds them, in a float32 model. Its angles are rounded as well."""
    model = make_model().to(torch.bfloat16).float()
    made = LoraAdapter(model, of.shape)
    made.load({name: each.detach().bfloat16().float().numpy() for name, each in of.factors.items()})
    plain = made.decoder.angles

    def rounded(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosine, sine = plain(positions)
        return cosine.bfloat16().float(), sine.bfloat16().float()

    made.decoder.angles = rounded  # type: ignore[method-assign]
    return made


def logp_of(of: LoraAdapter, temperature: float) -> torch.Tensor:
    with torch.no_grad():
        return token_logp(of.decoder.hidden(stream()), of.decoder.head, stream().targets, temperature)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("words_together", [1, 5, 1 << 24])
def test_the_exact_pass_is_the_float32_model(
    temperature: float, words_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "NUMBERS_TOGETHER", words_together * 24)  # the model is 24 wide
    stored = adapter(torch.bfloat16)
    got = ExactDecoder(stored.decoder).logp(stream(), temperature)
    twin = rounded_twin(stored)
    assert torch.allclose(got, logp_of(twin, temperature), atol=FLOAT32)
    with stored.off(), twin.off():
        base = ExactDecoder(stored.decoder).logp(stream(), temperature, base_only=True)
        assert torch.allclose(base, logp_of(twin, temperature), atol=FLOAT32)
    assert float((logp_of(stored, temperature) - got).abs().max()) > 100 * FLOAT32  # what bfloat16 itself makes of it
    assert float((base - got).abs().max()) > 0.1


def test_other_factors_take_the_place_of_the_live_ones_for_one_pass() -> None:
    stored, other = adapter(torch.bfloat16), adapter(torch.bfloat16, 0.1)
    decoder = ExactDecoder(stored.decoder)
    before = decoder.logp(stream(), 1.0)
    pairs = list(zip(stored.parameters, other.parameters, strict=True))
    got = decoder.logp(stream(), 1.0, factors=pairs)
    assert torch.equal(got, ExactDecoder(other.decoder).logp(stream(), 1.0))
    assert not torch.equal(got, before)
    assert torch.equal(decoder.logp(stream(), 1.0), before)
    assert stored.decoder.adapted


def test_in_float32_the_exact_pass_is_the_trainers() -> None:
    stored = adapter(torch.float32)
    assert torch.allclose(ExactDecoder(stored.decoder).logp(stream(), 0.7), logp_of(stored, 0.7), atol=FLOAT32)


def test_the_difference_of_two_adapters_is_exact_to_a_millionth() -> None:
    """What a bfloat16 pass cannot show: a step of 1e-5 in every factor, against float64."""
    stored = adapter(torch.bfloat16)
    moved = [each.detach() * (1 + 2.0**-7) for each in stored.parameters]  # a whole spacing of bfloat16
    decoder = ExactDecoder(stored.decoder)
    found = decoder.logp(stream(), 1.0, factors=list(zip(stored.parameters, moved, strict=True)))
    twin = rounded_twin(stored)
    expected = -logp_of(twin, 1.0)
    with torch.no_grad():
        for live, value in zip(twin.parameters, moved, strict=True):
            live.copy_(value.bfloat16().float())
    expected = expected + logp_of(twin, 1.0)
    assert float(expected.abs().max()) > 1e-3
    assert torch.allclose(found - decoder.logp(stream(), 1.0), expected, atol=FLOAT32)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_engine_says_with_what_probability_it_drew_each_token(temperature: float) -> None:
    """Over answers of many lengths, so that rows leave the batch on the way; some are asked for greedily."""
    made = adapter(torch.float32)
    engine = EmbeddedEngine(made.decoder, stop_ids=[1, 4, 9], name=made.name)
    draws = [np.random.default_rng(place) for place in range(12)]
    questions = [Question(prompt, (*draws[4 * place : 4 * place + 4], None)) for place, prompt in enumerate(PROMPTS)]
    rollouts = engine.generate(questions, temperature=temperature, max_new_tokens=20)
    assert len({len(each.ids) for row in rollouts for each in row}) > 3
    pairs = [(place, each) for place, row in enumerate(rollouts) for each in row[:-1]]
    whole = stream_of(PROMPTS, [(place, each.ids) for place, each in pairs], torch.device("cpu"))
    with torch.no_grad():
        expected = token_logp(made.decoder.hidden(whole), made.decoder.head, whole.targets, temperature)[0]
    got = torch.tensor([value for _, each in pairs for value in each.logp])
    assert torch.allclose(got, expected, atol=2e-5)  # float32, and another order of adding in each of the two
    assert all(row[-1].logp == () for row in rollouts)  # nothing was drawn
    assert {each.adapter for row in rollouts for each in row} == {made.name()}
    with made.off():
        [[plain]] = engine.generate([Question(PROMPTS[0], (draws[0],))], temperature=temperature, max_new_tokens=2)
    assert plain.adapter == BASE_NAME != made.name()


@pytest.mark.parametrize("change", ["none", "value", "off"])
def test_the_name_is_what_the_decoder_computes_with(change: str) -> None:
    made = adapter(torch.float32)
    name = made.name()
    if change == "value":
        with torch.no_grad():
            made.parameters[0][0, 0] += 1e-6
    if change == "off":
        with made.off():
            assert made.name() == BASE_NAME
    assert (made.name() != name) == (change == "value")


@pytest.mark.parametrize("load", ["nf4", "fp8"])
def test_a_quantised_base_is_compared_as_the_numbers_it_stands_for(load: Load, tmp_path: Path) -> None:
    folder, model = saved(tmp_path, "qwen3")
    made, plain = adapter_of(load_quantised(folder, load)), adapter_of(written_out(model, load))
    with torch.no_grad():
        for one, other in zip(made.parameters, plain.parameters, strict=True):
            other.copy_(one)
    got, expected = (ExactDecoder(each.decoder).logp(stream(), 1.0) for each in (made, plain))
    assert torch.allclose(got, expected, atol=FLOAT32)
    assert not torch.allclose(got, ExactDecoder(adapter_of(model).decoder).logp(stream(), 1.0), atol=100 * FLOAT32)
