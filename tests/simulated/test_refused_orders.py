"""Orders and messages that cannot be carried out are refused by name, each beside one that can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol.errors import DeniedError, UsageError
from silo.guard.messages import Allowed
from silo.guard.releases import REJECT_CODES
from tests.policies import setting
from tests.world import Bench, Loop, command

HOLDS = setting.policy_of(setting.policy_text(first_rounds=1))
SENDS = setting.policy_of(setting.policy_text())


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(tmp_path / "silo", HOLDS)) as opened:
        yield opened


# ---- what waits in the outbox ----------------------------------------------------------------------------


def test_what_waits_is_not_let_out_by_a_decision_that_the_log_has_not(tmp_path: Path) -> None:
    with closing(Bench(tmp_path / "silo", SENDS)) as bench:
        allowed = bench.factors()
        assert isinstance(allowed, Allowed)
        assert bench.judge.reasons_not_to_retry("lora.factors", allowed.decision_seq) == []
        assert bench.judge.reasons_not_to_retry("lora.factors", bench.audit.size + 1) == ["RECORD_GONE"]


# ---- people's words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"reason": "two\nlines"},
        {"reason": "x" * 501},
        {"reason_code": "BECAUSE"},
        {"reason_code": ""},
    ],
)
def test_a_no_needs_a_known_code_and_one_line(bench: Bench, fields: dict[str, Any]) -> None:
    release = bench.hold(bench.factors())
    with pytest.raises(UsageError):
        bench.reject(release, **fields)
    assert bench.ledger.release(release.id).state == "held"
    assert bench.reject(release, reason="one line", reason_code=REJECT_CODES[0]).outcome == "denied"


def test_only_what_the_policy_holds_is_held(bench: Bench) -> None:
    """Of a kind whose block asks for nobody there is no number of persons to wait for."""
    held = bench.factors()
    assert bench.hold(held).persons >= 1
    metrics = setting.metrics_message()
    with pytest.raises(DeniedError):
        bench.releases.hold(replace(held, place=metrics.place), deadline_seconds=None)


# ---- files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "name"), [("export_release", "transfer.export"), ("import_plan", "transfer.import")])
def test_a_silo_that_dials_takes_no_files_and_one_by_files_takes_whole_paths(
    order: str, name: str, tmp_path: Path
) -> None:
    whole = command(name, {"path": str(tmp_path / "file")})
    with closing(Loop(tmp_path / "dials", SENDS)) as dials, pytest.raises(UsageError):
        getattr(dials.guard.orders, order)(whole)
    with closing(Loop(tmp_path / "files", SENDS, by_files=True)) as by_files:
        with pytest.raises(UsageError) as refused:
            getattr(by_files.guard.orders, order)(command(name, {"path": "file"}))
        assert refused.value.code == "PATH"
