"""Screen 8: how certificates stand by the daemon's clock, what ends with them, and what renews them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from console.screens.certs import CertsScreen
from fedsilo.control.answers import CertificateRow, read, read_rows
from fedsilo.views import certificates
from fedsilo.views.lines import ASCII, UNICODE, to_text, width_of
from fedsilo.views.state import Link, Snapshot
from tests.console.desk import console
from tests.console.site_answers import CERTIFICATES, UNREADABLE, certificate
from tests.console.states import NOW, live, silo
from tests.console.test_actions import refusal

DAY = 86_400.0


def state(row: dict[str, Any], now: float = NOW) -> tuple[str, str]:
    return certificates.state_of(read(CertificateRow, row), now, ASCII)


@pytest.mark.parametrize(
    ("since", "until", "words", "style"),
    [
        (-300, 31, "* good", "ok"), (-300, 30, "! within 30 days", "warn"), (-300, 7.01, "! within 30 days", "warn"),
        (-300, 7, "! within 7 days", "warn"), (-300, 1.01, "! within 7 days", "warn"),
        (-300, 1, "! within 1 day", "bad"), (-300, 0.0001, "! within 1 day", "bad"), (-300, 0, "x EXPIRED", "bad"),
        (-300, -5, "x EXPIRED", "bad"), (0.01, 200, "x NOT YET VALID", "bad"),
        # of a life of 7 days more than a third is left: the mark is named, and is no alarm
        (-1, 6, "* within 7 days", ""), (-5, 2, "! within 7 days", "warn"), (-0.1, 0.2, "* within 1 day", ""),
        (-0.3, 0.1, "! within 1 day", "bad"),
    ],
)  # fmt: skip
def test_marks_stand_at_30_7_and_1_days_by_word_and_sign(since: float, until: float, words: str, style: str) -> None:
    assert state(certificate("x", "silo", since, until)) == (words, style)


PEOPLE = [certificate(f"the operator {name}", "operator", -0.04, 0.29) for name in ("alice", "bob", "carol")]
GOOD = certificate("x", "silo", -300, 200)
SITE_CA = [each for each in CERTIFICATES if each["whose"] == "the site CA"]


@pytest.mark.parametrize(
    ("row", "now", "told"),
    [
        (GOOD, NOW, ("* good", "ok")),
        (UNREADABLE, NOW, ("x cannot be read", "bad")),
        (GOOD | {"not_after": "soon"}, NOW, ("x no end is told", "bad")),
        (GOOD | {"not_after": 7}, NOW, ("x no end is told", "bad")),
        (GOOD, 0.0, ("o no clock yet", "dim")),
        (GOOD | {"in_use": False}, NOW, ("! not in use yet", "warn")),
    ],
)
def test_what_cannot_be_judged_never_counts_as_good(row: dict[str, Any], now: float, told: tuple[str, str]) -> None:
    assert state(row, now) == told


@pytest.mark.parametrize(
    ("rows", "changes", "facts"),
    [
        ([GOOD], {}, ("1 certificates, none is near its end", "ends next x in 200 d", "clock skew 0 s between")),
        (CERTIFICATES, {},
         ("! 3 of 8 to put right (enter says how): the operator bob, the operator carol, the operator dan",
          "! 2 of 8 to renew before the end: the link to the trainer, the site CA", "● within: not yet, no alarm")),
        ([GOOD, *SITE_CA], {}, ("! 1 of 2 to renew before the end (enter says how): the site CA ends next",)),
        ([GOOD, *PEOPLE], {}, ("4 certificates, none is near", "the operator bob in 6 h and 1 more", "a person's")),
        ([GOOD], {"skew_seconds": 95.0}, ("the daemon's clock is 95 s ahead of this machine's",)),
        ([GOOD], {"skew_seconds": -40.0}, ("is 40 s behind this machine's",)),
        ([GOOD], {"skew_seconds": 20.0}, ("clock skew 20 s",)),
        ([GOOD], {"link": Link("live", banner="REPLAY, paused")}, ("not from now",)),
    ],
)  # fmt: skip
def test_the_head_counts_what_needs_somebody_and_says_whose_clock_counts(
    rows: list[dict[str, Any]], changes: dict[str, Any], facts: tuple[str, ...]
) -> None:
    shown = certificates.certificate_rows(read_rows(CertificateRow, rows), NOW, UNICODE)
    lines = certificates.head_lines(shown, replace(live(silo()), **changes), 78, UNICODE)
    text = " ".join(to_text(lines).split())
    assert [fact for fact in facts if fact not in text] == [], text
    assert ("to put right" in text) is (len(rows) == 8)
    assert certificates.head_lines([], Snapshot(), 78, UNICODE) == []


@pytest.mark.parametrize("row", CERTIFICATES, ids=lambda row: row["whose"])
def test_one_whole_says_what_ends_with_it_and_which_commands_renew_it(row: dict[str, Any]) -> None:
    lines = certificates.detail_lines(read(CertificateRow, row), NOW, 70, UNICODE)
    assert max(map(width_of, lines)) <= 70
    text = to_text(lines)
    if row["fault"]:
        assert "the file is no certificate" in text and f"fedsilo certs show {row['file']}" in text
        return
    joined = "".join(text.split())
    until = row["not_after"].replace("T", "").replace("Z", "UTC")
    assert row["fingerprint"] in joined and row["file"] in joined and until in joined
    assert all(name in joined for name in row["names"])
    assert "when it ends" in text and "there is no revocation list" in " ".join(text.split())
    commands = certificates.renewal_of(read(CertificateRow, row))
    assert "fedsilo certs renew --token TOKEN --out" in " ".join(command for _, command in commands)
    if row["role"] != "CA":
        identity = f"{row['role']}/{row['names'][0].rpartition('/')[2]}"
        assert commands[0][1] == f"fedsilo certs invite {identity} --ca CA_FOLDER"
    for _, command in commands:
        words = command.replace("KIND", "site").split()
        assert refusal(words) == "", words


def test_a_command_for_a_file_with_a_space_is_one_that_a_shell_takes() -> None:
    row = certificate("the operator a", "operator", -1, 1, file="/etc/my id/$(x).crt")
    commands = [command for _, command in certificates.renewal_of(read(CertificateRow, row))]
    assert "--out '/etc/my id'" in commands[1] and commands[2].endswith("--out '/etc/my id/$(x).crt'")


async def test_days_go_by_on_the_screen_while_the_answer_stays() -> None:
    by_end = sorted(CERTIFICATES[:-1], key=lambda row: row["not_after"])
    async with console((100, 42)) as desk:
        await desk.show(silo())
        await desk.press("8")
        await desk.answer("certificates", CERTIFICATES)
        screen = desk.app.screen
        assert isinstance(screen, CertsScreen)
        assert [item.row.whose for item in screen.table.rows.shown] == [row["whose"] for row in [*by_end, UNREADABLE]]
        assert screen.twin() == "silo certs" and screen.inspected() == by_end[0]  # what ends first
        await desk.press("enter")
        desk.shows("the operator bob", "ended 2 d ago", "fedsilo certs invite operator/bob")
        await desk.press("escape")
        await desk.answer("certificates", [certificate("this silo", "silo", -300, 7 + 30 / DAY)])
        desk.shows("! within 30 days")
        await desk.wait(31.0)
        await desk.show(replace(desk.app.snapshot, link=replace(desk.app.snapshot.link, received_at=desk.now - 31)))
        desk.shows("! within 7 days")
