"""PubSwap (arXiv 2604.12160) and its controls: private and public GRPO steps, wrong own answers to public prompts
replaced by other silos' correct ones, deltas of the LoRA factors averaged each round: of both, or of B alone where the
plan freezes A.

    pubswap         Balanced: verified answers cross, each silo is filled up to half correct
    pubswap-random  all answers cross, every silo trains on the same K of the pool
    public-no-swap  public steps on own answers only; no answer leaves
    self-swap       as Balanced, with donors from the silo's own further answers; no answer leaves
    key-swap        as Balanced, with the public file's own answers as donors; no answer leaves
    worked-key-swap as key-swap, with the file's solutions: its answers with their work
    public-sft      the slots of the public steps are supervised steps on the file's solutions, or else its answers
    fedavg-grpo     no public steps
    fedsa-lora      as fedavg-grpo, but only the factors A are averaged; each silo goes on with its own B (FedSA-LoRA,
                    Guo et al. 2025)
    local-only      private steps, and each silo keeps what it trains
    responses-only  as Balanced, and each silo keeps what it trains

`step` holds both halves with `exchange: step`, `round_end` those of Balanced with `exchange: round_end`, `own` those of
the last two.

What it does not give: privacy of what the answers and factors say (N2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from fedsilo.protocol.factors import UPDATE_KIND
from fedsilo.protocol.method import Half, Method
from fedsilo.protocol.methods.pubswap import own, round_end, step
from fedsilo.protocol.methods.pubswap.options import SelfSwap
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import (
    AnswerAhead,
    Evaluate,
    EvaluateOwn,
    ExportDelta,
    GeneratePublic,
    LikelihoodStep,
    LoadAdapter,
    LoadOwn,
    LoadReference,
    PrivateStep,
    PublicStep,
)

Event = TypeVar("Event", contravariant=True)
Action = TypeVar("Action", covariant=True)


@dataclass(frozen=True)
class ByExchange(Generic[Event, Action]):
    """The half that the plan's `exchange` names; its states know their plan."""

    halves: Mapping[str, Half[Any, Event, Action]]

    def start(self, plan: Plan, party: str) -> Any:
        return self.halves[plan.exchange].start(plan, party)

    def on_event(self, state: Any, event: Event) -> tuple[Any, tuple[Action, ...]]:
        return self.halves[state.plan.exchange].on_event(state, event)


_KINDS = frozenset({"lora.factors", "metrics.eval"})
_TASKS = frozenset({Evaluate, LoadReference, LoadAdapter, PrivateStep, GeneratePublic, PublicStep, ExportDelta})


def _method(name: str, summary: str, swap: step.Swap, kinds: frozenset[str], ruleset: str) -> Method:
    return Method(
        name,
        summary,
        kinds,
        ruleset,
        step.Coordinator(swap),
        step.Silo(swap),
        _TASKS,
        sends_wrong_answers=swap == "random",
        swaps=swap in ("balanced", "random"),
    )


BALANCED = replace(
    _method(
        "pubswap",
        "PubSwap-Balanced: verified answers to public prompts cross, wrong ones are replaced up to half",
        "balanced",
        _KINDS | {"public.responses"},
        "pubswap",
    ),
    coordinator=ByExchange({"step": step.Coordinator("balanced"), "round_end": round_end.Coordinator("balanced")}),
    silo=ByExchange({"step": step.Silo("balanced"), "round_end": round_end.Silo("balanced")}),
    tasks=_TASKS | {AnswerAhead},
    exchanges=frozenset({"step", "round_end"}),
)
RANDOM = _method(
    "pubswap-random",
    "PubSwap-Random: all answers to public prompts cross, every silo trains on the same draw",
    "random",
    _KINDS | {"public.responses"},
    "pubswap-random",
)
NO_SWAP = _method("public-no-swap", "public steps on own answers only (control)", "none", _KINDS, "fedavg")
FEDAVG_GRPO = _method("fedavg-grpo", "private GRPO steps and averaging only (control)", "no-public", _KINDS, "fedavg")
SELF_SWAP = replace(
    _method(
        "self-swap", "public steps with donors from the silo's own further answers (control)", "self", _KINDS, "fedavg"
    ),
    options=SelfSwap,
)
KEY_SWAP = _method(
    "key-swap", "public steps with the public file's own answers as donors (control)", "key", _KINDS, "fedavg"
)
WORKED_KEY_SWAP = replace(
    _method(
        "worked-key-swap",
        "public steps with the public file's solutions as donors (control)",
        "worked-key",
        _KINDS,
        "fedavg",
    ),
    solutions=True,
)
PUBLIC_SFT = replace(
    _method(
        "public-sft",
        "supervised steps on the public file's solutions or answers in place of public steps (control)",
        "likelihood",
        _KINDS,
        "fedavg",
    ),
    tasks=_TASKS - {GeneratePublic, PublicStep} | {LikelihoodStep},
)
FEDSA_LORA = replace(
    _method(
        "fedsa-lora",
        "private GRPO steps; the factors A are averaged, and each silo keeps its own B",
        "no-public",
        frozenset({UPDATE_KIND["B"], "metrics.eval"}),
        "fedsa-lora",
    ),
    coordinator=step.Coordinator("no-public", "B"),
    silo=step.Silo("no-public", "B"),
    stays="B",
)
LOCAL_ONLY = Method(
    "local-only",
    "private GRPO steps; each silo keeps what it trains, and only figures leave (control)",
    frozenset({"metrics.eval"}),
    "local-only",
    own.Coordinator("no-public"),
    own.Silo("no-public"),
    frozenset({Evaluate, LoadOwn, PrivateStep, EvaluateOwn}),
    same_model=False,
)
RESPONSES_ONLY = replace(
    LOCAL_ONLY,
    name="responses-only",
    summary="verified answers to public prompts cross as under pubswap; each silo keeps what it trains",
    kinds=frozenset({"metrics.eval", "public.responses"}),
    ruleset="responses-only",
    coordinator=own.Coordinator("balanced"),
    silo=own.Silo("balanced"),
    tasks=LOCAL_ONLY.tasks | {GeneratePublic, PublicStep},
    swaps=True,
)
METHODS = (
    BALANCED,
    RANDOM,
    NO_SWAP,
    SELF_SWAP,
    KEY_SWAP,
    WORKED_KEY_SWAP,
    PUBLIC_SFT,
    FEDAVG_GRPO,
    FEDSA_LORA,
    LOCAL_ONLY,
    RESPONSES_ONLY,
)
