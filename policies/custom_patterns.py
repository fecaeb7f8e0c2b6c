"""A site's own patterns for the screen pii_basic, as the file that `custom_file` names has them (T15, T16, T23, T35).

A pattern is a regular expression in RE2's syntax, which has no look-around and no back-reference: RE2 finds it in time
linear in the text, whatever it is, and its size is bounded here. It is looked for in the same readings of a text as the
shipped patterns are (policies/screens/patterns.py), without regard to case, once in each: which one was found is told,
never what it matched.

What this does not stop (N3): what the patterns do not describe; a pattern that finds nothing, such as one for a percent
escape, which every screen resolves before it looks. What it stops though nothing is wrong: whatever else they match.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, Final

import re2
from pydantic import AfterValidator, Field

from policies import lattice
from policies.fields import Closed, Label, Text

PATTERNS_MAX = 64
WORDS_MAX = 16
# Compiled, with its words: what a byte of text costs at most where RE2's automaton has no memory left for its states.
INSTRUCTIONS_MAX = 2000
WORD_REACH = 24  # characters between one of `after_words` and the match, as with the shipped patterns' own words
# In the policy's own folder, and no name that another file of a site has: an approved proposal writes it there.
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\.patterns\.yaml")
_COMPILED_MAX = 2 * PATTERNS_MAX  # of two files that were met
_MEMORY_BYTES = 1 << 20  # of each compiled pattern
# What may stand before and after a match as far as ^, $, \b and \B can tell: nothing, a new line, a word, a sign.
_NEIGHBOURS: Final = ("", "\n", "a", " ")


def _options() -> Any:
    options = re2.Options()
    options.case_sensitive = False
    options.never_capture = True
    options.log_errors = False
    options.max_mem = _MEMORY_BYTES
    return options


def _linear(pattern: str) -> str:
    """Raises ValueError: RE2 cannot read it, it is too large when compiled, or it matches an empty text somewhere."""
    _checked(pattern)  # before it stands in brackets, which would close what it leaves open
    if _may_be_empty(pattern):
        raise ValueError("it matches an empty text, so it would be found in every answer")
    return pattern


@lru_cache(maxsize=_COMPILED_MAX)
def _may_be_empty(pattern: str) -> bool:
    return any(
        _checked(f"{re2.escape(before)}(?:{pattern}){re2.escape(after)}").fullmatch(before + after) is not None
        for before in _NEIGHBOURS
        for after in _NEIGHBOURS
    )


def _checked(expression: str) -> Any:
    """Compiled. Raises ValueError: RE2 cannot read it, or it is too large."""
    try:
        made = re2.compile(expression, options=_options())
    except re2.error as error:
        why = error.args[0] if error.args else ""
        why = why.decode("utf-8", "replace") if isinstance(why, bytes) else str(why)
        raise ValueError(f"no regular expression of RE2's: {why}; it has no look-around or back-reference") from error
    if made.programsize > INSTRUCTIONS_MAX:
        raise ValueError(
            f"it takes {made.programsize} instructions when compiled, at most {INSTRUCTIONS_MAX} are allowed: repeat "
            "less, or write a smaller class"
        )
    return made


def _in_one_order(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(set(words)))


Word = Annotated[Text, Field(min_length=2, max_length=32)]


class CustomPattern(Closed):
    """A pattern, and where it counts."""

    name: Annotated[
        Text,
        Field(pattern=r"^[a-z][a-z0-9_]{0,31}$", description="what a hit is called: `pii_basic/NAME`"),
        lattice.SAME,
    ]
    pattern: Annotated[
        Text,
        Field(min_length=1, description="a regular expression in RE2's syntax, of at most 256 characters"),
        AfterValidator(_linear),
        lattice.SAME,
    ]
    after_words: Annotated[
        tuple[Word, ...],
        Field(
            max_length=WORDS_MAX,
            description=f"at most {WORDS_MAX}; it counts only where one of them stands before it, with at most "
            f"{WORD_REACH} characters between them",
        ),
        AfterValidator(_in_one_order),
        lattice.SAME,
    ] = ()

    def __lt__(self, other: CustomPattern) -> bool:
        return self._place < other._place

    @property
    def _place(self) -> tuple[str, str, tuple[str, ...]]:
        return self.name, self.pattern, self.after_words

    def is_in(self, text: bytes) -> bool:
        """Return whether a folded text, in UTF-8, contains the pattern."""
        return compiled(self.pattern, self.after_words).search(text) is not None


class PatternsFile(Closed):
    """The file's own content."""

    patterns: Annotated[tuple[CustomPattern, ...], Field(min_length=1, max_length=PATTERNS_MAX), lattice.UNION]


def _sorted(patterns: tuple[CustomPattern, ...]) -> tuple[CustomPattern, ...]:
    return tuple(sorted(set(patterns)))  # in another order they say the same


class CustomFile(Closed):
    """A file that a policy names, with the content read from it.

    The content is part of the policy, and so of its digest. Of two policies, the meet has both files' patterns.
    """

    file: Annotated[Label, Field(pattern=f"^{FILE_NAME.pattern}$")]
    patterns: Annotated[tuple[CustomPattern, ...], AfterValidator(_sorted), lattice.UNION]


@lru_cache(maxsize=_COMPILED_MAX)
def compiled(pattern: str, words: tuple[str, ...]) -> Any:
    """The pattern with its words as one expression. Raises ValueError as when it was read."""
    if not words:
        return _checked(f"(?:{pattern})")
    alternatives = "|".join(re2.escape(word) for word in words)
    return _checked(rf"(?:^|[^a-z0-9])(?:{alternatives})(?s:.{{0,{WORD_REACH}}})(?:{pattern})")
