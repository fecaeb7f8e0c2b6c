"""The proof of agreement at run time: looks at a few answers of every rollout before the update trusts them.

Wrong is one of: an answer that names another adapter than the one that is trained; log-probabilities that are missing
or too far from the trainer's; figures that follow another adapter (`agreement`); a marker that does not show. Each of
them stops the step, before any factor has changed.

Where several processes train (`scale_out`), process 0 looks and all judge what it found, so that all stop at the same
step. What was found so far is part of a session's kept state (`resume`).

Does not stop: an engine that lies, and computes what it is asked for its checks alone. The engine is this site's own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsilo.protocol.codec import Array
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.randomness import generator, private_seed_of
from silo.trainer import agreement
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.agreement import AnswerFigures, Limits, Numbers
from silo.trainer.batch import Stream, stream_of
from silo.trainer.exact import ExactDecoder
from silo.trainer.layers import token_logp
from silo.trainer.rollout.embedded import Question, Rollout
from silo.trainer.rollout.engine import Rows
from silo.trainer.scale_out import Processes

STALE = "STALE_ROLLOUT"  # another adapter
DISAGREES = "ROLLOUT_DISAGREES"  # other log-probabilities than the trainer's
NOT_PROVEN = "ROLLOUT_NOT_PROVEN"  # the engine does not say what a proof needs
# Below so many answers the error of their mean says little.
ANSWERS_MIN = 2
MARKER_QUESTIONS = 2
MARKER_ANSWERS = 4  # to each
MARKER_TOKENS = 16
# Size of what the marker adds to a layer's output, beside what the layer gives: the first that shows is taken.
MARKER_STRENGTHS = (0.25, 1.0, 4.0, 16.0, 64.0)

Generate: TypeAlias = Callable[[Sequence[Question], int], Sequence[tuple[Rollout, ...]]]
Draw: TypeAlias = Callable[..., np.random.Generator]
T = TypeVar("T")
PREFIX = "agreement."  # of its tensors in a kept state
ONE_SERVER = "one"  # that answers private and public prompts; this process itself is one


@dataclass(frozen=True)
class Row:
    """An answer that is looked at. place: of its prompt in the step."""

    place: int
    rollout: Rollout


class Probe:
    """What a few answers look like to the trainer, under the adapter in use and under others.

    Args:
        adapter: the one that is trained.
        temperature: of the rollout.
        rounds_once: whether the engine rounds a layer and its factors together, as the trainer does.
    """

    def __init__(self, adapter: LoraAdapter, temperature: float, *, rounds_once: bool = True) -> None:
        self._adapter = adapter
        self._temperature = temperature
        self._rounds_once = rounds_once
        self._exact = ExactDecoder(adapter.decoder)

    def answers(
        self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row], others: Mapping[str, Sequence[Tensor] | None]
    ) -> list[AnswerFigures]:
        """In the order of `rows`, one at least.

        Args:
            prompts: of the step.
            rows: the answers to look at.
            others: by name, trained factors in the order of `adapter.parameters`; None where there are none.

        Raises:
            OperationError: the engine reported no log-probabilities, or some that are not finite.
        """
        return answer_figures(self.passes(prompts, rows, others), reported_by(rows))

    def passes(
        self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row], others: Mapping[str, Sequence[Tensor] | None]
    ) -> dict[str, Numbers]:
        """Log-probabilities of all rows' tokens, [M] each: fields of `AnswerFigures`, and others by name."""
        stream = self._stream(prompts, rows)
        found = {"exact": self._exact.logp(stream, self._temperature)}
        found[agreement.BASE] = self._exact.logp(stream, self._temperature, base_only=True)
        found["trainer"], found["trainer_base"] = found["exact"], found[agreement.BASE]
        if self._adapter.decoder.embedding.dtype != torch.float32:
            found["trainer"] = self._own(stream)
            with self._adapter.off():
                found["trainer_base"] = self._own(stream)
        for name, values in others.items():
            if values is not None:
                replaced = list(zip(self._adapter.parameters, values, strict=True))
                found[name] = self._exact.logp(stream, self._temperature, factors=replaced)
        return {name: _numbers(logp) for name, logp in found.items()}

    def under(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row], factors: Mapping[str, Array]) -> Numbers:
        """Exact log-probabilities of all rows' tokens under these factors, by wire name; none: the live ones. [M]."""
        device = self._adapter.decoder.device
        live = self._adapter.factors
        replaced = [(live[name], torch.from_numpy(values).to(device)) for name, values in factors.items()]
        return _numbers(self._exact.logp(self._stream(prompts, rows), self._temperature, factors=replaced))

    @torch.no_grad()
    def _own(self, stream: Stream) -> Tensor:
        """In the precision that is trained in, rounded as the engine does: a server that rounds a small adapter away
        would else seem not to have taken it. [M]."""
        decoder = self._adapter.decoder
        with contextlib.nullcontext() if self._rounds_once else decoder.rounding_apart():
            return token_logp(decoder.hidden(stream), decoder.head, stream.targets, self._temperature)[0]

    def _stream(self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row]) -> Stream:
        places = sorted({row.place for row in rows})
        local = {place: index for index, place in enumerate(places)}
        return stream_of(
            [prompts[place] for place in places],
            [(local[row.place], row.rollout.ids) for row in rows],
            self._adapter.decoder.device,
        )


