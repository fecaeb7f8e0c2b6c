"""Figures of a step for its metrics: how much was swapped, how fast it went, what memory it took (methods 2.8).

They are the silo's own: the guard keeps and shows those that it names, and none of them leaves the site.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from typing import Any

import torch

from silo.trainer.public import SwapFigures
from silo.trainer.reward_figures import mean
from silo.trainer.swap_bound import SwapBound


def swap_metrics(figures: SwapFigures, bound: SwapBound | None) -> dict[str, Any]:
    """alpha is m'/K of a prompt: the share of its answers that donors took the place of."""
    found: dict[str, Any] = {
        "donors_wanted": figures.wanted,
        "donors_found": figures.found,
        "donors_used": figures.used,
        "donors_rejected": dict(figures.rejected),
        "alpha_mean": mean(figures.alphas),
        "alpha_max": max(figures.alphas, default=0.0),
        "alpha_histogram": {f"{alpha:.3f}": count for alpha, count in sorted(Counter(figures.alphas).items())},
        "swapped_share": mean([float(alpha > 0) for alpha in figures.alphas]),
    }
    if bound is not None:
        found |= {"beta_mean": bound.beta_mean, "beta_max": bound.beta_max, "omega": bound.omega}
    return found


def rate(tokens: int, seconds: float) -> float:
    """Tokens per second; 0 where no time passed."""
    return tokens / seconds if seconds > 0 else 0.0


def memory_peak_bytes() -> int:
    """The most this process held so far: resident memory, which never goes down again, and beside it what torch had
    allocated on the accelerator."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = peak if sys.platform == "darwin" else peak * 1024
    return held + (torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0)
