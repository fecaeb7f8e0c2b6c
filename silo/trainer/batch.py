"""The nouns of a training step, and how prompts and answers lie in one stream of tokens.

Axes: N tokens of the stream, S of them of prompts, P prompts (groups), R answers (rows), L longest prefix, T longest
answer.

The K answers to a prompt share it: its tokens but the last stand in the stream once. There is no padding in it, so a
ragged batch costs what its tokens cost; only attention pads its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
class Prefixes:
    """Prompts without their last tokens, one after the other.

    Attributes:
        ids: [S].
        positions: [S] of each token in its prompt.
        lengths: [P].
        places: [P, L] where each prefix lies in the stream, right-padded with 0.
        inside: [S] where each token lies among the P * L.
    """

    ids: Tensor
    positions: Tensor
    lengths: Tensor
    places: Tensor
    inside: Tensor


@dataclass(frozen=True)
class Stream:
    """Prefixes, then for each answer the prompt's last token and the answer without its last: the output at each of
    those predicts the target at the same place.

    Attributes:
        ids, positions: [N].
        targets: [N - S].
        lengths: [R] tokens of each answer.
        prefix_places: [P, L] and prefix_of: [S], as in `Prefixes`.
        query_places: [R, T] where each answer's inputs lie, right-padded with 0.
        query_of: [N - S] where each of them lies among the R * T.
        key_places: [R, L + T] what each answer looks at: its prompt's prefix and itself.
        mask: [R, 1, T, L + T] True where a query may look.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    lengths: Tensor
    prefix_places: Tensor
    prefix_of: Tensor
    query_places: Tensor
    query_of: Tensor
    key_places: Tensor
    mask: Tensor


def prefixes_of(prompts: Sequence[Sequence[int]], device: torch.device) -> Prefixes:
    """No prompt may be empty; one of a single token has an empty prefix."""
    lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)  # [P]
    starts = lengths.cumsum(0) - lengths
    column = torch.arange(int(lengths.max()), device=device)
    used = column < lengths.unsqueeze(1)  # [P, L]
    return Prefixes(
        ids=_ids([token for prompt in prompts for token in prompt[:-1]], device),
        positions=_ids([place for prompt in prompts for place in range(len(prompt) - 1)], device),
        lengths=lengths,
        places=torch.where(used, starts.unsqueeze(1) + column, 0),
        inside=used.flatten().nonzero().squeeze(1),
    )


def stream_of(
    prompts: Sequence[Sequence[int]], answers: Sequence[tuple[int, Sequence[int]]], device: torch.device
) -> Stream:
    """Lay out answers, each given as (index into prompts, tokens). No prompt and no answer may be empty."""
    prefixes = prefixes_of(prompts, device)
    owner = torch.tensor([prompt for prompt, _ in answers], device=device)  # [R]
    lengths = torch.tensor([len(ids) for _, ids in answers], device=device)  # [R]
    starts = len(prefixes.ids) + lengths.cumsum(0) - lengths
    column = torch.arange(int(lengths.max()), device=device)
    used = column < lengths.unsqueeze(1)  # [R, T]
    query_places = torch.where(used, starts.unsqueeze(1) + column, 0)
    inputs = [token for prompt, ids in answers for token in (prompts[prompt][-1], *ids[:-1])]
    first = [len(prompts[prompt]) - 1 for prompt, _ in answers]
    positions = [begin + place for begin, (_, ids) in zip(first, answers, strict=True) for place in range(len(ids))]
    in_prefix = torch.arange(prefixes.places.shape[1], device=device) < prefixes.lengths[owner].unsqueeze(1)  # [R, L]
    causal = column.unsqueeze(1) >= column  # [T, T]; what pads an answer comes after it
    rows, longest = len(answers), len(column)
    mask = torch.cat(
        [in_prefix.unsqueeze(1).expand(rows, longest, -1), causal.expand(rows, longest, longest)], dim=2
    )  # [R, T, L + T]
    return Stream(
        ids=torch.cat([prefixes.ids, _ids(inputs, device)]),
        positions=torch.cat([prefixes.positions, _ids(positions, device)]),
        targets=_ids([token for _, ids in answers for token in ids], device),
        lengths=lengths,
        prefix_places=prefixes.places,
        prefix_of=prefixes.inside,
        query_places=query_places,
        query_of=used.flatten().nonzero().squeeze(1),
        key_places=torch.cat([prefixes.places[owner], query_places], dim=1),
        mask=mask.unsqueeze(1),
    )


def _ids(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=device)
