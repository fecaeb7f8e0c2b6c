"""Schemes that a trainer plants, sent through the real guard and read at the other side, beside what is computed."""

from __future__ import annotations

import itertools
import math
import re
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedsilo.cli.policy import app
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import WireCode
from policies.capacity import (
    GUARD_MESSAGES_PER_MINUTE,
    NOT_COUNTED,
    PROGRESS_SECONDS,
    ROUND_SECONDS,
    capacities,
    capacity_lines,
    progress_messages,
)
from policies.engine import decide, measure
from policies.grids import Bits, log2_choices
from policies.history import HistoryBook
from policies.kinds.adapters import low_bits
from policies.model import Policy
from policies.render import RULESETS
from policies.rules import RULES
from silo.guard.messages import Allowed
from tests.policies.messages import SCHEMAS, policy_named
from tests.policies.setting import (
    BASE_DIGEST,
    NOW,
    PLAN,
    SCHEMA,
    context,
    edited,
    policy_of,
    policy_text,
    small_message,
)
from tests.world import ADAPTER, Bench, Loop

POLICY = policy_of(policy_text())
STEPS = PLAN.local_steps
# One message a minute is left beside the guard's own, so that a whole round is some hundred messages.
SLOW = edited("control_messages_per_minute: 600", f"control_messages_per_minute: {GUARD_MESSAGES_PER_MINUTE + 1}")
ONE = edited("control_messages_per_minute: 600", "control_messages_per_minute: 1")


def row_of(policy: Policy, kind: str) -> Bits:
    (row,) = (row for row in capacities(policy, SCHEMA) if row.kind == kind)
    return row


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "a", POLICY)
    yield made
    made.close()


# ---- T5: low bits ----------------------------------------------------------------------------------


def test_T05_sign_and_mantissa_of_every_value_come_through_the_gate_as_planted(bench: Bench) -> None:
    sent = np.random.default_rng(7).integers(0, 1 << 32, SCHEMA.elements, dtype=np.uint32)
    values = ((sent & np.uint32(0x807FFFFF)) | np.uint32((127 - 12) << 23)).view(np.float32)
    tensors, start = {}, 0
    for name, shape in SCHEMA.tensors:
        tensors[name] = values[start : start + math.prod(shape)].reshape(shape)
        start += math.prod(shape)
    offered = bench.factors(tensors)
    assert isinstance(offered, Allowed)
    bench.gate.transmit(offered)
    got = codec.decode_factors(bytes(bench.channel.sent[-1][1])).tensors
    read = np.concatenate([got[name].reshape(-1) for name, _ in SCHEMA.tensors]).view(np.uint32)
    same = [place for place in (*range(23), 31) if not (((read ^ sent) >> place) & 1).any()]
    row = row_of(POLICY, "lora.factors")
    assert row.planted_bits == len(same) * SCHEMA.elements == 24 * 20
    assert 0 < row.planted_bits < row.bits


@pytest.mark.parametrize("grid", ["float32", "bfloat16"])
def test_T05_random_low_bits_take_as_many_from_each_value(grid: str) -> None:
    block = policy_of(policy_text()).file.egress.lora_factors
    assert block is not None
    mantissa = {"float32": 23, "bfloat16": 7}[grid]
    quantise = block.quantise.model_copy(update={"grid": grid})
    for bits in (0, 2, mantissa, 23):
        found, _ = low_bits(block.model_copy(update={"randomise_low_bits": bits, "quantise": quantise}), 20)
        assert found == 20 * (1 + mantissa - min(bits, mantissa))  # the sign stays
    nothing = block.model_copy(update={"clip_l2": 0.0, "max_l2": 0.0, "max_tensor_l2": 0.0})
    assert low_bits(nothing, 20)[0] == 0


# ---- T9: figures -----------------------------------------------------------------------------------


