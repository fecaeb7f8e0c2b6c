"""The forward pass of the Llama, Qwen2 and Qwen3 decoders, written out once for training and for sampling.

The weights are the Hugging Face model's own: projections of one input lie side by side in one tensor, and the model's
parameters become views of it, so nothing is held twice; quantised ones (`quantised`) likewise. Tokens are one stream
without padding; attention alone sees rows. The K answers to a prompt share it: it is computed once, and gradients flow
through its keys and values.

Each differentiable piece of a layer has its gradient written out. Only activations and the LoRA factors get gradients,
so a frozen weight costs one product in the backward pass and not two, and less is kept for it than automatic
differentiation would keep. All of it is plain torch.

Axes: N tokens of a stream, S of them of prompts, P prompts, L longest prefix, r answers of a block or rank, t the
longest of them, D hidden or inputs, M outputs, H heads, G key-value heads, E numbers of a head, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fedsilo.files.model_facts import ACTIVATIONS, ARCHITECTURES, PROJECTIONS, ROTARY_KINDS
from fedsilo.protocol.errors import UsageError
from silo.budgets import LOGITS_MAX
from silo.trainer.quantised import QuantisedLinear, QuantisedWeight, side_by_side

# ---- streams of tokens ----


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
        """Return the mask that is added to the scores: 0, or -inf where a query may not look. [r or 1, 1, t, l + t]."""
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
    """Count of the scores that attention computes for a stream in one layer and head, padding included.

    Attributes:
        blocks: (answers, longest of them, their longest prefix) by `block_of`.
        prompts: how many.
        longest_prefix: of the prompts, in tokens.
    """

    blocks: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    prompts: int = 0
    longest_prefix: int = 0

    def with_answer(self, prefix: int, length: int, *, more_prompts: int) -> Padding:
        """Return the same with an answer more. prefix, length: in tokens; more_prompts: 1 where its prompt is not in
        yet."""
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
    """Lay out the prefixes of prompts. No prompt may be empty; one of a single token has an empty prefix."""
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


# ---- projections and their factors ----


@dataclass(frozen=True)
class Factors:
    """LoRA factors of some rows of a weight: rows `start` to `stop` of the output get scale * B A x, or, with a core,
    scale * B R A x. A shift is added to the weight itself: scale * shift_b shift_a.

    a: [r, D], b: [stop - start, r], core: [r, r], shift_a: [k, D], shift_b: [stop - start, k], all float32 whatever the
    base is.
    """

    start: int
    stop: int
    a: Tensor
    b: Tensor
    core: Tensor | None = None
    shift_a: Tensor | None = None
    shift_b: Tensor | None = None

    @property
    def down(self) -> Tensor:
        """A, or R A, which is no larger: gradients reach R through it."""
        return self.a if self.core is None else self.core @ self.a


Pair = tuple[Tensor, Tensor, *tuple[Tensor | None, ...]]  # a and b, and what else `Factors` holds, in its order
# Numbers of a row of bfloat16 are 16 bytes, which a GPU's fast products want rows to be a multiple of.
ROOM_UNIT = 8


def room_for(columns: int) -> int:
    """Columns beside a weight for so many of factors."""
    return -(-columns // ROOM_UNIT) * ROOM_UNIT


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether a product's rounding to it may swallow what a low-rank product adds afterwards."""
    return dtype.itemsize < torch.float32.itemsize


def _beside(out: Tensor, rows: Sequence[tuple[int, int]], bs: Sequence[Tensor], scale: float) -> Tensor:
    """scale * each B in a block of its own, zeros elsewhere. out: [M, room]."""
    out.zero_()
    column = 0
    for (start, stop), b in zip(rows, bs, strict=True):
        out[start:stop, column : column + b.shape[1]] = b.float() * scale
        column += b.shape[1]
    return out


def _merged(weight: Tensor, rows: Sequence[tuple[int, int]], factors: Sequence[Tensor], scale: float) -> Tensor:
    """W + scale B A on the rows that have factors, a copy. weight: [M, D]; factors: A and B in turn."""
    whole = weight.clone()
    for (start, stop), a, b in zip(rows, factors[0::2], factors[1::2], strict=True):
        whole[start:stop].addmm_(b.to(weight.dtype), a.to(weight.dtype), alpha=scale)
    return whole


