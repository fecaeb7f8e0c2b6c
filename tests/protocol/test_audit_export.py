"""Records for the site's own log system: each exactly once into a file, chained, and only what is on the list."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.audit.export import (
    LINE_BYTES_MAX,
    WITHHELD,
    Export,
    FileSink,
    Position,
    chosen,
    export_line,
    read_position,
)
from fedsilo.audit.reader import LogReader, Place
from fedsilo.cli.audit import app
from fedsilo.protocol.errors import ConflictError, NotFoundError, VerificationError
from tests.protocol.audit_export_child import export_all
from tests.protocol.audit_parties import COORDINATOR, SILO, append_send, copied, open_log
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

        reader = LogReader(tmp_path / "log")
        work = Export(reader, FileSink(out, None, reader.place), "0.1.0", tmp_path / "p", "t", wait=grow)
        work.run()
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
def test_T39_kill_9_anywhere_neither_loses_nor_repeats_a_record(tmp_path: Path, how: str) -> None:
    with open_log(tmp_path / "log", segment_bytes_max=900) as log:
        for sequence in range(6):
            append_send(log, sequence)
        size = log.size
    out = tmp_path / "out"
    child = [sys.executable, "-m", "tests.protocol.audit_export_child", str(tmp_path / "log"), str(out)]
    kills = 0
    # one record takes about eight of these calls; each child dies at another one, from opening the file on
    for fatal_call in (1, 3, 6, 8, 9, 10, 11, 13, 15, 17):
        done = subprocess.run([*child, str(fatal_call), how], cwd=ROOT, env={**os.environ}, check=False)
        kills += done.returncode == -9
    assert kills == 10
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
        FileSink(foreign, None, Place())
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
        ("--format", "xml", "--to", "x"),
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
    assert invoke("--log", story, *words).exit_code == 2


@pytest.mark.parametrize("name", ["ocsf", "cef", "xml", "JSONL"])
def test_a_format_that_there_is_not_is_named_with_the_one_there_is(story: Path, tmp_path: Path, name: str) -> None:
    made = invoke("--log", story, "--format", name, "--to", tmp_path / "out", "--json")
    assert made.exit_code == 2 and not (tmp_path / "out").exists()
    error = json.loads(made.stdout)["error"]
    assert error["message"] == f"unknown format '{name}': records are JSON lines"
    assert error["hint"] == "give --format jsonl; a log shipper makes anything else of them"


def test_the_range_with_proofs_is_as_it_was(story: Path, tmp_path: Path) -> None:
    made = invoke("--log", copied(story, tmp_path / "log"), "--out", tmp_path / "out", "--first", "2", "--last", "4")
    assert made.exit_code == 0
    assert (tmp_path / "out/records.jsonl").read_bytes().splitlines() == raw_lines(story)[2:5]
    assert [item["seq"] for item in json.loads((tmp_path / "out/proofs.json").read_bytes())["proofs"]] == [2, 3, 4]


def test_a_position_survives_being_read_back(tmp_path: Path) -> None:
    position = Position("key", "target", Place(7, "ab" * 32), 99, "0.1.0")
    position.save(tmp_path / "p")
    assert read_position(tmp_path / "p", log="key", target="target") == position
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o600
