"""`e`: what may be shared, what takes the word, who can read the file, and that nothing is ever replaced."""

from __future__ import annotations

import csv
import io
import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.widgets import Input

from console import export
from console.actions import ACTIONS, PLACE_TWINS, Context
from console.export import Sheet, done_text, everything, path_of, released, text_in, write_export
from console.screens.exports import ExportDialog
from console.sharing import QUERIES, released_answer
from fedsilo.treaty.errors import ConflictError, OperationError, UsageError
from tests.console.desk import Desk, console
from tests.console.site_answers import CERTIFICATES, LOGS
from tests.console.states import coordinator, release, silo
from tests.console.test_actions import refusal
from tests.console.test_audit_screen import Log
from tests.console.test_outbox import message, page
from tests.console.test_safe import TOGETHER

LOCAL_COLUMNS = ("rule", "reasons", "rules", "digest", "digest_keyed", "milliseconds")


def sheet(rows: list[dict[str, Any]] | None = None, **changes: Any) -> Sheet:
    rows = rows if rows is not None else [message(seq) for seq in range(40, 0, -1)]
    known: dict[str, Any] = {"query": ("outbox", {"limit": 100}), "rows_in": "messages", "total": 40, **changes}
    return Sheet("outbox", known.pop("shown", rows), rows, **known)


# ---- what may be shared ----------------------------------------------------------------------------


def test_only_released_fields_of_released_rows_are_shared_and_what_is_left_out_is_named() -> None:
    rows = sheet().here
    taken = released(sheet())
    sent = [row for row in rows if row["outcome"] in ("sent", "acked")]
    assert [row["seq"] for row in taken.rows] == [row["seq"] for row in sent] and taken.rows_left_out == 40 - len(sent)
    assert set(taken.left_out) == set(LOCAL_COLUMNS)
    kept = released_answer("outbox", {}, {"messages": list(rows)})
    assert kept is not None and list(taken.rows) == kept[0]["messages"]
    assert set(everything(sheet()).rows[0]) == set(rows[0])


def test_a_filter_or_an_order_by_what_is_local_tells_nothing_in_a_file_that_is_shared() -> None:
    every = sheet()
    chosen = [row for row in every.here if row["rule"] == ""][::-1]
    assert released(sheet(shown=chosen, filter_text="!rule:prompts")).rows == released(every).rows
    assert len(everything(sheet(shown=chosen)).rows) == len(chosen)
    asked = released(sheet(query=("outbox", {"verdict": "deny"})))
    assert asked.rows == [] and "verdict" in asked.why_none


@pytest.mark.parametrize("name", ["certificates", "settings", "logs", "audit", "limits", "", "no such query"])
def test_a_table_of_which_nothing_is_released_cannot_be_shared(name: str, tmp_path: Path) -> None:
    rows = [{"a": 1}]
    taken = released(sheet(rows, query=(name, {}), rows_in=""))
    assert taken.rows == [] and taken.left_out == ("a",) and taken.why_none
    with pytest.raises(UsageError, match="no file was written"):
        write_export(tmp_path / "a.json", sheet(rows, query=(name, {}), rows_in=""), local=False)
    assert not (tmp_path / "a.json").exists()
    write_export(tmp_path / "a.json", sheet(rows, query=(name, {}), rows_in=""), local=True)
    assert json.loads((tmp_path / "a.json").read_text())["rows"] == rows


def test_a_query_that_nobody_classified_shares_nothing() -> None:
    assert "no such query" not in QUERIES
    assert released(sheet(query=("no such query", {}))).why_none


# ---- the file --------------------------------------------------------------------------------------


def test_modes_and_marks(tmp_path: Path) -> None:
    old = os.umask(0)  # a mask that would let everybody write
    try:
        for form in export.FORMS:
            for local in (False, True):
                path = tmp_path / f"{local}.{form}"
                taken = write_export(path, sheet(), local=local)
                assert stat.S_IMODE(path.stat().st_mode) == (0o600 if local else 0o644)
                first = path.read_text().splitlines()[0]
                assert (export.LOCAL_WORD in first and export.LOCAL_MARK in first) == local, first
                assert f"wrote {len(taken.rows)} rows to {path}" in done_text(path, taken, local=local)
    finally:
        os.umask(old)
    assert "mode 0600" in done_text(path, taken, local=True) and "digest" not in done_text(path, taken, local=True)
    shared = released(sheet())
    assert "left out: rule, reasons" in done_text(path, shared, local=False)
    assert f"{shared.rows_left_out} rows not released" in done_text(path, shared, local=False)


