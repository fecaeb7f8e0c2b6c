"""Does an adapter that left a silo give away what it was trained on? `python -m benchmarks.exposure --json`.

Two sets of random prompt -> answer pairs (threat X12). The prompts are of the demo's form, on strings that neither the
base model nor any silo has seen; the answer is one of those that the base model gives at all, drawn at random, so a
policy that never trained on the pair has nothing to know it from. A fair draw puts half of the pairs into hospital_a's
private data. Then the demo's own recipe is trained: its base model, plan, trainer sessions and both halves of its
method, four silos in one process. No socket, guard or policy takes part: the demo's policies pass these adapters whole.

    own         adapter of hospital_a after its last round, which the coordinator can form from what it was sent
    averaged    adapter of the four silos after the last round, which every silo gets

For each of them, and for the base model, every pair is answered `samples` times at the rollout temperature with the
same random numbers. The exposure score is the gain in pass rate of the trained pairs minus that of the held-out ones;
its p-value is exact, over all splits that the draw could have made (benchmarks/exposure_score.py). Beside it the same
difference of mean log-probabilities of the answer, which is all that a likelihood canary would show.

Two arms. `demo`: hospital_a has the demo's 400 private rows and the pairs among them; `times_given` says how often a
row came up. `only_canaries`: hospital_a has nothing but the trained pairs, the most exposed data there can be, and the
control that shows that the measure finds what is there.

What it does not show: what larger models, longer runs or other data give away; what the answers to public prompts
say; what an attacker finds who reads weights instead of asking, or asks more often. Two seeds bound the score of this
recipe, not of another. A score near 0 is no privacy (N2): nothing here is trained with differential privacy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers

from benchmarks.exposure_score import (
    Gains,
    bootstrap_interval,
    exact_p_value,
    exposure_score,
    gains_of,
    monte_carlo_p_value,
)
from fedsilo import grading
from fedsilo.demo import digit_tasks
from fedsilo.demo import run as demo
from fedsilo.demo.data import DIGIT_LENGTHS, PUBLIC_ROWS, make_digit_set
from fedsilo.demo.tiny_model import cached_model, recipe_for
from fedsilo.files.model_folder import lora_schema_of
from fedsilo.files.task_files import Task
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.aggregation import average_of
from fedsilo.protocol.codec import Array, decode, decode_factors, encode, encode_factors
from fedsilo.protocol.factors import initial_factors
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.randomness import generator, seed_of
from fedsilo.protocol.tasks import (
    Evaluate,
    ExportDelta,
    GeneratePublic,
    LoadAdapter,
    PrivateStep,
    PublicStep,
    TrainerTask,
)
from silo.sampling import TaskGiver
from silo.trainer.adapters.lora import LoraAdapter, LoraShape
from silo.trainer.data import Grader, TextCodec, load_codec
from silo.trainer.decoder import stream_of, token_logp
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import Question
from silo.trainer.run import Material
from silo.trainer.session import Session
from silo.trainer.worker import load_model
from tests.simulated.paper_federation import PaperFederation

# Canaries by arm, half of them trained: many where each is met about once, few where each is met often.
ARMS = {"demo": 256, "only_canaries": 64}
SAMPLES = 16
SEEDS = (1, 2)
Labels = Literal["reachable", "uniform"]
POLICIES = ("own", "averaged")
NO_DIGEST = "0" * 64


# ---- canaries ----------------------------------------------------------------------------------------


def make_canaries(seed: int, count: int, labels: Labels) -> list[Task]:
    """Random pairs, each on a string of its own that is in no training set.

    Args:
        seed: they follow from it.
        count: how many.
        labels: `reachable` draws the answer from the three that the base model gives: the right one, that of the
            opposite operation, and a copy; only strings where those differ are taken. `uniform` draws digits: the
            base model gave none of those in 1,024 samples, and what is never sampled is never rewarded.
    """
    draws = generator(seed_of(seed, "exposure-canaries"))
    strings = draws.permutation(digit_tasks.digit_strings(held_out=True)).tolist()
    canaries: list[Task] = []
    while len(canaries) < count:
        digits = strings.pop()
        topic = digit_tasks.TOPICS[int(draws.integers(len(digit_tasks.TOPICS)))]
        answer, opposite = (
            digit_tasks.answer(name, digits) for name in (topic, digit_tasks.OPERATIONS[topic].opposite)
        )
        choices = sorted({answer, opposite, digits})
        if len(choices) < 3:
            continue
        if labels == "uniform":
            label = "".join(str(digit) for digit in draws.integers(10, size=len(answer)))
        else:
            label = choices[int(draws.integers(3))]
        canaries.append(Task(f"canary-{topic}-{digits}", digit_tasks.question(topic, digits), label, topic))
    return canaries


def fair_split(seed: int, count: int) -> list[bool]:
    """Which canaries are trained on: half of them, every half equally likely, whatever they are."""
    order = generator(seed_of(seed, "exposure-split")).permutation(count)
    return [bool(place < count // 2) for place in order]


# ---- training ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a run is made of, apart from rows. `new_model` gives the base model, each time one of its own: adapter
    layers are put into it. `shapes`: wire name -> shape of the adapter."""

    plan: Plan
    shapes: dict[str, tuple[int, ...]]
    new_model: Callable[[], Any]
    codec: TextCodec
    grader: Grader

    @property
    def shape(self) -> LoraShape:
        return LoraShape(self.plan.lora.rank, self.plan.lora.alpha, self.shapes, self.plan.lora.freeze)

    def start(self) -> dict[str, Array]:
        """The adapter that every silo starts from: it computes the base model."""
        return initial_factors(tuple(self.shapes.items()), self.plan.seed)


