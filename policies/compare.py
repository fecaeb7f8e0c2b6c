"""Compares two policies: what both allow, and whether a change tightens or loosens. Pure; field by field through
`lattice`.

meet(site, charter)      -> the content that allows exactly what both name (T34: the charter may only tighten)
effective(site, charter) -> the same with both files, so that a verdict names the one whose value bound it
compare(before, after)   -> one row per field that differs: tighter | looser | incomparable | cosmetic
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedsilo.protocol.errors import UsageError
from policies import lattice
from policies.fields import Approvals, MetricField
from policies.lattice import NothingInCommon, Order
from policies.model import Policy, PolicyFile, Side

Direction = Literal["tighter", "looser", "incomparable", "cosmetic"]
Path = tuple[str, ...]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Change:
    """A field that differs. A block that only one of the two has is one row; its value is `absent` in the other."""

    path: Path
    before: Any
    after: Any
    direction: Direction

    @property
    def name(self) -> str:
        return ".".join(self.path)


class _Apart(NothingInCommon):
    """Nothing in common, and the key that shows it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(why)
        self.path = path


def meet(first: PolicyFile, second: PolicyFile) -> PolicyFile:
    """The loosest policy that is at least as tight as both, whatever their order.

    Raises:
        UsageError: they have nothing in common (another federation, model or time), so nothing could be allowed.
    """
    try:
        return _meet(first, second)
    except _Apart as error:
        raise UsageError(
            f"the two policies have nothing in common: {error}", hint="fedsilo policy diff A B", code="NO_MEET"
        ) from error


def effective(site: Policy, charter: Policy | None) -> Policy:
    """Return the policy in force at a site: its own policy, tightened by the federation's charter where there is one
    (D8).

    Raises:
        UsageError: they have nothing in common; names both files and lines.
    """
    if charter is None:
        return site
    try:
        file, gone = _meet(site.file, charter.file), _meet_model(site.gone, charter.gone, ())
    except _Apart as error:
        raise UsageError(
            f"{site.source}:{site.line_of(error.path)} and {charter.source}:{charter.line_of(error.path)} have nothing "
            f"in common, so nothing would be allowed: {error}",
            hint="give both the same value there; the charter is what the federation has agreed on",
            code="NO_MEET",
        ) from error
    if gone.public_rewards is not None and gone.public_rewards.set not in file.public_sets:
        gone = gone.model_copy(update={"public_rewards": None})
    return replace(site, file=file, parts=(site, charter), gone=gone)


def compare(before: PolicyFile, after: PolicyFile) -> list[Change]:
    """Rows in the order of the schema. An empty list: they allow the same, and say so in the same words."""
    return list(_changes(type(before), before, after, ()))


# ---- meet --------------------------------------------------------------------------------------------


def _meet(first: PolicyFile, second: PolicyFile) -> PolicyFile:
    made = _meet_model(first, second, ())
    if made.valid.from_ >= made.valid.until:
        raise _Apart(("valid", "until"), "they are never in force at the same time")
    if made.federation.min_peers > len(made.federation.peers):
        raise _Apart(("federation", "min_peers"), "they share fewer peers than one of them demands")
    return _without_loose_ends(made)


def _meet_model(first: Model, second: Model, path: Path) -> Model:
    values: dict[str, Any] = {}
    for name, field in type(first).model_fields.items():
        key = field.alias or name
        values[key] = _meet_field((*path, key), field, getattr(first, name), getattr(second, name))
    if isinstance(first, Approvals) and isinstance(second, Approvals):
        start, then = lattice.rhythm(*_rhythms(first, second))
        values |= {"first_rounds": start, "then": then}
    if isinstance(first, MetricField) and values["min"] > values["max"]:
        raise _Apart(path, "no value lies in both ranges")
    try:
        return type(first).model_validate(values)
    except ValueError as error:  # a list that must not be empty became empty
        raise _Apart(path, f"nothing is left of {'.'.join(path) or 'them'}") from error


def _meet_field(path: Path, field: FieldInfo, first: Any, second: Any) -> Any:
    order = order_of(field)
    if order is not None:
        try:
            return order.meet(first, second)
        except NothingInCommon as error:
            raise _Apart(path, f"{'.'.join(path)} is {first} and {second}") from error
    if isinstance(first, dict):
        return dict(_common_items(path, first, second))
    if is_demanded(field):
        # what either demands is demanded; where only one does, in the spelling that a meet gives it
        one, two = (first or second), (second or first)
        return None if one is None else _meet_model(one, two, path)
    if first is None or second is None:
        return None
    if isinstance(first, BaseModel):
        try:
            return _meet_model(first, second, path)
        except NothingInCommon:
            if not _may_be_absent(field):
                raise
            return None  # a kind of which nothing is allowed by both is a kind that is denied
    return first  # part of Approvals, which is met as a whole


def _common_items(path: Path, first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in sorted(first.keys() & second.keys()):
        try:
            yield name, _meet_model(first[name], second[name], (*path, name))
        except NothingInCommon:
            continue  # one name for two things is no name for either


def _without_loose_ends(file: PolicyFile) -> PolicyFile:
    """Drop kinds whose schema or set is not declared any more, for what is absent is denied; and such exemptions."""

    def cleared(side: Side) -> Side:
        values = {}
        for name, field in type(side).model_fields.items():
            block = getattr(side, name)
            schema, public = getattr(block, "schema_name", None), getattr(block, "set", None)
            loose = (schema is not None and schema not in file.lora_schemas) or (
                public is not None and public not in file.public_sets
            )
            values[field.alias or name] = None if loose else block
        return type(side).model_validate(values)

    screens, overlap = file.text_screens, file.text_screens.overlap
    if overlap is not None and overlap.background_set not in file.public_sets:
        screens = screens.model_copy(update={"overlap": overlap.model_copy(update={"background_set": None})})
    return file.model_copy(
        update={
            "text_screens": screens,
            "egress": cleared(file.egress),
            "ingress": cleared(file.ingress),
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
            change = _block_changes(one, two, here)
            yield from map(_reversed, change) if is_demanded(field) and (one is None or two is None) else change


def _reversed(change: Change) -> Change:
    """The change of a block whose absence is looser than its presence."""
    return replace(change, direction="looser" if change.direction == "tighter" else "tighter")


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


def is_demanded(field: FieldInfo) -> bool:
    """Return whether the field is a block that tightens by being there."""
    return any(isinstance(item, lattice.Demanded) for item in field.metadata)


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
    return [_shown(item) for item in value] if isinstance(value, tuple) else value
