"""A coordinator's state folder read without its daemon: what came in from its audit log; runs, members and what was
sent from its SQLite database, opened read-only.

What the running daemon alone knows (who is connected, when each silo was last heard) is named as missing, and so is a
database that lies elsewhere. Does not verify anything: only the audit log carries signatures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from console.offline import FolderView, LogFacts, log_only
from coordinator import store as db
from coordinator.curve_view import curves_answer
from coordinator.record import run_record
from coordinator.round_view import round_answer, round_row, run_row
from coordinator.sent_view import SentView
from fedsilo.edge.audit_pages import LogPages
from fedsilo.edge.message_index import MessageIndex
from fedsilo.edge.message_view import MessageView
from fedsilo.edge.query_arguments import Asked
from fedsilo.edge.read_only import read_only_address
from fedsilo.edge.round_marks import RoundMarks, no_run_yet
from fedsilo.treaty.errors import NotFoundError, OperationError

DATABASE = "coordinator.db"  # below state_dir, unless the configuration names another
MISSING = (
    "who is connected, and when each silo was last heard: the running coordinator knows",
    "silos that never joined, and the site's name: in the configuration file",
    "which rule of the charter decided on a message: the charter is in a file of its own",
    "settings and certificates: the running coordinator answers them; its log lines are its events, kept in memory",
)


def read_coordinator(facts: LogFacts) -> FolderView:
    """What the folder around a coordinator's log holds.

    Raises:
        OperationError: the database cannot be read.
    """
    path = facts.directory.parent / DATABASE
    pages = LogPages(facts.directory)
    messages = MessageView(MessageIndex(pages, lambda: facts.size), pages, lambda: None, program="coordinator")
    alone = replace(log_only(facts), queries={"inbox": messages.inbox})
    if not path.is_file():
        elsewhere = "runs and members: there is no coordinator.db here; the configuration may name another database"
        return replace(alone, missing=(elsewhere, *MISSING))
    runs, silos = _runs(path), _silos(path)
    marks = RoundMarks(pages, lambda: facts.size, messages=False)
    return replace(
        alone,
        state={**alone.state, "runs": runs, "silos": silos},
        missing=MISSING,
        queries={
            **alone.queries,
            "outbox": SentView(lambda: _reading(path)).outbox,
            "runs": lambda _: _runs(path),
            "run": lambda arguments: _run(path, arguments),
            "silos": lambda _: _silos(path),
            "traffic": lambda arguments: _traffic(path, arguments),
            "round": lambda arguments: _round(path, marks, arguments),
            "curves": lambda arguments: _curves(path, arguments),
        },
    )


@contextmanager
def _reading(path: Path) -> Iterator[Session]:
    engine = create_engine(f"sqlite:///{read_only_address(path)}&uri=true")
    try:
        with Session(engine) as session:
            yield session
    except (SQLAlchemyError, ValueError) as error:
        what = str(getattr(error, "orig", "") or error).partition("\n")[0]
        hint = "is it a database of this version?"
        raise OperationError(f"cannot read {path}: {what}", hint=hint) from error
    finally:
        engine.dispose()


def _runs(path: Path) -> list[dict[str, Any]]:
    with _reading(path) as session:
        return [_summary(session, run) for run in session.scalars(select(db.Run).order_by(db.Run.ordinal))]


def _summary(session: Session, run: db.Run) -> dict[str, Any]:
    plan, request = json.loads(run.plan or "{}"), json.loads(run.request)
    rounds = select(db.Round.number).where(db.Round.run == run.name).order_by(db.Round.number.desc()).limit(1)
    return {
        "run": run.name, "state": run.state, "reason": run.reason, "silo_errors": db.errors_of(session, run.name),
        "method": plan.get("method") or request.get("method", ""), "round": session.scalar(rounds) or 0,
        "rounds": plan.get("rounds", request.get("rounds", 0)), "silos": plan.get("silos", []),
        "committed": db.rounds_committed(session, run.name),
        "submitted_at": run.submitted_at, "started_at": run.started_at, "ended_at": run.ended_at,
        "adapter_sha256": run.adapter_digest,
    }  # fmt: skip


def _run(path: Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    with _reading(path) as session:
        record = run_record(session, _named(session, arguments), charter_digest="")
        del record["versions"]  # of this console, which ran nothing
        return record


def _named(session: Session, arguments: Mapping[str, Any]) -> db.Run:
    name = arguments.get("run")
    run = session.get(db.Run, name) if isinstance(name, str) else None
    if run is None:
        raise NotFoundError("there is no such run in this folder")
    return run


def _silos(path: Path) -> list[dict[str, Any]]:
    with _reading(path) as session:
        return [
            {
                "silo": member.silo,
                # who is there now, a folder does not know
                "state": "not_heard_yet" if member.state == "joined" else member.state, "since": member.since,
                "last_seen": "", "age_seconds": None, "round": 0, "step": 0, "error": "",
                "hello": json.loads(member.hello),
                "refusal": json.loads(member.refusal) if member.refusal else None,
            }
            for member in session.scalars(select(db.Member).order_by(db.Member.silo))
        ]  # fmt: skip


def _round(path: Path, marks: RoundMarks, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the running coordinator alone knows: what is left of each deadline, and when a silo was heard."""
    asked = Asked(arguments, "run", "round")
    name, number = asked.text("run"), asked.number("round", least=1)
    with _reading(path) as session:
        run = run_row(session, name)
        if run is None:
            return no_run_yet("coordinator")
        row = round_row(session, run, number)
        of_round = marks.of(run.name, row.number) if row is not None else ()
        return round_answer(session, run, row, of_round, charter_digest="", live=None)


def _curves(path: Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    with _reading(path) as session:
        return curves_answer(session, arguments)


def _traffic(path: Path, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    with _reading(path) as session:
        return db.traffic_table(session, _named(session, arguments).name if "run" in arguments else None)
