"""What samples answers, wherever it runs: `rollout.embedded` in this process, `rollout.vllm_server` in another.

Both are asked the same way: `use` says which policy and whose prompts come next, `generate` answers them. Between two
calls of `use` all prompts are private or all are public; an engine lets the two share no batch and no cache (T14), and
the caller keys their randomness apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from silo.trainer.rollout.embedded import Question, Rollout

Rows = Literal["private", "public"]


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
