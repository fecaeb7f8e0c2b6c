"""T18: how long the gate takes says nothing of whether a screen found something, and a screen that is cut short would.

Measured is the processor time of the gate's thread: what other processes do, and how long a disk takes, hides a short
cut and is no work of the gate. How often it waits for the disk is counted instead. A message with a hit and one without
go in alternation, and medians are compared, so that what the machine does once falls out.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from policies import screens
from policies.model import Policy
from policies.screens import Hit
from silo.guard.messages import Allowed
from tests.policies import setting
from tests.simulated import screening as site

PAIRS = 9
# What a coordinator could use is the time that a hit saves: a screen that stops at its first hit saves most of the
# screening. A hit costs a record in the site's log, some 1.2 ms (decision 0008), which no step can be told by that
# sampled for seconds: with answers of 8 kB, whose screening takes some 90 ms, it is 0.01 of that. A quarter leaves room
# for what a loaded machine's caches do to medians of nine, and a short cut saves more than 0.9.
TOLERANCE = 0.25
# Few and long, since a site of the tests counts words for tokens.
LONG = " ".join("abcdefgh"[number % 8] * 400 for number in range(20))
CLEAN = f"{LONG} and 12"
PLANTED = {
    "canary": f"{site.CANARY} {LONG} 12",
    "overlap": f"came twice in march with pain behind the left knee {LONG} 12",
}


def roomy_policy() -> Policy:
    """The site's, with room for such answers."""
    text = site.policy_text(["canary", "overlap"])
    return setting.policy_of(
        re.sub(r"(max_bytes_per_\w+|message_bytes|round_bytes|day_bytes): \d+", r"\1: 1000000", text)
    )


class Measured:
    """Seconds of the gate from an offer to the acknowledged message, and of its screens, for one text or another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, cut_short: bool) -> None:
        self._folders = (folder / str(number) for number in itertools.count())
        self._policy = roomy_policy()
        self._screens = site.screens(folder / "scratch")
        self.screened: list[float] = []
        real = screens.screen_texts

        def timed(definitions: Any, names: Any, material: Any, texts: Any, *more: Any) -> Any:
            begun = time.thread_time()
            if cut_short and texts[0] in PLANTED.values():
                return (Hit(0, "canary", "canary", 1),)
            found = real(definitions, names, material, texts, *more)
            self.screened.append(time.thread_time() - begun)
            return found

        monkeypatch.setattr(screens, "screen_texts", timed)

    def seconds(self, first: str, *, withheld: int) -> float:
        """One message of twelve answers through a gate of its own."""
        with closing(site.bench(next(self._folders), self._policy, screens=self._screens)) as bench:
            begun = time.thread_time()
            offered = bench.responses((1, (first, *[CLEAN] * 3)), (4, (CLEAN,) * 4), (7, (CLEAN,) * 4))
            assert isinstance(offered, Allowed)
            bench.gate.transmit(offered)
            taken = time.thread_time() - begun
            assert bench.events("egress.decision")[0]["facts"]["transform"]["responses_withheld"] == withheld
        return taken

    def difference(self, planted: str) -> float:
        """Median by which a hit takes longer, as a share of what screening takes."""
        self.seconds(CLEAN, withheld=0)  # what is loaded or made once
        differences = []
        for number in range(PAIRS):
            texts = [(planted, 1), (CLEAN, 0)]
            taken = {text: self.seconds(text, withheld=lost) for text, lost in (texts if number % 2 else texts[::-1])}
            differences.append(taken[planted] - taken[CLEAN])
        return statistics.median(differences) / statistics.median(self.screened)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_T18_a_hit_takes_as_long_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    measured = Measured(tmp_path, monkeypatch, cut_short=False)
    assert abs(measured.difference(PLANTED[name])) < TOLERANCE


@pytest.mark.slow
def test_T18_screens_that_stop_at_a_hit_are_told_by_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(tmp_path, monkeypatch, cut_short=True)
    assert measured.difference(PLANTED["canary"]) < -TOLERANCE


@pytest.mark.parametrize("name", PLANTED)
def test_T18_a_hit_waits_for_the_disk_as_often_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its record (decision 0008) is written out together with that of the decision."""
    measured, flushed, real = Measured(tmp_path, monkeypatch, cut_short=False), list[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (flushed.append(number), real(number))[1])
    counts = []
    for text, lost in ((CLEAN, 0), (PLANTED[name], 1)):
        flushed.clear()
        measured.seconds(text, withheld=lost)
        counts.append(len(flushed))
    assert counts[0] == counts[1] > 0
