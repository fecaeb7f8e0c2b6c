"""Each figure that a guard keeps, or a coordinator computes, has its unit and its sentence in the one table."""

from __future__ import annotations

from fedsilo.control.figures import FIGURES, unit_of
from silo.guard.answers.state import _METRICS_KEPT, _METRICS_SHOWN

BY_SILO = {"donors_rejected"}  # a mapping, which is no curve
OF_A_COORDINATOR = {"gap", "update_norm"}


def test_the_table_is_complete_and_holds_nothing_else() -> None:
    assert set(FIGURES) == ({*_METRICS_SHOWN, *_METRICS_KEPT} - BY_SILO) | OF_A_COORDINATOR
    assert all(each.meaning and not each.meaning.endswith(".") for each in FIGURES.values())


def test_a_metric_that_a_policy_names_itself_has_no_unit() -> None:
    assert (unit_of("kl"), unit_of("of_a_site")) == ("nats", "")
