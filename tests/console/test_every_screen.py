"""What holds on every screen alike: what it says without an answer, harmless text, ASCII, answers of another shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fedsilo.views.state import Link
from tests.console import test_audit_screen as audit
from tests.console import test_coordinator_desk as at_coordinator
from tests.console import test_outbox as outbox
from tests.console.desk import Desk, console
from tests.console.rounds import at_coordinator as round_at_coordinator
from tests.console.rounds import at_silo, curves_at_coordinator, curves_at_silo
from tests.console.site_answers import CERTIFICATES, LOGS, SETTINGS
from tests.console.states import coordinator, live, release, silo
from tests.console.test_approvals import PAST
from tests.console.test_budget_screen import LIMITS
from tests.console.test_safe import TOGETHER

RECORDS = {"records": [audit.record(seq) for seq in range(71, 40, -1)], "size": 72, "next": None}


@dataclass(frozen=True)
class Place:
    """A screen, the query that fills it, and what it shows.

    Args:
        keys: lead there from the overview.
        query: what it asks first.
        answers: by query.
        shown: stands there once it was answered.
        empty: an answer with nothing in it, and what the screen says then.
        walk: keys pressed there, one group at a time.
        state: of the daemon.
    """

    keys: str
    query: str
    answers: Mapping[str, Any]
    shown: str
    empty: tuple[Any, str]
    walk: tuple[tuple[str, ...], ...] = ()
    state: Mapping[str, Any] = field(default_factory=lambda: silo(release()))


MESSAGES: dict[str, Any] = {
    **outbox.decision(250, "deny"),
    "messages": [outbox.message(seq) for seq in range(250, 230, -1)],
    "total": 250,
    "held": 1,
    "denied": 2,
    "next": None,
}
EMPTY_PAGE = {"messages": [], "total": 0, "held": 0, "denied": 0, "next": None}
HISTORY = {"releases": [PAST, {**PAST, "id": "r0/hospital_a/1"}], "total": 2, "next": None}
CURVES_WALK = (("T",), ("T", "tab"), ("tab",))
PLACES = {
    "history": Place("3h", "approvals", {"approvals": HISTORY}, "alice yes, bob yes",
                     ({**HISTORY, "releases": []}, "no releases that were held yet")),
    "round": Place("2", "round", {"round": at_silo()}, "open for 06:41",
                   (at_silo(round=0, rounds=[], silos=[], deadlines=[]), "no silos in this run yet"),
                   (("p",), ("escape", "c"), ("c",))),
    "curves": Place("4", "curves", {"curves": curves_at_silo()}, "step 40",
                    (curves_at_silo(names=[], series=[], baseline=[]), "no figures of run run-1 yet"), CURVES_WALK),
    "outbox": Place("5", "outbox", {"outbox": MESSAGES}, "09:04:10", (EMPTY_PAGE, " yet"), (("s",),)),
    "inbox": Place("5l", "inbox", {"outbox": MESSAGES, "inbox": MESSAGES}, "09:04:10", (EMPTY_PAGE, " yet"), (("l",),)),
    "audit": Place("6", "audit", {"audit": RECORDS, "audit.status": audit.STATUS}, "egress.acked",
                   ({"records": [], "size": 0, "next": None}, "no records but of control messages yet")),
    "budget": Place("7", "limits", {"limits": LIMITS}, "day_bytes",
                    ({"rows": [], "capacity": [], "releases": [], "dp": "off", "forecast": {}},
                     "no limits that count over messages yet"), (("tab",), ("enter",), ("escape", "tab"))),
    "certificates": Place("8", "certificates", {"certificates": CERTIFICATES}, "the operator bob",
                          ([], "no certificates yet")),
    "logs": Place("9", "logs", {"logs": LOGS}, "connection lost",
                  ({"lines": [], "left_out": 0}, "no lines in this daemon's log yet"), (("w",), ("w",))),
    "settings": Place("0", "settings", {"settings": SETTINGS}, "silo.yaml:4",
                      ([{"key": "one", "value": 1, "origin": "silo.yaml:1"}], "1 of the silo's 1 settings")),
}  # fmt: skip
AT_COORDINATOR = {
    "round of a coordinator": replace(PLACES["round"], answers={"round": round_at_coordinator()}, state=coordinator()),
    "curves of a coordinator": replace(
        PLACES["curves"], answers={"curves": curves_at_coordinator()}, state=coordinator()
    ),
    "outbox of a coordinator": replace(
        PLACES["outbox"], answers={"outbox": at_coordinator.page() | at_coordinator.ONE}, state=coordinator(), walk=()
    ),
    "audit log of a coordinator": replace(
        PLACES["audit"], answers={"audit": RECORDS, "audit.status": at_coordinator.STATUS}, state=coordinator()
    ),
    "figures on the overview": Place(
        "1", "curves", {"curves": curves_at_coordinator()}, "", ({}, ""), (), coordinator()
    ),
}


async def go(desk: Desk, place: Place) -> None:
    await desk.show(dict(place.state))
    await desk.press(*place.keys)


async def answer_all(desk: Desk, answers: Mapping[str, Any]) -> None:
    """Answer what is wanted until nothing new is."""
    told: set[str] = set()
    while new := {key: name for key, (name, _) in desk.app.wanted.items() if key not in told and name in answers}:
        for key, name in new.items():
            told.add(key)
            if key in desk.app.wanted:
                await desk.answer(key, answers[name])


async def walked(desk: Desk, place: Place) -> list[str]:
    """What stands on the screen before and after each of the keys."""
    seen = [desk.text]
    for keys in (("enter",), ("escape", "i"), ("escape",), *place.walk):
        await desk.press(*keys)
        await answer_all(desk, place.answers)
        seen.append(desk.text)
    await desk.press("escape")
    return seen


@pytest.mark.slow
async def test_loading_refused_empty_stale_and_disconnected_say_so() -> None:
    async with console((100, 30)) as desk:
        for name, place in PLACES.items():
            await go(desk, place)
            if place.keys == "5l":
                await answer_all(desk, {"outbox": MESSAGES})
            await desk.wait(3.0)
            await desk.show(dict(place.state))
            assert "waiting for the daemon's answer to" in desk.text, name
            (key, *_) = (key for key, (query, _) in desk.app.wanted.items() if query == place.query)
            for code, told in (("NOT_ALLOWED", "not allowed: no role"), ("OPERATION", "error: no role [OPERATION]")):
                await desk.answer(key, None, refused=(code, "no role"))
                assert desk.text.count(told) == 1 and place.shown not in desk.text, name
            answer, says = place.empty
            await desk.answer(key, answer)
            assert says in desk.text, name
            await answer_all(desk, place.answers)
            assert place.shown in desk.text and "as of" not in desk.text, name
            at, answers = desk.app.snapshot.answered_at, desk.app.snapshot.answers
            await desk.wait(9.0)
            await desk.show(replace(live(dict(place.state), at=desk.now), answers=answers, answered_at=at))
            assert "the daemon has not answered since" in desk.text and place.shown in desk.text, name
            gone = Link("disconnected", "nothing listens there", "start it", desk.now, 1e9)
            await desk.show(replace(desk.app.snapshot, link=gone))
            assert "DISCONNECTED" in desk.text and place.shown in desk.text, name


DATE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")
LOG_LINE = re.compile(r"\S+Z [A-Z]+ ")
KEPT = ("name", "x", "seq", "verdict", "decision", "outcome", "event", "id", "limit", "run", "silo", "fault", "key")


class Hostile:
    """The same answer with this text in place of every string, and if `everything` of every number too; else what
    chooses which rows and plots are drawn stays, or nothing of the rest would be drawn."""

    def __init__(self, text: str, *, everything: bool) -> None:
        self.text, self.everything, self._count = text, everything, 0

    def __call__(self, value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: self(item, key) for key, item in value.items()} | {self.text: self.text}
        if isinstance(value, list):
            return [*(item if not self.everything and name == "names" else self(item) for item in value), self.text]
        if isinstance(value, str):
            if not self.everything and (name in KEPT or DATE.fullmatch(value)):
                return value
            self._count += 1
            line = LOG_LINE.match(value)
            return f"{line.group() if line else ''}{self.text}{self._count}"
        return self.text if self.everything else value


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize(("name", "sign"), [("forwards", "]0;owned"), ("backwards", "a␡b"), ("long", "abcdefghij")])
async def test_T37_hostile_text_in_every_field_of_every_screen_draws_no_control_character(name: str, sign: str) -> None:
    spoil = Hostile(TOGETHER[name], everything=False)
    async with console((100, 30)) as desk:
        for called, place in {**PLACES, **AT_COORDINATOR}.items():
            await go(desk, place)
            hostile = replace(place, answers={query: spoil(answer) for query, answer in place.answers.items()})
            await answer_all(desk, hostile.answers)
            drawn = "".join(await walked(desk, hostile))
            assert not [one for one in drawn if not (one.isprintable() or one == "\n")], called
            assert sign in drawn, called


@pytest.mark.slow
async def test_ascii_only_draws_nothing_else() -> None:
    async with console((100, 30), ascii_only=True, theme_name="fed-mono") as desk:
        for called, place in {**PLACES, **AT_COORDINATOR}.items():
            await go(desk, place)
            await answer_all(desk, place.answers)
            drawn = "".join(await walked(desk, place))
            assert drawn.isascii(), (called, {one for one in drawn if not one.isascii()})


@pytest.mark.slow
async def test_T37_an_answer_of_another_shape_breaks_no_screen_and_is_as_harmless() -> None:
    spoil = Hostile(TOGETHER["forwards"], everything=True)
    async with console((100, 30)) as desk:
        for called, place in PLACES.items():
            await go(desk, place)
            row = {key: [None, {}, "x", {"seq": None}] for key in ("messages", "records", "rows", "releases", "silos")}
            for answer in (7, [], ["x"], dict.fromkeys(row, 3), row, spoil(place.answers[place.query])):
                await answer_all(desk, dict.fromkeys(place.answers, answer))
                assert desk.text.strip(), called
                assert not [one for one in desk.text if not (one.isprintable() or one == "\n")], called
            await desk.press("enter", "escape")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "number", "answers", "keys", "twin"),
    [
        ("6", "seq", {"audit": RECORDS, "audit.status": audit.STATUS}, (), "fedsilo audit tail --no-control"),
        ("7", "seq", {"limits": LIMITS}, ("tab", "tab"), "silo ledger show"),
    ],
    ids=["audit", "budget"],
)
async def test_T37_a_number_that_is_none_is_no_word_of_a_command(
    key: str, number: str, answers: dict[str, Any], keys: tuple[str, ...], twin: str
) -> None:
    async with console((140, 42)) as desk:
        for text in TOGETHER.values():
            hostile = {
                query: {name: [{**row, number: text} for row in rows] if isinstance(rows, list) else rows
                        for name, rows in answer.items()}
                for query, answer in answers.items()
            }  # fmt: skip
            await desk.show(silo())
            await desk.press(key)
            await answer_all(desk, hostile)
            await desk.press(*keys, "Y")
            desk.is_harmless()
            desk.shows(f"copied: {twin}", lacks=[f"{twin} {text[:3]}"])
            await desk.press(*keys[:1], "1")  # with the first of the three tables on top