def test_no_local_value_is_in_a_file_that_is_shared(tmp_path: Path) -> None:
    mark = "CANARY-7f3a"
    rows = [{**message(seq), **dict.fromkeys(LOCAL_COLUMNS, mark)} for seq in range(30, 0, -1)]
    made = sheet(rows, filter_text=mark, shown=rows)
    made = replace(made, twin=f"silo outbox show {mark}", list_twin="silo outbox list")
    for form in export.FORMS:
        write_export(tmp_path / f"a.{form}", made, local=False)
        assert mark not in (tmp_path / f"a.{form}").read_text()
        write_export(tmp_path / f"b.{form}", made, local=True)
        assert mark in (tmp_path / f"b.{form}").read_text()


def test_the_head_of_a_file_that_is_shared_counts_nothing_that_was_not_released() -> None:
    made = sheet(total=41_977, twin="silo outbox show 12", list_twin="silo outbox list")
    shared, whole = (json.loads(text_in("json", made, taken, local=local)) for local, taken in (
        (False, released(made)), (True, everything(made)),
    ))  # fmt: skip
    assert "41977" not in json.dumps(shared) and shared["rows_in_all"] is None and whole["rows_in_all"] == 41_977
    assert shared["rows_left_out"] is True and whole["rows_left_out"] is False
    assert (shared["twin"], whole["twin"]) == ("silo outbox list", "silo outbox show 12")
    held = sheet([release()], query=("approvals", {}), rows_in="releases", total=7)
    told = json.loads(text_in("json", held, released(held), local=False))
    assert told["rows_in_all"] == 7 and told["rows_left_out"] is False  # by its rule that count is released


def test_each_form_reads_back_as_what_was_taken() -> None:
    taken = everything(sheet())
    whole = json.loads(text_in("json", sheet(), taken, local=True))
    assert whole["rows"] == list(taken.rows) and whole["rows_written"] == 40 and whole["schema"] == export.SCHEMA
    first, *lines = text_in("jsonl", sheet(), taken, local=True).splitlines()
    assert [json.loads(each) for each in lines] == list(taken.rows) and json.loads(first)["holds"] == "LOCAL"
    shared = released(sheet())
    rows = list(csv.DictReader(io.StringIO(text_in("csv", sheet(), shared, local=False))))
    assert [row["kind"] for row in rows] == [row["kind"] for row in shared.rows]
    assert [int(row["seq"]) for row in rows] == [row["seq"] for row in shared.rows]


@pytest.mark.parametrize(
    "text",
    ["=cmd|'/c calc'!A0", "+1", "-1+2", "@SUM(A1)", "\t=1", "\uff1d1", " =1", "\r@x", *TOGETHER.values(), "\ud800"],
)
def test_T37_no_form_holds_what_a_terminal_or_a_spreadsheet_obeys(text: str, tmp_path: Path) -> None:
    made = sheet([{"seq": 1, "a": text, text: [text]}])
    for form in export.FORMS:
        write_export(tmp_path / f"a.{form}", made, local=True)
        found = (tmp_path / f"a.{form}").read_text("utf-8")
        assert all(character.isprintable() or character == "\n" for character in found)
    rows = list(csv.reader(io.StringIO((tmp_path / "a.csv").read_text("utf-8"))))[1:]
    assert not [cell for row in rows for cell in row if cell.lstrip().startswith(("=", "+", "-", "@", "\uff1d"))]
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["a"] == text


def test_a_number_stays_a_number_in_csv() -> None:
    made = sheet([{"a": -1.5, "b": None, "c": True, "d": [1]}])
    assert text_in("csv", made, everything(made), local=False) == "a,b,c,d\n-1.5,,true,[1]\n"


def test_nothing_is_replaced_and_no_link_is_followed(tmp_path: Path) -> None:
    there, target = tmp_path / "a.json", tmp_path / "other"
    there.write_text("mine")
    (tmp_path / "link.json").symlink_to(target)
    for path in (there, tmp_path / "link.json"):
        with pytest.raises(ConflictError, match="exists already"):
            write_export(path, sheet(), local=False)
    assert there.read_text() == "mine" and not target.exists()
    write_export(tmp_path / "b.json", sheet(), local=False)
    with pytest.raises(OperationError, match="No such file or directory"):
        write_export(tmp_path / "none" / "a.json", sheet(), local=False)


def test_a_disk_that_is_full_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> None:
        os.write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(export, "write_all", full)
        with pytest.raises(OperationError, match="No space left"):
            write_export(tmp_path / "a.json", sheet(), local=False)
    assert list(tmp_path.iterdir()) == []
    write_export(tmp_path / "a.json", sheet(), local=False)


