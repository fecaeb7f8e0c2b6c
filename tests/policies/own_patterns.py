"""A site's own patterns for the tests: a file, and policies that name it."""

from __future__ import annotations

import functools

from fedsilo.protocol.errors import UsageError
from policies.load import Beside, load_policy
from policies.model import Policy
from tests.simulated import screening

NAME = "site.patterns.yaml"
STUDY = {"name": "study_number", "pattern": r"\bHX-[0-9]{4}\b"}
WARD = {"name": "ward", "pattern": "[0-9]{1,2}[a-d]", "after_words": ["ward", "bay"]}
FOUND = {"study_number": "the study HX-4711 and 12", "ward": "she lies in ward no. 7b and 12"}
PATTERNS = r"""# what is ours
patterns:
  - name: study_number
    pattern: '\bHX-[0-9]{4}\b'
  - name: ward
    pattern: '[0-9]{1,2}[a-d]'
    after_words: [ward, bay]
"""
FEWER = PATTERNS[: PATTERNS.index("  - name: ward")]
MORE = PATTERNS + "  - {name: badge, pattern: 'badge [0-9]{6}'}\n"
DEFINITIONS = screening.DEFINITIONS.replace("[email, phone]}", f"[email, phone], custom_file: {NAME}}}")


def policy_text(names: tuple[str, ...] = ("pii_basic",), **changes: object) -> str:
    return screening.policy_text(names, **{"definitions": DEFINITIONS, **changes})  # type: ignore[arg-type]


def beside(text: str, name: str = NAME) -> Beside:
    """A folder with one file of patterns in it."""

    def read(asked: str) -> tuple[bytes, str]:
        if asked != name:
            raise UsageError(f"{asked} is not there")
        return text.encode(), asked

    return read


@functools.cache
def policy(patterns: str = PATTERNS, text: str = "") -> Policy:
    return load_policy((text or policy_text()).encode(), "policy.yaml", beside(patterns))
