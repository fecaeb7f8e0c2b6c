"""The README's pictures: `make pictures`, or `python -m tools.pictures [--out docs/pictures]`.

They are photographs, not drawings. A real `fedsilo demo` runs with hospital_a's first release held; the console is the
real one on that silo's control socket, driven key by key, and what it shows is saved before and after `A`. The person's
signed yes lets the run go on, and the closing table is saved as the demo printed it.

    approval.svg   the held release with every fact, unlocked
    confirm.svg    the question before the signature
    demo.svg       the demo's closing table; demo.txt is the same as text

The stock SVGs of Textual and Rich name a font on a server; here it is any monospace font of the reader's own machine.
Folders of the machine that made them are shortened.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import io
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.cells import cell_len

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from fedsilo.demo.sites import Site

ROOT = Path(__file__).resolve().parents[1]
PERSON = "alice"
CONSOLE_CELLS = (112, 33)  # width, height: the panels need 100 x 30
TABLE_CELLS = 112
BYTES_MAX = 150_000
WAIT_SECONDS = 60.0
# Longer than the console's rest after a screen change (console/lock.py): a person looks before pressing.
LOOK_SECONDS = 0.6
CHARACTER_UNITS = 12.2  # of Rich's SVG
NAMESPACES = {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
FONTS = '"DejaVu Sans Mono", "Liberation Mono", Menlo, Consolas, monospace'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--rounds", type=int, default=None, help="of the demo; default 3")
    options = parser.parse_args()

    from fedsilo.cli.demo import report
    from fedsilo.demo.run import DemoOptions, run_demo
    from fedsilo.demo.tiny_model import cache_folder

    pictures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fedsilo-pictures-") as folder:
        out = Path(folder) / "demo"
        result = run_demo(
            DemoOptions(out=out, rounds=options.rounds, hold=True),
            lambda text: print(text, file=sys.stderr, flush=True),
            attend=lambda site: pictures.update(asyncio.run(answered_at(site))),
        )
        if result.error is not None:
            raise result.error
        text = report(result.data).replace(str(out), "fedsilo-demo").replace(str(cache_folder()), "~/.cache/fedsilo")
    pictures["demo.svg"] = table_picture(text)
    if set(pictures) != {"approval.svg", "confirm.svg", "demo.svg"}:
        raise SystemExit(f"nothing was held: only {', '.join(sorted(pictures))}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "demo.txt").write_text(text.strip() + "\n", encoding="utf-8")
    for name, svg in pictures.items():
        (options.out / name).write_text(for_any_reader(name, svg), encoding="utf-8")
        print(options.out / name)
    return 0


async def answered_at(site: Site) -> dict[str, str]:
    """Open the console on a silo that holds a release, read, unlock, approve; returns the pictures taken on the way."""
    from console.app import FedConsole
    from console.base import Arrived
    from console.dialogs import ConfirmDialog
    from console.feed import Feed, Signer, connect_to
    from console.lock import KeyFiles
    from console.screens.approval import ApprovalScreen

    identities = site.folder / "id"
    app = FedConsole(
        signer=Signer(site.control_socket),
        key_files=KeyFiles(identities / f"{PERSON}.crt", identities / f"{PERSON}.key"),
        site=site.name,
        waits_for=site.control_socket.name,
    )
    feed = Feed(connect_to(site.control_socket), lambda snapshot: void(app.post_message(Arrived(snapshot))))
    async with app.run_test(size=CONSOLE_CELLS) as pilot:
        feed.start()
        try:
            await until(pilot, lambda: bool(app.snapshot.held), "a held release")
            await press(pilot, "a")
            await until(pilot, lambda: isinstance(app.screen, ApprovalScreen), "the release's screen")
            await press(pilot, "L")
            await until(pilot, lambda: app.lock.open, "the key")
            await asyncio.sleep(LOOK_SECONDS)
            digest = cast("ApprovalScreen", app.screen).shown.digest
            pictures = {"approval.svg": app.export_screenshot(title=f"fedconsole, {site.name}: a held release")}
            for _ in cast("ApprovalScreen", app.screen).shown.noticed:  # A is off until each finding was opened
                await press(pilot, "f")
                await press(pilot, "escape")
            await press(pilot, "A")
            await until(pilot, lambda: isinstance(app.screen, ConfirmDialog), "the question")
            for character in digest[-4:]:
                await press(pilot, character)
            pictures["confirm.svg"] = app.export_screenshot(title=f"fedconsole, {site.name}: approve?")
            await asyncio.sleep(LOOK_SECONDS)
            await pilot.click("#confirm")
            await until(pilot, lambda: not app.snapshot.held, "the daemon to take the answer")
        finally:
            feed.stop()
    return pictures


def void(_: object) -> None:
    """For callbacks that return nothing."""


async def press(pilot: Pilot[None], key: str) -> None:
    """One key at a person's pace: the console ignores bursts, as a paste is one."""
    await asyncio.sleep(LOOK_SECONDS)
    await pilot.press(key)


