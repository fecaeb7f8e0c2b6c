"""Records for the site's own log system: each exactly once into a file, chained, and only what is on the list."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedsilo
from fedsilo.audit.export import (
    LINE_BYTES_MAX,
    WITHHELD,
    Export,
    Position,
    chosen,
    export_line,
    read_position,
)
from fedsilo.audit.log import AuditLog
from fedsilo.audit.reader import LogReader, Place, read_lines
from fedsilo.audit.record import NO_PREVIOUS, link_of
from fedsilo.cli.audit import app
from fedsilo.protocol.errors import ConflictError, NotFoundError, VerificationError
from tests.protocol.audit_export_child import export_all
from tests.protocol.audit_parties import COORDINATOR, SILO, append_send, open_log
from tests.protocol.audit_story import write_story

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_story(tmp_path_factory.mktemp("story"))[0]


def raw_lines(log: Path) -> list[bytes]:
    return b"".join(path.read_bytes() for path in sorted(log.glob("*.jsonl"))).splitlines()


def events(log: Path) -> list[dict[str, Any]]:
    """Chosen fields of every record; the hash of a line by hashlib alone."""
    return [
        chosen(json.loads(line), hashlib.sha256(b"\x00" + line).hexdigest(), "spiffe://net/silo/hospital_a")
        for line in raw_lines(log)
    ]


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, words)])


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["seq"] for line in path.read_bytes().splitlines()]


# ---- formats -------------------------------------------------------------------------------------------


def test_T40_only_fields_on_the_list_are_exported_and_no_text(story: Path) -> None:
    allowed = {
        "schema", "log", "seq", "t", "event", "actor", "leaf", "previous", "run", "round", "step", "attempt", "kind",
        "sequence", "peer", "direction", "decision", "reasons", "rules", "policy", "payload", "detail", "decided_by",
        "withheld", "shortened",
    }  # fmt: skip
    found = events(story)
    assert {name for event in found for name in event} <= allowed
    text = "\n".join(export_line(event, "0.1.0") for event in found)
    for secret in ("secret_fact", "<script>", "alert(1)", json.loads(raw_lines(story)[0])["salt"], "boot"):
        assert secret not in text, secret


def test_T37_a_name_that_is_none_is_withheld_and_listed(story: Path) -> None:
    hostile = [event for event in events(story) if "withheld" in event]
    assert [event["withheld"] for event in hostile] == [["kind", "peer", "run"], ["detail.name", "kind", "run"]]
    assert hostile[0]["kind"] == hostile[0]["run"] == hostile[0]["peer"] == WITHHELD
    tricky = dict(json.loads(raw_lines(story)[0]), run="a b", kind="x\u202ey")
    assert chosen(tricky, "00", "log")["withheld"] == ["kind", "run"]


def test_jsonl_of_a_denial_by_hand(story: Path) -> None:
    [denial] = [event for event in events(story) if event.get("reasons") == ["DELTA_L2", "NAME_UNKNOWN"]]
    made = json.loads(export_line(denial, "0.1.0"))
    assert made["seq"] == 20 and made["event"] == "egress.decision" and made["decision"] == "deny"
    assert made["schema"] == "fedsilo.audit/1" and made["product_version"] == "0.1.0"
    assert made["payload"] == {"bytes": 352239, "sha256": "ef" * 32}
    assert made["rules"] == [
        {"rule": "delta_l2", "outcome": "deny", "reason": "DELTA_L2", "measured": 9.5, "limit": 4.0, "line": 12}
    ]
    raw = json.loads(raw_lines(story)[20])
    assert made["t"] == raw["t"] and made["previous"] == raw["link"]["previous"]


def test_a_line_is_one_line_of_ascii_that_every_log_system_takes(story: Path) -> None:
    rule = {"rule": "r" * 128, "outcome": "deny", "measured": 1, "limit": 2, "line": 3, "reason": "R" * 128}
    longest = {
        **json.loads(raw_lines(story)[20]), "rules": [rule] * 40, "reasons": ["C" * 64] * 40, "run": "r" * 128,
        "peer": "p" * 128, "kind": "k" * 128, "actor": "a" * 128,
    }  # fmt: skip
    for event in (*events(story), chosen(longest, "00" * 32, "log")):
        line = export_line(event, "0.1.0")
        assert line.isascii() and line.isprintable() and len(line) <= LINE_BYTES_MAX
    assert json.loads(export_line(chosen(longest, "00", "log"), "0"))["shortened"] is True


# ---- following -----------------------------------------------------------------------------------------


def test_follows_a_growing_log_over_its_segments(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with open_log(tmp_path / "log", segment_bytes_max=1200) as log:
        log.append("start")
        rounds = iter(range(12))

        def grow() -> bool:
            """Stands for the daemon: appends while the exporter has nothing to do."""
            sequence = next(rounds, None)
            if sequence is None:
                return False
            append_send(log, sequence)
            return True

        work = Export(tmp_path / "log", out, tmp_path / "p", target="t", product_version="0.1.0")
        work.run(grow)
        assert len(list((tmp_path / "log").glob("*.jsonl"))) > 3
        assert numbers(out) == list(range(log.size)) and work.records == log.size
        leaves = [hashlib.sha256(b"\x00" + line).hexdigest() for line in raw_lines(tmp_path / "log")]
        assert [json.loads(line)["leaf"] for line in out.read_bytes().splitlines()] == leaves


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        append_send(log, 1)
        path = next((tmp_path / "log").glob("*.jsonl"))
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        reader = LogReader(tmp_path / "log")
        assert [record["seq"] for _, record, _ in reader.read()] == [0]
        assert reader.read() == []
        path.write_bytes(whole)
        assert [record["seq"] for _, record, _ in reader.read()] == [1]


def test_works_while_the_daemon_writes_and_after_it_stopped(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    words = ("--log", state, "--format", "jsonl", "--to", out)
    with open_log(state / "audit") as log:
        append_send(log, 1)
        assert invoke(*words).exit_code == 0
        append_send(log, 2)
    assert invoke(*words, "--json").exit_code == 0
    assert numbers(out) == [0, 1, 2, 3]
    again = invoke(*words, "--json")
    assert json.loads(again.stdout)["data"]["records"] == 0 and numbers(out) == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["before", "half", "after"])
def test_T39_kill_9_anywhere_neither_loses_nor_repeats_a_record(
    tmp_path: Path, how: str, sampled: Callable[[Sequence[int], int], list[int]]
) -> None:
    with open_log(tmp_path / "log", segment_bytes_max=900) as log:
        for sequence in range(6):
            append_send(log, sequence)
        size = log.size
    out = tmp_path / "out"
    child = [sys.executable, "-m", "tests.protocol.audit_export_child", str(tmp_path / "log"), str(out)]
    kills = 0
    # one record takes about eight of these calls; each child dies at another one, from opening the file on
    calls = sampled((1, 3, 6, 8, 9, 10, 11, 13, 15, 17), 4)
    for fatal_call in calls:
        done = subprocess.run([*child, str(fatal_call), how], cwd=ROOT, env={**os.environ}, check=False)
        kills += done.returncode == -9
    assert kills == len(calls)
    export_all(tmp_path / "log", out)
    assert numbers(out) == list(range(size))


def test_a_changed_record_ends_it_with_status_7_and_nothing_after_it_is_exported(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        for sequence in range(3):
            append_send(log, sequence, payload_bytes=10)
    path = next((tmp_path / "log").glob("*.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"bytes":10', b'"bytes":11')
    path.write_bytes(b"".join(lines))
    out = tmp_path / "out"
    ended = invoke("--log", tmp_path / "log", "--format", "jsonl", "--to", out)
    assert ended.exit_code == 7 and "record 4 does not follow the record before it" in ended.stderr
    # the changed line itself is well-formed: only what follows shows it
    assert len(out.read_bytes().splitlines()) == 4
    assert invoke("--log", tmp_path / "log", "--format", "jsonl", "--to", out).exit_code == 7


def test_what_is_behind_the_place_is_not_read_again(tmp_path: Path) -> None:
    """Shown by a line end that is lost behind the place: who counts lines anew from there is one short."""
    with open_log(tmp_path / "log") as log:
        append_send(log, 1)
        path = next((tmp_path / "log").glob("*.jsonl"))
        size = log.size
        by_number, first = LogReader(tmp_path / "log", first=size), LogReader(tmp_path / "log")
        first.read()
        by_place = LogReader(tmp_path / "log", first.place)
        assert by_number.read() == by_place.read() == []
        path.write_bytes(path.read_bytes().replace(b"\n", b" ", 1))
        append_send(log, 2)
    for reader in (by_number, by_place):
        assert [record["seq"] for _, record, _ in reader.read()] == list(range(size, log.size))


@pytest.mark.parametrize("damage", ["gap", "order", "bytes", "segment"])
def test_damage_is_noticed_where_it_is(tmp_path: Path, damage: str) -> None:
    with open_log(tmp_path / "log", segment_bytes_max=1200) as log:
        for sequence in range(6):
            append_send(log, sequence)
    first, second, *_ = sorted((tmp_path / "log").glob("*.jsonl"))
    lines = first.read_bytes().splitlines(keepends=True)
    if damage == "gap":
        first.write_bytes(b"".join([lines[0], *lines[2:]]))
    elif damage == "order":
        first.write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
    elif damage == "bytes":
        first.write_bytes(b"".join([lines[0], b"{" + lines[1], *lines[2:]]))
    else:
        second.unlink()
    reader = LogReader(tmp_path / "log")
    with pytest.raises(VerificationError):
        while reader.read():
            pass
    assert reader.place.seq == {"gap": 1, "order": 0, "bytes": 1, "segment": len(lines)}[damage]


def test_a_log_that_was_cut_or_rewritten_behind_the_position_is_refused(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        for sequence in range(3):
            append_send(log, sequence)
    out = tmp_path / "out"
    export_all(tmp_path / "log", out)
    path = next((tmp_path / "log").glob("*.jsonl"))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(VerificationError, match="record 5, which was exported, is gone or was changed"):
        export_all(tmp_path / "log", out)


def test_a_position_is_for_one_log_format_and_destination(tmp_path: Path) -> None:
    for name, origin in (("a", SILO), ("b", COORDINATOR)):
        with open_log(tmp_path / name, origin) as log:
            append_send(log, 1)
    out = tmp_path / "out"
    assert invoke("--log", tmp_path / "a", "--format", "jsonl", "--to", out).exit_code == 0
    for changed in (
        ("--log", tmp_path / "b", "--format", "jsonl", "--to", out),
        ("--log", tmp_path / "a", "--format", "jsonl", "--to", tmp_path / "o2", "--position", f"{out}.position"),
    ):
        assert invoke(*changed).exit_code == 6
    with pytest.raises(ConflictError, match="another log, format or destination"):  # written by an earlier version
        read_position(Path(f"{out}.position"), log=LogReader(tmp_path / "a").key, target=f"cef {out}")
    (tmp_path / "broken").write_text("[]")
    with pytest.raises(ConflictError, match="not a position file"):
        read_position(tmp_path / "broken", log="", target="")


def test_a_file_that_is_not_as_it_was_left(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        append_send(log, 1)
    out, foreign = tmp_path / "out", tmp_path / "foreign"
    foreign.write_text("something else\n")
    with pytest.raises(ConflictError, match="no position file says"):
        Export(tmp_path / "log", foreign, tmp_path / "p", target="t", product_version="0.1.0")
    export_all(tmp_path / "log", out)
    size = out.stat().st_size
    os.truncate(out, size - 1)
    with pytest.raises(ConflictError, match=f"has {size - 1} bytes; {size} were written"):
        export_all(tmp_path / "log", out)
    out.rename(tmp_path / "rotated")  # as a log rotation does
    with open_log(tmp_path / "log") as log:
        append_send(log, 2)
    export_all(tmp_path / "log", out)
    assert numbers(out) == [2, 3]


def test_two_exporters_of_one_position_are_refused(tmp_path: Path) -> None:
    from fedsilo.files.durable import lock_exclusively

    with open_log(tmp_path / "log") as log:
        append_send(log, 1)
    with lock_exclusively(tmp_path / "out.position.lock"):
        assert invoke("--log", tmp_path / "log", "--format", "jsonl", "--to", tmp_path / "out").exit_code == 6


def test_a_first_record_can_be_chosen_and_is_chained_to_the_one_before(tmp_path: Path) -> None:
    with open_log(tmp_path / "log", segment_bytes_max=900) as log:
        for sequence in range(4):
            append_send(log, sequence)
        size = log.size
    out = tmp_path / "out"
    assert invoke("--log", tmp_path / "log", "--format", "jsonl", "--to", out, "--first", "3").exit_code == 0
    assert numbers(out) == list(range(3, size))
    with pytest.raises(NotFoundError):
        LogReader(tmp_path / "log", first=size + 1)
    with pytest.raises(VerificationError):
        LogReader(tmp_path / "log", Place(3, "ab" * 32))


@pytest.mark.parametrize(
    "words",
    [
        (),
        *(("--format", name, "--to", "x") for name in ("xml", "ocsf", "cef", "JSONL")),
        ("--format", "jsonl"),
        ("--to", "x"),
        ("--follow",),
        ("--format", "jsonl", "--to", "x", "--syslog", "localhost:6514"),
        ("--format", "jsonl", "--to", "x", "--last", "3"),
        ("--out", "folder", "--follow"),
        ("--out", "folder", "--format", "jsonl"),
    ],
)
def test_options_that_do_not_go_together(story: Path, words: tuple[str, ...]) -> None:
    assert invoke("--log", story, *words).exit_code == 2 and not Path("x").exists()


def test_a_position_survives_being_read_back(tmp_path: Path) -> None:
    position = Position("key", "target", Place(7, "ab" * 32), 99, "0.1.0")
    position.save(tmp_path / "p")
    assert read_position(tmp_path / "p", log="key", target="target") == position
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o600


# ---- after retention (T38, T39) ------------------------------------------------------------------------

ALL_AGES = 2**52  # milliseconds since 1970: older than this is every record


def exported(log: Path, to: Path, *words: str) -> Any:
    return invoke("--log", log, "--format", "jsonl", "--to", to, *words)


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


# ---- what a kill tore, and what others wrote (T39) ------------------------------------------------------


def lines_of(log: Path, version: str = fedsilo.__version__) -> list[bytes]:
    """What an export of this version writes for each record."""
    return [export_line(event, version).encode() + b"\n" for event in events(log)]


@pytest.mark.parametrize("rest", [b"x\n", b"x", b"\n", b"{", b'{"schema":"fedsilo.audit/1"'])
def test_T39_what_somebody_else_wrote_behind_the_position_is_refused_and_kept(tmp_path: Path, rest: bytes) -> None:
    """Where no record follows, nothing there can be ours, not even what a line begins with."""
    log, out = tmp_path / "log", tmp_path / "out"
    with open_log(log) as opened:
        append_send(opened, 1)
    assert exported(log, out).exit_code == 0
    whole = out.read_bytes() + rest
    out.write_bytes(whole)
    refused = exported(log, out)
    assert refused.exit_code == 6 and "holds what this export did not write" in refused.output
    assert out.read_bytes() == whole


def test_T39_what_is_behind_the_position_must_be_how_the_next_records_begin(tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    with open_log(log) as opened:
        append_send(opened, 1)
    assert exported(log, out).exit_code == 0
    done, position = out.read_bytes(), (tmp_path / "out.position").read_bytes()
    with open_log(log) as opened:
        append_send(opened, 2)
    lines = lines_of(log)
    assert b"".join(lines[:2]) == done
    next_line, last_line = lines[2:]
    ours = [b"", next_line[:1], next_line[:-1], next_line, next_line + last_line[:9], next_line + last_line]
    foreign = [b"x\n", next_line[:9] + b"x", next_line + b"x\n", last_line, next_line + last_line + b"\n"]
    for rest in ours + foreign:
        out.write_bytes(done + rest)
        (tmp_path / "out.position").write_bytes(position)
        made = exported(log, out)
        assert made.exit_code == (0 if rest in ours else 6), (rest, made.output)
        assert out.read_bytes() == (b"".join(lines) if rest in ours else done + rest)


@pytest.mark.parametrize("version", ["0.0.1", "99.0.0"])
def test_T39_a_line_torn_by_a_program_of_another_version_is_mended(tmp_path: Path, version: str) -> None:
    """A line says the version; after a kill and an upgrade the torn one is still known by the version killed."""
    log, out = tmp_path / "log", tmp_path / "out"
    with open_log(log) as opened:
        append_send(opened, 1)
        append_send(opened, 2)
    lines = lines_of(log, version)
    previous = json.loads(lines[2])["previous"]
    target = f"jsonl {out.absolute()}"
    Position(LogReader(log).key, target, Place(2, previous), len(lines[0] + lines[1]), version).save(
        tmp_path / "out.position"
    )
    out.write_bytes(b"".join(lines[:3]) + lines[3][:-20])
    assert exported(log, out).exit_code == 0
    assert numbers(out) == [0, 1, 2, 3]
    versions = [json.loads(line)["product_version"] for line in out.read_bytes().splitlines()]
    assert versions == [version, version, fedsilo.__version__, fedsilo.__version__]


@pytest.mark.parametrize("change", [b"x\n", b""])
def test_T39_a_file_that_grows_or_shrinks_by_another_hand_ends_a_running_export(tmp_path: Path, change: bytes) -> None:
    """Else what is written next would stand where the position does not say."""
    out = tmp_path / "out"
    with open_log(tmp_path / "log") as log:
        append_send(log, 1)

        def interfere(log: AuditLog = log) -> bool:
            """Stands for the daemon and for whoever else writes to the file."""
            out.write_bytes(out.read_bytes() + change if change else b"")
            append_send(log, 2)
            return log.size < 6

        work = Export(tmp_path / "log", out, tmp_path / "position", target="t", product_version="0.1.0")
        with pytest.raises(ConflictError, match="were written"):
            work.run(interfere)
        assert work.records == 2
