"""The LoRA schema: exactly which tensors a site lets out, by name and shape, and on which base model.

Coordinator and silos derive it on their own from the model folder and agree on its SHA-256, so a tensor that is
renamed, added or reshaped matches nobody's schema (threats T1, T2). Wire names are
`model.layers.0.self_attn.q_proj.lora_A` of shape [rank, in] and `.lora_B` of shape [out, rank]; the adapter adds
`scale * B @ A` with scale = alpha / rank.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import DTYPE_ITEM_BYTES, canonical_json, encode, sha256_hex
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import TURNS, Freeze, freeze_named, is_fixed
from fedsilo.protocol.kinds import KINDS

_KEYS = frozenset({"base_model_sha256", "rank", "alpha", "dtype", "targets", "freeze", "tensors"})


@dataclass(frozen=True)
class LoraSchema:
    """The tensors of a LoRA adapter, as a federation pins them.

    Attributes:
        dtype: of the values on the wire, float32 or bfloat16.
        targets: which matrices are adapted, as asked for ("all-linear").
        freeze: which factors are neither trained nor sent, or not in each round (fedsilo/protocol/factors.py).
        tensors: (wire name, shape) of the whole adapter, sorted by name.
    """

    base_model_sha256: str
    rank: int
    alpha: float
    dtype: str
    targets: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    freeze: Freeze = "none"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @cached_property
    def shift_rank(self) -> int:
        """Rank of the base's shift; 0: there is none."""
        return max((shape[0] for name, shape in self.tensors if name.endswith(".shift_A")), default=0)

    def has_room_for(self, rank: int) -> bool:
        """Return whether the base's shift takes products of that rank, or of the highest that a matrix has."""
        shapes = dict(self.tensors)
        return self.shift_rank > 0 and all(
            shape[0] >= min(rank, shape[1], len_b)
            for name, shape in shapes.items()
            if name.endswith(".shift_A")
            for len_b in (shapes[f"{name[:-1]}B"][0],)
        )

    def shapes_of(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Return the tensors that a message of a tensor kind holds, exactly; nothing for a kind that carries no
        factors."""
        factors = KINDS[kind].factors if kind in KINDS else ()
        return {name: shape for name, shape in self.tensors if name.rpartition(".")[2] in factors}

    @cached_property
    def updates(self) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
        """(wire name, shape) of what is trained and sent: one update, or several which take turns."""
        return tuple(
            tuple((name, shape) for name, shape in self.tensors if not is_fixed(name, fixed))
            for fixed in TURNS[self.freeze]
        )

    @cached_property
    def elements(self) -> int:
        """Values of a round's update, the largest one."""
        return max(sum(math.prod(shape) for _, shape in update) for update in self.updates)

    def elements_of(self, kind: str) -> int:
        """Values of a message of a tensor kind."""
        return sum(math.prod(shape) for shape in self.shapes_of(kind).values())

    def bytes_of(self, kind: str) -> int:
        """Bytes of one update of this kind, as `update_bytes`."""
        return self._payload_bytes(tuple(self.shapes_of(kind).items()), self.dtype)

    @cached_property
    def update_bytes(self) -> int:
        """Bytes of one update as it leaves, the largest one: length prefix, header with a base digest, trained
        tensors."""
        return max(self._payload_bytes(update, self.dtype) for update in self.updates)

    @cached_property
    def payload_bytes(self) -> int:
        """Return the size of a whole adapter, which travels as float32 whatever its updates do."""
        return self._payload_bytes(self.tensors, "float32")

    def _payload_bytes(self, tensors: tuple[tuple[str, tuple[int, ...]], ...], dtype: str) -> int:
        header = pb.Factors(base_digest="0" * 64, schema_sha256="0" * 64, rank=self.rank, scale=self.scale, dtype=dtype)
        for name, shape in tensors:
            header.tensors.append(pb.TensorEntry(name=name, shape=shape))
        elements = sum(math.prod(shape) for _, shape in tensors)
        return 8 + len(encode(header)) + elements * DTYPE_ITEM_BYTES[dtype]

    def canonical(self) -> bytes:
        """RFC 8785 bytes: what the digest covers, and what stands in the schema file."""
        return canonical_json(
            {
                "base_model_sha256": self.base_model_sha256,
                "rank": self.rank,
                "alpha": self.alpha,
                "dtype": self.dtype,
                "targets": self.targets,
                "freeze": self.freeze,
                "tensors": [{"name": name, "shape": list(shape)} for name, shape in self.tensors],
            }
        )

    @cached_property
    def digest(self) -> str:
        return sha256_hex(self.canonical())


def schema_from_json(text: bytes | str, source: str) -> LoraSchema:
    """Read a schema file. White space may differ from the canonical form; the digest does not cover it.

    Raises:
        UsageError: not JSON, a key too many or too few, or a value of the wrong type.
    """
    try:
        raw = json.loads(text)
        if not isinstance(raw, dict) or set(raw) != _KEYS:
            raise ValueError(f"its keys must be exactly {', '.join(sorted(_KEYS))}")
        if any(set(entry) != {"name", "shape"} for entry in raw["tensors"]):
            raise ValueError("a tensor has a name and a shape, and nothing else")  # no place for a path (T22)
        tensors = tuple((str(entry["name"]), tuple(int(side) for side in entry["shape"])) for entry in raw["tensors"])
        schema = LoraSchema(
            base_model_sha256=str(raw["base_model_sha256"]),
            rank=int(raw["rank"]),
            alpha=float(raw["alpha"]),
            dtype=str(raw["dtype"]),
            targets=str(raw["targets"]),
            tensors=tensors,
            freeze=freeze_named(raw["freeze"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"{source}: not a LoRA schema: {error}", hint="write it with `fedsilo policy schema make`"
        ) from error
    names = [name for name, _ in tensors]
    if not names or names != sorted(set(names)) or schema.dtype not in DTYPE_ITEM_BYTES or schema.rank < 1:
        raise UsageError(
            f"{source}: tensor names must be sorted and unique, rank at least 1, dtype float32 or bfloat16",
            hint="write it with `fedsilo policy schema make`",
        )
    return schema
