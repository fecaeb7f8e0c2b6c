"""The demo's questions: operations on strings of digits, in an alphabet of 24 characters.

A question is one letter naming the operation, the digits and an equals sign, such as `u5271=` ("sort upwards"); the
answer is digits. A question of two steps has two letters, such as `ua5271=` ("sort upwards, then add one to each"); a
whole answer shows its work, `1257-2368`, and the key has `2368` alone. A question of three has three. One string in
five is held out by its hash, whatever the operation and the seed, so neither the base model's supervised steps nor any
training set ever holds it. Of those, one in four is for tuning, by another hash: what is chosen on them is measured on
others.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

DIGITS = 4


@dataclass(frozen=True)
class Operation:
    """A topic: its letter in the question, what it does, and the topic a half-trained model confuses it with."""

    topic: str
    letter: str
    opposite: str
    apply: Callable[[str], str]


def _shifted(digits: str, by: int) -> str:
    return "".join(str((int(digit) + by) % 10) for digit in digits)


OPERATIONS: dict[str, Operation] = {
    operation.topic: operation
    for operation in (
        Operation("sort_up", "u", "sort_down", lambda digits: "".join(sorted(digits))),
        Operation("sort_down", "d", "sort_up", lambda digits: "".join(sorted(digits, reverse=True))),
        Operation("top_two", "t", "bottom_two", lambda digits: "".join(sorted(digits, reverse=True)[:2])),
        Operation("bottom_two", "b", "top_two", lambda digits: "".join(sorted(digits)[:2])),
        Operation("add_one", "a", "subtract_one", lambda digits: _shifted(digits, 1)),
        Operation("subtract_one", "s", "add_one", lambda digits: _shifted(digits, -1)),
        Operation("reverse", "r", "rotate", lambda digits: digits[::-1]),
        Operation("rotate", "o", "reverse", lambda digits: digits[1:] + digits[:1]),
    )
}
TOPICS: tuple[str, ...] = tuple(OPERATIONS)
# with the tokenizer's end, padding and unknown marks: 24 entries
ALPHABET = "0123456789" + "".join(operation.letter for operation in OPERATIONS.values()) + "=- "


# of questions of two steps: pairs of operations, of which no two begin alike
TWO_STEP_TOPICS: Mapping[str, tuple[str, str]] = {
    "sort_up_add_one": ("sort_up", "add_one"),
    "reverse_subtract_one": ("reverse", "subtract_one"),
    "sort_down_rotate": ("sort_down", "rotate"),
    "rotate_add_one": ("rotate", "add_one"),
}
# of three
THREE_STEP_TOPICS: Mapping[str, tuple[str, str, str]] = {
    "sort_up_add_one_reverse": ("sort_up", "add_one", "reverse"),
    "reverse_subtract_one_sort_up": ("reverse", "subtract_one", "sort_up"),
    "sort_down_rotate_add_one": ("sort_down", "rotate", "add_one"),
    "rotate_add_one_sort_down": ("rotate", "add_one", "sort_down"),
}
Questions = Literal["one-step", "two-step", "three-step"]
_STEPS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in TOPICS},
    **TWO_STEP_TOPICS,
    **THREE_STEP_TOPICS,
}


def topics_of(questions: Questions) -> tuple[str, ...]:
    """Return the topics of questions of so many steps."""
    return {"one-step": TOPICS, "two-step": tuple(TWO_STEP_TOPICS), "three-step": tuple(THREE_STEP_TOPICS)}[questions]


def steps_of(topic: str) -> tuple[Operation, ...]:
    """Return the operations of a topic, in the order in which they are applied."""
    return tuple(OPERATIONS[name] for name in _STEPS[topic])


def question(topic: str, digits: str) -> str:
    return f"{''.join(step.letter for step in steps_of(topic))}{digits}="


def answer(topic: str, digits: str) -> str:
    return work(topic, digits).rpartition("-")[2]


def work(topic: str, digits: str) -> str:
    """Return the result of each step, separated by a dash."""
    results: list[str] = []
    for step in steps_of(topic):
        results.append(step.apply(results[-1] if results else digits))
    return "-".join(results)


def keyed_hash(key: str, text: str) -> bytes:
    """Return 32 bytes that follow from a text, others for each key: the same for every seed."""
    return hashlib.sha256(f"{key} {text}".encode()).digest()


def is_held_out(digits: str) -> bool:
    """Return True for one string in five, by hash: the same strings for every seed and operation."""
    return keyed_hash("fedsilo demo digits", digits)[0] % 5 == 0


def is_for_tuning(text: str) -> bool:
    """Return True for one text in four, by hash: of held-out ones, those on which knobs and checkpoints are chosen."""
    return keyed_hash("fedsilo experiment tuning", text)[0] % 4 == 0


@functools.cache
def digit_strings(*, held_out: bool) -> tuple[str, ...]:
    """Every string on one side of the held-out line, in ascending order."""
    strings = (f"{number:0{DIGITS}d}" for number in range(10**DIGITS))
    return tuple(digits for digits in strings if is_held_out(digits) == held_out)
