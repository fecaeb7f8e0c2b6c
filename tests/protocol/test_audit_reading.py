"""What the audit commands tell of a log that they are given: whose folder, how far, what nobody verified (T38)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.audit import audit_verify
from fedsilo.audit.reader import NOTE_BYTES_MAX, read_lines, read_note
from fedsilo.audit.record import LINE_BYTES_MAX
from fedsilo.audit.segments import LEAVES_BYTES_MAX
from fedsilo.audit.transcripts import check_rounds, verification_warnings
from fedsilo.cli import audit
from fedsilo.cli.audit import app
from fedsilo.protocol.errors import VerificationError
from tests.policies.setting import policy_text
from tests.protocol.audit_parties import (
    COORDINATOR,
    SILO,
    Clock,
    append_send,
    copied,
    exchange,
    introduce,
    open_log,
    segment,
    two_witnessed_logs,
)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return two_witnessed_logs(tmp_path_factory.mktemp("honest"))


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def results(*paths: Path) -> list[tuple[bool, list[str], list[str]]]:
    return [
        (result["verified"], result["problems"], result["notices"]) for result in audit_verify.verify_logs(list(paths))
    ]


def cut(folder: Path, records: int) -> Path:
    """Keep the first records and no checkpoint of more."""
    lines = segment(folder).read_bytes().splitlines(keepends=True)
    segment(folder).write_bytes(b"".join(lines[:records]))
    for path in (folder / "checkpoints").glob("*.note"):
        if int(path.stem) > records:
            path.unlink()
    return folder


# ---- ends that were dropped -------------------------------------------------------------------------------


def test_T38_the_shorter_of_two_copies_is_named(honest: tuple[Path, Path], tmp_path: Path) -> None:
    whole, short = honest[0], cut(copied(honest[0], tmp_path / "short"), 9)
    notice = f"ends 1 records before the copy {whole}: older, or cut"
    assert results(short, whole) == [(True, [], [notice]), (True, [], [])]
    assert results(whole, short) == [(True, [], []), (True, [], [notice])]
    told = invoke("verify", short, whole)
    assert told.exit_code == 0 and f"warning: {short} (hospital_a): {notice}" in told.stderr
    answer = json.loads(invoke("verify", short, whole, "--json").stdout)
    assert any(notice in warning for warning in answer["warnings"]) and answer["data"][0]["notices"] == [notice]
    alone = subprocess.run(
        [sys.executable, "-I", audit_verify.__file__, str(short), str(whole)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert alone.returncode == 0 and f"    notice: {notice}\n" in alone.stdout


def test_T38_a_copy_without_a_checkpoint_that_a_peer_countersigned_is_found_out(tmp_path: Path) -> None:
    """The owner signs before it shows: a checkpoint that a peer holds was in the folder before the record after it."""
    with open_log(tmp_path / "silo") as silo, open_log(tmp_path / "coordinator", COORDINATOR) as coordinator:
        introduce(silo, coordinator)
        silo.append("start")
        append_send(silo, 1)
        coordinator.append("start")
        exchange(silo, coordinator)
        exchange(silo, coordinator)
        silo.append("policy.load")  # the peer countersigned 3 records; the fourth has no checkpoint yet
        shutil.copytree(tmp_path / "silo", tmp_path / "copy")
    logs = tmp_path / "copy", tmp_path / "coordinator"
    whole, peer = results(*logs)
    assert whole == peer == (True, [], [])
    missing = f"checkpoints/{3:012d}.note"
    (logs[0] / missing).unlink()
    ((verified, (problem,), notices), peer) = results(*logs)
    assert not verified and problem.startswith(f"{missing} is missing; {logs[1]} has it (witnessed/") and not notices
    assert peer == (True, [], [])
    # With no record after it, it may have been made and shown after this folder was copied: said, and no more.
    cut(logs[0], 3)
    ((verified, problems, (notice,)), peer) = results(*logs)
    assert verified and not problems and notice.startswith(f"{missing} is missing; {logs[1]} has it (witnessed/")


def test_T38_a_middle_checkpoint_that_only_a_copy_still_has_is_found_out(
    honest: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = copied(honest[0], tmp_path / "silo")
    first, *_ = sorted((folder / "checkpoints").glob("*.note"))
    first.unlink()
    assert results(folder)[0][:2] == (True, [])  # alone, a checkpoint more or less says nothing
    own, whole = results(folder, honest[0])
    assert own[1] == [f"checkpoints/{first.name} is missing; {honest[0]} has it (checkpoints/{first.name})"]
    assert whole == (True, [], [])


def test_T38_a_damaged_copy_does_not_make_the_whole_one_wrong(honest: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copied(honest[0], tmp_path / "silo")
    segment(folder).write_bytes(segment(folder).read_bytes().replace(b'"allow"', b'"deny"', 1))
    damaged, whole = results(folder, honest[0])
    assert not damaged[0] and any(f"from the copy in {honest[0]}" in problem for problem in damaged[1])
    assert whole == (True, [], [])


# ---- whose folder -----------------------------------------------------------------------------------------


def test_T38_two_folders_of_one_name_are_told_apart_by_their_paths(honest: tuple[Path, Path], tmp_path: Path) -> None:
    folders = [copied(honest[0], tmp_path / name / "hospital_a") for name in ("one", "two")]
    segment(folders[1]).write_bytes(segment(folders[1]).read_bytes().replace(b'"allow"', b'"deny"', 1))
    told = invoke("verify", *folders)
    assert told.exit_code == 7
    rows = [line.split("  ")[0] for line in told.stdout.splitlines()[1:3]]
    assert rows == [f"{folder} (hospital_a)" for folder in folders]
    problems = told.stdout.splitlines()[3:]
    assert problems and all(line.startswith(f"{folders[1]} (hospital_a): ") for line in problems)
    assert f"1 of 2 logs do not verify: {folders[1]} (hospital_a)" in told.stderr
    alone = invoke("verify", folders[0])
    assert alone.stdout.splitlines()[1].startswith("hospital_a  ")  # one folder, named as its key says


def test_T38_a_folder_with_another_partys_key_is_named_by_its_path(honest: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copied(honest[0], tmp_path / "hospital_a")
    shutil.copyfile(honest[1] / "keys" / "log.vkey", folder / "keys" / "log.vkey")
    genuine = copied(honest[1], tmp_path / "coordinator")
    told = invoke("verify", folder, genuine)
    assert told.exit_code == 7
    lines = told.stdout.splitlines()[3:]
    assert lines and all(line.startswith(f"{folder} (coordinator): ") for line in lines)
    assert f"1 of 2 logs do not verify: {folder} (coordinator)" in told.stderr
    assert invoke("verify", folder).stdout.splitlines()[1].startswith(f"{folder} (coordinator)  ")


def test_the_auditors_module_takes_the_state_folder_around_a_log(honest: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copied(honest[0], tmp_path / "state" / "audit")
    command = [sys.executable, "-I", audit_verify.__file__, str(tmp_path / "state")]
    alone = subprocess.run(command, capture_output=True, text=True, check=False)
    assert alone.returncode == 0 and f"    {folder}\n" in alone.stdout


def test_T38_too_few_witnesses_are_counted(honest: tuple[Path, Path]) -> None:
    told = invoke("verify", "--min-witnesses", "9", honest[0])
    assert told.exit_code == 7
    assert "9 witnesses demanded, 1 found; 9 vouch for the first 0 of 10 records only" in told.stdout


def test_T38_a_log_that_its_daemon_goes_on_writing_is_not_accused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records and a checkpoint over them, written while the verifier turns from one of the two to the other."""
    log = open_log(tmp_path / "log")
    log.append("start")

    def going_on(name: str) -> None:
        real = getattr(audit_verify.Log, name)

        def read_then_write(self: audit_verify.Log, *arguments: Any) -> Any:
            found = real(self, *arguments)
            append_send(log, log.size)
            log.checkpoint()
            return found

        monkeypatch.setattr(audit_verify.Log, name, read_then_write)

    going_on("_read_segments")
    going_on("_read_notes")
    assert results(tmp_path / "log") == [(True, [], [])]
    monkeypatch.undo()
    log.close()
    cut(tmp_path / "log", 1)
    (tmp_path / "log" / "checkpoints" / "000000000001.note").unlink()
    assert results(tmp_path / "log")[0][0] is False


