"""The embedded rollout engine: batched sampling with a static key-value cache.

Each answer draws from its own keyed generator by inverse CDF, so what is sampled depends on (run, round, step,
prompt, sample) and the policy only, not on batch order. The prompt is computed once for its K answers; rows that
finished leave the batch. The engine returns no log-probabilities: the trainer recomputes them (methods 1.3).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from silo.trainer.batch import prefixes_of
from silo.trainer.decoder import Decoder

# Rows are dropped from the cache once this share of those held has finished: dropping copies the cache.
FINISHED_SHARE_DROPPED = 0.25
# Uniform numbers are drawn ahead in blocks of this many tokens; the stream of a generator does not depend on it.
UNIFORMS_BLOCK = 32


@dataclass(frozen=True)
class Rollout:
    """ids: generated tokens, the end-of-sequence token included. finished: it was emitted before the limit."""

    ids: tuple[int, ...]
    finished: bool


@dataclass(frozen=True)
class Question:
    """A prompt and one source of randomness per answer wanted; None asks for the most likely token each time."""

    prompt_ids: tuple[int, ...]
    draws: tuple[np.random.Generator | None, ...]


def pick_tokens(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Inverse CDF: the first token whose cumulative probability exceeds u.

    Args:
        logits: [R, V].
        uniforms: [R] float64 in [0, 1); NaN asks for the most likely token.
        temperature: divides the logits.
    """
    greedy = uniforms.isnan()  # [R]
    if bool(greedy.all()):
        return logits.argmax(-1)  # [R]
    cumulative = (logits.float() / temperature).softmax(-1).double().cumsum(-1)  # [R, V]
    # rounding leaves the last value a little off 1; just below it keeps the index in range
    target = uniforms.nan_to_num(0.0) * cumulative[:, -1] * (1 - 2.0**-52)  # [R]
    sampled = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)  # [R]
    return torch.where(greedy, logits.argmax(-1), sampled)  # [R]


