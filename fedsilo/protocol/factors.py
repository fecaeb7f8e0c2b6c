"""The factors of a LoRA adapter as arithmetic: which are frozen, what every silo starts from, how uploads become the
next adapter, and how far silos drifted apart. Averages are of one tile; the coordinator goes tile by tile. Pure.

    freeze       trained and sent
    none         A and B (FedIT)
    A            B (FFA-LoRA, Sun et al. 2024)
    alternate    B in odd rounds, A in even ones, the other fixed (RoLoRA, Chen et al. 2024)
    AB           a core R [r, r] between them, B R A (Fed-SB, Singhal et al. 2025)

All but the first average exactly: the mean of products is the product of means where one side is the same everywhere.
With both trained, the rest may go into a shift of the base's weights (`aggregate: fedex`, `flora`; `products`): factors
shift_A [k, d] and shift_B [m, k] beside A and B, which no silo trains or sends.

With `freeze: A` (FFA-LoRA) the factors A are drawn from the plan's seed, travel once in the first global
adapter and are never trained or sent by a silo (threat T6). The plan states their digest. A silo draws them itself
before it accepts the plan, so a coordinator cannot choose an A that makes a silo's B say more about its records than
a random one; and every later global adapter must carry the same.
With `freeze: AB` the same holds for A and B. With `freeze: alternate` it holds for the A of the first round; what is
fixed in a later one is what the round before left, and every silo sees whether it still is.
What this does not stop: a coordinator that tries seeds, of which a plan has 2**53; and what B says (N1, N2).

Fed-SB takes its A and B from the singular vectors of a first step of full training; ours are drawn, as A is for the
others: a silo can draw them again, bit for bit, on any machine.

Drift comes from Gram matrices of the factors, so B A, which is as large as the base, is never formed: one matrix
product for all A of a module, one for all B. Each factor is the silos' mean and what is apart from it:

    D_n = B_n A_n - M_B M_A = B_n a_n + b_n M_A,   a_n = A_n - M_A,   b_n = B_n - M_B,
    ||B_n A_n - B_n' A_n'||^2 = <D_n, D_n> + <D_n', D_n'> - 2 <D_n, D_n'>,

so that nothing large is subtracted. Matrix products are made in the changes' own dtype, which for float32 takes half
the time; sums over them are float64. In float32 a distance is right to 1e-5 of itself or 1e-3 of the largest one: that
of two silos which nearly agree comes from the difference of larger numbers. Drift does not say why silos differ: data,
sampling and length of training all do. Axes: r rank, d inputs, m outputs, N silos.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedsilo.protocol.codec import Array, canonical_json, tiles
from fedsilo.protocol.randomness import generator, seed_of

Freeze = Literal["none", "A", "AB", "alternate"]
FREEZES: Final[tuple[Freeze, ...]] = get_args(Freeze)
Fixed = Literal["none", "A", "B", "AB"]  # in one round

# What is fixed in round 1, 2 and so on, and then in the same order again.
TURNS: Final[dict[Freeze, tuple[Fixed, ...]]] = {"none": ("none",), "A": ("A",), "AB": ("AB",), "alternate": ("A", "B")}
# The kind of message that carries what is trained, by what is fixed.
UPDATE_KIND: Final[dict[Fixed, str]] = {
    "none": "lora.factors",
    "A": "lora.factor_b",
    "B": "lora.factor_a",
    "AB": "lora.core_r",
}
# The kinds that a schema may leave a silo by. Under lora.factor_a with nothing frozen, B is trained and stays there.
KINDS_OF_FREEZE: Final[dict[Freeze, tuple[str, ...]]] = {
    freeze: tuple(UPDATE_KIND[fixed] for fixed in turns) for freeze, turns in TURNS.items()
} | {"none": ("lora.factors", "lora.factor_a")}
_FIXED: Final[dict[str, tuple[str, ...]]] = {"A": (".lora_A",), "B": (".lora_B",), "AB": (".lora_A", ".lora_B")}
_SHIFT: Final = (".shift_A", ".shift_B")


def freeze_named(word: object) -> Freeze:
    """Return the freeze of that name. Raises ValueError: nothing can be frozen under that word; the message lists what
    can."""
    for freeze in FREEZES:
        if freeze == word:
            return freeze
    raise ValueError(f"freeze {str(word)[:40]!r} is not one of {', '.join(FREEZES)}")


def fixed_in(freeze: Freeze, number: int) -> Fixed:
    """Return what is neither trained nor sent in a round."""
    turns = TURNS[freeze]
    return turns[(number - 1) % len(turns)]


def is_shift(name: str) -> bool:
    """Return whether a tensor of this wire name is a factor of the base's shift."""
    return name.endswith(_SHIFT)


