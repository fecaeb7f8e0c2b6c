"""The pages say what is there: commands and options exist, links lead somewhere, generated pages are up to date."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.attacks import ATTACKS
from tools.pictures import BYTES_MAX, NAMESPACES
from tools.reference import FOLDER, pages, programs, role_table
from tools.threats import CONTROLS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
COMMAND = re.compile(r"(?:^|[\s(`$])(silo|coordinator|fedconsole|fedsilo) +([^\n`]+)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def parametrised(pages: list[str]) -> Any:
    return pytest.mark.parametrize("name", pages)


# ---- commands ------------------------------------------------------------------------------------------


@cache
def tree() -> dict[str, Any]:
    return dict(programs())


def faults_of(program: str, rest: str) -> list[str]:
    """What in `PROGRAM REST` does not exist: a command, or an option of it."""
    words = re.split(r"\s[#;&|>)]|\)", rest.replace("\\\n", " "))[0].split()
    found = [(program, tree()[program])]
    while words and getattr(found[0][1], "commands", None) is not None and re.fullmatch(r"(?!-)[a-z|-]+", words[0]):
        names = words.pop(0).split("|")
        missing = [name for name in names if any(name not in command.commands for _, command in found)]
        if missing:
            return [f"{path} {name}" for path, _ in found for name in missing]
        found = [(f"{path} {name}", command.commands[name]) for path, command in found for name in names]
    options = [word.split("=")[0].strip("[],.") for word in words if word.startswith("--")]
    return [
        f"{path} {option}"
        for path, command in found
        for option in options
        if option not in {name for each in command.params for name in each.opts} | {"--help"}
    ]


def commands_in(text: str) -> Iterator[tuple[str, str]]:
    """(program, rest of the line) for all that stands in code: fenced blocks of a shell, and spans."""
    for language, block in re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        if language in ("sh", "console"):
            yield from COMMAND.findall(re.sub(r"\\\n\s*", " ", block))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`([^`]+)`", prose):
        yield from COMMAND.findall(" ".join(span.split()))


@parametrised(NAMES)
def test_every_command_that_a_page_names_exists_with_its_options(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert [fault for program, rest in commands_in(page) for fault in faults_of(program, rest)] == []


def test_a_command_that_does_not_exist_is_found() -> None:
    text = "`silo dance` and `fedsilo audit verify --loudly LOG`\n"
    text += "```sh\nsilo approvals list|eat \\\n    --config F  # --not\n```\n"
    found = [fault for program, rest in commands_in(text) for fault in faults_of(program, rest)]
    assert sorted(found) == ["fedsilo audit verify --loudly", "silo approvals eat", "silo dance"]


# ---- links ---------------------------------------------------------------------------------------------


def anchors_of(page: Path) -> set[str]:
    """Names of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for target in LINK.findall(re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)):
        if target.startswith(("https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and anchor not in anchors_of(place)):
            dead.append(target)
    return dead


@parametrised(NAMES)
def test_every_link_leads_somewhere(name: str) -> None:
    assert dead_links(ROOT / name) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](#a-heading) [b](#none) [c](none.md) [d](page.md#a-heading)\n")
    assert dead_links(page) == ["#none", "none.md"]


def test_every_page_is_reached_from_the_index() -> None:
    seen, waiting = set(), [ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            place = (page.parent / target.partition("#")[0]).resolve()
            waiting += place.glob("*.md") if place.is_dir() else [place] if place.suffix == ".md" else []
    assert {page for page in PAGES if (ROOT / "docs") in page.parents} <= seen


# ---- what is made by a command -------------------------------------------------------------------------


def test_the_reference_is_what_the_code_says() -> None:
    written = {page.name: page.read_text(encoding="utf-8") for page in FOLDER.glob("*.md")}
    made = pages()
    assert written.keys() == made.keys()
    stale = [name for name in made if made[name] != written[name]]
    assert stale == [], "run `make reference`"


def test_the_table_of_roles_is_what_the_code_says() -> None:
    page = (ROOT / "docs" / "operate" / "roles.md").read_text(encoding="utf-8")
    made = "".join(line for line in page.splitlines(keepends=True) if line.startswith("|"))
    assert made == role_table(), "put what tools.reference.role_table() makes into the page"


def test_the_table_has_exactly_the_threats_that_tests_are_named_after() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"def (test_(?:[TX]\d\d_)+)", tests)
    named = {f"T{int(number)}" for name in names for number in re.findall(r"T(\d\d)_", name)}
    assert named == CONTROLS.keys()
    assert {threat for attack in ATTACKS.values() for threat in attack.threats} <= CONTROLS.keys()


@pytest.mark.parametrize("name", ["approval.svg", "confirm.svg", "demo.svg"])
def test_a_picture_is_small_and_asks_no_server_for_anything(name: str) -> None:
    picture = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
    assert len(picture.encode()) <= BYTES_MAX
    assert set(re.findall(r"https?://[^\s\"'<)]+", picture)) <= NAMESPACES
    assert "@font-face" not in picture and "@import" not in picture


def test_the_readme_names_each_thing_that_is_not_promised() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^- \*\*(N\d)\*\*", readme, flags=re.MULTILINE) == ["N1", "N2", "N3", "N4", "N5", "N6", "N7"]


def test_every_picture_in_a_page_says_in_words_what_it_shows() -> None:
    pictures = [found for page in PAGES for found in re.findall(r"!\[([^\]]*)\]", page.read_text(encoding="utf-8"))]
    assert pictures and all(len(text) > 40 for text in pictures)


def test_every_exit_code_has_a_meaning_and_says_which_code_it_comes_with() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)\|(.*)\|$", pages()["exit-codes.md"], flags=re.MULTILINE)
    assert {exit_code for exit_code, _, _ in rows} == {*map(str, range(10)), "70", "130"}
    assert [row for row in rows if not all(cell.strip() for cell in row)] == []
