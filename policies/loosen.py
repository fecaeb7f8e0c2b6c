"""A policy with one limit loosened: for each limit the nearest looser value, by the order that its type carries.

A digest, a name or a number that must be the same has no looser value; there another one is put in its place, which a
good message must then no longer pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from policies import lattice
from policies.compare import order_of
from policies.examples import ANOTHER_DIGEST
from policies.fields import Approvals, MetricField, epoch_seconds, is_zero
from policies.kind import ANOTHER
from policies.kinds import policy_file
from policies.kinds.public_donors import PublicDonors
from policies.lattice import NothingInCommon, Order
from policies.model import UNLIMITED, Policy, PolicyFile

Path = tuple[str, ...]

_DAY_SECONDS = 86400
# Limits that no message shows, by who keeps them instead. A star is any one name.
BEYOND_MESSAGES: dict[Path, str] = {
    ("mode",): "the gate: in shadow it sends nothing whatever was decided",
    ("trainer", "least_isolation"): "the guard probes the trainer's sandbox at start",
    ("public_sets", "*", "programs"): "the guard, which does not start with a verifier that runs programs",
    ("federation", "coordinator_key_sha256"): "the channel checks signatures before a message is measured",
    ("lora_schemas", "*", "base_model_sha256"): "a policy in which it differs from model.base_model_sha256 is refused",
    ("egress", "*", "clip_l2"): "the gate scales a delta to it before the last decision",
    ("egress", "*", "randomise_low_bits"): "the gate overwrites them before the last decision",
    ("egress", "*", "secure_aggregation"): "the coordinator's choice of how to add up",
    ("audit", "payload_archive"): "the guard; what is kept of what left",
    ("audit", "checkpoint_every", "records"): "the audit log; how often it signs",
    ("audit", "checkpoint_every", "rounds"): "the audit log; how often it signs",
    ("audit", "witnesses"): "the guard counts the witnesses that this names",
    ("retention", "records_years"): "the guard; how long what stays here is kept",
    ("retention", "payload_days"): "the guard; how long what stays here is kept",
    ("retention", "outbox_max_gb"): "the guard; how much of it is kept",
    ("text_screens", "overlap", "background_set"): "the trainer, which makes the index of what is not public",
    ("text_screens", "overlap", "false_positive_rate"): "the trainer, which makes the index so fine",
    ("approvals", "policy_change"): "who brings a looser policy into force",
    ("approvals", "release_after_halt"): "who lifts a halt; a halted kind is denied whatever it says",
    ("approvals", "expiry_hours"): "the approvals desk; what has expired was never approved",
}
How = Literal["looser", "another"]


@dataclass(frozen=True)
class _Place:
    """A limit of a policy.

    Attributes:
        field: None for what has no order of its own: a mapping of entries, the rounds of Approvals.
        unit: the least by which it can differ, where another key says so: a metric's quantum, or for a share of answers
            one of those to a prompt.
    """

    path: Path
    field: FieldInfo | None
    value: Any
    unit: float | None = None


@dataclass(frozen=True)
class Mutant:
    path: Path
    before: Any
    after: Any
    how: How
    policy: Policy


def limits(file: PolicyFile) -> list[Path]:
    """The place of every limit that the policy sets: all of its fields but labels and what has one value only.

    Approvals that ask nobody in any round are no limit either, whoever they would have asked.
    """
    return [place.path for place in _asked(file)]


def _asked(file: PolicyFile) -> Iterator[_Place]:
    """The limits, but for settings of screens that no kind names and of hits that nobody looks for."""
    named = file.screens_named
    for place in _places(file):
        if place.path[0] == "text_screens" and place.path[1] not in named:
            continue
        if place.path[-1] in ("on_hit", "max_hits_per_day") and not _at(file, place.path[:-1])["screens"]:
            continue
        if place.path[-1] == "max_bytes_per_day" and place.value == UNLIMITED:
            continue
        yield place


def beyond_messages(file: PolicyFile) -> list[tuple[Path, str]]:
    """The limits of this policy that no message shows, and who keeps them."""
    changes = []
    for path in limits(file):
        why = next((text for pattern, text in BEYOND_MESSAGES.items() if _matches(pattern, path)), None)
        if why is not None:
            changes.append((path, why))
    return changes


def _matches(pattern: Path, path: Path) -> bool:
    return len(pattern) == len(path) and all(one in ("*", two) for one, two in zip(pattern, path, strict=True))


def loosened(policy: Policy, *, beyond: bool = False) -> Iterator[Mutant]:
    """Yield every limit of the policy loosened alone; `beyond`: those that no message shows, instead of all others."""
    skipped = {path for path, _ in beyond_messages(policy.file)}
    for path, values, how in _changes(policy.file):
        if (path in skipped) != beyond:
            continue
        for before, after in values:
            file = _with(policy.file, path, after)
            if file is not None:
                yield Mutant(path, _shown(before), _shown(after), how, replace(policy, file=file))


def _changes(file: PolicyFile) -> Iterator[tuple[Path, list[tuple[Any, Any]], How]]:
    """(place, [(before, after)], how) in the order of the schema."""
    for place in _asked(file):
        order, value = order_of(place.field) if place.field is not None else None, place.value
        how: How = "looser"
        if order is None:
            changes = _more(place)
        elif order is lattice.SAME:
            changes, how = list(_others(place)), "another"
        else:
            changes = _looser(order, place, file)
        yield place.path, [(value, after) for after in changes], how


def _places(block: BaseModel, path: Path = ()) -> Iterator[_Place]:
    """Each limit. The rounds of Approvals have an order only together; entries of a mapping are a limit as a whole."""
    if isinstance(block, Approvals):
        rhythm = lattice.rhythm(*[(block.first_rounds, block.then)] * 2)
        if rhythm == (0, 0):
            return
        yield _Place((*path, "first_rounds"), None, rhythm)
        if block.then:
            yield _Place((*path, "then"), None, rhythm)
    unit = block.quantum if isinstance(block, MetricField) else None
    if isinstance(block, PublicDonors):
        unit = 1 / max(block.max_donors_per_prompt, 1)
    for name, field in type(block).model_fields.items():
        here, value, order = (*path, field.alias or name), getattr(block, name), order_of(field)
        if order is lattice.LABEL or _has_one_value(field):
            continue
        if field.exclude_if is is_zero and is_zero(value):
            continue  # of a shift that the policy's schema does not have: no message could show it
        if order is not None:
            yield _Place(here, field, value, None if name == "quantum" else unit)
        elif isinstance(value, BaseModel):
            yield from _places(value, here)
        elif isinstance(value, dict):
            for key, child in value.items():
                yield from _places(child, (*here, key))
            # A schema counts only where a kind names it, so one more of them allows nothing.
            if here != ("lora_schemas",):
                yield _Place(here, None, value)


def _has_one_value(field: FieldInfo) -> bool:
    annotation = field.annotation
    return getattr(annotation, "__origin__", None) is Literal and len(get_args(annotation)) == 1


def _more(place: _Place) -> list[Any]:
    """Return what has no order of its own: one more entry of a mapping, one held round fewer, every second held
    round."""
    if isinstance(place.value, dict):
        values = {key: item.model_dump(by_alias=True) for key, item in place.value.items()}
        if not values or ANOTHER in values:
            return []
        entry = dict(next(iter(values.values())))
        if "sha256" in entry:
            entry["sha256"] = ANOTHER_DIGEST
        return [{**values, ANOTHER: entry}]
    first, then = place.value
    if place.path[-1] == "first_rounds":
        return [first - 1] if first else []
    return [2 * then]


def _looser(order: Order, place: _Place, file: PolicyFile) -> list[Any]:
    """The nearest values that the order calls looser: both ends of a range, each word that a list lacks."""
    candidates = [after for after in _candidates(place, file) if _is_looser(order, place.value, after)]
    return candidates if isinstance(place.value, tuple) else candidates[:1]


def _is_looser(order: Order, before: Any, after: Any) -> bool:
    try:
        both = order.meet(before, after)
        return order.same(both, before) and not order.same(both, after)
    except (NothingInCommon, ValueError, TypeError, AttributeError):
        return False  # no value of this field at all


def _candidates(place: _Place, file: PolicyFile) -> Iterator[Any]:
    value, words = place.value, _words_of(place)
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, value - 1)
    elif isinstance(value, float):
        step = place.unit or abs(value) / 100 or 0.01
        yield from (value + step, value - step, value / 10)
    elif isinstance(value, str) and words:
        yield from words
    elif isinstance(value, str):
        yield from _days(value)
    elif isinstance(value, tuple) and len(value) == 2 and all(type(end) in (int, float) for end in value):
        yield from _wider(*value)
    elif isinstance(value, tuple):
        made = words or ([] if any(isinstance(item, BaseModel) for item in value) else [_another_like(value, file)])
        yield from (tuple(sorted((*value, word))) for word in made if word not in value)
        yield from (tuple(sorted(set(value) - {dropped})) for dropped in value)
    elif isinstance(value, BaseModel):
        yield None


def _another_like(value: tuple[Any, ...], file: PolicyFile) -> str:
    """Return one more entry for a list of names, of SPIFFE ids or of digests."""
    if all(len(str(item)) == len(ANOTHER_DIGEST) for item in value) and value:
        return ANOTHER_DIGEST
    return f"spiffe://{file.federation.id}/silo/{ANOTHER}" if any("/" in str(item) for item in value) else ANOTHER


def _days(value: str) -> Iterator[str]:
    try:
        seconds = epoch_seconds(value)
    except ValueError:
        return
    for shift in (_DAY_SECONDS, -_DAY_SECONDS):
        yield time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds + shift))


def _wider(low: float, high: float) -> Iterator[tuple[float, float]]:
    """Further at either end. Below 1 there is no count, and below 0 no size, so nothing is looser there."""
    if isinstance(low, int) and isinstance(high, int):
        if low > 1:
            yield (low - 1, high)
        yield (low, high + 1)
    else:
        if low > 0:
            yield (low - low / 100, high)
        yield (low, high + (abs(high) / 100 or 0.01))


def _others(place: _Place) -> Iterator[Any]:
    """Another value for what must be the same. Names are not limits: what they name is pinned by its digest."""
    value = place.value
    words = [word for word in _words_of(place) if word != value]
    if words:
        yield words[0]
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value + 1
    elif isinstance(value, str) and len(value) == len(ANOTHER_DIGEST):
        yield ANOTHER_DIGEST
    elif isinstance(value, str) and "/coordinator/" in value:
        yield f"{value.rpartition('/')[0]}/{ANOTHER}"


def _words_of(place: _Place) -> list[str]:
    return list(_words(place.field.annotation)) if place.field is not None else []


def _words(annotation: Any) -> Iterator[str]:
    """The closed list of words that a type allows, if it is one."""
    if getattr(annotation, "__origin__", None) is Literal:
        yield from (word for word in get_args(annotation) if isinstance(word, str))
        return
    for part in get_args(annotation):
        yield from _words(part)


def _with(file: PolicyFile, path: Path, value: Any) -> PolicyFile | None:
    """The file with one value replaced; None where that is no policy."""
    values = file.model_dump(by_alias=True)
    _within(values, path[:-1])[path[-1]] = value
    try:
        return policy_file(values)
    except ValidationError:
        return None


def _at(file: PolicyFile, path: Path) -> Any:
    return _within(file.model_dump(by_alias=True), path)


def _within(values: Any, path: Path) -> Any:
    for part in path:
        values = values[part]
    return values


def _shown(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if isinstance(value, Mapping):
        return sorted(value)
    return [_shown(item) for item in value] if isinstance(value, tuple) else value
