"""T41: two parties' logs say by how much their clocks differed, in `audit verify` and in the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsilo.audit.consistency import CLOCKS_APART_MILLISECONDS
from fedsilo.cli.audit import app
from fedsilo.cli.audit_report import audit_report, page
from tests.protocol.audit_parties import open_log
from tests.protocol.test_audit_consistency import Pair

HOUR = 3_600.0


class ApartPair(Pair):
    """The silo's clock is so many seconds ahead."""

    def __init__(self, root: Path, ahead: float) -> None:
        super().__init__(root / "first")
        self.silo.close()
        self.paths[0] = root / "silo"
        self.silo = open_log(self.paths[0], clock=lambda: self.clock() + ahead)


def noticed(pair: Pair) -> tuple[list[str], list[dict[str, object]]]:
    for log in (pair.silo, pair.coordinator):
        log.checkpoint()
    done = CliRunner().invoke(app, ["verify", *map(str, pair.paths), "--json"])
    envelope = json.loads(done.stdout)
    assert done.exit_code == 0, envelope
    silo = envelope["data"][0]
    return [text for text in silo["notices"] if "clock" in text], silo["clocks"]


@pytest.mark.parametrize(
    ("ahead", "said"), [(3 * HOUR, "3 h ahead of"), (-3 * HOUR, "3 h behind"), (61.0, "1 min 1 s ahead of")]
)
def test_T41_the_median_difference_of_two_logs_is_told(tmp_path: Path, ahead: float, said: str) -> None:
    pair = ApartPair(tmp_path, ahead)
    for number in range(1, 6):
        pair.both(number)
    pair.clock.now += 100.0  # one message on a slow line moves no median
    pair.send(6)
    pair.clock.now += 900.0
    pair.receive(6)
    (told,), (compared,) = noticed(pair)
    assert said in told and "6 messages" in told
    assert compared["pairs"] == 6 and compared["ahead_milliseconds"] == pytest.approx(ahead * 1000, abs=1000)
    report = audit_report(pair.paths)
    assert said in page(report)


@pytest.mark.parametrize("ahead", [0.0, 59.0, -59.0])
def test_T41_up_to_a_minute_is_no_word(tmp_path: Path, ahead: float) -> None:
    pair = ApartPair(tmp_path, ahead)
    for number in range(1, 4):
        pair.both(number)
    told, (compared,) = noticed(pair)
    assert told == [] and compared["pairs"] == 3


@pytest.mark.parametrize("ahead", [3 * HOUR, -3 * HOUR])
def test_T38_T41_what_is_missing_is_found_by_the_others_clock(tmp_path: Path, ahead: float) -> None:
    """A message under way at the end of the other's log is none that is missing, whatever the clocks; one before is."""
    for late, missing in ((0.0, []), (CLOCKS_APART_MILLISECONDS / 1000 + 10, ["sent is not in the log"])):
        pair = ApartPair(tmp_path / f"{late:.0f}", ahead)
        for number in range(1, 4):
            pair.both(number)
        pair.send(4)
        pair.clock.now += late
        pair.coordinator.append("start")
        problems = pair.told()[0]
        assert len(problems) == len(missing) and all(part in text for part, text in zip(missing, problems, strict=True))