@dataclass
class Federation(PaperFederation):
    """Both halves of the method in memory, with the real trainer of every silo and the method's own average.

    Attributes:
        sessions: trainer by silo.
        givers: what the guard does about private rows, by silo.
        adapter: factors that the open round started from; after the run, the averaged ones.
        own: by silo, its factors at the end of the last round it trained.
        uploads: by silo, what it sent last.
        rows_given: by silo, private rows given to its steps, each as often as it was given.
        averaged_rounds: commits carried out.
    """

    sessions: dict[str, Session] = field(default_factory=dict)
    givers: dict[str, TaskGiver] = field(default_factory=dict)
    adapter: dict[str, Array] = field(default_factory=dict)
    own: dict[str, dict[str, Array]] = field(default_factory=dict)
    uploads: dict[str, dict[str, Array]] = field(default_factory=dict)
    rows_given: Counter[str] = field(default_factory=Counter)
    averaged_rounds: int = 0

    def run(self, events_max: int = 1_000_000) -> None:
        super().run(events_max)
        self._average()

    def _average(self) -> None:
        for commit in self.commits[self.averaged_rounds :]:
            [result] = commit.results
            uploads, average = [self.uploads[silo] for silo in result.silos], average_of(self.plan, result.silos)
            self.adapter = {
                name: base + average([upload[name] for upload in uploads]) for name, base in self.adapter.items()
            }
            self.averaged_rounds += 1

    def _body(self, silo: str, task: TrainerTask) -> pb.PublicResponses | pb.Factors | pb.MetricsEval | None:
        session, with_rows = self.sessions[silo], self.givers[silo].with_rows_drawn(task)
        match with_rows:
            case Evaluate():
                return pb.MetricsEval()  # pass@1 on the held-out file changes nothing here
            case LoadAdapter():
                self._average()
                session.carry_out(with_rows, _payload(self.adapter, self.plan))
            case GeneratePublic():
                return decode(pb.PublicResponses, session.carry_out(with_rows).body)
            case PublicStep(donors=donors):
                session.carry_out(with_rows, encode(donors))
            case ExportDelta():
                factors = decode_factors(session.carry_out(with_rows).body)
                self.uploads[silo] = dict(factors.tensors)
                self.own[silo] = {name: self.adapter[name] + delta for name, delta in factors.tensors.items()}
                return factors.header
            case PrivateStep(rows=rows):
                self.rows_given[silo] += len(rows)
                session.carry_out(with_rows)
        return None


def _payload(tensors: dict[str, Array], plan: Plan) -> bytes:
    return encode_factors(
        tensors,
        base_digest="",
        schema_sha256=plan.lora.schema_sha256,
        rank=plan.lora.rank,
        scale=plan.lora.alpha / plan.lora.rank,
        dtype="float32",
    )


def train(setting: Setting, private: Mapping[str, Sequence[Task]], public: Sequence[Task]) -> Federation:
    """Carry out the setting's plan on these rows. private: by silo, for every silo of the plan."""
    plan = setting.plan
    federation = Federation(plan, method_named(plan.method), choose=lambda count: 0)
    federation.adapter = setting.start()
    for silo in plan.silos:
        secret = seed_of(plan.seed, "exposure-site-secret", silo).to_bytes(16, "big")
        material = Material(
            silo=silo,
            model=setting.new_model(),
            codec=setting.codec,
            private=private[silo],
            public=public,
            held_out=public[:1],
            private_grader=setting.grader,
            public_grader=setting.grader,
            held_out_grader=setting.grader,
            site_secret=secret,
        )
        session = federation.sessions[silo] = Session(material)
        session.begin_run(plan, setting.shape)
        federation.givers[silo] = TaskGiver(plan, session.private_prompts, secret)
    federation.run()
    return federation