def keyed_draw(site_secret: bytes, seed: int) -> Draw:
    """Of a watch: private, and its own in every run."""
    return lambda purpose, *key: generator(private_seed_of(site_secret, seed, purpose, *key))


class AgreementWatch:
    """Args:
    adapter: the one that is trained.
    temperature: of the rollout.
    draw: keyed generator of this watch's own draws, by (purpose, ...).
    limits: what is measured and what stops a step.
    group: the processes that train together; None: this one alone.
    equal_passes: they need each other in every pass through the model (`sharding`).
    rounds_once: as of `Probe`.
    servers_apart: private and public prompts are answered by two servers, which are told of adapters one by one.
    """

    def __init__(
        self,
        adapter: LoraAdapter,
        temperature: float,
        draw: Draw,
        limits: Limits,
        *,
        group: Processes | None = None,
        equal_passes: bool = False,
        rounds_once: bool = True,
        servers_apart: bool = False,
    ) -> None:
        self._adapter = adapter
        self._group = group
        self._equal_passes = equal_passes
        self._draw = draw
        self._limits = limits
        self._probe = Probe(adapter, temperature, rounds_once=rounds_once)
        self._watch = agreement.Watch(limits)
        self._servers_apart = servers_apart
        # by what answers: each server has an adapter of its own that it may have been left with
        self._previous: dict[str, list[Tensor]] = {}
        self._rollouts: dict[str, int] = {}
        self._marker: dict[str, float] = {}

    def check(
        self,
        key: tuple[str | int, ...],
        prompts: Sequence[tuple[int, ...]],
        rollouts: Sequence[tuple[Rollout, ...]],
        generate: Generate,
        rows: Rows = "private",
    ) -> dict[str, float]:
        """Look at a step's answers, before the update.

        Args:
            key: of the rollout: what it is for, round, step.
            prompts: their tokens.
            rollouts: the answers to each.
            generate: asks the engine (questions, most new tokens) under whatever the adapter then holds.
            rows: what the prompts are of.

        Returns:
            Figures for the step's metrics.

        Raises:
            OperationError: `STALE_ROLLOUT`, `ROLLOUT_DISAGREES` or `ROLLOUT_NOT_PROVEN`, with the reason.
        """
        started = time.monotonic()
        self._together(lambda: _refuse_other_adapter(self._adapter.name(), rollouts))
        figures: dict[str, float] = {}
        chosen = self._chosen(key, prompts, rollouts)
        server = rows if self._servers_apart else ONE_SERVER
        if chosen:
            figures |= self._measured(prompts, chosen, self._previous.get(server))
        before = self._rollouts.get(server, 0)
        self._rollouts[server] = before + 1
        if chosen and self._limits.marker_pushes and before % self._limits.marker_pushes == 0:
            self._send_marker(key, prompts, chosen, generate)
        stored = self._adapter.decoder.embedding.dtype
        self._previous[server] = [each.detach().to(stored, copy=True) for each in self._adapter.parameters]
        return {**figures, **self._marker, "agreement_seconds": time.monotonic() - started}

    # ---- the difference in differences ---------------------------------------------------------------

    def _chosen(
        self, key: tuple[str | int, ...], prompts: Sequence[tuple[int, ...]], rollouts: Sequence[tuple[Rollout, ...]]
    ) -> list[Row]:
        """Answers in an order drawn at random, until they cost the share of the step that may be looked at."""
        if not self._limits.share:
            return []
        rows = [Row(place, rollout) for place, answers in enumerate(rollouts) for rollout in answers if rollout.ids]
        whole = sum(map(len, prompts)) + sum(len(row.rollout.ids) for row in rows)
        chosen: list[Row] = []
        spent = 0
        for at in self._draw("agreement", *key).permutation(len(rows)):
            row = rows[at]
            known = any(row.place == other.place for other in chosen)
            cost = len(row.rollout.ids) + (0 if known else len(prompts[row.place]))
            if len(chosen) >= ANSWERS_MIN and spent + cost > self._limits.share * whole:
                break
            chosen.append(row)
            spent += cost
        return chosen

    def _measured(
        self, prompts: Sequence[tuple[int, ...]], rows: Sequence[Row], previous: Sequence[Tensor] | None
    ) -> dict[str, float]:
        others = {agreement.START: self._adapter.start, agreement.PREVIOUS: previous}
        reported = self._together(lambda: reported_by(rows))
        passes = self._of_process_0(lambda: self._probe.passes(prompts, rows, others))
        answers = answer_figures(passes, reported)
        return self._together(lambda: self._judged(answers))

    def _judged(self, answers: Sequence[AnswerFigures]) -> dict[str, float]:
        trained = [answer.trainer for answer in answers]
        found = agreement.divergence([answer.engine for answer in answers], trained)
        rounding = agreement.divergence([answer.exact for answer in answers], trained).kl
        limit = self._limits.kl_limit(rounding)
        for of, most in ((found, limit), self._watch.differ(answers)):  # this step's, and over the short window
            if of.exceeds(most):
                raise OperationError(
                    f"the engine's distribution is {of.kl:.3g} nats per token from the trainer's (standard error "
                    f"{of.error:.2g}), at most {most:.3g} may be",
                    code=DISAGREES,
                    hint="the engine must load the same base in the same precision, and report log-probabilities after "
                    "temperature",
                )
        if alarms := self._watch.add(answers):
            reasons = "; or ".join(alarm.reason() for alarm in alarms)
            raise OperationError(reasons, code=STALE, hint="push the adapter again under a name of its own")
        return {
            "rollout_kl": found.kl,
            "rollout_kl_error": found.error,
            "rollout_kl_limit": limit,
            **self._watch.figures(),
        }

    # ---- the marker ----------------------------------------------------------------------------------

    def _send_marker(
        self,
        key: tuple[str | int, ...],
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[Row],
        generate: Generate,
    ) -> None:
        """A strong random adapter goes to the engine and is answered with, on the step's own prompts."""
        for attempt, strength in enumerate(MARKER_STRENGTHS):
            seen = self._marker_sent((*key, attempt), strength, prompts, rows, generate)
            if seen.contrast >= agreement.MARKER_CONTRAST_MIN:  # else it was too weak to show for this model
                break
        self._marker = {"marker_distance": seen.distance, "marker_contrast": seen.contrast}
        self._together(lambda: _refuse_unseen(seen))

    def _marker_sent(
        self,
        key: tuple[str | int, ...],
        strength: float,
        prompts: Sequence[tuple[int, ...]],
        rows: Sequence[Row],
        generate: Generate,
    ) -> agreement.MarkerSeen:
        marker = self._marker_factors(key, strength)
        asked = sorted({row.place for row in rows})[:MARKER_QUESTIONS]
        questions = [
            Question(
                prompts[place],
                tuple(self._draw("marker-rollout", *key, place, sample) for sample in range(MARKER_ANSWERS)),
            )
            for place in asked
        ]
        with self._adapter.replaced_by(marker):
            name = self._adapter.name()
            answers = generate(questions, MARKER_TOKENS)
        self._together(lambda: _refuse_other_adapter(name, answers))
        drawn = [Row(place, each) for place, row in zip(asked, answers, strict=True) for each in row]
        reported = self._together(lambda: reported_by(drawn))
        found = self._of_process_0(
            lambda: {
                "marker": self._probe.under(prompts, drawn, marker),
                "in use": self._probe.under(prompts, drawn, {}),
            }
        )
        return agreement.marker_seen(np.concatenate(reported), found["marker"], found["in use"])

    def _marker_factors(self, key: tuple[str | int, ...], strength: float) -> dict[str, Array]:
        shape, draws = self._adapter.shape, self._draw("marker", *key)
        factors: dict[str, Array] = {}
        for name, sides in sorted(shape.shapes.items()):
            drawn = draws.standard_normal(sides)
            size = sides[1] ** -0.5 if name.endswith("lora_A") else strength / (shape.scale * shape.rank**0.5)
            factors[name] = (size * drawn).astype(np.float32)
        return factors

    # ---- several processes ---------------------------------------------------------------------------

    def _together(self, work: Callable[[], T]) -> T:
        """Judge; where one process has a reason to stop, all stop."""
        return work() if self._group is None else self._group.together(work)

    def _of_process_0(self, work: Callable[[], dict[str, Numbers]]) -> dict[str, Numbers]:
        """Passes through the model, as process 0 finds them: their last bits may differ on another accelerator."""
        if self._group is None:
            return work()
        first = self._group.rank == 0
        if self._equal_passes:
            with self._group.lost_on_failure():
                found = work()
        else:
            found = self._group.together(lambda: work() if first else {})
        told = {name: each.tolist() for name, each in found.items()} if first else None
        return {name: np.array(each, dtype=np.float64) for name, each in self._group.gather(told)[0].items()}

    # ---- what is kept --------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Facts for JSON, and copies on the CPU under names with `PREFIX`: what later verdicts hang on."""
        facts, sums = self._watch.state()
        tensors = {f"{PREFIX}sums.{name}": torch.from_numpy(each) for name, each in sums.items()}
        for server, previous in self._previous.items():
            for name, each in zip(self._adapter.trained_names, previous, strict=True):
                tensors[f"{PREFIX}previous.{server}.{name}"] = each.to("cpu", copy=True)
        kept = {
            "watch": facts,
            "rollouts": dict(self._rollouts),
            "marker": self._marker,
            "previous": sorted(self._previous),
        }
        return kept, tensors

    def ready_to_restore(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Read a `state` and change nothing; what is returned goes back to it.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        start = f"{PREFIX}sums."
        sums = {name.removeprefix(start): each.numpy() for name, each in tensors.items() if name.startswith(start)}
        watch = agreement.Watch.of(self._limits, facts["watch"], sums)
        rollouts = {str(server): int(count) for server, count in dict(facts["rollouts"]).items()}
        marker = {name: float(each) for name, each in facts["marker"].items()}
        device, names = self._adapter.decoder.device, self._adapter.trained_names
        previous = {
            str(server): [tensors[f"{PREFIX}previous.{server}.{name}"].to(device, copy=True) for name in names]
            for server in facts["previous"]
        }
        for held in previous.values():
            if any(one.shape != live.shape for one, live in zip(held, self._adapter.parameters, strict=True)):
                raise ValueError("the factors of the rollout before")

        def restore() -> None:
            self._watch, self._rollouts, self._marker, self._previous = watch, rollouts, marker, previous

        return restore


def _refuse_unseen(seen: agreement.MarkerSeen) -> None:
    if not seen.has_shown:
        raise OperationError(
            f"a marker adapter was sent and does not show: the engine's log-probabilities are {seen.distance:.2f} "
            f"nats per token from it, the adapter in use is {seen.contrast:.2f}",
            code=STALE,
            hint="the engine takes adapters and does not compute them, or answers from a cache of before",
        )


def _refuse_other_adapter(name: str, rollouts: Sequence[tuple[Rollout, ...]]) -> None:
    others = {rollout.adapter for answers in rollouts for rollout in answers} - {name}
    if others:
        other = sorted(others)[0]
        raise OperationError(
            f"an answer was written with the adapter {other[:12] or 'that has no name'}, trained is {name[:12]}",
            code=STALE,
            hint="the engine has not taken the adapter that was pushed",
        )


def reported_by(rows: Sequence[Row]) -> list[Numbers]:
    """The engine's log-probabilities of each answer. Raises OperationError: they are missing, or are no numbers."""
    found = [np.asarray(row.rollout.logp, dtype=np.float64) for row in rows]
    for row, logp in zip(rows, found, strict=True):
        if len(logp) != len(row.rollout.ids) or not np.isfinite(logp).all():
            raise OperationError(
                f"the engine reports {len(logp)} log-probabilities for {len(row.rollout.ids)} tokens, or some that "
                "are no finite number",
                code=NOT_PROVEN,
            )
    return found


def _numbers(logp: Tensor) -> Numbers:
    return logp.double().cpu().numpy()


def answer_figures(passes: Mapping[str, Numbers], reported: Sequence[Numbers]) -> list[AnswerFigures]:
    """`Probe.passes`, cut into answers. reported: the engine's own, of each."""
    edges = np.cumsum([len(each) for each in reported])[:-1]
    of_answer = {name: np.split(logp, edges) for name, logp in passes.items()}
    return [
        AnswerFigures(
            engine=engine,
            trainer=of_answer["trainer"][place],
            trainer_base=of_answer["trainer_base"][place],
            exact=of_answer["exact"][place],
            others={name: parts[place] for name, parts in of_answer.items() if name in agreement.FAULTS},
        )
        for place, engine in enumerate(reported)
    ]
