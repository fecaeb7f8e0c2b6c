"""How far does a poisoned update get? `python -m benchmarks.poisoning --json [--seeds 5]`.

A federation that learns a toy task (benchmarks/poisoning_task.py) with the project's own border: each delta is judged,
clipped, rounded and judged again as the silo's gate does it, judged by the coordinator's `Ingress`, and averaged by
`coordinator.aggregate` with the method's own `combine`; the policy is a shipped ruleset, its limits computed from the
plan as for any site. One or two silos are poisoned in every round, in two ways:

    trainer   the attacker has the training code; its silo's own gate clips what it offers
    silo      the attacker has the whole silo: no gate, and only the coordinator's rules stand

and for comparison the same with the norm limits taken out of both policies. For each attack and cohort, over frozen
seeds: `clean` accuracy (the same silos, none poisoned), `trainer`, `silo` and `unlimited` accuracy, each one's drop,
mean and worst; `refused`, the share of the silo's uploads that the coordinator did not take; and for the backdoor the
share of triggered records that it turns. Exit status 1 when one of THRESHOLDS is not kept.

What the norm limit does NOT stop, shown with its figures and asserted so that nobody claims otherwise: a sign flip that
stays within the limit slows or undoes the learning, and a backdoor within the norm is learnt like anything else. The
first is for an aggregation that looks at single updates (T51): `robust` has the same with a plan's `aggregate: median`
and `trimmed_mean`, what they cost where nobody is poisoned, and a scaled update with no limits at all. The second is
for an acceptance gate (T52, here left out), and no aggregation finds it for certain (N5).
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks import poisoning_task as toy
from coordinator.aggregate import aggregate as make_aggregate
from coordinator.aggregate import initial_adapter, l2_norm, read_factors
from coordinator.blobs import Blobs, BytesPayload, FilePayload
from coordinator.ingress import Ingress, OpenPlace
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Lora, Optimiser, Plan
from fedsilo.protocol.randomness import generator, seed_of
from policies.engine import FINAL, OFFERED, HistoryBook, Message, decide, measure
from policies.kinds.adapters import transform_factors
from policies.model import Policy
from policies.render import PlanSize
from policies.schema import LoraSchema
from silo.guard.gate import factors_header
from tests.policies import setting

METHOD, RULESET, KIND = "fedavg-grpo", "fedavg", "lora.factors"
ROUNDS = 12
SEEDS = (11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
UNLIMITED = {"clip_l2": 1e9, "max_l2": 2e9, "max_tensor_l2": 2e9, "max_total_l2": 1e12}
BELOW_LIMIT = 0.99  # bfloat16 may lengthen what is rounded, by less than 2**-8
# (silos, poisoned ones among them)
COHORTS = ((4, 1), (5, 1), (7, 2))
SCHEMA = LoraSchema(
    setting.HASH["base"], toy.RANK, toy.SCALE * toy.RANK, "bfloat16", "all-linear", tuple(sorted(toy.SHAPES))
)
SIZE = PlanSize(
    rounds=ROUNDS, local_steps=toy.STEPS, prompts_per_step=toy.BATCH, samples_per_prompt=1, max_new_tokens=32, epochs=1,
    learning_rate=toy.LEARNING_RATE,
)  # fmt: skip

Mode = Literal["trainer", "silo"]
Delta = dict[str, codec.Array]


@dataclass(frozen=True)
class Attack:
    """Attributes:
    direction: honest (own update), flip (its opposite), noise, backdoor (own update on data half of which has the
        trigger and the target's label).
    times: what the update is multiplied by; noise, which has no length of its own, is that many limits long.
    at_limit: scaled to the longest update that the coordinator takes, instead of multiplied.
    """

    direction: Literal["honest", "flip", "noise", "backdoor"]
    times: float = 1.0
    at_limit: bool = False


ATTACKS = {
    "scale_10": Attack("honest", 10),
    "scale_100": Attack("honest", 100),
    "flip_10": Attack("flip", 10),
    "noise_100": Attack("noise", 100),
    "noise_at_limit": Attack("noise", at_limit=True),
    "flip_as_trained": Attack("flip"),
    "flip_at_limit": Attack("flip", at_limit=True),
    "backdoor_as_trained": Attack("backdoor"),
    "backdoor_at_limit": Attack("backdoor", at_limit=True),
}


def peer(number: int) -> str:
    return f"spiffe://cardio-net/silo/hospital_{'abcdefg'[number]}"


def policy_of(silos: int, *, limited: bool = True) -> Policy:
    """The shipped ruleset for this task and cohort; without `limited` its norm limits are out of reach."""
    text = setting.policy_text(RULESET, schema=SCHEMA, peers=tuple(peer(number) for number in range(silos)), size=SIZE)
    if not limited:
        block = setting.policy_of(text).file.egress.updates[KIND]
        for name, value in UNLIMITED.items():
            text = text.replace(f"    {name}: {getattr(block, name)!r}", f"    {name}: {value!r}", 1)
    return setting.policy_of(text)


def plan_of(silos: int, seed: int, aggregate: str = "mean", trim: int = 0) -> Plan:
    changes = {
        "aggregate": aggregate, "trim": trim,
        "method": METHOD, "silos": tuple(peer(number).rpartition("/")[2] for number in range(silos)),
        "rounds": ROUNDS, "local_steps": toy.STEPS, "prompts_per_step": toy.BATCH, "seed": seed,
        "lora": Lora(rank=SCHEMA.rank, alpha=SCHEMA.alpha, schema_sha256=SCHEMA.digest), "wire_dtype": SCHEMA.dtype,
        "optimiser": Optimiser(learning_rate=toy.LEARNING_RATE, epochs=1),
    }  # fmt: skip
    return setting.PLAN.model_copy(update=changes)


def norm_of(delta: Delta) -> float:
    return float(np.sqrt(sum(float(np.square(values, dtype=np.float64).sum()) for values in delta.values())))


@dataclass(frozen=True)
class OpenRound:
    """Where the run stands when an update is judged: at either end."""

    plan: Plan
    round: int
    base_digest: str
    base_l2: float


@dataclass
class Guard:
    """A silo's way out: what `silo.guard.gate.Gate` does with an update, but for its ledger, log and channel."""

    number: int
    policy: Policy
    book: HistoryBook = field(default_factory=HistoryBook)
    clipped: int = 0
    reasons: tuple[str, ...] = ()  # of the last judgement

    def offer(self, delta: Delta, place: OpenRound) -> bytes | None:
        """The bytes that leave; None where the policy does not let them."""
        header, size, _ = factors_header(KIND, SCHEMA, pb.Factors(base_digest=place.base_digest), delta)
        offered = Message("egress", Place(place.plan.run, place.round, 0, KIND), peer(self.number), size, header, delta)
        facts, verdict = self._judge(offered, place, OFFERED)
        if verdict == "deny":
            return None
        fit, record = transform_factors(facts["l2"], self.policy.file.egress.updates[KIND], secrets.token_bytes)
        self.clipped += record["clipped"]
        payload = bytes(codec.joined_factors(header, size, delta, fit))
        body, tensors = parsed(KIND, payload, OUTBOUND_KINDS)
        final = replace(offered, payload_bytes=len(payload), body=body, tensors=tensors)
        facts, verdict = self._judge(final, place, FINAL)
        if verdict != "allow":
            return None
        self.book.record(facts)
        return payload

    def _judge(self, message: Message, place: OpenRound, stage: str) -> tuple[dict[str, Any], str]:
        context = setting.context(
            expected_sender=peer(self.number), plan=place.plan, schema=SCHEMA, base_digest=place.base_digest,
            base_l2=place.base_l2, open_round=place.round, open_step=0, records=toy.RECORDS, epochs=1, steps=toy.STEPS,
        )  # fmt: skip
        facts = measure(message, context, stage=stage)
        decision = decide(facts, self.policy, self.book.view(facts))
        self.reasons = decision.reasons
        return facts, decision.verdict


class Coordinator:
    """The way in and the average, as a coordinator runs them.

    Args:
        folder: for adapters.
        policy: its charter.
        silos: number of them.
    """

    def __init__(self, folder: Path, policy: Policy, silos: int) -> None:
        self.blobs = Blobs(folder)
        self.books = [HistoryBook() for _ in range(silos)]
        self.reasons: list[tuple[str, ...]] = []
        self._ingress = Ingress(
            federation="cardio-net", silos=tuple(peer(number).rpartition("/")[2] for number in range(silos)),
            policy=policy, schema=SCHEMA, references=("12",) * 10, public_set_sha256=setting.HASH["public"],
            topics=frozenset(), grading=None, now_seconds=lambda: setting.NOW,
        )  # fmt: skip

    def take(self, number: int, payload: bytes, place: OpenRound) -> bool:
        """Whether an upload counts; why not is in `reasons`."""
        envelope = pb.Envelope(
            federation="cardio-net", run=place.plan.run, round=place.round, attempt=1, kind=KIND, sender=peer(number),
            payload_digest=bytes.fromhex(codec.sha256_hex(payload)),
        )  # fmt: skip
        name = peer(number).rpartition("/")[2]
        arrived = self._ingress.parse(name, envelope, BytesPayload(payload))
        where = OpenPlace(place.plan, place.base_digest, place.base_l2, place.round)
        ruling = self._ingress.judge(arrived, where, self.books[number])
        if ruling.decision.verdict != "allow":
            self.reasons.append(ruling.decision.reasons)
            return False
        self.books[number].record(ruling.facts)
        return True

    def combined(self, plan: Plan, master: FilePayload, uploads: list[bytes]) -> FilePayload:
        """The next adapter."""
        payloads = [BytesPayload(upload) for upload in uploads]
        how = method_named(METHOD).aggregate(plan, plan.silos[: len(uploads)])
        return make_aggregate(self.blobs, master, payloads, how)


@dataclass(frozen=True)
class Result:
    """Attributes:
    refused: share of the poisoned uploads that the coordinator did not take, or the gate did not let out.
    clipped: share of the poisoned updates that a gate shortened.
    honest_l2: median norm of the honest updates as trained, as a share of clip_l2.
    reasons: of the coordinator's refusals.
    """

    accuracy: float
    backdoor: float
    refused: float
    clipped: float
    honest_l2: float
    reasons: frozenset[str]


def poisoned_delta(
    attack: Attack, task: toy.Task, base: Delta, records: toy.Records, draw: np.random.Generator, limit: float
) -> Delta:
    """What an attacker uploads in place of its own update; `limit` is the longest that the coordinator takes."""
    if attack.direction == "noise":
        delta = {name: draw.normal(0, 1, shape).astype(np.float32) for name, shape in SCHEMA.tensors}
        factor = attack.times * limit / norm_of(delta)
    else:
        given = records.poisoned(0.5, draw) if attack.direction == "backdoor" else records
        delta = task.trained(base, given, draw)
        factor = -attack.times if attack.direction == "flip" else attack.times
    if attack.at_limit:
        factor = np.sign(factor) * BELOW_LIMIT * limit / norm_of(delta)
    return {name: (values * factor).astype(np.float32) for name, values in delta.items()}


def federation(
    folder: Path, cohort: tuple[int, int], attack: Attack | None, seed: int, *, mode: Mode = "trainer",
    limited: bool = True, aggregate: str = "mean",
) -> Result:  # fmt: skip
    """One run, the same for the same seed.

    Args:
        folder: empty; for the coordinator's adapters.
        cohort: silos, and how many of them are poisoned; the last ones are.
        attack: None for a run in which all are honest.
        seed: of the task, of the first adapter and of everything drawn in the rounds.
        mode: whether an attacker's silo still has its gate.
        limited: whether the policies' norm limits stand, at both ends.
        aggregate: of the plan; a trimmed mean trims as many as are poisoned.
    """
    silos, attackers = cohort
    plan = plan_of(silos, seed, aggregate, attackers if aggregate == "trimmed_mean" else 0)
    policy, task = policy_of(silos, limited=limited), toy.Task(seed, silos)
    block = policy_of(silos).file.egress.updates[KIND]  # what an attacker reads in the ruleset, limits or none
    guards, coordinator = [Guard(number, policy) for number in range(silos)], Coordinator(folder, policy, silos)
    master = coordinator.blobs.keep(BytesPayload(initial_adapter(SCHEMA, seed)))
    refused, norms = 0, list[float]()
    for number in range(1, ROUNDS + 1):
        place, uploads = OpenRound(plan, number, master.digest, l2_norm(master)), list[bytes]()
        base = dict(read_factors(master).tensors())
        for silo in range(silos):
            draw, own = generator(seed_of(seed, "poisoning round", number, silo)), task.silos[silo]
            hostile = attack is not None and silo >= silos - attackers
            if attack is not None and hostile:
                delta = poisoned_delta(attack, task, base, own, draw, block.max_l2)
            else:
                delta = task.trained(base, own, draw)
                norms.append(norm_of(delta) / block.clip_l2)
            if hostile and mode == "silo":
                header, size, _ = factors_header(KIND, SCHEMA, pb.Factors(base_digest=master.digest), delta)
                payload: bytes | None = bytes(codec.joined_factors(header, size, delta))
            else:
                payload = guards[silo].offer(delta, place)
            if payload is not None and coordinator.take(silo, payload, place):
                uploads.append(payload)
            elif hostile:
                refused += 1
            else:
                reasons = guards[silo].reasons or coordinator.reasons[-1]
                raise AssertionError(f"round {number}: an honest update does not count: {', '.join(reasons)}")
        master = coordinator.combined(plan, master, uploads)
    poisoned = max(1, attackers * ROUNDS)
    final = dict(read_factors(master).tensors())
    return Result(
        task.accuracy(final), task.backdoor(final), refused / poisoned,
        sum(guard.clipped for guard in guards[silos - attackers :]) / poisoned, statistics.median(norms),
        frozenset(reason for reasons in coordinator.reasons for reason in reasons),
    )  # fmt: skip


# ---- over seeds ------------------------------------------------------------------------------------

# how each run is guarded: (mode, limits)
GUARDED: dict[str, tuple[Mode, bool]] = {
    "trainer": ("trainer", True),
    "silo": ("silo", True),
    "unlimited": ("trainer", False),
}


@dataclass(frozen=True)
class Threshold:
    """Attributes:
    trainer, silo: largest drop of accuracy in any seed and cohort, where the attacker has its trainer, or its silo.
    unlimited: least mean drop without limits, where they are what stops it: else the bench shows nothing.
    flips: least mean drop that it reaches in spite of the limits.
    turns: least mean share of triggered records that it turns in spite of the limits.
    """

    trainer: float
    silo: float
    unlimited: float | None = None
    flips: float | None = None
    turns: float | None = None


# Of accuracy, in the worst seed. Over five seeds 0.07 was seen: what the missing records of two refused silos cost, not
# the attack. Half as much again is room for another machine's order of additions.
STOPPED = 0.1
# Not stopped: an update at the limit is some two honest ones long (`honest_l2_of_clip`), so its opposite undoes two of
# three honest ones. 0.28 was seen; more would mean that the limit has become wider.
SLOWED = 0.35
# Five seeds: without limits 0.61 to 0.78 are lost, a flip at the limit costs 0.08 to 0.21, and as trained 0.03 to 0.13;
# the backdoor's trigger turns 0.63 to 0.79 at the limit, 0.36 to 0.46 as trained, and 0.1 of a clean model's answers.
THRESHOLDS = {
    "scale_10": Threshold(STOPPED, STOPPED, unlimited=0.4),
    "scale_100": Threshold(STOPPED, STOPPED, unlimited=0.4),
    # a gate makes it an update at the limit; from a silo without a gate it is refused
    "flip_10": Threshold(SLOWED, STOPPED, unlimited=0.4),
    "noise_100": Threshold(STOPPED, STOPPED, unlimited=0.4),
    "noise_at_limit": Threshold(STOPPED, STOPPED),
    "flip_as_trained": Threshold(SLOWED, SLOWED, flips=0.02),
    "flip_at_limit": Threshold(SLOWED, SLOWED, flips=0.05),
    "backdoor_as_trained": Threshold(STOPPED, STOPPED, turns=0.25),
    "backdoor_at_limit": Threshold(STOPPED, STOPPED, turns=0.4),
}
# Under a median or a trimmed mean, in the worst of five seeds: a flip cost 0.06 from one of five and 0.18 from two of
# seven (0.12 and 0.28 under the mean), an update times 100 without any limit 0.02; the honest lost 0.001 on average.
ROBUST: tuple[tuple[str, str], ...] = (
    ("flip_as_trained", "silo"), ("flip_at_limit", "silo"), ("scale_100", "unlimited"), ("backdoor_at_limit", "silo"),
)  # fmt: skip
ROBUST_COHORTS = ((5, 1), (7, 2))  # a quorum of which is enough for the trim
ROBUST_DROP_MAX = 0.22
# what limits may cost honest silos, whose first updates they shorten; -0.002 to 0.003 was seen
CLEAN_COST_MAX = 0.02


def one(cohort: tuple[int, int], attack: Attack | None, seed: int, guarded: str, aggregate: str = "mean") -> Result:
    mode, limited = GUARDED[guarded]
    with tempfile.TemporaryDirectory(prefix="fedsilo-poisoning-") as folder:
        return federation(Path(folder), cohort, attack, seed, mode=mode, limited=limited, aggregate=aggregate)


def over_seeds(cohort: tuple[int, int], seeds: tuple[int, ...], done: Callable[[str], None]) -> dict[str, Any]:
    """Figures of one cohort: those of its clean runs, and for each attack those of its three."""
    clean = [one(cohort, None, seed, "trainer") for seed in seeds]
    free = [one(cohort, None, seed, "unlimited") for seed in seeds]
    figures: dict[str, Any] = {
        "clean": mean(run.accuracy for run in clean),
        "clean_unlimited": mean(run.accuracy for run in free),
        "clean_backdoor": mean(run.backdoor for run in clean),
        "honest_l2_of_clip": mean(run.honest_l2 for run in clean),
        "attacks": {},
    }
    for name, attack in ATTACKS.items():
        figures["attacks"][name] = row = {}
        for guarded in GUARDED:
            against = free if guarded == "unlimited" else clean
            runs = [one(cohort, attack, seed, guarded) for seed in seeds]
            drops = [honest.accuracy - run.accuracy for honest, run in zip(against, runs, strict=True)]
            row[guarded] = {
                "accuracy": mean(run.accuracy for run in runs), "drop": mean(drops), "worst_drop": round(max(drops), 3),
                "backdoor": mean(run.backdoor for run in runs), "refused": mean(run.refused for run in runs),
                "clipped": mean(run.clipped for run in runs),
            }  # fmt: skip
        done(f"{cohort[1]} of {cohort[0]}, {name}")
    return figures


def robust_over_seeds(cohort: tuple[int, int], seeds: tuple[int, ...]) -> dict[str, Any]:
    """Figures of the aggregates that few silos do not move: against the clean run with the plain mean."""
    plain = [one(cohort, None, seed, "trainer").accuracy for seed in seeds]
    figures: dict[str, Any] = {}
    for aggregate in ("median", "trimmed_mean"):
        clean = [one(cohort, None, seed, "trainer", aggregate).accuracy for seed in seeds]
        row = figures[aggregate] = {"honest_cost": mean(a - b for a, b in zip(plain, clean, strict=True))}
        for name, guarded in ROBUST:
            runs = [one(cohort, ATTACKS[name], seed, guarded, aggregate) for seed in seeds]
            drops = [before - run.accuracy for before, run in zip(plain, runs, strict=True)]
            row[name] = {
                "guarded": guarded, "drop": mean(drops), "worst_drop": round(max(drops), 3),
                "backdoor": mean(run.backdoor for run in runs),
            }  # fmt: skip
    return figures


def mean(values: Iterable[float]) -> float:
    return round(statistics.mean(values), 3)


def exceeded(cohorts: dict[str, Any]) -> list[str]:
    """Every threshold that the figures of `over_seeds` do not keep, in words."""
    found = []
    for cohort, figures in cohorts.items():
        if (cost := figures["clean_unlimited"] - figures["clean"]) > CLEAN_COST_MAX:
            found.append(f"{cohort}: the limits cost honest silos {cost:.3f} of accuracy")
        for name, row in figures["attacks"].items():
            limit = THRESHOLDS[name]
            slowed, turned = (min(row["trainer"][what], row["silo"][what]) for what in ("drop", "backdoor"))
            checks = [
                (row["trainer"]["worst_drop"] > limit.trainer, "drop with a poisoned trainer"),
                (row["silo"]["worst_drop"] > limit.silo, "drop with a poisoned silo"),
                (limit.unlimited is not None and row["unlimited"]["drop"] < limit.unlimited, "harmless without limits"),
                (limit.flips is not None and slowed < limit.flips, "said to get through and does not"),
                (limit.turns is not None and turned < limit.turns, "said to be learnt and is not"),
            ]
            found += [f"{cohort}, {name}: {what}" for failed, what in checks if failed]
        for aggregate, row in figures.get("robust", {}).items():
            if row["honest_cost"] > CLEAN_COST_MAX:
                found.append(f"{cohort}: {aggregate} costs honest silos {row['honest_cost']:.3f} of accuracy")
            for name, _ in ROBUST:
                if row[name]["worst_drop"] > ROBUST_DROP_MAX:
                    found.append(f"{cohort}, {name}: drop under {aggregate}")
    return found


def table(cohorts: dict[str, Any]) -> str:
    """For people: accuracy (mean drop, worst drop), one line for each attack and cohort."""
    lines = [
        "| poisoned | attack | clean | trainer | silo | refused | without limits | backdoor: clean, trainer, silo |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cohort, figures in cohorts.items():
        for name, row in figures["attacks"].items():
            cells = {
                guarded: f"{run['accuracy']:.2f} ({run['drop']:+.2f}, {run['worst_drop']:+.2f})"
                for guarded, run in row.items()
            }
            turned = ", ".join(
                f"{share:.2f}"
                for share in (figures["clean_backdoor"], row["trainer"]["backdoor"], row["silo"]["backdoor"])
            )
            lines.append(
                f"| {cohort} | {name} | {figures['clean']:.2f} | {cells['trainer']} | {cells['silo']} "
                f"| {row['silo']['refused']:.0%} | {cells['unlimited']} | {turned} |"
            )
    lines += [
        "",
        "| poisoned | aggregate | honest cost | attack | drop, worst | backdoor |",
        "|---|---|---|---|---|---|",
    ]
    for cohort, figures in cohorts.items():
        for aggregate, row in figures.get("robust", {}).items():
            for name, guarded in ROBUST:
                at = row[name]
                lines.append(
                    f"| {cohort} | {aggregate} | {row['honest_cost']:+.3f} | {name} ({guarded}) "
                    f"| {at['drop']:+.2f}, {at['worst_drop']:+.2f} | {at['backdoor']:.2f} |"
                )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="figures as one line; without it a table for people")
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, len(SEEDS) + 1), help="how many of SEEDS")
    options = parser.parse_args()
    started, seeds = time.perf_counter(), SEEDS[: options.seeds]
    cohorts = {
        f"{poisoned} of {silos}": over_seeds((silos, poisoned), seeds, lambda what: print(what, file=sys.stderr))
        for silos, poisoned in COHORTS
    }
    for cohort in ROBUST_COHORTS:
        cohorts[f"{cohort[1]} of {cohort[0]}"]["robust"] = robust_over_seeds(cohort, seeds)
    found, block = exceeded(cohorts), policy_of(COHORTS[0][0]).file.egress.updates[KIND]
    conditions = {
        "ruleset": RULESET, "limits": {name: getattr(block, name) for name in UNLIMITED}, "rounds": ROUNDS,
        "seeds": list(seeds), "thresholds": {name: asdict(limit) for name, limit in THRESHOLDS.items()},
        "clean_cost_max": CLEAN_COST_MAX, "exceeded": found, "seconds": round(time.perf_counter() - started),
    }  # fmt: skip
    if options.json:
        print(json.dumps({"name": "poisoning", "figures": cohorts, "conditions": conditions}))
    else:
        print(table(cohorts), *(f"THRESHOLD EXCEEDED: {each}" for each in found), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
