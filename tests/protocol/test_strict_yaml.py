"""T35: YAML's surprises are errors with a line and a mend."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.strict_yaml import load, validate


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    rate: float
    name: str = "x"


def _refused(value: str) -> str:
    raise ValueError("must be quiet")


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inner: Inner
    items: list[int] = []
    named: dict[str, Inner] = {}
    maybe: Inner | None = None


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nrate: 1e-6\n", 2, "1.0e-6"),
        ("a: 1\nb:\n  a: 2\n  a: 3\n", 4, "twice"),
        ("a: no\n", 1, "ambiguous"),
        ("x: 1\na: &anchor 1\nb: *anchor\n", 2, "anchors"),
        ("a: !!python/object:os.system x\n", 1, "tag"),
        ("a: 1\nb: !!python/object:os.system {}\n", 2, "tag"),
        ("a: !!python/tuple [1]\n", 1, "tag"),
        ("a: 0x10\n", 1, "decimal"),
        ("a: 2026-01-01\n", 1, "date"),
        ("a: 1_000\n", 1, "decimal"),
        ("1: a\n", 1, "not a string"),
        ("a: .inf\n", 1, "decimal"),
        ("a: [1\n", 2, ""),
        ("a: 1\n---\nb: 2\n", 2, ""),
        ("\n\n" + "a: {" * 30 + "}" * 30, 3, ""),
    ],
)
def test_T35_traps_are_errors_with_their_line(text: str, line: int, words: str) -> None:
    with pytest.raises(UsageError) as error:
        load(text.encode(), "policy.yaml")
    assert error.value.message.startswith(f"policy.yaml:{line}:"), error.value.message
    assert words in error.value.message + error.value.hint
    assert error.value.exit_code == 2


def test_plain_values_are_read_as_written() -> None:
    value = load(b"a: [1, 2.5, -3, true, null]\nb: {c: 'no', d: \"1e-6\"}\ne: 1.0e-6\n", "f").value
    assert value == {"a": [1, 2.5, -3, True, None], "b": {"c": "no", "d": "1e-6"}, "e": 1e-6}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("inner:\n  rate: 1.0\n  rats: 2\n", 3, "unknown key 'inner.rats'"),
        ("inner:\n  name: x\n", 1, "'inner.rate' is missing"),
        ("inner:\n  rate: 1.0\nitems:\n  - 1\n  - two\n", 5, "items.1"),
    ],
)
def test_T35_a_closed_schema_names_key_and_line(text: str, line: int, words: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(Outer, load(text.encode(), "c.yaml"))
    assert error.value.message.startswith(f"c.yaml:{line}:")
    assert words in error.value.message


def test_an_unknown_key_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as error:
        validate(Outer, load(b"inner: {rate: 1.0, rats: 2}\n", "c.yaml"))
    assert "name, rate" in error.value.hint


@pytest.mark.parametrize(
    ("text", "message", "known"),
    [
        # One misspelling makes two errors, and pydantic tells of the missing key first.
        ("inner:\n  name: x\n  rat: 1.0\n", "c.yaml:3: unknown key 'inner.rat' (did you mean 'rate'?)", "name, rate"),
        (
            "inner: {rate: 1.0}\nnamed:\n  any:\n    rate: 1.0\n    nam: x\n",
            "c.yaml:5: unknown key 'named.any.nam' (did you mean 'name'?)",
            "name, rate",
        ),
        (
            "inner: {rate: 1.0}\nmaybe:\n  rate_: 1.0\n",
            "c.yaml:3: unknown key 'maybe.rate_' (did you mean 'rate'?)",
            "name, rate",
        ),
        ("inner: {rate: 1.0}\nzebra: 1\n", "c.yaml:2: unknown key 'zebra'", "inner, items, maybe, named"),
    ],
)
def test_a_misspelled_key_is_named_before_the_one_it_leaves_missing(text: str, message: str, known: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(Outer, load(text.encode(), "c.yaml"))
    assert (error.value.message, error.value.hint) == (message, f"known keys here: {known}")


def test_a_key_that_is_only_missing_is_called_missing() -> None:
    with pytest.raises(UsageError) as error:
        validate(Outer, load(b"inner: {rate: 1.0}\nmaybe:\n  name: x\n", "c.yaml"))
    assert error.value.message == "c.yaml:2: 'maybe.rate' is missing"


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(("depth", "good"), [(20, True), (21, False), (5_000, False), (400_000, False)])
def test_T35_depth_is_bounded_before_the_parser_follows_it(depth: int, good: bool) -> None:
    text = b"a: " + b"[" * depth + b"]" * depth
    if good:
        assert load(text, "x.yaml").value["a"] == nested(depth)
    else:
        with pytest.raises(UsageError, match=r"x\.yaml:1: nested deeper than 20"):
            load(text, "x.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"a: \xff\n", "not UTF-8"),
        (b"a: 1\nb: \x01\n", "f.yaml:2: the character U+0001 may not stand in YAML"),
        (b"a: b: c\n", "not YAML"),
        (b"a: " + b"[" * 30 + b"]" * 30, "nested deeper"),
        (b"#" * (1 << 20) + b"\n", "the limit is"),
    ],
)
def test_T35_what_cannot_be_read_is_said_with_a_hint_and_without_the_librarys_words(text: bytes, words: str) -> None:
    with pytest.raises(UsageError) as error:
        load(text, "f.yaml")
    assert words in error.value.message and error.value.hint
    assert "unicode string" not in error.value.message and "position" not in error.value.message


class Forms(BaseModel):
    model_config = ConfigDict(extra="forbid")
    block: Inner | None = None
    few: Annotated[tuple[int, ...], Field(min_length=1)] = (1,)
    small: Annotated[int, Field(le=3)] = 1
    word: Literal["a", "b"] = "a"
    own: Annotated[str, AfterValidator(_refused)] = "x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("block: 3", "block: must be a block of keys"),
        ("few: []", "few: must have at least 1 item"),
        ("few: 1", "few: must be a list"),
        ("small: 4", "small: must be at most 3"),
        ("small: x", "small: must be a whole number"),
        ("word: c", "word: must be 'a' or 'b'"),
        ("own: loud", "own: must be quiet"),
    ],
)
def test_T35_a_value_of_another_form_is_told_in_the_files_words(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(Forms, load(text.encode(), "f.yaml"))
    assert error.value.message == f"f.yaml:1: {words}" and error.value.hint
