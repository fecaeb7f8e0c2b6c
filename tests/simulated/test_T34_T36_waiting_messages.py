"""T34, T36: what waits in the outbox goes out with the persons that the policy in force asks for, or not at all."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import DeniedError, UnreachableError
from policies.model import Policy
from silo.guard.messages import Allowed, Held
from tests.policies import setting
from tests.world import Bench, command, small_factors


def asking(first_rounds: int, persons: int = 1) -> Policy:
    text = setting.policy_text(first_rounds=first_rounds)
    assert "persons: 1" in text
    return setting.policy_of(text.replace("persons: 1", f"persons: {persons}"))


def cannot_be_sent(bench: Bench, allowed: Allowed) -> None:
    bench.channel.fails, bench.channel.before_sending = UnreachableError("down"), True
    with pytest.raises(UnreachableError):
        bench.gate.transmit(allowed)


def approved(bench: Bench, *persons: str) -> Allowed:
    held = bench.factors()
    assert isinstance(held, Held)
    release = bench.releases.hold(held, deadline_seconds=None)
    arguments = {
        "release": release.id,
        "digest": release.digest,
        "policy_digest": bench.policy.digest,
        **bench.shown(release),
    }
    settled = None
    for person in persons:
        _, settled = bench.releases.approve(command("approvals.approve", arguments, person=person))
    assert settled is not None and settled.allowed is not None
    return settled.allowed


def dropped(bench: Bench) -> None:
    (item,) = bench.ledger.outbox("allowed")
    with pytest.raises(DeniedError):
        bench.gate.retry(item)
    assert bench.channel.sent == [] and bench.ledger.outbox("allowed") == []
    assert bench.events("egress.indeterminate")[-1]["reasons"] == ["APPROVAL"]


def sent(bench: Bench, allowed: Allowed) -> None:
    (item,) = bench.ledger.outbox("allowed")
    bench.gate.retry(item)
    ((envelope, payload),) = bench.channel.sent
    assert envelope.kind == "lora.factors" and codec.sha256_hex(payload) == allowed.digest


@pytest.mark.parametrize("asks", [False, True])
def test_T34_what_left_without_persons_does_not_go_out_under_a_policy_that_asks_for_some(
    tmp_path: Path, asks: bool
) -> None:
    bench = Bench(tmp_path / "a", asking(0))
    offered = bench.factors()
    assert isinstance(offered, Allowed)
    cannot_be_sent(bench, offered)
    with closing(bench.restart(asking(2) if asks else None)) as again:
        if asks:
            dropped(again)
        else:
            sent(again, offered)


@pytest.mark.parametrize("needed", [1, 2])
def test_T36_the_persons_on_record_count_and_no_others(tmp_path: Path, needed: int) -> None:
    bench = Bench(tmp_path / "a", asking(2))
    allowed = approved(bench, "alice")
    cannot_be_sent(bench, allowed)
    with closing(bench.restart(asking(2, persons=needed))) as again:
        if needed == 1:
            sent(again, allowed)
        else:
            dropped(again)


@pytest.mark.parametrize("first_rounds", [1, 2])
def test_T34_a_later_round_is_judged_as_the_round_of_the_run_that_it_was(tmp_path: Path, first_rounds: int) -> None:
    bench = Bench(tmp_path / "a", asking(0))
    first = bench.factors()
    assert isinstance(first, Allowed)
    bench.gate.transmit(first)
    bench.gate.view = replace(bench.gate.view, round=2)
    header = pb.Factors(base_digest=setting.BASE_DIGEST)
    second = bench.gate.offer(bench.gate.view.place("lora.factors", 2), header, tensors=small_factors(0.002))
    assert isinstance(second, Allowed)
    cannot_be_sent(bench, second)
    with closing(bench.restart(asking(first_rounds))) as again:
        if first_rounds == 1:
            sent(again, second)
        else:
            dropped(again)
