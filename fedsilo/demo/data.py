"""The two data folders the demo runs on: digit questions drawn from a seed, and rows of other people's data sets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.demo import digit_tasks
from fedsilo.demo.data_folder import DataFolder, Lengths, silo_names, write_data_folder
from fedsilo.demo.examples import examples_folder
from fedsilo.demo.partition import mean_total_variation, split_dirichlet_equal_size
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.protocol.randomness import generator, seed_of

ALPHA = 0.1
ROWS_PER_SILO = 400
HOLDOUT_PART = 9  # so many rows and one more: a silo sets a tenth aside and trains on ROWS_PER_SILO, give or take
POOL_FACTOR = 1.25  # methods 1.5 measured its thresholds on 4 x 400 of 2,000
PUBLIC_ROWS = 400
HELD_OUT_ROWS = 512
DIGIT_LENGTHS = Lengths(max_prompt_tokens=8, max_new_tokens=6)
TEXT_LENGTHS = Lengths(max_prompt_tokens=960, max_new_tokens=16)

Row = dict[str, Any]


@dataclass(frozen=True)
class DigitSet:
    """The demo's rows in memory; `total_variation` is the mean over silos (methods 1.5)."""

    private: dict[str, list[Row]]
    public: list[Row]
    held_out: list[Row]
    total_variation: float


