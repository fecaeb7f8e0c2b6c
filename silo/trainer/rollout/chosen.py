"""The rollout engine of a run: in this process, or the servers that the guard names."""

from __future__ import annotations

from collections.abc import Collection

from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import RolloutEngine
from silo.trainer.rollout.place import RolloutPlace
from silo.trainer.rollout.vllm_server import VllmEngine


def engine_for(
    adapter: LoraAdapter, place: RolloutPlace | None, *, stop_ids: Collection[int], cache_bytes: int
) -> RolloutEngine:
    """Args:
        adapter: the one that is trained.
        place: of the rollout servers; None: the embedded engine.
        stop_ids: tokens that end an answer.
        cache_bytes: budget of the embedded engine's keys and values.

    Raises:
        OperationError: a server does not answer, or offers no adapters.
    """
    if place is None:
        return EmbeddedEngine(adapter.decoder, stop_ids=stop_ids, cache_bytes=cache_bytes, name=adapter.name)
    return VllmEngine(adapter, place, stop_ids=stop_ids, vocabulary=adapter.decoder.embedding.shape[0])