def _together(x: Tensor, u: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute both parts as one product, rounded once. x: [N, D]; u: [N, parts * r]; weight: [M, D + room]."""
    parts = [x, u]
    if unused := weight.shape[1] - x.shape[1] - u.shape[1]:
        parts.append(x.new_zeros(len(x), unused))
    return functional.linear(torch.cat(parts, 1), weight, bias)


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor | QuantisedWeight,
        bias: Tensor | None,
        scale: float,
        rounds_once: bool,
        roomy: Tensor | None,
        rows: Sequence[tuple[int, int]],
        *factors: Tensor,
    ) -> Tensor:
        ctx.scale, ctx.rows, ctx.rank, ctx.merged = scale, rows, factors[1].shape[1], False
        ctx.quantised = None if isinstance(stored, Tensor) else stored
        if isinstance(stored, Tensor) and rounds_once and not is_narrow(x.dtype):
            ctx.merged = True
            ctx.save_for_backward(x, stored, *factors)
            return functional.linear(x, _merged(stored, rows, factors, scale), bias)
        weight = stored if isinstance(stored, Tensor) else stored.whole(x.dtype)
        a = torch.cat(factors[0::2]).to(x.dtype)  # [parts * r, D]
        bs = [b.to(x.dtype) for b in factors[1::2]]
        u = x @ a.T  # [N, parts * r]
        rank = ctx.rank
        if rounds_once and is_narrow(x.dtype):
            if roomy is None:
                room = _beside(weight.new_empty(len(weight), room_for(len(a))), rows, factors[1::2], scale)
                whole = torch.cat([weight, room], 1)
            else:
                # .data: what a backward pass of before still holds of the weight has not been changed by this
                whole = roomy.data
                _beside(whole[:, x.shape[1] :], rows, factors[1::2], scale)
            y = _together(x, u, whole, bias)  # [N, M]
        else:
            y = functional.linear(x, weight, bias)
            for place, ((start, stop), b) in enumerate(zip(rows, bs, strict=True)):
                y[:, start:stop].addmm_(u[:, place * rank : (place + 1) * rank], b.T, alpha=scale)
        # Of a quantised weight the few bits are kept, and multiplied out once more in the backward pass.
        ctx.save_for_backward(x, stored if isinstance(stored, Tensor) else None, a, u, *bs)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        scale, rows, rank = ctx.scale, ctx.rows, ctx.rank
        wants = ctx.needs_input_grad[7:]  # of A and B in turn
        if ctx.merged:
            x, weight, *factors = ctx.saved_tensors
            u: Any = None
            a, bs = torch.cat(factors[0::2]).to(x.dtype), [b.to(x.dtype) for b in factors[1::2]]
            if any(wants[1::2]):
                u = x @ a.T
        else:
            x, weight, a, u, *bs = ctx.saved_tensors
        v = None
        if any(wants[0::2]) or not ctx.merged:
            parts = [dy[:, start:stop] @ b for (start, stop), b in zip(rows, bs, strict=True)]
            v = torch.cat(parts, dim=1)  # [N, parts * r]
        dx = None
        if ctx.needs_input_grad[0] and ctx.merged:
            dx = dy @ _merged(weight, rows, factors, scale)  # [N, D]
        elif ctx.needs_input_grad[0]:
            whole = weight if ctx.quantised is None else ctx.quantised.whole(dy.dtype)
            dx = (dy @ whole).addmm_(v, a, alpha=scale)
        da = (v.T @ x).float() * scale if v is not None and any(wants[0::2]) else None  # [parts * r, D]
        gradients: list[Tensor | None] = []
        for place, (start, stop) in enumerate(rows):
            part = slice(place * rank, (place + 1) * rank)
            gradients.append(da[part] if da is not None and wants[2 * place] else None)
            gradients.append((dy[:, start:stop].T @ u[:, part]).float() * scale if wants[2 * place + 1] else None)
        return dx, None, None, None, None, None, None, *gradients


class _QuantisedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return functional.linear(x, weight.whole(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy @ ctx.weight.whole(dy.dtype), None, None


def low_rank_linear(
    x: Tensor,
    weight: Tensor | QuantisedWeight,
    bias: Tensor | None,
    factors: Sequence[Factors],
    scale: float,
    *,
    rounds_once: bool = True,
    roomy: Tensor | None = None,
) -> Tensor:
    """Return x W^T + bias, and on the rows that have factors scale * x A^T B^T (Hu et al. 2021).

    The factors stay apart from W: added to it in bfloat16, a step of lr 1e-5 survives in the mean over entries alone.
    Some nine in ten stay as they are and the others jump by a whole spacing: noise of four times the step (measured).
    In bfloat16 both products are one, [x, x A^T] [W, scale B]^T: rounded by itself, x W^T lies on a grid on which what
    a small adapter adds is rounded away, every time and not by chance (docs/explain/agreement.md has the shares).
    In float32 they are added to a copy of W: that rounds by 2^-24 of an entry, as the product itself does, and saves
    two of six narrow products.

    Args:
        x: [N, D].
        weight: [M, D], frozen.
        bias: [M], frozen.
        factors: of some rows of the weight, in their order.
        scale: alpha / r.
        rounds_once: false computes as vLLM and peft do, which round before they add.
        roomy: [M, D + room], the memory that `weight` is the left part of, so that it need not be copied to have the
            factors beside it. The right part is written over.

    Returns:
        [N, M] in the dtype of x.
    """
    if not factors:
        if isinstance(weight, Tensor):
            return functional.linear(x, weight, bias)
        whole: Tensor = _QuantisedLinear.apply(x, weight, bias)
        return whole
    rows = [(each.start, each.stop) for each in factors]
    flat = [tensor for each in factors for tensor in (each.down, each.b)]
    y: Tensor = _LowRankLinear.apply(x, weight, bias, scale, rounds_once, roomy, rows, *flat)
    return y


@dataclass(frozen=True)
class JoinedFactors:
    """All factors of a projection as two matrices in the base's dtype: a [parts * r, D] one below the other, and
    b [M, room] with scale * each B in a block of its own and zeros elsewhere.

    Attributes:
        whole: [M, D + room], the weight with b at its side in one piece of memory; None where they are apart.
        merged: [M, D], the weight with the factors added to it; None where they are not.
    """

    a: Tensor
    b: Tensor
    whole: Tensor | None = None
    merged: Tensor | None = None


def join_factors(
    factors: Sequence[Factors],
    weight: Tensor | QuantisedWeight,
    scale: float,
    dtype: torch.dtype,
    roomy: Tensor | None = None,
) -> JoinedFactors:
    """A copy: it does not follow what becomes of the factors.

    Args:
        factors: of some rows of the weight.
        weight: [M, D].
        scale: alpha / r.
        dtype: of the base.
        roomy: [M, D + room], the memory that `weight` is the left part of. b is written to the right part, over
            what the last call wrote.
    """
    a = torch.cat([each.down.detach() for each in factors]).to(dtype)
    outputs, inputs = weight.shape
    room = torch.empty(outputs, room_for(len(a)), dtype=dtype, device=a.device) if roomy is None else roomy[:, inputs:]
    rows = [(each.start, each.stop) for each in factors]
    b = _beside(room, rows, [each.b.detach() for each in factors], scale)
    if isinstance(weight, Tensor) and not is_narrow(dtype):
        flat = [tensor.detach() for each in factors for tensor in (each.down, each.b)]
        return JoinedFactors(a, b, merged=_merged(weight, rows, flat, scale))
    return JoinedFactors(a, b, roomy)


def joined_linear(x: Tensor, weight: Tensor | QuantisedWeight, bias: Tensor | None, joined: JoinedFactors) -> Tensor:
    """`low_rank_linear` without gradients and with fewer products, for the many small batches of sampling."""
    if joined.merged is not None:
        return functional.linear(x, joined.merged, bias)
    u = x @ joined.a.T
    if joined.whole is not None:
        return _together(x, u, joined.whole, bias)
    whole = weight if isinstance(weight, Tensor) else weight.whole(x.dtype)
    if is_narrow(x.dtype):
        return _together(x, u, torch.cat([whole, joined.b], 1), bias)
    return functional.linear(x, whole, bias).addmm_(u, joined.b[:, : u.shape[1]].T)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)  # [..., 1]
        ctx.save_for_backward(x, inverse, weight)
        return (wide * inverse).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, inverse, weight = ctx.saved_tensors
        wide = x.float()
        dn = (dy * weight).float()  # gradient of what was normalised
        slope = (dn * wide).mean(-1, keepdim=True) * inverse.square()  # [..., 1]
        return ((dn - wide * slope) * inverse).to(x.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight over the last axis (Zhang and Sennrich 2019), the weight frozen."""
    y: Tensor = _RmsNorm.apply(x, weight, epsilon)
    return y


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    y = torch.empty_like(x)
    torch.mul(first, cosine, out=y[..., :half]).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=y[..., half:]).addcmul_(first, sine)
    return y


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turned(x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        cosine, sine = ctx.saved_tensors
        return _turned(dy, cosine, -sine), None, None  # the inverse of a rotation turns back


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021), halves apart as in Llama. x: [N, H, E]; cosine, sine: [N, 1, E / 2]."""
    y: Tensor = _Rotate.apply(x, cosine, sine)
    return y


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        half = gate.shape[-1]
        dboth = torch.empty_like(both)
        torch.mul(dy, functional.silu(gate), out=dboth[:, half:])
        dboth[:, :half] = torch.ops.aten.silu_backward(dy * up, gate)
        return dboth


def swiglu(both: Tensor) -> Tensor:
    """Return silu(gate) * up (Shazeer 2020). both: [N, 2 I], gate beside up; returns [N, I]."""
    y: Tensor = _SwiGlu.apply(both)
    return y


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = len(x)
        return x.index_select(0, places.flatten()).view(*places.shape, *x.shape[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        flat = dy.flatten(0, places.dim() - 1)
        dx = torch.zeros(ctx.rows, *flat.shape[1:], dtype=torch.float32, device=dy.device)
        return dx.index_add_(0, places.flatten(), flat.float()).to(dy.dtype), None


def gather_rows(x: Tensor, places: Tensor) -> Tensor:
    """Return x[places], whose gradient sums in float32 and, on a CPU, in one order whatever the number of threads.

    Plain indexing adds its gradients atomically and in the dtype of x. On CUDA `index_add_` is atomic too, unless
    `torch.use_deterministic_algorithms` is on.

    Args:
        x: [N, ...].
        places: [...] of int64, of any shape; a row may be named many times.
    """
    y: Tensor = _GatherRows.apply(x, places)
    return y


def repeats_heads(device: torch.device) -> bool:
    """Return whether masked attention with shared keys wants them repeated: on CUDA the fused kernels take shared keys
    without a mask alone, and torch falls back to one that writes all scores out (transformers,
    `integrations/sdpa_attention`)."""
    return device.type == "cuda"


def attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return softmax(q k^T / sqrt(E)) v.

    Args:
        query: [R, H, T, E].
        key: [R, G, W, E], each for H / G heads that lie side by side.
        value: [R, G, W, E].
        mask: [R or 1, 1, T, W], added to the scores.
        causal: query t sees keys 0 to t.

    Returns:
        [R, H, T, E].
    """
    shared = query.shape[1] // key.shape[1]
    if shared > 1 and mask is not None and repeats_heads(query.device):
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
        shared = 1
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=shared > 1
    )


