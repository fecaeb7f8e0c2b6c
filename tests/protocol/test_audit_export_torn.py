"""T39: of a file that an export appends to, what its own kill tore is mended; what somebody else wrote is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedsilo
from fedsilo.audit.export import Export, FileSink, Position, chosen, export_line
from fedsilo.audit.log import AuditLog
from fedsilo.audit.reader import LogReader, Place
from fedsilo.cli.audit import app
from fedsilo.protocol.errors import ConflictError
from tests.protocol.audit_parties import SILO, append_send, open_log, segment


def exported(log: Path, to: Path) -> Any:
    return CliRunner().invoke(app, ["export", "--log", str(log), "--format", "jsonl", "--to", str(to)])


def lines_of(log: Path, version: str = fedsilo.__version__) -> list[bytes]:
    """What an export of this version writes for each record."""
    return [
        export_line(chosen(json.loads(line), hashlib.sha256(b"\x00" + line).hexdigest(), SILO), version).encode()
        + b"\n"
        for line in segment(log).read_bytes().splitlines()
    ]


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["seq"] for line in path.read_bytes().splitlines()]


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

        reader = LogReader(tmp_path / "log")
        sink = FileSink(out, None, reader.place)
        work = Export(reader, sink, "0.1.0", tmp_path / "position", "t", wait=interfere)
        with pytest.raises(ConflictError, match="were written"):
            work.run()
        assert work.records == 2
