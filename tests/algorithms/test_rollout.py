"""The embedded engine against transformers' own generation, and its sampler against the distribution."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedsilo.protocol.errors import OperationError
from silo.budgets import CACHE_BYTES
from silo.trainer.decoder import prefixes_of
from silo.trainer.rollout import embedded
from silo.trainer.rollout.embedded import EmbeddedEngine, draw_tokens
from silo.trainer.rollout.engine import Question
from tests.algorithms.tiny import make_adapter, peft_twin

pytestmark = pytest.mark.torch
# keys and values of one token: 2 x layers x key-value heads x numbers of a head x bytes of float32
COLUMN_BYTES = 2 * 2 * 2 * 8 * 4
PROMPTS = [(5, 9, 20, 7, 4), (11,), (6, 7), (3, 4, 5, 6, 7, 8, 9, 10, 11), (12, 13)]


def make_engine(cache_bytes: int = CACHE_BYTES) -> EmbeddedEngine:
    return EmbeddedEngine(make_adapter().decoder, stop_ids=(1,), cache_bytes=cache_bytes)


def sampled(prompts: list[tuple[int, ...]], samples: int = 3) -> list[Question]:
    return [
        Question(prompt, tuple(np.random.default_rng([len(prompt), sample]) for sample in range(samples)))
        for prompt in prompts
    ]


def test_greedy_equals_transformers_generate() -> None:
    adapter = make_adapter()
    engine, twin = EmbeddedEngine(adapter.decoder, stop_ids=(1,)), peft_twin(adapter)
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
    cut = make_engine(70 * COLUMN_BYTES).generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=12)
    # so little that the answers to one prompt come in pieces, and the longest prompt's one by one
    pieces = make_engine(30 * COLUMN_BYTES).generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=12)
    assert together == alone == turned == cut == pieces
    assert len({answer.ids for row in together for answer in row}) > 8


def test_sampling_replays_token_by_token_from_a_plain_forward() -> None:
    """Inverse CDF by hand, with the whole sequence forwarded anew for every token."""
    adapter = make_adapter()
    engine, twin = EmbeddedEngine(adapter.decoder, stop_ids=(1,)), peft_twin(adapter)
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
    never_stops = EmbeddedEngine(make_adapter().decoder, stop_ids=(999,))
    long = never_stops.generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=40)
    short = never_stops.generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=5)
    assert [[answer.ids[:5] for answer in row] for row in long] == [[answer.ids for answer in row] for row in short]


def test_inverse_cdf_gives_each_token_its_share_of_the_unit_interval() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    picked, sound, _ = draw_tokens(probabilities.log().expand(1000, 4), uniforms, 1.0)
    assert bool(sound.all())
    assert torch.bincount(picked, minlength=4).tolist() == [500, 0, 200, 300]
    edges = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw_tokens(probabilities.log().expand(2, 4), edges, 1.0)[0].tolist() == [0, 3]


def test_greedy_and_sampled_answers_share_a_batch() -> None:
    engine = make_engine()
    mixed = [Question(prompt, (np.random.default_rng(3), None)) for prompt in PROMPTS]
    greedy = engine.generate([Question(prompt, (None,)) for prompt in PROMPTS], temperature=1.0, max_new_tokens=6)
    assert [row[1] for row in engine.generate(mixed, temperature=1.0, max_new_tokens=6)] == [row[0] for row in greedy]


@pytest.mark.parametrize("columns", [15, 40, 100, 10_000])
def test_the_cache_stays_within_its_bytes(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[int, int]] = []
    made = embedded._Cache.__init__

    def measured(self: Any, *given: Any) -> None:
        made(self, *given)
        tensors = [*self._keys, *self._values]
        held.append((sum(each.numel() * each.element_size() for each in tensors), len(self._position)))

    monkeypatch.setattr(embedded._Cache, "__init__", measured)
    answers = make_engine(columns * COLUMN_BYTES).generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=6)
    assert [len(row) for row in answers] == [3] * len(PROMPTS)
    assert sum(rows for _, rows in held) == 3 * len(PROMPTS)
    assert all(size <= columns * COLUMN_BYTES for size, _ in held)
    assert len(held) == {15: 14, 40: 6, 100: 2, 10_000: 1}[columns]


def test_one_answer_that_exceeds_the_cache_is_sampled_alone() -> None:
    answers = make_engine(1).generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=6)
    assert answers == make_engine().generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=6)


def test_a_question_without_draws_gets_no_answers() -> None:
    engine, one = make_engine(), PROMPTS[:1]
    asked = [Question((4, 5), ()), *sampled(one), Question((6,), ())]
    (alone,) = engine.generate(sampled(one), temperature=1.0, max_new_tokens=4)
    assert engine.generate(asked, temperature=1.0, max_new_tokens=4) == [(), alone, ()]
    assert engine.generate([Question((4, 5), ())], temperature=1.0, max_new_tokens=4) == [()]


def test_dropping_rows_never_holds_a_whole_second_cache() -> None:
    cache = embedded._Cache(make_adapter().decoder, sampled(PROMPTS), 8)
    old = [weakref.ref(each) for each in (*cache._keys, *cache._values)]
    shape = cache._keys[0].shape
    alive: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if args and isinstance(args[0], torch.Tensor) and args[0].shape == shape:
                gc.collect()
                alive.append(sum(each() is not None for each in old))
            return function(*args, **(kwargs or {}))

    with Counting():
        cache.keep(torch.tensor([0, 2, 5]))
    assert alive == [4, 3, 2, 1]
    assert all(each.shape[0] == 3 for each in (*cache._keys, *cache._values))


@pytest.mark.parametrize("draws", ["sampled", "greedy", "mixed"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(draws: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One word of one row, at one token: neither an index out of range nor an answer."""
    sources = {"sampled": [np.random.default_rng(3)], "greedy": [None], "mixed": [None, np.random.default_rng(3)]}
    engine = make_engine()
    asked = [Question(prompt, tuple(sources[draws])) for prompt in PROMPTS]
    assert len(engine.generate(asked, temperature=1.0, max_new_tokens=6)) == len(PROMPTS)
    logits_after = embedded._Cache.logits_after
    calls: list[int] = []

    def broken(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = logits_after(self, tokens)
        calls.append(1)
        if len(calls) == 2:
            logits[1, 7] = value
        return logits

    monkeypatch.setattr(embedded._Cache, "logits_after", broken)
    engine._stop_ids = torch.tensor([999])  # every row runs when it happens
    with pytest.raises(OperationError) as caught:
        engine.generate(asked, temperature=1.0, max_new_tokens=6)
    assert caught.value.code == "NOT_FINITE"


@pytest.mark.parametrize("words", [5, 512, 513, 4_096, 32_768])
def test_sums_of_sums_pick_what_the_plain_cumulative_sum_picks(words: int) -> None:
    draws = torch.Generator().manual_seed(words)
    logits = torch.randn(400, words, generator=draws) * 3
    logits[:, ::3] = -torch.inf  # words that may never come
    uniforms = torch.rand(400, dtype=torch.float64, generator=draws)
    uniforms[:4] = torch.tensor([0.0, 1.0 - 2.0**-53, 2.0**-53, 0.5])
    cumulative = (logits / 0.7).softmax(-1).double().cumsum(-1)
    target = uniforms * cumulative[:, -1] * (1 - 2.0**-52)
    plain = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    picked, sound, _ = draw_tokens(logits, uniforms, 0.7)
    assert bool(sound.all()) and torch.equal(picked, plain)
    assert bool((picked % 3 != 0).all())


def test_a_draw_on_the_edge_of_two_sums_picks_a_word_that_may_come() -> None:
    """Sums of very unlike numbers round otherwise in another order: a target below the sum of all blocks up to its own
    may lie at or behind the sum inside."""
    draws = torch.Generator().manual_seed(3)
    logits = 12 * torch.randn(60, 4_096, generator=draws)
    logits[:, 511::512] = logits[:, ::512] = -torch.inf  # the words at either end of a block may never come
    sums = logits.softmax(-1).view(60, 8, 512).sum(-1, dtype=torch.float64).cumsum(1)
    below = torch.nextafter(sums[:, :-1] / sums[:, -1:], torch.zeros((), dtype=torch.float64))  # [60, 7]
    for uniforms in (below, below + 2.0**-52):
        for block in range(7):
            picked, sound, _ = draw_tokens(logits, uniforms[:, block], 1.0)
            assert bool(sound.all()) and bool(logits.gather(1, picked.unsqueeze(1)).isfinite().all())


def test_rows_that_have_finished_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as a quarter of those held has: the model computes no token for them any more."""
    fed: list[int] = []
    logits_after = embedded._Cache.logits_after

    def counted(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        fed.append(len(tokens))
        return logits_after(self, tokens)

    monkeypatch.setattr(embedded._Cache, "logits_after", counted)
    engine = EmbeddedEngine(make_adapter().decoder, stop_ids=(7, 9, 11))
    answers = engine.generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=32)
    lengths = [len(answer.ids) for row in answers for answer in row]
    held, expected = len(lengths), []
    for place in range(max(lengths)):
        expected.append(held)
        running = sum(length > place + 1 for length in lengths)
        held = running if running <= (1 - embedded.FINISHED_SHARE_DROPPED) * held else held
    assert fed == expected
    assert fed[0] == len(lengths) and fed[-1] < len(lengths) / 2  # so there was something to drop


def test_who_still_runs_may_be_asked_seldom() -> None:
    """As on an accelerator: the same answers, and the host waits for the device far less often."""
    asked: list[int] = []
    answers = []

    class Listening(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked[-1] += getattr(function, "__name__", "") in ("__int__", "__bool__", "item", "nonzero")
            return function(*args, **(kwargs or {}))

    for every in (1, embedded.TOKENS_BETWEEN_LOOKS):
        engine = EmbeddedEngine(make_adapter().decoder, stop_ids=(7,))
        engine._tokens_between_looks = every
        asked.append(0)
        with Listening():
            answers.append(engine.generate(sampled(PROMPTS), temperature=1.0, max_new_tokens=32))
    assert answers[0] == answers[1]
    # four looks and at most four that drop rows, three of blocks of numbers, four that lay the prompts out
    assert asked[1] <= 15 and asked[0] > 32


def test_places_of_prefixes_come_from_one_count() -> None:
    prefixes = prefixes_of(PROMPTS, torch.device("cpu"))
    assert prefixes.starts.tolist() == [0, 4, 4, 5, 13]
