"""Who answered what for a release, when and why, in queries and report: also of a guard that was started again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.audit.index import HOLD_ENDS
from fedsilo.audit.notes import forget, note_of, notes_of
from fedsilo.audit.proofs import check
from fedsilo.audit.record import Record, note_text
from fedsilo.cli.audit import app
from fedsilo.cli.audit_report import audit_report, page
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import ConflictError, UsageError
from silo.guard.answers.queries import Queries
from silo.guard.commands import Halts
from silo.guard.ledger import Release
from tests.policies import setting
from tests.simulated import screening as site
from tests.simulated.queries import as_json, asked_of, queries_of, same, slow
from tests.world import Bench, command

NOTE = "asked for twice today"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Two persons approve each update."""
    text = setting.policy_text(first_rounds=1)
    place = text.index("  lora.factors:")
    policy = setting.policy_of(text[:place] + text[place:].replace("persons: 1", "persons: 2", 1))
    with closing(Bench(tmp_path / "silo", policy)) as made:
        yield made


def held(bench: Bench) -> Release:
    return bench.hold(bench.factors())


def told(site: Queries, release: str) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    ask = as_json(site)
    shown = ask["approval"]({"release": release})
    (row,) = ask["approvals"]({})["releases"]
    return shown["state"], shown["approvers"]["given"], row["answers"]


def test_T36_a_rejected_release_says_who_answered_what_when_and_why_after_a_restart_too(bench: Bench) -> None:
    release = held(bench)
    bench.clock_now += 60
    bench.approve(release, "alice")
    bench.clock_now += 60
    bench.reject(release, "bob", reason_code="UNEXPECTED", reason=NOTE)
    state, given, answers = before = told(asked_of(bench), release.id)
    rows = [("alice", "approve", setting.NOW + 60, "", ""), ("bob", "reject", setting.NOW + 120, "UNEXPECTED", NOTE)]
    names = ("person", "verdict", "at", "reason", "note")
    assert state == "rejected"
    assert given == [dict(zip(names, row, strict=True), time=utc(row[2])) for row in rows]
    assert answers == [dict(zip(names, row, strict=True), at=utc(row[2])) for row in rows]
    with closing(bench.restart()) as again:
        assert told(asked_of(again), release.id) == before


def rejected(bench: Bench, note: str) -> dict[str, Any]:
    """The record of a no with this note."""
    bench.reject(held(bench), reason_code="UNEXPECTED", reason=note)
    return bench.events("approval.deny")[-1]


def test_T36_the_note_of_a_no_is_bound_to_its_record_and_leaves_with_no_export(bench: Bench, tmp_path: Path) -> None:
    record, log = rejected(bench, NOTE), bench.folder / "audit"
    assert note_of(log, Record(record)) == NOTE  # whole, at the site
    made = audit_report([log])
    assert [each.get("note") for each in made["approvals"][0]["answers"]] == [None, NOTE] and NOTE in page(made)
    told = CliRunner().invoke(app, ["release", record["detail"]["release"], "--log", str(log), "--json"])
    assert told.exit_code == 0 and NOTE not in told.stdout  # records as they are
    assert NOTE in CliRunner().invoke(app, ["release", record["detail"]["release"], "--log", str(log)]).stdout
    # what leaves the site: lines, proofs, the folder itself
    bench.audit.checkpoint()
    proof = CliRunner().invoke(app, ["prove", str(record["seq"]), "--log", str(log), "--json"])
    out = tmp_path / "export"
    assert CliRunner().invoke(app, ["export", "--log", str(log), "--out", str(out)]).exit_code == 0
    stream = ["export", "--log", str(log), "--format", "jsonl", "--to", str(tmp_path / "siem.jsonl")]
    assert CliRunner().invoke(app, stream).exit_code == 0
    leaves = [proof.stdout.encode(), (tmp_path / "siem.jsonl").read_bytes()]
    leaves += [path.read_bytes() for path in [*out.rglob("*"), *log.rglob("*")] if path.is_file()]
    assert not any(NOTE.encode() in each for each in leaves)
    assert check(out, "")["verified"]
    assert hashlib.sha256(NOTE.encode()).hexdigest() != record["detail"]["note"]  # nobody guesses it by its digest


