"""Screen 0: the value in use and where it comes from, and what of this console can be set here."""

from __future__ import annotations

from typing import Any

import pytest

from console.screens.settings import SettingsScreen
from console.theme import THEMES
from fedsilo.views import settings
from tests.console.desk import Desk, console
from tests.console.site_answers import SETTINGS
from tests.console.states import coordinator, silo


async def opened(desk: Desk, answer: Any = SETTINGS) -> SettingsScreen:
    await desk.show(silo())
    await desk.press("0")
    await desk.answer("settings", answer)
    screen = desk.app.screen
    assert isinstance(screen, SettingsScreen)
    return screen


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "no value"), ("", '""'), (True, "true"), (False, "false"), (0, "0"), (1.5, "1.5"), ([], "none"),
     (["a", None, 2], "a, no value, 2"), ({"a": [True]}, "a: true"), ("x", "x")],
)  # fmt: skip
def test_a_value_that_is_not_there_looks_different_from_an_empty_one(value: Any, words: str) -> None:
    assert settings.value_words(value) == words


async def test_what_is_in_use_stands_beside_where_it_comes_from() -> None:
    async with console((100, 30)) as desk:
        screen = await opened(desk)
        line = next(each for each in desk.text.splitlines() if "state_dir" in each)
        assert "/var/lib/fedsilo/hospital_a" in line and "silo.yaml:4" in line
        line = next(each for each in desk.text.splitlines() if "trainer.threads" in each)
        assert "no value" in line and "default" in line
        assert "6 of the silo's 9 settings are set" in desk.text and "never here" in desk.text
        assert "The 6 of this console stand below (G)" in " ".join(desk.text.split()) and "Settings · 15" in desk.text
        assert screen.twin() == "silo settings"
        assert screen.inspected()["key"] == "silo" and desk.text.index("syslog.enabled") < desk.text.index(
            "console: theme"
        )
        await desk.press(*"Gkkkkkkk", "enter")
        for words in ("/data/a.jsonl", "/data/b.jsonl", "Change it there: silo.yaml:22", "silo check", "silo settings"):
            assert words in desk.text
        await desk.press("escape", "k", "enter")
        assert "It stands in no file" in desk.text


async def test_the_consoles_own_change_with_enter_and_nothing_of_the_daemon_does() -> None:
    async with console((100, 30), origins={"theme": "flag --theme"}) as desk:
        screen = await opened(desk)
        assert desk.app.theme == "fed-dark" and "flag --theme" in desk.text
        names = list(THEMES)
        await desk.press(*"Gkkkkk")
        for name in (*names[1:], names[0]):
            await desk.press("enter")
            assert desk.app.theme == name
        assert "here" in next(each for each in desk.text.splitlines() if " theme " in each)
        await desk.press("j", "enter")
        assert desk.app.ascii_only and desk.text.isascii()
        await desk.press("enter", "j", "enter")
        assert not desk.app.ascii_only and "? lists the keys of each screen" in desk.text
        await desk.press("escape", "j", "j", "enter")
        assert "cannot be unlocked" in desk.text
        await desk.press("escape")
        assert screen.inspected() == {"of": "console", "key": "read-only", "value": "false", "origin": "default"}
        assert await desk.answers_sent() == []


async def test_a_read_only_console_says_so() -> None:
    async with console((100, 30), read_only=True, origins={"read-only": "flag --read-only"}) as desk:
        await opened(desk)
        line = next(each for each in desk.text.splitlines() if " read-only " in each)
        assert "true" in line and "flag --read-only" in line


async def test_without_an_answer_the_consoles_own_stand_there_all_the_same() -> None:
    async with console((100, 30)) as desk:
        await desk.show(coordinator())
        await desk.press("0")
        assert "fed-dark" in desk.text and desk.app.top.twin() == "coordinator settings"
        await desk.answer("settings", None, refused=("NOT_FOUND", "there is no query 'settings'"))
        assert "[NOT_FOUND]" in desk.text and "fed-dark" in desk.text
        await desk.answer("settings", [{"key": "hub", "value": 1, "origin": "coordinator.yaml:1"}])
        assert "1 of the coordinator's 1 settings" in desk.text
