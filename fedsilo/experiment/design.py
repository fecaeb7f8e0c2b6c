"""The design of an experiment: the file that states it, and the cells that follow from it.

What must be equal over the rows of a seed is a function of (setting, seed) alone: the split, the base model, the
public and held-out prompts, the site secrets that key private draws, and the plan but for what a row names. So a
difference between two rows of one seed is the rows'.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fedsilo.demo import digit_tasks
from fedsilo.files.durable import read_regular
from fedsilo.files.model_folder import read_fingerprints
from fedsilo.grading.own_verifiers import OwnPartsVerifier
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.protocol.methods import METHODS, method_named, require_exchange, require_solutions
from fedsilo.protocol.plan import Plan
from policies.render import RULESETS

Metric = Literal[
    "pass_at_1",
    "pass_at_1_greedy",
    "worst_topic",
    "worst_silo",
    "own_task",
    "best_pass_at_1",
    "zero_variance_share",
    "drift_between",
    "gain_per_megabyte",
]
IN_POINTS = frozenset(get_args(Metric)) - {"drift_between", "gain_per_megabyte"}  # the others are shares
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,40}$")]
BASE = "base"  # in place of a method: the base model, which every cell of its seed measures first
# Keys of a row's plan that would undo what is equal over rows.
_FIXED = frozenset({"run", "method", "seed", "rounds", "local_steps", "evaluation", "lora", "silos"})


def _seeds(value: object) -> object:
    """Read `101-108` as the seeds from 101 to 108."""
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", value)):
        first, last = map(int, match.groups())
        if not 0 <= last - first < 1000:
            raise ValueError(f"{value} are no seeds: write the lower one first, at most a thousand")
        return list(range(first, last + 1))
    return value


Seeds = Annotated[tuple[int, ...], BeforeValidator(_seeds)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Base(_Closed):
    """The base model: share of right answers among those it is built on, and steps of building."""

    right_share: float = Field(0.4, ge=0, le=1)
    steps: int = Field(300, ge=1)


class Data(_Closed):
    """Questions of files, which are dealt into private, public, held-out and tuning rows.

    Attributes:
        files: of tasks; relative ones are looked for beside the experiment.
        verifier: of their answers.
        max_prompt_tokens, max_new_tokens: a longer prompt is left out, an answer is cut.
    """

    files: tuple[str, ...] = Field(min_length=1)
    verifier: OwnPartsVerifier
    max_prompt_tokens: int = Field(960, ge=1)
    max_new_tokens: int = Field(16, ge=1)


class Model(_Closed):
    """A base model's folder in place of the tiny one; a relative path is looked for beside the experiment."""

    path: str
    load: Literal["fp32", "bf16"] = "fp32"


class DataAsRead(Data):
    """Data whose files' paths are absolute. written: as the file names them. sha256: of each one's content, empty where
    it is missing."""

    written: tuple[str, ...]
    sha256: tuple[str, ...]


class ModelAsRead(Model):
    """A model whose path is absolute. written: as the file names it. sha256: of weights, tokenizer and template, empty
    where it is missing."""

    written: str
    sha256: str


class Setting(_Closed):
    """The part of an experiment that all rows share. In the file, `from: OTHER` takes the fields that are not named
    from another setting.

    Attributes:
        questions: of digits, of one step, such as `u5271=`, or of several, such as `ua5271=`, whose key lacks the work;
            or of files.
        split: `one-topic`: each silo owns one topic; `dirichlet`: silos of one size, each with a mixture of its own;
            `per-class`: each class is shared out over silos, whose sizes differ.
        concentration: of either Dirichlet split; the smaller, the fewer classes a silo has.
        along: what classes are: topics, or quarters of the pool by how often the base model is right.
        tuning_rows: held-out rows on which knobs and the best checkpoint are chosen; 0: none are, and held-out rows are
            of any string that is held out. With a value they are of strings that tuning never reads.
        tuned_as: the setting whose frozen knobs this one takes; its own where none is named.
        plan: further fields of run.yaml.
    """

    questions: Literal[digit_tasks.Questions, "files"] = "one-step"
    split: Literal["one-topic", "dirichlet", "per-class"] = "one-topic"
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
    concentration: float = Field(0.1, gt=0)
    along: Literal["topic", "success_rate"] = "topic"
    tuning_rows: int = Field(0, ge=0)
    tuned_as: Name | None = None
    data: Data | None = None
    model: Model | None = None

    @model_validator(mode="after")
    def _fits(self) -> Setting:
        if (self.questions == "files") != (self.data is not None):
            raise ValueError("questions: files, and data, belong together")
        if self.split == "one-topic" and self.along != "topic":
            raise ValueError("one topic a silo is a split along topics")
        if self.questions == "files" or self.split != "one-topic":
            return self
        topics = len(digit_tasks.topics_of(self.questions))
        if self.questions != "one-step" and self.silos != topics:
            raise ValueError(f"there are {topics} topics of {self.questions} questions: silos: {topics}")
        if self.silos > topics:
            raise ValueError(f"there are {topics} topics: silos: {topics} at most")
        return self


