"""The rows a trainer works on: which private ones are set aside, prompts as tokens, and the order of draws.

Private order is keyed by the site secret (design 8.4), so a coordinator that knows the run seed cannot tell which
rows a step used. What this does not hide: what the factors and answers say about the rows (N1).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedsilo.treaty.errors import UsageError
from fedsilo.treaty.grading.exact import normalise
from fedsilo.treaty.randomness import generator, private_seed_of
from fedsilo.treaty.wire.codec import canonical_json
from silo.trainer.text import TextCodec


class TaskRow(Protocol):
    """One line of a task file (fedsilo.edge.task_files.Task)."""

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


class PrivateSampler:
    """Shuffled passes without replacement over the private prompts. A batch may span two passes.

    Where each round started and how far the last draw went is kept on disk, so that a trainer that is started again
    draws the same batches when it repeats a round, and goes on from the last one when it begins the next.

    Args:
        count: number of prompts.
        site_secret, run_seed: key of every shuffle.
        state_path: JSON file {"starts": {round: rows drawn before it}, "drawn": rows}; None keeps nothing.
    """

    def __init__(self, count: int, site_secret: bytes, run_seed: int, state_path: Path | None = None) -> None:
        self._count = count
        self._site_secret = site_secret
        self._run_seed = run_seed
        self._state_path = state_path
        self._drawn = 0
        self._open_pass: tuple[int, list[int]] = (-1, [])
        self._starts: dict[str, int] = {}
        if state_path is not None and state_path.exists():
            kept = json.loads(state_path.read_text())
            self._starts, self._drawn = kept["starts"], kept["drawn"]

    def start_round(self, round_number: int) -> None:
        """Stand where the round started, if it was started before; else remember that it starts here."""
        self._drawn = self._starts.setdefault(str(round_number), self._drawn)
        self._keep()

    def draw(self, size: int) -> list[int]:
        """Indices of the next `size` prompts, or of all where there are fewer."""
        batch = []
        for _ in range(min(size, self._count)):
            number_of_pass, place = divmod(self._drawn, self._count)
            batch.append(self._order(number_of_pass)[place])
            self._drawn += 1
        self._keep()
        return batch

    def _keep(self) -> None:
        if self._state_path is None:
            return
        self._state_path.parent.mkdir(parents=True, exist_ok=True)
        part = self._state_path.with_suffix(".part")
        part.write_text(json.dumps({"starts": self._starts, "drawn": self._drawn}))
        os.replace(part, self._state_path)  # noqa: PTH105  # one name for "atomic" throughout the project

    def _order(self, number_of_pass: int) -> list[int]:
        if self._open_pass[0] != number_of_pass:
            seed = private_seed_of(self._site_secret, self._run_seed, "private-order", number_of_pass)
            self._open_pass = (number_of_pass, generator(seed).permutation(self._count).tolist())
        return self._open_pass[1]
