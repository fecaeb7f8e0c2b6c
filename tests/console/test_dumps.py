"""How the screens look, cell by cell: each screen at the smallest and at a wide size, each of its other views at one.

`tests.console.dumps` says how to keep a new look.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from console.theme import THEMES
from tests.console import dumps
from tests.console import test_audit_screen as audit
from tests.console import test_coordinator_desk as at_coordinator
from tests.console import test_curves_screen as curves
from tests.console import test_outbox as outbox
from tests.console import test_round_screen as rounds
from tests.console import test_T36_approving as approving
from tests.console.desk import Desk, console
from tests.console.rounds import at_silo, curves_at_coordinator, curves_at_silo, round_before
from tests.console.site_answers import CERTIFICATES, LOGS, SETTINGS
from tests.console.states import Happened, coordinator, release, silo
from tests.console.test_budget_screen import LIMITS


async def _overview(desk: Desk) -> None:
    await desk.show(silo(release()), events=[Happened(3, "task.done", {"task": "PrivateStep", "round": 1})])


async def _coordinator(desk: Desk) -> None:
    await desk.show(coordinator())


async def _overview_figures(desk: Desk) -> None:
    await desk.show(coordinator(), events=[Happened(3, "run.round", {"round": 2})])
    await desk.answer("overview figures", curves_at_coordinator())


async def _loading(desk: Desk) -> None:
    await desk.wait(3.0)
    desk.app.tick()
    await desk.pilot.pause()


async def _approval(desk: Desk) -> None:
    await _overview(desk)
    await desk.press("enter")


async def _help(desk: Desk) -> None:
    await _approval(desk)
    await desk.press("question_mark")


async def _palette(desk: Desk) -> None:
    await _overview(desk)
    await desk.press("ctrl+p", "l", "o", "c")


async def _approvals(desk: Desk) -> None:
    await desk.show(silo(release(), release(id="r1/hospital_a/1")))
    await desk.press("3", "j")


async def _release_findings(desk: Desk) -> None:
    await approving.opened(desk, approving.noticed(approving.DESTINATION, approving.HIT), "f", "escape")


async def _release_payload(desk: Desk) -> None:
    desk.signer.result = approving.TICKET
    await approving.opened(desk, approving.noticed(), "v")
    await desk.press("r")
    await desk.answers_sent()
    await desk.answer("payload", approving.PAYLOAD)


async def _release_comparison(desk: Desk) -> None:
    await approving.opened(desk, approving.noticed())
    await desk.press("d")
    await desk.answer("comparison", approving.COMPARED)


async def _outbox(desk: Desk) -> None:
    await outbox.opened(desk, outbox.page(250))
    await desk.answer("outbox record 250", outbox.decision(250, "deny"))


async def _inbox(desk: Desk) -> None:
    await outbox.opened(desk)
    await desk.press("tab")
    peer = "spiffe://cardio-net/coordinator/main"
    came = [outbox.message(seq, kind="run.plan", peer=peer, outcome="", milliseconds=None) for seq in (9, 8, 7)]
    await desk.answer("inbox", {**outbox.page(9), "messages": came, "next": None})
    await desk.answer("inbox record 9", outbox.decision(9, "allow"))


async def _message(desk: Desk) -> None:
    await outbox.opened(desk)
    await desk.press("enter")
    await desk.answer("outbox record 250", outbox.decision(250, "deny"))


async def _coordinator_outbox(desk: Desk) -> None:
    await at_coordinator.opened(desk)
    await desk.press("j")
    await desk.answer("outbox record run-1/3/public.step/hospital_b", at_coordinator.ONE)


async def _audit(desk: Desk) -> None:
    await audit.opened(desk, audit.Log(18_290))
    await desk.press("j")


async def _audit_record(desk: Desk) -> None:
    await _audit(desk)
    await desk.press("enter")


async def _audit_broken(desk: Desk) -> None:
    broken = {"seq": 18_281, "why": "its previous is not the hash of record 18280"}
    log = audit.Log(18_290)
    log.status = {**log.status, "verified_to": 18_281, "broken": broken, "coordinator": "differs"}
    await audit.opened(desk, log)
    await desk.press("j")


async def _coordinator_audit(desk: Desk) -> None:
    await desk.show(coordinator())
    await desk.press("6")
    await audit.answer_all(desk, audit.Log(71, status=at_coordinator.STATUS))


async def _round(desk: Desk) -> None:
    await rounds.opened(desk)
    await desk.press("j", "j")


async def _round_compared(desk: Desk) -> None:
    await _round(desk)
    await desk.press("c")
    await desk.answer("round run-1 1", round_before())


async def _round_silo(desk: Desk) -> None:
    await rounds.opened(desk, at_silo(), silo())
    await desk.press("j", "j")


async def _curves(desk: Desk) -> None:
    await curves.opened(desk)


async def _curves_table(desk: Desk) -> None:
    await curves.opened(desk)
    await desk.press("T", "j")


async def _curves_silo(desk: Desk) -> None:
    screen = await curves.opened(desk, curves_at_silo(), silo())
    await desk.press("tab")
    await curves.told(desk, screen, curves_at_silo())


def _place(key: str, query: str, answer: object, *more: str) -> Callable[[Desk], Awaitable[None]]:
    """A place of a silo with one answer, and the keys pressed there."""

    async def scene(desk: Desk) -> None:
        await desk.show(silo())
        await desk.press(key)
        await desk.answer(query, answer)
        await desk.press(*more)

    return scene


SMALL, WIDE = (80, 24), (140, 42)
EACH = (SMALL, WIDE)
SCENES: Mapping[str, tuple[Callable[[Desk], Awaitable[None]], tuple[tuple[int, int], ...]]] = {
    "overview": (_overview, EACH),
    "overview-figures": (_overview_figures, (WIDE,)),
    "coordinator": (_coordinator, EACH),
    "loading": (_loading, (SMALL,)),
    "help": (_help, (SMALL,)),
    "palette": (_palette, (SMALL,)),
    "approval": (_approval, EACH),
    "approvals": (_approvals, EACH),
    "release-findings": (_release_findings, (SMALL,)),
    "release-payload": (_release_payload, (SMALL,)),
    "release-comparison": (_release_comparison, (SMALL,)),
    "outbox": (_outbox, EACH),
    "inbox": (_inbox, (SMALL,)),
    "message": (_message, EACH),
    "coordinator-outbox": (_coordinator_outbox, (SMALL,)),
    "audit": (_audit, EACH),
    "audit-record": (_audit_record, (SMALL,)),
    "audit-broken": (_audit_broken, (SMALL,)),
    "coordinator-audit": (_coordinator_audit, (SMALL,)),
    "round": (_round, EACH),
    "round-compared": (_round_compared, (SMALL,)),
    "round-silo": (_round_silo, (SMALL,)),
    "curves": (_curves, EACH),
    "curves-table": (_curves_table, (SMALL,)),
    "curves-silo": (_curves_silo, (SMALL,)),
    "budget": (_place("7", "limits", LIMITS, "j"), EACH),
    "budget-capacity": (_place("7", "limits", LIMITS, "tab", "j"), (SMALL,)),
    "certs": (_place("8", "certificates", CERTIFICATES), EACH),
    "certificate": (_place("8", "certificates", CERTIFICATES, "enter"), (SMALL,)),
    "logs": (_place("9", "logs", LOGS), EACH),
    "logs-whole": (_place("9", "logs", LOGS, "w", "j", "j"), (SMALL,)),
    "settings": (_place("0", "settings", SETTINGS), EACH),
}
VARIED = ("overview", "approval")  # at the smallest size also in light, mono and ASCII (console design 11.3)


@pytest.mark.parametrize(
    ("scene", "size"),
    [
        pytest.param(name, size, id=f"{name}-{size[0]}x{size[1]}")
        for name, (_, sizes) in SCENES.items()
        for size in sizes
    ],
)
async def test_it_looks_as_kept(scene: str, size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await SCENES[scene][0](desk)
        dumps.compare(f"{scene}-{size[0]}x{size[1]}", desk)
        if scene in VARIED and size == SMALL:
            await dumps.compare_variants(f"{scene}-80x24", desk)


def test_no_dump_is_kept_that_no_scene_draws() -> None:
    drawn = {f"{name}-{width}x{height}" for name, (_, sizes) in SCENES.items() for width, height in sizes}
    drawn |= {f"{name}-80x24-{variant}" for name in VARIED for variant in (*dumps.OTHER_THEMES, "ascii")}
    assert {path.stem for path in dumps.FOLDER.iterdir()} == drawn


async def test_another_look_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("KEEP_DUMPS", raising=False)
    monkeypatch.setitem(THEMES, "fed-dark", replace(THEMES["fed-dark"], warning="#ff0000"))  # one colour of a state
    async with console() as desk:
        await _overview(desk)
        with pytest.raises(AssertionError, match=r"\+\w bold #f[ef]0000 on #0e1116") as noticed:
            dumps.compare("overview-80x24", desk)
        (now,) = tmp_path.rglob("overview-80x24.txt")
        assert str(now) in str(noticed.value) and str(dumps.FOLDER / now.name) in str(noticed.value)
        assert now.read_text().endswith(dumps.styles(desk))
        await desk.press("y")
        with pytest.raises(AssertionError, match="copied"):
            dumps.compare("overview-80x24", desk)
