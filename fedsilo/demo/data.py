"""The folders that the demo runs on (`fedsilo demo --data DIR`): digit questions drawn from a seed, or rows of other
people's data sets.

DIR/demo.yaml              names every file's verifier, the tokenizer and the lengths
DIR/private/SILO.jsonl     one file per silo; its name is the silo's name
DIR/public.jsonl           the public prompts, the same for all
DIR/held_out.jsonl         what pass@1 is measured on
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from fedsilo.demo import digit_tasks
from fedsilo.files.durable import read_regular
from fedsilo.files.task_files import read_tasks
from fedsilo.grading.own_verifiers import OwnPartsVerifier
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError, UsageError
from fedsilo.protocol.randomness import generator, seed_of
from fedsilo.protocol.strict_yaml import load, validate

PUBLIC = "public.jsonl"
HELD_OUT = "held_out.jsonl"
DESCRIPTION = "demo.yaml"
_SILO_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")

Row = dict[str, Any]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Closed):
    verifier: OwnPartsVerifier  # the demo's coordinator reads it too


class Lengths(_Closed):
    """Tokens a prompt and an answer may have; a longer prompt is left out and counted by the trainer."""

    max_prompt_tokens: Annotated[int, Field(ge=1)]
    max_new_tokens: Annotated[int, Field(ge=1)]


class Description(_Closed):
    """`demo.yaml`. `tokenizer` says which tiny model fits: `digits` for the demo's own set, `bytes` for any text."""

    name: str
    tokenizer: Literal["digits", "bytes"]
    lengths: Lengths
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class TaskSource:
    path: Path
    verifier: str


@dataclass(frozen=True)
class DataFolder:
    """The content of a data folder: `private` by silo name in ascending order."""

    root: Path
    description: Description
    private: dict[str, TaskSource]
    public: TaskSource
    held_out: TaskSource


def silo_names(count: int) -> tuple[str, ...]:
    """Return the silos' names: hospital_a, hospital_b, ...; from the 27th on a number."""
    return tuple(f"hospital_{chr(ord('a') + index) if index < 26 else index + 1}" for index in range(count))


def read_data_folder(root: Path) -> DataFolder:
    """Read `demo.yaml` and check that the files it names are there. The rows are not read.

    Raises:
        NotFoundError: the folder or a file in it is missing.
        UsageError: `demo.yaml` does not fit, names an unknown verifier, or leaves a private file out.
    """
    path = root / DESCRIPTION
    if not path.is_file():
        raise NotFoundError(f"{path} is missing", hint="write such a folder with `fedsilo data from-sets DIR`")
    document = load(read_regular(path), str(path))
    description = validate(Description, document)
    sources: dict[str, TaskSource] = {}
    for name, entry in description.files.items():
        line = document.line_of(("files", name))
        if name not in {PUBLIC, HELD_OUT} and not _is_private(name):
            raise UsageError(f"{path}:{line}: {name!r} is not {PUBLIC}, {HELD_OUT} or private/SILO.jsonl")
        if not (root / name).is_file():
            raise NotFoundError(
                f"{path}:{line}: {root / name} is missing",
                hint="copy the whole folder again, or write one with `fedsilo data from-sets DIR`",
            )
        sources[name] = TaskSource(root / name, entry.verifier)
    private_names = sorted(f"private/{found.name}" for found in (root / "private").glob("*.jsonl"))
    for name in (PUBLIC, HELD_OUT, *private_names):
        if name not in sources:
            raise UsageError(f"{path}: names no verifier for {name}", hint=f'add "{name}: {{verifier: exact}}"')
    if not private_names:
        raise UsageError(f"{root / 'private'} holds no SILO.jsonl")
    private = {Path(name).stem: sources[name] for name in private_names}
    return DataFolder(root, description, private, sources[PUBLIC], sources[HELD_OUT])