class Row(_Closed):
    """One method under a setting.

    Attributes:
        method: or `base`: the base model as it is.
        plan: what this row alone has of run.yaml.
        ruleset: the shipped one under which its sites are set up, which also says what of an adapter is trained; the
            method's own where none is named.
        pooled: one silo holds the private rows of all, and takes as many prompts a step as they would together; no
            federation does that.
    """

    method: str
    plan: dict[str, Any] = Field(default_factory=dict)
    ruleset: str = ""
    pooled: bool = False


class Claim(_Closed):
    """One contrast, declared before it is run: `row` minus `against`, paired by seed.

    Attributes:
        setting: one; or several, whose value is the slope of the difference on log2 of the local steps.
        direction: what is expected; `either`: a difference; `equivalent`: two one-sided tests within the margin.
        seeds: the file's where none are named.
        family: claims of one family are judged together, by Holm's method.
        exploratory: shown without a verdict, and counted in no family.
        share_of: a row; what is shown is the part of its lead over `against` that `row` has, without a verdict.
        says: the claim in words.
    """

    setting: Name | tuple[Name, ...]
    row: Name
    against: Name
    metric: Metric = "pass_at_1"
    direction: Literal["above", "below", "either", "equivalent"] = "above"
    seeds: Seeds = ()
    family: str = ""
    exploratory: bool = False
    share_of: Name | None = None
    says: str = ""

    @model_validator(mode="after")
    def _can_be_judged(self) -> Claim:
        if self.direction == "equivalent" and self.metric not in IN_POINTS:
            raise ValueError(f"the margin of equivalence is in points, which {self.metric} is not")
        if self.share_of is not None and not self.exploratory:
            raise ValueError("a share has no verdict: exploratory: true")
        return self

    @property
    def settings(self) -> tuple[str, ...]:
        return (self.setting,) if isinstance(self.setting, str) else self.setting

    @property
    def rows(self) -> tuple[str, ...]:
        return (self.row, self.against, *([self.share_of] if self.share_of is not None else []))


class Table(_Closed):
    """Rows that are shown side by side. rows, seeds: all those of the file where none are named. figures: that a report
    draws of them."""

    setting: Name
    rows: tuple[Name, ...] = ()
    seeds: Seeds = ()
    figures: tuple[str, ...] = ("pass_at_1",)
    says: str = ""


class Family(_Closed):
    """Rows that share what is chosen for them.

    Attributes:
        trial: the row whose trials decide; the first where none is named.
        knob: key of run.yaml, as a path.
        grid: which of the grids has its values; that of the knob's name where none is named.
        after: another family, whose frozen knobs this one takes before its own is tried.
    """

    rows: tuple[Name, ...] = Field(min_length=1)
    trial: Name | None = None
    knob: str = "optimiser.learning_rate"
    grid: str = ""
    after: Name | None = None

    @property
    def values(self) -> str:
        """Name of its grid."""
        return self.grid or self.knob

    @property
    def tried(self) -> str:
        """The row whose trials decide."""
        return self.trial or self.rows[0]