# ---- measuring ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """What a policy does with each canary: samples passed, and log-probability of its answer, end mark included."""

    passed: list[int]
    logp: list[float]


class Examiner:
    """Asks any adapter the same canaries with the same random numbers, `samples` times each."""

    def __init__(self, setting: Setting, canaries: Sequence[Task], samples: int) -> None:
        self._setting = setting
        self._canaries = canaries
        self._samples = samples
        self._adapter = LoraAdapter(setting.new_model(), setting.shape)
        self._engine = EmbeddedEngine(
            self._adapter.decoder, stop_ids=setting.codec.stop_ids, cache_bytes=Material.cache_bytes
        )

    def ask(self, factors: dict[str, Array]) -> Answers:
        with self._adapter.replaced_by(factors):
            return Answers(self._passed(), self._logp())

    def _passed(self) -> list[int]:
        codec, rollout = self._setting.codec, self._setting.plan.rollout

        def draws(canary: Task) -> tuple[np.random.Generator, ...]:
            keys = ((canary.id, sample) for sample in range(self._samples))
            return tuple(generator(seed_of(self._setting.plan.seed, "exposure-sample", *key)) for key in keys)

        answers = self._engine.generate(
            [Question(codec.prompt_ids(canary.prompt), draws(canary)) for canary in self._canaries],
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
        )
        return [
            sum(self._setting.grader([(codec.text_of(one.ids), canary.answer) for one in given]))
            for canary, given in zip(self._canaries, answers, strict=True)
        ]

    @torch.no_grad()
    def _logp(self) -> list[float]:
        codec = self._setting.codec
        stream = stream_of(
            [codec.prompt_ids(canary.prompt) for canary in self._canaries],
            [(place, codec.answer_ids(canary.answer, finished=True)) for place, canary in enumerate(self._canaries)],
            self._adapter.parameters[0].device,
        )
        decoder, temperature = self._adapter.decoder, self._setting.plan.rollout.temperature
        logp, _ = token_logp(decoder.hidden(stream), decoder.head, stream.targets, temperature)  # [M]
        return [float(part.sum()) for part in torch.split(logp, stream.lengths.tolist())]


@dataclass(frozen=True)
class Trial:
    """What one run did to the canaries, by policy (`POLICIES`): gains in samples passed and in log-probability.

    `pass_rates`: of the base model too, by set. `times_given`: how often a step was given a trained canary, mean over
    all private rows of its silo, which are given in shuffled passes.
    """

    reward: dict[str, Gains]
    logp: dict[str, Gains]
    pass_rates: dict[str, dict[str, float]]
    times_given: float


def expose(
    setting: Setting,
    private: Mapping[str, Sequence[Task]],
    public: Sequence[Task],
    canaries: Sequence[Task],
    is_trained: Sequence[bool],
    samples: int,
) -> Trial:
    """Plant the canaries that the draw chose in the first silo's private rows, train, and ask for all of them.

    Args:
        setting: of the run.
        private: rows by silo, without canaries.
        public: public prompts.
        canaries: of both sets.
        is_trained: which of them are planted.
        samples: answers to each.
    """
    exposed = setting.plan.silos[0]
    planted = [canary for canary, inside in zip(canaries, is_trained, strict=True) if inside]
    federation = train(setting, {**private, exposed: [*private[exposed], *planted]}, public)
    examiner = Examiner(setting, canaries, samples)
    before = examiner.ask(setting.start())
    after = {"own": examiner.ask(federation.own[exposed]), "averaged": examiner.ask(federation.adapter)}

    def rates(answers: Answers) -> dict[str, float]:
        passed = np.array(answers.passed) / samples
        inside = np.array(is_trained)
        return {"trained": round(float(passed[inside].mean()), 4), "held_out": round(float(passed[~inside].mean()), 4)}

    return Trial(
        reward={policy: gains_of(before.passed, answers.passed, is_trained) for policy, answers in after.items()},
        logp={policy: gains_of(before.logp, answers.logp, is_trained) for policy, answers in after.items()},
        pass_rates={"base": rates(before), **{policy: rates(answers) for policy, answers in after.items()}},
        times_given=federation.rows_given[exposed] / federation.sessions[exposed].private_prompts,
    )


# ---- the demo's run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    seeds: tuple[int, ...] = SEEDS
    arms: tuple[str, ...] = tuple(ARMS)
    rounds: int = demo.ROUNDS
    samples: int = SAMPLES
    method: str = "pubswap"
    labels: Labels = "reachable"


