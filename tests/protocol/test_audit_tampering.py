"""T38: whoever edits, drops, reorders or rebuilds a log is found out offline. Each attack beside the honest log."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fedsilo.audit import audit_verify
from fedsilo.audit.checkpoint import Checkpoint, open_checkpoint, parse_verifier_key, sign_checkpoint
from fedsilo.audit.merkle import leaf_hash, verify_inclusion
from fedsilo.audit.record import parse_record
from fedsilo.cli.audit import app
from fedsilo.protocol.errors import VerificationError
from tests.protocol.audit_parties import (
    COORDINATOR,
    KEYS,
    OTHER_KEY,
    SILO,
    append_send,
    copied,
    exchange,
    introduce,
    open_log,
    problems,
    segment,
    two_witnessed_logs,
)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_witnessed_logs(tmp_path_factory.mktemp("honest"))


def rewrite(folder: Path, keep: int | None = None, **changes: object) -> None:
    """Rewrite the records with a consistent chain of hashes, as somebody with write access would."""
    path = segment(folder)
    lines, previous = path.read_bytes().splitlines()[:keep], "0" * 64
    rewritten = []
    for line in lines:
        record = json.loads(line) | changes
        record["link"]["previous"] = previous
        rewritten.append(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
        previous = leaf_hash(rewritten[-1]).hex()
    path.write_bytes(b"".join(line + b"\n" for line in rewritten))


def test_T38_honest_logs_verify_alone_and_together(honest: tuple[Path, Path]) -> None:
    silo, coordinator = honest
    results = audit_verify.verify_logs([silo, coordinator])
    assert [(r["log"], r["path"], r["verified"], r["size"], r["problems"]) for r in results] == [
        ("hospital_a", str(silo), True, 10, []),
        ("coordinator", str(coordinator), True, 6, []),
    ]
    assert results[0]["cosigned"] == {COORDINATOR: 10} and results[1]["cosigned"] == {SILO: 6}
    assert [result["unsigned"] for result in results] == [0, 0]
    assert problems(silo) == [[]]


FILES = ["000000000000.jsonl", "checkpoints", "witnessed", "keys"]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_T38_any_changed_byte_anywhere_is_detected(
    honest: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = copied(honest[0], tmp_path_factory.mktemp("flip") / "silo")
    part = data.draw(st.sampled_from(FILES))
    chosen = folder / part
    files = [chosen] if chosen.is_file() else sorted(path for path in chosen.iterdir())
    path = data.draw(st.sampled_from(files))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert problems(folder) != [[]], (path.name, place)


def test_T38_a_dropped_end_is_shown_by_own_checkpoints(honest: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copied(honest[0], tmp_path / "silo")
    rewrite(folder, keep=None)
    assert problems(folder) == [[]]  # the rewriting itself changes nothing
    rewrite(folder, keep=7)
    assert any("its end was dropped" in problem for problem in problems(folder)[0])


def test_T38_a_dropped_end_with_its_checkpoints_is_shown_by_the_other_side(
    honest: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = copied(honest[0], tmp_path / "silo")
    rewrite(folder, keep=1)
    for path in (folder / "checkpoints").glob("*.note"):
        if int(path.stem) > 1:
            path.unlink()
    assert problems(folder) == [[]]  # alone nothing shows ...
    own, others = problems(folder, honest[1])  # ... the coordinator remembers
    assert any(COORDINATOR in problem and "end was dropped" in problem for problem in own)
    assert others == []


def test_T38_reordered_records_are_detected_even_with_a_repaired_chain(
    honest: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = copied(honest[0], tmp_path / "silo")
    lines = segment(folder).read_bytes().splitlines(keepends=True)
    segment(folder).write_bytes(b"".join([*lines[:2], lines[3], lines[2], *lines[4:]]))
    assert any("out of order" in problem for problem in problems(folder)[0])
    records = [json.loads(line) for line in lines]
    records[2]["seq"], records[3]["seq"] = 3, 2
    records[2], records[3] = records[3], records[2]
    segment(folder).write_bytes(
        b"".join(json.dumps(r, sort_keys=True, separators=(",", ":")).encode() + b"\n" for r in records)
    )
    rewrite(folder)
    found = problems(folder)[0]
    assert found and all("does not fit the first" in problem for problem in found)


def test_T38_an_edited_record_with_a_repaired_chain_is_detected(honest: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copied(honest[0], tmp_path / "silo")
    rewrite(folder, actor="spiffe://net/silo/other")
    assert any("does not fit the first" in problem for problem in problems(folder)[0])


@pytest.mark.parametrize("key", ["own", "new"])
def test_T38_a_log_rebuilt_from_nothing_is_shown_by_the_witness(
    honest: tuple[Path, Path], tmp_path: Path, key: str
) -> None:
    changes: dict[str, Any] = {} if key == "own" else {"key": OTHER_KEY}
    with open_log(tmp_path / "silo", **changes) as rebuilt:
        rebuilt.append("start")
        for sequence in range(10):
            append_send(rebuilt, sequence, payload_bytes=1)
        rebuilt.append("stop")
    assert problems(tmp_path / "silo") == [[]]  # alone it is a perfect log
    own, others = problems(tmp_path / "silo", honest[1])
    assert any("does not fit the first 10 records" in problem for problem in own)
    assert any("another key" in problem for problem in own) == (key == "new")
    assert others == []


def test_T38_a_removed_segment_checkpoint_or_key_is_a_problem(honest: tuple[Path, Path], tmp_path: Path) -> None:
    for number, removed in enumerate(("*.jsonl", "checkpoints/*", "keys/log.vkey", "keys/spiffe*")):
        folder = copied(honest[0], tmp_path / str(number))
        for path in folder.glob(removed):
            path.unlink()
        assert problems(folder) != [[]], removed
    assert problems(tmp_path / "nowhere") == [["no such folder"]]


def test_T38_two_copies_of_one_log_are_compared(tmp_path: Path) -> None:
    with open_log(tmp_path / "silo") as log:
        log.append("start")
    for name in ("copy", "fork"):
        copied(tmp_path / "silo", tmp_path / name)
    with open_log(tmp_path / "silo") as log:
        log.append("stop")
    assert problems(tmp_path / "silo", tmp_path / "copy") == [[], []]  # an older copy is no fork
    with open_log(tmp_path / "fork") as log:
        append_send(log, 1)
    assert all("differs within the first 2 records" in own[0] for own in problems(tmp_path / "silo", tmp_path / "fork"))


def test_T38_a_restored_backup_is_refused_at_the_next_exchange(tmp_path: Path) -> None:
    silo, coordinator = open_log(tmp_path / "silo"), open_log(tmp_path / "coordinator", COORDINATOR)
    introduce(silo, coordinator)
    silo.append("start")
    exchange(silo, coordinator)
    silo.close()
    copied(tmp_path / "silo", tmp_path / "backup")
    silo = open_log(tmp_path / "silo")
    introduce(silo, coordinator)
    append_send(silo, 1)
    exchange(silo, coordinator)
    exchange(silo, coordinator)
    silo.close()
    restored = open_log(tmp_path / "backup")
    introduce(restored, coordinator)
    with pytest.raises(VerificationError, match="records were dropped"):
        coordinator.take(restored.offer(COORDINATOR), SILO)
    with pytest.raises(VerificationError, match="signed with its key"):
        restored.take(coordinator.offer(SILO), COORDINATOR)
    append_send(restored, 7, payload_bytes=999)
    append_send(restored, 8)
    assert coordinator.take(restored.offer(COORDINATOR), SILO) is None  # not countersigned: it may be a lost reply
    with pytest.raises(VerificationError, match="does not extend"):
        coordinator.take(restored.offer(COORDINATOR, previous_size=3), SILO)
    with pytest.raises(VerificationError, match="does not have"):
        restored.take(coordinator.offer(SILO), COORDINATOR)


def test_T38_a_lost_reply_heals_by_itself(tmp_path: Path) -> None:
    with open_log(tmp_path / "silo") as silo, open_log(tmp_path / "coordinator", COORDINATOR) as coordinator:
        introduce(silo, coordinator)
        silo.append("start")
        coordinator.append("start")
        exchange(silo, coordinator)
        append_send(silo, 1)
        coordinator.take(silo.offer(COORDINATOR), SILO)  # countersigned; the reply never arrives
        append_send(silo, 2)
        assert silo.offer(COORDINATOR).previous_size == 1
        assert coordinator.take(silo.offer(COORDINATOR), SILO) is None
        silo.take(coordinator.offer(SILO), COORDINATOR)  # brings the cosignature that was lost
        assert silo.offer(COORDINATOR).previous_size == 3
        checkpoint = coordinator.take(silo.offer(COORDINATOR), SILO)
        assert checkpoint is not None and checkpoint.size == 5


def test_T38_witness_memory_survives_a_restart_and_a_change_of_it_is_refused(tmp_path: Path) -> None:
    with open_log(tmp_path / "silo") as silo, open_log(tmp_path / "coordinator", COORDINATOR) as coordinator:
        introduce(silo, coordinator)
        silo.append("start")
        exchange(silo, coordinator)
    with open_log(tmp_path / "silo") as silo, open_log(tmp_path / "coordinator", COORDINATOR) as coordinator:
        introduce(silo, coordinator)
        silo.append("stop")
        assert silo.offer(COORDINATOR).previous_size == 1
        exchange(silo, coordinator)
        (witnessed,) = (tmp_path / "coordinator" / "witnessed").iterdir()
        witnessed.write_text(silo.latest_note, encoding="utf-8")
        exchange(silo, coordinator)
        witnessed.write_text(silo.latest_note.rpartition("—")[0], encoding="utf-8")
        with pytest.raises(VerificationError, match="this party's cosignature"):
            coordinator.take(silo.offer(COORDINATOR), SILO)


def test_T38_an_unknown_or_false_peer_is_refused(tmp_path: Path) -> None:
    with open_log(tmp_path / "silo") as silo, open_log(tmp_path / "coordinator", COORDINATOR) as coordinator:
        silo.append("start")
        with pytest.raises(VerificationError, match="not introduced"):
            silo.offer(COORDINATOR)
        silo.trust_peer(COORDINATOR, OTHER_KEY.public_key())
        coordinator.trust_peer(SILO, OTHER_KEY.public_key())
        with pytest.raises(VerificationError):
            coordinator.take(silo.offer(COORDINATOR), SILO)


def test_the_auditors_module_runs_alone(honest: tuple[Path, Path], tmp_path: Path) -> None:
    """Copied away from the project, without it on the path; and it stays short enough to be read."""
    source = Path(audit_verify.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 400
    assert "fedsilo." not in "".join(line for line in source.splitlines() if "import" in line)
    script = tmp_path / "audit_verify.py"
    script.write_text(source, encoding="utf-8")

    def run(*logs: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", str(script), *map(str, logs)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    good = run(*honest)
    assert good.returncode == 0 and "hospital_a: verified, 10 records" in good.stdout
    damaged = copied(honest[0], tmp_path / "damaged")
    rewrite(damaged, keep=3)
    bad = run(damaged, honest[1])
    assert bad.returncode == 7 and "hospital_a: NOT VERIFIED" in bad.stdout and "problem: " in bad.stdout


def test_command_verify_answers_with_results_and_exit_code_7(honest: tuple[Path, Path], tmp_path: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["verify", *map(str, honest), "--json"])
    assert good.exit_code == 0
    assert [item["verified"] for item in json.loads(good.stdout)["data"]] == [True, True]
    damaged = copied(honest[0], tmp_path / "state" / "audit")
    rewrite(damaged, keep=3)
    bad = runner.invoke(app, ["verify", str(tmp_path / "state"), str(honest[1]), "--json"])
    answer = json.loads(bad.stdout)
    assert bad.exit_code == 7 and not answer["ok"]
    assert [item["verified"] for item in answer["data"]] == [False, True]
    assert set(answer["data"][0]) >= {"log", "path", "verified", "size", "problems"}
    assert runner.invoke(app, ["verify", str(damaged)]).exit_code == 7


def test_commands_show_tail_prove_and_export(honest: tuple[Path, Path], tmp_path: Path) -> None:
    runner, log = CliRunner(), ["--log", str(honest[0]), "--json"]
    assert json.loads(runner.invoke(app, ["show", "2", *log]).stdout)["data"]["event"] == "egress.sent"
    assert runner.invoke(app, ["show", "99", *log]).exit_code == 8
    newest = json.loads(runner.invoke(app, ["tail", "-n", "3", *log]).stdout)["data"]
    assert [record["seq"] for record in newest] == [7, 8, 9]
    assert "egress.sent" in runner.invoke(app, ["tail", "--log", str(honest[0])]).stdout
    proof = json.loads(runner.invoke(app, ["prove", "4", *log]).stdout)["data"]
    checkpoint = open_checkpoint(proof["note"], parse_verifier_key(proof["keys"][0]))
    path = [bytes.fromhex(part) for part in proof["inclusion"]]
    assert verify_inclusion(leaf_hash(proof["record"].encode()), 4, checkpoint.size, path, checkpoint.root)
    assert not verify_inclusion(leaf_hash(proof["record"].encode()), 5, checkpoint.size, path, checkpoint.root)
    out = tmp_path / "bundle"
    exported = runner.invoke(app, ["export", "--out", str(out), "--first", "3", "--last", "5", *log])
    assert json.loads(exported.stdout)["data"]["proved"] == 3
    bundle = json.loads((out / "proofs.json").read_text(encoding="utf-8"))
    checkpoint = open_checkpoint(bundle["note"], parse_verifier_key(bundle["keys"][0]))
    for line, item in zip((out / "records.jsonl").read_bytes().splitlines(), bundle["proofs"], strict=True):
        path = [bytes.fromhex(part) for part in item["inclusion"]]
        assert verify_inclusion(leaf_hash(line), item["seq"], checkpoint.size, path, checkpoint.root)
    assert runner.invoke(app, ["export", "--out", str(out), *log]).exit_code == 6


def many_checkpoints(folder: Path) -> Path:
    """A log of 40 records with a checkpoint after each: every record is covered by all that follow."""
    with open_log(folder) as log:
        for _ in range(40):
            log.append("start")
            log.checkpoint()
    assert len(list((folder / "checkpoints").iterdir())) == 40
    assert problems(folder) == [[]]
    return folder


def test_T38_one_removed_record_is_told_once_and_what_follows_from_it_is_counted(tmp_path: Path) -> None:
    folder = many_checkpoints(tmp_path / "silo")
    lines = segment(folder).read_bytes().splitlines(keepends=True)
    segment(folder).write_bytes(b"".join([*lines[:20], *lines[21:]]))
    # Checkpoints at 21 to 39 cover what is gone; the one at 40 says more records than there are.
    assert problems(folder) == [
        [
            "record 20 carries number 21: records are missing or out of order",
            "checkpoints/000000000021.note does not fit the first 21 records (and 18 more of this kind)",
            "checkpoints/000000000040.note says 40 records, the log has 39: its end was dropped",
        ]
    ]
    (result,) = audit_verify.verify_logs([folder])
    assert result["suspects"] == [19, 20] and not result["verified"]


@pytest.mark.parametrize("repaired", [False, True])
def test_T38_one_changed_digit_names_the_records_to_look_at(tmp_path: Path, repaired: bool) -> None:
    folder = many_checkpoints(tmp_path / "silo")
    lines = segment(folder).read_bytes().splitlines(keepends=True)
    record = json.loads(lines[20])
    record["t"] += 1
    lines[20] = json.dumps(record, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    segment(folder).write_bytes(b"".join(lines))
    if repaired:
        rewrite(folder)
    (result,) = audit_verify.verify_logs([folder])
    follows = "checkpoints/000000000021.note does not fit the first 21 records (and 19 more of this kind)"
    assert result["problems"] == ([] if repaired else ["record 21 does not follow the record before it"]) + [follows]
    assert result["suspects"] == ([20, 20] if repaired else [20, 21])
    told = CliRunner().invoke(app, ["verify", str(folder)])
    where = "record 20" if repaired else "records 20 to 21"
    assert f"hint: look at {where} first: `fedsilo audit show 20 --log {folder}`" in told.stderr
    assert told.stderr.count("does not fit") == 0 and told.stdout.count("does not fit") == 1


def test_T38_a_log_with_too_many_different_problems_says_how_many_are_left_out(tmp_path: Path) -> None:
    folder = many_checkpoints(tmp_path / "silo")
    for number in range(audit_verify.PROBLEMS_MAX + 3):
        # in letters: a name that differed in its digits only would be folded
        (folder / "checkpoints" / f"{chr(ord('a') + number)}.note").write_bytes(b"")
    (found,) = problems(folder)
    assert len(found) == audit_verify.PROBLEMS_MAX + 1 and found[-1] == "and 3 other problems"


def _note_below_zero(folder: Path) -> None:
    text = f"{SILO}\n-1\n{base64.b64encode(bytes(32)).decode()}\n"
    key_id = (folder / "keys" / "log.vkey").read_text(encoding="utf-8").split("+")[1]
    signature = base64.b64encode(bytes.fromhex(key_id) + KEYS[SILO].sign(text.encode())).decode()
    (folder / "checkpoints" / "x.note").write_text(f"{text}\n— {SILO} {signature}\n", encoding="utf-8")


HOSTILE_FILES: dict[str, Callable[[Path], None]] = {
    "a checkpoint of -1 records": _note_below_zero,
    "a folder as segment": lambda folder: (folder / "zzz.jsonl").mkdir(),
    "a folder as a segment of the right name": lambda folder: (folder / "000000000010.jsonl").mkdir(),
    "a folder as leaf hashes": lambda folder: (folder / "zzz.leaves").mkdir(),
    "a segment without a name": lambda folder: (folder / ".jsonl").write_bytes(b""),
    "a pipe as segment": lambda folder: os.mkfifo(folder / "zzz.jsonl"),
    "a pipe as checkpoint": lambda folder: os.mkfifo(folder / "checkpoints" / "x.note"),
    "a folder as witnessed note": lambda folder: (folder / "witnessed" / "x.note").mkdir(),
    "what a terminal obeys": lambda folder: (folder / "checkpoints" / "\x1b[2J\nall good\u202e.note").write_bytes(b""),
}


@pytest.mark.quick(keep=4)
@pytest.mark.parametrize("what", HOSTILE_FILES)
def test_T37_T38_one_partys_folder_stops_the_verifier_for_nobody(
    honest: tuple[Path, Path], tmp_path: Path, what: str
) -> None:
    """A named problem of that log, in both verifiers and in the report; the other party's log is judged as before."""
    folder = copied(honest[0], tmp_path / "silo")
    HOSTILE_FILES[what](folder)
    own, others = problems(folder, honest[1])
    assert own and others == []
    assert all(problem.isprintable() for problem in own)
    command = [sys.executable, "-I", audit_verify.__file__, str(folder), str(honest[1])]
    alone = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    by_command = CliRunner().invoke(app, ["verify", str(folder), str(honest[1])])
    report = CliRunner().invoke(app, ["report", str(folder), str(honest[1]), "--out", str(tmp_path / "out")])
    assert (alone.returncode, by_command.exit_code, report.exit_code) == (7, 7, 7)
    assert "coordinator: verified" in alone.stdout and alone.stderr == ""
    for printed in (alone.stdout, by_command.output):
        assert printed.replace("\n", "").isprintable() and "\nall good" not in printed