# ---- files that no honest log has -------------------------------------------------------------------------

HUGE_BYTES = 128 << 20
# a line of 1 MiB is held a few times over, a file of leaf hashes of 64 MiB not at all
PEAK_BYTES_MAX = 24 << 20


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("checkpoints/000000000099.note", "checkpoints/000000000099.note is damaged (it has more than 65536 bytes)"),
        ("witnessed/x.note", "witnessed/x.note is damaged (it has more than 65536 bytes)"),
        ("keys/x.vkey", "keys/x.vkey is damaged (it has more than 65536 bytes)"),
        ("000000000000.jsonl", "000000000000.jsonl: record 10 is longer than any may be"),
        ("000000000010.leaves", "000000000010 has no records or leaf hashes that can be read"),
    ],
)
def test_T37_a_huge_file_in_a_foreign_log_is_refused_and_not_read(
    honest: tuple[Path, Path], tmp_path: Path, name: str, told: str
) -> None:
    """Sparse, so it costs its sender nothing."""
    folder = copied(honest[0], tmp_path / "silo")
    with (folder / name).open("ab") as stream:
        stream.truncate(HUGE_BYTES)
    tracemalloc.start()
    try:
        (own, own_problems, _), (others, _, _) = results(folder, honest[1])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (own, others) == (False, True) and told in own_problems
    assert peak < PEAK_BYTES_MAX
    assert invoke("verify", folder, honest[1]).exit_code == 7