def grade_exactly(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """The demo's verifier, without the process around it: answers here are six tokens long."""
    return [grading.grade("exact", text, reference).correct for text, reference in pairs]


def demo_setting(folder: Path, seed: int, silos: Sequence[str], options: Options) -> Setting:
    """The plan that `fedsilo demo` submits (fedsilo/demo/run.py), on the model in `folder`."""
    schema = lora_schema_of(folder, demo.RANK, demo.ALPHA)
    plan = Plan.model_validate(
        {
            "run": "exposure",
            "federation": "exposure",
            "method": options.method,
            "silos": tuple(silos),
            "rounds": options.rounds,
            "local_steps": demo.LOCAL_STEPS,
            "swap_period": demo.SWAP_PERIOD,
            "prompts_per_step": demo.PROMPTS_PER_STEP,
            "samples_per_prompt": demo.SAMPLES_PER_PROMPT,
            "seed": seed,
            "objective": {"kl_coefficient": 0.0},
            "optimiser": {"learning_rate": demo.LEARNING_RATE},
            "rollout": {
                "temperature": demo.TEMPERATURE,
                "max_prompt_tokens": DIGIT_LENGTHS.max_prompt_tokens,
                "max_new_tokens": DIGIT_LENGTHS.max_new_tokens,
            },
            "lora": {"rank": demo.RANK, "alpha": demo.ALPHA, "schema_sha256": schema.digest},
            "base_model_sha256": schema.base_model_sha256,
            "tokenizer_sha256": NO_DIGEST,
            "template_sha256": NO_DIGEST,
            "public_set_sha256": NO_DIGEST,
            "public_set_rows": PUBLIC_ROWS,
            "held_out_sha256": NO_DIGEST,
        }
    )
    return Setting(plan, dict(schema.tensors), lambda: load_model(folder, "fp32"), load_codec(folder), grade_exactly)


def run_trial(folder: Path, arm: str, seed: int, options: Options) -> Trial:
    """One run of an arm: the demo's rows of this seed, and canaries of this seed."""
    data = make_digit_set(seed)
    private = {silo: [Task(**row) for row in rows] for silo, rows in data.private.items()}
    setting = demo_setting(folder, seed, tuple(private), options)
    if arm == "only_canaries":
        private[setting.plan.silos[0]] = []
    canaries = make_canaries(seed, ARMS[arm], options.labels)
    public = [Task(**row) for row in data.public]
    return expose(setting, private, public, canaries, fair_split(seed, len(canaries)), options.samples)


def figures_of(trials: Mapping[int, Trial], samples: int) -> dict[str, Any]:
    """Score, interval and p-value over the runs of an arm, by seed; for rewards and for log-probabilities."""
    figures: dict[str, Any] = {"times_given": round(next(iter(trials.values())).times_given, 2)}
    for policy in POLICIES:
        draws = generator(seed_of(0, "exposure-intervals", policy))
        reward = [trial.reward[policy] for trial in trials.values()]
        logp = [trial.logp[policy] for trial in trials.values()]
        figures[policy] = {
            "exposure_score": round(exposure_score(reward) / samples, 4),
            "interval_95": [round(end / samples, 4) for end in bootstrap_interval(reward, draws)],
            "p_value": exact_p_value(reward),
            "likelihood_gap_nats": round(exposure_score(logp), 3),
            "likelihood_interval_95": [round(end, 3) for end in bootstrap_interval(logp, draws)],
            "likelihood_p_value": monte_carlo_p_value(logp, draws),
            "seeds": [
                {
                    "seed": seed,
                    "score": round(exposure_score([trial.reward[policy]]) / samples, 4),
                    "p_value": exact_p_value([trial.reward[policy]]),
                    "pass_rate_before": trial.pass_rates["base"],
                    "pass_rate_after": trial.pass_rates[policy],
                }
                for seed, trial in trials.items()
            ],
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=demo.ROUNDS)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--method", default="pubswap")
    parser.add_argument("--labels", choices=("reachable", "uniform"), default="reachable")
    given = vars(parser.parse_args())
    given.pop("json")
    options = Options(**{**given, "seeds": tuple(given["seeds"]), "arms": tuple(given["arms"])})
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # two threads wait for each other by spinning where anything else runs
    started = time.monotonic()
    folder = cached_model(recipe_for("digits"))
    arms = {
        arm: figures_of({seed: run_trial(folder, arm, seed, options) for seed in options.seeds}, options.samples)
        for arm in options.arms
    }
    report = {
        "name": "exposure",
        "figures": {**arms, "seconds": round(time.monotonic() - started, 1)},
        "conditions": {**given, "torch_threads": torch.get_num_threads(), "cores": os.cpu_count(), "dp": "off"},
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
