"""The private rows of each step: drawn by whoever gives the tasks, so that the guard knows what a round was trained on
without asking the trainer (threat T7).

The trainer says how many prompts it can use and gets row numbers in return. The order is keyed by the site secret,
so a coordinator that knows the run seed cannot tell which rows a step used.
What this does not stop: a trainer that lies about its data (N1). It may say that it has more prompts than there are, or
hold the same text under every number, or train on other rows than it was given. And a record is a row here: several
rows of one patient count as several.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsilo.files.durable import make_private_directory, write_durably
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.randomness import generator, private_seed_of
from fedsilo.protocol.tasks import TrainerTask

PROMPTS_MAX = 1 << 31  # a trainer that says more is confused: a pass over them would not fit into memory


@dataclass(frozen=True)
class Training:
    """What the update of one round was made of.

    Attributes:
        records: distinct private rows that its steps were given.
        epochs: how often the row that was given most often was given. Each time it takes part in
            `optimiser.epochs` passes of the plan.
        steps: private and public steps.
        of: private rows that the trainer has; 0 where an earlier version did not keep that.
    """

    records: int
    epochs: int
    steps: int
    of: int = 0

    @staticmethod
    def from_json(value: Any) -> Training | None:
        if value is None:
            return None
        return Training(value["records"], value["epochs"], value["steps"], value.get("of", 0))


class PrivateSampler:
    """Shuffled passes without replacement over the private prompts. A batch may span two passes.

    Where each round started and how far any draw went is kept on disk. So a guard that is started again draws the same
    batches when a round is repeated, and goes on from the furthest when the next begins: a repetition may end early.

    Args:
        count: number of prompts.
        site_secret: with `run_seed` the key of every shuffle.
        run_seed: of the plan.
        state_path: JSON file {"starts": {round: rows drawn before it}, "drawn": rows}; None keeps nothing.
    """

    def __init__(self, count: int, site_secret: bytes, run_seed: int, state_path: Path | None = None) -> None:
        self._count = count
        self._site_secret = site_secret
        self._run_seed = run_seed
        self._state_path = state_path
        self._drawn = self._furthest = 0
        self._open_pass: tuple[int, list[int]] = (-1, [])
        self._starts: dict[str, int] = {}
        if state_path is not None and state_path.exists():
            kept = json.loads(state_path.read_text())
            self._starts, self._drawn = kept["starts"], kept["drawn"]
            self._furthest = self._drawn

    def start_round(self, round_number: int) -> None:
        """Stand where the round started, if it was started before; else remember that it starts here."""
        self._drawn = self._starts.setdefault(str(round_number), self._furthest)
        self._keep(self._furthest)

    def draw(self, size: int) -> list[int]:
        """Indices of the next `size` prompts, or of all where there are fewer.

        Raises OperationError: what was drawn cannot be kept, and counts as not drawn.
        """
        batch, drawn = [], self._drawn
        for _ in range(min(size, self._count)):
            number_of_pass, place = divmod(drawn, self._count)
            batch.append(self._order(number_of_pass)[place])
            drawn += 1
        self._keep(max(self._furthest, drawn))  # before it counts: whoever was refused by the disk draws the same again
        self._drawn, self._furthest = drawn, max(self._furthest, drawn)
        return batch

    def _keep(self, furthest: int) -> None:
        if self._state_path is None:
            return
        make_private_directory(self._state_path.parent)
        state = json.dumps({"starts": self._starts, "drawn": furthest}).encode()
        write_durably(self._state_path, state, mode=0o600)

    def _order(self, number_of_pass: int) -> list[int]:
        if self._open_pass[0] != number_of_pass:
            seed = private_seed_of(self._site_secret, self._run_seed, "private-order", number_of_pass)
            self._open_pass = (number_of_pass, generator(seed).permutation(self._count).tolist())
        return self._open_pass[1]


class TaskGiver:
    """Completes a method's tasks for one run with the rows of each private step, and counts what a round was given.

    Args:
        plan: of the run.
        count: private prompts that the trainer can use.
        site_secret: key of the draws.
        state_path: as of `PrivateSampler`.
    """

    def __init__(self, plan: Plan, count: int, site_secret: bytes, state_path: Path | None = None) -> None:
        self._plan = plan
        self._count = count
        self._sampler = PrivateSampler(count, site_secret, plan.seed, state_path)
        self._times_given: Counter[int] = Counter()
        self._steps = 0
        self.training: Training | None = None

    def with_rows_drawn(self, task: TrainerTask) -> TrainerTask:
        """Return the task as the trainer gets it. After one that gives factors, `training` says what the round's update
        is made of."""
        if task.begins_round:
            self._sampler.start_round(task.round)
            self._times_given.clear()
            self._steps, self.training = 0, None
        if task.draws_rows:
            rows = tuple(self._sampler.draw(self._plan.prompts_per_step))
            self._times_given.update(rows)
            task = replace(task, rows=rows)  # type: ignore[type-var]  # it has that field
        self._steps += task.trains
        if task.gives is pb.Factors:
            epochs = max(self._times_given.values(), default=0)
            self.training = Training(len(self._times_given), epochs, self._steps, self._count)
        return task
