"""Screen 0: the value in use and where it comes from, and what of this console can be set here."""

from __future__ import annotations

from typing import Any

import pytest

from console.theme import THEMES
from fedsilo.views import settings
from tests.console.desk import console
from tests.console.site_answers import SETTINGS
from tests.console.states import coordinator, silo


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "no value"), ("", '""'), (True, "true"), (False, "false"), (0, "0"), (1.5, "1.5"), ([], "none"),
     (["a", None, 2], "a, no value, 2"), ({"a": [True]}, "a: true"), ("x", "x")],
)  # fmt: skip
def test_a_value_that_is_not_there_looks_different_from_an_empty_one(value: Any, words: str) -> None:
    assert settings.value_words(value) == words


@pytest.mark.slow
async def test_the_daemons_say_where_they_are_changed_and_the_consoles_own_change_with_enter() -> None:
    async with console((100, 30), origins={"theme": "flag --theme"}) as desk:
        await desk.show(silo())
        await desk.press("0")
        await desk.answer("settings", SETTINGS)
        screen = desk.app.top
        desk.shows("6 of the silo's 9 settings are set", "The 6 of this console stand below (G)", "flag --theme")
        assert screen.twin() == "silo settings" and screen.inspected()["key"] == "silo"
        await desk.press(*"Gkkkkkkk", "enter")
        desk.shows("/data/a.jsonl", "/data/b.jsonl", "silo.yaml:22", "silo check")
        await desk.press("escape", "k", "enter")
        desk.shows("It stands in no file")
        await desk.press("escape", *"Gkkkkk")
        for name in (*list(THEMES)[1:], next(iter(THEMES))):
            await desk.press("enter")
            assert desk.app.theme == name
        await desk.press("j", "enter")
        assert desk.app.ascii_only and desk.text.isascii()
        await desk.press("enter", "j", "enter")
        assert not desk.app.ascii_only
        desk.shows("? lists the keys of each screen")
        await desk.press("escape", "j", "j", "enter")
        desk.shows("cannot be unlocked")
        await desk.press("escape")
        assert screen.inspected() == {"of": "console", "key": "read-only", "value": "false", "origin": "default"}
        assert await desk.answers_sent() == []


async def test_without_an_answer_the_consoles_own_stand_there_all_the_same() -> None:
    async with console((100, 30), read_only=True, origins={"read-only": "flag --read-only"}) as desk:
        await desk.show(coordinator())
        await desk.press("0")
        assert desk.app.top.twin() == "coordinator settings"
        await desk.answer("settings", None, refused=("NOT_FOUND", "there is no query 'settings'"))
        desk.shows("[NOT_FOUND]", "fed-dark", "flag --read-only")
        await desk.answer("settings", [{"key": "hub", "value": 1, "origin": "coordinator.yaml:1"}])
        desk.shows("1 of the coordinator's 1 settings")