class Tuning(_Closed):
    """How knobs are chosen before any claim's cell runs.

    Attributes:
        seeds: of trials; no claim and no table has one of them.
        grids: values by the name of a knob, or by a name that families give; ascending, equally many in each.
        widenings: how often grids grow where an optimum is at an edge.
    """

    seeds: Annotated[Seeds, Field(min_length=1)]
    grids: dict[str, tuple[Annotated[float, Field(gt=0)], ...]]
    families: dict[Name, Family] = Field(min_length=1)
    widenings: int = Field(2, ge=0)


class Experiment(_Closed):
    """A file `EXPERIMENT.yaml`.

    Attributes:
        claims: run in this order, those that are exploratory after the others.
        tables: run after the claims; where none is named, there is one of all rows for each setting.
        seconds_per_step, seconds_per_round: what a step of each method takes, and what is measured after each round,
            until cells have been measured.
    """

    experiment: Name
    about: str = ""
    settings: dict[Name, Setting] = Field(min_length=1)
    seeds: Annotated[Seeds, Field(min_length=1)]
    rows: dict[Name, Row] = Field(min_length=1)
    claims: dict[Name, Claim] = Field(default_factory=dict)
    tables: dict[Name, Table] = Field(default_factory=dict)
    tuning: Tuning | None = None
    seconds_per_step: dict[str, float] = Field(default_factory=dict)
    seconds_per_round: float = Field(2.0, ge=0)

    def all_tables(self) -> dict[str, Table]:
        return self.tables or {name: Table(setting=name) for name in self.settings}

    def rows_of(self, table: Table) -> tuple[str, ...]:
        return table.rows or tuple(self.rows)


Knobs = tuple[tuple[str, float], ...]  # keys of run.yaml, as paths, with their values


@dataclass(frozen=True)
class Cell:
    """One row under one setting with one seed.

    Attributes:
        knobs: what was chosen for it, or what a trial tries.
        trial: it is measured on the tuning strings, to choose knobs.
    """

    setting: str
    row: str
    seed: int
    knobs: Knobs = ()
    trial: bool = False

    def __str__(self) -> str:
        name = f"{self.setting}/{self.row}/{self.seed}"
        return f"{name} with {self.knobs[-1][0]} {self.knobs[-1][1]:g}" if self.trial else name


def cell_named(experiment: Experiment, name: str) -> Cell:
    """Return the cell `SETTING/ROW/SEED`. Raises UsageError: the experiment has none of that name."""
    for cell in cells_of(experiment):
        if str(cell) == name:
            return cell
    raise UsageError(
        f"{experiment.experiment} has no cell {name!r}", hint="SETTING/ROW/SEED, as `fedsilo experiment plan` lists"
    )


def cells_of(experiment: Experiment, claim: str = "") -> Iterator[Cell]:
    """Yield each cell once: those of claims first, seed by seed, so that the first results can be compared already.

    Args:
        experiment: the file.
        claim: the name of one, whose cells alone are yielded.

    Raises:
        UsageError: there is no such claim.
    """
    if claim and claim not in experiment.claims:
        raise UsageError(
            f"{experiment.experiment} has no claim {claim!r}", hint=f"one of: {', '.join(experiment.claims)}"
        )
    seen: set[Cell] = set()
    for cell in _with_repetitions(experiment, claim):
        if cell not in seen and experiment.rows[cell.row].method != BASE:
            seen.add(cell)
            yield cell


def _with_repetitions(experiment: Experiment, claim: str) -> Iterator[Cell]:
    claims = [each for name, each in experiment.claims.items() if claim in ("", name)]
    for each in sorted(claims, key=lambda each: each.exploratory):
        for seed in each.seeds or experiment.seeds:
            yield from (Cell(setting, row, seed) for setting in each.settings for row in each.rows)
    if not claim:
        for table in experiment.all_tables().values():
            for seed in table.seeds or experiment.seeds:
                yield from (Cell(table.setting, row, seed) for row in experiment.rows_of(table))


# ---- reading a file ----------------------------------------------------------------------------------------------


def read_experiment(path: Path) -> Experiment:
    """Read a file. Raises UsageError with file and line: it is none, or a cell of it could not be carried out."""
    return _read(path)[0]


