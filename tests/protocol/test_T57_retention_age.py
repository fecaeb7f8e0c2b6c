"""How old records were when retention removed them is what other parties' cosignatures show (T57)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.checkpoint import cosign, cosigner_key, log_key
from fedsilo.audit.merkle import leaf_hash
from fedsilo.audit.segments import segments
from fedsilo.cli.audit import app
from tests.protocol.audit_parties import (
    COORDINATOR,
    KEYS,
    OTHER_KEY,
    SILO,
    Clock,
    append_send,
    copied,
    exchange,
    introduce,
    open_log,
)

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


# ---- with the logs of other parties ----------------------------------------------------------------------

GHOST = "spiffe://net/silo/ghost"


def cosign_as(root: Path, name: str, key: Ed25519PrivateKey, gone: int, time: float) -> None:
    """Whoever holds the silo's log lets a key of his own, under any name, countersign the removed records."""
    keys = log_key(name, key.public_key()), cosigner_key(name, key.public_key())
    path = root / "silo" / "keys" / f"forged-{keys[0].key_id.hex()}.vkey"
    path.write_text("".join(f"{each.text}\n" for each in keys))
    note = next(path for path in sorted((root / "silo" / "checkpoints").glob("*.note")) if int(path.stem) >= gone)
    note.write_text(cosign(note.read_text(), name, key, int(time)))


def told_together(root: Path, *others: str) -> tuple[list[str], list[str]]:
    logs = [root / name for name in ("silo", *others)]
    alone = verify_logs(logs)
    done = CliRunner().invoke(app, ["verify", *map(str, logs), "--json"])
    both = json.loads(done.stdout)["data"]
    assert [each["verified"] for each in both] == [each["verified"] for each in alone]
    assert all(each["verified"] for each in alone[1:])
    return alone[0]["problems"], [text for text in alone[0]["notices"] if "removed" in text]


@pytest.mark.parametrize("waited", [3600, YEAR + DAY])
@pytest.mark.parametrize("name", [COORDINATOR, GHOST])
def test_T57_an_invented_witness_proves_no_age_where_another_party_s_log_is_given(
    tmp_path: Path, name: str, waited: float
) -> None:
    gone = removed_after(tmp_path, waited, older_than=60)
    assert told_together(tmp_path, "coordinator") == told(tmp_path)
    cosign_as(tmp_path, name, OTHER_KEY, gone, Clock().now - 3 * YEAR)
    assert verify_logs([tmp_path / "silo"])[0]["verified"]  # alone a log shows who vouches for it, and no more
    problems, notices = told_together(tmp_path, "coordinator")
    young, second = waited < YEAR, name == COORDINATOR
    assert (len(problems), notices) == (young + second, [])


@pytest.mark.parametrize("knows", [True, False])
def test_T57_a_third_log_vouches_for_the_witness_it_knows_and_else_no_age_is_proven(
    tmp_path: Path, knows: bool
) -> None:
    removed_after(tmp_path, YEAR + DAY, older_than=YEAR)
    with open_log(tmp_path / "third", GHOST, key=OTHER_KEY) as third:
        third.append("start")
        if knows:
            third.trust_peer(COORDINATOR, KEYS[COORDINATOR].public_key())
    problems, notices = told_together(tmp_path, "third")
    assert problems == [] and len(notices) == (not knows)
    copied(tmp_path / "silo", tmp_path / "copy")
    assert told_together(tmp_path, "copy") == ([], [])  # the same log once more is no other party


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
