"""The nouns of a training step, and how prompts and answers lie in one stream of tokens.

Axes: N tokens of the stream, S of them of prompts, P prompts (groups), R answers (rows), L longest prefix.

The K answers to a prompt share it: its tokens but the last stand in the stream once. There is no padding in it, so a
ragged batch costs what its tokens cost; only attention pads its rows, block by block of like lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt.

    Attributes:
        ids: its tokens, the end-of-sequence token included where it was emitted.
        text: the same as text, special tokens left out.
        finished: False where the token limit cut it off.
        reward: of the local verdict, 0 to 1; advantages go by it.
        donor: name of the silo that wrote it; empty for an own answer.
        correct: the local verdict; counts, donors and replaced answers go by it. Where it is not given, a reward
            above 1/2 is correct, which is right for rewards of 0 and 1 alone.
    """

    ids: tuple[int, ...]
    text: str
    finished: bool
    reward: float = 0.0
    donor: str = ""
    correct: bool = None  # type: ignore[assignment]  # a bool once it is made

    def __post_init__(self) -> None:
        if self.correct is None:
            object.__setattr__(self, "correct", self.reward > 0.5)


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
        starts: [P] where each begins in the stream.
        places: [P, L] where the tokens of each lie in the stream, right-padded with 0.
        inside: [S] where each token lies among the P * L.
    """

    ids: Tensor
    positions: Tensor
    lengths: Tensor
    starts: Tensor
    places: Tensor
    inside: Tensor

    def to(self, device: torch.device) -> Prefixes:
        return Prefixes(**{name: each.to(device) for name, each in vars(self).items()})


@dataclass(frozen=True)
class Block:
    """Answers of like lengths: one padded rectangle of attention. r answers, t the longest of them, l their longest
    prefix.

    Attributes:
        query_places: [r, t] where each answer's inputs lie, right-padded with 0.
        key_places: [r, l + t] what each answer looks at: its prompt's prefix and itself.
        prefix_lengths: [r], or [1] where all are equal.
    """

    query_places: Tensor
    key_places: Tensor
    prefix_lengths: Tensor

    def mask(self, dtype: torch.dtype) -> Tensor:
        """What is added to the scores: 0, or -inf where a query may not look. [r or 1, 1, t, l + t]."""
        longest = self.query_places.shape[1]
        prefix = self.key_places.shape[1] - longest
        device = self.query_places.device
        mask = torch.zeros(len(self.prefix_lengths), 1, longest, prefix + longest, dtype=dtype, device=device)
        outside = torch.arange(prefix, device=device) >= self.prefix_lengths.unsqueeze(1)  # [r, l]
        mask[..., :prefix].masked_fill_(outside[:, None, None], -torch.inf)
        column = torch.arange(longest, device=device)
        mask[..., prefix:].masked_fill_(column.unsqueeze(1) < column, -torch.inf)  # what pads an answer comes after it
        return mask


@dataclass(frozen=True)
class Stream:
    """Prefixes, then for each answer the prompt's last token and the answer without its last: the output at each of
    those predicts the target at the same place.

    Attributes:
        ids, positions: [N].
        targets: [N - S].
        lengths: [R] tokens of each answer.
        prefix_places: [P, L] and prefix_of: [S], as in `Prefixes`.
        blocks: the answers by length, each in one of them.
        query_of: [N - S] where each answer's inputs lie among the r * t of all blocks, one block after the other.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    lengths: Tensor
    prefix_places: Tensor
    prefix_of: Tensor
    blocks: tuple[Block, ...]
    query_of: Tensor


# Answers up to this many tokens share a block: cutting them further would cost more than their padding.
SHORT_TOKENS = 16


def block_of(length: int) -> int:
    """Answers whose numbers are equal share a block. Beyond `SHORT_TOKENS` their lengths differ by less than twice."""
    return (max(length, SHORT_TOKENS) - 1).bit_length()