def test_T09_figures_on_their_grid_come_through_the_gate_as_planted(bench: Bench) -> None:
    block = POLICY.file.egress.metrics_eval
    assert block is not None
    draws = np.random.default_rng(3)
    measured = 0
    for number in range(block.per_round):
        body = pb.MetricsEval(split="held_out", adapter_digest=BASE_DIGEST)
        words = []
        for topic, name in itertools.product(sorted({"", *block.topics}), sorted(block.fields)):
            field = block.fields[name]
            width = (round((field.max - field.min) / field.quantum) + 1).bit_length() - 1
            words.append((int(draws.integers(0, 1 << width)), width))
            body.metrics.add(name=name, topic=topic, value=float(f"{words[-1][0] * field.quantum:.4f}"))
        offered = bench.gate.offer(bench.judge.view.place("metrics.eval", 1), body)
        assert isinstance(offered, Allowed), number
        bench.gate.transmit(offered)
        got = pb.MetricsEval.FromString(bytes(bench.channel.sent[-1][1])).metrics
        for metric, (word, width) in zip(got, words, strict=True):
            measured += width * (round(metric.value / block.fields[metric.name].quantum) == word)
    row = row_of(POLICY, "metrics.eval")
    assert row.planted_bits == measured > 0
    assert measured < row.bits


def test_T09_the_most_messages_that_a_policy_may_allow_are_counted_at_once() -> None:
    """Running a scheme once for each of 2 to the 52 messages would never end."""

    def late(_number: int, _frame: object) -> None:
        raise AssertionError("each message is run")

    text = policy_text()
    start = text.index("  metrics.eval:")
    most = 2**52 - 1
    policies = [
        policy_of(text[:start] + re.sub(r"per_round: \d+", f"per_round: {n}", text[start:], count=1)) for n in (1, most)
    ]
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)  # a policy of one message takes milliseconds; this only ends a test that would hang
    try:
        one, many = (row_of(policy, "metrics.eval") for policy in policies)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert one.planted_bits is not None and many.planted_bits == most * one.planted_bits > 0
    assert many.planted_bits <= many.bits


# ---- T11: control messages -------------------------------------------------------------------------


FEDAVG = PLAN.model_copy(update={"method": "fedavg-grpo"})


def in_round(folder: Path, policy: Policy) -> Loop:
    """A guard whose trainer is about to work on the first step of a round of `FEDAVG`."""
    loop = Loop(folder, policy)
    loop.offer_plan(FEDAVG)
    loop.open_round(plan=FEDAVG, public=False)
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run=FEDAVG.run, round=1)
    loop.base_evaluated()
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={})
    return loop


def said_and_heard(folder: Path, policy: Policy, counts: Sequence[int]) -> list[int]:
    """A trainer that draws each step out over so many moments of the guard's schedule: what the other side counts."""
    loop = in_round(folder, policy)
    before, loop.turn_seconds = len(loop.coordinator.bodies("control.progress")), 0.0
    try:
        for count in counts:
            for _ in range(count):
                loop.clock += PROGRESS_SECONDS
                loop.bench.clock_now += PROGRESS_SECONDS
                loop.trainer_says("step", round=1, step=1, phase="rollout")
            loop.trainer_says("done", task="PrivateStep", round=1, metrics={})
        assert loop.guard.failure is None
        heard = Counter(
            pb.Progress.FromString(payload).step for _, payload in loop.coordinator.bodies("control.progress")[before:]
        )
        return [heard[step] for step in range(1, len(counts) + 1)]
    finally:
        loop.close()


@pytest.mark.slow
def test_T11_how_often_progress_is_said_carries_what_the_row_counts_and_no_more(tmp_path: Path) -> None:
    most, row = progress_messages(SLOW, STEPS), row_of(SLOW, "control.*")
    words = [[0] * STEPS, [most] * STEPS, [3, 0, 1, 2]]
    heard = [said_and_heard(tmp_path / f"s{n}", SLOW, word) for n, word in enumerate(words)]
    assert heard == words
    measured = STEPS * math.log2(most + 1)  # each step is one of so many numbers, as the first two show
    assert row.planted_bits == pytest.approx(measured, rel=1e-12)
    assert 0 < measured <= row.bits


def sent_at(folder: Path, reports: Sequence[int]) -> list[tuple[float, int]]:
    """When, by the guard's clock, which step was said, where the trainer reports so often in each second."""
    loop = in_round(folder, POLICY)
    loop.turn_seconds, said, heard = 0.0, len(loop.coordinator.bodies("control.progress")), []
    try:
        for count in reports:
            loop.clock += 1.0
            for _ in range(count):
                loop.trainer_says("step", round=1, step=1, phase="rollout")
            loop.turn()
            told = loop.coordinator.bodies("control.progress")
            heard += [(loop.clock, pb.Progress.FromString(payload).step) for _, payload in told[said:]]
            said = len(told)
        return heard
    finally:
        loop.close()


