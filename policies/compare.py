"""Two policies: what both allow, and in which direction a change goes. Pure; field by field through `lattice`.

meet(site, charter)   -> the policy that allows exactly what both name (T34: the charter may only tighten)
compare(before, after) -> one row per field that differs: tighter | looser | incomparable | cosmetic
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedsilo.treaty.errors import UsageError
from policies import lattice
from policies.fields import Approvals
from policies.lattice import NothingInCommon, Order
from policies.model import Egress, Ingress, MetricField, PolicyFile

Direction = Literal["tighter", "looser", "incomparable", "cosmetic"]
Path = tuple[str, ...]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Change:
    """One field that differs. A block that only one of the two has is one row; its value is `absent` in the other."""

    path: Path
    before: Any
    after: Any
    direction: Direction

    @property
    def name(self) -> str:
        return ".".join(self.path)


def meet(first: PolicyFile, second: PolicyFile) -> PolicyFile:
    """The loosest policy that is at least as tight as both, whatever their order.

    Raises:
        UsageError: they have nothing in common (another federation, model or time), so nothing could be allowed.
    """
    try:
        made = _meet_model(first, second)
    except NothingInCommon as error:
        raise UsageError(
            f"the two policies have nothing in common: {error}", hint="fedsilo policy diff A B", code="NO_MEET"
        ) from error
    if made.valid.from_ >= made.valid.until:
        raise UsageError("the two policies are never in force at the same time", code="NO_MEET")
    if made.federation.min_peers > len(made.federation.peers):
        raise UsageError("the two policies share fewer peers than one of them demands", code="NO_MEET")
    return _without_loose_ends(made)


def compare(before: PolicyFile, after: PolicyFile) -> list[Change]:
    """Rows in the order of the schema. An empty list: they allow the same, and say so in the same words."""
    return list(_changes(type(before), before, after, ()))


def is_tightening(before: PolicyFile, after: PolicyFile) -> bool:
    """Whether everything that `after` allows was allowed before."""
    return all(change.direction in ("tighter", "cosmetic") for change in compare(before, after))


# ---- meet --------------------------------------------------------------------------------------------


def _meet_model(first: Model, second: Model) -> Model:
    values: dict[str, Any] = {}
    for name, field in type(first).model_fields.items():
        value = _meet_field(name, field, getattr(first, name), getattr(second, name))
        values[field.alias or name] = value
    if isinstance(first, Approvals) and isinstance(second, Approvals):
        start, then = lattice.rhythm(*_rhythms(first, second))
        values |= {"first_rounds": start, "then": then}
    if isinstance(first, MetricField) and values["min"] > values["max"]:
        raise NothingInCommon("no value lies in both ranges")
    try:
        return type(first).model_validate(values)
    except ValueError as error:  # a list that must not be empty became empty
        raise NothingInCommon(f"nothing is left of {type(first).__name__}") from error


def _meet_field(name: str, field: FieldInfo, first: Any, second: Any) -> Any:
    order = order_of(field)
    if order is not None:
        try:
            return order.meet(first, second)
        except NothingInCommon as error:
            raise NothingInCommon(f"{name} is {first} and {second}") from error
    if isinstance(first, dict):
        return dict(_common_items(first, second))
    if first is None or second is None:
        return None
    if isinstance(first, BaseModel):
        try:
            return _meet_model(first, second)
        except NothingInCommon:
            if not _may_be_absent(field):
                raise
            return None  # a kind of which nothing is allowed by both is a kind that is denied
    return first  # part of Approvals, which is met as a whole


def _common_items(first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in sorted(first.keys() & second.keys()):
        try:
            yield name, _meet_model(first[name], second[name])
        except NothingInCommon:
            continue  # one name for two things is no name for either


def _without_loose_ends(file: PolicyFile) -> PolicyFile:
    """Drop kinds whose schema or set is not declared any more; what is absent is denied."""

    def cleared(side: Egress | Ingress) -> dict[str, Any]:
        values = {}
        for name, field in type(side).model_fields.items():
            block = getattr(side, name)
            schema, public = getattr(block, "schema_name", None), getattr(block, "set", None)
            loose = (schema is not None and schema not in file.lora_schemas) or (
                public is not None and public not in file.public_sets
            )
            values[field.alias or name] = None if loose else block
        return values

    return file.model_copy(
        update={
            "egress": Egress.model_validate(cleared(file.egress)),
            "ingress": Ingress.model_validate(cleared(file.ingress)),
        }
    )


# ---- compare -----------------------------------------------------------------------------------------


def _changes(model: type[BaseModel], before: Any, after: Any, path: Path) -> Iterator[Change]:
    if model is Approvals:
        yield from _rhythm_change(before, after, path)
    for name, field in model.model_fields.items():
        here = (*path, field.alias or name)
        one, two = getattr(before, name), getattr(after, name)
        order = order_of(field)
        if order is not None:
            direction = _direction(order, one, two)
            if direction is not None:
                yield Change(here, _shown(one), _shown(two), direction)
        elif isinstance(one, dict):
            for key in sorted(one.keys() | two.keys()):
                yield from _block_changes(one.get(key), two.get(key), (*here, key))
        elif isinstance(one, BaseModel) or isinstance(two, BaseModel):
            yield from _block_changes(one, two, here)


def _block_changes(before: BaseModel | None, after: BaseModel | None, path: Path) -> Iterator[Change]:
    if before is not None and after is not None:
        yield from _changes(type(before), before, after, path)
    elif before is not None:
        yield Change(path, "present", "absent", "tighter")
    elif after is not None:
        yield Change(path, "absent", "present", "looser")


def _rhythm_change(before: Approvals, after: Approvals, path: Path) -> Iterator[Change]:
    one, two = (lattice.rhythm(item, item) for item in _rhythms(before, after))
    if one != two:
        both = lattice.rhythm(one, two)
        direction: Direction = "tighter" if both == two else "looser" if both == one else "incomparable"
        yield Change((*path, "first_rounds, then"), list(one), list(two), direction)


def _rhythms(*blocks: Approvals) -> list[tuple[int, int]]:
    return [(block.first_rounds, block.then) for block in blocks]


def _direction(order: Order, before: Any, after: Any) -> Direction | None:
    if order.same(before, after):
        return None if order.meet(before, before) == order.meet(after, after) else "cosmetic"
    if order is lattice.LABEL:
        return "cosmetic"
    try:
        both = order.meet(before, after)
    except NothingInCommon:
        return "incomparable"
    return "tighter" if order.same(both, after) else "looser" if order.same(both, before) else "incomparable"


def order_of(field: FieldInfo) -> Order | None:
    """The order that a field's type carries; None for a block, a mapping of blocks, and the rounds of Approvals."""
    return next((item for item in _metadata(field) if isinstance(item, Order)), None)


def _metadata(field: FieldInfo) -> Iterator[Any]:
    yield from field.metadata
    # an alias of an annotated type keeps its own metadata inside the annotation
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        yield from getattr(annotation, "__metadata__", ())
        if get_origin(annotation) is not dict:
            pending += [argument for argument in get_args(annotation) if hasattr(argument, "__metadata__")]


def _may_be_absent(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def _shown(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    return list(value) if isinstance(value, tuple) else value
