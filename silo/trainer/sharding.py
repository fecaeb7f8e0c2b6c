"""Shards the base's frozen weights over processes, and gathers them where they are used.

Each process keeps an equal share of every projection. A layer's projections are gathered when the forward pass comes to
them, and, since every layer is computed again there (`checkpointing`), when the backward pass does; in between nobody
holds them. That is fully sharded data parallelism for weights without gradients, so nothing is scattered back: factors
and optimiser are whole in every process, as they are small. torch's own (`fully_shard`, which accelerate wraps) frees a
module's weights behind the back of what autograd saved of them, by hooks of `nn.Module.forward`; our decoder has none.

While answers are sampled the weights are whole in every process, since each would else gather them for every token:
their memory is needed then, beside keys and values, and not beside a training step's activations. Embedding, head and
norms are whole always. Loading, too, takes the whole model in each process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fedsilo.files.model_facts import PROJECTIONS
from fedsilo.protocol.errors import UsageError
from silo.trainer.decoder import Decoder, Layer, Projection
from silo.trainer.scale_out import Processes

_JOINED = ("qkv", "output", "gate_up", "down")


class ShardedProjection:
    """This process's share of one projection's weight; bias and factors are whole."""

    def __init__(self, projection: Projection, group: Processes) -> None:
        weight = projection.weight
        if not isinstance(weight, Tensor):
            raise UsageError(
                "trainer.shard_base needs a base that is not quantised", hint="model.load: bf16, or shard_base: false"
            )
        self._rest = (projection.bias, projection.factors)
        self._group = group
        self._inputs = weight.shape[1]
        self._has_room = projection.roomy is not None
        whole = weight if projection.roomy is None else projection.roomy
        self._shape = whole.shape
        flat = whole.flatten()
        each = -(-len(flat) // group.size)
        self._own = torch.zeros(each, dtype=weight.dtype, device=weight.device)
        mine = flat[group.rank * each : (group.rank + 1) * each]
        self._own[: len(mine)] = mine

    @property
    def share_bytes(self) -> int:
        return self._own.numel() * self._own.element_size()

    def gathered(self) -> Projection:
        """The projection, made anew each time: whoever uses it keeps it as long as they need it, and no longer."""
        out = torch.empty(len(self._own) * self._group.size, dtype=self._own.dtype, device=self._own.device)
        self._group.whole(self._own, out)
        whole = out[: self._shape.numel()].view(self._shape)
        return Projection(whole[:, : self._inputs], *self._rest, whole if self._has_room else None)


class ShardedLayer:
    """Reads like a `Layer`; every look at a projection gathers it."""

    def __init__(self, layer: Layer, group: Processes) -> None:
        self.input_norm, self.mlp_norm = layer.input_norm, layer.mlp_norm
        self.query_norm, self.key_norm = layer.query_norm, layer.key_norm
        self.shards = {name: ShardedProjection(getattr(layer, name), group) for name in _JOINED}

    @property
    def qkv(self) -> Projection:
        return self.shards["qkv"].gathered()

    @property
    def output(self) -> Projection:
        return self.shards["output"].gathered()

    @property
    def gate_up(self) -> Projection:
        return self.shards["gate_up"].gathered()

    @property
    def down(self) -> Projection:
        return self.shards["down"].gathered()

    def gathered(self) -> Layer:
        """Return the whole layer; its memory is free once nobody holds it."""
        return Layer(
            self.input_norm,
            self.qkv,
            self.query_norm,
            self.key_norm,
            self.output,
            self.mlp_norm,
            self.gate_up,
            self.down,
        )


class ShardedBase:
    """Takes the weights out of a decoder and of the model it was made from, which computes nothing by itself any more.

    Args:
        decoder: whose layers become sharded.
        model: its Hugging Face model.
        group: the processes.

    Raises:
        UsageError: the weights are quantised.
    """

    def __init__(self, decoder: Decoder, model: Any, group: Processes) -> None:
        self._layers = [ShardedLayer(layer, group) for layer in decoder.layers]
        self._decoder = decoder
        decoder.layers = self._layers  # type: ignore[assignment]  # read by attribute, as a `Layer` is
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in PROJECTIONS:
                module.weight.data = module.weight.data.new_empty(0)

    @property
    def share_bytes(self) -> int:
        """Return the bytes of the projections' weights in this process."""
        return sum(shard.share_bytes for layer in self._layers for shard in layer.shards.values())

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Hold every projection whole inside the block, so that nothing is gathered."""
        self._decoder.layers = [layer.gathered() for layer in self._layers]
        try:
            yield
        finally:
            self._decoder.layers = self._layers  # type: ignore[assignment]