@pytest.mark.slow
def test_T11_progress_leaves_at_the_guards_own_moments_whenever_and_however_often_the_trainer_reports(
    tmp_path: Path,
) -> None:
    """Each trainer has the same time; none moves a message by a second, or makes one more."""
    patterns = ([0] * 45, [1] * 45, [7, *[0] * 43, 9], [0, 5, 0, 0, 1] * 9)
    times = [sent_at(tmp_path / f"p{n}", pattern) for n, pattern in enumerate(patterns)]
    assert times[0] and all(other == times[0] for other in times)
    assert {moment % PROGRESS_SECONDS for moment, _ in times[0]} == {0.0}
    assert len(times[0]) in (4, 5)  # in 45 s, every 10 s


def test_T11_a_policy_that_leaves_fewer_moments_counts_fewer_bits() -> None:
    loose, tight = row_of(POLICY, "control.*"), row_of(ONE, "control.*")
    assert loose.bits > tight.bits and loose.planted_bits is not None
    assert loose.planted_bits > tight.planted_bits == 0  # type: ignore[operator]
    silent = row_of(edited("heartbeat, progress,", "heartbeat,"), "control.*")
    assert silent.planted_bits == 0 and silent.bits < tight.bits
    # by hand: a moment every 10 s, both ends counted, and as many ways to share them between the tasks of a round
    tasks = 2 * POLICY.file.ingress.run_plan.local_steps[1] + 4  # type: ignore[union-attr]
    shares = math.log2(math.comb(int(ROUND_SECONDS) // 10 + 1 + tasks, tasks))
    assert loose.bits - silent.bits == pytest.approx(shares, rel=1e-9)


def after_export(folder: Path, body: bytes) -> tuple[tuple[str, str], ...]:
    """(kind, code or kind declined) of what leaves once the trainer offers these bytes as its update."""
    loop = in_round(folder, POLICY)
    try:
        for _ in range(STEPS):
            loop.trainer_says("done", task="PrivateStep", round=1, metrics={})
        before = len(loop.coordinator.sent)
        loop.trainer_says("done", body, task="ExportDelta", round=1, metrics={})
        said: dict[str, tuple[Any, str]] = {
            "control.declined": (pb.Declined, "kind"),
            "control.error": (pb.ErrorReport, "code"),
        }
        heard = []
        for envelope, payload in loop.coordinator.sent[before:]:
            body_of, name = said.get(envelope.kind, (None, ""))
            heard.append((envelope.kind, getattr(body_of.FromString(payload), name) if body_of else ""))
        return tuple(each for each in heard if each[0] not in ("control.poll", "control.heartbeat"))
    finally:
        loop.close()


def test_T11_what_becomes_of_an_offer_says_one_of_the_outcomes_that_the_row_counts(tmp_path: Path) -> None:
    header: dict[str, Any] = {
        "base_digest": codec.sha256_hex(ADAPTER), "schema_sha256": SCHEMA.digest, "rank": 2, "scale": 2.0,
        "dtype": "float32",
    }  # fmt: skip
    update = codec.encode_factors({name: np.full(shape, 1e-4, np.float32) for name, shape in SCHEMA.tensors}, **header)
    other = codec.encode_factors({"other": np.zeros((2, 2), np.float32)}, **header)
    heard = [after_export(tmp_path / f"e{n}", body) for n, body in enumerate((update, other, b"nonsense"))]
    assert heard == [
        (("lora.factors", ""),),
        (("control.declined", "lora.factors"),),
        # the goodbye is witnessed whenever it is said, so that its checkpoint is no further outcome
        (("control.error", WireCode.INTERNAL), ("control.abstain", ""), ("control.checkpoint", "")),
    ]
    assert len(WireCode) <= 32, "the codes that the row counts"
    kinds = "[hello, poll, fetch, heartbeat, progress, declined, abstain, error, checkpoint]"
    row, offers = row_of(POLICY, "control.*"), 5  # an update, answers to two steps, two evaluations
    for kind, less in (("declined, ", offers * math.log2(4 / 3)), ("error, ", 5), (", checkpoint", 32)):
        without = row_of(edited(kinds, kinds.replace(kind, "")), "control.*")
        assert row.bits - without.bits == pytest.approx(less, rel=1e-9), kind


def let_out(policy: Policy, without: str = "", *, every: int = 20, steps: Sequence[int] = (1,)) -> int:
    """Progress messages of a whole round that the rules let out, one every so many seconds; step numbers in turn."""
    rules = [rule for rule in RULES if rule.name != without]
    assert len(rules) == len(RULES) - bool(without)
    book, allowed = HistoryBook(), 0
    for second in range(0, int(ROUND_SECONDS) + 1, every):
        step = steps[second // every % len(steps)]
        message = small_message("control.progress", pb.Progress(round=1, step=step), round_number=1, step=step)
        facts = measure(message, context(now_seconds=NOW + second))
        if decide(facts, policy, book.view(facts), rules=rules).verdict == "allow":
            book.record(facts)
            allowed += 1
    return allowed


@pytest.mark.slow
def test_T11_without_the_rate_the_counts_of_a_round_carry_more_than_the_row() -> None:
    row, tasks = row_of(ONE, "control.*"), 2 * STEPS + 4
    kept = let_out(ONE)
    assert kept == ROUND_SECONDS / 60 + 1
    assert log2_choices(kept + tasks, tasks) <= row.bits
    assert log2_choices(let_out(ONE, "messages per minute", every=2) + tasks, tasks) > row.bits


def test_T11_without_the_rule_on_their_place_step_numbers_carry_more_than_the_row() -> None:
    row, words = row_of(ONE, "control.*"), tuple(2**31 + 17 * word for word in range(100))
    assert let_out(ONE, steps=words) == 0
    sent = let_out(ONE, "place of a control message", steps=words)
    assert sent * 31 > row.bits, "each message says 31 bits of the trainer's"


def test_T11_ways_to_share_messages_between_tasks_are_as_many_as_there_are() -> None:
    for most, places in ((0, 3), (3, 1), (4, 3), (5, 2)):
        ways = sum(sum(each) <= most for each in itertools.product(range(most + 1), repeat=places))
        assert 2 ** log2_choices(most + places, places) == pytest.approx(ways, rel=1e-12)
    # too many tasks to count are bounded from above
    assert log2_choices(10_000, 5000) >= math.log2(math.comb(10000, 5000))


# ---- all rulesets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ruleset", RULESETS)
def test_T05_T09_T11_no_planted_scheme_carries_more_than_its_row(ruleset: str) -> None:
    rows = capacities(policy_named(ruleset), SCHEMAS.get(ruleset, SCHEMA))
    planted = {row.kind: row.planted_bits for row in rows if row.planted_bits is not None}
    assert all(0 < planted[row.kind] <= row.bits for row in rows if row.kind in planted)
    assert {kind.partition(".")[0] for kind in planted} == {
        kind for kind in ("lora", "metrics", "control") if any(row.kind.startswith(f"{kind}.") for row in rows)
    }
    lines = capacity_lines([row.to_json() for row in rows])
    assert sum(line.startswith("  a planted scheme got out") for line in lines) == len(planted)
    assert lines[-1:] == ([NOT_COUNTED] if rows else [])


def test_T05_T09_T11_check_and_explain_print_what_was_planted_beside_the_arithmetic(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(policy_text("local-only"), encoding="utf-8")
    bench = Bench(tmp_path / "a", policy_of(policy_text("local-only")))
    bench.gate.send(bench.judge.view.place("control.heartbeat"), pb.Heartbeat())
    (seq,) = (record["seq"] for record in bench.events("egress.decision"))
    bench.close()
    expected = capacity_lines([row.to_json() for row in capacities(policy_named("local-only"), SCHEMA)])
    assert "T9: " in expected[1] and "T11: " in expected[3] and len(expected) == 5
    of_log = ("--log", str(tmp_path / "a" / "audit"), "--policy", str(tmp_path / "policy.yaml"))
    for words in (("check", str(tmp_path / "policy.yaml")), ("explain", str(seq), *of_log)):
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        assert "\n".join(expected) in result.output