def test_T37_a_huge_line_is_read_by_no_command(honest: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copied(honest[0], tmp_path / "silo")
    with segment(folder).open("ab") as stream:
        stream.truncate(HUGE_BYTES)
    commands: list[tuple[str | Path, ...]] = [
        ("verify", folder, honest[1]),
        ("tail", "--log", folder),
        ("show", "99", "--log", folder),
    ]
    commands += [("export", "--log", folder, "--out", tmp_path / "out"), ("prove", "9", "--log", folder)]
    for words in commands:
        tracemalloc.start()
        try:
            told = invoke(*words)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert told.exit_code == 7 and "record 10" in told.stderr + told.stdout, words
        assert peak < PEAK_BYTES_MAX, words


def test_T37_notes_and_keys_are_read_by_no_other_way_beyond_their_bound(tmp_path: Path) -> None:
    for size, refused in ((NOTE_BYTES_MAX, False), (NOTE_BYTES_MAX + 1, True)):
        path = tmp_path / f"{size}.note"
        path.write_bytes(b"x" * size)
        if refused:
            with pytest.raises(VerificationError, match="has more than 65536 bytes"):
                read_note(path)
        else:
            assert len(read_note(path)) == size


@pytest.mark.parametrize("longer", [0, 1])
def test_T38_a_line_of_the_length_that_a_record_may_have_is_read_and_no_longer_one(tmp_path: Path, longer: int) -> None:
    (tmp_path / "log").mkdir()
    line = b"x" * (LINE_BYTES_MAX + longer)
    (tmp_path / "log" / f"{0:012d}.jsonl").write_bytes(line + b"\n")
    if longer:
        with pytest.raises(VerificationError, match="record 0 has more than"):
            list(read_lines(tmp_path / "log"))
    else:
        assert list(read_lines(tmp_path / "log")) == [(0, line)]
    [told] = audit_verify.verify_logs([tmp_path / "log"])
    assert (f"{0:012d}.jsonl: record 0 is longer than any may be" in told["problems"]) == bool(longer)


def test_a_bound_is_the_same_in_both_readers() -> None:
    assert (audit_verify.NOTE_BYTES_MAX, audit_verify.LINE_BYTES_MAX, audit_verify.LEAVES_MAX) == (
        NOTE_BYTES_MAX,
        LINE_BYTES_MAX,
        LEAVES_BYTES_MAX,
    )


# ---- what nobody verified ---------------------------------------------------------------------------------


def readings(log: Path, folder: Path) -> list[tuple[str | Path, ...]]:
    policy = folder / "policy.yaml"
    policy.write_text(policy_text(), encoding="utf-8")
    # from the last record on: what this policy says of the others is not asked here
    replay = ("replay", "--log", log, "--policy", policy, "--since", "9")
    return [("tail", "--log", log), ("show", "0", "--log", log), replay]


def test_T38_whoever_reads_a_log_that_does_not_verify_is_told(honest: tuple[Path, Path], tmp_path: Path) -> None:
    folder = copied(honest[0], tmp_path / "silo")
    segment(folder).write_bytes(segment(folder).read_bytes().replace(b'"round":1', b'"round":2', 1))
    said = "this log does not verify, what is shown may be false: record 2 does not follow the record before it"
    for words in readings(folder, tmp_path):
        told = invoke(*words)
        assert told.exit_code == 0 and f"warning: {said}" in told.stderr and said not in told.stdout
        assert json.loads(invoke(*words, "--json").stdout)["warnings"] == [f"{said} (and 1 other problems)"]
    for words in readings(honest[0], tmp_path):
        assert invoke(*words).stderr == ""
        assert json.loads(invoke(*words, "--json").stdout)["warnings"] == []


def test_T38_whoever_reads_a_log_too_large_to_verify_at_once_is_told(
    honest: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "VERIFIED_BYTES_MAX", 100)
    for words in readings(honest[0], tmp_path):
        told = invoke(*words)
        assert told.exit_code == 0
        assert "nothing of this log was verified" in told.stderr and f"fedsilo audit verify {honest[0]}" in told.stderr


def test_T38_what_a_verification_warns_of_is_told_by_one_function(honest: tuple[Path, Path], tmp_path: Path) -> None:
    """Whatever relies on a verification prints the same lines; a log with nothing to warn of has none."""
    short = cut(copied(honest[0], tmp_path / "short"), 9)
    unsigned = open_log(tmp_path / "unsigned")
    unsigned.append("start")
    append_send(unsigned, 1)
    with open_log(tmp_path / "reduced", segment_bytes_max=1) as log:
        append_send(log, 1)
        first = log.remove_old(2**52)
    for folders, said in (
        ((short, honest[0]), [f"hospital_a): ends 1 records before the copy {honest[0]}: older, or cut"]),
        ((tmp_path / "unsigned",), ["hospital_a): 2 newest records not signed yet"]),
        ((tmp_path / "reduced",), [f"hospital_a): leaf hashes only of the first {first} records: retention removed"]),
        (honest, []),
    ):
        results = audit_verify.verify_logs(list(folders))
        check_rounds(results, list(folders))
        lines = verification_warnings(audit.told_apart(results))
        told = invoke("verify", *folders)
        assert told.stderr == "".join(f"warning: {line}\n" for line in lines)
        assert len(said) <= len(lines) <= 2 * len(said) and all(text in told.stderr for text in said)
    unsigned.close()


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [(1_800_000_000_123, "2027-01-15T08:00:00.123+00:00"), (10**15, f"{10**15} milliseconds")],
)
def test_a_time_that_no_calendar_has_is_shown_as_its_number(tmp_path: Path, milliseconds: int, shown: str) -> None:
    with open_log(tmp_path / "log", clock=Clock(milliseconds / 1000)) as log:
        log.append("start")
    told = invoke("tail", "--log", tmp_path / "log")
    assert told.exit_code == 0 and shown in told.stdout
    recorded = json.loads(invoke("tail", "--log", tmp_path / "log", "--json").stdout)["data"][0]["t"]
    assert recorded == milliseconds


