"""The nouns of a training step, and the one forward pass that scores answers.

Axes: P prompts (groups), R answers (rows), L prompt tokens (left-padded), T answer tokens (right-padded).

The K answers to a prompt share it, so the prompt is computed once and its keys and values are handed to each of
its answers; gradients flow through them. With prompts longer than answers this saves most of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt.

    Attributes:
        ids: its tokens, the end-of-sequence token included where it was emitted.
        text: the same as text, special tokens left out.
        finished: False where the token limit cut it off.
        reward: the local verdict, 0 or 1.
        donor: name of the silo that wrote it; empty for an own answer.
    """

    ids: tuple[int, ...]
    text: str
    finished: bool
    reward: float = 0.0
    donor: str = ""


@dataclass(frozen=True)
class Group:
    """A prompt and the answers a step trains on."""

    prompt_ids: tuple[int, ...]
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Rows:
    """Answers of several prompts as tensors.

    Attributes:
        prefix: [P, L] the prompts without their last token, left-padded; L may be 0.
        prefix_mask: [P, L].
        inputs: [R, T] the prompt's last token, then the answer without its last: logits[:, t] predict targets[:, t].
        targets: [R, T].
        mask: [R, T] True on answer tokens.
        prompt_of_row: [R] row of `prefix` that each answer belongs to.
        prompt_lengths: [P] tokens of each prompt, its last included.
    """

    prefix: Tensor
    prefix_mask: Tensor
    inputs: Tensor
    targets: Tensor
    mask: Tensor
    prompt_of_row: Tensor
    prompt_lengths: Tensor


def left_padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, both [len(sequences), longest]. Padding is id 0: it is masked, so any valid id serves."""
    longest = max(len(sequence) for sequence in sequences)
    ids = [[0] * (longest - len(sequence)) + list(sequence) for sequence in sequences]
    mask = [[0] * (longest - len(sequence)) + [1] * len(sequence) for sequence in sequences]
    return (
        torch.tensor(ids, dtype=torch.long, device=device).reshape(len(sequences), longest),
        torch.tensor(mask, dtype=torch.long, device=device).reshape(len(sequences), longest),
    )


def positions_of(mask: Tensor) -> Tensor:
    """Position of every token among the unmasked ones, 0 on padding. mask: [P, L]."""
    return (mask.cumsum(-1) - 1).clamp(min=0)  # [P, L]


def rows_of(
    prompts: Sequence[Sequence[int]], answers: Sequence[tuple[int, Sequence[int]]], device: torch.device
) -> Rows:
    """Lay out answers, each given as (index into prompts, tokens). No prompt may be empty."""
    prefix, prefix_mask = left_padded([prompt[:-1] for prompt in prompts], device)
    longest = max(1, *(len(ids) for _, ids in answers))
    inputs, targets, mask = [], [], []
    for prompt, ids in answers:
        padding = longest - len(ids)
        inputs.append(([prompts[prompt][-1], *ids[:-1]] + [0] * longest)[:longest])
        targets.append(list(ids) + [0] * padding)
        mask.append([True] * len(ids) + [False] * padding)
    return Rows(
        prefix=prefix,
        prefix_mask=prefix_mask,
        inputs=torch.tensor(inputs, dtype=torch.long, device=device),
        targets=torch.tensor(targets, dtype=torch.long, device=device),
        mask=torch.tensor(mask, dtype=torch.bool, device=device),
        prompt_of_row=torch.tensor([prompt for prompt, _ in answers], dtype=torch.long, device=device),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts], dtype=torch.long, device=device),
    )


def select_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Keep, drop or repeat the cache's rows, in place; differentiable. rows: indices into the batch axis."""
    for layer in cache.layers:
        if layer.get_seq_length() > 0:
            layer.keys = layer.keys.index_select(0, rows)
            layer.values = layer.values.index_select(0, rows)


def prefilled(model: Any, ids: Tensor, mask: Tensor) -> DynamicCache:
    """Keys and values of left-padded prompts. ids, mask: [P, L]; an empty cache where L is 0."""
    cache = DynamicCache(config=model.config)
    if ids.shape[1]:
        model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions_of(mask),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
    return cache


def answer_logits(model: Any, rows: Rows) -> Tensor:
    """Next-token logits at every answer token: [R, T, V]."""
    cache = prefilled(model, rows.prefix, rows.prefix_mask)
    select_rows(cache, rows.prompt_of_row)
    count, length = rows.inputs.shape
    start = rows.prompt_lengths[rows.prompt_of_row].unsqueeze(-1) - 1  # [R, 1]
    attention_mask = torch.cat(
        [rows.prefix_mask[rows.prompt_of_row], torch.ones_like(rows.inputs)], dim=1
    )  # [R, L + T]; padding after an answer is never looked at by what comes before it
    logits: Tensor = model(
        input_ids=rows.inputs,
        attention_mask=attention_mask,
        position_ids=start + torch.arange(length, device=rows.inputs.device).expand(count, length),
        past_key_values=cache,
        use_cache=True,
    ).logits
    return logits  # [R, T, V]