def is_fixed(name: str, fixed: Fixed) -> bool:
    """Return whether a tensor of this wire name is neither trained nor sent in a round that fixes these."""
    return name.endswith(_FIXED.get(fixed, ())) or is_shift(name)


def is_drawn(name: str, freeze: Freeze) -> bool:
    """Return whether a tensor of this wire name is fixed in the first round, as the plan's seed draws it."""
    return name.endswith(_FIXED.get(fixed_in(freeze, 1), ()))


class FrozenDigest:
    """SHA-256 over the frozen tensors: name and shape as canonical JSON, then the float32 values in little-endian
    order, tensor after tensor in name order. Empty digest: nothing was taken in."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._tensors = 0

    def start(self, name: str, shape: Sequence[int]) -> None:
        self._hash.update(canonical_json([name, list(shape)]))
        self._tensors += 1

    def add(self, values: Array) -> None:
        """Values of the tensor that was started last, flat and in row-major order, in any number of pieces."""
        self._hash.update(np.ascontiguousarray(values, dtype="<f4").data)

    @property
    def hex(self) -> str:
        return self._hash.hexdigest() if self._tensors else ""


def frozen_sha256(tensors: Iterable[tuple[str, Array]], freeze: Freeze) -> str:
    """Digest of those among named float32 tensors, in name order, that the first round fixes; empty: it fixes none."""
    digest = FrozenDigest()
    for name, values in tensors:
        if is_drawn(name, freeze):
            digest.start(name, values.shape)
            for tile in tiles(values):
                digest.add(tile)
    return digest.hex


def initial_factors(
    shapes: Sequence[tuple[str, tuple[int, ...]]], seed: int, freeze: Freeze = "none"
) -> dict[str, Array]:
    """A as torch's linear layers draw it (uniform, bound 1/sqrt(inputs)), B zero, by wire name, float32. A frozen B is
    drawn with bound 1/sqrt(outputs), so that its columns are as long as A's rows, and the core beside it is zero.

    Each tensor has its own key, so the draw does not depend on their order.
    """
    tensors: dict[str, Array] = {}
    for name, shape in shapes:
        if name.endswith(".lora_A") or is_drawn(name, freeze):
            bound = 1.0 / np.sqrt(shape[1] if name.endswith(".lora_A") else shape[0])
            draw = generator(seed_of(seed, "initial_adapter", name))
            tensors[name] = draw.uniform(-bound, bound, size=shape).astype(np.float32)
        else:
            tensors[name] = np.zeros(shape, dtype=np.float32)
    return tensors


def initial_frozen_sha256(shapes: Sequence[tuple[str, tuple[int, ...]]], seed: int, freeze: Freeze) -> str:
    """`frozen_sha256` of `initial_factors`. Shapes come in name order."""
    frozen = [(name, shape) for name, shape in shapes if is_drawn(name, freeze)]
    drawn = ((name, initial_factors([(name, shape)], seed, freeze)[name]) for name, shape in frozen)
    return frozen_sha256(drawn, freeze)


def update_weights(steps: Sequence[int]) -> tuple[float, ...]:
    """Return the weight of each silo's update, so that all silos count the same whatever their steps: (mean of steps) /
    (own steps) / N, FedNova's normalised average with equal shares (Wang et al. 2020, eq. 8). All 1/N where steps are
    equal.

    A plain mean would minimise another objective, in which a silo counts by its steps. What this does not give: an
    update of few steps is scaled up with its noise.
    """
    mean = sum(steps) / len(steps)
    return tuple(mean / own / len(steps) for own in steps)


def weighted_delta(weights: Sequence[float], deltas: Sequence[Array]) -> Array:
    """`mean_delta` with a weight for each silo: sum_n w_n (A^n - A_p), float32, in the order given."""
    total: Array = deltas[0].astype(np.float32) * np.float32(weights[0])
    for weight, delta in zip(weights[1:], deltas[1:], strict=True):
        total += delta.astype(np.float32) * np.float32(weight)
    return total


def median_delta(deltas: Sequence[Array]) -> Array:
    """median_n (A^n - A_p) of each number, float32; of an even count the mean of the two in the middle (Yin et al.
    2018, definition 1). The order of the silos does not count.

    While more than half of the silos are honest, each number of the result lies among theirs (T51). What this does not
    stop: silos that agree on something within the honest spread, which may push every number to its edge; and where
    silos hold unlike data the median drops what only few of them learn. It needs each silo's own update, so it cannot
    go with secure aggregation, which shows none.
    """
    return np.median(np.stack(deltas).astype(np.float32, copy=False), axis=0).astype(np.float32)


def trimmed_mean_delta(trim: int, deltas: Sequence[Array]) -> Array:
    """The mean of (A^n - A_p) without the `trim` largest and the `trim` smallest of each number, float32, summed from
    the smallest on (Yin et al. 2018, definition 2). The order of the silos does not count.

    Up to `trim` bad silos do not move a number beyond those of the honest ones (T51). What it does not stop: one more
    than `trim`; and up to that many, what `median_delta` does not stop. Like it, it drops what only few silos learn.

    Args:
        trim: fewer than half of the deltas.
        deltas: one [n] float32 per silo.
    """
    middle = np.sort(np.stack(deltas).astype(np.float32, copy=False), axis=0)[trim : len(deltas) - trim]
    return mean_delta(list(middle))


def mean_delta(deltas: Sequence[Array]) -> Array:
    """FedIT on one tile: mean_n (A^n - A_p), in the deltas' own dtype, float32 at the coordinator, in the order given.

    Args:
        deltas: one [n] per silo, in silo order; at least one.
    """
    total: Array = deltas[0].copy()
    for delta in deltas[1:]:
        total += delta
    total /= len(deltas)
    return total


Pair = tuple[Array, Array]  # (A [r, d], B [m, r]) of one module
Sums = NDArray[np.float64]


@dataclass(frozen=True)
class Drift:
    """Over all modules. The matrices are [N, N], symmetric, 0 on the diagonal, in the order of the silos.

    Attributes:
        factors: sqrt(||A_n - A_n'||^2 + ||B_n - B_n'||^2).
        products: ||s (B_n A_n - B_n' A_n')||_F.
        aggregation_error: ||mean(B A) - mean(B) mean(A)||_F / ||mean(B A)||_F; 0 where the mean is 0.
    """

    factors: Sums
    products: Sums
    aggregation_error: float


class DriftSums:
    """Takes one module after the other, so that no more than one is in memory.

    Args:
        silos: how many.
        scale: s = alpha / r.
    """

    def __init__(self, silos: int, scale: float) -> None:
        self._silos = silos
        self._scale = scale
        self._factors = np.zeros((silos, silos))  # <.,.> of what is apart from the mean
        self._products = np.zeros((silos, silos))
        self._error = self._mean = 0.0

    def add(self, master: Pair, changes: Sequence[Pair]) -> None:
        """Add one module.

        Args:
            master: the factors that all silos began with.
            changes: what each silo added to them, in order, float32 or float64.

        Raises:
            ValueError: not as many as there are silos.
        """
        if len(changes) != self._silos:
            raise ValueError(f"{len(changes)} silos' factors, {self._silos} silos")
        count = self._silos
        # [N r, d] and [N r, m]: rank is the inner one of two axes, so the silos' blocks are r x r
        a, mean_a = _around_mean(master[0], np.stack([a for a, _ in changes]))
        b, mean_b = _around_mean(master[1].T, np.stack([b.T for _, b in changes]))
        blocks = (count, len(mean_a), count, len(mean_a))
        aa, bb = _inner(a, a).reshape(blocks), _inner(b, b).reshape(blocks)
        # with the mean in the place of the second silo, and of the first
        am, bm = (_inner(each, mean).reshape(*blocks[:2], 1, -1) for each, mean in ((a, mean_a), (b, mean_b)))
        ma, mb = am.transpose(2, 3, 0, 1), bm.transpose(2, 3, 0, 1)
        mma, mmb = (_inner(mean, mean).reshape(1, blocks[1], 1, -1) for mean in (mean_a, mean_b))
        self._factors += np.einsum("ikjk->ij", aa) + np.einsum("ikjk->ij", bb)
        # <B_n a_n + b_n M_A, B_n' a_n' + b_n' M_A> with B_n = b_n + M_B, term by term of the B's
        inner = bb * (aa + am + ma + mma) + bm * (aa + ma) + mb * (aa + am) + mmb * aa
        self._products += inner.sum(axis=(1, 3))
        # mean(B A) - mean(B) mean(A) is the mean of b_n a_n
        error = float(np.vdot(aa, bb)) / count**2
        self._error += error
        self._mean += float(np.vdot(mma, mmb) + 2 * np.vdot(am, bm) / count) + error

    def drift(self) -> Drift:
        return Drift(
            factors=_apart(self._factors),
            products=self._scale * _apart(self._products),
            aggregation_error=math.sqrt(max(self._error, 0.0) / self._mean) if self._mean > 0 else 0.0,
        )


def _around_mean(master: Array, changes: Array) -> Pair:
    """Changes [N, r, x] as [N r, x] around their mean, in place; and the mean of what they make of the master."""
    mean = changes.mean(axis=0)
    changes -= mean
    return changes.reshape(-1, changes.shape[2]), master + mean


def _inner(one: Array, other: Array) -> Sums:
    return (one @ other.T).astype(np.float64)


def _apart(inner: Sums) -> Sums:
    """Distances from inner products."""
    squares = np.diagonal(inner)
    # rounding of what is zero may be below it
    return np.asarray(np.sqrt(np.maximum(squares[:, None] + squares[None, :] - inner - inner.T, 0.0)))
