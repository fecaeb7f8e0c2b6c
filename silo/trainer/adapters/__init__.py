"""What a run trains beside a frozen base model, whatever it is: the steps, the engines, the proof of agreement and the
saved state know `TrainedState` alone, and the schema of the run decides which one it is (`state_for`). So another kind
of state beside LoRA is one module here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedsilo.protocol.codec import Array, Buffer
from fedsilo.protocol.factors import Fixed
from silo.reusable_buffer import ReusableBuffer
from silo.trainer.adapters.lora import LoraAdapter, LoraShape
from silo.trainer.decoder import Decoder


class TrainedState(Protocol):
    """The numbers that a run trains, and the model that computes with them.

    Attributes:
        decoder: computes the base model with them, or the base alone.
        factors: all by wire name, those that are never trained among them, as `decoder` computes with them.
        parameters: those that are trained in the open round, in the order of their wire names.
        trained_names: wire names of `parameters`.
        start: values of `parameters` at the round's start, theta_p.
    """

    decoder: Decoder
    factors: dict[str, torch.nn.Parameter]
    parameters: list[torch.nn.Parameter]
    trained_names: list[str]
    start: list[Tensor]

    def name(self) -> str:
        """Return the name that rollouts must give what `decoder` computes: a digest of it, or `BASE_NAME`."""
        ...

    @property
    def trained_by_turns(self) -> list[list[str]]:
        """Wire names of what rounds train, in the turns that they take."""
        ...

    def take_turn(self, number: int) -> None:
        """Make what a round trains the parameters, as they are now, and the start."""
        ...

    def load(self, tensors: Mapping[str, Array], number: int) -> None:
        """Make these values the start of a round. Raises PeerError: names or shapes differ from the schema."""
        ...

    def exported(
        self, base_digest: str, schema_sha256: str, buffer: ReusableBuffer | None, stays: Fixed = "none"
    ) -> Buffer:
        """Return the payload of the round's update.

        Args:
            base_digest: of the adapter at the round's start.
            schema_sha256: of the plan.
            buffer: memory for it; None: memory of its own.
            stays: what is trained and not in the update.
        """
        ...

    def values(self) -> dict[str, Array]:
        """Return all factors by wire name, as `load` takes them: copies on the CPU, float32."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return all values and the round's start: copies on the CPU, by name."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go back to a `state`, bit for bit. Raises KeyError: a tensor is missing."""
        ...

    def drift(self) -> float:
        """Return ||theta - theta_p|| over all parameters."""
        ...

    def off(self) -> AbstractContextManager[None]:
        """Make `decoder` compute the base model inside the block."""
        ...

    def replaced_by(self, tensors: Mapping[str, Array]) -> AbstractContextManager[None]:
        """Make `decoder` compute with other values inside the block; afterwards the own ones are back, bit for bit."""
        ...

    def marker(self, draws: np.random.Generator, strength: float) -> dict[str, Array]:
        """Return random values by wire name that an engine cannot compute with unseen, the stronger the higher
        `strength` is."""
        ...

    def write_for_servers(self, folder: Path) -> None:
        """Write what `decoder` computes as a folder that rollout servers load. `folder` does not exist; its parent
        does. Raises OSError: it cannot be written."""
        ...


def state_for(base: Any, shape: LoraShape) -> TrainedState:
    """Return what a run of this schema trains.

    Args:
        base: a Hugging Face causal LM, which is frozen.
        shape: of the schema.

    Raises:
        UsageError: the schema does not fit the base model, or its architecture is not supported.
    """
    return LoraAdapter(base, shape)
