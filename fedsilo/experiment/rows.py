"""The rows of an experiment: who has which private ones, and the public, held-out and tuning ones that all share.

They follow from (setting, seed). Held-out and tuning rows share no text, whatever the seed: of digit strings a hash
says which may be which, and of files' prompts the order of their hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fedsilo.demo import digit_tasks
from fedsilo.demo.data import (
    Lengths,
    Row,
    Rows,
    make_digit_set,
    make_topic_set,
    mean_total_variation,
    silo_names,
    split_dirichlet_equal_size,
    split_dirichlet_per_class,
)
from fedsilo.experiment.design import Data, Setting
from fedsilo.files.task_files import PUBLIC, read_tasks
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.protocol.randomness import generator, seed_of

Rates = Callable[[Sequence[Row]], Sequence[float]]  # share of right answers of the base model to each prompt
CLASSES_OF_RATE = 4  # a pool is cut into so many classes of equal size, from the hardest prompts to the easiest


def rows_of(setting: Setting, seed: int, rates: Rates) -> Rows:
    """Return the rows of a seed.

    Args:
        setting: what they are drawn by.
        seed: of every draw.
        rates: asked where a split goes along success rate.

    Raises:
        UsageError: more rows asked for than there are.
        NotFoundError: a file is missing.
    """
    if setting.data is not None:
        return _rows_of_files(setting, setting.data, seed, rates)
    return _digit_rows(setting, seed, rates)


def verifier_of(setting: Setting) -> str:
    """Return by which verifier a setting's answers are graded."""
    if setting.data is not None:
        return setting.data.verifier
    return "exact" if setting.questions == "one-step" else "final"


def _digit_rows(setting: Setting, seed: int, rates: Rates) -> Rows:
    assert setting.questions != "files"  # noqa: S101  # the setting says so
    topics = digit_tasks.topics_of(setting.questions)
    if setting.split == "one-topic":
        return make_topic_set(
            seed,
            topics[: setting.silos],
            rows_per_silo=setting.private_rows,
            public_rows=setting.public_rows,
            held_out_rows=setting.held_out_rows,
            tuning_rows=setting.tuning_rows,
        )
    return make_digit_set(
        seed,
        silos=setting.silos,
        rows_per_silo=setting.private_rows,
        public_rows=setting.public_rows,
        held_out_rows=setting.held_out_rows,
        tuning_rows=setting.tuning_rows,
        topics=topics,
        divide=lambda pool, draws: divided(setting, pool, rates, draws),
    )


def lengths_of(setting: Setting) -> Lengths:
    """Return how many tokens prompts and answers may have: of digits as many as the longest, end mark included, and one
    to spare."""
    if setting.data is not None:
        return Lengths(max_prompt_tokens=setting.data.max_prompt_tokens, max_new_tokens=setting.data.max_new_tokens)
    assert setting.questions != "files"  # noqa: S101  # the setting says so
    topics, digits = digit_tasks.topics_of(setting.questions), "0" * digit_tasks.DIGITS
    prompt = max(len(digit_tasks.question(topic, digits)) for topic in topics)
    answer = max(len(digit_tasks.work(topic, digits)) for topic in topics)
    return Lengths(max_prompt_tokens=prompt + 1, max_new_tokens=answer + 2)


def divided(setting: Setting, pool: Sequence[Row], rates: Rates, draws: np.random.Generator) -> list[list[int]]:
    """Return for each silo its rows of a pool, as the setting's split says.

    Raises:
        UsageError: the pool is too small.
    """
    topics = [str(row["topic"]) for row in pool]
    if setting.split == "one-topic":
        return _by_owner(topics, setting)
    labels = topics if setting.along == "topic" else classes_of_rate(rates(pool))
    if setting.split == "per-class":
        return split_dirichlet_per_class(labels, silos=setting.silos, beta=setting.concentration, generator=draws)
    return split_dirichlet_equal_size(
        labels,
        silos=setting.silos,
        rows_per_silo=setting.private_rows,
        alpha=setting.concentration,
        generator=draws,
    )


def _by_owner(topics: Sequence[str], setting: Setting) -> list[list[int]]:
    """Return for each silo the first rows of one topic; the most frequent topics have owners."""
    counts = sorted(set(topics), key=lambda name: (-topics.count(name), name))[: setting.silos]
    parts = [[row for row, topic in enumerate(topics) if topic == name][: setting.private_rows] for name in counts]
    if len(parts) < setting.silos or min(map(len, parts)) < setting.private_rows:
        raise UsageError(
            f"{setting.silos} silos of one topic each need {setting.private_rows} rows of as many topics",
            hint=f"fewer private_rows; there are {', '.join(map(str, map(len, parts)))}",
        )
    return parts


def classes_of_rate(rates: Sequence[float]) -> list[str]:
    """Return a class for each row, from `0`, the hardest, up: equally many rows in each; of equal rates the earlier row
    counts as harder."""
    order = sorted(range(len(rates)), key=lambda row: (rates[row], row))
    classes = [""] * len(rates)
    for place, row in enumerate(order):
        classes[row] = str(place * CLASSES_OF_RATE // len(order))
    return classes


# ---- rows of files -----------------------------------------------------------------------------------------------


def _rows_of_files(setting: Setting, data: Data, seed: int, rates: Rates) -> Rows:
    """Deal one pool of files' rows by the counts that the setting asks for: tuning and held-out rows are the same for
    every seed, the first ones by a hash of the prompt; the others are public and private, as the seed draws them."""
    pool: dict[str, Row] = {}
    for name in data.files:
        path = Path(name)
        if not path.is_file():
            raise NotFoundError(f"{path} is missing", hint="data.files of the setting names it; put the file there")
        for task in read_tasks(path, PUBLIC).rows:
            row = {"id": task.id, "prompt": task.prompt, "answer": task.answer, "topic": task.topic}
            solved = {"solution": task.solution} if task.solution else {}
            pool.setdefault(task.prompt, {**row, **solved})  # a repeated prompt is one row
    counts = (setting.tuning_rows, setting.held_out_rows, setting.public_rows)
    if len(pool) <= sum(counts):
        raise UsageError(
            f"tuning_rows {counts[0]}, held_out_rows {counts[1]} and public_rows {counts[2]} leave no private rows; "
            f"the files have {len(pool)} different prompts",
            hint="ask for fewer rows, or name more files",
        )
    ordered = sorted(pool.values(), key=lambda row: digit_tasks.keyed_hash("fedsilo experiment files", row["prompt"]))
    tuning, held_out = ordered[: counts[0]], ordered[counts[0] : counts[0] + counts[1]]
    left = ordered[counts[0] + counts[1] :]
    draws = generator(seed_of(seed, "experiment-files"))
    rest = [left[int(place)] for place in draws.permutation(len(left))]
    public, private = rest[: setting.public_rows], rest[setting.public_rows :]
    parts = divided(setting, private, rates, draws)
    labels = [str(row["topic"]) for row in private]
    return Rows(
        private=dict(zip(silo_names(setting.silos), ([private[row] for row in part] for part in parts), strict=True)),
        public=public,
        held_out=held_out,
        tuning=tuning,
        total_variation=mean_total_variation(labels, parts),
    )
