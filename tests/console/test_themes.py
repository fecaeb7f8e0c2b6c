"""Colour as it is really drawn: contrast of every theme, runs without colour, and screens in ASCII."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from tests.console.desk import Desk, console, open_dialog, strips, type_word
from tests.console.states import Happened, coordinator, release, silo
from tests.simulated.queries import poll, queries_of
from tests.world import Bench

CONTRAST_MIN = 4.5  # WCAG 2.2, success criterion 1.4.3 (AA), text of usual size
GROUNDS = ("background", "surface", "panel")
WORD = "word"


def contrast(one: Color, other: Color) -> float:
    """From 1, the same, to 21, black on white: WCAG 2.2, sRGB made linear, then weighted."""

    def luminance(colour: Color) -> float:
        assert colour.triplet is not None, colour
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour.triplet.normalized]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def drawn(app: App[Any]) -> Iterator[Segment]:
    """What a terminal gets, piece by piece; of a dialog its own box, for what is behind it is dimmed on purpose."""
    lines = strips(app.screen)
    if isinstance(app.screen, ModalScreen):
        box = app.screen.query_one("#box").region
        lines = [strip.crop(box.x, box.right) for strip in lines[box.y : box.bottom]]
    for strip in lines:
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


async def test_every_meaning_can_be_read_on_every_ground() -> None:
    black, white, grey = Color.parse("#000000"), Color.parse("#ffffff"), Color.parse("#767676")
    assert contrast(white, black) == pytest.approx(21) and round(contrast(grey, white), 2) == 4.54  # as in the standard
    app = EveryStyle()
    async with app.run_test(size=(80, 60)) as pilot:
        for name, theme in THEMES.items():
            app.register_theme(theme)
            app.theme = name
            app.draw()
            await pilot.pause()
            words = [segment for segment in drawn(app) if segment.text.startswith(WORD)]
            assert len(words) == 2 * len(GROUNDS) * len(STYLES)
            assert len({colours(segment)[1].name for segment in words}) == len(GROUNDS)
            poor = {(segment.text, contrast(*colours(segment))) for segment in words}
            assert {each for each in poor if each[1] < CONTRAST_MIN} == set(), name
        app.theme = "textual-light"  # a theme of the library would not pass
        app.theme_variables["muted"] = "#808080"
        app.draw()
        await pilot.pause()
        assert worst(app)[0] < CONTRAST_MIN


# ---- every place -----------------------------------------------------------------------------------


async def answered(desk: Desk, queries: Mapping[str, Any]) -> None:
    """Answer whatever the screen on top wants to know with a guard's own queries."""
    for key, (name, arguments) in dict(desk.app.wanted).items():
        try:
            value = queries[name](arguments)
        except (FedSiloError, KeyError, AttributeError) as error:
            await desk.answer(key, None, refused=("NOT_FOUND", f"no answer: {type(error).__name__}"))
        else:
            await desk.answer(key, value)


STATE = silo(release(), halted="two transcripts", screens={"halts": ["public.responses"], "troubles": ["no index"]})
EVENTS = [Happened(1, "release.held", {"release": "r1/hospital_a/0"}), Happened(2, "events.missed", {"missed": 7})]


@pytest.mark.slow
async def test_every_place_with_its_help_and_what_opens_over_it_is_ascii_and_can_be_read(bench: Bench) -> None:
    bench.responses()
    poll(bench)
    queries = queries_of(bench)
    assert mapping(queries["audit"]({}))["records"] and mapping(queries["outbox"]({}))["messages"]
    beyond: dict[str, set[str]] = {}
    poor: dict[str, tuple[float, str]] = {}

    def look(name: str) -> None:
        if found := {character for character in desk.text if character > "\x7e"}:
            beyond[name] = found
        if (least := worst(desk.app))[0] < CONTRAST_MIN:
            poor[name] = least

    async with console((100, 30), ascii_only=True) as desk:
        await desk.show(STATE, events=EVENTS)
        for place in PLACES:
            if desk.app.top.called != place.name:
                await desk.press(place.key)
            assert desk.app.top.called == place.name
            await answered(desk, queries)
            look(place.name)
        for key in ("question_mark", "colon", "ctrl+p", "i"):
            await desk.press(key)
            look(f"after {key}")
            await desk.press("escape")
        await desk.press("1")
        await open_dialog(desk)
        look("the question before a signature")
        assert (beyond, poor) == ({}, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", THEMES)
async def test_what_waits_what_is_old_and_a_button_that_is_off_can_be_read(name: str) -> None:
    def can_be_read() -> None:
        assert worst(desk.app)[0] >= CONTRAST_MIN, worst(desk.app)

    async with console((80, 24), theme_name=name) as desk:
        await open_dialog(desk)
        off, border = written(desk.app, "Approve"), desk.app.screen.query_one("#confirm").styles.border_top[0]
        can_be_read()
        await type_word(desk, "c09f")
        on, ground = written(desk.app, "Approve"), written(desk.app, "Effect")
        can_be_read()
        assert colours(off)[1] == colours(ground)[1] != colours(on)[1], "only what is on is filled"
        assert (bool(off.style and off.style.bold), bool(on.style and on.style.bold)) == (False, True)
        # where no colour is written at all, the frame tells
        assert border == "dashed" != desk.app.screen.query_one("#confirm").styles.border_top[0]
        await desk.press("escape", "1")
        await desk.show(STATE, events=EVENTS)
        can_be_read()
        await desk.wait(60)
        desk.app.tick()
        await desk.pilot.pause()
        assert "STALE" in desk.text
        can_be_read()
        await desk.show(coordinator(), events=EVENTS)
        can_be_read()
        assert {character for character in desk.text if character > "\x7e"}  # not asked for, not in ASCII


def written(app: App[Any], word: str) -> Segment:
    """The piece of a button or a line that begins with this word; a title has more before it."""
    return next(segment for segment in list(drawn(app))[::-1] if segment.text.strip().startswith(word))


@pytest.mark.slow
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