class _TokenLogp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        rows = max(LOGITS_MAX // head.shape[0], 1)
        wanted = ctx.needs_input_grad[0]
        logp = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logp) if with_entropy else None
        slope = torch.empty_like(hidden) if wanted else None
        entropy_slope = torch.empty_like(hidden) if wanted and with_entropy else None
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            chosen_place = targets[part, None]
            logits = (hidden[part] @ head.T).float()  # [rows, V]
            if temperature != 1.0:
                logits /= temperature
            logits -= logits.amax(1, keepdim=True)
            chosen = logits.gather(1, chosen_place)
            probability = logits.exp() if with_entropy else logits.exp_()
            total = probability.sum(1, keepdim=True)
            log_total = total.log()
            logp[part] = (chosen - log_total).squeeze(1)
            if not wanted and entropy is None:
                continue
            probability /= total
            if entropy is not None:
                logits -= log_total  # log p
                each = -torch.bmm(probability.unsqueeze(1), logits.unsqueeze(2)).squeeze(2)  # [rows, 1]
                entropy[part] = each.squeeze(1)
                if entropy_slope is not None:
                    # dH / dlogit_j = -p_j (log p_j + H)
                    logits.add_(each).mul_(probability)
                    torch.mul(logits.to(hidden.dtype) @ head, -1 / temperature, out=entropy_slope[part])
            if slope is not None:
                # 1 - p of the target before anything is rounded to the head's dtype: a near-certain token keeps its own
                one = torch.ones_like(chosen)
                torch.matmul(
                    probability.neg_().scatter_add_(1, chosen_place, one).to(hidden.dtype), head, out=slope[part]
                )
                if temperature != 1.0:
                    slope[part] /= temperature
            del logits, probability  # else the next chunk's first product is made beside them
        ctx.save_for_backward(slope, entropy_slope)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogp: Tensor, dentropy: Tensor | None) -> Any:
        slope, entropy_slope = ctx.saved_tensors
        dhidden = dlogp.unsqueeze(1).to(slope.dtype) * slope
        if entropy_slope is not None and dentropy is not None:
            dhidden += dentropy.unsqueeze(1).to(slope.dtype) * entropy_slope
        return dhidden, None, None, None, None


