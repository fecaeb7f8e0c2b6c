"""`--schema`: what a command takes and promises, as JSON values, made from the command itself and contract.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fedsilo.cli.contract import EXIT_MEANINGS, facts_of


def schema_of(name: str, command: Any) -> dict[str, Any]:
    """Of one command.

    Args:
        name: all words of it, such as "silo pause".
        command: as typer made it.
    """
    facts = facts_of(name)
    shown = [each for each in command.params if each.name != "help"]
    return {
        "name": name,
        "help": " ".join((command.help or "").split()),
        "arguments": [_parameter(each) for each in shown if each.param_type_name == "argument"],
        "options": [_parameter(each) for each in shown if each.param_type_name == "option"],
        "changes_state": bool(facts.changes),
        "changes": facts.changes,
        "dry_run": facts.dry_run if facts.changes else "",
        "idempotent": facts.idempotent,
        "streams": facts.streams,
        "waits": facts.waits,
        "exit_codes": {str(code): EXIT_MEANINGS[code] for code in facts.exit_codes},
    }


def commands_below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below one that does something by itself, with the words that name it."""
    below = getattr(command, "commands", None)
    if below is None:
        yield words, command
        return
    if getattr(command, "invoke_without_command", False):
        yield words, command
    for name, found in below.items():
        yield from commands_below(found, (*words, name))


def _parameter(parameter: Any) -> dict[str, Any]:
    is_option = parameter.param_type_name == "option"
    kind, choices = _kind(parameter.type_descriptor.annotation)
    found: dict[str, Any] = {
        "name": parameter.name if is_option else _argument_name(parameter),
        "type": kind,
        "required": bool(parameter.required),
        "default": _default(parameter),
        "multiple": bool(getattr(parameter, "multiple", False)) or parameter.nargs == -1,
        "help": " ".join((parameter.help or "").split()),
    }
    if choices:
        found["choices"] = choices
    if is_option:
        found["name"] = max(parameter.opts, key=len).lstrip("-")
        found["flags"] = [*parameter.opts, *parameter.secondary_opts]
        found["environment"] = parameter.envvar if isinstance(parameter.envvar, str) else ""
    return found


def _kind(annotation: Any) -> tuple[str, list[str]]:
    """What a value is, and which it may be where there is a list: of `list[str] | None` it is a str."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "text", [str(each) for each in parts]
    if origin is not None:
        return _kind(next(each for each in parts if each is not type(None)))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "text", [str(each.value) for each in annotation]
    return _KINDS[annotation], []


_KINDS: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "text", Path: "path"}


def _argument_name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name).strip("{}[]").removesuffix("...").upper()


def _default(parameter: Any) -> Any:
    value = parameter.default
    if parameter.required or callable(value) or value is None:
        return None
    value = getattr(value, "value", value)
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return value if isinstance(value, bool | int | float | str) else str(value)
