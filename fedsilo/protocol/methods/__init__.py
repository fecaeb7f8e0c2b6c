"""The methods, by name. Adding one is a module and a line here; it never widens a site's gate."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.method import Method
from fedsilo.protocol.methods import pubswap
from fedsilo.protocol.plan import SHIFTING, Plan
from fedsilo.protocol.tasks import TrainerTask

METHODS: dict[str, Method] = {method.name: method for method in (*pubswap.METHODS,)}
# Tasks that methods name, by name.
TASKS: Mapping[str, type[TrainerTask]] = {task.name: task for method in METHODS.values() for task in method.tasks}


def method_named(name: str) -> Method:
    """Return the method of that name. Raises UsageError: no such method; the hint lists those there are."""
    try:
        return METHODS[name]
    except KeyError:
        raise UsageError(f"there is no method {name!r}", hint=f"one of: {', '.join(sorted(METHODS))}") from None


def require_exchange(plan: Plan) -> Method:
    """The plan's method, if it works the way the plan says. A plan is signed and recorded, so an `exchange` that is
    not carried out must not stand in it.

    Raises:
        UsageError: there is no such method, or it does not have this exchange; SILO_STEPS: some silos take fewer
            steps, and the others would wait for them all the same; AGGREGATE, SERVER_OPTIMISER: it does not average
            updates; STAYS: some factors stay at each silo, and the plan freezes them or averages products of them;
            START_ADAPTER: it hands no adapter out, with which a run could start; MODELS: it takes one model for all;
            OPTIONS: it has no such option, or not with that value.
    """
    method = method_named(plan.method)
    if plan.exchange not in method.exchanges:
        raise UsageError(
            f"{plan.method} has no exchange {plan.exchange!r} in this version",
            hint=f"one of: {', '.join(sorted(method.exchanges))}",
        )
    if plan.silo_steps and method.swaps and plan.exchange == "step":
        free = sorted(name for name, each in METHODS.items() if not each.swaps)
        raise UsageError(
            f"{plan.method}: silos wait for each other at each public step, so none of them can take fewer",
            hint="exchange: round_end, " * ("round_end" in method.exchanges) + f"or method {' or '.join(free)}",
            code="SILO_STEPS",
        )
    if plan.aggregate != "mean" and not method.averages:
        raise UsageError(
            f"{plan.method} does not average updates, so no {plan.aggregate} can stand in the mean's place",
            hint="aggregate: mean",
            code="AGGREGATE",
        )
    if method.stays != "none" and (plan.lora.freeze != "none" or plan.aggregate in SHIFTING):
        raise UsageError(
            f"{plan.method} trains both factors and leaves {method.stays} at each silo, so none can be frozen and no "
            "product be averaged",
            hint="lora.freeze: none, and aggregate: mean, median or trimmed_mean",
            code="STAYS",
        )
    if plan.models and method.same_model:
        unlike = sorted(name for name, each in METHODS.items() if not each.same_model)
        raise UsageError(
            f"{plan.method} takes one model for all silos, and {', '.join(plan.models)} has another",
            hint=f"silos: [...] without it, or method {' or '.join(unlike)}",
            code="MODELS",
        )
    if plan.start_adapter_sha256 and not any(task.begins_round and task.reads_adapter for task in method.tasks):
        raise UsageError(
            f"{plan.method}: each silo begins with factors that it draws itself, and not with a start adapter",
            hint="leave start_adapter out",
            code="START_ADAPTER",
        )
    if plan.server_optimiser.name != "none" and not method.averages:
        raise UsageError(
            f"{plan.method} does not average updates, so no {plan.server_optimiser.name} can follow their mean",
            hint="server_optimiser: {name: none}",
            code="SERVER_OPTIMISER",
        )
    if plan.donor_denominator == "donor" and not method.swaps:
        raise UsageError(
            f"{plan.method} takes no other silo's answers, so no donor's policy can stand below its ratios",
            hint="donor_denominator: local",
            code="DONOR_DENOMINATOR",
        )
    try:
        method.options.of(plan)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("options", *first["loc"])))
        raise UsageError(
            f"{place}: {first['msg']}",
            hint=f"{plan.method} has these options: {', '.join(method.options.model_fields) or 'none'}",
            code="OPTIONS",
        ) from error
    return method


def require_solutions(plan: Plan, unsolved: str) -> None:
    """Check that the public file has what the method takes of it. unsolved: as of `TaskFile`.

    Raises:
        UsageError: SOLUTIONS: the method's donors are the solutions of the public file, and a row has none.
    """
    if method_named(plan.method).solutions and unsolved:
        raise UsageError(
            f"{plan.method} takes the solutions of the public file, and {unsolved} has none",
            hint="a field `solution` in each row (docs/how-to/data.md), or method: key-swap",
            code="SOLUTIONS",
        )


def require_donor_logp(plan: Plan, *, known: bool) -> None:
    """Check that a silo's trainer has what the plan's `donor_denominator` takes. known: it has the log-probabilities
    that other silos' answers were sampled with.

    Raises:
        UsageError: DONOR_DENOMINATOR: they are not known, and the plan takes them.
    """
    if plan.donor_denominator == "donor" and not known:
        raise UsageError(
            "donor_denominator: donor takes log-probabilities of other silos' answers, which no message carries",
            hint="local, unit or shaped; donor is for experiments, whose silos share a process",
            code="DONOR_DENOMINATOR",
        )
