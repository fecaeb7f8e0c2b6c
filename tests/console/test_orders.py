"""Orders from the console: who may give which, on what state, with what dialog; each refusal beside what works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.widgets import Button, Input

from console.dialogs import OrderDialog
from console.feed import Person
from console.lock import Outcome, Signing
from console.orders import Order, clock_text, deferral, order_of, record_text
from console.screens.overview import OverviewScreen
from fedsilo.control.client import Operator
from fedsilo.protocol.errors import ConflictError, NotAllowedError, UnreachableError
from fedsilo.views.state import Link, Snapshot
from tests.console.desk import Desk, Signer, console
from tests.console.states import NOW, coordinator, live, release, silo
from tests.console.test_safe import TOGETHER

RUN = coordinator()["runs"][0]
HALT = {"kind": "public.responses", "since": NOW - 600, "digest": "ab" * 32, "needed": 2, "given": ["bob"]}
HALTED = silo(screens={"halts": ["public.responses"], "troubles": []})


class Unreadable:
    """An answer of another shape."""

    def __str__(self) -> str:
        raise TypeError("no such text")


STARTED = {"run": "run-1", "silos": ["hospital_a", "hospital_b"]}


def at_coordinator(**run: Any) -> dict[str, Any]:
    return coordinator(runs=[{**RUN, **run}])


def halted(*given: str) -> Snapshot:
    return replace(live(HALTED), answers={"halts": {"halts": [{**HALT, "given": list(given)}]}})


def made(action: str, snapshot: Snapshot, kind: str = "") -> Order:
    order = order_of(action, snapshot, kind=kind)
    assert isinstance(order, Order), order
    return order


# ---- which order a state allows --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "state", "command", "bound", "key", "word"),
    [("pause", at_coordinator(), "run.pause", {"run": "run-1"}, "p", ""),
     ("pause", at_coordinator(state="paused"), "run.resume", {"run": "run-1"}, "r", ""),
     ("start", at_coordinator(state="waiting", silos=[], round=0), "run.start", STARTED, "s", ""),
     ("abort", at_coordinator(), "run.abort", {"run": "run-1", "round": 2}, "", "2"),
     ("abort", at_coordinator(state="waiting", silos=[], round=0), "run.abort", {"run": "run-1", "round": 0}, "", "0"),
     ("pause", silo(), "pause", {"run": "run-1"}, "p", ""),
     ("pause", silo(paused=True), "resume", {"run": "run-1"}, "r", ""),
     ("stop", silo(), "stop", {"run": "run-1"}, "", "hospital_a"),
     ("stop", silo(run=""), "stop", {"run": ""}, "", "hospital_a")],
)  # fmt: skip
def test_an_order_says_what_it_is_about_and_takes_a_key_or_a_word(
    action: str, state: dict[str, Any], command: str, bound: dict[str, Any], key: str, word: str
) -> None:
    order = made(action, live(state))
    assert (order.command, dict(order.arguments()), order.key, order.word) == (command, bound, key, word)
    assert bool(order.key) != bool(order.word) and order.about and order.effect and order.undone
    assert order.why_not(live(state), "alice", 100.0) == ""


@pytest.mark.parametrize(
    ("action", "state", "why"),
    [("pause", at_coordinator(state="finished"), "run run-1 is finished"),
     ("pause", at_coordinator(state="waiting"), "only one that runs"), ("pause", coordinator(runs=[]), "no runs yet"),
     ("start", at_coordinator(), "only one that waits"), ("start", at_coordinator(state="waiting"), "has its silos"),
     ("abort", at_coordinator(state="aborted"), "nothing to abort"), ("pause", silo(run=""), "no run to pause"),
     ("start", silo(), "for the people of the coordinator"), ("abort", silo(), "for the people of the coordinator"),
     ("stop", coordinator(), "for the people of a silo"), ("release_halt", coordinator(), "for the people of a silo"),
     ("release_halt", silo(), "nothing is halted"), ("release_halt", HALTED, "is not told yet")],
)  # fmt: skip
def test_what_cannot_be_ordered_says_why(action: str, state: dict[str, Any], why: str) -> None:
    order = order_of(action, live(state), kind="public.responses")
    assert isinstance(order, str) and why in order
    assert isinstance(order_of(action, Snapshot()), str)


def test_T18_a_halt_is_released_over_what_was_shown_and_nobody_counts_twice() -> None:
    order = made("release_halt", halted("bob"), "public.responses")
    assert dict(order.arguments()) == {"kind": "public.responses", "digest": "ab" * 32}
    assert order.word == "public.responses" and "1 of 2 approved" in order.about and "at once" in order.effect
    assert order.why_not(halted("bob"), "alice", 100.0) == ""
    assert "bob gave this already" in order.why_not(halted("bob"), "bob", 100.0)
    assert "alice gave this already" in order.why_not(halted("bob", "alice"), "alice", 100.0)
    assert "once 1 more approved" in made("release_halt", halted(), "public.responses").effect
    other = replace(live(HALTED), answers={"halts": {"halts": [{**HALT, "digest": "cd" * 32}]}})
    assert "has changed" in order.why_not(other, "alice", 100.0)
    assert "put the cursor" in str(order_of("release_halt", halted()))
    assert order.told("alice", {"released": False, "given": ["alice"], "needed": 2, "record": 9, "audit_size": 12}) == (
        "public.responses: still halted, 1 of 2 approved its release, by alice, audit record 9"
    )
    assert "may leave again, by alice" in order.told("alice", {"released": True, "given": ["a", "b"], "needed": 2})


@pytest.mark.parametrize(
    ("state", "now", "why"),
    [(at_coordinator(state="paused"), 100.0, "has changed, now: resume"), (at_coordinator(), 104.0, "stale"),
     (at_coordinator(state="failed"), 100.0, "is failed"), (at_coordinator(round=3), 100.0, "")],
)  # fmt: skip
def test_T36_an_order_is_off_once_what_it_was_made_from_changed(state: dict[str, Any], now: float, why: str) -> None:
    told = made("pause", live(at_coordinator())).why_not(live(state), "alice", now)
    assert why in told and bool(why) == bool(told)
    assert made("pause", live(at_coordinator())).why_not(live(at_coordinator()), "alice", 100.0) == ""


def test_an_abort_is_of_one_round_and_nothing_is_ordered_of_what_is_no_daemon() -> None:
    order = made("abort", live(at_coordinator()))
    assert "round 3 of 3" in order.why_not(live(at_coordinator(round=3)), "alice", 100.0)
    for link, why in ((Link("disconnected"), "disconnected"), (Link("live", received_at=100.0, banner="REPLAY 00:01"),
                                                              "REPLAY: nothing can be changed")):  # fmt: skip
        assert why in order.why_not(replace(live(at_coordinator()), link=link), "alice", 100.0)


# ---- giving it -------------------------------------------------------------------------------------


ALICE = Person("alice", Operator("consortium", Path("none.crt"), Path("none.key")))


def test_what_may_have_arrived_keeps_its_request_id_for_two_minutes() -> None:
    time, signer = [0.0], Signer()
    signing = Signing(signer, None, "", False, lambda: time[0])

    def give(state: str = "running", refusal: Any = None, **result: Any) -> tuple[Outcome, str]:
        signer.refusal, signer.result = refusal, result or {"record": 72}
        outcome = signing.carry_out(made("pause", live(at_coordinator(state=state))), ALICE)
        assert "PRIVATE" not in outcome.text
        return outcome, signer.commands[-1][3]

    lost = UnreachableError("no answer within 30 s")
    for refusal, result in (
        (lost, {}),
        (RuntimeError("channel closed"), {}),
        (ValueError("PRIVATE"), {}),
        (None, {"needed": 1, "record": Unreadable()}),
    ):
        outcome, first = give(refusal=refusal, **result)
        assert not outcome.ok and "not known whether it arrived" in outcome.text
        time[0] += 60.0
        there, again = give()  # the daemon tells again what it told the first time
        assert there.ok and again == first and give()[1] != first
    _, lost_id = give(refusal=lost)
    give("paused", refusal=lost)  # another order in between: the first is settled, whatever came of it
    assert give(refusal=lost)[1] != lost_id
    _, late = give(refusal=lost)
    time[0] += 121.0
    assert give()[1] != late
    only_looks = Signing(None, None, "", False, lambda: 0.0)
    assert only_looks.read_only and not only_looks.carry_out(made("pause", live(at_coordinator())), ALICE).ok
    assert record_text({"record": 7, "audit_size": 9}) == ", audit record 7"
    assert record_text({"audit_size": 9}) == record_text({}) == ""  # the log's size is another record's number


@pytest.mark.parametrize(("seconds", "text"), [(1e20, "23:59Z"), (-1e20, "00:00Z"), (1_800_000_000.0, "08:00Z")])
def test_a_time_that_no_calendar_has_is_told_as_the_nearest(seconds: float, text: str) -> None:
    put_off = deferral(live(silo(release())).held[0], 10, 0.0).told("alice", {"deferred_until": seconds})
    assert clock_text(seconds) == text and f"until {text}" in put_off


# ---- the dialog ------------------------------------------------------------------------------------


async def ready(desk: Desk, state: dict[str, Any] | Snapshot | None = None, site: str = "consortium") -> None:
    desk.unlock(site=site)
    await desk.show(state or at_coordinator())


@pytest.mark.slow
async def test_P_then_p_pauses_the_run_and_says_where_it_is_recorded() -> None:
    sending: list[Any] = []
    async with console() as desk:
        desk.signer.result = {"state": "paused", "record": 41, "audit_size": 42}
        await ready(desk)
        await desk.wait(0.5)
        await desk.pilot.press("P", "p", "X", "2", "tab", "enter")  # a burst orders nothing
        await desk.wait(0.5)
        assert await desk.answers_sent() == [] and not isinstance(desk.app.screen, OrderDialog)
        await desk.press("escape", "1")
        for keys in (["enter"], ["P", "P"], ["x", "space"], ["escape"]):
            await desk.show(at_coordinator())
            await desk.press(*([] if isinstance(desk.app.screen, OrderDialog) else ["P"]), *keys)
            assert await desk.answers_sent() == [], keys
        assert isinstance(desk.app.screen, OverviewScreen)
        desk.shows("no order was given")
        await desk.show(at_coordinator())
        await desk.press("P")
        overview = desk.app.overview
        desk.shows("run run-1, pubswap, round 2 of 3", "Signed by alice", "p pause", "esc cancel")
        ((person, name, arguments, request_id),) = await desk.sends("p")
        assert (person, name, arguments) == ("alice", "run.pause", {"run": "run-1"}) and len(request_id) == 32
        desk.shows("run run-1: paused, by alice, audit record 41")
        await desk.show(at_coordinator())
        with pytest.MonkeyPatch.context() as slow:
            slow.setattr(desk.app, "send", lambda order, finished: sending.append(finished))
            await desk.sends("P", "p")
            assert overview.order_for("abort") == "an order is on its way"
        sending[0](Outcome("run run-1: paused", ok=True))
        assert isinstance(overview.order_for("abort"), Order)
        await desk.wait(61.0)
        await desk.show(at_coordinator())
        desk.shows(lacks=["run run-1: paused"])


@pytest.mark.parametrize(
    ("person", "read_only", "why"),
    [
        ("", False, "LOCKED: press L"),
        ("hospital_a", False, "not of this site"),
        ("", True, "this console is read-only"),
    ],
)
async def test_without_an_unlocked_key_of_this_site_no_dialog_opens(person: str, read_only: bool, why: str) -> None:
    async with console(read_only=read_only) as desk:
        if person:
            desk.unlock(site=person)
        await desk.show(at_coordinator())
        assert await desk.sends("P", "p", "P") == [] and isinstance(desk.app.screen, OverviewScreen)
        desk.shows(why)


async def test_T36_a_run_that_changed_behind_the_dialog_is_not_ordered() -> None:
    async with console() as desk:
        await ready(desk)
        await desk.press("P")
        await desk.show(at_coordinator(state="paused"))
        assert await desk.sends("p") == [] and isinstance(desk.app.screen, OrderDialog)
        await desk.show(at_coordinator())
        assert len(await desk.sends("p")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "site", "keys", "wrong", "word", "command", "bound"),
    [
        (at_coordinator(), "consortium", ("X",), "3", "2", "run.abort", {"run": "run-1", "round": 2}),
        (HALTED, "hospital_a", ("H",), "public.response", "public.responses", "approvals.release",
         {"kind": "public.responses", "digest": "ab" * 32}),  # T18
        (silo(), "hospital_a", ("ctrl+p", *"stop this", "enter"), "hospital_b", "hospital_a", "stop", {"run": "run-1"}),
    ],
    ids=["abort", "release a halt", "stop"],
)  # fmt: skip
async def test_what_cannot_be_undone_takes_a_word(
    state: dict[str, Any],
    site: str,
    keys: tuple[str, ...],
    wrong: str,
    word: str,
    command: str,
    bound: dict[str, Any],
) -> None:
    async with console() as desk:
        desk.signer.result = {"released": True, "given": ["bob", "alice"], "needed": 2, "record": 90}
        await ready(desk, state, site=site)
        await desk.press(*("space" if key == " " else key for key in keys[:-1]))
        await desk.show(state)
        await desk.answer("halts", {"halts": [HALT]})
        await desk.press(keys[-1])
        field, button = desk.app.screen.query_one("#word", Input), desk.app.screen.query_one("#confirm", Button)
        assert field.has_focus and field.placeholder != word
        field.post_message(events.Paste(word))
        await desk.press("enter")
        assert field.value == ""
        for typed, off in ((wrong, True), (word, False)):
            field.value = typed
            await desk.pilot.pause()
            assert button.disabled is off and await desk.sends("enter") == []
        await desk.show(state)
        await desk.answer("halts", {"halts": [HALT]})
        assert [sent[1:3] for sent in await desk.sends("tab", "enter")] == [(command, bound)]
        desk.shows("audit record 90")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refusal", "told", "again"),
    [
        (NotAllowedError("bob may not run.pause", hint="it takes operator"), "may not run.pause", False),
        (ConflictError("run 'run-1' has not started"), "has not started", False),
        (UnreachableError("no answer within 30 s"), "not known whether it arrived", True),
    ],
)
async def test_what_the_daemon_refuses_is_said_and_can_be_tried_again(refusal: Any, told: str, again: bool) -> None:
    async with console() as desk:
        desk.signer.refusal = refusal
        await ready(desk)
        await desk.sends("P", "p")
        desk.shows(told, lacks=["sending…"])
        desk.signer.refusal = None
        await desk.show(at_coordinator())
        first, second = await desk.sends("P", "p")
        assert (first[3] == second[3]) is again
        desk.shows("run run-1: paused")


@pytest.mark.slow
async def test_T37_hostile_names_in_an_order_draw_no_control_character() -> None:
    async with console((80, 24)) as desk:
        for text in TOGETHER.values():
            await ready(desk, at_coordinator(run=text, method=text))
            for key in ("P", "escape", "X", "escape"):
                await desk.press(key)
                desk.is_harmless()
