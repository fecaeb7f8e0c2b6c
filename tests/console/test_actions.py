"""The one table of actions: keys, twins and roles agree with the screens, the commands and the table of roles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import typer
from textual.binding import Binding
from typer.main import get_command

from certs import roles
from console.actions import (
    ACTIONS,
    PLACES,
    SCREEN_TWINS,
    Action,
    Context,
    History,
    actions_on,
    command_line,
    crumbs_line,
    help_lines,
    matches,
    tabs_line,
)
from console.app import SCREENS, FedConsole
from console.base import FedScreen
from console.dialogs import OrderingScreen
from console.screens.approval import ApprovalScreen, TextScreen
from console.screens.approvals import ApprovalsScreen, HistoryScreen
from console.screens.audit import AuditScreen
from console.screens.budget import BudgetScreen
from console.screens.certs import CertsScreen
from console.screens.curves import CurvesScreen
from console.screens.logs import LogsScreen
from console.screens.outbox import MessageScreen, OutboxScreen
from console.screens.overview import OverviewScreen
from console.screens.round import RoundScreen
from console.screens.settings import SettingsScreen
from console.table_screen import TablePane
from fedsilo.cli import console as cli_console
from fedsilo.cli import coordinator as cli_coordinator
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.cli import silo as cli_silo
from fedsilo.views.lines import UNICODE, to_text
from tests.console.states import live, release, silo

APPLICATIONS = {
    "fedsilo": cli_fedsilo.app, "silo": cli_silo.app, "coordinator": cli_coordinator.app, "fedconsole": cli_console.app,
}  # fmt: skip
USAGE_ERROR = typer.BadParameter.__base__ or Exception  # typer brings its own click
CONTEXTS = [
    Context(),
    Context(coordinator=True),
    Context(False, "r1/hospital_a/0", "sha256:" + "a" * 64, "sha256:" + "b" * 64, "alice", "public.responses"),
]


def refusal(words: Iterable[str]) -> str:
    """Why a command line would not be taken, or nothing. Nothing is run."""
    name, *rest = words
    command: Any = get_command(APPLICATIONS[name])
    while hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            return f"there is no command {rest[:1]} in {name}"
        name, rest = rest[0], rest[1:]
        command = command.commands[name]
    try:
        command.make_context(name, list(rest))
    except USAGE_ERROR as error:
        return str(error)
    return ""


@pytest.mark.quick(keep=25)
@pytest.mark.parametrize("action", [action for action in ACTIONS if action.twin is not None], ids=lambda a: a.name)
@pytest.mark.parametrize("context", CONTEXTS, ids=["nothing", "coordinator", "release"])
def test_every_twin_is_a_command_with_options_that_it_has(action: Action, context: Context) -> None:
    assert action.twin is not None
    assert refusal(action.twin(context)) == ""


@pytest.mark.parametrize(
    "words", [("silo", "approvals", "bless", "r1"), ("silo", "approvals", "show"), ("silo", "status", "--loud"),
              ("silo", "approvals", "approve", "r1", "--operator", "alice", "--force")],
)  # fmt: skip
def test_a_twin_that_is_no_command_is_noticed(words: tuple[str, ...]) -> None:
    assert refusal(words) != ""


def test_what_changes_something_has_an_upper_case_key_a_twin_and_an_action_of_the_roles() -> None:
    changing = [action for action in ACTIONS if action.changes]
    assert {action.name for action in changing} >= {"approve", "reject", "pause", "start", "abort", "stop"}
    assert [action.name for action in changing if not action.key] == ["stop"]
    for action in changing:
        # what has no key of its own is in the palette only
        assert not action.key or (len(action.key) == 1 and action.key.isupper()), action
        assert action.twin is not None and action.action in roles.ACTIONS, action


def test_every_place_exists_has_a_twin_and_a_key_of_its_own() -> None:
    names = [place.name for place in PLACES]
    assert set(SCREENS) == set(names) <= set(SCREEN_TWINS)
    assert len({place.key for place in PLACES}) == len(PLACES)
    for name, make in SCREENS.items():
        assert make.called == name  # type: ignore[attr-defined]


def _bound(widget: type[Any]) -> Mapping[str, str]:
    """Key -> action of a class's own bindings."""
    bound = {}
    for binding in widget.__dict__.get("BINDINGS", ()):
        keys, action = (binding.key, binding.action) if isinstance(binding, Binding) else binding[:2]
        bound |= dict.fromkeys((key.strip() for key in keys.split(",")), action)
    return bound