def make_digit_set(
    seed: int,
    *,
    silos: int = 4,
    rows_per_silo: int = ROWS_PER_SILO,
    further_rows: int = 0,
    public_rows: int = PUBLIC_ROWS,
    held_out_rows: int = HELD_OUT_ROWS,
    alpha: float = ALPHA,
) -> DigitSet:
    """Draw the demo's set. Private, public and held-out share no row; held-out shares no string with the others.

    `further_rows` for each silo come in its own mixture of topics, and change none of the other rows.

    Raises:
        UsageError: more rows asked for than there are strings.
    """
    draws = generator(seed_of(seed, "demo-data"))
    per_topic = -(-round(silos * rows_per_silo * POOL_FACTOR) // len(digit_tasks.TOPICS))
    asked = _draw_rows(draws, per_topic + -(-public_rows // len(digit_tasks.TOPICS)), held_out=False)
    pool = [row for rows in asked.values() for row in rows[:per_topic]]
    labels = [str(row["topic"]) for row in pool]
    parts = split_dirichlet_equal_size(labels, silos=silos, rows_per_silo=rows_per_silo, alpha=alpha, generator=draws)
    unseen = _draw_rows(draws, -(-held_out_rows // len(digit_tasks.TOPICS)), held_out=True)
    private = [[pool[row] for row in part] for part in parts]
    _add_rows(private, further_rows, used=asked, draws=generator(seed_of(seed, "demo-data-further")))
    return DigitSet(
        private=dict(zip(silo_names(silos), private, strict=True)),
        public=_interleave({topic: rows[per_topic:] for topic, rows in asked.items()}, public_rows),
        held_out=_interleave(unseen, held_out_rows),
        total_variation=mean_total_variation(labels, parts),
    )


def write_digit_folder(root: Path, seed: int, *, silos: int = 4, rows_per_silo: int = ROWS_PER_SILO) -> DataFolder:
    """Write the demo's own set; `rows_per_silo` are to train on, and a ninth more for what a silo sets aside.

    Raises: as `write_data_folder` and `make_digit_set`.
    """
    further_rows = -(-rows_per_silo // HOLDOUT_PART)
    made = make_digit_set(seed, silos=silos, rows_per_silo=rows_per_silo, further_rows=further_rows)
    return write_data_folder(
        root,
        name=f"digits-{seed}",
        tokenizer="digits",
        lengths=DIGIT_LENGTHS,
        private={silo: ("exact", rows) for silo, rows in made.private.items()},
        public=("exact", made.public),
        held_out=("exact", made.held_out),
    )


def _draw_rows(draws: np.random.Generator, per_topic: int, *, held_out: bool) -> dict[str, list[Row]]:
    strings = digit_tasks.digit_strings(held_out=held_out)
    if per_topic > len(strings):
        raise UsageError(f"{per_topic} rows a topic asked for; there are {len(strings)} strings")
    return {
        topic: [
            {
                "id": f"digits-{topic}-{strings[int(index)]}",
                "prompt": digit_tasks.question(topic, strings[int(index)]),
                "answer": digit_tasks.answer(topic, strings[int(index)]),
                "topic": topic,
            }
            for index in draws.choice(len(strings), size=per_topic, replace=False)
        ]
        for topic in digit_tasks.TOPICS
    }


def _add_rows(private: list[list[Row]], count: int, *, used: dict[str, list[Row]], draws: np.random.Generator) -> None:
    """Append unused rows to each silo's, their topics drawn from its own."""
    known = {row["id"] for rows in used.values() for row in rows}
    per_topic = min(len(digit_tasks.digit_strings(held_out=False)), len(known) + len(private) * count)
    unused = {
        topic: [row for row in rows if row["id"] not in known]
        for topic, rows in _draw_rows(draws, per_topic, held_out=False).items()
    }
    for rows in private:
        topics = [str(rows[int(index)]["topic"]) for index in draws.integers(len(rows), size=count)]
        rows += [unused[topic].pop() for topic in topics]


def _interleave(rows_of: dict[str, list[Row]], count: int) -> list[Row]:
    """Rows of all topics in turn, so that any stretch of them is balanced."""
    in_turn = [row for group in zip(*rows_of.values(), strict=True) for row in group]
    return in_turn[:count]


# --- other people's text -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSet:
    """One public data set: how its answers are checked, and its files, in the full folder or among the samples."""

    verifier: str
    files: tuple[str, ...]
    sample: str = ""


DATA_SETS: dict[str, DataSet] = {
    "gsm8k": DataSet("math", ("gsm8k_train.jsonl", "gsm8k_test_dev.jsonl"), "gsm8k.jsonl"),
    "dmmath": DataSet("math", ("dmmath_train.jsonl",), "dmmath.jsonl"),
    "svamp": DataSet("math", ("svamp.jsonl",)),
    "medqa": DataSet("choice", ("medqa_test_dev.jsonl",), "medqa.jsonl"),
    "medmcqa": DataSet("choice", ("medmcqa_dev.jsonl",)),
    "mmlu_medical": DataSet("choice", ("mmlu_medical.jsonl",)),
    "mmlu_stem": DataSet("choice", ("mmlu_stem.jsonl",)),
    "pubmedqa": DataSet("choice", ("pubmedqa_train.jsonl",)),
}
DEFAULT_PRIVATE = ("hospital_a=dmmath", "hospital_b=dmmath", "hospital_c=medqa", "hospital_d=medqa")


def find_sets_folder(folder: Path | None) -> Path:
    """The folder asked for, else $FEDSILO_DATA, else the samples that come along.

    Raises:
        NotFoundError: none of them is there.
    """
    named = os.environ.get("FEDSILO_DATA", "")
    chosen = folder if folder is not None else Path(named) if named else examples_folder() / "data"
    if not chosen.is_dir():
        raise NotFoundError(f"no data sets at {chosen}", hint="point FEDSILO_DATA or --sets at a folder of JSONL files")
    return chosen


def write_sets_folder(
    root: Path,
    *,
    seed: int,
    sets: Path | None = None,
    private: Sequence[str] = DEFAULT_PRIVATE,
    public: str = "gsm8k",
    held_out: str = "",
    rows_per_silo: int = 200,
    public_rows: int = 200,
    held_out_rows: int = 64,
    lengths: Lengths = TEXT_LENGTHS,
) -> DataFolder:
    """Write a folder from data sets on disk. Where a set holds too few rows, its parts shrink alike.

    Args:
        root: where to write; must not exist, or be empty.
        seed: decides which rows go where.
        sets: folder of the data sets; see `find_sets_folder`.
        private: `SILO=SET` items; silos that name one set divide it by topic (methods 1.5, alpha 0.1).
        public: the set of the public prompts.
        held_out: the set pass@1 is measured on; the public one by default. No row serves twice.
        rows_per_silo: rows of each private file, at most.
        public_rows: at most.
        held_out_rows: at most.
        lengths: written to `demo.yaml`.

    Raises:
        NotFoundError: no such set or folder.
        UsageError: a `SILO=SET` item does not fit, or a set is too small for the silos that name it.
        ConflictError: `root` is not empty.
    """
    folder = find_sets_folder(sets)
    set_of = dict(_split_item(item) for item in private)
    if len(set_of) != len(private):
        raise UsageError("a silo is named twice in --private")
    held_out = held_out or public
    draws = generator(seed_of(seed, "data-sets"))
    wanted: dict[str, list[tuple[str, int]]] = {}
    for silo, name in sorted(set_of.items()):
        wanted.setdefault(name, []).append((silo, rows_per_silo))
    wanted.setdefault(public, []).append(("public", public_rows))
    wanted.setdefault(held_out, []).append(("held_out", held_out_rows))
    given: dict[str, tuple[str, list[Row]]] = {}
    for name in sorted(wanted):
        rows = _read_set(folder, name)
        for part, chosen in _deal(rows, wanted[name], draws).items():
            given[part] = (DATA_SETS[name].verifier, chosen)
    return write_data_folder(
        root,
        name="sets",
        tokenizer="bytes",
        lengths=lengths,
        private={silo: given[silo] for silo in sorted(set_of)},
        public=given["public"],
        held_out=given["held_out"],
    )


def _split_item(item: str) -> tuple[str, str]:
    silo, separator, name = item.partition("=")
    if not separator or not silo or silo in {"public", "held_out"}:
        raise UsageError(f"{item!r} is not SILO=SET", hint=f"sets: {', '.join(DATA_SETS)}")
    return silo, name


def _read_set(folder: Path, name: str) -> list[Row]:
    known = DATA_SETS.get(name)
    if known is None:
        raise NotFoundError(f"no data set {name!r}", hint=f"known: {', '.join(DATA_SETS)}")
    paths = [folder / file_name for file_name in known.files if (folder / file_name).is_file()]
    if not paths and known.sample and (folder / known.sample).is_file():
        paths = [folder / known.sample]
    if not paths:
        raise NotFoundError(f"{folder} holds none of {', '.join((*known.files, known.sample))}")
    return [
        {"id": task.id, "prompt": task.prompt, "answer": task.answer, "topic": task.topic}
        for path in paths
        for task in read_tasks(path).rows
    ]


def _deal(rows: list[Row], wanted: list[tuple[str, int]], draws: np.random.Generator) -> dict[str, list[Row]]:
    """Give disjoint rows to each part; when there are too few, every part gets the same share of what it wanted."""
    total = sum(count for _, count in wanted)
    share = min(1.0, len(rows) / total)
    sizes = {part: int(count * share) for part, count in wanted}
    if min(sizes.values()) < 1:
        raise UsageError(f"{len(rows)} rows are too few for {', '.join(sizes)}")
    order = [int(index) for index in draws.permutation(len(rows))]
    dealt: dict[str, list[Row]] = {}
    for part in ("public", "held_out"):
        if part in sizes:
            dealt[part] = [rows[order.pop()] for _ in range(sizes[part])]
    silos = [part for part in sizes if part not in dealt]
    if silos:
        labels = [str(rows[index]["topic"]) for index in order]
        parts = split_dirichlet_equal_size(
            labels, silos=len(silos), rows_per_silo=sizes[silos[0]], alpha=ALPHA, generator=draws
        )
        dealt |= {silo: [rows[order[index]] for index in part] for silo, part in zip(silos, parts, strict=True)}
    return dealt