def require_files(path: Path) -> None:
    """Raise NotFoundError with file and line: data or a model that a setting names is not there."""
    experiment, document = _read(path)
    for name, setting in experiment.settings.items():
        named = [("data", each) for each in (setting.data.files if setting.data else ())]
        named += [("model", setting.model.path)] if setting.model else []
        for key, text in named:
            if not Path(text).exists():
                raise NotFoundError(
                    f"{path}:{document.line_of(('settings', name, key))}: settings.{name}.{key}: {text} is missing",
                    hint="put it there, or name where it is; no cell is left out for it",
                )


def _read(path: Path) -> tuple[Experiment, strict_yaml.Document]:
    document = strict_yaml.load(read_regular(path), str(path))
    experiment = strict_yaml.validate(Experiment, replace(document, value=_inherited(document)))
    for place, fault, hint in faults_of(experiment):
        raise UsageError(f"{path}:{document.line_of(place)}: {'.'.join(map(str, place))}: {fault}", hint=hint)
    settings = {name: _beside(setting, path.absolute().parent) for name, setting in experiment.settings.items()}
    return experiment.model_copy(update={"settings": settings}), document


def _beside(setting: Setting, folder: Path) -> Setting:
    """Return the setting with its paths taken from the experiment's folder, and with what is there."""
    data, model = setting.data, setting.model
    if data is not None:
        paths = [folder / Path(name).expanduser() for name in data.files]
        data = DataAsRead(
            **{**data.model_dump(), "files": tuple(map(str, paths))},
            written=data.files,
            sha256=tuple(_sha256_of_file(path, _stamp(path)) if path.is_file() else "" for path in paths),
        )
    if model is not None:
        path = folder / Path(model.path).expanduser()
        stamps = tuple(map(_stamp, sorted(path.iterdir()))) if path.is_dir() else ()
        model = ModelAsRead(
            path=str(path),
            load=model.load,
            written=model.path,
            sha256=_sha256_of_model(path, stamps) if stamps else "",
        )
    return setting.model_copy(update={"data": data, "model": model})


_Stamp = tuple[str, int, int]


def _stamp(path: Path) -> _Stamp:
    """Return what changes with a file's content: what is hashed once is not hashed again while it is the same."""
    status = path.stat()
    return path.name, status.st_size, status.st_mtime_ns


@cache
def _sha256_of_file(path: Path, _: _Stamp) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _sha256_of_model(folder: Path, _: tuple[_Stamp, ...]) -> str:
    return sha256_hex(canonical_json(asdict(read_fingerprints(folder))))


def _inherited(document: strict_yaml.Document) -> Any:
    """Return the file's value with the fields that settings take from others. Raises UsageError: there is no such
    setting, or one takes its own."""
    whole = document.value
    settings = whole.get("settings") if isinstance(whole, dict) else None
    if not isinstance(settings, dict):
        return whole

    def fields(name: str, heirs: tuple[str, ...]) -> Any:
        own = settings[name]
        if not isinstance(own, dict) or "from" not in own:
            return own
        origin = own["from"]
        if origin not in settings or origin in heirs:
            place = document.place(("settings", name, "from"))
            fault = "takes its own fields" if origin in heirs else f"there is no setting {origin!r}"
            raise UsageError(f"{place}: settings.{name}: {fault}", hint="name another setting of this file")
        inherited = fields(origin, (*heirs, origin))
        own = {key: value for key, value in own.items() if key != "from"}
        return _merged(inherited, own) if isinstance(inherited, dict) else inherited

    return {**whole, "settings": {name: fields(name, (name,)) for name in settings}}


Fault = tuple[tuple[str, ...], str, str]  # place in the file, what is wrong, hint


