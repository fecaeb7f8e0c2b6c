"""What a site's text screens find in the texts of a case, with the private records and canaries that it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies import screens
from policies.kind import block_of
from policies.message import Message, Screened
from policies.model import Policy, TextScreens
from policies.screens import Material
from policies.screens.overlap import OverlapIndex, build_index

# Where a case gives none: a screen that has nothing to look for cannot run, and denies.
CORPUS = ("A record of this site that no case repeats: seven grey herons waited by the frozen harbour wall.",)
CANARIES = ("canary-of-no-case-4c1f7a",)
_KEY = bytes(32)


def screens_of(message: Message, policy: Policy) -> tuple[TextScreens | None, tuple[Any, ...]]:
    """What decides a screen's result beside the texts: its settings, and which screens the policy asks for."""
    block, _ = block_of({"kind": message.kind, "sender": message.sender}, policy)
    names = screens.asked(block, message.kind, message.direction)
    return (policy.file.text_screens, names) if names else (None, ())


def screened(message: Message, policy: Policy, corpus: Sequence[str], canaries: Sequence[str]) -> Screened | None:
    """As the guard would have it; None where the policy asks for no screen."""
    definitions, names = screens_of(message, policy)
    if definitions is None or not names:
        return None
    index, overlap = None, definitions.overlap
    if overlap is not None:
        built = build_index(corpus, key=_KEY, n=overlap.n, false_positive_rate=overlap.false_positive_rate)
        index = OverlapIndex.from_bytes(built, key=_KEY)
    material = Material(overlap=index, canaries=tuple(canaries))
    return screens.screen(policy.file, names, list(screens.texts_of(message.body)), material)
