"""The mutants of `python -m benchmarks.controls` still stand in the code they change, and are enough of it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType

import pytest

from benchmarks.controls import inverted, mutants, noticed_before, page, removed
from benchmarks.mutants import Edit, OtherRule
from policies.kind import Judgement, Rule

MUTANTS = mutants()
EDITS = [mutant for mutant in MUTANTS if isinstance(mutant, Edit)]
STEPS_MIN = 93  # none is dropped when its code moves

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
    row = {"mutant": mutant, "caught_by": f"{test}[a rule: too many]", "seconds": 1.0}
    survivor = {"mutant": MUTANTS[1].name, "caught_by": "", "seconds": 1.0}
    assert noticed_before(page([{"figures": {"rows": [row, survivor]}}])) == {mutant: test}


@pytest.mark.parametrize("mutant", EDITS, ids=lambda each: each.name)
def test_the_code_of_a_step_stands_where_it_is_looked_for(mutant: Edit) -> None:
    """Else the step would not be taken away, and its mutant would count as a survivor."""
    function, code = mutant.found()
    assert code.co_qualname == function.__code__.co_qualname == mutant.function
    assert code.co_freevars == function.__code__.co_freevars
    assert code != function.__code__


class Sum:
    @property
    def total(self) -> int:
        return 1 + 2


@contextmanager
def within() -> Iterator[int]:
    yield 1 + 2


def total() -> int:
    return 1 + 2


@pytest.mark.parametrize(
    ("function", "code_of", "result"),
    [
        ("total", total, total),
        ("Sum.total", inspect.getattr_static(Sum, "total").fget, lambda: Sum().total),
        ("within", inspect.unwrap(within), lambda: within().__enter__()),
    ],
)
def test_an_edit_is_planted_in_the_function_itself(
    function: str, code_of: FunctionType, result: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_of, "__code__", code_of.__code__)  # so that it is put back
    assert result() == 3
    Edit("planted", __name__, function, "1 + 2", "5").plant()
    assert result() == 5


def test_another_rule_is_in_every_list_that_holds_it() -> None:
    rule = Rule("some", "SOME", frozenset(), lambda *facts: Judgement("deny", 1, 0, ()))
    lists = [rule], (rule,)
    OtherRule("planted", rule, inverted).plant()
    assert [each.check({}, None, None).outcome for rules in lists for each in rules] == ["ok", "ok"]
    OtherRule("planted", rule, removed).plant()
    assert rule.check({}, None, None) == Judgement("ok", 0, 0, ())


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
def test_code_that_is_not_there_once_is_an_error(old: str, function: str, times: int) -> None:
    with pytest.raises(ValueError, match=f"{times} times, not once"):
        edit(old, "if None:" if old.endswith(":") else "None", function).planted(SOURCE)


@pytest.mark.parametrize("function", ["send", "Gate", "Gate.gone", "Halt.send"])
def test_a_function_that_is_gone_is_an_error(function: str) -> None:
    with pytest.raises(ValueError, match="not one"):
        edit("self.halted", "None", function).planted(SOURCE)
