"""Which factors of a LoRA adapter are frozen, and the digest by which everybody knows that they stayed what they were.

With `freeze: A` (FFA-LoRA, methods 6) the factors A are drawn from the plan's seed, travel once in the first global
adapter and are never trained or sent by a silo (threat T6). The plan states their digest. A silo draws them itself
before it takes the plan in, so a coordinator cannot choose an A that makes a silo's B say more about its records than
a random one; and every later global adapter must carry the same.
What this does not stop: a coordinator that tries seeds, of which a plan has 2**53; and what B says (N1, N2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final, Literal, get_args

import numpy as np

from fedsilo.protocol.codec import Array, canonical_json, tiles

Freeze = Literal["none", "A", "AB"]
FREEZES: Final[tuple[Freeze, ...]] = get_args(Freeze)

# The kind of message that carries what is trained, by what is frozen.
UPDATE_KIND: Final[dict[Freeze, str]] = {"none": "lora.factors", "A": "lora.factor_b", "AB": "lora.core_r"}
# What the schema of each kind freezes. Under lora.factor_a both factors are trained, and B stays at its silo.
FREEZE_OF_KIND: Final[dict[str, Freeze]] = {kind: freeze for freeze, kind in UPDATE_KIND.items()} | {
    "lora.factor_a": "none"
}
_FROZEN: Final[dict[str, tuple[str, ...]]] = {"A": (".lora_A",), "AB": (".lora_A", ".lora_B")}


def freeze_named(word: object) -> Freeze:
    """Raises ValueError: nothing can be frozen under that word; the message lists what can."""
    for freeze in FREEZES:
        if freeze == word:
            return freeze
    raise ValueError(f"freeze {str(word)[:40]!r} is not one of {', '.join(FREEZES)}")


def is_frozen(name: str, freeze: str) -> bool:
    """Whether a tensor of this wire name is neither trained nor sent."""
    return name.endswith(_FROZEN.get(freeze, ()))


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


def frozen_sha256(tensors: Iterable[tuple[str, Array]], freeze: str) -> str:
    """Digest of the frozen ones among named float32 tensors that come in name order; empty if none is frozen."""
    digest = FrozenDigest()
    for name, values in tensors:
        if is_frozen(name, freeze):
            digest.start(name, values.shape)
            for tile in tiles(values):
                digest.add(tile)
    return digest.hex
