"""YAML without surprises (threat T35): bytes in, plain values with their line numbers out.

Refused, each with its line: duplicate keys, anchors and aliases, tags, several documents, non-string keys, a bare
`yes/no/on/off` (YAML 1.1 booleans), a line break that is none to `grep`, and a number that YAML reads as a string, such
as 1e-6.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from fedsilo.protocol.errors import UsageError

ModelT = TypeVar("ModelT", bound=BaseModel)
Path = tuple[str | int, ...]
BYTES_MAX = 1 << 20
DEPTH_MAX = 20
DIGITS_MAX = 100  # of a number; the longest that any file of ours needs has 17

_LOOKS_NUMERIC = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)([eE][-+]?\d+)?$")
_HIDDEN_LINE = re.compile("[\\u0085\\u2028\\u2029]|\\r(?!\\n)")
_BOUNDS = {"ge": "must be at least", "gt": "must be above", "le": "must be at most", "lt": "must be below"}
_FORMS = (
    (
        ("model_type", "model_attributes_type", "dict_type", "mapping_type"),
        "must be a block of keys",
        "write `key: value` lines, indented below it",
    ),
    (("tuple_type", "list_type", "set_type", "frozen_set_type"), "must be a list", "write [a, b]"),
    (("string_type",), "must be text", "quote it"),
    (("int_type", "int_parsing", "int_from_float"), "must be a whole number", "write it without unit or quotes"),
    (("float_type", "float_parsing", "finite_number"), "must be a number", "write it without unit or quotes"),
    (("bool_type", "bool_parsing"), "must be true or false", "write it without quotes"),
    (("none_required",), "must be null", "leave it out"),
)
_PLAIN_TAGS = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})
_YAML_11_BOOLEANS = frozenset({"yes", "no", "on", "off", "y", "n"})


class WrongValueError(ValueError):
    """Error that a field's validator raises: what is wrong with a value, and what to write."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Document:
    """A parsed file: the value, and for each path in it the line (from 1) where it stands."""

    source: str
    value: Any
    lines: Mapping[Path, int]

    def line_of(self, path: Path) -> int:
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)

    def place(self, path: Path) -> str:
        """`source:line` of a key; the source alone where no line is known."""
        return f"{self.source}:{self.line_of(path)}" if self.lines else self.source

    def below(self, key: str) -> Document:
        """Return the document that stands under a key of this one, a mapping."""
        lines = {path[1:]: line for path, line in self.lines.items() if path[:1] == (key,)}
        return Document(self.source, self.value[key], lines)


class _RefusedError(Exception):
    """args: line, what, hint."""


class _Loader(yaml.SafeLoader):
    """Stops at the first anchor or alias, and at the first node that lies too deep, before anything is made of it."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise _RefusedError(line, "anchors and aliases are not allowed", "write it out")
        if self._depth > DEPTH_MAX:
            raise _RefusedError(
                line, f"nested deeper than {DEPTH_MAX}", "no file of ours needs that: count the brackets"
            )
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _refuse_hidden_lines(text: bytes, source: str) -> None:
    """Refuse characters that end a line in YAML and in no other tool: behind one a key could stand in what people, and
    `grep`, take for a comment (T59). Written as an escape in a quoted text they are harmless and pass."""
    if match := _HIDDEN_LINE.search(text.decode("utf-8", "replace")):
        line, character = match.string[: match.start()].count("\n") + 1, ord(match.group())
        message = f"the character U+{character:04X} ends a line in YAML alone"
        raise _error(source, line, message, "remove it, or write it as an escape in a quoted text")


def load(text: bytes, source: str) -> Document:
    """Parse one strict YAML document.

    Raises:
        UsageError: names source, line and the mend.
    """
    if len(text) > BYTES_MAX:
        raise UsageError(
            f"{source}: {len(text)} bytes, the limit is {BYTES_MAX}",
            hint="such a file has a few kilobytes: another one?",
        )
    _refuse_hidden_lines(text, source)
    try:
        node = yaml.compose(text.decode("utf-8"), Loader=_Loader)
    except _RefusedError as error:
        raise _error(source, *error.args) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 at byte {error.start}", hint="save it as UTF-8 text") from error
    except yaml.reader.ReaderError as error:
        line = text.decode("utf-8")[: error.position].count("\n") + 1
        message = f"the character U+{error.character:04X} may not stand in YAML"
        raise _error(source, line, message, "remove it, or write it as an escape in a quoted text") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "it cannot be read"
        hint = "two spaces for each level, no tabs; quote a text with a colon, a bracket or a # in it"
        raise _error(source, (mark.line + 1) if mark else 1, f"not YAML: {problem}", hint) from error
    lines: dict[Path, int] = {}
    value = {} if node is None else _build(node, (), lines, source)
    return Document(source, value, lines)


def validate(model: type[ModelT], document: Document) -> ModelT:
    """Fit a document into a closed pydantic model.

    Raises:
        UsageError: the first error, with source, line and, for an unknown key, the known ones.
    """
    try:
        return model.model_validate(document.value, strict=False)
    except ValidationError as error:
        raise mistake(model, error, document) from error


def mistake(model: type[BaseModel], error: ValidationError, document: Document) -> UsageError:
    """Return the error to show for a document that does not fit: the first error, but an unknown key before all others.

    A misspelled key is two errors, one unknown and one missing, and only the first shows what was written.
    """
    errors = error.errors()
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    path: Path = tuple(part for part in first["loc"] if isinstance(part, str | int))
    where = ".".join(str(part) for part in path) or "the file"
    place = document.place(path)
    if first["type"] == "extra_forbidden":
        known = _known_keys(model, path)
        close = difflib.get_close_matches(str(path[-1]), known, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        hint = f"known keys here: {', '.join(known)}" if known else "remove it"
        return UsageError(f"{place}: unknown key {where!r}{meant}", hint=hint)
    if first["type"] == "missing":
        return UsageError(f"{place}: {where!r} is missing", hint="add it")
    wrong, hint = _in_words(first["type"], first.get("ctx", {}), first["msg"])
    return UsageError(f"{place}: {where}: {wrong}", hint=hint)


def _in_words(kind: str, about: Mapping[str, Any], otherwise: str) -> tuple[str, str]:
    """Return what is wrong with a value, and what to write: the validator's own words name Python's types, not the
    file's."""
    if kind == "value_error":
        return str(about["error"]), getattr(about["error"], "hint", "") or "write the value in that form"
    for key, words in _BOUNDS.items():
        if key in about:
            return f"{words} {about[key]}", "write a number within that"
    for key, words in (("min_length", "at least"), ("max_length", "at most")):
        if key in about:
            what = "character" if kind.startswith("string") else "item"
            return f"must have {words} {about[key]} {what}{'' if about[key] == 1 else 's'}", f"write {words} so many"
    for forms, words, hint in _FORMS:
        if kind in forms:
            return words, hint
    if "expected" in about:
        return f"must be {about['expected']}", "write one of these"
    if "pattern" in about:
        return f"must match {about['pattern']}", "write it in that form"
    return otherwise, "docs/reference has every key with its form"