def test_a_value_that_is_no_json_is_said_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="cannot be written as JSON"):
        write_export(tmp_path / "a.json", sheet([{"a": float("nan")}]), local=True)
    assert list(tmp_path.iterdir()) == []


def test_a_path_is_what_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert path_of("~/a.csv") == tmp_path / "a.csv" and path_of(" b.JSON ") == tmp_path / "b.JSON"
    for typed in ("", "  ", "a", "a.txt", "a.csv.gz", "~nobody-of-that-name/a.csv"):
        with pytest.raises(UsageError):
            path_of(typed)


def test_every_place_with_a_table_has_a_list_command_with_json() -> None:
    twin = next(action.twin for action in ACTIONS if action.name == "export")
    assert twin is not None
    for place in PLACE_TWINS:
        for at_coordinator in (False, True):
            words = twin(Context(coordinator=at_coordinator, place=place))
            assert words[-1] == "--json" and refusal(words) == "", words


# ---- the dialog ------------------------------------------------------------------------------------


async def type_in(desk: Desk, text: str) -> None:
    for character in text:
        desk.pass_time(0.05)  # as quick hands do
        await desk.pilot.press({".": "full_stop", "/": "slash"}.get(character, character))
    await desk.pilot.pause()


async def enter(desk: Desk) -> None:
    await desk.pilot.press("enter")
    await desk.app.workers.wait_for_complete()
    await desk.pilot.pause()
    await desk.wait(0.1)


async def test_a_table_is_shared_or_taken_whole_with_the_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with console((100, 42)) as desk:
        await desk.show(silo())
        await desk.press("5")
        await desk.answer("outbox", page(250))
        await desk.press("e")
        assert isinstance(desk.app.screen, ExportDialog) and "Left out: rule, reasons" in desk.text
        assert "100 rows are here of 250; the others were not asked for yet" in desk.text
        await enter(desk)
        assert "type the file to write" in desk.text
        await type_in(desk, "a")
        await enter(desk)
        assert "says the form, and 'a' has none" in desk.text
        await desk.pilot.press("down", "down")
        assert not list(tmp_path.iterdir())
        await enter(desk)
        said = " ".join(desk.text.split())
        assert not isinstance(desk.app.screen, ExportDialog) and "wrote 85 rows" in said and "left out: rule," in said
        whole = json.loads((tmp_path / "a.json").read_text())
        assert whole["holds"] == "released" and whole["daemon"] == "silo:hospital_a"
        assert "digest" not in whole["rows"][0]
        assert whole["as_of"].startswith("2026-12-01T10:00") and whole["twin"] == "silo outbox list"
        await desk.press("e")
        await type_in(desk, "a.json")
        await enter(desk)
        assert "exists already" in desk.text and isinstance(desk.app.screen, ExportDialog)
        await desk.pilot.press("backspace", "backspace", "backspace", "backspace", "backspace")
        await type_in(desk, "b.jsonl")
        await desk.pilot.press("tab")
        for word in ("local", "LOCAL"):
            await type_in(desk, word)
            await enter(desk)
            assert ("the word is LOCAL" in desk.text) == (word == "local")
            if word == "local":
                assert not (tmp_path / "ab.jsonl").exists()
                await desk.pilot.press(*["backspace"] * 5)
        assert "mode 0600" in desk.text
        lines = (tmp_path / "ab.jsonl").read_text().splitlines()
        assert len(lines) == 101 and "digest" in lines[1] and export.LOCAL_MARK in lines[0]
        assert await desk.answers_sent() == []


async def test_each_list_twin_is_a_command_and_names_no_row() -> None:
    async with console((100, 30)) as desk:
        for state, key, more, name, twin in (
            (silo(release()), "3", "", "", "silo approvals list"), (silo(), "5", "", "outbox", "silo outbox list"),
            (silo(), "5", "tab", "inbox", "silo inbox list"),
            (coordinator(), "5", "", "inbox", "coordinator inbox list"),
        ):  # fmt: skip
            await desk.show(state)
            await desk.press(key, *([more] if more else []))
            if name:
                await desk.answer(name, page(5))
            await desk.press("e")
            assert isinstance(desk.app.screen, ExportDialog)
            assert desk.app.screen._sheet.list_twin == twin and refusal((*twin.split(),)) == ""
            assert desk.app.screen._sheet.twin != twin
            await desk.press("escape")


