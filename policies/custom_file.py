"""The file of a site's own patterns, read strictly, with file and line of whatever is wrong in it (T35). Pure.

Reading the bytes is the caller's part, as with the policy itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.strict_yaml import Document, Path, load, validate
from policies.custom_patterns import FILE_NAME, CustomFile, CustomPattern, PatternsFile, compiled
from policies.model import PolicyFile
from policies.model_screens import PatternName

KEY: Path = ("text_screens", "pii_basic", "custom_file")
HINT = "docs/how-to/screen-answers.md has an example"
# The bytes of a file in the policy's own folder and its name for messages. Raises UsageError: there is none to read.
Beside = Callable[[str], tuple[bytes, str]]


def custom_of(file: PolicyFile) -> CustomFile | None:
    """A policy's own patterns, if it has any."""
    screen = file.text_screens.pii_basic
    return screen.custom_file if screen is not None else None


def custom_in_words(file: PolicyFile) -> str:
    """How many own patterns, for people; empty where there are none."""
    custom = custom_of(file)
    if custom is None:
        return ""
    number = len(custom.patterns)
    return f"{number} own pattern{'' if number == 1 else 's'} of {custom.file}"


def with_custom_file(document: Document, beside: Beside | None) -> tuple[Document, bytes | None]:
    """The policy's document with the file's content in place of its name, and the file's bytes.

    Args:
        document: of the policy file.
        beside: reads a file in its folder; None where no file stands beside it.

    Raises:
        UsageError: not the name of such a file, no such file, or a mistake in it, with its line.
    """
    name, place = _named(document), _place(document)
    if not name:
        return document, None
    if beside is None:
        raise UsageError(
            f"{place}: {name} cannot be read: this policy is a text without a folder, as a charter is",
            hint="own patterns stand in a site's own policy; take the key out here",
            code="NO_CUSTOM_FILE",
        )
    try:
        text, source = beside(name)
    except UsageError as error:
        raise UsageError(f"{place}: {error.message}", hint=error.hint, code="NO_CUSTOM_FILE") from error
    patterns = read_patterns(text, source)
    return replace(document, value=_replaced(document.value, CustomFile(file=name, patterns=patterns))), text


def name_of_custom_file(text: bytes, source: str) -> str:
    """The file that a policy's text names; empty where it names none. Raises UsageError: no name of such a file."""
    return _named(load(text, source))


def _named(document: Document) -> str:
    value = document.value
    for key in KEY[:-1]:
        value = value.get(key) if isinstance(value, dict) else None
    name = value.get(KEY[-1]) if isinstance(value, dict) else None
    if name is None:
        return ""
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        raise UsageError(
            f"{_place(document)}: must name a file in the policy's own folder, by a name that ends in .patterns.yaml",
            hint="such as site.patterns.yaml, in small letters, without a folder",
        )
    return name


def _place(document: Document) -> str:
    return f"{document.place(KEY)}: {'.'.join(map(str, KEY))}"


def read_patterns(text: bytes, source: str) -> tuple[CustomPattern, ...]:
    """The patterns of a file, in its order.

    Raises:
        UsageError: names source and line.
    """
    # Pure, but with tables that a policy without own patterns does not need.
    from policies.screens.normalise import fold

    document = load(text, source)
    if not isinstance(document.value, dict):
        raise UsageError(f"{source}:1: a file of patterns is a mapping with the key `patterns`", hint=HINT)
    patterns = validate(PatternsFile, document).patterns
    first: dict[str, int] = {}
    for number, pattern in enumerate(patterns):
        place = f"{document.place(('patterns', number, 'name'))}: patterns.{number}"
        if pattern.name in get_args(PatternName):
            raise UsageError(f"{place}.name: {pattern.name} is a shipped pattern's name", hint="choose another")
        if pattern.name in first:
            raise UsageError(f"{place}.name: {pattern.name} stands twice", hint=f"first at line {first[pattern.name]}")
        first[pattern.name] = document.line_of(("patterns", number, "name"))
        for key, written in (("pattern", pattern.pattern), *(("after_words", word) for word in pattern.after_words)):
            for character in written:
                if not character.isascii() and (read := fold(character)) != character:
                    raise UsageError(
                        f"{document.place(('patterns', number, key))}: patterns.{number}.{key}: U+{ord(character):04X} "
                        f"never stands in a text as the screens read it",
                        hint=f"write {read!r}" if read else "leave it out",
                    )
        try:
            compiled(pattern.pattern, pattern.after_words)
        except ValueError as error:
            raise UsageError(
                f"{document.place(('patterns', number, 'after_words'))}: patterns.{number}: with its words {error}",
                hint="fewer or shorter words",
            ) from error
    return patterns


def _replaced(value: Any, custom: CustomFile) -> Any:
    screens, screen = KEY[0], KEY[1]
    block = {**value[screens][screen], KEY[2]: custom}
    return {**value, screens: {**value[screens], screen: block}}