async def until(pilot: Pilot[None], holds: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not holds():
            await asyncio.sleep(0.05)
            await pilot.pause()
    print(f"seen: {what}", file=sys.stderr, flush=True)


def table_picture(text: str) -> str:
    """The closing table on a terminal of `TABLE_CELLS`, which breaks longer lines as terminals do."""
    from rich.console import Console
    from rich.text import Text

    rows = [row[at : at + TABLE_CELLS] for row in text.splitlines() for at in range(0, max(len(row), 1), TABLE_CELLS)]
    console = Console(record=True, width=TABLE_CELLS, file=io.StringIO(), legacy_windows=False)
    console.print(Text("\n".join(rows)))
    return console.export_svg(title="fedsilo demo")


def for_any_reader(name: str, svg: str) -> str:
    """Without a server's fonts, and with every piece of text at its own place whatever font stands in.

    Raises:
        SystemExit: an address or a folder of this machine is still in it, or it is too large.
    """
    (identity,) = set(re.findall(r'"(terminal-\d+)-clip-terminal"', svg))
    svg = svg.replace(identity, Path(name).stem)
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family:\s*[^;]+;", f"font-family: {FONTS};", svg)
    svg = re.sub(r"font-variant-east-asian:[^;]+;", "", svg)
    # 12.2 units a character are 0.6 of this: the usual monospace fonts then need no stretching
    svg = svg.replace("font-size: 20px", "font-size: 20.3px")
    svg = re.sub(r"<text [^>]*>\s*</text>", "", svg)
    svg = re.sub(r'x="([\d.]+)" (y="[\d.]+") textLength="[\d.]+"([^>]*)>([^<]*)</text>', _without_outer_spaces, svg)
    svg = re.sub(r"\n\s*\n+", "\n", svg)
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", svg)) - NAMESPACES
    folders = [folder for folder in (str(Path.home()), tempfile.gettempdir(), str(ROOT)) if f"{folder}/" in svg]
    if addresses or folders or len(svg.encode()) > BYTES_MAX:
        raise SystemExit(f"{name}: {len(svg.encode())} bytes, addresses {addresses}, folders {folders}")
    return svg


def _without_outer_spaces(found: re.Match[str]) -> str:
    """Some renderers drop spaces at the ends of a text, hard ones too: the place says it in their stead."""
    x, y, rest, text = found.groups()
    characters = html.unescape(text)
    shown = characters.strip("\xa0\n")
    before = len(characters) - len(characters.lstrip("\xa0\n"))
    if not shown:
        return f'x="{x}" {y}{rest}></text>'
    left = round(float(x) + CHARACTER_UNITS * before, 1)
    escaped = html.escape(shown, quote=False).replace("\xa0", "&#160;")
    return f'x="{left}" {y} textLength="{round(CHARACTER_UNITS * cell_len(shown), 1)}"{rest}>{escaped}</text>'


if __name__ == "__main__":
    sys.exit(main())