def test_T37_a_folders_name_is_printed_on_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "x\n\x1b[2Jcoordinator: verified"
    (folder / "keys").mkdir(parents=True)
    command = [sys.executable, "-I", audit_verify.__file__, str(folder)]
    alone = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    by_command = CliRunner().invoke(app, ["verify", str(folder)])
    assert (alone.returncode, by_command.exit_code) == (7, 7)
    for printed in (alone.stdout, by_command.stdout):
        assert "\x1b" not in printed and not any(line.startswith("\x1b[2J") for line in printed.splitlines())
        assert "\\n\\x1b[2Jcoordinator: verified" in printed


def test_what_is_no_log_folder_is_not_called_a_tampered_log(honest: tuple[Path, Path], tmp_path: Path) -> None:
    def told(path: Path) -> tuple[int, str, str]:
        answer = CliRunner().invoke(app, ["verify", str(path), "--json"])
        error = json.loads(answer.stdout)["error"]
        return answer.exit_code, error["message"], error["hint"]

    nowhere = tmp_path / "nowhere"
    assert told(nowhere)[:2] == (8, f"{nowhere} does not exist")
    demo = tmp_path / "demo"
    for name, log in zip(("coordinator", "hospital_a"), honest, strict=True):
        copied(log, demo / name / "state" / "audit")
    code, message, hint = told(demo)
    assert (code, message) == (8, f"{demo} is no log folder")
    assert hint == f"did you mean {demo}/*/state?"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert told(empty) == (8, f"{empty} is no log folder", "a log is STATE_DIR/audit")
    # A log that lost its own key is a log still, and does not verify.
    folder = copied(honest[0], tmp_path / "keyless")
    (folder / "keys" / "log.vkey").unlink()
    assert told(folder)[0] == 7


