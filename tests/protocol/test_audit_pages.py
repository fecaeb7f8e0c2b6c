"""Records by their number, and a log checked beside its writer: against reading it whole, and against tampering."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.audit import reader as audit_reader
from fedsilo.audit.checkpoint import log_key
from fedsilo.audit.log import AuditLog, Broken, LogCheck
from fedsilo.audit.reader import LogPages, read_lines
from fedsilo.audit.record import link_of
from fedsilo.audit.segments import segments
from fedsilo.protocol.errors import NotFoundError

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
ORIGIN = "spiffe://cardio-net/silo/hospital_a"
RECORDS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A closed log of several segments with several checkpoints."""
    with AuditLog(
        tmp_path / "log", origin=ORIGIN, key=KEY, actor=ORIGIN, reserve_bytes=0, segment_bytes_max=4000,
        checkpoint_records=10,
    ) as log:  # fmt: skip
        for number in range(RECORDS):
            log.append("start" if number == 0 else "screen.hit", kind="public.responses", detail={"number": number})
    yield tmp_path / "log"


def quiet(number: int) -> None:
    """Nobody is told how far it is."""


def check(folder: Path, told: list[int] | None = None) -> Broken | None:
    size = sum(1 for _ in read_lines(folder))
    return LogCheck(LogPages(folder), log_key(ORIGIN, KEY.public_key()), size, (told or []).append).run()


def rewritten(folder: Path, number: int, change: tuple[bytes, bytes], *, chained: bool) -> None:
    """One record changed on the disk; `chained` writes every later link anew, as a forger would."""
    previous = ""
    for _, path in segments(folder):
        lines = []
        for original in path.read_bytes().splitlines():
            line, record = original, json.loads(original)
            if record["seq"] == number:
                assert line.count(change[0]) == 1
                line = line.replace(*change)
            elif chained and record["seq"] > number:
                line = line.replace(record["link"]["previous"].encode(), previous.encode())
            previous = link_of(line)
            lines.append(line)
        path.write_bytes(b"".join(line + b"\n" for line in lines))


# ---- pages -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=9).map(lambda data: data.replace(b"\n", b".")), max_size=30), max_size=4),
    st.integers(0, 99), st.integers(0, 40), st.booleans(),
)  # fmt: skip
def test_any_range_is_what_reading_from_the_beginning_gives(
    contents: list[list[bytes]], start: int, count: int, torn: bool
) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_reader, "STRIDE", 4)  # several places a segment
        folder, first = Path(place), 0
        for number, lines in enumerate(contents):
            end = b"torn" if torn and number == len(contents) - 1 else b""
            (folder / f"{first:012d}.jsonl").write_bytes(b"".join(line + b"\n" for line in lines) + end)
            first += len(lines) or 1  # a segment of nothing would have its follower's name
            if not lines:
                break
        whole = list(read_lines(folder))
        pages = LogPages(folder)
        wanted = [item for item in whole if start <= item[0] < start + count]
        assert pages.lines(start, start + count) == wanted
        assert pages.lines(start, start + count) == wanted  # by what is known by then
        assert pages.lines_read <= 2 * (len(wanted) + 4 * len(contents))
        assert pages.at(range(start, start + count)) == dict(wanted)


def test_lines_that_are_added_are_seen_and_a_file_that_was_cut_is_counted_anew(folder: Path) -> None:
    pages = LogPages(folder)
    last = segments(folder)[-1][1]
    whole = last.read_bytes()
    size = pages.lines(0, 999)[-1][0] + 1
    last.write_bytes(whole + b"one\ntwo\nthr")
    assert [line for _, line in pages.lines(size, 999)] == [b"one", b"two"]
    last.write_bytes(whole + b"torn")
    assert pages.lines(size - 1, 999) == list(read_lines(folder, size - 1))


def test_looking_back_finds_the_newest_and_says_where_to_go_on(folder: Path) -> None:
    pages = LogPages(folder)
    numbers = [number for number, _ in read_lines(folder)]
    found: list[int] = []
    before: int | None = len(numbers)
    while before is not None:
        back = pages.back(before, lambda line: b"screen.hit" in line, limit=7, look_max=9)
        assert len(back.lines) <= 7
        found += [number for number, _ in back.lines]
        before = back.next
    assert found == [number for number, line in reversed(list(read_lines(folder))) if b"screen.hit" in line]
    assert pages.back(0, lambda line: True, limit=7, look_max=9) == audit_reader.Back([], None)
    with pytest.raises(NotFoundError):
        LogPages(folder / "none").lines(0, 1)


