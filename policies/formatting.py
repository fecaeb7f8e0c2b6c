"""A policy file in the schema's order of keys, with every comment where it belongs. Text in, text out.

Whole lines move: a key with the comments directly above it and everything below it. A round-trip library (ruamel.yaml,
tried) keeps a comment with the key *before* it, so a moved key would leave its explanation behind. What else is written
stays as it is: quoting, indentation, numbers. The names that a site gives (schemas, sets, metrics) keep their order.
"""

from __future__ import annotations

from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from fedsilo.treaty.errors import OperationError
from policies.custom_file import Beside
from policies.load import load_policy
from policies.model import PolicyFile


class Names:
    """A mapping whose keys are names that a site gives; its values are blocks of `model`."""

    def __init__(self, model: type[BaseModel] | None) -> None:
        self.model = model


Keys = type[BaseModel] | Names  # what the keys of a mapping are: fields of a block, or names


def formatted(text: bytes, source: str, beside: Beside | None = None) -> bytes:
    """The same policy in canonical order, with the same digest.

    Args:
        text: of the file.
        source: its name, for messages.
        beside: reads a file in its folder, as for `load_policy`.

    Raises:
        UsageError: it is no policy; with the line.
        OperationError: it cannot be formatted without changing its meaning or losing a comment.
    """
    before = load_policy(text, source, beside)
    written = text.decode("utf-8").replace("\r\n", "\n")
    lines = [line.rstrip() for line in written.rstrip().split("\n")]
    root: Any = yaml.compose("\n".join(lines), Loader=yaml.SafeLoader)
    first = root.value[0][0].start_mark.line
    # What stands above the first key is about the file, or about that key from the last empty line on.
    first = max((n + 1 for n in range(first) if not lines[n]), default=first)
    made = lines[:first] + _block(root, PolicyFile, lines, first, len(lines))
    result = ("\n".join(made) + "\n").encode()
    again = load_policy(result, source, beside)
    if again.digest != before.digest or sorted(made) != sorted(_reordered_flows(root, lines)):
        raise OperationError(f"{source}: it cannot be formatted without changing more than the order of its keys")
    return result


def _block(node: Any, keys: Keys, lines: list[str], begin: int, end: int) -> list[str]:
    """Lines begin..end, which hold exactly the entries of a block mapping, in the order of its schema.

    Args:
        node: the mapping.
        keys: of its schema.
        lines: of the whole file.
        begin: first line, from 0.
        end: line after the last.
    """
    column = node.value[0][0].start_mark.column
    starts = [begin]
    for (_, value_before), (key, _) in zip(node.value, node.value[1:], strict=False):
        start = _last_line(value_before) + 1
        # A comment that is deeper than this mapping's keys belongs to what stands above it.
        while start < key.start_mark.line and lines[start].strip() and _indent(lines[start]) > column:
            start += 1
        starts.append(start)
    chunks = []
    for index, (key, value) in enumerate(node.value):
        stop = starts[index + 1] if index + 1 < len(starts) else end
        line = key.start_mark.line
        head, body = lines[starts[index] : line], lines[line:stop]
        inner = _inner(keys, key.value)
        if isinstance(value, yaml.MappingNode) and value.value:
            if not value.flow_style:
                body = [lines[line], *_block(value, inner, lines, line + 1, stop)]
            else:
                body = [_flow(value, inner, lines[line]), *lines[line + 1 : stop]]
        chunks.append((_place(keys, key.value), [*head, *body]))
    return [line for _, chunk in sorted(chunks, key=lambda chunk: chunk[0]) for line in chunk]


def _flow(node: Any, keys: Keys, line: str) -> str:
    """A line with the mapping {...} that stands whole in it in the order of its schema."""
    if node.start_mark.line != node.end_mark.line:
        return line
    items = [
        (_place(keys, key.value), line[key.start_mark.column : value.end_mark.column]) for key, value in node.value
    ]
    inner = ", ".join(item for _, item in sorted(items, key=lambda item: item[0]))
    return f"{line[: node.start_mark.column]}{{{inner}}}{line[node.end_mark.column :]}"


def _reordered_flows(root: Any, lines: list[str]) -> list[str]:
    """What the lines become when only the mappings inside of a line are put in order."""
    result = list(lines)
    pending: list[tuple[Any, Keys]] = [(root, PolicyFile)]
    while pending:
        node, keys = pending.pop()
        for key, value in node.value:
            if isinstance(value, yaml.MappingNode) and value.value:
                inner = _inner(keys, key.value)
                if value.flow_style:
                    result[key.start_mark.line] = _flow(value, inner, lines[key.start_mark.line])
                else:
                    pending.append((value, inner))
    return result


def _place(keys: Keys, key: str) -> int:
    """Where a key stands in its block; names keep the order that they have."""
    if isinstance(keys, Names):
        return 0
    return next(i for i, (name, field) in enumerate(keys.model_fields.items()) if key == (field.alias or name))


def _inner(keys: Keys, key: str) -> Keys:
    """What the keys are in the mapping that stands under `key`."""
    if isinstance(keys, Names):
        return keys.model or keys
    field = next(field for name, field in keys.model_fields.items() if key == (field.alias or name))
    return _found(field.annotation) or Names(None)


def _found(annotation: Any) -> Keys | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = next((found for part in get_args(annotation) if (found := _found(part)) is not None), None)
    if get_origin(annotation) is dict and not isinstance(found, Names):
        return Names(found)
    return found


def _last_line(node: Any) -> int:
    """The last line of a node's own text, from 0; the parser's end of a block lies behind the comments after it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    end = node.end_mark
    return int(end.line if end.column or end.line == node.start_mark.line else end.line - 1)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