def signed_alone(folder: Path, line: bytes) -> Path:
    """A log of one record, as the holder of its key writes and signs it."""
    with open_log(folder) as log:
        log.append("start")
    segment(folder).write_bytes(line + b"\n")
    note = sign_checkpoint(Checkpoint(SILO, 1, leaf_hash(line)), KEYS[SILO])
    (folder / "checkpoints" / f"{1:012d}.note").write_text(note, encoding="utf-8")
    return folder


def one_record(folder: Path) -> bytes:
    with open_log(folder) as log:
        log.append("policy.load", facts={"x": 0.5, "list": [1, {"y": "text"}], "big": 2.5e20, "small": 1e-7})
    return segment(folder).read_bytes().rstrip(b"\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"x":0.5', b'"x":0.5'),  # the counterpart
        (b'"x":0.5', b'"x":0.50'),
        (b'"x":0.5', b'"x":5e-1'),
        (b'"x":0.5', b'"x": 0.5'),
        (b'"x":0.5', b'"x":NaN'),
        (b'"x":0.5', b'"x":-0'),
        (b'"x":0.5', b'"x":1.0'),
        (b'"x":0.5', b'"x":0.5,"x":0.5'),
        (b'"seq":0', b'"seq":0,"seq":0'),  # one reader takes the first of two equal keys, another the last
        (b'"x":0.5', b'"x":0.5,"a":1'),
        (b'{"y":"text"}', b'{"y":"text","y":"other"}'),
        (b'"y":"text"', b'"y":"te\\u0078t"'),
        (b'"y":"text"', b'"y":"te\\/xt"'),
        (b'"big":250000000000000000000', b'"big":2.5e20'),
        (b'"small":1e-7', b'"small":0.0000001'),
    ],
)
def test_T38_the_verifier_that_stands_alone_is_as_strict_about_a_record_as_the_command(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    line = one_record(tmp_path / "written")
    assert old in line
    line = line.replace(old, new)
    folder = signed_alone(tmp_path / "log", line)
    try:
        parse_record(line)
    except VerificationError:
        assert problems(folder) == [["record 0 is damaged"]]
    else:
        assert old == new and problems(folder) == [[]]


@settings(max_examples=300, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53) + 1, 2**53 - 1))
def test_T38_both_spell_every_number_alike(value: float) -> None:
    canonical = rfc8785.dumps({"x": value})
    assert audit_verify.parsed(canonical) == json.loads(canonical)
    spelled = json.dumps({"x": value}, separators=(",", ":")).encode()
    if spelled != canonical:
        with pytest.raises(ValueError, match="canonical"):
            audit_verify.parsed(spelled)
