"""The README's recording: `python -m tools.recording [--out docs/pictures]`.

    fedsilo/demo/approve.fedrec   what the console read; `fedsilo demo --replay` plays it in 30 seconds
    console.svg              what it drew, as a picture that moves for 30 seconds: overview, a held release, its finding
                             opened, rejected with a reason, the outbox

The site is made up, everything else is real: its gate finds a sentence of a private record in an answer that is to
leave, holds it, takes the person's no and writes both into its audit log; the console is driven key by key. The
recording holds local data of that made-up site, and says so. In a replay nothing can be answered: there the release is
held until second 24, and rejected from then on.

The picture is plain SVG: rows of text, and for each scene the time at which it shows. It needs no script, no font of a
server and no network, so it moves in a README too. Where animations are switched off it stands still at the finding.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import html
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

if TYPE_CHECKING:
    from rich.style import Style
    from textual.pilot import Pilot

    from benchmarks.release_site import Site
    from console.app import FedConsole

ROOT = Path(__file__).resolve().parents[1]
CELLS, ROWS = 112, 36  # room for the finding above the panels
CELL_UNITS, ROW_UNITS, FONT_UNITS = 8.4, 18, 14  # the usual monospace fonts are 0.6 of their size wide
BYTES_MAX = 500_000
FONTS = '"DejaVu Sans Mono", "Liberation Mono", Menlo, Consolas, monospace'
PERSON, SEED = "alice", 7
REASON = "one answer repeats a sentence of a private record"
KEY_SECONDS = 0.5  # a person's pace: the console ignores bursts, as a paste is one
TYPED_SECONDS = 0.08  # between the keys of a word: as fast as hands type, and no paste
SETTLE_ROUNDS = 3  # readings until what a screen asks for is answered and drawn


@dataclass(frozen=True)
class Scene:
    """Attributes:
    says: what is to be seen, for those who cannot see it.
    keys: pressed before.
    seconds: for which it stands.
    shows: stands on the screen then, or the story went another way.
    """

    says: str
    keys: tuple[str, ...]
    seconds: float
    shows: str


SCENES = (
    Scene("The overview: one release of this silo is held and needs a person.", (), 4.0, "held: public.responses"),
    Scene("The release: what would leave, every rule, and what was found.", ("enter",), 5.0, "1 not opened"),
    Scene("The finding opened: an answer repeats words of a private record.", ("f",), 6.0, "finding 1 of 1"),
    Scene("R asks for a reason before anything is signed.", ("escape", "R"), 3.0, "Reject this release"),
    Scene("The reason code and a note are typed; the note stays here.", (*"CONTENT", "tab", *REASON), 5.0, "private"),
    Scene("Rejected: signed by this person, and on record.", ("tab", "enter"), 4.0, "rejected by alice (CONTENT)"),
    Scene("The outbox: what left, and what did not.", ("5",), 3.0, "outbound"),
)
STILL = 2  # the scene that stands where nothing may move


@dataclass
class Tape:
    """The console's clock and the recording's, moved by hand together with the site's."""

    site: Site
    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds
        self.site.wait(seconds)