class EmbeddedEngine:
    """Args:
    decoder: the policy, as it is whenever something is generated.
    stop_ids: tokens that end an answer.
    batch_tokens: budget of one batch, counted as rows x (longest prompt + new tokens).
    """

    def __init__(self, decoder: Decoder, *, stop_ids: Collection[int], batch_tokens: int) -> None:
        self._decoder = decoder
        self._device = decoder.device
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long, device=self._device)
        self._batch_tokens = batch_tokens

    def generate(
        self, questions: Sequence[Question], *, temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        """Answers in the order of `questions`, for each as many as it has draws. No prompt may be empty."""
        answers: list[tuple[Rollout, ...]] = []
        batch: list[Question] = []
        rows = longest = 0
        for question in questions:
            rows_with = rows + len(question.draws)
            longest_with = max(longest, len(question.prompt_ids))
            if batch and rows_with * (longest_with + max_new_tokens) > self._batch_tokens:
                answers.extend(self._generate_batch(batch, temperature, max_new_tokens))
                batch, rows_with, longest_with = [], len(question.draws), len(question.prompt_ids)
            batch.append(question)
            rows, longest = rows_with, longest_with
        if batch:
            answers.extend(self._generate_batch(batch, temperature, max_new_tokens))
        return answers

    @torch.inference_mode()
    def _generate_batch(
        self, questions: Sequence[Question], temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        draws = [draw for question in questions for draw in question.draws]
        cache = _Cache(self._decoder, questions, max_new_tokens)
        row = torch.arange(len(draws), device=self._device)  # [R] place of each held row among all
        running = torch.ones(len(draws), dtype=torch.bool, device=self._device)  # [R] of the held rows
        tokens = torch.zeros(len(draws), max_new_tokens, dtype=torch.long, device=self._device)
        lengths = torch.full((len(draws),), max_new_tokens, device=self._device)
        finished = torch.zeros(len(draws), dtype=torch.bool, device=self._device)
        uniforms = torch.empty(0)
        current = cache.last_of_prompt  # [R] the token fed next
        for place in range(max_new_tokens):
            if place % UNIFORMS_BLOCK == 0:
                uniforms = self._uniforms(draws)  # [all rows, block]
            current = pick_tokens(cache.logits_after(current), uniforms[row, place % UNIFORMS_BLOCK], temperature)
            tokens[row, place] = current
            stopped = running & torch.isin(current, self._stop_ids)  # [R]
            lengths[row[stopped]] = place + 1
            finished[row[stopped]] = True
            running = running & ~stopped
            still = int(running.sum())
            if still == 0:
                break
            if still <= (1 - FINISHED_SHARE_DROPPED) * len(row):
                held = running.nonzero().squeeze(-1)  # [still]
                cache.keep(held)
                current, row, running = current[held], row[held], running[held]
        flat = [
            Rollout(tuple(ids[:length]), done)
            for ids, length, done in zip(tokens.tolist(), lengths.tolist(), finished.tolist(), strict=True)
        ]
        answers, start = [], 0
        for question in questions:
            answers.append(tuple(flat[start : start + len(question.draws)]))
            start += len(question.draws)
        return answers

    def _uniforms(self, draws: Sequence[np.random.Generator | None]) -> Tensor:
        block = np.full((len(draws), UNIFORMS_BLOCK), np.nan)
        for place, draw in enumerate(draws):
            if draw is not None:
                block[place] = draw.random(UNIFORMS_BLOCK)
        return torch.from_numpy(block).to(self._device)  # [R, block] float64


class _Cache:
    """Keys and values of every row, in place from the first token to the last: each prompt is computed once, given to
    its rows at the right end of L columns, and a token's column is the same in every row.

    Axes as in `decoder`; W = L + new tokens columns.
    """

    def __init__(self, decoder: Decoder, questions: Sequence[Question], new_tokens: int) -> None:
        self._decoder = decoder
        device, layers = decoder.device, len(decoder.layers)
        prefixes = prefixes_of([question.prompt_ids for question in questions], device)
        owner = torch.tensor([place for place, question in enumerate(questions) for _ in question.draws], device=device)
        self.last_of_prompt = torch.tensor([question.prompt_ids[-1] for question in questions], device=device)[owner]
        self._position = prefixes.lengths[owner]  # [R] of the token fed next
        longest = prefixes.places.shape[1]
        self._filled = longest
        shape = (len(owner), decoder.groups, longest + new_tokens, decoder.width)
        self._keys = [torch.empty(shape, dtype=decoder.embedding.dtype, device=device) for _ in range(layers)]
        self._values = [torch.empty_like(keys) for keys in self._keys]
        self._angles = decoder.angles(torch.arange(longest + new_tokens, device=device))
        column = torch.arange(longest, device=device)
        behind = column - (longest - prefixes.lengths).unsqueeze(1)  # [P, L] place in the prompt; negative: padding
        starts = prefixes.lengths.cumsum(0) - prefixes.lengths
        at_the_end = torch.where(behind >= 0, starts.unsqueeze(1) + behind, 0)[owner]  # [R, L]
        self._mask: Tensor | None = None  # [R, 1, 1, W], added to the scores
        if not bool((behind >= 0).all()):
            self._mask = torch.zeros(len(owner), 1, 1, shape[2], dtype=decoder.embedding.dtype, device=device)
            self._mask[:, 0, 0, :longest].masked_fill_((behind < 0)[owner], -torch.inf)
        if not longest:
            return
        x, angles = decoder.embedding[prefixes.ids], decoder.angles(prefixes.positions)
        for place, layer in enumerate(decoder.layers):
            query, key, value = decoder.heads_of(x, layer, angles)
            self._keys[place][:, :, :longest] = key[at_the_end].transpose(1, 2)
            self._values[place][:, :, :longest] = value[at_the_end].transpose(1, 2)
            if place < layers - 1:  # of the last layer nobody reads more than keys and values
                attended = decoder.attend_within(query, key, value, prefixes.places, prefixes.inside)
                x = decoder.after_attention(x, attended, layer)

    def logits_after(self, tokens: Tensor) -> Tensor:
        """Feed one token to every row. tokens: [R]; returns [R, V]."""
        decoder = self._decoder
        x = decoder.embedding[tokens]  # [R, D]
        cosine, sine = self._angles
        angles = cosine[self._position], sine[self._position]
        self._position = self._position + 1
        self._filled += 1
        columns = slice(0, self._filled)
        mask = None if self._mask is None else self._mask[..., columns]
        for layer, keys, values in zip(decoder.layers, self._keys, self._values, strict=True):
            query, keys[:, :, self._filled - 1], values[:, :, self._filled - 1] = decoder.heads_of(x, layer, angles)
            attended = functional.scaled_dot_product_attention(
                # the queries that share keys stand where a longer text would have its places
                query.view(len(x), decoder.groups, -1, decoder.width), keys[:, :, columns], values[:, :, columns],
                attn_mask=mask,
            )  # fmt: skip
            x = decoder.after_attention(x, attended.reshape(len(x), -1), layer)
        return decoder.final(x) @ decoder.head.T

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these. rows: indices among those held."""
        self._keys = [keys[rows] for keys in self._keys]
        self._values = [values[rows] for values in self._values]
        self._position = self._position[rows]
        self._mask = None if self._mask is None else self._mask[rows]
