"""The one list of isolation rungs, and that everybody who names rungs names these."""

from __future__ import annotations

from typing import get_args

import pytest

from coordinator.members import check_hello
from fedsilo.protocol.errors import PeerError
from fedsilo.protocol.isolation import RUNGS, rung_at_least, rung_named
from policies import catalogue
from policies.model import Trainer
from tests.simulated.coordinator_parts import AGREED, hello


def test_rungs_are_ordered_best_first() -> None:
    order = {"namespaces": 0, "user": 1, "container": 2, "waived": 3}
    assert list(RUNGS) == sorted(order, key=order.__getitem__)
    for got, got_place in order.items():
        for least, least_place in order.items():
            assert rung_at_least(got, least) is (got_place <= least_place)


def test_a_word_that_is_no_rung_meets_nothing_and_can_be_met_by_nothing() -> None:
    assert not rung_at_least("moat", "waived")
    assert rung_named("waived") == "waived"
    for least in ("moat", ""):
        with pytest.raises(ValueError, match="unknown rung"):
            rung_at_least("namespaces", least)
        with pytest.raises(ValueError, match="known: namespaces, user, container, waived"):
            rung_named(least)


def test_coordinator_rules_and_policy_schema_take_exactly_these() -> None:
    assert get_args(Trainer.model_fields["least_isolation"].annotation) == RUNGS
    for rung in (*RUNGS, "moat"):
        known = rung in RUNGS
        assert (not catalogue.fields_at_fault(hello(isolation=rung))) is known
        if known:
            assert check_hello(hello(isolation=rung), AGREED).isolation == rung
        else:
            with pytest.raises(PeerError, match="isolation"):
                check_hello(hello(isolation=rung), AGREED)
