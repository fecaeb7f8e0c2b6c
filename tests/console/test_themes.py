"""Colour as it is really drawn: contrast of every theme, runs without colour, and screens in ASCII."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.color import Color, ColorType
from rich.segment import Segment
from textual.app import App, ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen

from console.actions import PLACES
from console.base import STYLES, Lines
from console.theme import THEMES
from fedsilo.protocol.errors import FedSiloError
from fedsilo.views.lines import line
from fedsilo.views.state import mapping
from tests.console.desk import Desk, console, open_dialog, type_word
from tests.console.states import Happened, coordinator, release, silo
from tests.policies import setting
from tests.simulated.queries import poll, queries_of
from tests.world import Bench

CONTRAST_MIN = 4.5  # WCAG 2.2, success criterion 1.4.3 (AA), text of usual size
GROUNDS = ("background", "surface", "panel")
WORD = "word"


def luminance(colour: Color) -> float:
    """Relative luminance as WCAG 2.2 defines it: sRGB made linear, then weighted."""

    def linear(channel: int) -> float:
        value = channel / 255
        return value / 12.92 if value <= 0.04045 else float(((value + 0.055) / 1.055) ** 2.4)

    assert colour.triplet is not None, colour
    red, green, blue = map(linear, colour.triplet)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Color, other: Color) -> float:
    """From 1, the same, to 21, black on white."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def drawn(app: App[Any]) -> Iterator[Segment]:
    """What a terminal gets, piece by piece; of a dialog its own box, for what is behind it is dimmed on purpose."""
    strips = app.screen._compositor.render_strips()
    if isinstance(app.screen, ModalScreen):
        box = app.screen.query_one("#box").region
        strips = [strip.crop(box.x, box.right) for strip in strips[box.y : box.bottom]]
    for strip in strips:
        yield from strip


def colours(segment: Segment) -> tuple[Color, Color]:
    style = segment.style
    assert style is not None and style.color is not None and style.bgcolor is not None, segment
    assert not style.dim, segment  # a terminal's own dimming takes contrast that nobody can measure
    return (style.bgcolor, style.color) if style.reverse else (style.color, style.bgcolor)


def worst(app: App[Any]) -> tuple[float, str]:
    """The text with the least contrast; frames and bars are no text."""
    texts = [segment for segment in drawn(app) if any(map(str.isalnum, segment.text))]
    assert texts
    return min((round(contrast(*colours(segment)), 2), segment.text) for segment in texts)


def test_the_formula_is_that_of_the_standard() -> None:
    black, white, grey = Color.parse("#000000"), Color.parse("#ffffff"), Color.parse("#767676")
    assert contrast(white, black) == pytest.approx(21) and contrast(black, black) == 1
    assert round(contrast(grey, white), 2) == 4.54  # the usual example of a grey that just passes


class EveryStyle(App[None]):
    """Each meaning on each ground, drawn by the widget that every screen draws with."""

    CSS = "".join(f"#{ground} {{ background: ${ground}; height: auto; }}" for ground in GROUNDS)

    def compose(self) -> ComposeResult:
        for ground in GROUNDS:
            with Vertical(id=ground):
                yield Lines(id=f"on-{ground}")
                yield Lines(id=f"greyed-on-{ground}")

    def draw(self) -> None:
        rows = [line((f"{WORD} {name or 'plain'}", name)) for name in STYLES]
        for ground in GROUNDS:
            self.query_one(f"#on-{ground}", Lines).draw(rows)
            self.query_one(f"#greyed-on-{ground}", Lines).draw(rows, greyed=True)


@pytest.mark.parametrize("name", THEMES)
async def test_every_meaning_can_be_read_on_every_ground(name: str) -> None:
    app = EveryStyle()
    async with app.run_test(size=(80, 60)) as pilot:
        app.register_theme(THEMES[name])
        app.theme = name
        app.draw()
        await pilot.pause()
        words = [segment for segment in drawn(app) if segment.text.startswith(WORD)]
        assert len(words) == 2 * len(GROUNDS) * len(STYLES)
        assert len({colours(segment)[1].name for segment in words}) == len(GROUNDS)
        poor = {(segment.text, contrast(*colours(segment))) for segment in words}
        assert {each for each in poor if each[1] < CONTRAST_MIN} == set()


async def test_a_theme_of_the_library_would_not_pass() -> None:
    app = EveryStyle()
    async with app.run_test(size=(80, 60)) as pilot:
        app.theme = "textual-light"
        app.theme_variables["muted"] = "#808080"
        app.draw()
        await pilot.pause()
        assert worst(app)[0] < CONTRAST_MIN


# ---- every place -----------------------------------------------------------------------------------


class Site:
    """A silo's daemon as far as it answers: its guard's own queries on a real log."""

    def __init__(self, folder: Path) -> None:
        self._bench = Bench(folder, setting.policy_of(setting.policy_text()))
        self._bench.responses()
        poll(self._bench)
        self._queries = queries_of(self._bench)

    def close(self) -> None:
        self._bench.close()

    async def answer(self, desk: Desk) -> None:
        """Whatever the screen on top wants to know."""
        for key, (name, arguments) in dict(desk.app.wanted).items():
            try:
                value = self._queries[name](arguments)
            except (FedSiloError, KeyError, AttributeError) as error:
                await desk.answer(key, None, refused=("NOT_FOUND", f"no answer: {type(error).__name__}"))
            else:
                await desk.answer(key, value)


