"""Several daemons in one console: what is left behind, what is named, and that nothing of one is shown as another's."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from console import app as app_module
from console.app import Attachment, ContextConsole, is_production
from console.base import Arrived, FedScreen
from console.dialogs import ChooseDialog
from console.lock import KeyFiles
from console.orders import approval
from console.screens.approval import ApprovalScreen
from console.screens.outbox import OutboxScreen
from console.screens.overview import OverviewScreen
from fedsilo.cli import console as cli_console
from fedsilo.cli.contexts import ContextEntry, write
from fedsilo.protocol.errors import FedSiloError, UsageError
from fedsilo.views.conditions import NOT_READ
from fedsilo.views.lines import to_text
from fedsilo.views.state import Link
from tests.console.daemon import Daemon
from tests.console.desk import Desk, Signer
from tests.console.site_answers import CERTIFICATES
from tests.console.states import live, release, silo
from tests.console.test_outbox import page
from tests.console.test_safe import TOGETHER


def attachment(name: str, site: str, **changes: Any) -> Attachment:
    def nobody() -> Any:
        raise AssertionError("not read in this test")

    return replace(Attachment(name, nobody, f"/run/{name}.sock", site, Signer()), **changes)


ATTACHMENTS = [attachment("prod", "hospital_a"), attachment("preview", "hospital_b"), attachment("test", "clinic_e")]


@asynccontextmanager
async def console(
    *attachments: Attachment, size: tuple[int, int] = (100, 30), **options: Any
) -> AsyncIterator[tuple[Desk, ContextConsole]]:
    clock = [100.0]
    app = ContextConsole(attachments or ATTACHMENTS, clock=lambda: clock[0], driven_by_hand=True, **options)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield Desk(app, pilot, Signer(), clock), app


def at_b() -> dict[str, Any]:
    return silo(silo="hospital_b", run="run-9")


# ---- what is left behind ---------------------------------------------------------------------------


@pytest.mark.slow
async def test_nothing_of_the_former_daemon_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console() as (desk, app):
        written: list[str] = []
        monkeypatch.setattr(app._driver, "write", written.append)
        await desk.show(silo(release()))
        await desk.press("8")
        await desk.answer("certificates", CERTIFICATES)
        await desk.press("5")
        await desk.answer("outbox", page(250))
        await desk.press("j", "j", "slash", *"lora", "enter", "w")
        before = desk.app.screen
        assert isinstance(before, OutboxScreen) and before.table.rows.cursor and before.table.rows.filter_text
        desk.unlock()
        app.open_release(app.snapshot.held[0])
        await desk.pilot.pause()
        shown = app.screen
        assert isinstance(shown, ApprovalScreen) and app.lock.open and app.banner[1] == ("[PROD]", "bad")
        await desk.go("ctx preview")
        assert app.here is ATTACHMENTS[1] and not app.lock.open
        assert [type(screen) for screen in app.screen_stack if isinstance(screen, FedScreen)] == [OverviewScreen]
        assert app.why_not_send(approval(shown.shown)) and app.banner[1] == ("[preview]", "accent")
        assert app.signing.signer is ATTACHMENTS[1].signer and app.signing.site == "hospital_b"
        assert app.snapshot.state is None and app.snapshot.answers == {} and app.snapshot.events == ()
        assert "hospital_a" not in desk.text and desk.text.startswith(" [preview]")
        # the terminal's title counts what the attached daemon needs, before it has answered
        titles = [text for text in written if "]2;" in text]
        assert titles == ["\x1b]2;(1) fedconsole\x07", "\x1b]2;fedconsole\x07"] and app.title == "fedconsole"
        gone = replace(live(silo()), link=Link("disconnected", "nothing listens there", "", 100.0, 109.0))
        await desk.show(live(silo()))  # the same site's name, another daemon
        await desk.show(gone)
        await desk.press("8")
        desk.shows(NOT_READ, lacks=["to put right"])
        await desk.show(silo(silo="hospital_b", run="run-9"))
        await desk.press("5")
        after = desk.app.screen
        assert isinstance(after, OutboxScreen) and after is not before and not after.table.rows.arrived
        assert after.table.rows.cursor == "" and after.table.rows.filter_text == ""
        await desk.press("colon", "up")
        assert "ctx preview" not in desk.text  # what was typed there is not here


async def test_what_the_former_reader_still_had_on_its_way_is_not_shown_under_another_name() -> None:
    async with console(read_only=True) as (desk, app):
        former = app.reader
        app.post_message(Arrived(live(silo(release())), former))
        await desk.pilot.pause()
        assert app.snapshot.site == "hospital_a"
        await desk.go("ctx preview")
        app.post_message(Arrived(live(silo(release())), former))
        await desk.pilot.pause()
        assert app.snapshot.state is None
        app.post_message(Arrived(live(at_b(), at=desk.now), app.reader))
        await desk.pilot.pause()
        assert app.snapshot.site == "hospital_b" and app.read_only
        await desk.press("L")
        assert not app.lock.open


async def test_the_reader_is_another_and_the_former_one_ends_even_if_its_daemon_hangs() -> None:
    first, second = Daemon(silo(release())), Daemon(at_b())
    there = [
        attachment("a", "hospital_a", connect=lambda: first), attachment("b", "hospital_b", connect=lambda: second),
    ]  # fmt: skip
    async with console(*there) as (desk, app):
        app.read_from(there[0].connect)
        try:
            await until(desk, lambda: app.snapshot.site == "hospital_a")
            first.free.clear()
            reads = first.reads
            await until(desk, lambda: first.reads > reads)  # it waits for a daemon that does not answer
            began = time.monotonic()
            app.attach("b")
            # to wait for the former reader would take six seconds; this is some drawing, on a machine that is busy
            assert time.monotonic() - began < 3.0
            await until(desk, lambda: app.snapshot.site == "hospital_b")
            first.free.set()
            await until(desk, first.closed.is_set)
            assert app.snapshot.site == "hospital_b"
        finally:
            first.free.set()
            app.stop_reading()


async def until(desk: Desk, holds: Any) -> None:
    for _ in range(1_000):
        if holds():
            return
        await desk.pilot.pause(0.01)
    raise AssertionError("not within 10 s")


@pytest.mark.slow
async def test_while_an_answer_is_on_its_way_nobody_leaves() -> None:
    gate = threading.Event()
    async with console() as (desk, app):
        await desk.show(silo(release()))
        app.run_worker(lambda: gate.wait(20), thread=True, group="answers")
        await desk.pilot.pause()
        await desk.go("ctx test")
        assert app.here is ATTACHMENTS[0]
        gate.set()
        await app.workers.wait_for_complete()
        await desk.go("ctx test")
        assert app.here is ATTACHMENTS[2]


# ---- going there -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_names_go_by_their_beginning_and_what_fits_none_or_several_says_so() -> None:
    async with console() as (desk, app):
        await desk.show(silo())
        for typed, told in (
            ("ctx pr", "pr is the beginning of prod, preview"),
            ("ctx nothing", "there are prod, preview, test"),
            ("ctx prod", "this is prod"),
        ):
            await desk.go(typed)
            desk.shows(told)
            assert app.here is ATTACHMENTS[0]
        await desk.go("ctx")
        assert isinstance(app.screen, ChooseDialog)
        await desk.press("down", "enter")
        await desk.pilot.pause()
        assert app.here is ATTACHMENTS[1]
        await desk.press("ctrl+p", *"ctxtest", "enter")
        await desk.pilot.pause()
        assert app.here is ATTACHMENTS[2]


async def test_one_daemon_alone_has_no_banner_and_nowhere_to_go() -> None:
    async with console(ATTACHMENTS[0], named=False) as (desk, app):
        await desk.show(silo())
        assert app.banner == () and "[PROD]" not in desk.text and app.contexts_to_go(each=True) == []
        await desk.go("ctx test")
        desk.shows("there is prod")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("prod", True), ("PROD", True), ("silo:prod", True), ("eu-production", True), ("live_eu", True), ("test", False),
     ("product", False), ("reproduction", False), ("alive", False)],
)  # fmt: skip
def test_what_is_called_production_is_known_by_a_part_of_its_name(name: str, is_one: bool) -> None:
    assert is_production(name) == is_one


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize("name", TOGETHER)
async def test_T37_a_hostile_name_draws_no_control_character(name: str) -> None:
    async with console(attachment(TOGETHER[name], "a"), attachment("b", TOGETHER[name])) as (desk, app):
        await desk.show(silo())
        for keys in ((), ("colon", *"ctx", "enter"), ("escape", "ctrl+p"), ("escape",)):
            await desk.press(*keys)
            desk.is_harmless()
        assert len(to_text([app.banner])) <= app_module.BANNER_CELLS_MAX + 3


# ---- the command -----------------------------------------------------------------------------------


def test_contexts_are_given_by_flag_or_kept_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "contexts.yaml"
    monkeypatch.setenv("FEDSILO_CONTEXTS", str(file))

    def names(*given: str) -> list[tuple[str, str]]:
        return [(each.name, str(each.socket)) for each in cli_console.contexts_of(None, list(given))]

    with pytest.raises(UsageError):
        names()
    assert names("prod=silo:a=/a.sock", "coordinator=/hub.sock") == [("prod", "/a.sock"), ("coordinator", "/hub.sock")]
    with pytest.raises(UsageError, match="two contexts are called prod"):
        names("prod=silo:a=/a.sock", "prod=silo:b=/b.sock")
    entries = {name: ContextEntry(name, "silo", Path(f"/{name}.sock"), name) for name in ("x", "y", "prod")}
    write(entries, "y", file)
    assert [name for name, _ in names()] == ["y", "x", "prod"]
    assert names("prod=silo:a=/a.sock") == [("prod", "/a.sock")]
    assert names("prod=silo:a=/a.sock", "x") == [("prod", "/a.sock"), ("x", "/x.sock"), ("y", "/y.sock")]
    with pytest.raises(FedSiloError, match="no context 'z'"):
        names("z")
    assert [(each.socket, each.site) for each in cli_console.contexts_of(Path("/b.sock"), [])] == [
        (Path("/b.sock"), "")
    ]
    own = ContextEntry("x", "silo", Path("s"), "x", None, Path("own.crt"), Path("own.key"))
    given, none = (Path("a.crt"), Path("a.key")), (None, None)
    for flags, entry, files in (
        (given, own, KeyFiles(*given)),
        (none, own, KeyFiles(Path("own.crt"), Path("own.key"))),
        (none, None, None),
    ):
        assert cli_console.key_files_of(flags, entry) == files  # type: ignore[arg-type]


def test_once_and_a_recording_are_of_one_daemon(tmp_path: Path) -> None:
    both = ["--context", f"a=silo:a={tmp_path}/a.sock", "--context", f"b=silo:b={tmp_path}/b.sock"]
    refused = CliRunner().invoke(cli_console.app, [*both, "--once"])
    assert refused.exit_code == 2 and "of one daemon" in refused.stderr
    alone = CliRunner().invoke(cli_console.app, [*both[:2], "--once"])
    assert alone.exit_code == 3 and "does not exist" in alone.stderr


def test_settings_say_which_flag_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli_console.origins_of("", ascii_only=False, read_only=False) == {}
    assert cli_console.origins_of("fed-light", ascii_only=True, read_only=True) == {
        "theme": "flag --theme", "ascii": "flag --ascii", "read-only": "flag --read-only",
    }  # fmt: skip
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli_console.origins_of("", ascii_only=False, read_only=False) == {"theme": "env NO_COLOR"}
    assert cli_console.origins_of("fed-dark", ascii_only=False, read_only=False) == {"theme": "flag --theme"}