def test_a_kind_that_is_none_is_refused_with_the_one_that_may_be_meant(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        append_send(log, 1)
        append_send(log, 2, kind="of.another.version")
    refused = invoke("tail", "--log", tmp_path / "log", "--kind", "lora.factor")
    assert refused.exit_code == 2 and "no kind 'lora.factor' (did you mean 'lora.factors'?)" in refused.stderr
    assert "one of: bandit.reward, " in refused.stderr
    event = invoke("tail", "--log", tmp_path / "log", "--event", "egress.decisions")
    assert event.exit_code == 2 and "(did you mean 'egress.decision'?)" in event.stderr
    # A kind that nothing has, and one that the log has but this version does not know, are no mistakes.
    assert "no such record" in invoke("tail", "--log", tmp_path / "log", "--kind", "metrics.eval").stdout
    found = json.loads(invoke("tail", "--log", tmp_path / "log", "--kind", "of.another.version", "--json").stdout)
    assert [record["seq"] for record in found["data"]] == [2, 3]
    assert SILO in found["data"][0]["actor"]


def rows(*words: str | Path) -> list[dict[str, Any]]:
    done = invoke(*words, "--json")
    assert done.exit_code == 0, done.stderr
    return list(json.loads(done.stdout)["data"])


def log_of_two_releases(folder: Path) -> Path:
    """One that a person let go, and one that another person rejected, a second apart."""
    clock = Clock(1_800_000_000)
    with open_log(folder, clock=clock) as log:
        for round_number, person, answer in ((1, "alice", "approval.grant"), (2, "bob", "approval.deny")):
            of = {
                "kind": "lora.factors", "run": f"r{round_number}", "round": round_number, "step": 0,
                "payload": {"bytes": 9, "sha256": f"{round_number:064x}"},
            }  # fmt: skip
            release = {"release": f"r{round_number}/hospital_a/0"}
            log.append("screen.hit", **{**of, "payload": None}, detail={"responses": 3, "hits": {"dates": 2}})
            log.append("egress.decision", decision="hold", **of)
            log.append("approval.request", reasons=["APPROVALS"], detail=release, **of)
            log.append(answer, detail={**release, "person": person, "certificate": "c"}, **of)
            log.append("egress.decision", decision="allow" if person == "alice" else "deny", **of)
            # other bytes at the same place are no part of that release
            log.append("egress.decision", decision="deny", **{**of, "payload": {"bytes": 9, "sha256": "f" * 64}})
            clock.now += 1
    return folder


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (("--run", "r2"), range(6, 12)),
        (("--round", "1"), range(6)),
        (("--release", "r1/hospital_a/0"), (2, 3)),
        (("--person", "bob"), (9,)),
        (("--since", "2027-01-15T08:00:01Z"), range(6, 12)),
        (("--since", "2027-01-15T09:00:01+01:00"), range(6, 12)),
        (("--until", "2027-01-15T08:00:01"), range(6)),
        (("--person", "alice", "--round", "2"), ()),
        (("--person", "alice", "--event", "approval.grant"), (3,)),
    ],
)
def test_tail_finds_records_by_run_round_release_person_and_time(
    tmp_path: Path, filters: tuple[str, ...], found: Any
) -> None:
    log = log_of_two_releases(tmp_path / "log")
    assert [row["seq"] for row in rows("tail", "--log", log, *filters)] == list(found)


