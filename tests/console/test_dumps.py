"""How the screens look, cell by cell: each screen at the smallest and at a wide size, each of its other views at one.

`tests.console.dumps` says how to keep a new look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from console.theme import THEMES
from tests.console import dumps
from tests.console import test_audit_screen as audit
from tests.console import test_coordinator_desk as at_coordinator
from tests.console import test_outbox as outbox
from tests.console import test_T36_approving as approving
from tests.console.desk import Desk, console
from tests.console.rounds import at_coordinator as a_round
from tests.console.rounds import at_silo, curves_at_coordinator, curves_at_silo, round_before
from tests.console.site_answers import CERTIFICATES, LOGS, SETTINGS
from tests.console.states import Happened, coordinator, live, release, silo
from tests.console.test_budget_screen import LIMITS

# What happens at the desk: keys are pressed, a query is answered, a state is shown, or what a function does.
Step: TypeAlias = str | tuple[str, Any] | dict[str, Any] | Callable[[Desk], Awaitable[object]] | object


async def play(desk: Desk, *steps: Step) -> None:
    for step in steps:
        match step:
            case str():
                await desk.press(*step.split())
            case (str() as key, answer):
                await desk.answer(key, answer)
            case _ if callable(step):
                await step(desk)
            case _:
                await desk.show(step)  # type: ignore[arg-type]


async def waits(desk: Desk) -> None:
    await desk.wait(3.0)
    desk.app.tick()
    await desk.pilot.pause()


async def unlocked(desk: Desk) -> None:
    desk.unlock()
    desk.signer.result = approving.TICKET


async def sent(desk: Desk) -> None:
    await desk.answers_sent()


def logged(log: audit.Log) -> Callable[[Desk], Awaitable[None]]:
    """Every question about a log is answered."""

    async def answered(desk: Desk) -> None:
        await audit.answer_all(desk, log)

    return answered


HELD = live(silo(release()), events=[Happened(3, "task.done", {"task": "PrivateStep", "round": 1})])
AT_HUB = live(coordinator(), events=[Happened(3, "run.round", {"round": 2})])
FOUND = approving.noticed(approving.DESTINATION, approving.HIT)
QUIET = approving.noticed()
MAIN = "spiffe://cardio-net/coordinator/main"
CAME = [outbox.message(seq, kind="run.plan", peer=MAIN, outcome="", milliseconds=None) for seq in (9, 8, 7)]
BROKEN = audit.Log(18_290)
BROKEN.status = BROKEN.status | {
    "verified_to": 18_281, "coordinator": "differs",
    "broken": {"seq": 18_281, "why": "its previous is not the hash of record 18280"},
}  # fmt: skip
OUTBOX = (silo(), "5", ("outbox", outbox.page(250)))
DENIED = ("outbox record 250", outbox.decision(250, "deny"))
SENT = (coordinator(), "5", ("outbox", at_coordinator.page()), "j")
AUDIT = (silo(), "6", logged(audit.Log(18_290)), "j")
ROUND = (coordinator(), "2", ("round newest newest", a_round()), "j j")
PASS_AT_1 = ("curves pass_at_1 round", curves_at_coordinator())
CURVES = (coordinator(), "4", ("curves round", curves_at_coordinator()), PASS_AT_1)
BUDGET = (silo(), "7", ("limits", LIMITS))
CERTS = (silo(), "8", ("certificates", CERTIFICATES))
LOGGED = (silo(), "9", ("logs", LOGS))
OF_SILO = curves_at_silo()

SMALL, WIDE = (80, 24), (140, 42)
EACH = (SMALL, WIDE)
SCENES: Mapping[str, tuple[tuple[Step, ...], tuple[tuple[int, int], ...]]] = {
    "overview": ((HELD,), EACH),
    "overview-figures": ((AT_HUB, ("overview figures", curves_at_coordinator())), (WIDE,)),
    "coordinator": ((coordinator(),), EACH),
    "loading": ((waits,), (SMALL,)),
    "help": ((HELD, "enter question_mark"), (SMALL,)),
    "palette": ((HELD, "ctrl+p l o c"), (SMALL,)),
    "approval": ((HELD, "enter"), EACH),
    "approvals": ((silo(release(), release(id="r1/hospital_a/1")), "3 j"), EACH),
    "release-findings": ((unlocked, FOUND, "enter", "f", FOUND, "escape", FOUND), (SMALL,)),
    "release-payload": (
        (unlocked, QUIET, "enter", "v", QUIET, "r", sent, ("payload", approving.PAYLOAD)), (SMALL,),
    ),
    "release-comparison": ((unlocked, QUIET, "enter", "d", ("comparison", approving.COMPARED)), (SMALL,)),
    "outbox": ((*OUTBOX, DENIED), EACH),
    "inbox": (
        (*OUTBOX, "tab", ("inbox", {**outbox.page(9), "messages": CAME, "next": None}),
         ("inbox record 9", outbox.decision(9, "allow"))),
        (SMALL,),
    ),
    "message": ((*OUTBOX, "enter", DENIED), EACH),
    "coordinator-outbox": (
        (*SENT, ("outbox record run-1/3/public.step/hospital_b", at_coordinator.ONE)), (SMALL,),
    ),
    "audit": (AUDIT, EACH),
    "audit-record": ((*AUDIT, "enter"), (SMALL,)),
    "audit-broken": ((silo(), "6", logged(BROKEN), "j"), (SMALL,)),
    "coordinator-audit": ((coordinator(), "6", logged(audit.Log(71, status=at_coordinator.STATUS))), (SMALL,)),
    "round": (ROUND, EACH),
    "round-compared": ((*ROUND, "c", ("round run-1 1", round_before())), (SMALL,)),
    "round-silo": ((silo(), "2", ("round newest newest", at_silo()), "j j"), (SMALL,)),
    "curves": (CURVES, EACH),
    "curves-table": ((*CURVES, "T j"), (SMALL,)),
    "curves-silo": (
        (silo(), "4", ("curves step", OF_SILO), ("curves pass_at_1 step", OF_SILO), "tab",
         ("curves reward_mean step", OF_SILO)),
        (SMALL,),
    ),
    "budget": ((*BUDGET, "j"), EACH),
    "budget-capacity": ((*BUDGET, "tab", "j"), (SMALL,)),
    "certs": (CERTS, EACH),
    "certificate": ((*CERTS, "enter"), (SMALL,)),
    "logs": (LOGGED, EACH),
    "logs-whole": ((*LOGGED, "w", "j", "j"), (SMALL,)),
    "settings": ((silo(), "0", ("settings", SETTINGS)), EACH),
}  # fmt: skip
VARIED = ("overview", "approval")  # at the smallest size also in light, mono and ASCII
DRAWN = [(name, size) for name, (_, sizes) in SCENES.items() for size in sizes]


@pytest.mark.quick(keep=6)
@pytest.mark.exhaustive(keep=15)
@pytest.mark.parametrize(("scene", "size"), DRAWN, ids=lambda value: value if isinstance(value, str) else f"{value[0]}")
async def test_it_looks_as_kept(scene: str, size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await play(desk, *SCENES[scene][0])
        dumps.compare(f"{scene}-{size[0]}x{size[1]}", desk)
        if scene in VARIED and size == SMALL:
            await dumps.compare_variants(f"{scene}-80x24", desk)


def test_no_dump_is_kept_that_no_scene_draws() -> None:
    drawn = {f"{name}-{width}x{height}" for name, (width, height) in DRAWN}
    drawn |= {f"{name}-80x24-{variant}" for name in VARIED for variant in (*dumps.OTHER_THEMES, "ascii")}
    assert {path.stem for path in dumps.FOLDER.iterdir()} == drawn


async def test_another_look_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("KEEP_DUMPS", raising=False)
    monkeypatch.setitem(THEMES, "fed-dark", replace(THEMES["fed-dark"], warning="#ff0000"))  # one colour of a state
    async with console() as desk:
        await desk.show(HELD)
        with pytest.raises(AssertionError, match=r"\+\w bold #f[ef]0000 on #0e1116") as noticed:
            dumps.compare("overview-80x24", desk)
        (now,) = tmp_path.rglob("overview-80x24.txt")
        assert str(now) in str(noticed.value) and str(dumps.FOLDER / now.name) in str(noticed.value)
        assert now.read_text().endswith(dumps.styles(desk))
        await desk.press("y")
        with pytest.raises(AssertionError, match="copied"):
            dumps.compare("overview-80x24", desk)
