"""The design of an experiment: the file that states it, and the cells that follow from it.

What must be equal over the rows of a seed is a function of (setting, seed) alone: the split, the base model, the
public and held-out prompts, the site secrets that key private draws, and the plan but for what a row names. So a
difference between two rows of one seed is the rows'.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedsilo.files.durable import read_regular
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.methods import METHODS, method_named, require_exchange
from fedsilo.protocol.plan import Plan

Metric = Literal["pass_at_1", "pass_at_1_greedy", "worst_topic", "zero_variance_share"]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,40}$")]
# Keys of a row's plan that would undo what is equal over rows.
_FIXED = frozenset({"run", "method", "seed", "rounds", "local_steps", "evaluation", "lora", "silos"})


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Base(_Closed):
    """The base model: share of right answers among those it is built on, and steps of building."""

    right_share: float = Field(0.4, ge=0, le=1)
    steps: int = Field(300, ge=1)


class Setting(_Closed):
    """What all rows share.

    Attributes:
        questions: of one step, such as `u5271=`, or of two, such as `ua5271=`, whose key lacks the work.
        split: `one-topic`: each silo owns one topic; `dirichlet`: the demo's split over eight topics.
        plan: further fields of run.yaml.
    """

    questions: Literal["one-step", "two-step"] = "one-step"
    split: Literal["one-topic", "dirichlet"] = "one-topic"
    silos: int = Field(4, ge=1, le=16)
    base: Base = Base()
    private_rows: int = Field(400, ge=1)
    public_rows: int = Field(400, ge=1)
    held_out_rows: int = Field(512, ge=1)
    evaluation_samples: int = Field(4, ge=1)
    rounds: int = Field(ge=1)
    local_steps: int = Field(ge=1)
    swap_period: int = Field(2, ge=1)
    prompts_per_step: int = Field(8, ge=1)
    samples_per_prompt: int = Field(8, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    plan: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> Setting:
        if self.questions == "two-step" and self.split != "one-topic":
            raise ValueError("questions of two steps are split one topic a silo")
        if self.questions == "two-step" and self.silos != 4:
            raise ValueError("there are four topics of two steps: silos: 4")
        if self.split == "one-topic" and self.silos > 8:
            raise ValueError("there are eight topics: silos: 8 at most")
        return self


class Row(_Closed):
    """One method under the setting. plan: what it alone has of run.yaml."""

    method: str
    plan: dict[str, Any] = Field(default_factory=dict)


class Claim(_Closed):
    """One contrast, declared before it is run: `row` minus `against`, paired by seed.

    Attributes:
        direction: what is expected; `equivalent` asks for two one-sided tests within the margin.
        says: the claim in words.
    """

    row: Name
    against: Name
    metric: Metric = "pass_at_1"
    direction: Literal["above", "below", "equivalent"] = "above"
    says: str = ""


class Experiment(_Closed):
    """A file `EXPERIMENT.yaml`."""

    experiment: Name
    about: str = ""
    setting: Setting
    seeds: tuple[int, ...] = Field(min_length=1)
    rows: dict[Name, Row] = Field(min_length=1)
    claims: dict[str, Claim] = Field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One row with one seed."""

    row: str
    seed: int

    def __str__(self) -> str:
        return f"{self.row}/{self.seed}"


def cell_named(experiment: Experiment, name: str) -> Cell:
    """Return the cell `ROW/SEED`. Raises UsageError: the experiment has none of that name."""
    row, _, seed = name.rpartition("/")
    if re.fullmatch(r"[0-9]+", seed) and row in experiment.rows and int(seed) in experiment.seeds:
        return Cell(row, int(seed))
    raise UsageError(
        f"{experiment.experiment} has no cell {name!r}", hint="ROW/SEED, as `fedsilo experiment plan` lists"
    )


def cells_of(experiment: Experiment) -> Iterator[Cell]:
    """Yield the cells, seed by seed, so that the first results can be compared already."""
    for seed in experiment.seeds:
        for row in experiment.rows:
            yield Cell(row, seed)


def read_experiment(path: Path) -> Experiment:
    """Read a file. Raises UsageError with file and line: it is none, or a cell of it could not be carried out."""
    document = strict_yaml.load(read_regular(path), str(path))
    experiment = strict_yaml.validate(Experiment, document)
    for place, fault, hint in faults_of(experiment):
        raise UsageError(f"{path}:{document.line_of(place)}: {'.'.join(map(str, place))}: {fault}", hint=hint)
    return experiment