@dataclass(frozen=True)
class Padding:
    """How many scores attention computes for a stream in one layer and head, padding included.

    Attributes:
        blocks: (answers, longest of them, their longest prefix) by `block_of`.
        prompts: how many.
        longest_prefix: of the prompts, in tokens.
    """

    blocks: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    prompts: int = 0
    longest_prefix: int = 0

    def with_answer(self, prefix: int, length: int, *, more_prompts: int) -> Padding:
        """The same with an answer more. prefix, length: in tokens; more_prompts: 1 where its prompt is not in yet."""
        answers, longest, longest_prefix = self.blocks.get(block_of(length), (0, 0, 0))
        grown = (answers + 1, max(longest, length), max(longest_prefix, prefix))
        return Padding(
            {**self.blocks, block_of(length): grown},
            self.prompts + more_prompts,
            max(self.longest_prefix, prefix),
        )

    @property
    def scores(self) -> int:
        of_answers = sum(answers * longest * (prefix + longest) for answers, longest, prefix in self.blocks.values())
        return of_answers + self.prompts * self.longest_prefix**2


def prefixes_of(prompts: Sequence[Sequence[int]], device: torch.device) -> Prefixes:
    """No prompt may be empty; one of a single token has an empty prefix."""
    lengths = torch.tensor([len(prompt) - 1 for prompt in prompts])  # [P]
    starts = lengths.cumsum(0) - lengths
    column = torch.arange(int(lengths.max()))
    used = column < lengths.unsqueeze(1)  # [P, L]
    return Prefixes(
        ids=_ids([token for prompt in prompts for token in prompt[:-1]]),
        positions=_ids([place for prompt in prompts for place in range(len(prompt) - 1)]),
        lengths=lengths,
        starts=starts,
        places=torch.where(used, starts.unsqueeze(1) + column, 0),
        inside=used.flatten().nonzero().squeeze(1),
    ).to(device)


def stream_of(
    prompts: Sequence[Sequence[int]], answers: Sequence[tuple[int, Sequence[int]]], device: torch.device
) -> Stream:
    """Lay out answers, each given as (index into prompts, tokens). No prompt and no answer may be empty."""
    prefixes = prefixes_of(prompts, torch.device("cpu"))  # all places are counted there, and then sent at once
    owner = torch.tensor([prompt for prompt, _ in answers])  # [R]
    lengths = torch.tensor([len(ids) for _, ids in answers])  # [R]
    starts = len(prefixes.ids) + lengths.cumsum(0) - lengths
    inputs = [token for prompt, ids in answers for token in (prompts[prompt][-1], *ids[:-1])]
    first = [len(prompts[prompt]) - 1 for prompt, _ in answers]
    positions = [begin + place for begin, (_, ids) in zip(first, answers, strict=True) for place in range(len(ids))]
    rows_of: dict[int, list[int]] = {}
    for row, (_, ids) in enumerate(answers):
        rows_of.setdefault(block_of(len(ids)), []).append(row)
    blocks, padded_starts, padded = [], torch.zeros_like(starts), 0
    for _, rows in sorted(rows_of.items()):
        chosen = torch.tensor(rows)
        column = torch.arange(int(lengths[chosen].max()))
        used = column < lengths[chosen].unsqueeze(1)  # [r, t]
        query_places = torch.where(used, starts[chosen].unsqueeze(1) + column, 0)
        prefix_lengths = prefixes.lengths[owner[chosen]]  # [r]
        prefix_places = prefixes.places[owner[chosen], : int(prefix_lengths.max())]  # [r, l]
        equal = bool((prefix_lengths == prefix_lengths[0]).all())
        blocks.append(
            Block(
                query_places.to(device),
                torch.cat([prefix_places, query_places], dim=1).to(device),
                (prefix_lengths[:1] if equal else prefix_lengths).to(device),
            )
        )
        padded_starts[chosen] = padded + len(column) * torch.arange(len(rows))
        padded += query_places.numel()
    places = torch.arange(len(inputs)) - (starts - len(prefixes.ids)).repeat_interleave(lengths)  # in the own answer
    return Stream(
        ids=torch.cat([prefixes.ids, _ids(inputs)]).to(device),
        positions=torch.cat([prefixes.positions, _ids(positions)]).to(device),
        targets=_ids([token for _, ids in answers for token in ids]).to(device),
        lengths=lengths.to(device),
        prefix_places=prefixes.places.to(device),
        prefix_of=prefixes.inside.to(device),
        blocks=tuple(blocks),
        query_of=(padded_starts.repeat_interleave(lengths) + places).to(device),
    )


def _ids(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)
