"""The rows a trainer works on: which private ones are set aside, and prompts as tokens.

Which rows a step uses is drawn by the guard (silo/sampling.py), which knows their number and nothing else of them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedsilo.grading.exact import normalise
from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.errors import UsageError
from silo.trainer.text import TextCodec


class TaskRow(Protocol):
    """One line of a task file (fedsilo.files.task_files.Task)."""

    @property
    def id(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> str: ...
    @property
    def topic(self) -> str: ...
    @property
    def group(self) -> str: ...


@dataclass(frozen=True)
class Split:
    """Private rows in file order. `digest` names both sides and every row's content; keyed by the site secret, so it
    tells nobody else anything."""

    training: tuple[TaskRow, ...]
    holdout: tuple[TaskRow, ...]
    digest: str


def clusters_of(rows: Sequence[TaskRow]) -> list[tuple[str, str]]:
    """Name of each row's cluster: rows of one group belong together, and so do rows with one prompt.

    Prompts are compared as the `exact` verifier compares answers: Unicode forms, letter case and white space aside.
    A cluster is named after its first group by name, or after its prompt where no row has a group; so its name hangs
    neither on the order of the rows nor on ids.
    """
    above: dict[tuple[str, str], tuple[str, str]] = {}  # towards the smallest name; "group" comes before "prompt"

    def top(name: tuple[str, str]) -> tuple[str, str]:
        while (further := above.setdefault(name, name)) != name:
            above[name] = above[further]
            name = further
        return name

    names = [("prompt", normalise(row.prompt)) for row in rows]
    for row, name in zip(rows, names, strict=True):
        if row.group:
            one, other = sorted((top(("group", row.group)), top(name)))
            above[other] = one
    return [top(name) for name in names]


def split_holdout(rows: Sequence[TaskRow], share: float, site_secret: bytes) -> Split:
    """Set rows aside that are never trained on, to measure on.

    A row's side hangs on the site secret and on its cluster (`clusters_of`), on nothing else: neither a group nor the
    rows with one prompt are ever divided, and file order moves no row. Further rows move one only where they join its
    cluster to another group. So the share is met on average over clusters.

    Args:
        rows: private rows, ids unique.
        share: of the clusters to set aside, 0 to 0.5.
        site_secret: key of the choice.

    Raises:
        UsageError: nothing would be left to train on.
    """

    def is_held_out(cluster: tuple[str, str]) -> bool:
        key = canonical_json(["fedsilo", "private-holdout", *cluster])
        return int.from_bytes(hmac.new(site_secret, key, hashlib.sha256).digest()[:8], "big") < share * 2**64

    sides = [is_held_out(cluster) for cluster in clusters_of(rows)]
    training = tuple(row for row, held_out in zip(rows, sides, strict=True) if not held_out)
    holdout = tuple(row for row, held_out in zip(rows, sides, strict=True) if held_out)
    if not training:
        raise UsageError(
            f"data.holdout_share {share} sets all {len(rows)} private rows aside, since they belong to too few groups",
            hint="set it to 0, or give more rows",
        )
    digest = hmac.new(site_secret, b"fedsilo private-split", hashlib.sha256)
    for row, held_out in sorted(zip(rows, sides, strict=True), key=lambda pair: pair[0].id):
        digest.update(canonical_json([row.id, row.group, row.topic, row.prompt, row.answer, held_out]) + b"\n")
    return Split(training, holdout, digest.hexdigest())


@dataclass(frozen=True)
class Prompt:
    """row: its place in the file, by which public prompts are named on the wire."""

    row: int
    id: str
    ids: tuple[int, ...]
    reference: str
    topic: str


@dataclass(frozen=True)
class PromptSet:
    """Prompts short enough to be used, by row; `overlong` counts the rest."""

    by_row: dict[int, Prompt]
    overlong: int

    @property
    def prompts(self) -> list[Prompt]:
        return list(self.by_row.values())


def encode_prompts(rows: Sequence[TaskRow], codec: TextCodec, max_prompt_tokens: int) -> PromptSet:
    """Rows whose prompt has more tokens than the plan allows are counted and left out (methods 2.6)."""
    by_row = {}
    overlong = 0
    for place, row in enumerate(rows):
        ids = codec.prompt_ids(row.prompt)
        if len(ids) > max_prompt_tokens:
            overlong += 1
        else:
            by_row[place] = Prompt(place, row.id, ids, row.answer, row.topic)
    return PromptSet(by_row, overlong)
