"""What the benchmarks of the learning core conclude from what they measured."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import grpo_curve, rollout

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("differences", "is_as_good"),
    [
        ([0.00, 0.01, -0.01, 0.005, 0.0], True),
        ([0.05, 0.04, 0.06, 0.05, 0.05], True),
        ([-0.05, -0.04, -0.06, -0.05, -0.05], False),
        ([-0.20, -0.02, -0.15, 0.01, -0.12], False),  # ten points worse, and so unlike that 0 lies in the interval
        ([-0.015, -0.015, -0.015], True),
        ([-0.03, 0.03], False),  # two seeds that tell nothing
    ],
)
def test_as_good_means_that_more_than_the_margin_is_ruled_out(differences: list[float], is_as_good: bool) -> None:
    assert grpo_curve.is_as_good(differences) is is_as_good


def test_the_interval_follows_student_for_any_number_of_seeds() -> None:
    for seeds, student in ((2, 12.706), (5, 2.776), (11, 2.228), (21, 2.086), (31, 2.042), (60, 2.042)):
        differences = [0.1 * (place % 2) for place in range(seeds)]
        expected = student * statistics.stdev(differences) / math.sqrt(seeds)
        assert grpo_curve.half_width(differences) == pytest.approx(expected)


@pytest.mark.parametrize("seeds", [["1"], ["1", "1"]])
def test_one_seed_is_refused_at_once(seeds: list[str]) -> None:
    arguments = [sys.executable, "-m", "benchmarks.grpo_curve", "--seeds", *seeds]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "at least 2, each once" in done.stderr and not done.stdout


def cycles(seconds: float, **more: float) -> list[dict[str, Any]]:
    return [{"seconds": seconds * factor, **more} for factor in (0.9, 1.0, 1.2)]


def test_the_pass_with_vllm_overwrites_nothing_of_the_pass_before() -> None:
    limit = {"useful_flops": 5.0, "flops_per_second": 10.0}
    first = {"ours": cycles(1.0, **limit), "beside": cycles(3.0), "merged": cycles(2.0)}
    second = {"ours": cycles(4.0, **limit), "vllm": cycles(2.0)}
    plain = {**rollout.figures_of("fp32", first), **rollout.share_of_limit("fp32", first["ours"])}
    beside_vllm = rollout.figures_of("fp32", second, ours="ours_beside_vllm")
    assert not plain.keys() & beside_vllm.keys()
    assert plain == {
        "ratio_generate_fp32": 3.0, "ratio_merged_fp32": 2.0, "share_of_flop_limit_fp32": 0.5,
        "ours_fp32_tokens_per_second": rollout.TOKENS, "beside_fp32_tokens_per_second": round(rollout.TOKENS / 3),
        "merged_fp32_tokens_per_second": rollout.TOKENS // 2,
    }  # fmt: skip
    assert beside_vllm == {
        "ratio_vllm_cpu": 0.5, "vllm_fp32_tokens_per_second": rollout.TOKENS // 2,
        "ours_beside_vllm_fp32_tokens_per_second": rollout.TOKENS // 4,
    }  # fmt: skip