def _known_keys(model: type[BaseModel], path: Path) -> list[str]:
    """The keys of the block that `path` ends in."""
    models: list[type[BaseModel]] = [model]
    for part in path[:-1]:
        fields = [(name, field) for each in models for name, field in each.model_fields.items()]
        inner = [
            found for name, field in fields if part in (name, field.alias) for found in _models_in(field.annotation)
        ]
        # In `dict[str, Model]` and in a list of models, the name or number of an item leads to no other model.
        models = inner or models
    return sorted(
        {
            field.alias or name
            for each in models
            for name, field in each.model_fields.items()
            if not field.exclude and field.annotation is not type(None)
        }
    )


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models within an annotation such as `Model | None` or `dict[str, Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _error(source: str, line: int, message: str, hint: str) -> UsageError:
    return UsageError(f"{source}:{line}: {message}", hint=hint)


def _build(node: yaml.Node, path: Path, lines: dict[Path, int], source: str) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    line = node.start_mark.line + 1
    if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN_TAGS:
        raise _error(source, line, f"tag {node.tag!r} is not allowed", "remove it")
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise _error(source, key_line, f"key {getattr(key_node, 'value', '?')!r} is not a string", "quote it")
            key = key_node.value
            if key in mapping:
                raise _error(source, key_line, f"key {key!r} stands twice", f"first at line {lines[(*path, key)]}")
            lines[(*path, key)] = key_line
            mapping[key] = _build(value_node, (*path, key), lines, source)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_build(child, (*path, index), lines, source) for index, child in enumerate(node.value)]
    return _scalar(node, source, line)


def _scalar(node: yaml.Node, source: str, line: int) -> Any:
    text = str(node.value)
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    plain = getattr(node, "style", None) is None
    if len(text) > DIGITS_MAX and (kind in {"int", "float"} or (plain and _LOOKS_NUMERIC.match(text))):
        # Python itself refuses to read more than 4,300 digits, in words of its own
        raise _error(source, line, f"a number of {len(text)} characters", "write a shorter one, or quote it as text")
    if plain and text.lower() in _YAML_11_BOOLEANS:
        raise _error(source, line, f"{text!r} is ambiguous in YAML", "write true or false, or quote it")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int" and re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", text):
        return int(text)
    if kind == "float" and _LOOKS_NUMERIC.match(text):
        return float(text)
    if kind in {"int", "float"}:
        raise _error(source, line, f"{text!r} is not a plain decimal number", "write it in decimal digits")
    if kind == "str" and plain and _LOOKS_NUMERIC.match(text):
        mantissa, _, exponent = text.lower().partition("e")
        mend = f"{mantissa}.0e{exponent}" if "." not in mantissa else f"{mantissa}e{int(exponent or 0):+d}"
        raise _error(source, line, f"{text!r} is a string in YAML, not a number", f"write {mend}")
    if kind == "str":
        return text
    if kind == "timestamp":
        raise _error(source, line, f"{text!r} would be read as a date", "quote it")
    raise _error(source, line, f"tag {node.tag!r} is not allowed", "remove it")