def faults_of(experiment: Experiment) -> Iterator[Fault]:
    """Yield what only the whole file shows."""
    for place, seeds in _seeds_of(experiment):
        if len(set(seeds)) != len(seeds):
            yield (*place, "seeds"), "a seed is listed twice", "name each seed once"
    for name, setting in experiment.settings.items():
        if fixed := sorted(_FIXED & setting.plan.keys()):
            yield (
                ("settings", name, "plan"),
                f"{', '.join(fixed)} is not for the plan to say",
                "the setting and the rows name it",
            )
    for name, row in experiment.rows.items():
        if row.method not in METHODS and row.method != BASE:
            yield (
                ("rows", name),
                f"there is no method {row.method!r}",
                f"{BASE}, or one of: {', '.join(sorted(METHODS))}",
            )
        elif row.ruleset and row.ruleset not in RULESETS:
            yield ("rows", name), f"there is no ruleset {row.ruleset!r}", f"one of: {', '.join(RULESETS)}"
        elif fixed := sorted(_FIXED & row.plan.keys()):
            yield ("rows", name), f"{', '.join(fixed)} is equal over all rows of a setting", "leave it out"
    for name, claim in experiment.claims.items():
        yield from _unknown(experiment, ("claims", name), claim.settings, claim.rows)
        if claim.row == claim.against:
            yield ("claims", name), "a row is not compared with itself", "name another row as `against`"
        if len({experiment.settings[each].local_steps for each in claim.settings if each in experiment.settings}) != (
            len(claim.settings)
        ):
            yield (
                ("claims", name),
                "a slope is over settings whose local_steps differ",
                "name one setting, or others",
            )
    for name, table in experiment.tables.items():
        yield from _unknown(experiment, ("tables", name), (table.setting,), table.rows)
    yield from _tuning_faults(experiment)
    yield from _plan_faults(experiment)


def _tuning_faults(experiment: Experiment) -> Iterator[Fault]:
    for name, setting in experiment.settings.items():
        if setting.tuned_as is not None and setting.tuned_as not in experiment.settings:
            place = ("settings", name, "tuned_as")
            yield place, f"there is no setting {setting.tuned_as}", f"one of: {', '.join(experiment.settings)}"
        elif experiment.tuning is not None and not setting.tuning_rows:
            yield ("settings", name), "there is nothing to tune on", "tuning_rows: 128"
    tuning = experiment.tuning
    if tuning is None:
        return
    if both := sorted({seed for _, seeds in _seeds_of(experiment) for seed in seeds} & set(tuning.seeds)):
        yield ("tuning", "seeds"), f"{both[0]} is also a seed that is evaluated", "tune on other seeds"
    sizes = {len(values) for values in tuning.grids.values()}
    if len(sizes) != 1 or min(sizes) < 2:
        yield ("tuning", "grids"), "every knob has as many values, two at least", "add or leave out values"
    for knob, values in tuning.grids.items():
        if list(values) != sorted(set(values)):
            yield ("tuning", "grids", knob), "the values are not in ascending order", "sort them"
    above: dict[str, Family] = {}
    for name, family in tuning.families.items():
        place = ("tuning", "families", name)
        yield from _unknown(experiment, place, (), (*family.rows, *([family.trial] if family.trial else [])))
        if family.values not in tuning.grids:
            yield place, f"there is no grid of {family.values}", f"one of: {', '.join(tuning.grids)}"
        if family.after is not None and family.after not in above:
            yield place, f"there is no family {family.after} above it", "name a family above this one"
        if twice := sorted({row for each in above.values() for row in each.rows} & set(family.rows)):
            yield place, f"{twice[0]} is of another family already", "a row is of one family"
        above[name] = family


def _seeds_of(experiment: Experiment) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    yield (), experiment.seeds
    yield from ((("claims", name), claim.seeds) for name, claim in experiment.claims.items())
    yield from ((("tables", name), table.seeds) for name, table in experiment.tables.items())


def _unknown(
    experiment: Experiment, place: tuple[str, ...], settings: tuple[str, ...], rows: tuple[str, ...]
) -> Iterator[Fault]:
    for what, named, known in (("setting", settings, experiment.settings), ("row", rows, experiment.rows)):
        if missing := [name for name in dict.fromkeys(named) if name not in known]:
            yield place, f"there is no {what} {', '.join(missing)}", f"one of: {', '.join(known)}"


def _plan_faults(experiment: Experiment) -> Iterator[Fault]:
    """Yield why no plan can be made of a row under a setting that it has cells in."""
    for cell in {(cell.setting, cell.row): cell for cell in cells_of(experiment)}.values():
        if fault := _plan_fault(experiment, cell):
            hint = "the plan's keys are those of run.yaml: docs/reference/configuration.md"
            yield ("rows", cell.row), f"under {cell.setting}: {fault}", hint


_PINNED = ("base_model_sha256", "tokenizer_sha256", "template_sha256", "public_set_sha256", "held_out_sha256")
_NO_HASH = "0" * 64  # in place of hashes that are known once the sites are made


