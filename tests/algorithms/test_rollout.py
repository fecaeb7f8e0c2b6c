"""The embedded engine against transformers' own generation, and its sampler against the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from silo.trainer.rollout.embedded import EmbeddedEngine, Question, pick_tokens
from tests.algorithms.tiny import make_adapter, peft_twin

pytestmark = pytest.mark.torch
PROMPTS = [(5, 9, 20, 7, 4), (11,), (6, 7), (3, 4, 5, 6, 7, 8, 9, 10, 11), (12, 13)]


def make_engine(batch_tokens: int = 10_000) -> EmbeddedEngine:
    return EmbeddedEngine(make_adapter().decoder, stop_ids=(1,), batch_tokens=batch_tokens)


def sampled(prompts: list[tuple[int, ...]], samples: int = 3) -> list[Question]:
    return [
        Question(prompt, tuple(np.random.default_rng([len(prompt), sample]) for sample in range(samples)))
        for prompt in prompts
    ]


def test_greedy_equals_transformers_generate() -> None:
    adapter = make_adapter()
    engine, twin = EmbeddedEngine(adapter.decoder, stop_ids=(1,), batch_tokens=10_000), peft_twin(adapter)
    answers = engine.generate([Question(prompt, (None,)) for prompt in PROMPTS], temperature=0.7, max_new_tokens=9)
    for prompt, (answer,) in zip(PROMPTS, answers, strict=True):
        expected = twin.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=9,
        )[0, len(prompt) :].tolist()
        assert list(answer.ids) == expected
        assert answer.finished is (expected[-1] == 1)


def test_answers_depend_on_their_own_draws_only() -> None:
    """Neither the other prompts of the batch, nor their order, nor how batches are cut."""
    together = make_engine().generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=12)
    alone = [make_engine().generate(sampled([prompt]), temperature=1.0, max_new_tokens=12)[0] for prompt in PROMPTS]
    turned = make_engine().generate(sampled(PROMPTS[::-1]), temperature=1.0, max_new_tokens=12)[::-1]
    cut = make_engine(batch_tokens=70).generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=12)
    assert together == alone == turned == cut
    assert len({answer.ids for row in together for answer in row}) > 8


def test_sampling_replays_token_by_token_from_a_plain_forward() -> None:
    """Inverse CDF by hand, with the whole sequence forwarded anew for every token."""
    adapter = make_adapter()
    engine, twin = EmbeddedEngine(adapter.decoder, stop_ids=(1,), batch_tokens=10_000), peft_twin(adapter)
    answers = engine.generate(sampled(PROMPTS), temperature=0.7, max_new_tokens=6)
    for question, row in zip(sampled(PROMPTS), answers, strict=True):
        for draws, answer in zip(question.draws, row, strict=True):
            assert draws is not None
            ids = list(question.prompt_ids)
            for token in answer.ids:
                with torch.no_grad():
                    logits = twin(input_ids=torch.tensor([ids])).logits[0, -1] / 0.7
                uniform, total, picked = draws.random(), 0.0, -1
                for candidate, probability in enumerate(logits.softmax(-1).double().tolist()):
                    total += probability
                    if total > uniform:
                        picked = candidate
                        break
                assert picked == token
                ids.append(picked)


def test_length_limit_and_stop_are_told_apart() -> None:
    answers = make_engine().generate(sampled(PROMPTS, 8), temperature=1.0, max_new_tokens=3)
    flat = [answer for row in answers for answer in row]
    assert {answer.finished for answer in flat} == {True, False}
    for answer in flat:
        assert answer.finished is (answer.ids[-1] == 1)
        assert 1 not in answer.ids[:-1]
        assert len(answer.ids) == 3 if not answer.finished else len(answer.ids) <= 3


def test_a_generator_gives_the_same_answer_beyond_one_block_of_numbers() -> None:
    never_stops = EmbeddedEngine(make_adapter().decoder, stop_ids=(999,), batch_tokens=10_000)
    long = never_stops.generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=40)
    short = never_stops.generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=5)
    assert [[answer.ids[:5] for answer in row] for row in long] == [[answer.ids for answer in row] for row in short]


def test_inverse_cdf_gives_each_token_its_share_of_the_unit_interval() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    picked = pick_tokens(probabilities.log().expand(1000, 4), uniforms, 1.0)
    assert torch.bincount(picked, minlength=4).tolist() == [500, 0, 200, 300]
    edges = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert pick_tokens(probabilities.log().expand(2, 4), edges, 1.0).tolist() == [0, 3]


def test_greedy_and_sampled_answers_share_a_batch() -> None:
    engine = make_engine()
    mixed = [Question(prompt, (np.random.default_rng(3), None)) for prompt in PROMPTS]
    greedy = engine.generate([Question(prompt, (None,)) for prompt in PROMPTS], temperature=1.0, max_new_tokens=6)
    assert [row[1] for row in engine.generate(mixed, temperature=1.0, max_new_tokens=6)] == [row[0] for row in greedy]
