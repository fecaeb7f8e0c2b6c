"""The log is enough to decide again: facts and history of every recorded decision give the verdict beside them."""

from __future__ import annotations

import json
from pathlib import Path

from fedsilo.treaty.wire._generated import federation_pb2 as pb
from policies.engine import decide
from policies.history import History
from tests.policies import setting
from tests.simulated.guarded import Bench


def test_every_decision_replays_from_its_own_record(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))
    bench.gate.send("control.heartbeat", pb.Heartbeat())
    bench.responses()
    bench.factors()
    bench.factors()  # the second of a round is denied, by the count of the first
    records = bench.events("egress.decision")
    assert [record["decision"] for record in records] == ["allow", "allow", "allow", "deny"]
    for record in records:
        logged = json.loads(json.dumps(record["facts"]))
        again = decide(logged["final"], bench.policy, History.from_json(logged["history"]))
        assert (again.verdict, list(again.reasons)) == (record["decision"], record["reasons"])
    bench.close()