@dataclass
class Hand:
    """Gives the person's answer to the site's own releases, as its desk does once it has verified the signature."""

    site: Site

    def carry_out(self, person: Any, name: str, arguments: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        from tests.world import command

        if name != "approvals.reject":
            raise SystemExit(f"the story has no {name}")
        settled = self.site.bench.releases.reject(command(name, dict(arguments), person=person.name))
        self.site.desk.publish("release.settled", {"release": settled.release.id, "outcome": "rejected"})
        return {"release": settled.release.id, "state": "rejected", "audit_size": self.site.bench.audit.size}


@dataclass
class Reader:
    """In place of `console.feed.Feed`: reads when it is told to, so that the same is drawn every time."""

    app: FedConsole
    source: Any  # a `console.recording.Recorder`
    tape: Tape
    beside: Iterable[tuple[str, Mapping[str, Any]]] = ()  # asked for the replay, where people look elsewhere too
    events_seen: int = 0
    store: Any = field(default=None)

    def read(self) -> None:
        from console.base import Arrived
        from console.feed import Answer
        from fedsilo.protocol.errors import FedSiloError

        self.tape.site.show()
        reading = self.source.snapshot()
        for event in self.source.watch(self.events_seen):
            self.store.happened([event])
            self.events_seen = event.sequence
        now = self.tape.seconds
        self.store.read(reading, now, wall_time=self.tape.site.bench.clock_now)
        answers = {}
        for key, (name, arguments) in self.app.wanted.items():
            try:
                answers[key] = Answer(self.source.query(name, arguments), now)
            except FedSiloError as error:
                answers[key] = Answer(refused=(error.code, error.line))
        self.store.answered(answers)
        for name, asked in self.beside:
            with contextlib.suppress(FedSiloError):
                self.source.query(name, asked)
        self.app.post_message(Arrived(self.store.snapshot))


async def played(site: Site, path: Path) -> list[list[str]]:
    """Play the story on the real console and record what it reads; returns each scene's rows, as SVG."""
    from benchmarks.release_site import DeskSource
    from benchmarks.releases import QUESTIONS
    from console.app import FedConsole
    from console.feed import Person, Store
    from console.recording import Recorder, RecordingFile
    from fedsilo.control.client import Operator

    tape = Tape(site)
    scenes = []
    with closing(RecordingFile(path, include_local=True, clock=tape)) as file:
        app = FedConsole(signer=Hand(site), site="hospital_a", clock=tape, driven_by_hand=True)
        reader = Reader(app, Recorder(DeskSource(site.desk), file), tape, QUESTIONS, store=Store())
        async with app.run_test(size=(CELLS, ROWS)) as pilot:
            await _settle(pilot, app, reader)
            app.signing.person = Person(PERSON, Operator("hospital_a", Path("alice.crt"), Path("alice.key")))
            for scene in SCENES:
                spent = 0.0
                for key in scene.keys:
                    pause = max(KEY_SECONDS / len(scene.keys), TYPED_SECONDS) if len(scene.keys) > 2 else KEY_SECONDS
                    spent += pause
                    tape.pass_by(pause)
                    app.signing.last_input = tape.seconds
                    await pilot.press("space" if key == " " else key)
                    await pilot.pause()
                    if key in ("R", "enter"):
                        tape.pass_by(KEY_SECONDS / 5)
                        spent += KEY_SECONDS / 5
                        app.settle_keys()
                    await app.workers.wait_for_complete()
                    if len(scene.keys) <= len(("escape", "R")):
                        await _settle(pilot, app, reader)
                await _settle(pilot, app, reader)
                shown = "\n".join(strip.text for strip in _strips(app))
                if scene.shows not in shown:
                    raise SystemExit(f"{scene.says} There is no {scene.shows!r} in\n{shown}")
                scenes.append([_row(strip, number) for number, strip in enumerate(_strips(app))])
                tape.pass_by(scene.seconds - spent)
        if file.trouble:
            raise SystemExit(file.trouble)
    return scenes


async def _settle(pilot: Pilot[None], app: FedConsole, reader: Reader) -> None:
    for _ in range(SETTLE_ROUNDS):
        reader.read()
        await pilot.pause()


# ---- the picture -----------------------------------------------------------------------------------


def _strips(app: FedConsole) -> Iterable[Any]:
    return app.screen._compositor.render_strips()


def _colour(style: Style | None, which: str, otherwise: str) -> str:
    colour = getattr(style, which, None)
    return colour.triplet.hex if colour is not None and colour.triplet is not None else otherwise


def _row(strip: Iterable[Any], number: int) -> str:
    """One row of the terminal: grounds first, then each piece of text at its own place."""
    grounds, texts, column = [], [], 0
    for segment in strip:
        cells = cell_len(segment.text)
        ink, ground = _colour(segment.style, "color", "#e6e9ee"), _colour(segment.style, "bgcolor", "#0e1116")
        if segment.style is not None and segment.style.reverse:
            ink, ground = ground, ink
        x, y = round(column * CELL_UNITS, 1), number * ROW_UNITS
        if cells and ground != "#0e1116":
            size = f'width="{round(cells * CELL_UNITS, 1)}" height="{ROW_UNITS}"'
            grounds.append(f'<rect x="{x}" y="{y}" {size} fill="{ground}"/>')
        text = segment.text.rstrip()
        lead = len(text) - len(text.lstrip())
        if text := text.strip():
            bold = ' font-weight="bold"' if segment.style is not None and segment.style.bold else ""
            length = round(cell_len(text) * CELL_UNITS, 1)
            at = round(x + lead * CELL_UNITS, 1)
            place = f'x="{at}" y="{y + ROW_UNITS - 5}" textLength="{length}"'
            texts.append(f'<text {place} fill="{ink}"{bold}>{html.escape(text, quote=False)}</text>')
        column += cells
    return "".join(grounds + texts)


def picture(scenes: list[list[str]]) -> str:
    """Rows that do not change from one scene to the next are drawn once, for as long as they stand.

    Raises:
        SystemExit: it is too large for a README.
    """
    total = sum(scene.seconds for scene in SCENES)
    begins = [sum(scene.seconds for scene in SCENES[:index]) for index in range(len(SCENES) + 1)]
    style, body = [], []
    spans: dict[tuple[int, int], list[str]] = {}
    for number in range(ROWS):
        first = 0
        for index in range(1, len(scenes) + 1):
            if index == len(scenes) or scenes[index][number] != scenes[first][number]:
                spans.setdefault((first, index), []).append(scenes[first][number])
                first = index
    for (first, end), rows in spans.items():
        name = f"s{first}_{end}"
        content = "".join(rows)
        if (first, end) == (0, len(scenes)):
            body.append(f"<g>{content}</g>")
            continue
        start, stop = (round(100 * begins[place] / total, 3) for place in (first, end))
        before = f"0%,{round(start - 0.001, 3)}%{{visibility:hidden}}" if first else ""
        after = f"{stop}%,100%{{visibility:hidden}}" if end < len(scenes) else ""
        style.append(f"@keyframes {name}{{{before}{start}%,{round(stop - 0.001, 3)}%{{visibility:visible}}{after}}}")
        stands = "visible" if first <= STILL < end else "hidden"
        style.append(f".{name}{{visibility:{stands};animation:{name} {total:g}s step-end infinite}}")
        body.append(f'<g class="{name}">{content}</g>')
    width, height = round(CELLS * CELL_UNITS + 16), ROWS * ROW_UNITS + 16
    told = html.escape(" ".join(scene.says for scene in SCENES))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t d">'
        f'<title id="t">fedconsole: a release is read and rejected</title><desc id="d">{told}</desc>'
        f"<style>text{{font:{FONT_UNITS}px {FONTS};white-space:pre}}{''.join(style)}"
        f"@media (prefers-reduced-motion:reduce){{g{{animation:none!important}}}}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0e1116"/>'
        f'<g transform="translate(8 8)">{"".join(body)}</g></svg>\n'
    )
    if len(svg.encode()) > BYTES_MAX:
        raise SystemExit(f"{len(svg.encode())} bytes, more than {BYTES_MAX}")
    return svg


def main() -> int:
    from benchmarks.release_cases import cases, site
    from fedsilo.demo.playing import RECORDING

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="of the picture")
    parser.add_argument("--recording", type=Path, default=RECORDING, help="the file to write")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    case = next(case for case in cases() if case.name == "near-match")
    recording = options.recording
    recording.unlink(missing_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="fedsilo-recording-") as folder,
        closing(site(Path(folder), "run-1", SEED)) as silo,
    ):
        case.make(silo)
        silo.wait(133.0)  # somebody comes two minutes after it was held
        scenes = asyncio.run(played(silo, recording))
    recording.chmod(0o644)  # local data of a site that does not exist
    (options.out / "console.svg").write_text(picture(scenes), encoding="utf-8")
    print(recording)
    print(options.out / "console.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
