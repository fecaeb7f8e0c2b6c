"""The one list of isolation levels, and that everybody who names isolation levels names these."""

from __future__ import annotations

from typing import get_args

import pytest

from coordinator.ingress import check_hello
from fedsilo.protocol.errors import PeerError
from fedsilo.protocol.isolation import ISOLATION_LEVELS, isolates_at_least, isolation_level
from policies import kinds
from policies.model import Trainer
from tests.simulated.coordinator_parts import AGREED, hello


def test_levels_are_ordered_best_first() -> None:
    order = {"namespaces": 0, "user": 1, "container": 2, "waived": 3}
    assert list(ISOLATION_LEVELS) == sorted(order, key=order.__getitem__)
    for got, got_place in order.items():
        for least, least_place in order.items():
            assert isolates_at_least(got, least) is (got_place <= least_place)


def test_a_word_that_is_no_level_meets_nothing_and_can_be_met_by_nothing() -> None:
    assert not isolates_at_least("moat", "waived")
    assert isolation_level("waived") == "waived"
    for least in ("moat", ""):
        with pytest.raises(ValueError, match="unknown isolation level"):
            isolates_at_least("namespaces", least)
        with pytest.raises(ValueError, match="known: namespaces, user, container, waived"):
            isolation_level(least)


def test_coordinator_rules_and_policy_schema_take_exactly_these() -> None:
    assert get_args(Trainer.model_fields["least_isolation"].annotation) == ISOLATION_LEVELS
    for level in (*ISOLATION_LEVELS, "moat"):
        known = level in ISOLATION_LEVELS
        assert (not kinds.fields_at_fault(hello(isolation=level))) is known
        if known:
            check_hello(hello(isolation=level), AGREED)
        else:
            with pytest.raises(PeerError, match="isolation"):
                check_hello(hello(isolation=level), AGREED)