def faults_of(experiment: Experiment) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield (place in the file, what is wrong, hint) of what only the whole file shows."""
    if len(set(experiment.seeds)) != len(experiment.seeds):
        yield ("seeds",), "a seed is listed twice", "name each seed once"
    if fixed := sorted(_FIXED & experiment.setting.plan.keys()):
        yield ("setting", "plan"), f"{', '.join(fixed)} is not for the plan to say", "the setting and the rows name it"
    for name, row in experiment.rows.items():
        if row.method not in METHODS:
            yield ("rows", name), f"there is no method {row.method!r}", f"one of: {', '.join(sorted(METHODS))}"
        elif fixed := sorted(_FIXED & row.plan.keys()):
            yield ("rows", name), f"{', '.join(fixed)} is equal over all rows of a setting", "leave it out"
        elif fault := _plan_fault(experiment, Cell(name, experiment.seeds[0])):
            yield ("rows", name), fault, "the plan's keys are those of run.yaml: docs/reference/configuration.md"
    for name, claim in experiment.claims.items():
        if missing := sorted({claim.row, claim.against} - experiment.rows.keys()):
            yield ("claims", name), f"there is no row {', '.join(missing)}", f"one of: {', '.join(experiment.rows)}"
        elif claim.row == claim.against:
            yield ("claims", name), "a row is not compared with itself", "name another row as `against`"


_PINNED = ("base_model_sha256", "tokenizer_sha256", "template_sha256", "public_set_sha256", "held_out_sha256")
_NO_HASH = "0" * 64  # in place of hashes that are known once the sites are made


def _plan_fault(experiment: Experiment, cell: Cell) -> str:
    """Return why no plan can be made of a row's fields, as far as that can be told without its sites; or nothing."""
    setting = experiment.setting
    fields = plan_of(experiment, cell, {"max_prompt_tokens": 1, "max_new_tokens": 1})
    fixed = {
        "federation": "f",
        "silos": tuple(f"s{number}" for number in range(setting.silos)),
        "lora": {"rank": setting.rank, "alpha": setting.alpha, "schema_sha256": _NO_HASH},
        "public_set_rows": setting.public_rows,
        **dict.fromkeys(_PINNED, _NO_HASH),
    }
    try:
        require_exchange(Plan.model_validate({**fields, **fixed}))
    except UsageError as error:
        return error.message
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return ""


def digest_of(experiment: Experiment, cell: Cell) -> str:
    """Return the digest of everything in the file that this cell's result depends on: setting, row and seed."""
    fields = {"setting": experiment.setting, "row": experiment.rows[cell.row], "seed": cell.seed}
    plain = {
        name: each.model_dump(mode="json") if isinstance(each, BaseModel) else each for name, each in fields.items()
    }
    return sha256_hex(canonical_json(plain))


def ruleset_of(experiment: Experiment, cell: Cell) -> str:
    """Return the shipped ruleset under which the cell's sites are set up."""
    return method_named(experiment.rows[cell.row].method).ruleset


def plan_of(experiment: Experiment, cell: Cell, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of the cell's run.yaml. lengths: of prompts and answers, in tokens."""
    setting, row = experiment.setting, experiment.rows[cell.row]
    fields: dict[str, Any] = {
        "run": "run-1",
        "method": row.method,
        "rounds": setting.rounds,
        "local_steps": setting.local_steps,
        "swap_period": setting.swap_period,
        "prompts_per_step": setting.prompts_per_step,
        "samples_per_prompt": setting.samples_per_prompt,
        "seed": cell.seed,
        "objective": {"kl_coefficient": 0.0},
        "optimiser": {"learning_rate": setting.learning_rate},
        "rollout": {"temperature": 1.0, **lengths},
        "evaluation": {"prompts": setting.held_out_rows, "samples": setting.evaluation_samples},
    }
    return _merged(_merged(fields, setting.plan), row.plan)


def _merged(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with more of them; nested ones are merged by name."""
    merged = dict(fields)
    for name, value in more.items():
        before = merged.get(name)
        merged[name] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