def write_data_folder(
    root: Path,
    *,
    name: str,
    tokenizer: Literal["digits", "bytes"],
    lengths: Lengths,
    private: Mapping[str, tuple[str, Sequence[Row]]],
    public: tuple[str, Sequence[Row]],
    held_out: tuple[str, Sequence[Row]],
) -> DataFolder:
    """Write a whole folder at once: after a failure nothing is at `root`.

    Args:
        root: must not exist, or be empty.
        name: of the set, for people.
        tokenizer: which tiny model can read the texts.
        lengths: in that tokenizer's tokens.
        private: for each silo its verifier and its rows.
        public: verifier and rows.
        held_out: verifier and rows.

    Raises:
        ConflictError: something is at `root` already.
        OperationError: the disk refused.
        UsageError: a silo name does not fit.
    """
    for silo in private:
        if not _SILO_NAME.fullmatch(silo):
            raise UsageError(f"silo name {silo!r} does not fit: lower-case letters, digits, - and _")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConflictError(f"{root} exists and is not empty", hint="name another folder")
    parts = {f"private/{silo}.jsonl": part for silo, part in private.items()} | {PUBLIC: public, HELD_OUT: held_out}
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{root.name}.", dir=root.parent))
        try:
            (scratch / "private").mkdir()
            for file_name, (_, rows) in parts.items():
                (scratch / file_name).write_bytes(to_json_lines(rows))
            verifiers = {file_name: verifier for file_name, (verifier, _) in parts.items()}
            (scratch / DESCRIPTION).write_text(_describe(name, tokenizer, lengths, verifiers), encoding="utf-8")
            scratch.chmod(0o755)
            os.replace(scratch, root)  # noqa: PTH105  # Path.replace says the same; an empty folder may be replaced
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise OperationError(f"cannot write {root}: {error.strerror}") from error
    return read_data_folder(root)


def to_json_lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _is_private(name: str) -> bool:
    folder, _, file_name = name.partition("/")
    return folder == "private" and file_name.endswith(".jsonl") and bool(_SILO_NAME.fullmatch(file_name[:-6]))


def _describe(name: str, tokenizer: str, lengths: Lengths, verifiers: Mapping[str, str]) -> str:
    lines = [
        "# What `fedsilo demo --data` needs to know about this folder.",
        f"name: {name}",
        "# which tiny model can read the texts: digits (24 characters) or bytes (any UTF-8)",
        f"tokenizer: {tokenizer}",
        "# a prompt above max_prompt_tokens is left out and counted; an answer is cut at max_new_tokens",
        f"lengths: {{max_prompt_tokens: {lengths.max_prompt_tokens}, max_new_tokens: {lengths.max_new_tokens}}}",
        "# how the answers of each file are checked",
        "files:",
        *(f"  {file_name}: {{verifier: {verifier}}}" for file_name, verifier in verifiers.items()),
    ]
    return "\n".join(lines) + "\n"


ALPHA = 0.1
ROWS_PER_SILO = 400
HOLDOUT_PART = 9  # so many rows and one more: a silo sets a tenth aside and trains on ROWS_PER_SILO, give or take
POOL_FACTOR = 1.25  # the split is measured on 4 x 400 of 2,000 (tests/algorithms/test_partition.py)
PUBLIC_ROWS = 400
HELD_OUT_ROWS = 512
DIGIT_LENGTHS = Lengths(max_prompt_tokens=8, max_new_tokens=6)
TEXT_LENGTHS = Lengths(max_prompt_tokens=960, max_new_tokens=16)


@dataclass(frozen=True)
class Rows:
    """Rows in memory: `private` by silo, and what all silos share.

    Attributes:
        total_variation: of the silos' topics, their mean distance to all silos' together.
        tuning: held-out rows beside the others.
    """

    private: dict[str, list[Row]]
    public: list[Row]
    held_out: list[Row]
    total_variation: float
    tuning: list[Row] = field(default_factory=list)


Divide = Callable[[Sequence[Row], np.random.Generator], list[list[int]]]  # of a pool, into the rows of each silo


