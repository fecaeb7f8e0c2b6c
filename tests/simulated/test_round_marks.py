"""What a party's log leaves of a round: who may make a mark there, and what is kept of very many (T23, T37)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit import round_marks
from fedsilo.audit.log import AuditLog
from fedsilo.audit.reader import LogPages
from fedsilo.audit.round_marks import RoundMarks
from tests.policies import setting
from tests.simulated.guarded import OUR_KEY


def marked(folder: Path) -> tuple[AuditLog, RoundMarks]:
    log = AuditLog(folder, origin=setting.SILO, key=OUR_KEY, actor=setting.SILO, reserve_bytes=0)
    return log, RoundMarks(LogPages(folder), lambda: log.size, messages=True)


def test_T23_T37_messages_that_were_not_let_in_displace_no_round(tmp_path: Path) -> None:
    log, marks = marked(tmp_path / "log")
    opened: dict[str, Any] = {"run": "run-1", "round": 1, "kind": "round.open"}
    log.append("ingress.decision", decision="allow", reasons=[], **opened)
    for number in range(round_marks.ROUNDS_MAX + 8):
        made_up = {**opened, "run": f"x{number}", "round": 9}
        log.append("ingress.decision", decision="deny", reasons=["RUN_NOT_OPEN"], **made_up)
        log.append("ingress.decision", decision="deny", reasons=["RUN_NOT_OPEN"], **opened)
    log.append("egress.decision", run="run-1", round=1, kind="lora.factors", decision="deny", reasons=["X"])
    assert marks.rounds_of("run-1") == [1] and marks.rounds_of("x3") == []
    assert [(mark.event, mark.verdict) for mark in marks.of("run-1", 1)] == [
        ("ingress.decision", "allow"), ("egress.decision", "deny"),
    ]  # fmt: skip
    log.close()


def test_the_end_of_a_round_is_kept_however_many_messages_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_marks, "MARKS_MAX", 8)
    monkeypatch.setattr(round_marks, "OWN_MARKS_MAX", 4)
    log, marks = marked(tmp_path / "log")
    for step in range(1, 21):
        log.append("egress.decision", run="run-1", round=1, step=step, kind="public.responses", decision="allow")
    for number in range(10):
        verdict = {"verdicts": {"hospital_a": f"word {number}"}}
        log.append("round.result", run="run-1", round=1, detail=verdict)
    found = marks.of("run-1", 1)
    assert [mark.step for mark in found] == [*range(1, 9), 0, 0, 0, 0]
    assert [dict(mark.detail)["hospital_a"] for mark in found[8:]] == ["word 0", "word 1", "word 2", "word 9"]
    log.close()
