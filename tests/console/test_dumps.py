"""How the screens look, line by line, at three sizes; `tests.console.dumps` says how to keep a new look."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from console.theme import THEMES
from tests.console import dumps
from tests.console.desk import SIZES, Desk, console
from tests.console.states import Happened, coordinator, release, silo
from tests.console.test_tables import opened


async def overview(desk: Desk) -> None:
    await desk.show(silo(release()), events=[Happened(3, "task.done", {"task": "PrivateStep", "round": 1})])


async def overview_of_a_coordinator(desk: Desk) -> None:
    await desk.show(coordinator())


async def loading(desk: Desk) -> None:
    await desk.wait(3.0)
    desk.app.tick()
    await desk.pilot.pause()


async def approval(desk: Desk) -> None:
    await overview(desk)
    await desk.press("enter")


async def approvals(desk: Desk) -> None:
    await desk.show(silo(release(), release(id="r1/hospital_a/1")))
    await desk.press("3", "j")


async def help_of_approval(desk: Desk) -> None:
    await approval(desk)
    await desk.press("question_mark")


async def palette(desk: Desk) -> None:
    await overview(desk)
    await desk.press("ctrl+p", "l", "o", "c")


async def table(desk: Desk) -> None:
    await opened(desk)
    await desk.press("j", "j")


SCENES: Mapping[str, Callable[[Desk], Awaitable[None]]] = {
    "overview": overview, "coordinator": overview_of_a_coordinator, "loading": loading, "approval": approval,
    "help": help_of_approval, "palette": palette, "table": table, "approvals": approvals,
}  # fmt: skip
VARIED = ("overview", "approval", "approvals")  # also in light, mono and ASCII (console design 11.3), as the outbox is


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("scene", SCENES)
async def test_it_looks_as_kept(scene: str, size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await SCENES[scene](desk)
        dumps.compare(f"{scene}-{size[0]}x{size[1]}", desk)
        if scene in VARIED:
            await dumps.compare_variants(f"{scene}-{size[0]}x{size[1]}", desk)


async def test_another_look_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("KEEP_DUMPS", raising=False)
    monkeypatch.setitem(THEMES, "fed-dark", replace(THEMES["fed-dark"], warning="#ff0000"))  # one colour of a state
    async with console() as desk:
        await overview(desk)
        with pytest.raises(AssertionError, match=r"\+\w bold #f[ef]0000 on #0e1116") as noticed:
            dumps.compare("overview-80x24", desk)
        (now,) = tmp_path.rglob("overview-80x24.styles")
        assert str(now) in str(noticed.value) and str(dumps.FOLDER / now.name) in str(noticed.value)
        assert now.read_text() == dumps.styles(desk)
        await desk.press("y")
        with pytest.raises(AssertionError, match="copied"):
            dumps.compare("overview-80x24", desk)
