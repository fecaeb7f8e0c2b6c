"""The block `text_screens` of a policy file (threat model 4): how each text screen is set. Names only, no screen.

A block that is present says how its screen is set; a message kind's key `screens` says that it runs. So a block can
only tighten: of two files, the meet has every block that either has, with the tighter settings of both. A kind that
names a screen without a block is denied. The screens are in policies/screens, with what each does not stop.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field

from policies import lattice
from policies.custom_patterns import CustomFile
from policies.fields import Closed, Integer, Limit, Text, plain_integer, plain_number

ScreenName = Literal["pii_basic", "overlap", "canary", "charset"]
# Screens that read the text alone: a party without private data can run them too, and what they find tells nothing of
# anybody's.
TextOnlyName = Literal["pii_basic", "charset"]
TEXT_ONLY: frozenset[ScreenName] = frozenset(get_args(TextOnlyName))
PatternName = Literal[
    "email", "phone", "ssn_us", "nhs_number", "iban", "mrn_like", "date_of_birth", "street_address"
]  # fmt: skip
Decoder = Literal["base64", "hex", "reversed", "rot13"]
Alphabet = Literal[
    "latin", "greek", "cyrillic", "arabic", "hebrew", "devanagari", "thai", "han", "hiragana", "katakana", "hangul",
    "digits", "punctuation", "math", "symbols",
]  # fmt: skip

GRAM_WORDS_MIN, GRAM_WORDS_MAX = 3, 64
FALSE_POSITIVE_RATE_MAX = 0.01
EDITS_MAX = 4


# The key `screens` of a kind; absent: no screen. Each name needs its definition in `text_screens`.
ScreenNames = Annotated[tuple[ScreenName, ...], lattice.UNION]
# The same of what comes in and is refused whole: a screen that knows private data would tell its sender of them (T18).
TextOnlyNames = Annotated[tuple[TextOnlyName, ...], lattice.UNION]
# The key `max_hits_per_day` of a kind that leaves; needed where screens are named.
HitsPerDay = Annotated[Integer | None, lattice.SMALLEST_STATED]


def _is_none(value: Any) -> bool:
    return value is None


class PiiBasic(Closed):
    """Shipped patterns, and a site's own: the policy names their file, and has its content once it is read."""

    patterns: Annotated[tuple[PatternName, ...], Field(min_length=1), lattice.UNION]
    custom_file: Annotated[
        CustomFile | None,
        lattice.DEMANDED,
        Field(
            description="name of a file in the policy's own folder that ends in `.patterns.yaml`, with a site's own "
            "patterns; its content is part of the policy and of its digest; or `null`",
            # a policy without own patterns is the same whether it says so or not, and so is its digest
            exclude_if=_is_none,
        ),
    ] = None


class Overlap(Closed):
    """Passages of `n` words in a row that the private corpus has too.

    n: where n words in a row match, so do any fewer of them, so a smaller n is tighter.
    false_positive_rate: of one n-gram that is in neither corpus nor background; a finer index withholds less by
        mistake, so what it lets through is more: the larger rate is the tighter one.
    background_set: a public set whose own passages do not count; none subtracts nothing.
    """

    unit: Annotated[Literal["word"], lattice.SAME]
    n: Annotated[int, BeforeValidator(plain_integer), Field(ge=GRAM_WORDS_MIN, le=GRAM_WORDS_MAX), lattice.SMALLEST]
    max_matching_ngrams: Limit
    background_set: Annotated[Text | None, lattice.EXEMPTION] = None
    false_positive_rate: Annotated[
        float, BeforeValidator(plain_number), Field(gt=0, le=FALSE_POSITIVE_RATE_MAX), lattice.LARGEST
    ]


class Canary(Closed):
    """Planted strings. decode lists what is undone besides what every screen undoes (policies/screens/normalise.py)."""

    max_edit_distance: Annotated[Integer, Field(le=EDITS_MAX), lattice.LARGEST]
    decode: Annotated[tuple[Decoder, ...], lattice.UNION]


class Charset(Closed):
    """Allowed characters, and the longest run of characters that are neither letters nor digits."""

    allow: Annotated[tuple[Alphabet, ...], lattice.INTERSECTION]
    max_run_nonword: Limit


class TextScreens(Closed):
    pii_basic: Annotated[PiiBasic | None, lattice.DEMANDED] = None
    overlap: Annotated[Overlap | None, lattice.DEMANDED] = None
    canary: Annotated[Canary | None, lattice.DEMANDED] = None
    charset: Annotated[Charset | None, lattice.DEMANDED] = None
