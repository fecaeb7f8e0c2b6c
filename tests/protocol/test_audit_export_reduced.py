"""T38, T39: an honest log of which retention left leaf hashes is exported from where it begins, and not accused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.audit.log import AuditLog
from fedsilo.audit.reader import LogReader, Place, read_lines
from fedsilo.audit.record import NO_PREVIOUS, link_of
from fedsilo.cli.audit import app
from fedsilo.protocol.errors import NotFoundError, VerificationError
from tests.protocol.audit_parties import append_send, open_log

ALL_AGES = 2**52  # milliseconds since 1970: older than this is every record


def exported(log: Path, to: Path, *words: str) -> Any:
    return CliRunner().invoke(app, ["export", "--log", str(log), "--format", "jsonl", "--to", str(to), *words])


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["seq"] for line in path.read_bytes().splitlines()]


def fill(log: AuditLog, count: int) -> None:
    for _ in range(count):
        append_send(log, log.size)


@pytest.fixture
def reduced(tmp_path: Path) -> tuple[Path, int, int]:
    """A log, its first record that is left, and its size."""
    with open_log(tmp_path / "log", segment_bytes_max=3000) as log:
        fill(log, 20)
        first = log.remove_old(ALL_AGES)
        size = log.size
    assert 5 < first < size - 1
    return tmp_path / "log", first, size


@pytest.mark.parametrize("behind", [0, 1])
def test_T39_an_export_begins_where_retention_left_records(
    reduced: tuple[Path, int, int], tmp_path: Path, behind: int
) -> None:
    """The first one that is left is chained to a leaf hash, the second to a record."""
    log, first, size = reduced
    made = exported(log, tmp_path / "out", "--first", str(first + behind))
    assert made.exit_code == 0, made.output
    assert numbers(tmp_path / "out") == list(range(first + behind, size))


def test_T38_a_range_with_proofs_says_where_retention_makes_it_begin(
    reduced: tuple[Path, int, int], tmp_path: Path
) -> None:
    log, first, size = reduced
    for asked in (2, first):
        words = ["export", "--log", str(log), "--out", str(tmp_path / f"{asked}"), "--first", str(asked), "--json"]
        answer = json.loads(CliRunner().invoke(app, words).stdout)
        assert [answer["data"][key] for key in ("first", "last", "left_out")] == [first, size - 1, 0]
        said = f"without records 2 to {first - 1}: retention removed what they said"
        assert answer["warnings"] == [said] * (asked == 2)
        assert CliRunner().invoke(app, ["prove", "--check", str(tmp_path / f"{asked}")]).exit_code == 0


@pytest.mark.parametrize("start", [0, 1, -1])
def test_T39_a_record_that_retention_removed_is_not_there_and_the_first_that_is_left_is_named(
    reduced: tuple[Path, int, int], tmp_path: Path, start: int
) -> None:
    log, first, _ = reduced
    wanted = start if start >= 0 else first - 1
    refused = exported(log, tmp_path / "out", "--first", str(wanted))
    assert refused.exit_code == 8, refused.output
    assert f"only the leaf hash of record {wanted}: retention removed" in refused.stderr
    assert f"the first record that is left is {first}" in refused.stderr


def test_T38_a_changed_leaf_hash_or_a_missing_one_ends_an_export_with_status_7(
    reduced: tuple[Path, int, int], tmp_path: Path
) -> None:
    log, first, _ = reduced
    leaves = sorted(log.glob("*.leaves"))[-1]
    whole = leaves.read_bytes()
    for number, damaged in enumerate((whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-3], b"")):
        leaves.write_bytes(damaged)
        refused = exported(log, tmp_path / f"out{number}", "--first", str(first))
        assert refused.exit_code == 7, refused.output
    leaves.write_bytes(whole)
    assert exported(log, tmp_path / "good", "--first", str(first)).exit_code == 0


def test_T38_records_that_are_gone_without_leaf_hashes_are_an_accusation(
    reduced: tuple[Path, int, int], tmp_path: Path
) -> None:
    log, _, _ = reduced
    for path in log.glob("*.leaves"):
        path.unlink()
    refused = exported(log, tmp_path / "out")
    assert refused.exit_code == 7 and "are gone" in refused.stderr


def test_T38_T39_a_position_is_checked_against_the_leaf_hash_that_retention_left(tmp_path: Path) -> None:
    """An export that kept up goes on; one that retention overtook is told so; a false position is an accusation."""
    with open_log(tmp_path / "log", segment_bytes_max=3000) as log:
        fill(log, 20)
        links = [NO_PREVIOUS, *(link_of(line) for _, line in read_lines(tmp_path / "log"))]
        first = log.remove_old(ALL_AGES)
    assert 5 < first < len(links) - 2
    for seq in (first, first + 1, len(links) - 1):
        (found, *_) = LogReader(tmp_path / "log", Place(seq, links[seq])).read()
        assert found[1]["seq"] == seq
    for seq in (0, 1, first - 1):
        with pytest.raises(NotFoundError, match=f"only the leaf hash of record {seq}: retention removed"):
            LogReader(tmp_path / "log", Place(seq, links[seq]))
    for seq in (1, first, first + 1):
        with pytest.raises(VerificationError, match=f"record {seq - 1}, which was exported, is gone or was changed"):
            LogReader(tmp_path / "log", Place(seq, "ab" * 32))


def test_T39_an_export_that_retention_overtook_keeps_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with open_log(tmp_path / "log", segment_bytes_max=1) as log:  # so each further record begins a segment
        fill(log, 3)
        before = log.size
        assert exported(tmp_path / "log", out).exit_code == 0
        fill(log, 3)
        assert log.remove_old(ALL_AGES) > before
        again = exported(tmp_path / "log", out)
        assert again.exit_code == 8 and f"only the leaf hash of record {before}" in again.stderr
        assert numbers(out) == list(range(before))