async def test_the_list_twin_of_the_audit_log_has_control_messages_when_the_rows_have() -> None:
    async with console((100, 30)) as desk:
        await desk.show(coordinator())
        await desk.press("6")
        for keys, twin in ((), "coordinator audit list --no-control"), (("c",), "coordinator audit list"):
            await desk.press(*keys, "e")
            assert isinstance(desk.app.screen, ExportDialog) and desk.app.screen._sheet.list_twin == twin
            await desk.press("escape")


async def test_a_fault_while_it_writes_is_said_and_the_dialog_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise MemoryError

    monkeypatch.chdir(tmp_path)
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("5")
        await desk.answer("outbox", page(5))
        await desk.press("e")
        await type_in(desk, "a.csv")
        with monkeypatch.context() as patch:
            patch.setattr(export, "write_all", broken)
            await enter(desk)
        assert "(MemoryError)" in desk.text and "writing" not in desk.text.replace("the writing", "")
        assert not list(tmp_path.iterdir())
        await enter(desk)
        assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.parametrize("size", [(60, 16), (80, 24)])
async def test_a_refusal_is_seen_on_a_low_screen(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("mine")
    async with console(size) as desk:
        await desk.show(silo())
        await desk.press("5")
        await desk.answer("outbox", page(250))
        await desk.press("e")
        assert "Enter writes, esc leaves" in desk.text and "empty: what was released" in desk.text
        await type_in(desk, "a.csv")
        await enter(desk)
        said = " ".join(desk.text.replace("│", " ").split())
        assert "exists already" in said and "give another name" in said and "empty: what was released" in said
        assert "a.csv" in desk.text.split("format, as")[0].splitlines()[-2]


async def test_a_paste_that_comes_as_keys_is_no_word() -> None:
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("5")
        await desk.answer("outbox", page(5))
        await desk.press("e", "tab")
        await desk.pilot.press(*"LOCAL")
        await desk.pilot.pause()
        assert desk.app.screen.query_one("#word", Input).value != "LOCAL"
        await desk.wait(1)
        desk.app.screen.query_one("#word", Input).value = ""
        await type_in(desk, "LOCAL")
        assert desk.app.screen.query_one("#word", Input).value == "LOCAL"


async def test_a_paste_into_the_word_is_no_typing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with console((100, 30)) as desk:
        await desk.show(silo())
        await desk.press("8")
        await desk.answer("certificates", CERTIFICATES)
        await desk.press("e")
        assert "Nothing to share" in desk.text
        field, word = desk.app.screen.query_one("#path", Input), desk.app.screen.query_one("#word", Input)
        field.post_message(events.Paste("a\x1b]0;x.csv\nsecond"))
        word.post_message(events.Paste("LOCAL"))
        await desk.pilot.pause()
        assert field.value == "a]0;x.csv" and word.value == ""
        await enter(desk)
        assert "no file was written" in desk.text and not list(tmp_path.iterdir())
        await desk.press("escape")
        assert not isinstance(desk.app.screen, ExportDialog)


async def test_every_table_of_the_console_can_be_exported_and_carries_its_query() -> None:
    log = Log(71)
    found: dict[str, Sheet] = {}
    async with console((80, 24)) as desk:
        for key, name, answer in (
            ("3", "", None), ("5", "outbox", page(250)), ("6", "audit", log.query(("audit", {"limit": 100}))),
            ("8", "certificates", CERTIFICATES), ("9", "logs", LOGS), ("0", "settings", []),
        ):  # fmt: skip
            await desk.show(silo(release()))
            await desk.press(key)
            if key == "6":
                await desk.answer("audit.status", log.status)
            if name:
                await desk.answer(name, answer)
            await desk.press("e")
            assert isinstance(desk.app.screen, ExportDialog)
            found[key] = desk.app.screen._sheet
            await desk.press("escape")
    assert [found[key].query[0] for key in "356890"] == [
        "approvals", "outbox", "audit", "certificates", "logs", "settings",
    ]  # fmt: skip
    assert found["6"].about["checkpoint"] == log.status["checkpoint"]
    held = released(found["3"])
    assert held.rows and "digest" in held.left_out and "bytes" in held.left_out and "given" in held.left_out
    assert set(held.rows[0]) <= {"id", "kind", "state", "held_since", "expires_at"}
    assert not any(name.startswith("_") for row in everything(found["8"]).rows for name in row)


async def test_at_a_coordinator_the_file_names_it() -> None:
    async with console((100, 30)) as desk:
        await desk.show(coordinator())
        await desk.press("9")
        await desk.answer("logs", LOGS)
        await desk.press("e")
        assert isinstance(desk.app.screen, ExportDialog)
        assert desk.app.screen._sheet.about["daemon"] == "coordinator:hub"
        assert desk.app.screen._sheet.twin == "coordinator logs"