@asynccontextmanager
async def site(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Desk, Site]]:
    made = Site(tmp_path / "bench")
    try:
        async with console((100, 30), **options) as desk:
            yield desk, made
    finally:
        made.close()


STATE = silo(release(), halted="two transcripts", screens={"halts": ["public.responses"], "troubles": ["no index"]})
EVENTS = [Happened(1, "release.held", {"release": "r1/hospital_a/0"}), Happened(2, "events.missed", {"missed": 7})]


async def looks(desk: Desk, answers: Site | None) -> AsyncIterator[str]:
    """Every place with its data, its help, and what opens over it."""
    for place in PLACES:
        if desk.app.top.called != place.name:
            await desk.press(place.key)
        assert desk.app.top.called == place.name
        if answers is not None:
            await answers.answer(desk)
        yield place.name
    for key in ("question_mark", "colon", "ctrl+p", "i"):
        await desk.press(key)
        yield f"after {key}"
        await desk.press("escape")


async def test_every_place_is_ascii_and_can_be_read(tmp_path: Path) -> None:
    async with site(tmp_path, ascii_only=True) as (desk, answers):
        beyond: dict[str, set[str]] = {}
        poor: dict[str, tuple[float, str]] = {}
        await desk.show(STATE, events=EVENTS)
        async for look in looks(desk, answers):
            if found := {character for character in desk.text if character > "\x7e"}:
                beyond[look] = found
            if (least := worst(desk.app))[0] < CONTRAST_MIN:
                poor[look] = least
        assert (beyond, poor) == ({}, {})


@pytest.mark.parametrize("name", THEMES)
async def test_what_waits_what_is_old_and_a_coordinator_can_be_read(name: str) -> None:
    async with console((100, 30), theme_name=name) as desk:
        await desk.show(STATE, events=EVENTS)
        assert worst(desk.app)[0] >= CONTRAST_MIN, worst(desk.app)
        await desk.wait(60)
        desk.app.tick()
        await desk.pilot.pause()
        assert "STALE" in desk.text and worst(desk.app)[0] >= CONTRAST_MIN, worst(desk.app)
        await desk.show(coordinator(), events=EVENTS)
        assert "coordinator:hub" in desk.text and worst(desk.app)[0] >= CONTRAST_MIN, worst(desk.app)
        assert {character for character in desk.text if character > "\x7e"}  # not asked for, not in ASCII


async def test_the_question_before_a_signature_is_ascii_and_can_be_read() -> None:
    async with console((80, 24), ascii_only=True) as desk:
        await open_dialog(desk)
        assert {character for character in desk.text if character > "\x7e" and character != "\n"} == set()
        assert worst(desk.app)[0] >= CONTRAST_MIN, worst(desk.app)


@pytest.mark.parametrize("name", THEMES)
async def test_a_button_that_is_off_can_be_read_and_looks_off(name: str) -> None:
    async with console((80, 24), theme_name=name) as desk:
        await open_dialog(desk)
        off, border = written(desk.app, "Approve"), desk.app.screen.query_one("#confirm").styles.border_top[0]
        assert worst(desk.app)[0] >= CONTRAST_MIN, worst(desk.app)
        await type_word(desk, "c09f")
        on = written(desk.app, "Approve")
        assert worst(desk.app)[0] >= CONTRAST_MIN, worst(desk.app)
        ground = written(desk.app, "Effect")
        assert colours(off)[1] == colours(ground)[1] != colours(on)[1], "only what is on is filled"
        assert (bool(off.style and off.style.bold), bool(on.style and on.style.bold)) == (False, True)
        # where no colour is written at all, the frame tells
        assert border == "dashed" != desk.app.screen.query_one("#confirm").styles.border_top[0]


def written(app: App[Any], word: str) -> Segment:
    """The piece of a button or a line that begins with this word; a title has more before it."""
    return next(segment for segment in list(drawn(app))[::-1] if segment.text.strip().startswith(word))


async def test_without_colour_none_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console(theme_name="fed-mono") as desk:
        await desk.show(STATE)
        assert hues(desk.app) != set()  # greys; NO_COLOR asks for none at all
    monkeypatch.setenv("NO_COLOR", "1")
    async with console(theme_name="fed-mono") as desk:
        for key in ("1", "5", "question_mark"):
            await desk.show(STATE, events=EVENTS)
            await desk.press(key)
            assert hues(desk.app) == set(), key


def hues(app: App[Any]) -> set[str]:
    """Colours as they are written, after what the console filters."""
    found = set()
    for segment in drawn(app):
        pieces = [segment]
        for each in app.get_line_filters():
            pieces = each.apply(pieces, app.screen.background_colors[1])
        for style in (piece.style for piece in pieces):
            for colour in (style.color, style.bgcolor) if style is not None else ():
                if colour is not None and colour.type is not ColorType.DEFAULT:
                    found.add(colour.name)
    return found


def test_answers_are_those_of_a_guard(tmp_path: Path) -> None:
    """So that the places above had rows to draw."""
    answers = Site(tmp_path / "bench")
    try:
        assert mapping(answers._queries["audit"]({}))["records"] and mapping(answers._queries["outbox"]({}))["messages"]
    finally:
        answers.close()