WHERE: Mapping[type[Any], set[str]] = {
    FedConsole: {"replay"}, FedScreen: set(), OverviewScreen: {"overview"},
    OrderingScreen: {"ordering", "ordering runs", "ordering a silo"}, ApprovalScreen: {"approval"},
    TablePane: {"table"}, ApprovalsScreen: {"approvals"}, OutboxScreen: {"outbox"}, MessageScreen: {"message"},
    AuditScreen: {"audit"}, BudgetScreen: {"budget"}, HistoryScreen: {"history"},
    TextScreen: {"payload", "comparison"}, RoundScreen: {"round"},
    CurvesScreen: {"curves"},
    CertsScreen: {"certs"}, LogsScreen: {"logs"}, SettingsScreen: {"settings"},
}  # fmt: skip


@pytest.mark.parametrize("widget", WHERE, ids=lambda widget: widget.__name__)
def test_every_key_is_in_the_table_and_every_key_of_the_table_is_bound(widget: type[Any]) -> None:
    actions = actions_on(*WHERE[widget])
    told = {key for action in actions for key in (action.key, *action.also)}
    assert set(_bound(widget)) <= told
    bound = {key for each in (FedConsole, FedScreen, widget) for key in _bound(each)}
    if widget not in (FedConsole, FedScreen):
        own = {action.key for action in actions if action.screens and action.key}
        assert own <= bound and {action.key for action in actions if not action.screens} <= bound | {"j"}
        assert not {key for key in bound if key in ("A", "R")} or widget is ApprovalScreen


def test_no_key_of_one_screen_means_two_things() -> None:
    tables = ("example", "approvals", "outbox", "audit", "budget", "round", "curves", "certs", "logs", "settings")
    party = ({"ordering", "ordering runs"}, {"ordering", "ordering a silo"})
    overviews = [{"overview", "replay"} | orders for orders in party]
    for tags in (*overviews, {"approval"}, {"message"}, *({"table", name} for name in tables)):
        keys = [key for action in actions_on(*tags) for key in (action.key, *action.also) if key]
        assert len(keys) == len(set(keys)), tags


def help_text(*tags: str) -> str:
    return to_text(help_lines(frozenset(tags), Context(), lambda name: "", 70))


def told_keys(*tags: str) -> list[str]:
    """Keys in the left column of the help, in its order."""
    keys = {action.shown_key for action in ACTIONS if action.key}
    return [row.split()[0] for row in help_text(*tags).splitlines() if row[:1].strip() and row.split()[0] in keys]


def test_the_help_begins_with_the_keys_that_change_something() -> None:
    assert told_keys("approval")[:5] == ["A", "D", "R", "y", "p"]
    at_silo = ("overview", "ordering", "ordering a silo")
    assert told_keys(*at_silo)[:3] == ["P", "H", "enter"]
    before, _, _ = help_text(*at_silo).partition("end guard and trainer")  # which has no key
    assert "copy the digest" in before
    assert told_keys("audit", "table") == [each.shown_key for each in actions_on("audit", "table")]
    assert sorted(told_keys("approval")) == sorted(each.shown_key for each in actions_on("approval"))


# ---- going there -----------------------------------------------------------------------------------


def test_going_goes_by_beginnings() -> None:
    names = ["overview", "outbox", "audit"]
    assert matches("o", names) == ["overview", "outbox"] and matches("OU", names) == ["outbox"]
    assert matches("audit", names) == ["audit"] and matches("", names) == [] and matches("x", names) == []


def test_what_was_typed_comes_back() -> None:
    history = History()
    for text in ("overview", "overview", "audit 7"):
        history.add(text)
    assert [history.back(), history.back(), history.back(), history.forth(), history.forth()] == [
        "audit 7", "overview", "overview", "audit 7", "",
    ]  # fmt: skip


@pytest.mark.parametrize("cells", [10, 60, 80, 140])
def test_tabs_and_crumbs_fit(cells: int) -> None:
    snapshot = live(silo(release()))
    assert len(to_text([tabs_line("overview", snapshot, cells, UNICODE)])) <= cells
    if cells >= 80:  # every place keeps a name, not its digit alone
        told = to_text([tabs_line("overview", snapshot, cells, UNICODE)]).split()
        assert len(told) == 10 and all(len(tab) > 3 for tab in told), told
    assert len(to_text([crumbs_line(["Overview"], "r1/" + "x" * 300, cells, UNICODE)])) <= cells


def test_a_command_line_can_be_pasted_into_a_shell() -> None:
    assert command_line(("silo", "approvals", "show", "r1; rm x")) == "silo approvals show 'r1; rm x'"