@pytest.mark.parametrize("trouble", ["", "altered", "missing"])
def test_T36_a_note_that_was_exchanged_is_a_problem_and_one_that_is_elsewhere_a_notice(
    bench: Bench, trouble: str
) -> None:
    record, log = rejected(bench, NOTE), bench.folder / "audit"
    bench.audit.checkpoint()
    (kept,) = notes_of(log).iterdir()
    match trouble:
        case "altered":
            kept.write_bytes(kept.read_bytes().replace(b"twice", b"never"))
        case "missing":
            kept.unlink()
    (told,) = json.loads(CliRunner().invoke(app, ["verify", str(log), "--json"]).stdout)["data"]
    assert told["verified"] is (trouble != "altered") and bool(told["notices"]) is (trouble == "missing")
    says = {"": "", "altered": "is not the one that was recorded", "missing": "is not beside this log"}[trouble]
    for words in ("release", record["detail"]["release"]), ("show", str(record["seq"])), ("tail",):
        done = CliRunner().invoke(app, [*words, "--log", str(log)])
        assert done.exit_code == 0 and (says in done.stderr if trouble else "the note to" not in done.stderr), words
    assert note_of(log, Record(record)) == ("" if trouble else NOTE)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("x" * 501, "x" * 500),
        ("two\nlines\x1b[2J", "two lines[2J"),
        ("-----BEGIN EC PRIVATE KEY-----", "(key) EC PRIVATE KEY-----"),
        ("-----\u200bBEGIN", "(key)"),
        ("x" * 498 + "\u202e y", "x" * 498 + " y"),
    ],
)
def test_T36_T40_a_note_is_kept_printable_in_one_line_of_500_characters_and_without_a_key(
    bench: Bench, given: str, kept: str
) -> None:
    with pytest.raises(UsageError, match="a note"):  # of a client that signed something else than it showed
        rejected(bench, given)
    assert note_of(bench.folder / "audit", Record(rejected(bench, note_text(given)))) == kept == note_text(kept)


@pytest.mark.parametrize(
    ("note", "what"),
    [
        ("token = sk-abcdefabcdef", "a token"), ("see ghp_0123456789abcdef", "a token"),
        ("the Password: hunter22", "a key or password with its name"),
        ("api_key=0123456789", "a key or password with its name"),
        ("-----BEGIN EC PRIVATE KEY-----", "a key block"),
    ],
)  # fmt: skip
def test_T36_a_note_with_what_looks_like_a_secret_is_refused_and_the_refusal_says_why(
    bench: Bench, note: str, what: str
) -> None:
    with pytest.raises(UsageError, match=f"a note is kept as it is written, and this one has what looks like {what}"):
        rejected(bench, note)
    assert not notes_of(bench.folder / "audit").exists()


@pytest.mark.parametrize("note", ["6 tokens of 12 seem odd", "risk-adjusted: ask again", "password policy: see page 4"])
def test_T36_a_note_that_only_speaks_of_secrets_is_kept(bench: Bench, note: str) -> None:
    assert note_of(bench.folder / "audit", Record(rejected(bench, note))) == note


def test_T36_a_yes_to_other_facts_than_were_shown_is_refused_in_a_sentence(bench: Bench) -> None:
    release = held(bench)
    for other, what in ({"shown": "0" * 64}, "a fact"), ({"digest": "0" * 64}, "digest"):
        with pytest.raises(ConflictError, match=f"^{what} of {release.id} is not as it was shown$") as refused:
            bench.approve(release, **other)
        assert refused.value.code == "STALE_VIEW"


def test_T36_a_no_without_a_note_names_none_and_a_note_goes_with_its_record(bench: Bench) -> None:
    assert "note" not in rejected(bench, note_text(" "))["detail"] and not notes_of(bench.folder / "audit").exists()
    log, record = bench.folder / "audit", rejected(bench, NOTE)
    forget(log, [Record(record)])
    assert note_of(log, Record(record)) == NOTE
    forget(log, [])
    assert note_of(log, Record(record)) == ""


def test_T36_the_counterpart_an_approved_release_names_its_approvers_without_a_reason(bench: Bench) -> None:
    release = held(bench)
    for person in ("alice", "bob"):
        bench.approve(release, person)
    state, given, answers = told(asked_of(bench), release.id)
    assert state == "approved" and [(each["person"], each["reason"], each["note"]) for each in given] == [
        ("alice", "", ""), ("bob", "", ""),
    ]  # fmt: skip
    assert [each["reason"] for each in answers] == ["", ""]


def ended(bench: Bench, end: str) -> None:
    release = held(bench)
    match end:
        case "approved":
            for person in ("alice", "bob"):
                bench.approve(release, person)
        case "rejected":
            bench.reject(release, reason_code="TIMING")
        case "expired":
            bench.clock_now += 9 * 24 * 3600
            bench.releases.expire()
        case "missed":
            bench.releases.miss("run-1", 1, None)
        case "denied":
            answers = [bench.answer(release, person=person) for person in ("alice", "bob")]
            bench.ledger.payloads.remove([release.digest])
            with pytest.raises(ConflictError):
                for answer in answers:
                    bench.releases.approve(answer)


@pytest.mark.parametrize("end", [*HOLD_ENDS[:-1], ""])
def test_a_hold_that_is_over_is_counted_as_held_no_more_and_its_row_says_how_it_ended(bench: Bench, end: str) -> None:
    outbox = queries_of(bench)["outbox"]
    if end:
        ended(bench, end)
    else:
        held(bench)  # the counterpart: people are asked still
    for ask in (outbox, queries_of(bench)["outbox"]):  # followed, and read anew
        answer = ask({})
        assert same(answer["messages"], slow(bench.audit, "egress"))
        row = answer["messages"][-1]
        assert (row["verdict"], row["outcome"], answer["held"]) == ("hold", end, 0 if end else 1)
        assert bool(ask({"seq": row["seq"]})["would_pass"]) is not bool(end)
    assert [row["outcome"] for row in outbox({"verdict": "allow"})["messages"]] == ([""] if end == "approved" else [])


