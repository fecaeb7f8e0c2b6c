"""The mutants of `python -m benchmarks.controls` still stand in the code they change, and are enough of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.controls import ROOT, Mutant, mutants

MUTANTS = mutants()


def test_there_are_enough_and_each_is_one() -> None:
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", [each for each in MUTANTS if each.old], ids=lambda each: each.name)
def test_the_text_of_a_step_stands_where_it_is_looked_for(mutant: Mutant, tmp_path: Path) -> None:
    """Else the step would not be taken away, and its mutant would count as a survivor or a syntax error."""
    target = tmp_path / mutant.file
    target.parent.mkdir(parents=True)
    target.write_text((ROOT / mutant.file).read_text())
    original = mutant.apply(tmp_path)
    changed = target.read_text()
    assert changed != original
    ast.parse(changed)


def test_a_text_that_is_gone_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("pass")
    with pytest.raises(ValueError, match="0 times, not once"):
        Mutant("planted", "module.py", "not there", "pass").apply(tmp_path)