def token_logp(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under the policy that the sampler used, logits / temperature, and the entropy.

    The head is frozen, so the gradient to `hidden` is known in the forward pass, and is kept in place of the logits:
    d logp / d hidden = sum_v (1[v = target] - p_v) head[v] / temperature. Beside what it returns and keeps, [N, D] in
    the dtype of `hidden` once for each of the two, it holds at its peak one float32 buffer of `LOGITS_MAX` numbers, two
    with the entropy, and where the head is narrower than float32 one more of the head's dtype.

    Args:
        hidden: [N, D].
        head: [V, D], frozen.
        targets: [N] token ids.
        temperature: of the rollout.
        with_entropy: the entropy in nats too.

    Returns:
        [N] and [N] or None, float32.
    """
    both: tuple[Tensor, Tensor | None] = _TokenLogp.apply(hidden, head, targets, temperature, with_entropy)
    return both


Angles: TypeAlias = tuple[Tensor, Tensor]
# A second decoder would join the weights anew, and the first would hold a whole model of its own from then on.
_DECODED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(frozen=True)
class Projection:
    """Linear layers of one input, side by side.

    Attributes:
        weight: [M, D], frozen.
        bias: [M], frozen.
        factors: of some rows.
        roomy: [M, D + room], the memory that a narrow weight is the left part of; the factors are laid beside it.
        joined: the factors as they were when sampling began, in place of `factors`.
        shifted: [M, D], the weight with the factors' shifts; None where they have none.
    """

    weight: Tensor | QuantisedWeight
    bias: Tensor | None
    factors: tuple[Factors, ...]
    roomy: Tensor | None = None
    joined: JoinedFactors | None = None
    shifted: Tensor | None = None

    def weight_if(self, adapted: bool) -> Tensor | QuantisedWeight:
        """Return the weight as it is with the adapter, or that of the base alone."""
        return self.shifted if adapted and self.shifted is not None else self.weight


@dataclass(frozen=True)
class Layer:
    """Frozen weights of one layer, with the factors that are trained. Norms: [D], those of heads [E]."""

    input_norm: Tensor
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


class Decoder:
    """The forward pass of a model with LoRA factors.

    Args:
        model: the base, a Hugging Face causal LM of one of `ARCHITECTURES`; it is frozen, and still works by itself.
        factors: by the name of the linear layer, what `Factors` holds, from `a` on.
        scale: alpha / r.

    Attributes:
        adapted: whether the factors count.
        rounds_once: what a layer and its factors give is rounded together; false: as vLLM does, each by itself.
        heads, key_value_heads, head_width: H, G and E.

    Raises:
        UsageError: the model is not computed as written here (architecture, activation, positions, sliding windows,
            mixed weights, or quantised by others than `quantised`), has a decoder already, or factors belong to no
            layer of `PROJECTIONS`.
    """

    def __init__(self, model: Any, factors: Mapping[str, Pair], scale: float) -> None:
        _check_supported(model, factors)
        config, core = model.config, model.model
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.adapted = self.rounds_once = True
        self.heads: int = config.num_attention_heads
        self.key_value_heads: int = config.num_key_value_heads
        self.head_width = _head_width(config)
        self.embedding: Tensor = core.embed_tokens.weight.data
        self.device = self.embedding.device
        self.head: Tensor = model.lm_head.weight.data
        self._scale = scale
        self._epsilon: float = config.rms_norm_eps
        self._final_norm: Tensor = core.norm.weight.data
        self._rotary = core.rotary_emb
        self.layers = [_layer(f"model.layers.{place}", layer, factors) for place, layer in enumerate(core.layers)]
        _DECODED.add(model)

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Leave the factors out inside the block: the reference of the KL term."""
        before, self.adapted = self.adapted, False
        try:
            yield
        finally:
            self.adapted = before

    def shift_base(self) -> None:
        """Take the factors' shifts in, as they are now: added to a copy of the weights, which stay."""
        for layer in self.layers:
            for projection in (layer.qkv, layer.output, layer.gate_up, layer.down):
                if projection.shifted is None or not isinstance(projection.weight, Tensor):
                    continue
                projection.shifted.copy_(projection.weight)
                for each in projection.factors:
                    if each.shift_a is not None and each.shift_b is not None:
                        rows = projection.shifted[each.start : each.stop]
                        rows.addmm_(each.shift_b.detach(), each.shift_a.detach(), alpha=self._scale)

    @contextmanager
    def rounding_apart(self) -> Iterator[None]:
        """Round as vLLM does inside the block: the base's product first, and then what is added to it."""
        before, self.rounds_once = self.rounds_once, False
        try:
            yield
        finally:
            self.rounds_once = before

    # ---- the parts of a layer ------------------------------------------------------------------------

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the input of the first layer. ids: [N]; returns [N, D]."""
        return self.embedding[ids]

    def angles(self, positions: Tensor) -> Angles:
        """Cosine and sine of each position, [N, 1, E / 2] each. positions: [N]."""
        cosine, sine = self._rotary(self.embedding, positions.unsqueeze(0))
        half = self.head_width // 2
        return cosine[0, :, None, :half], sine[0, :, None, :half]

    def heads_of(self, x: Tensor, layer: Layer, angles: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, E], keys and values [N, G, E]. x: [N, D]."""
        joined = self._project(rms_norm(x, layer.input_norm, self._epsilon), layer.qkv)  # [N, (H + 2 G) E]
        sides = [self.heads, self.key_value_heads, self.key_value_heads]
        query, key, value = joined.view(len(x), -1, self.head_width).split(sides, dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = rms_norm(query, layer.query_norm, self._epsilon)
            key = rms_norm(key, layer.key_norm, self._epsilon)
        return rotate(query, *angles), rotate(key, *angles), value

    def after_attention(self, x: Tensor, attended: Tensor, layer: Layer) -> Tensor:
        """The rest of a layer. x: [N, D]; attended: [N, H * E]; returns [N, D]."""
        x = x + self._project(attended, layer.output)
        both = self._project(rms_norm(x, layer.mlp_norm, self._epsilon), layer.gate_up)
        return x + self._project(swiglu(both), layer.down)

    def attend_within(self, query: Tensor, key: Tensor, value: Tensor, places: Tensor, inside: Tensor) -> Tensor:
        """Causal attention within each prompt's prefix.

        Args:
            query: [S or N, H, E].
            key: [S or N, G, E].
            value: [S or N, G, E].
            places: [P, L] where the tokens of each prefix lie, right-padded.
            inside: [S] where they lie among the P * L.

        Returns:
            [S, H * E].
        """
        rows = (gather_rows(each, places).transpose(1, 2) for each in (query, key, value))
        attended = attention(*rows, causal=True)  # [P, H, L, E]; what pads a prefix comes after it
        return gather_rows(attended.transpose(1, 2).flatten(0, 1), inside).flatten(1)

    def final(self, x: Tensor) -> Tensor:
        """Return the input of the head. x: [N, D]."""
        return rms_norm(x, self._final_norm, self._epsilon)

    def layers_for_sampling(self) -> list[Layer]:
        """The layers with the factors as they are at this moment, made ready for many small products without gradients:
        joined and in the base's dtype once and not at every token."""
        if not self.adapted or not self.rounds_once:
            return self.layers
        return [
            dataclasses.replace(
                layer,
                qkv=self._joined(layer.qkv),
                output=self._joined(layer.output),
                gate_up=self._joined(layer.gate_up),
                down=self._joined(layer.down),
            )
            for layer in self.layers
        ]

    def _joined(self, projection: Projection) -> Projection:
        if not projection.factors:
            return projection
        dtype = self.embedding.dtype
        weight = projection.weight_if(adapted=True)
        joined = join_factors(projection.factors, weight, self._scale, dtype, projection.roomy)
        return dataclasses.replace(projection, joined=joined)

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        if projection.joined is not None:
            return joined_linear(x, projection.weight, projection.bias, projection.joined)
        factors = projection.factors if self.adapted else ()
        return low_rank_linear(
            x,
            projection.weight_if(self.adapted),
            projection.bias,
            factors,
            self._scale,
            rounds_once=self.rounds_once,
            roomy=projection.roomy,
        )

    # ---- training ------------------------------------------------------------------------------------

    def hidden(self, stream: Stream, *, checkpointing: bool = False) -> Tensor:
        """The last layer's normalised output at every answer token.

        Args:
            stream: prompts and answers.
            checkpointing: keep each layer's input alone and compute the rest again in the backward pass.

        Returns:
            [N - S, D].
        """
        x = self.embedded(stream.ids)
        angles = self.angles(stream.positions)
        masks = [block.mask(x.dtype) for block in stream.blocks]  # held for this pass only
        for place, layer in enumerate(self.layers):
            last = place == len(self.layers) - 1
            if checkpointing:
                x = checkpoint(self._layer_of, x, layer, angles, stream, masks, last, use_reentrant=False)
            else:
                x = self._layer_of(x, layer, angles, stream, masks, last)
        return self.final(x)

    def _layer_of(
        self, x: Tensor, layer: Layer, angles: Angles, stream: Stream, masks: Sequence[Tensor], last: bool
    ) -> Tensor:
        query, key, value = self.heads_of(x, layer, angles)
        outputs = []
        for block, mask in zip(stream.blocks, masks, strict=True):
            answered = attention(
                gather_rows(query, block.query_places).transpose(1, 2),
                gather_rows(key, block.key_places).transpose(1, 2),
                gather_rows(value, block.key_places).transpose(1, 2),
                mask=mask,
            )  # [r, H, t, E]
            outputs.append(answered.transpose(1, 2).flatten(0, 1))
        attended = gather_rows(torch.cat(outputs), stream.query_of).flatten(1)  # [N - S, H * E]
        prefix_tokens = len(stream.prefix_of)
        if last:  # of the prompts, nobody reads more than keys and values
            return self.after_attention(x[prefix_tokens:], attended, layer)
        if prefix_tokens:
            before = self.attend_within(query, key, value, stream.prefix_places, stream.prefix_of)
            attended = torch.cat([before, attended])
        return self.after_attention(x, attended, layer)


def _layer(name: str, layer: Any, factors: Mapping[str, Pair]) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp

    def norm(owner: Any, which: str) -> Tensor | None:
        module = getattr(owner, which, None)
        return None if module is None else module.weight.data

    return Layer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=_side_by_side(f"{name}.self_attn", attention, ("q_proj", "k_proj", "v_proj"), factors),
        query_norm=norm(attention, "q_norm"),
        key_norm=norm(attention, "k_norm"),
        output=_side_by_side(f"{name}.self_attn", attention, ("o_proj",), factors),
        mlp_norm=layer.post_attention_layernorm.weight.data,
        gate_up=_side_by_side(f"{name}.mlp", mlp, ("gate_proj", "up_proj"), factors),
        down=_side_by_side(f"{name}.mlp", mlp, ("down_proj",), factors),
    )


def _side_by_side(path: str, owner: Any, names: tuple[str, ...], factors: Mapping[str, Pair]) -> Projection:
    modules = [getattr(owner, each) for each in names]
    quantised = [module.stored for module in modules if isinstance(module, QuantisedLinear)]
    pairs = {each: pair for each in names if (pair := factors.get(f"{path}.{each}")) is not None}
    roomy: Tensor | None = None
    weight: Tensor | QuantisedWeight
    if quantised:
        weight = side_by_side(quantised)
    elif pairs and is_narrow(modules[0].weight.dtype):
        inputs, room = modules[0].in_features, room_for(sum(len(pair[0]) for pair in pairs.values()))
        roomy = modules[0].weight.data.new_zeros(sum(module.out_features for module in modules), inputs + room)
        weight = torch.cat([module.weight.data for module in modules], out=roomy[:, :inputs])
    else:
        weight = torch.cat([module.weight.data for module in modules])
    bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
    factors_found, start = [], 0
    for each, module in zip(names, modules, strict=True):
        stop = start + module.out_features
        if isinstance(weight, QuantisedWeight):
            module.stored = weight.part(start, stop)
        else:
            module.weight.data = weight[start:stop]
        if bias is not None:
            module.bias.data = bias[start:stop]
        if each in pairs:
            factors_found.append(Factors(start, stop, *pairs[each]))
        start = stop
    shifted = None
    if isinstance(weight, Tensor) and any(each.shift_a is not None for each in factors_found):
        shifted = weight.clone()
    return Projection(weight, bias, tuple(factors_found), roomy, shifted=shifted)


def _head_width(config: Any) -> int:
    width: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width


def _check_supported(model: Any, factors: Mapping[str, Pair]) -> None:
    kind, config = type(model).__name__, model.config
    if kind not in ARCHITECTURES:
        raise UsageError(f"the base model is a {kind}", hint=f"supported are {', '.join(ARCHITECTURES)}")
    if model in _DECODED:
        raise UsageError("the base model has a decoder already", hint="load the model again for another")
    if config.hidden_act not in ACTIVATIONS:
        raise UsageError(
            f"the base model's activation is {config.hidden_act!r}", hint=f"one of {', '.join(ACTIVATIONS)}"
        )
    _check_positions(model)
    mistral_window = config.sliding_window if kind == "MistralForCausalLM" else None  # in a Qwen it may lie unused
    if mistral_window is not None or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise UsageError("the base model has layers with a sliding window, which are not supported")
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            "the base model's folder holds quantised weights, which is not supported",
            hint="use its unquantised folder; model.load: nf4 or fp8 quantises when it is loaded",
        )
    dtype = model.model.embed_tokens.weight.dtype
    for name, module in model.named_modules():
        adaptable = name.rpartition(".")[2] in PROJECTIONS
        plain = type(module) is nn.Linear or (adaptable and type(module) is QuantisedLinear)
        if (adaptable or name == "lm_head") and not plain:
            raise UsageError(f"the base model's {name} is a {type(module).__name__}, not a plain linear layer")
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype:
            raise UsageError(f"the base model's {name} is {parameter.dtype}, its embedding {dtype}")
    other = sorted(name for name in factors if name.rpartition(".")[2] not in PROJECTIONS)
    if other:
        raise UsageError(f"the LoRA schema names {other[0]!r}", hint=f"adapted can be {', '.join(PROJECTIONS)}")
    loose = sorted(set(factors) - {name for name, _ in model.named_modules()})
    if loose:
        raise UsageError(f"the LoRA schema names {loose[0]!r}, which is no layer of the base model")


def _check_positions(model: Any) -> None:
    config = model.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in ROTARY_KINDS:
        raise UsageError(f"the base model's positions are of kind {rotary!r}", hint=f"one of {', '.join(ROTARY_KINDS)}")
    turned, width = 2 * len(model.model.rotary_emb.inv_freq), _head_width(config)
    if turned != width:
        raise UsageError(f"the base model turns {turned} of a head's {width} numbers; only all of them is supported")
