"""The coordinator's figures by round: what silos released in `metrics.eval`, the norm of each update, and the gap
between silos.

pass@1 comes with the number of prompts behind it and a 95 % Wilson interval. How many held-out prompts a silo really
answered stays with the silos; the plan says how many at most, so `n_exact` is false here and the interval is the
narrowest it can be. Several answers to one prompt are no further draws.

Does not show: reward, KL or any other figure of a trainer (it never leaves its site), and the cosine between updates,
which nobody computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import store as db
from coordinator.answers.rounds import run_row
from coordinator.driver import Driver
from fedsilo.control.answers import BaselineRow, CurvePoint, Curves, CurveSeries, filled
from fedsilo.control.figures import unit_of
from fedsilo.control.server import QueryArguments
from fedsilo.protocol.intervals import interval_of
from fedsilo.protocol.plan import Plan, plan_from_canonical

PASS_RATES = ("pass_at_1", "pass_at_1_greedy")
POINTS_MAX = 1_000  # of one series, the newest
NOT_RECORDED = (
    "cosine between updates: nobody computes it",
    "reward, KL, tokens: figures of a trainer stay at its site",
    "the number of held-out prompts a silo answered: the plan's number is the most it can be",
)


class CurveView:
    """The query `curves` of a running coordinator."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def curves(self, arguments: Mapping[str, Any]) -> Curves:
        """Return series of figures by round; `names` are commas apart. Raises UsageError, NotFoundError."""
        with self._driver.parts.store.transaction() as session:
            return curves_answer(session, arguments)


def curves_answer(session: Session, arguments: Mapping[str, Any]) -> Curves:
    """Return what the query `curves` answers. Raises UsageError: an argument; NotFoundError: no such run."""
    asked = QueryArguments(arguments, "run", "names", "x")
    x = asked.text("x", among=("round", "step")) or "round"
    names = frozenset(name.strip() for name in asked.text("names").split(",") if name.strip())
    run = run_row(session, asked.text("run"))
    plan = plan_from_canonical(run.plan) if run is not None and run.plan else None
    steps = plan.local_steps if plan and x == "step" else 1
    found = {(name, silo): points for name, silo, points in _series(session, run, plan)} if run else {}
    known = sorted({name for name, _ in found})
    series = tuple(
        CurveSeries(
            name=name,
            silo=silo,
            unit=unit_of(name),
            source="computed" if name == "gap" else "released",
            points=tuple(replace(point, x=point.round * steps) for point in points[-POINTS_MAX:]),
        )
        for (name, silo), points in found.items()
        if not names or name in names
    )
    return Curves(
        party="coordinator",
        run=run.name if run else "",
        run_state=run.state if run else "",
        runs=tuple(session.scalars(select(db.Run.name).order_by(db.Run.ordinal.desc()).limit(100))),
        x=x,
        x_max=(plan.rounds if plan else 0) * steps,
        names=tuple(known),
        series=series,
        baseline=_baseline(found, names),
        not_recorded=NOT_RECORDED,
    )


def _series(session: Session, run: db.Run, plan: Plan | None) -> Iterator[tuple[str, str, list[CurvePoint]]]:
    count = plan.evaluation.prompts if plan else 0
    rates: dict[tuple[str, str], dict[int, float]] = {}
    query = select(db.Figure).where(db.Figure.run == run.name, db.Figure.name.like("metric.%")).order_by(db.Figure.id)
    for figure in session.scalars(query):
        fields = json.loads(figure.fields)
        if not fields["topic"]:
            name = figure.name.removeprefix("metric.")
            rates.setdefault((name, figure.silo), {})[figure.round] = float(fields["value"])
    for (name, silo), by_round in sorted(rates.items()):
        interval = name in PASS_RATES and count > 0
        yield name, silo, [
            _point(number, value, count if interval else None) for number, value in sorted(by_round.items())
        ]  # fmt: skip
    gaps = _gaps({silo: by_round for (name, silo), by_round in rates.items() if name == "pass_at_1"})
    if gaps:
        yield "gap", "", gaps
    norms: dict[str, dict[int, float]] = {}
    uploads = select(db.Upload).where(db.Upload.run == run.name, db.Upload.norm > 0).order_by(db.Upload.round)
    for upload in session.scalars(uploads):
        norms.setdefault(upload.silo, {})[upload.round] = upload.norm
    for silo, by_round in sorted(norms.items()):
        yield "update_norm", silo, [_point(number, value, None) for number, value in by_round.items()]


def _point(number: int, value: float, count: int | None, silos: int | None = None) -> CurvePoint:
    """Return a round's value; `n_exact` is None where no number belongs to the figure."""
    low, high = interval_of(value, count)
    return filled(
        CurvePoint, round=number, value=value, n=count, n_exact=None if count is None else False, low=low, high=high,
        silos=silos, absent=frozenset({"at"}),
    )  # fmt: skip


def _gaps(rates: Mapping[str, Mapping[int, float]]) -> list[CurvePoint]:
    """Best silo less worst one, of rounds that at least two silos evaluated; how many they were stands beside it."""
    points = []
    for number in sorted({number for by_round in rates.values() for number in by_round}):
        values = [by_round[number] for by_round in rates.values() if number in by_round]
        if len(values) > 1:
            points.append(_point(number, round(max(values) - min(values), 6), None, len(values)))
    return points


def _baseline(
    found: Mapping[tuple[str, str], list[CurvePoint]], names: frozenset[str]
) -> tuple[BaselineRow, ...]:  # fmt: skip
    """Return what silos measured before the first round, on the model that the run began with."""
    return tuple(
        BaselineRow(name=name, silo=silo, value=point.value)
        for (name, silo), points in found.items()
        for point in points[:1]
        if name in PASS_RATES and point.round == 0 and (not names or name in names)
    )
