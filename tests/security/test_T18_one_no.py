"""T18, B6: a silo's no, as the wire shows it, is the same whoever or whatever said it at that site.

What this does not stop: how long a no took. A rule needs milliseconds and a person minutes, and a plan that persons
look at is asked for again with every poll.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.method import Offer
from policies.model import Policy
from tests.policies import setting
from tests.world import ADAPTER, Loop, command, small_factors

Wire = list[tuple[dict[str, Any], bytes]]
BASE = codec.sha256_hex(ADAPTER)
STRANGE = codec.encode_factors(
    {f"{name}.x": value for name, value in small_factors().items()}, base_digest="",
    schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32",
)  # fmt: skip
ASKED = ("first_rounds: 0", "first_rounds: 1")


def policy_with(section: str, old: str, new: str) -> Policy:
    """The policy of the tests with one change below the first line that begins like `section`."""
    text = setting.policy_text()
    place = text.index(section)
    assert old in text[place:]
    return setting.policy_of(text[:place] + text[place:].replace(old, new, 1))


def wire(loop: Loop, since: int) -> Wire:
    """What left from then on: each envelope without what is never the same twice, and the exact payload."""
    left: Wire = []
    for envelope, payload in loop.coordinator.sent[since:]:
        fields = {field.name: getattr(envelope, field.name) for field in envelope.DESCRIPTOR.fields}
        left.append(({name: fields[name] for name in fields if name not in ("sequence", "signature")}, bytes(payload)))
    return left


def kinds(left: Wire) -> list[str]:
    return [str(envelope["kind"]) for envelope, _ in left]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Loop] = []

    def loop(policy: Policy, **changes: Any) -> Loop:
        made.append(Loop(tmp_path / f"site-{len(made)}", policy, **changes))
        return made[-1]

    yield loop
    for each in made:
        each.close()


def rejected(loop: Loop) -> None:
    (release,) = loop.bench.ledger.releases("held")
    shown = {"release": release.id, "digest": release.digest, "policy_digest": loop.policy.digest}
    loop.guard.orders.reject(command("approvals.reject", shown | {"reason_code": "CONTENT", "reason": "a reason"}))


def test_T18_a_no_to_a_plan_is_the_same_bytes_whether_a_rule_a_check_or_a_person_said_it(make: Any) -> None:
    ordinary = setting.policy_of(setting.policy_text())
    left: dict[str, Wire] = {}
    for name, loop in {
        "rule": make(policy_with("  run.plan:\n", "local_steps: [1, 4]", "local_steps: [1, 3]")),
        "check": make(ordinary, load="bf16"),  # the plan's load type is not this site's, which no rule knows
        "person": make(policy_with("  run.plan:\n", *ASKED)),
    }.items():
        since = len(loop.coordinator.sent) + 1  # after the poll that brings the plan
        loop.offer_plan()
        if name == "person":
            rejected(loop)
        loop.turn()  # the poll that takes it in
        assert loop.bench.ledger.run_state("run-1") == "declined"
        left[name] = wire(loop, since)
    assert kinds(left["rule"]) == ["control.error", "control.abstain", "control.poll"]
    assert left["rule"] == left["check"] == left["person"]
    assert pb.ErrorReport.FromString(left["rule"][0][1]).code == "DECLINED"
    assert pb.Poll.FromString(left["rule"][2][1]).acknowledged_sequence > 0
    accepting = make(ordinary)  # the counterpart: a yes is seen
    accepting.offer_plan()
    since = len(accepting.coordinator.sent)
    accepting.turn()
    assert kinds(wire(accepting, since)) == ["control.poll"]


def test_T18_a_no_to_a_round_is_the_same_bytes_whatever_said_it(make: Any) -> None:
    ordinary = setting.policy_of(setting.policy_text())
    left: dict[str, Wire] = {}
    for name, loop in {
        "rule": make(policy_with("  round.open:\n", "max_prompts_per_step: 3", "max_prompts_per_step: 2")),
        "transcript": make(ordinary),
        "adapter": make(ordinary),
    }.items():
        loop.offer_plan()
        if name == "adapter":  # the round begins, and what it starts from is not let in
            loop.open_round(adapter=STRANGE)
            loop.coordinator.says("control.fetch", "global.adapter", STRANGE, run="run-1", round=1)
            since = len(loop.coordinator.sent)
            loop.base_evaluated()
        else:
            changes = {"schema_sha256": "0" * 64} if name == "transcript" else {}
            loop.show_round(1, BASE, **changes)
            since = len(loop.coordinator.sent)
            loop.turn()
        asked = ("control.poll", "control.fetch", "metrics.eval")  # what it was asked with is none of the no
        left[name] = [each for each in wire(loop, since) if each[0]["kind"] not in asked]
    assert kinds(left["rule"]) == ["control.error", "control.abstain"]
    assert left["rule"] == left["transcript"] == left["adapter"]
    assert pb.ErrorReport.FromString(left["rule"][0][1]).code == "DECLINED"


def test_T18_a_no_to_what_would_leave_is_the_same_bytes_whether_a_rule_or_a_person_said_it(make: Any) -> None:
    body = setting.responses_body((1, ("12", "12")), (4, ()), (7, ("12",)))
    left: dict[str, Wire] = {}
    for name, loop in {
        "rule": make(policy_with("  public.responses:", "max_responses_per_step: 12", "max_responses_per_step: 2")),
        "person": make(policy_with("  public.responses:", *ASKED)),
    }.items():
        loop.offer_plan()
        loop.open_round()
        loop.guard.runs.change_view(open_step=2)
        since = len(loop.coordinator.sent)
        settled = loop.guard.runs.offer(Offer("public.responses", 1, 2, body), None)
        assert settled == ("denied" if name == "rule" else None)
        if name == "person":
            rejected(loop)
        left[name] = wire(loop, since)
    assert kinds(left["rule"]) == ["control.declined"]
    assert left["rule"] == left["person"]