def test_a_damaged_line_is_shown_as_such_and_its_neighbours_whole(folder: Path) -> None:
    rewritten(folder, 7, (b'"number":', b'"number";'), chained=False)
    six, seven, eight = LogPages(folder).records(6, 9)
    assert (six["seq"], eight["seq"]) == (6, 8) and six["event"] == eight["event"] == "screen.hit"
    assert (seven["seq"], seven["event"]) == (7, "damaged") and seven["why"]


def test_a_record_in_another_ones_place_is_shown_as_damaged(folder: Path) -> None:
    (_, path), *_ = segments(folder)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[2], *lines[2:]]))
    zero, one, two = LogPages(folder).records(0, 3)
    assert (zero["event"], one["event"], two["event"]) == ("start", "damaged", "screen.hit")
    assert one["seq"] == 1 and "carries number 2" in one["why"]


# ---- checking --------------------------------------------------------------------------------------


def test_a_sound_log_is_checked_to_its_end_with_progress(folder: Path) -> None:
    told: list[int] = [0]
    assert check(folder, told) is None
    assert told == sorted(told) and told[-1] == sum(1 for _ in read_lines(folder))


def test_T38_a_changed_byte_is_named_with_its_record(folder: Path) -> None:
    rewritten(folder, 7, (b'"number":', b'"number";'), chained=False)
    broken = check(folder)
    assert broken is not None and broken.seq == 7 and "damaged" in broken.why


def test_T38_another_well_formed_record_breaks_the_link_behind_it(folder: Path) -> None:
    rewritten(folder, 7, (b"public.responses", b"public.rewards"), chained=False)
    broken = check(folder)
    assert broken is not None and broken.seq == 7 and "record 8 does not follow" in broken.why


def test_T38_a_log_chained_anew_does_not_fit_its_checkpoints(folder: Path) -> None:
    rewritten(folder, 27, (b"public.responses", b"public.rewards"), chained=True)
    broken = check(folder)
    assert broken is not None and "checkpoint" in broken.why
    assert 10 < broken.seq <= 27  # from the last checkpoint that fits on; one is made every ten records


def test_T38_lost_records_and_a_foreign_checkpoint_are_named(folder: Path, tmp_path: Path) -> None:
    size = sum(1 for _ in read_lines(folder))
    key = log_key(ORIGIN, KEY.public_key())
    broken = LogCheck(LogPages(folder), key, size + 5, quiet).run()
    assert broken is not None and broken.seq == size and "gone" in broken.why
    other = log_key(ORIGIN, Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key())
    broken = LogCheck(LogPages(folder), other, size, quiet).run()
    assert broken is not None and "checkpoints/" in broken.why
    (_, second), (third, _) = segments(folder)[1], segments(folder)[2]
    second.unlink()
    broken = LogCheck(LogPages(folder), key, size, quiet).run()
    assert broken is not None and f"to {third - 1} are gone" in broken.why


def test_a_log_that_retention_reduced_is_checked_over_its_leaf_hashes(tmp_path: Path) -> None:
    now = [1_800_000_000.0]
    with AuditLog(
        tmp_path / "log", origin=ORIGIN, key=KEY, actor=ORIGIN, reserve_bytes=0, segment_bytes_max=2000,
        clock=lambda: now[0], checkpoint_records=10,
    ) as log:  # fmt: skip
        for _ in range(20):
            log.append("screen.hit", kind="public.responses")
            now[0] += 86_400
        removed = log.remove_old(int((now[0] - 5 * 86_400) * 1000))
        size = log.size
    assert removed > 0
    pages, key = LogPages(tmp_path / "log"), log_key(ORIGIN, KEY.public_key())
    assert pages.first == removed and pages.lines(0, removed) == []
    assert LogCheck(pages, key, size, quiet).run() is None
    leaves = next((tmp_path / "log").glob("*.leaves"))
    data = bytearray(leaves.read_bytes())
    data[40] ^= 1
    leaves.write_bytes(data)
    assert LogCheck(pages, key, size, quiet).run() is not None
