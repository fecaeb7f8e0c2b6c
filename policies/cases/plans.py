"""Plans of a case: the site's largest one with some fields replaced. Such a plan need not be a valid one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.strict_yaml import Path
from policies.cases.amount import Amount, NoLimit, read_amount
from policies.cases.format import ANOTHER, PLAN_FIELDS, Case, PlanMessage
from policies.cases.site import ANOTHER_DIGEST, Site

_RANGED = (
    "rounds",
    "local_steps",
    "prompts_per_step",
    "samples_per_prompt",
    "max_new_tokens",
    "temperature",
    "learning_rate",
)

Value = TypeVar("Value")


def resolved(case: Case, path: Path, number: Callable[[], Value]) -> Value:
    """A number of a case. Raises UsageError: it counts from a limit that the policy does not set."""
    try:
        return number()
    except NoLimit as error:
        raise case.mistake(path, f"{error} for {case.message.kind}", "write a number") from error


def plan_in(case: Case, site: Site, path: tuple[str, str]) -> Plan | dict[str, Any]:
    """The plan that a message brings, or that of the open run: (message, plan) or (setting, plan).

    Returns:
        plain values where the case's fields make no valid plan.

    Raises:
        UsageError: a field is no number that can be made, or no such plan can be open.
    """
    said = case.message.plan if path[0] == "message" and isinstance(case.message, PlanMessage) else case.setting.plan
    if not said:
        return site.plan
    values = site.plan.model_dump(mode="json")
    for name, value in said.items():
        target = values
        for part in PLAN_FIELDS[name][:-1]:
            target = target[part]
        target[name] = _plan_value(case, site, (*path, name), name, value, target[name])
    if "quorum" not in said:
        values["quorum"] = max(1, min(values["quorum"], len(values["silos"])))
    try:
        return Plan.model_validate_json(canonical_json(values))
    except ValueError:
        if path[0] == "setting":
            raise case.mistake(path, "no such plan can be open") from None
        return values


def _plan_value(case: Case, site: Site, path: Path, name: str, value: Any, default: Any) -> Any:
    asked = site.policy.file.ingress.run_plan
    if name == "silos":
        return _silos(case, site, path, value)
    if value == ANOTHER and isinstance(default, str):
        return ANOTHER_DIGEST if len(default) == len(ANOTHER_DIGEST) else ANOTHER
    if isinstance(value, str) and isinstance(default, int | float):
        low, high = getattr(asked, name, (None, None)) if name in _RANGED else (None, None)
        if name == "quorum":
            low = site.policy.file.federation.min_updates
        amount = _amount(case, path, value)
        if isinstance(default, int):
            return resolved(case, path, lambda: amount.whole(high, low))
        return resolved(case, path, lambda: amount.number(high, low))
    return value


def _silos(case: Case, site: Site, path: Path, value: Any) -> list[str]:
    """A list of names, or how many: peers of the policy, and beyond them silos that it does not list."""
    if isinstance(value, list):
        return [str(name) for name in value]
    amount, names = _amount(case, path, value), site.names
    count = amount.whole(len(names), site.policy.file.federation.min_peers)
    return [*names, ANOTHER, *(f"{ANOTHER}_{place}" for place in range(2, count))][: max(0, count)]


def _amount(case: Case, path: Path, value: Any) -> Amount:
    try:
        return read_amount(value)
    except ValueError as error:
        raise case.mistake(path, str(error)) from error