def test_tail_leaves_allowed_control_messages_out_where_that_is_asked_for(tmp_path: Path) -> None:
    of: dict[str, Any] = {"run": "r1", "round": 1, "step": 0, "direction": "egress"}
    with open_log(tmp_path / "log") as log:
        for decision, kind in ("allow", "control.poll"), ("deny", "control.poll"), ("allow", "metrics.eval"):
            log.append("egress.decision", kind=kind, decision=decision, **of)
            log.append("egress.sent", kind=kind, payload={"bytes": 1}, **of)
    assert [row["seq"] for row in rows("tail", "--log", tmp_path / "log", "--no-control")] == [2, 4, 5]
    assert len(rows("tail", "--log", tmp_path / "log")) == 6


def test_tail_prints_who_answered_about_what_and_which_screen_found_how_much(tmp_path: Path) -> None:
    log = log_of_two_releases(tmp_path / "log")
    told = invoke("tail", "--log", log, "--person", "bob").stdout
    assert "person bob" in told and "release r2/hospital_a/0" in told
    assert "dates 2, in 3 answers" in invoke("tail", "--log", log, "--event", "screen.hit").stdout
    assert invoke("tail", "--log", log, "--since", "yesterday").exit_code == 2


def test_a_release_has_its_whole_story_and_nothing_of_another(tmp_path: Path) -> None:
    log = log_of_two_releases(tmp_path / "log")
    assert [row["seq"] for row in rows("release", "r1/hospital_a/0", "--log", log)] == [0, 1, 2, 3, 4]
    assert [row["seq"] for row in rows("release", "r2/hospital_a/0", "--log", log)] == [6, 7, 8, 9, 10]
    assert invoke("release", "r3/hospital_a/0", "--log", log).exit_code == 8


def test_the_story_of_a_held_plan_has_its_hold_and_its_decision(tmp_path: Path) -> None:
    """A plan is held where it arrives; one at the same place with other bytes is no part of it."""
    of: dict[str, Any] = {"kind": "run.plan", "run": "r1", "payload": {"bytes": 10, "hmac_sha256": "ab" * 32}}
    release = {"release": "r0/hospital_a/0", "person": "ann"}
    with open_log(tmp_path / "log") as log:
        log.append("start")
        log.append("ingress.decision", decision="hold", direction="ingress", **of)
        log.append("approval.request", detail=release, **of)
        yes = log.append("approval.grant", detail=release, **of)
        other = of | {"payload": {"bytes": 10, "hmac_sha256": "cd" * 32}}
        log.append("ingress.decision", decision="deny", direction="ingress", **other)
        log.append("ingress.decision", decision="allow", direction="ingress", link={"approvals": [yes]}, **of)
    assert [row["seq"] for row in rows("release", "r0/hospital_a/0", "--log", tmp_path / "log")] == [1, 2, 3, 5]
