"""The mutants of `python -m benchmarks.controls` still stand in the code they change, and are enough of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.controls import ROOT, mutants, noticed_before, page
from benchmarks.mutants import Edit

MUTANTS = mutants()
EDITS = [mutant for mutant in MUTANTS if isinstance(mutant, Edit)]
STEPS_MIN = 91  # none is dropped when its code moves

SOURCE = '''\
class Gate:
    """Lets out."""

    def send(self, message, *, halted=False):
        # is anything the matter?
        if self.halted:
            raise Halted(f"halted: {self.halted}")
        sent = self.channel.exchange(
            message,
            wait_seconds=1.0,  # not for ever
        )
        if self.knows("groß") and self.halted is False:
            self.count(message)
            self.record(message)
        return sent

    def count(self, message): self.sent += 1
'''

EXCHANGE = SOURCE[SOURCE.index("self.channel") : SOURCE.index("        if self.knows")].rstrip()


def edit(old: str, new: str, function: str = "Gate.send") -> Edit:
    return Edit("planted", "gate", function, old, new)


def test_there_are_enough_and_each_is_one() -> None:
    assert len(EDITS) >= STEPS_MIN
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_page_names_the_test_that_is_run_first_the_next_time() -> None:
    test, mutant = "tests/policies/test_rules.py::test_rule_refuses", MUTANTS[0].name
    row = {"mutant": mutant, "caught_by": f"FAILED {test}[a rule: too many] - assert 1 == 2", "seconds": 1.0}
    survivor = {"mutant": MUTANTS[1].name, "caught_by": "", "seconds": 1.0}
    assert noticed_before(page([{"figures": {"rows": [row, survivor]}}])) == {mutant: test}


@pytest.mark.parametrize("mutant", EDITS, ids=lambda each: each.name)
def test_the_code_of_a_step_stands_where_it_is_looked_for(mutant: Edit) -> None:
    """Else the step would not be taken away, and its mutant would count as a survivor or a syntax error."""
    source = mutant.path_in(ROOT).read_text()
    assert ast.dump(ast.parse(mutant.planted(source))) != ast.dump(ast.parse(source))


@pytest.mark.parametrize(
    ("old", "new", "before", "after"),
    [
        ("if self.halted:", "if False:", "if self.halted:\n", "if (False):\n"),
        ("self.channel.exchange(message, wait_seconds=1.0)", "True", EXCHANGE, "(True)"),
        ("self.halted is False", "sent", "self.halted is False:", "(sent):"),
        ("self.count(message)", "pass", "    self.count(message)\n", "    pass\n"),
        (
            "self.count(message)\nself.record(message)",
            "if message:\n    pass",
            "            self.count(message)\n            self.record(message)\n",
            "            if message:\n                pass\n",
        ),
    ],
    ids=["the-head-of-an-if", "over-lines", "a-part", "a-statement", "statements"],
)
def test_what_is_found_is_replaced_and_nothing_else(old: str, new: str, before: str, after: str) -> None:
    assert SOURCE.count(before) == 1
    assert edit(old, new).planted(SOURCE) == SOURCE.replace(before, after)


def test_how_the_code_is_set_out_makes_no_difference() -> None:
    planted = edit("self.channel.exchange(message, wait_seconds=1.0)", "None")
    set_out = planted.planted(ast.unparse(ast.parse(SOURCE)))
    assert ast.dump(ast.parse(set_out)) == ast.dump(ast.parse(planted.planted(SOURCE)))


@pytest.mark.parametrize(
    ("old", "function", "times"),
    [("self.channel", "Gate.count", 0), ("if sent:", "Gate.send", 0), ("self.halted", "Gate.send", 2)],
)
def test_code_that_is_not_there_once_is_an_error(old: str, function: str, times: int, tmp_path: Path) -> None:
    (tmp_path / "gate.py").write_text(SOURCE)
    with pytest.raises(ValueError, match=f"{times} times, not once"):
        edit(old, "if None:" if old.endswith(":") else "None", function).apply(tmp_path)
    assert (tmp_path / "gate.py").read_text() == SOURCE


@pytest.mark.parametrize("function", ["send", "Gate", "Gate.gone", "Halt.send"])
def test_a_function_that_is_gone_is_an_error(function: str) -> None:
    with pytest.raises(ValueError, match="not one"):
        edit("self.halted", "None", function).planted(SOURCE)


def test_a_mutant_is_planted_in_a_package_or_a_module(tmp_path: Path) -> None:
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "__init__.py").write_text(SOURCE)
    assert edit("if self.halted:", "if False:").apply(tmp_path) == SOURCE
    assert "if (False):" in (tmp_path / "gate" / "__init__.py").read_text()
