"""What a step says about its rewards, and that it agrees with what the step trains on."""

from __future__ import annotations

import pytest

from silo.trainer.grpo import Answer, Group, Learner
from silo.trainer.run import reward_metrics, zero_variance_share
from tests.algorithms.tiny import make_adapter, make_plan

pytestmark = pytest.mark.torch


def group(*rewards: float) -> Group:
    return Group((3, 4), tuple(Answer((5, 6), "", True, reward) for reward in rewards))


@pytest.mark.parametrize(
    ("rewards", "has_signal"),
    [
        ((1.0, 0.0), True),
        ((0.5, 0.5), False),
        ((1.0,), False),
        ((0.1 + 0.2, 0.3), False),  # 4e-17 apart: one number in the precision that advantages have
        ((1.0, 1.0 - 1e-6), True),
    ],
)
def test_a_group_counts_as_without_signal_where_nothing_of_it_is_trained_on(
    rewards: tuple[float, ...], has_signal: bool
) -> None:
    figures = Learner(make_adapter(), make_plan(), microbatch_tokens=1000).update([group(*rewards)])
    assert (figures.trained_tokens > 0) is has_signal
    assert zero_variance_share([group(*rewards)]) == float(not has_signal)
    assert zero_variance_share([group(*rewards), group(1.0, 0.0)]) == (0.0 if has_signal else 0.5)


def test_figures_of_no_groups_are_zero() -> None:
    assert zero_variance_share([]) == 0.0 and reward_metrics([])["reward_mean"] == 0.0
