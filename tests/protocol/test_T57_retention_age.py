"""How old records were when retention removed them is what other parties' cosignatures show (T57)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsilo.edge.audit_segments import segments
from fedsilo.edge.audit_verify import verify_logs
from fedsilo.launch.cli_audit import app
from fedsilo.treaty.audit.merkle import leaf_hash
from tests.protocol.audit_parties import COORDINATOR, SILO, Clock, append_send, exchange, introduce, open_log

DAY, YEAR = 86_400, 365 * 86_400


def removed_after(
    root: Path, waited: float, *, older_than: float, witnessed: bool = True, seen_afterwards: bool = True
) -> int:
    """A silo's log whose first records were countersigned, if they were, and reduced `waited` seconds later.

    older_than: seconds; what the site says that its policy asks for.
    seen_afterwards: the record of the removal was countersigned as well.
    """
    clock = Clock()
    silo = open_log(root / "silo", SILO, clock=clock, segment_bytes_max=1200)
    coordinator = open_log(root / "coordinator", COORDINATOR, clock=clock)
    with silo, coordinator:
        introduce(silo, coordinator)
        coordinator.append("start")
        for number in range(8):
            append_send(silo, number)
        if witnessed:
            exchange(silo, coordinator)
            exchange(silo, coordinator)
        clock.now += waited
        append_send(silo, 9)
        gone = silo.remove_old(int((clock.now - older_than) * 1000))
        if seen_afterwards:
            clock.now += 60
            exchange(silo, coordinator)
            exchange(silo, coordinator)
    return gone


def told(root: Path) -> tuple[list[str], list[str]]:
    (result,) = verify_logs([root / "silo"])
    alone = CliRunner().invoke(app, ["verify", str(root / "silo"), "--json"])
    assert (alone.exit_code == 0) == result["verified"]
    assert json.loads(alone.stdout)["data"][0]["verified"] == result["verified"]
    return result["problems"], [text for text in result["notices"] if "removed" in text]


@pytest.mark.parametrize(
    ("waited", "older_than", "holds"),
    [
        (3600, 60, False),  # redaction, dressed as retention
        (YEAR - 2 * DAY, 60, False),
        (YEAR + 60, 60, True),
        (6 * YEAR + 60, 6 * YEAR, True),
    ],
)
def test_T57_records_younger_than_any_policy_lets_go_were_redacted(
    tmp_path: Path, waited: float, older_than: float, holds: bool
) -> None:
    assert removed_after(tmp_path, waited, older_than=older_than) > 0
    problems, notices = told(tmp_path)
    assert (problems == []) == holds and notices == []


def test_T57_an_honest_log_keeps_what_was_countersigned_later_than_it_was_written(tmp_path: Path) -> None:
    """The silo had no line for a year: its records are old enough, and nobody could tell that they are."""
    clock = Clock()
    silo = open_log(tmp_path / "silo", SILO, clock=clock, segment_bytes_max=1200)
    with silo, open_log(tmp_path / "coordinator", COORDINATOR, clock=clock) as coordinator:
        introduce(silo, coordinator)
        coordinator.append("start")
        for number in range(8):
            append_send(silo, number)
        clock.now += YEAR + DAY
        exchange(silo, coordinator)
        exchange(silo, coordinator)
        clock.now += DAY
        assert silo.remove_old(int((clock.now - YEAR) * 1000)) == 0
        clock.now += YEAR
        assert silo.remove_old(int((clock.now - YEAR) * 1000)) > 0
        exchange(silo, coordinator)
        exchange(silo, coordinator)
    assert told(tmp_path) == ([], [])


@pytest.mark.parametrize(
    ("witnessed", "seen_afterwards"), [(False, False), (True, False), (False, True)],
    ids=["nobody", "not the removal", "not the records"],
)  # fmt: skip
def test_T57_without_a_witness_the_age_is_said_to_be_unproven(
    tmp_path: Path, witnessed: bool, seen_afterwards: bool
) -> None:
    waited = 2 * YEAR if witnessed else 3600.0
    assert removed_after(
        tmp_path, waited, older_than=YEAR if witnessed else 60, witnessed=witnessed, seen_afterwards=seen_afterwards
    )
    problems, notices = told(tmp_path)
    assert problems == [] and len(notices) == 1


@pytest.mark.parametrize(
    ("detail", "waited", "holds"),
    [
        ({}, 3600, False),  # as version 5c7e7d9 wrote it: judged by the least that a policy may say
        ({}, YEAR + DAY, True),
        ({"older_than_seconds": 0}, 3600, False),
        ({"older_than_seconds": 6 * YEAR}, 2 * YEAR, False),  # its own policy says six years
        ({"older_than_seconds": 2 * YEAR}, 2 * YEAR + DAY, True),
    ],
)
def test_T57_whoever_holds_the_key_writes_the_record_of_the_removal(
    tmp_path: Path, detail: dict[str, int], waited: float, holds: bool
) -> None:
    clock = Clock()
    silo = open_log(tmp_path / "silo", SILO, clock=clock, segment_bytes_max=1200)
    with silo, open_log(tmp_path / "coordinator", COORDINATOR, clock=clock) as coordinator:
        introduce(silo, coordinator)
        coordinator.append("start")
        for number in range(8):
            append_send(silo, number)
        exchange(silo, coordinator)
        exchange(silo, coordinator)
        clock.now += waited
        (_, first), (size, _) = segments(tmp_path / "silo")[:2]
        leaves = b"".join(leaf_hash(line) for line in first.read_bytes().splitlines())
        silo.append("retention.records", detail={"size": size, "segments": 1, **detail})
        first.with_suffix(".leaves").write_bytes(leaves)
        first.unlink()
        exchange(silo, coordinator)
        exchange(silo, coordinator)
    problems, notices = told(tmp_path)
    assert (problems == []) == holds and notices == []
