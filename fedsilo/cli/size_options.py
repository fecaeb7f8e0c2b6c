"""The options that say how large a run is meant to be: `coordinator init`, `silo init` and `policy init` share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

# None takes what the federation means to run, from its bundle.
RoundsOption = Annotated[int | None, typer.Option("--rounds", min=1, help="Most rounds of a run.")]
LocalStepsOption = Annotated[int | None, typer.Option("--local-steps", min=1, help="Most steps of a round (tau).")]
SwapPeriodOption = Annotated[int | None, typer.Option("--swap-period", min=1, help="Every n-th step is public.")]
PromptsOption = Annotated[int | None, typer.Option("--prompts-per-step", min=1, help="Most prompts of a step (b).")]
SamplesOption = Annotated[int | None, typer.Option("--samples-per-prompt", min=1, help="Most answers a prompt (K).")]
TokensOption = Annotated[
    int | None, typer.Option("--max-new-tokens", min=1, help="Longest answer; never above the model's context.")
]
LearningRateOption = Annotated[
    float | None, typer.Option("--learning-rate", help="Largest; the clip limit follows from it.")
]


def given(**limits: float | None) -> dict[str, float]:
    """Those that somebody said."""
    return {name: value for name, value in limits.items() if value is not None}


def size_text(size: Mapping[str, float]) -> str:
    """One line for people."""
    return (
        f"limits hold runs of up to {size['rounds']} rounds of {size['local_steps']} steps, {size['prompts_per_step']} "
        f"prompts x {size['samples_per_prompt']} answers of {size['max_new_tokens']} tokens, learning rate "
        f"{size['learning_rate']:g}"
    )
