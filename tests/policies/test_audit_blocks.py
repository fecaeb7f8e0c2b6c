"""The policy's blocks `audit` and `retention`: what is absent, what contradicts, which way each field tightens."""

from __future__ import annotations

import pytest

from fedsilo.protocol.errors import UsageError
from policies.compare import compare, meet
from policies.model import Audit, Retention
from tests.policies.setting import edited, policy_of, policy_text

TEXT = policy_text()
BLOCKS = TEXT[TEXT.index("\naudit:") :]


def test_absent_blocks_are_those_of_the_threat_model() -> None:
    file = policy_of(TEXT.replace(BLOCKS, "\n")).file
    assert file == policy_of(TEXT).file
    assert file.audit == Audit() and file.retention == Retention()
    assert (file.audit.payload_archive, file.audit.checkpoint_every.records, file.audit.checkpoint_every.rounds) == (
        True,
        100,
        1,
    )
    assert (file.audit.witnesses, file.audit.min_witnesses) == (("coordinator", "peers"), 1)
    retention = file.retention
    assert (retention.records_years, retention.payload_days, retention.outbox_max_gb) == (6, 90, 50)


@pytest.mark.parametrize(("witnesses", "most"), [("[coordinator, peers]", 4), ("[coordinator]", 1), ("[peers]", 3)])
def test_no_more_witnesses_can_be_demanded_than_there_are(witnesses: str, most: int) -> None:
    def text(least: int) -> str:
        changed = TEXT.replace("witnesses: [coordinator, peers]", f"witnesses: {witnesses}")
        return changed.replace("min_witnesses: 1", f"min_witnesses: {least}")

    assert policy_of(text(most)).file.audit.min_witnesses == most
    with pytest.raises(UsageError, match=f"{most + 1} exceeds the {most} that count") as raised:
        policy_of(text(most + 1))
    line = next(number for number, row in enumerate(text(1).splitlines(), 1) if "min_witnesses" in row)
    assert raised.value.message.startswith(f"policy.yaml:{line}:")


@pytest.mark.parametrize(
    ("field", "before", "after", "direction"),
    [
        ("min_witnesses: ", "1", "2", "tighter"),
        ("witnesses: ", "[coordinator, peers]", "[coordinator]", "tighter"),
        ("payload_archive: ", "true", "false", "looser"),
        ("records: ", "100", "200", "looser"),
        ("rounds: ", "1", "2", "looser"),
        ("records_years: ", "6", "10", "tighter"),
        ("payload_days: ", "90", "91", "looser"),
        ("outbox_max_gb: ", "50", "49", "tighter"),
    ],
)
def test_each_field_has_its_direction_and_the_meet_takes_the_tighter(
    field: str, before: str, after: str, direction: str
) -> None:
    one = policy_of(TEXT)
    changed = BLOCKS.replace(f" {field}{before}", f" {field}{after}", 1)
    assert changed != BLOCKS
    two = edited(BLOCKS, changed)
    (change,) = compare(one.file, two.file)
    assert change.direction == direction
    tighter = (two if direction == "tighter" else one).file
    for both in (meet(one.file, two.file), meet(two.file, one.file)):
        assert (both.audit, both.retention) == (tighter.audit, tighter.retention)
