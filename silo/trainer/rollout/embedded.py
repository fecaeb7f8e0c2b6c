"""The embedded rollout engine: batched sampling with a key-value cache, for any Hugging Face causal language model.

Each answer draws from its own keyed generator by inverse CDF, so what is sampled depends on (run, round, step,
prompt, sample) and the policy only, not on batch order. The prompt is computed once for its K answers; rows that
finished leave the batch. The engine returns no log-probabilities: the trainer recomputes them (methods 1.3).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from silo.trainer.batch import left_padded, prefilled, select_rows

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
    model: any Hugging Face causal LM, adapter layers included.
    stop_ids: tokens that end an answer.
    batch_tokens: budget of one batch, counted as rows x (longest prompt + new tokens).
    """

    def __init__(self, model: Any, *, stop_ids: Collection[int], batch_tokens: int) -> None:
        self._model = model
        self._device = next(model.parameters()).device
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
        prompt_of_row = torch.tensor(
            [place for place, question in enumerate(questions) for _ in question.draws], device=self._device
        )  # [R]
        prefix, prefix_mask = left_padded([question.prompt_ids[:-1] for question in questions], self._device)
        cache = prefilled(self._model, prefix, prefix_mask)
        select_rows(cache, prompt_of_row)
        mask = prefix_mask[prompt_of_row]  # [R, L], grows by one a token
        last = torch.tensor([question.prompt_ids[-1] for question in questions], device=self._device)
        current = last[prompt_of_row]  # [R] the token fed next
        position = torch.tensor([len(question.prompt_ids) - 1 for question in questions], device=self._device)
        position = position[prompt_of_row]  # [R]

        row = torch.arange(len(draws), device=self._device)  # [R] place of each held row among all
        running = torch.ones(len(draws), dtype=torch.bool, device=self._device)  # [R] of the held rows
        tokens = torch.zeros(len(draws), max_new_tokens, dtype=torch.long, device=self._device)
        lengths = torch.full((len(draws),), max_new_tokens, device=self._device)
        finished = torch.zeros(len(draws), dtype=torch.bool, device=self._device)
        uniforms = torch.empty(0)
        for place in range(max_new_tokens):
            if place % UNIFORMS_BLOCK == 0:
                uniforms = self._uniforms(draws)  # [all rows, block]
            mask = torch.cat([mask, mask.new_ones(len(row), 1)], dim=1)
            logits = self._model(
                input_ids=current.unsqueeze(-1),
                attention_mask=mask,
                position_ids=position.unsqueeze(-1),
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]  # [R, V]
            current = pick_tokens(logits, uniforms[row, place % UNIFORMS_BLOCK], temperature)  # [R]
            position = position + 1
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
                select_rows(cache, held)
                mask, current, position, row, running = (
                    mask[held],
                    current[held],
                    position[held],
                    row[held],
                    running[held],
                )
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
