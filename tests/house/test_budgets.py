"""What the product weighs stays below ceilings that only fall (`python -m tools.budgets`)."""

from __future__ import annotations

import itertools

import grimp
import pytest

from tools import budgets
from tools.budgets import FIGURES, FURTHER, Budget
from tools.call_tracer import Tracer
from tools.source_counts import floors


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    return budgets.figures()


@pytest.mark.parametrize("name", [*FIGURES, *FURTHER])
def test_a_figure_is_at_its_ceiling_or_a_little_below(counted: dict[str, int], name: str) -> None:
    assert not (fault := budgets.budgets()[name].fault(counted[name])), f"{name} {fault}"


def test_each_figure_has_a_ceiling_and_each_ceiling_a_figure(counted: dict[str, int]) -> None:
    assert list(budgets.budgets()) == [*FIGURES, *FURTHER] == list(counted)


@pytest.mark.parametrize(
    ("ceiling", "figure", "fault"),
    [(10_000, 10_001, "above"), (10_000, 9_900, ""), (10_000, 9_899, "lowered"), (50, 49, "lowered")],
)
def test_a_figure_may_lie_a_little_below_its_ceiling(ceiling: int, figure: int, fault: str) -> None:
    found = Budget(judged=1, aim=1, before=1, ceiling=ceiling).fault(figure)
    assert fault in found and bool(fault) == bool(found)


@pytest.mark.parametrize(("figure", "ceiling"), [(8_000, 8_040), (9_990, 10_000), (20_000, 10_000)])
def test_a_ceiling_falls_with_its_figure_and_never_rises(figure: int, ceiling: int) -> None:
    row = Budget(judged=1, aim=1, before=1, ceiling=10_000)
    assert row.lowered(figure) == ceiling


def test_a_feature_raises_the_ceiling_by_what_it_weighs() -> None:
    row = Budget(judged=1, aim=1, before=1, ceiling=10_000, added={"a feature": 500})
    assert (row.fault(10_500), bool(row.fault(10_501)), bool(row.fault(10_000))) == ("", True, True)
    assert row.lowered(9_500) == 9_047, "what is left without the feature, and half a per cent of all"


def test_a_target_keeps_its_ratio_where_the_count_differs() -> None:
    assert Budget(judged=100, aim=50, before=110, ceiling=110).target == 55


def test_floors_are_the_modules_of_the_longest_chain_and_a_circle_is_one() -> None:
    graph = grimp.ImportGraph()
    chain, circle = ("a.top", "a.left", "a.ground", "b.elsewhere"), ("a.left", "a.behind", "a.left")
    for importer, imported in (*itertools.pairwise(chain), *itertools.pairwise(circle)):
        graph.add_import(importer=importer, imported=imported)
    assert floors(graph, "a") == 3
    graph.add_import(importer="a.ground", imported="a.below")
    assert floors(graph, "a") == 4


def test_a_traced_path_has_the_functions_that_ran_once_each() -> None:
    from fedsilo.protocol.codec import canonical_json, sha256_hex

    tracer = Tracer()
    tracer.start()
    for _ in range(2):
        canonical_json({"a": 1})
        sha256_hex(b"")
    tracer.stop()
    sha256_hex(b"not traced")
    found = tracer.figures()
    assert (found["files"], found["functions"], found["changes"]) == (1, 2, 0)