def make_digit_set(
    seed: int,
    *,
    silos: int = 4,
    rows_per_silo: int = ROWS_PER_SILO,
    further_rows: int = 0,
    public_rows: int = PUBLIC_ROWS,
    held_out_rows: int = HELD_OUT_ROWS,
    tuning_rows: int = 0,
    topics: Sequence[str] = digit_tasks.TOPICS,
    divide: Divide | None = None,
) -> Rows:
    """Draw the demo's set. Private, public and held-out share no row; held-out shares no string with the others.

    `further_rows` for each silo come in its own mixture of topics, and change none of the other rows. `tuning_rows` are
    of held-out strings that then are in no other part. `divide` takes the place of the demo's split.

    Raises:
        UsageError: more rows asked for than there are strings.
    """
    draws = generator(seed_of(seed, "demo-data"))
    per_topic = -(-round(silos * rows_per_silo * POOL_FACTOR) // len(topics))
    seen = digit_tasks.digit_strings(held_out=False)
    public_draws = _draw_rows(draws, per_topic + -(-public_rows // len(topics)), seen, topics)
    pool = [row for rows in public_draws.values() for row in rows[:per_topic]]
    labels = [str(row["topic"]) for row in pool]
    if divide is not None:
        parts = divide(pool, draws)
    else:
        parts = split_dirichlet_equal_size(
            labels, silos=silos, rows_per_silo=rows_per_silo, alpha=ALPHA, generator=draws
        )
    unseen, tuning = _unseen_rows(seed, draws, held_out_rows, tuning_rows, topics)
    private = [[pool[row] for row in part] for part in parts]
    _add_rows(private, further_rows, used=public_draws, draws=generator(seed_of(seed, "demo-data-further")))
    return Rows(
        private=dict(zip(silo_names(silos), private, strict=True)),
        public=_interleave(
            {topic: [_solved(topic, row) for row in rows[per_topic:]] for topic, rows in public_draws.items()},
            public_rows,
        ),
        held_out=unseen,
        total_variation=mean_total_variation(labels, parts),
        tuning=tuning,
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


def make_topic_set(
    seed: int,
    topics: Sequence[str],
    *,
    rows_per_silo: int,
    public_rows: int,
    held_out_rows: int,
    tuning_rows: int = 0,
) -> Rows:
    """Draw a set in which each silo owns one topic: as many silos as topics. Private, public and held-out share no row;
    held-out shares no string with the others. Public questions of several steps have a solution.

    Raises:
        UsageError: more rows asked for than there are strings.
    """
    draws = generator(seed_of(seed, "topic-data"))
    per_topic = -(-public_rows // len(topics))
    drawn = _draw_rows(draws, rows_per_silo + per_topic, digit_tasks.digit_strings(held_out=False), topics)
    unseen, tuning = _unseen_rows(seed, draws, held_out_rows, tuning_rows, topics)
    names = silo_names(len(topics))
    return Rows(
        private={name: rows[:rows_per_silo] for name, rows in zip(names, drawn.values(), strict=True)},
        public=_interleave(
            {topic: [_solved(topic, row) for row in rows[rows_per_silo:]] for topic, rows in drawn.items()}, public_rows
        ),
        held_out=unseen,
        total_variation=1.0 - 1.0 / len(topics),
        tuning=tuning,
    )


def _unseen_rows(
    seed: int, draws: np.random.Generator, held_out_rows: int, tuning_rows: int, topics: Sequence[str]
) -> tuple[list[Row], list[Row]]:
    """Return held-out rows to measure on, and such to tune on, which share no string; where there are none of these,
    the others may be of any held-out string."""
    strings = digit_tasks.digit_strings(held_out=True)
    for_tuning = [digits for digits in strings if digit_tasks.is_for_tuning(digits)]
    if tuning_rows:
        strings = tuple(digits for digits in strings if not digit_tasks.is_for_tuning(digits))
    held_out = _draw_rows(draws, -(-held_out_rows // len(topics)), strings, topics)
    own_draws = generator(seed_of(seed, "tuning-data"))
    tuning = _draw_rows(own_draws, -(-tuning_rows // len(topics)), for_tuning, topics)
    return _interleave(held_out, held_out_rows), _interleave(tuning, tuning_rows)


def _draw_rows(
    draws: np.random.Generator, per_topic: int, strings: Sequence[str], topics: Sequence[str]
) -> dict[str, list[Row]]:
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
        for topic in topics
    }


def _solved(topic: str, row: Row) -> Row:
    """Return a public row with its solution: the work that its answer lacks; a question of one step has none."""
    if len(digit_tasks.steps_of(topic)) == 1:
        return row
    return {**row, "solution": digit_tasks.work(topic, str(row["id"]).rpartition("-")[2])}


def _add_rows(private: list[list[Row]], count: int, *, used: dict[str, list[Row]], draws: np.random.Generator) -> None:
    """Append unused rows to each silo's, their topics drawn from its own."""
    known = {row["id"] for rows in used.values() for row in rows}
    strings = digit_tasks.digit_strings(held_out=False)
    per_topic = min(len(strings), len(known) + len(private) * count)
    unused = {
        topic: [row for row in rows if row["id"] not in known]
        for topic, rows in _draw_rows(draws, per_topic, strings, tuple(used)).items()
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
    """A public data set: how its answers are checked, and its files, in the full folder or among the samples."""

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
        private: `SILO=SET` items; silos that name one set divide it by topic (Dirichlet, alpha 0.1).
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
    sources: dict[str, tuple[str, list[Row]]] = {}
    for name in sorted(wanted):
        rows = _read_set(folder, name)
        for part, chosen in _deal(rows, wanted[name], draws).items():
            sources[part] = (DATA_SETS[name].verifier, chosen)
    return write_data_folder(
        root,
        name="sets",
        tokenizer="bytes",
        lengths=lengths,
        private={silo: sources[silo] for silo in sorted(set_of)},
        public=sources["public"],
        held_out=sources["held_out"],
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


# ---- how rows of one pool are divided over silos --------------------------------------------------------------------


def split_dirichlet_equal_size(
    labels: Sequence[str], *, silos: int, rows_per_silo: int, alpha: float, generator: np.random.Generator
) -> list[list[int]]:
    """The equal-size Dirichlet split of Acar et al., as PubSwap uses it.

    One class distribution q_n ~ Dir(alpha) per silo; while places remain, a silo not yet full is picked uniformly,
    a class is drawn from its q_n, and it gets one unused row of that class. Where a class has run out, q_n is
    renormalised over the others, and is uniform over them when nothing of its mass is left.

    Args:
        labels: the class of each row of the pool.
        silos: number of parts.
        rows_per_silo: size of every part.
        alpha: concentration; small values give each silo few classes.
        generator: source of every draw.

    Returns:
        for each silo its row numbers, in ascending order; each row once at most.

    Raises:
        UsageError: the pool holds fewer rows than the parts need, or a number is not positive.
    """
    if silos < 1 or rows_per_silo < 1 or not alpha > 0:
        raise UsageError(f"cannot split over {silos} silos of {rows_per_silo} rows with alpha {alpha}")
    if len(labels) < silos * rows_per_silo:
        raise UsageError(f"{silos} silos of {rows_per_silo} rows need {silos * rows_per_silo}; there are {len(labels)}")
    classes = sorted(set(labels))
    unused: list[list[int]] = [[] for _ in classes]
    for row in generator.permutation(len(labels)):
        unused[classes.index(labels[int(row)])].append(int(row))
    preference = generator.dirichlet(np.full(len(classes), alpha), size=silos)
    parts: list[list[int]] = [[] for _ in range(silos)]
    open_silos = list(range(silos))
    while open_silos:
        silo = open_silos[int(generator.integers(len(open_silos)))]
        remaining = np.array([len(rows) > 0 for rows in unused])
        chosen = int(generator.choice(len(classes), p=_over_non_empty(preference[silo], remaining)))
        parts[silo].append(unused[chosen].pop())
        if len(parts[silo]) == rows_per_silo:
            open_silos.remove(silo)
    return [sorted(part) for part in parts]


def split_dirichlet_per_class(
    labels: Sequence[str], *, silos: int, beta: float, generator: np.random.Generator
) -> list[list[int]]:
    """The per-class Dirichlet split, as FedGRPO uses it: the rows of each class are shared out by Dir(beta) over silos.

    Shares are drawn across silos for each class, so they sum to 1 and each row goes to one silo. Sizes differ. A silo
    that none of it falls to gets one row of the largest part.

    Args:
        labels: the class of each row of the pool.
        silos: number of parts.
        beta: concentration; small values give most of a class to one silo.
        generator: source of every draw.

    Returns:
        for each silo its row numbers, in ascending order; every row once.

    Raises:
        UsageError: fewer rows than silos, or a number is not positive.
    """
    if silos < 1 or not beta > 0 or len(labels) < silos:
        raise UsageError(f"cannot split {len(labels)} rows over {silos} silos with beta {beta}")
    parts: list[list[int]] = [[] for _ in range(silos)]
    for name in sorted(set(labels)):
        rows = generator.permutation([row for row, label in enumerate(labels) if label == name])
        shares = generator.dirichlet(np.full(silos, beta))
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.extend(int(row) for row in piece)
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [sorted(part) for part in parts]


def _over_non_empty(preference: npt.NDArray[np.float64], remaining: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    weights = np.where(remaining, preference, 0.0)
    mass = float(weights.sum())
    if mass < 1e-12:
        weights, mass = remaining.astype(np.float64), float(remaining.sum())
    return np.asarray(weights / mass, dtype=np.float64)


def mean_total_variation(labels: Sequence[str], parts: Sequence[Sequence[int]]) -> float:
    """Mean over silos of the total variation between the silo's label histogram and that of all silos together."""
    classes = sorted(set(labels))
    histograms = np.array([[sum(labels[row] == name for row in part) for name in classes] for part in parts], float)
    pooled = histograms.sum(axis=0) / histograms.sum()
    shares = histograms / histograms.sum(axis=1, keepdims=True)
    return float(np.abs(shares - pooled).sum(axis=1).mean() / 2)


_SURELY_OURS = "hospital_a.yaml"  # another distribution may have a folder `examples` beside our packages


def examples_folder() -> Path:
    """The folder with the configuration, policy cases and samples that come along; it may be missing."""
    clone = Path(__file__).resolve().parents[2] / "examples"
    if (clone / _SURELY_OURS).is_file():
        return clone
    return Path(sysconfig.get_path("data")) / "share" / "fedsilo" / "examples"
