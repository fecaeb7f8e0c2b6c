"""What samples answers, wherever it runs: `rollout.embedded` in this process, `rollout.vllm_server` in another.

Both are asked the same way: `use` says which policy and whose prompts come next, `generate` answers them. Between two
calls of `use` all prompts are private or all are public; an engine lets the two share no batch and no cache (T14), and
the caller keys their randomness apart.

Free of torch: the worker reads where the servers are before it loads the libraries of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np


@dataclass(frozen=True)
class RolloutPlace:
    """Where the servers are, as the trainer sees it inside its sandbox.

    Attributes:
        private, public: sockets; twice the same where one server answers both.
        adapters: folder that the trainer writes and the servers read.
        timeout_seconds: how long a server may be away.
        sleep: ask for sleep while the trainer trains, where the server offers it.
    """

    private: Path
    public: Path
    adapters: Path
    timeout_seconds: float
    sleep: bool = False


def place_from(fields: Mapping[str, Any] | None) -> RolloutPlace | None:
    """Of the `configure` message. None: the embedded engine. Raises KeyError, TypeError, ValueError."""
    if fields is None:
        return None
    private, public, adapters = (Path(str(fields[name])) for name in ("private", "public", "adapters"))
    return RolloutPlace(private, public, adapters, float(fields["timeout_seconds"]), bool(fields["sleep"]))


Rows = Literal["private", "public"]


@dataclass(frozen=True)
class Rollout:
    """One sampled answer.

    Attributes:
        ids: generated tokens, the end-of-sequence token included.
        finished: it was emitted before the limit.
        logp: of each token under the distribution it was drawn from, temperature included; empty where none was drawn.
        adapter: name of the adapter that the engine computed with, as `adapters.lora.adapter_name` writes it.
    """

    ids: tuple[int, ...]
    finished: bool
    logp: tuple[float, ...] = field(default=(), compare=False)  # its last bits hang on who else was in the batch
    adapter: str = ""


@dataclass(frozen=True)
class Question:
    """A prompt and one source of randomness per answer wanted; None asks for the most likely token each time."""

    prompt_ids: tuple[int, ...]
    draws: tuple[np.random.Generator | None, ...]


class RolloutEngine(Protocol):
    def use(self, rows: Rows) -> None:
        """Answer with the adapter as it is at this moment, and prompts of these rows only, until the next call."""

    def generate(
        self, questions: Sequence[Question], *, temperature: float, max_new_tokens: int
    ) -> list[tuple[Rollout, ...]]:
        """Answers in the order of `questions`, for each as many as it has draws. No prompt may be empty.

        Raises:
            OperationError: the engine failed, or does not hold the policy that the trainer holds.
        """

    def rest(self) -> None:
        """Nothing is asked for a while: free what memory can be freed."""

    def close(self) -> None:
        """Nothing is asked any more: leave no adapter with a server. What is gone or silent is left as it is."""
