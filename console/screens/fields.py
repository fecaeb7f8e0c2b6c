"""Fields that take text from a keyboard: of a paste only what can be drawn, and a word that only hands can type.

Textual draws a field's value as it is, so a control, format or bidirectional character must never become part of one
(threat T37). A terminal without bracketed paste sends a paste as keys: a run that comes faster than hands type fills no
word (threat T36).

Does not stop: a program that types as slowly as a person, or a single pasted character.
"""

from __future__ import annotations

import unicodedata
from math import inf
from typing import TYPE_CHECKING, cast

from textual import events
from textual.widgets import Input

from console.safe import safe

if TYPE_CHECKING:
    from console.app import FedConsole

# Half of what `console.keys` asks of keys that change at once: a wrong guess only costs typing the word again.
TYPED_SECONDS_MIN = 0.02
FASTER_THAN_HANDS = "keys came faster than hands type: type the word"


def drawable(text: str) -> str:
    """The first line of `text`, with only those characters that `safe` draws as they are, and no stacks of marks."""
    first = (text.splitlines() or [""])[0]
    kept = "".join(character for character in first if safe(character) == character)
    return "".join(
        character for index, character in enumerate(kept) if not _is_mark(character) or not _stacked(kept, index)
    )


def _is_mark(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Me", "Mc")


def _stacked(text: str, index: int) -> bool:
    return index == 0 or (index > 1 and _is_mark(text[index - 1]) and _is_mark(text[index - 2]))


class TextLine(Input):
    """One line of text, typed or pasted: whichever way it comes, only what can be drawn is kept."""

    def validate_value(self, value: str) -> str:
        return drawable(value)


class HandTyped(Input):
    """A field that takes only what hands type: no paste, no clipboard, no run of keys that a terminal made of one."""

    _typed_at = -inf

    def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()

    def action_paste(self) -> None:
        """The clipboard is no typing either."""

    async def _on_key(self, event: events.Key) -> None:
        if not event.is_printable:
            return
        fed = cast("FedConsole", self.app)
        before, self._typed_at = self._typed_at, fed.now()
        if self._typed_at - before < TYPED_SECONDS_MIN:
            event.prevent_default()
            event.stop()
            self.value = ""
            fed.say(FASTER_THAN_HANDS)
            self.dropped()

    def dropped(self) -> None:
        """What was in the field came faster than hands type, and is gone."""
