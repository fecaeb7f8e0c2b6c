"""The decoder's forward pass in float32, whatever the base is loaded as: what an engine's figures ought to be.

One optimiser step at lr 1e-5 moves a token's log-probability by some 1e-4, and bfloat16 rounds it by 1e-2. Compared
with another bfloat16 pass, an engine's figures would share part of their rounding with the very difference that is
looked for. Here weights, and factors rounded as an engine in the base's dtype holds them, are widened one projection at
a time, so the difference between two adapters comes out exact to about 1e-6, and the model is never in memory twice.

Axes as in `decoder`; M answer tokens.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from silo.trainer.batch import Stream
from silo.trainer.decoder import Decoder, Projection
from silo.trainer.layers import Factors, low_rank_linear

# Numbers of one block of the head, and of one block of logits, while they are float32: 64 MiB.
NUMBERS_TOGETHER = 1 << 24


class ExactDecoder(Decoder):
    """A view of a decoder's weights that computes in float32, with other values in place of the factors if asked.

    Args:
        decoder: whose weights these are; they are neither copied nor changed.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.__dict__.update(copy.copy(decoder).__dict__)
        self._values: Mapping[int, Tensor] = {}

    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(ids).float()

    @torch.no_grad()
    def logp(
        self,
        stream: Stream,
        temperature: float,
        *,
        factors: Sequence[tuple[Tensor, Tensor]] | None = None,
        base_only: bool = False,
    ) -> Tensor:
        """Log-probability of every answer token of a stream. [M] float32.

        Args:
            stream: prompts and answers.
            temperature: of the rollout; divides the logits.
            factors: (live tensor of the decoder, values to take in its place); None takes the live ones.
            base_only: compute the base model.
        """
        self._values = {id(live): values for live, values in factors or ()}
        self.adapted = not base_only
        try:
            return self._chosen(self.hidden(stream), stream.targets, temperature)
        finally:
            self._values = {}

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        stored = self.embedding.dtype
        factors: list[Factors] = []
        for each in projection.factors if self.adapted else ():
            a, b = (self._values.get(id(live), live).to(stored).float() for live in (each.a, each.b))
            factors.append(dataclasses.replace(each, a=a, b=b))
        bias = None if projection.bias is None else projection.bias.float()
        weight = projection.weight if isinstance(projection.weight, Tensor) else projection.weight.whole(stored)
        return low_rank_linear(x, weight.float(), bias, factors, self._scale)

    def _chosen(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Block by block of the vocabulary: a widened head would be the largest tensor of all."""
        words, width = self.head.shape
        together = max(1, NUMBERS_TOGETHER // max(width, len(hidden)))
        total = torch.full((len(hidden),), -torch.inf, device=hidden.device)  # [M] log of the sum so far
        chosen = torch.zeros_like(total)
        for start in range(0, words, together):
            logits = hidden @ self.head[start : start + together].float().T / temperature  # [M, block]
            total = torch.logaddexp(total, logits.logsumexp(1))
            inside = (targets >= start) & (targets < start + logits.shape[1])
            place = (targets - start).clamp(0, logits.shape[1] - 1)
            chosen = torch.where(inside, logits.gather(1, place.unsqueeze(1)).squeeze(1), chosen)
        return chosen - total
