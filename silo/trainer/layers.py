"""The differentiable pieces of a decoder layer whose base weights are frozen, each with its gradient written out.

Only activations and the LoRA factors get gradients, so a frozen weight costs one product in the backward pass and not
two, and less is kept for it than automatic differentiation would keep. All of it is plain torch.

Axes: N tokens of a stream, D inputs, M outputs, H heads, E numbers of a head, r rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Factors:
    """What LoRA adds to some rows of a weight: rows `start` to `stop` of the output get scale * B A x.

    a: [r, D], b: [stop - start, r], both float32 whatever the base is.
    """

    start: int
    stop: int
    a: Tensor
    b: Tensor


class _LowRankLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        rows: Sequence[tuple[int, int]],
        *factors: Tensor,
    ) -> Tensor:
        y = functional.linear(x, weight, bias)  # [N, M]
        a = torch.cat(factors[0::2]).to(x.dtype)  # [parts * r, D]
        bs = [b.to(x.dtype) for b in factors[1::2]]
        u = x @ a.T  # [N, parts * r]
        rank = bs[0].shape[1]
        for place, ((start, stop), b) in enumerate(zip(rows, bs, strict=True)):
            y[:, start:stop].addmm_(u[:, place * rank : (place + 1) * rank], b.T, alpha=scale)
        ctx.save_for_backward(x, weight, a, u, *bs)
        ctx.scale, ctx.rows, ctx.rank = scale, rows, rank
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, a, u, *bs = ctx.saved_tensors
        scale, rows, rank = ctx.scale, ctx.rows, ctx.rank
        v = torch.cat(
            [dy[:, start:stop] @ b for (start, stop), b in zip(rows, bs, strict=True)], dim=1
        )  # [N, parts * r]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ weight).addmm_(v, a, alpha=scale)  # [N, D]
        wants = ctx.needs_input_grad[5:]  # of A and B in turn
        da = (v.T @ x).float() * scale if any(wants[0::2]) else None  # [parts * r, D]
        gradients: list[Tensor | None] = []
        for place, (start, stop) in enumerate(rows):
            part = slice(place * rank, (place + 1) * rank)
            gradients.append(da[part] if da is not None and wants[2 * place] else None)
            gradients.append((dy[:, start:stop].T @ u[:, part]).float() * scale if wants[2 * place + 1] else None)
        return dx, None, None, None, None, *gradients


def low_rank_linear(x: Tensor, weight: Tensor, bias: Tensor | None, factors: Sequence[Factors], scale: float) -> Tensor:
    """x W^T + bias, and on the rows that have factors scale * x A^T B^T (Hu et al. 2021).

    The two products stay apart: added to W in bfloat16, a step of lr 1e-5 would be rounded away.

    Args:
        x: [N, D].
        weight: [M, D], frozen.
        bias: [M], frozen.
        factors: of some rows of the weight, in their order.
        scale: alpha / r.

    Returns:
        [N, M] in the dtype of x.
    """
    if not factors:
        return functional.linear(x, weight, bias)
    rows = [(each.start, each.stop) for each in factors]
    flat = [tensor for each in factors for tensor in (each.a, each.b)]
    y: Tensor = _LowRankLinear.apply(x, weight, bias, scale, rows, *flat)
    return y


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)  # [..., 1]
        ctx.save_for_backward(x, inverse, weight)
        return (wide * inverse).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, inverse, weight = ctx.saved_tensors
        wide = x.float()
        dn = (dy * weight).float()  # gradient of what was normalised
        slope = (dn * wide).mean(-1, keepdim=True) * inverse.square()  # [..., 1]
        return ((dn - wide * slope) * inverse).to(x.dtype), None, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (Zhang and Sennrich 2019), the weight frozen."""
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
    def backward(ctx: Any, dy: Tensor) -> Any:
        (both,) = ctx.saved_tensors
        gate, up = both.chunk(2, dim=-1)
        half = gate.shape[-1]
        dboth = torch.empty_like(both)
        torch.mul(dy, functional.silu(gate), out=dboth[:, half:])
        dboth[:, :half] = torch.ops.aten.silu_backward(dy * up, gate)
        return dboth


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020). both: [N, 2 I], gate beside up; returns [N, I]."""
    y: Tensor = _SwiGlu.apply(both)
    return y


# Numbers of one chunk of logits: 64 MiB in float32, so that [tokens, vocabulary] is never whole in memory.
LOGITS_MAX = 1 << 24


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
            logits = (hidden[part] @ head.T).float()  # [rows, V]
            if temperature != 1.0:
                logits /= temperature
            chosen = logits.gather(1, targets[part, None])
            total = logits.logsumexp(1, keepdim=True)
            logp[part] = (chosen - total).squeeze(1)
            if not wanted and entropy is None:
                continue
            logits -= total  # log p
            if entropy is not None:
                probability = logits.exp()
                each = -(probability * logits).sum(1, keepdim=True)
                entropy[part] = each.squeeze(1)
                if entropy_slope is not None:
                    # dH / dlogit_j = -p_j (log p_j + H)
                    entropy_slope[part] = -((probability * (logits + each)).to(hidden.dtype) @ head) / temperature
            else:
                probability = logits.exp_()
            if slope is not None:
                expected = probability.to(hidden.dtype) @ head  # [rows, D]
                torch.sub(head[targets[part]], expected, out=slope[part])
                if temperature != 1.0:
                    slope[part] /= temperature
        ctx.save_for_backward(slope, entropy_slope)
        return logp, entropy

    @staticmethod
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
    d logp / d hidden = (head[target] - sum_v p_v head[v]) / temperature. At most `LOGITS_MAX` logits exist at a time.

    Args:
        hidden: [N, D].
        head: [V, D], frozen.
        targets: [N] token ids.
        temperature: of the rollout.
        with_entropy: the entropy in nats too.

    Returns:
        [N] and [N] or None, float32.
    """
    found: tuple[Tensor, Tensor | None] = _TokenLogp.apply(hidden, head, targets, temperature, with_entropy)
    return found
