"""Outbox, inbox and audit log of a coordinator in the console: what it sent is counted, what came in is judged, and its
silos are the witnesses of its log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from console.screens.audit import AuditScreen
from console.screens.outbox import OutboxScreen
from console.sharing import QUERIES, Question, released_answer
from console.table_screen import PAGE_ROWS
from fedsilo.control.answers import AuditStatus, MessageRow, read
from fedsilo.views import messages
from fedsilo.views.audit import head_lines
from fedsilo.views.lines import UNICODE, to_text
from tests.console.desk import Desk, console
from tests.console.states import NOW, coordinator, silo, unclassified
from tests.console.test_audit_screen import Log, answer_all
from tests.console.test_outbox import page as message_page
from tests.simulated.coordinator_parts import House, SimulatedSilo, federation, until_quiet
from tests.simulated.queries import as_json
from tests.simulated.test_coordinator_queries import deny, panel_of

SILOS = ("hospital_a", "hospital_b", "uni_c")


def row(number: int, kind: str, name: str, **changes: Any) -> dict[str, Any]:
    """As `coordinator.answers.queries` makes it."""
    run = "" if kind.startswith("control.") else "run-1"
    return {
        "seq": f"{run}/{number}/{kind}/{name}", "run": run, "round": number, "kind": kind, "peer": name,
        "messages": 1, "bytes": 1_990_000 if kind == "global.adapter" else 880 + number, "waiting": 0,
        "outcome": "sent" if kind == "global.adapter" else "acked", **changes,
    }  # fmt: skip


def page() -> dict[str, Any]:
    rows = [
        row(number, kind, name)
        for number in (3, 2, 1)
        for kind in ("public.step", "round.agreed", "round.open", "global.adapter")
        for name in SILOS
    ]
    rows[0] |= {"messages": 0, "bytes": 0, "waiting": 1, "outcome": ""}
    rows[1] |= {"messages": 2, "waiting": 1, "outcome": "sent"}
    rows += [row(0, "run.plan", name) for name in SILOS]
    return {"messages": rows, "total": 39, "sent": 40, "waiting": 2, "next": None}


ONE = {
    "message": page()["messages"][1],
    "waiting": [{"step": 0, "bytes": 883, "sha256": "5a" * 32, "delivered": True}],
}


async def opened(desk: Desk) -> OutboxScreen:
    await desk.show(coordinator())
    await desk.press("5")
    await desk.answer("outbox", page())
    screen = desk.app.screen
    assert isinstance(screen, OutboxScreen)
    return screen


# ---- what was sent ---------------------------------------------------------------------------------


@pytest.mark.slow
async def test_one_row_says_what_waits_and_its_twin_is_the_coordinators() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        desk.shows("40 messages 2 wait", "not sent yet", "some waits", lacks=[" verdict"])
        assert screen.twin() == "coordinator outbox show run-1/3/public.step/hospital_a"
        await desk.press("j")
        key = "outbox record run-1/3/public.step/hospital_b"
        assert desk.app.wanted[key] == ("outbox", {"seq": "run-1/3/public.step/hospital_b"})
        await desk.answer(key, ONE)
        desk.shows("its acknowledgement")  # in the box below the rows
        await desk.press("enter")
        desk.shows("public.step to hospital_b", "run-1, round 3", "5a" * 16, "coordinator outbox show run-1/3/public")
        await desk.press("y", "escape", "c")
        assert desk.app.wanted["outbox control"] == ("outbox", {"control": True, "limit": PAGE_ROWS})
        await desk.press("c")
        screen.go_to("silo:uni_c")
        await desk.pilot.pause()
        assert {item.row.peer for item in screen.table.rows.shown} <= {"uni_c"}
        screen.go_to("run-1/1/run.plan/uni_c")
        await desk.pilot.pause()
        assert "outbox record run-1/1/run.plan/uni_c" in desk.app.wanted
        await desk.press("escape", "escape")
        await desk.show(silo())
        await desk.answer("outbox", message_page(20))
        assert "round.open" not in desk.text and desk.app.top.twin() == "silo outbox show 20"


@pytest.mark.slow
async def test_what_a_real_coordinator_answers_is_what_is_shown(house: House) -> None:
    ask = panel_of(house).queries()
    sent = ask["outbox"]({"limit": PAGE_ROWS}).messages
    assert {messages.state_part(row)[0] for row in sent} == {"acknowledged", "sent"} and len(sent) == 44
    came = ask["inbox"]({"limit": PAGE_ROWS}).messages
    (seq,) = (row.seq for row in came if row.kind == "public.responses" and row.verdict == "deny")
    lines = messages.detail_lines("inbox", ask["inbox"]({"seq": seq}), "x", 200, party="coordinator")
    words = " ".join(to_text(lines).split())
    assert all(fact in words for fact in ("nothing of it was used", "it had", f"{seq} of this coordinator's audit log"))
    text = to_text(head_lines(ask["audit.status"]({}), NOW, 300, UNICODE, control=False, at_coordinator=True))
    assert "not countersigned by hospital_a, hospital_b, hospital_c, hospital_d yet" in text


@pytest.mark.parametrize(
    ("outcome", "waiting", "told"),
    [("acked", 0, "acknowledged"), ("sent", 0, "sent"), ("sent", 2, "some waits"), ("", 1, "not sent yet"),
     (None, 0, "not sent yet"), ("lost", 0, "unknown"), (7, 0, "unknown")],
)  # fmt: skip
def test_what_cannot_be_told_never_counts_as_acknowledged(outcome: Any, waiting: int, told: str) -> None:
    assert messages.state_part(read(MessageRow, {"outcome": outcome, "waiting": waiting}))[0] == told


# ---- with the daemon's own answers -----------------------------------------------------------------


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made, silos = federation(tmp_path_factory.mktemp("house"))
    with closing(made):
        for each in silos:
            each.join()
        made.submit()
        until_quiet(silos)
        deny(silos[1])
        SimulatedSilo(made, "stranger").join()
        yield made


async def test_v_and_the_twins_are_the_coordinators() -> None:
    log = Log(71, status=STATUS)
    async with console((100, 30)) as desk:
        await desk.show(coordinator())
        await desk.press("6")
        assert isinstance(desk.app.screen, AuditScreen) and desk.app.top.twin() == "coordinator audit list --no-control"
        await desk.answer("audit", {"records": [], "size": 0, "next": None})
        desk.shows("coordinator start", lacks=["silo start"])
        await desk.press("v")
        await desk.show(coordinator())
        await answer_all(desk, log)
        assert log.verifications == 1


@pytest.mark.slow
def test_every_answer_is_classified_and_a_shared_recording_has_only_what_was_sent(house: House) -> None:
    ask = as_json(panel_of(house))
    for name in ("outbox", "inbox", "audit.status"):
        question = QUERIES[name]
        assert isinstance(question, Question)
        assert list(unclassified(ask[name]({}), question.answer)) == [], name
    first = ask["outbox"]({})["messages"][0]
    assert list(unclassified(ask["outbox"]({"seq": first["seq"]}), QUERIES["outbox"].answer)) == []  # type: ignore[union-attr]
    (shared,) = released_answer("outbox", {}, {"messages": [first, {**first, "outcome": ""}], "waiting": 1}) or ({},)
    assert shared == {"messages": [{name: value for name, value in first.items() if name != "waiting"}]}
    assert released_answer("outbox", {"seq": first["seq"]}, {}) is None


# ---- the audit log ---------------------------------------------------------------------------------

STATUS: dict[str, Any] = {
    "size": 71, "verified_to": 60, "verified_at": "2026-12-01T09:41:00Z", "verifying": False, "looked_at": 60,
    "of": 60, "broken": None,
    "checkpoint": {"size": 58, "time": "2026-12-01T09:38:00Z",
                   "cosigned_by": [f"spiffe://cardio-net/silo/{name}" for name in SILOS[:2]]},
    "witnesses": {f"spiffe://cardio-net/silo/{name}": word
                  for name, word in zip(SILOS, ("matches", "differs", "not seen"), strict=True)},
}  # fmt: skip


def head(**changes: Any) -> str:
    return to_text(
        head_lines(read(AuditStatus, {**STATUS, **changes}), NOW, 300, UNICODE, control=False, at_coordinator=True)
    )


def test_which_silo_differs_is_named_first() -> None:
    told = head()
    assert told.index("DIFFERS FROM hospital_b") < told.index("matches hospital_a")
    assert "not countersigned by uni_c yet" in told and "coordinator" not in told
    assert "countersigned by silo/hospital_a, silo/hospital_b" in told
    many = {f"spiffe://cardio-net/silo/s{number:02}": "matches" for number in range(50)}
    assert "matches s00, s01, s02, s03 and 46 more" in head(witnesses=many)
    assert "DIFFERS" not in head(witnesses=many) and "perhaps: s1" in head(witnesses={"x/s1": "perhaps"})
    # a folder read without its daemon has no word on each
    assert "countersigned by the coordinator" not in head(witnesses=None, coordinator="not seen")