def _plan_fault(experiment: Experiment, cell: Cell) -> str:
    """Return why no plan can be made of a row's fields, as far as that is known without its sites; or nothing."""
    setting = experiment.settings[cell.setting]
    fields = plan_of(experiment, cell, {"max_prompt_tokens": 1, "max_new_tokens": 1})
    fixed = {
        "federation": "f",
        "silos": tuple(f"s{number}" for number in range(1 if experiment.rows[cell.row].pooled else setting.silos)),
        "lora": {"rank": setting.rank, "alpha": setting.alpha, "schema_sha256": _NO_HASH},
        "public_set_rows": setting.public_rows,
        **dict.fromkeys(_PINNED, _NO_HASH),
    }
    try:
        plan = Plan.model_validate({**fields, **fixed})
        require_exchange(plan)
        require_solutions(plan, "a question of one step" if setting.questions == "one-step" else "")
    except UsageError as error:
        return error.message
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return ""


# ---- what a cell is made of --------------------------------------------------------------------------------------


# Fields that are newer than some results: one that has its default is not in the digest.
_LATER = ("concentration", "along", "tuning_rows", "data", "model", "pooled", "ruleset")


def plain(block: Setting | Row) -> dict[str, Any]:
    """Return what of a block is in digests: of data and models the paths as they are written, and what is there. Whose
    knobs a setting takes is no part of it."""
    fields = block.model_dump(mode="json", exclude={"tuned_as"})
    if isinstance(block, Setting) and isinstance(block.data, DataAsRead):
        fields["data"] |= {"files": list(block.data.written), "sha256": list(block.data.sha256)}
    if isinstance(block, Setting) and isinstance(block.model, ModelAsRead):
        fields["model"] |= {"path": block.model.written, "sha256": block.model.sha256}
    defaults = {name: field.default for name, field in type(block).model_fields.items()}
    return {name: value for name, value in fields.items() if name not in _LATER or value != defaults[name]}


def digest_of(experiment: Experiment, cell: Cell) -> str:
    """Return the digest of everything that this cell's result depends on: setting, row, seed, and what was chosen."""
    fields: dict[str, Any] = {
        "setting": plain(experiment.settings[cell.setting]),
        "row": plain(experiment.rows[cell.row]),
        "seed": cell.seed,
    }
    if cell.knobs:
        fields["knobs"] = dict(cell.knobs)
    if cell.trial:
        fields["trial"] = True
    return sha256_hex(canonical_json(fields))


def ruleset_of(experiment: Experiment, cell: Cell) -> str:
    """Return the shipped ruleset under which the cell's sites are set up."""
    row = experiment.rows[cell.row]
    return row.ruleset or method_named(row.method).ruleset


def plan_of(experiment: Experiment, cell: Cell, lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of the cell's run.yaml. lengths: of prompts and answers, in tokens."""
    setting, row = experiment.settings[cell.setting], experiment.rows[cell.row]
    fields: dict[str, Any] = {
        "run": "run-1",
        "method": row.method,
        "rounds": setting.rounds,
        "local_steps": setting.local_steps,
        "swap_period": setting.swap_period,
        "prompts_per_step": setting.prompts_per_step * (setting.silos if row.pooled else 1),
        "samples_per_prompt": setting.samples_per_prompt,
        "seed": cell.seed,
        "objective": {"kl_coefficient": 0.0},
        "optimiser": {"learning_rate": setting.learning_rate},
        "rollout": {"temperature": 1.0, **lengths},
        "evaluation": {
            "prompts": setting.tuning_rows if cell.trial else setting.held_out_rows,
            "samples": setting.evaluation_samples,
        },
    }
    fields = _merged(_merged(fields, setting.plan), row.plan)
    for path, value in cell.knobs:
        fields = _merged(fields, _nested(path.split("."), value))
    return fields


def _nested(path: list[str], value: float) -> dict[str, Any]:
    return {path[0]: _nested(path[1:], value) if path[1:] else value}


def _merged(fields: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with more of them; nested ones are merged by name."""
    merged = dict(fields)
    for name, value in more.items():
        before = merged.get(name)
        merged[name] = _merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