def test_a_hold_that_a_deadline_of_the_run_ended_is_missed_in_the_outbox_as_in_the_ledger(bench: Bench) -> None:
    release = bench.hold(bench.factors(), 60.0)
    assert bench.releases.expire() == []
    bench.clock_now += 61
    assert [settled.outcome for settled in bench.releases.expire()] == ["missed"]
    assert bench.ledger.release(release.id).state == "missed"
    assert [row["outcome"] for row in queries_of(bench)["outbox"]({})["messages"]] == ["missed"]


def test_the_same_bytes_held_again_wait_although_a_person_refused_them_before(bench: Bench) -> None:
    outbox = queries_of(bench)["outbox"]
    ended(bench, "rejected")
    held(bench)
    answer = outbox({})
    assert ([row["outcome"] for row in answer["messages"]], answer["held"]) == (["", "rejected"], 1)


TWO_PERSONS = setting.policy_text(first_rounds=1).replace("persons: 1", "persons: 2")


@pytest.mark.parametrize(
    ("people", "state", "given", "said"),
    [
        ([], "held", 0, "held: 0 of 2 approvals"),
        (["alice"], "held", 1, "held: 1 of 2 approvals"),
        (["alice", "bob"], "granted", 2, "granted: 2 of 2 approvals; decided in record"),
    ],
)
def test_T36_the_first_of_two_approvals_grants_nothing(
    tmp_path: Path, people: list[str], state: str, given: int, said: str
) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(TWO_PERSONS))) as bench:
        release = bench.hold(bench.factors())
        for person in people:
            bench.approve(release, person)
    made = audit_report([bench.folder / "audit"])
    (told,) = made["approvals"]
    assert (told["state"], told["given"], told["needed"]) == (state, given, 2) and said in page(made)
    assert [item["person"] for item in made["persons"]] == people


def test_T36_a_rejection_is_told_as_one(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "a", setting.policy_of(TWO_PERSONS))) as bench:
        release = bench.hold(bench.factors())
        bench.approve(release, "alice")
        bench.reject(release, "bob")
    made = audit_report([bench.folder / "audit"])
    assert [item["state"] for item in made["approvals"]] == ["rejected"] and "rejected by bob (CONTENT)" in page(made)


def test_T36_two_releases_of_the_same_bytes_are_told_apart(tmp_path: Path) -> None:
    """Both are approved: the second one is over what the policy lets out in a step, and its approval frees nothing."""
    with closing(site.bench(tmp_path, site.policy(on_hit="hold"))) as bench:
        answers = (1, (site.PLANTED["canary"],)), (4, ()), (7, ())
        for release in [bench.hold(bench.responses(*answers)) for _ in range(2)]:
            bench.approve(release)
    made = audit_report([bench.folder / "audit"])
    assert [item["state"] for item in made["approvals"]] == ["granted", "refused"]
    assert "approved, and denied by the rules" in page(made)


def test_T18_who_ended_a_halt_is_told_with_the_halt(tmp_path: Path) -> None:
    with closing(site.bench(tmp_path, site.policy(["canary"], max_hits_per_day=1, release=2))) as bench:
        bench.responses((1, (site.PLANTED["canary"],)), (4, (site.PLANTED["canary"],)), (7, ()))
        halts = Halts(bench.judge, bench.ledger)
        (row,) = halts.rows()
        for person in ("alice", "bob"):
            halts.lift_halt(command("approvals.release", {"kind": row.kind, "digest": row.digest}, person=person))
    made = audit_report([bench.folder / "audit"])
    assert [item["event"] for item in made["halts"]] == ["halt", "release"] and made["approvals_total"] == 0
    assert [item["person"] for item in made["halt_grants"]] == ["alice", "bob"]
    assert "agreed to end a halt 1" in page(made) and "Who agreed to end a halt" in page(made)


@pytest.mark.parametrize("rounds", [0, 1])
def test_T36_what_left_without_a_person_is_told_by_the_line_that_lets_it(tmp_path: Path, rounds: int) -> None:
    policy = setting.policy_of(setting.policy_text(first_rounds=rounds))
    with closing(Bench(tmp_path / "a", policy)) as bench:
        offered = bench.factors()
        if rounds:
            settled = bench.approve(bench.hold(offered))
            offered = settled.allowed if settled else None
        bench.gate.transmit(offered)
    made = audit_report([bench.folder / "audit"])
    line = policy.line_of(("egress", "lora.factors", "approvals"))
    told = [(row["kind"], row["messages"], row["file"], row["line"]) for row in made["left_unasked"]]
    assert told == ([] if rounds else [("lora.factors", 1, "policy", line)])
    assert made["left_asked"] == {"asked": rounds, "unasked": 1 - rounds, "not_told": 0, "control": 0}
    assert f"{rounds} after people" in made["in_words"] and (f"line {line} of the policy" in page(made)) is not rounds
