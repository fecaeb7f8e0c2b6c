"""All kinds, each from its own file, and the model of a policy file that their blocks make.

A file has `KINDS`, one `PolicyKind` or several that share their facts and rules, and `FIELDS`, the class of every field
of their messages. Which file a kind has is in its row.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from google.protobuf.message import Message
from pydantic import Field, create_model

from fedsilo.protocol import kinds as registry
from policies.kind import FieldClass, FieldTable, PolicyKind, faults
from policies.model import GONE, Gone, PolicyFile, Side, is_none


def _modules() -> Iterator[ModuleType]:
    for name in dict.fromkeys(row.module for row in registry.KINDS.values()):
        yield importlib.import_module(f"policies.kinds.{name}")  # noqa: TID251  # names of this registry's own rows


MODULES = tuple(_modules())
_FOUND: dict[str, PolicyKind] = {kind.name: kind for module in MODULES for kind in module.KINDS}
KINDS = {name: _FOUND[name] for name in registry.KINDS}


def _key(row: registry.Kind) -> str:
    """The key of a kind's block: control messages of one direction share one."""
    return "control" if row.is_control else row.name


def _side(name: str, rows: Iterable[registry.Kind], doc: str | None) -> type[Side]:
    fields: dict[str, Any] = {}
    for row in rows:
        block = KINDS[row.name].sent if name == "Egress" else KINDS[row.name].taken
        if block is not None:
            key = _key(row)
            unsaid = is_none if row in registry.NEWER else None
            fields.setdefault(key.replace(".", "_"), (block | None, Field(None, alias=key, exclude_if=unsaid)))
        for key in (key for key, behind in GONE.items() if name == "Egress" and behind == row.name):
            fields[key.replace(".", "_")] = (Gone, Field(None, alias=key))
    return create_model(name, __base__=Side, __doc__=doc, **fields)


# In the order in which two policies are compared: kinds of the further methods come first.
_FURTHER = (*registry.FURTHER, *registry.NEWER)
_ROWS = sorted(registry.KINDS.values(), key=lambda row: row not in _FURTHER)
Egress = _side("Egress", _ROWS, "A kind that is absent is denied.")
Ingress = _side("Ingress", _ROWS, None)
POLICY_FILE: type[PolicyFile] = create_model(
    "PolicyFile", __base__=PolicyFile, egress=(Egress, ...), ingress=(Ingress, ...)
)


def policy_file(content: Any) -> PolicyFile:
    """Return the content of a policy as a model.

    Raises:
        ValueError: it is none.
    """
    return POLICY_FILE.model_validate(content)


def _figures_order(kind: PolicyKind) -> tuple[bool, bool, str]:
    """PubSwap's kinds before the others; of the former the tensors come first, of the latter last."""
    row = registry.KINDS[kind.name]
    further = row in _FURTHER
    return further, bool(row.tensors) is further, kind.name if row.tensors == "update" else ""


# Kinds of which it is said how much they let out, in the order in which people read it.
FIGURED = tuple(sorted((kind for kind in KINDS.values() if kind.bits is not None), key=_figures_order))


# ---- fields of messages ----------------------------------------------------------------------------

# The class of each field of each message: a field without one is denied, in both directions.
CATALOGUE: FieldTable = {name: dict(fields) for module in MODULES for name, fields in module.FIELDS.items()}


def field_class(message_name: str, field_name: str) -> FieldClass | None:
    field_kind = CATALOGUE.get(message_name, {}).get(field_name)
    return FieldClass.CODE if isinstance(field_kind, frozenset) else field_kind


def fields_at_fault(message: Message) -> dict[str, int]:
    return faults(message, CATALOGUE)
