"""How much of this site's case mix its first update shows to whoever reads it alone, as the coordinator does (N7).

What is played is a curious coordinator with nothing but what it holds: the base model, the public held-out questions
with their topics, and the update that this site sent in the first round. It puts the update onto the adapter that the
round began with, answers each question with and without it, and ranks the topics by what the update gained. What it
found is then held against the site's own private rows, which it never saw.

Nothing is sent, and nothing is trained. Does not show: what a better attacker finds (gradients, questions of its own,
several rounds), and whether one given record was trained on, which `benchmarks.exposure` measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsilo.audit.reader import read_records
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol.codec import decode_factors, sha256_hex
from fedsilo.protocol.errors import NotFoundError, OperationError, UsageError, VerificationError
from fedsilo.protocol.kinds import UPDATE_KINDS
from fedsilo.protocol.methods import method_named
from silo.config import SiloConfig
from silo.guard.adapters import AdapterStore
from silo.guard.ledger import FOLDER
from silo.guard.site import effective_policy, field_names, site_schema
from silo.report.alone import plan_alone, with_update
from silo.report.measure import Say, adapter_at_start, find_run, report_trainer

MAIN_TOPICS = 3
DEFINITION = (
    "topics are ranked by how many more answers are right with this site's first update than without it, on the public "
    "held-out questions; that is what a coordinator can do with single updates"
)


def report_case_mix(config: SiloConfig, *, run: str, samples: int, say: Say) -> dict[str, Any]:
    """Return what the first update of a run shows of the topics that this site trains on.

    Args:
        config: the site.
        run: name of a finished run; empty takes the latest.
        samples: answers to each public question at the rollout temperature, with and without the update.
        say: told one line of progress at a time.

    Returns:
        {"run", "method", "round", "update", "samples", "topics", "main_topics", "guessed", "found", "by_chance",
        "rank_correlation", "sentence", "definition"}.

    Raises:
        UsageError: the private or the held-out rows name fewer than two topics.
        NotFoundError: no such finished run here, no update left, or its bytes are no longer kept.
        ConflictError, NotAllowedError, OperationError: as `report_benefit`.
    """
    files = [read_tasks(path, field_names(config)) for path in config.data.private]
    rows = Counter(row.topic for file in files for row in file.rows)
    finished = find_run(config, run)
    method = method_named(finished.plan.method)
    if method.stays != "none":
        raise UsageError(
            f"under {method.name} an update is a part of what was trained, and alone it changes no answer",
            hint="what such updates give away of the topics is not measured",
            code="NO_COMMON_ADAPTER",
        )
    policy = effective_policy(config)
    schema = site_schema(config, policy)
    start = adapter_at_start(finished, schema, AdapterStore(config.state_dir / "adapters"))
    round_number, payload = _first_update(config, finished.plan.run)
    plan = plan_alone(finished.plan, config.silo, f"mix-{sha256_hex(payload)[:16]}")
    after = with_update(method, plan, round_number, start, decode_factors(payload))
    with report_trainer(config, policy, schema, say) as trainer:
        trainer.begin(plan, schema)
        say(f"without the update: answering the public held-out questions, {samples} samples each")
        without = trainer.measure(start, samples, "held_out")
        say("with the update: answering them again")
        having = trainer.measure(after, samples, "held_out")
    if having["topics"] != without["topics"]:
        raise OperationError("the trainer's verdicts are about different prompts", code="TRAINER_CONFUSED")
    found = compare(without["topics"], without["correct"], having["correct"], samples, rows)
    return {
        "run": finished.plan.run, "method": finished.plan.method, "round": round_number, "update": sha256_hex(payload),
        "samples": samples, **found, "definition": DEFINITION,
    }  # fmt: skip


def compare(
    topics: Sequence[str], before: Sequence[int], after: Sequence[int], samples: int, private_rows: Mapping[str, int]
) -> dict[str, Any]:
    """The topics by what the update gained on each, against what the site really has.

    Args:
        topics: of each public question.
        before: right answers to each without the update, of `samples`.
        after: the same with it.
        samples: answers to each.
        private_rows: the site's private rows by topic.

    Raises:
        UsageError: fewer than two topics that both sides name: then there is nothing to tell apart.
    """
    names = sorted(set(topics) - {""})
    if len(names) < 2 or not any(private_rows.get(name) for name in names):
        raise UsageError(
            f"the public held-out set names {len(names)} topics, and the private rows are of {len(private_rows)}",
            hint="a case mix can be read only where both name two topics or more; `topic` is a field of each row",
            code="NO_TOPICS",
        )
    gained = (np.asarray(after, float) - np.asarray(before, float)) / samples
    of = np.asarray(topics)
    total = sum(private_rows.get(name, 0) for name in names)
    table = [
        {
            "topic": name,
            "questions": int((of == name).sum()),
            "gain": round(float(gained[of == name].mean()), 4),
            "private_rows": private_rows.get(name, 0),
            "private_share": round(private_rows.get(name, 0) / total, 4),
        }
        for name in names
    ]
    table.sort(key=lambda row: (-float(str(row["gain"])), str(row["topic"])))
    most = min(MAIN_TOPICS, sum(private_rows.get(name, 0) > 0 for name in names), len(names) - 1)
    main = sorted(names, key=lambda name: (-private_rows.get(name, 0), name))[:most]
    guessed = [str(row["topic"]) for row in table[:most]]
    found = len({*main} & {*guessed})
    correlation = _rank_correlation(
        [float(str(row["gain"])) for row in table], [float(str(row["private_rows"])) for row in table]
    )
    by_chance = round(most * most / len(names), 2)
    return {
        "topics": table, "main_topics": main, "guessed": guessed, "found": found, "by_chance": by_chance,
        "rank_correlation": correlation,
        "sentence": f"Of the {most} topics that this site has most rows of ({', '.join(main)}), {found} are among the "
        f"{most} that this update gained most on; guessing finds {by_chance:g}.",
    }  # fmt: skip


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's, ties at their mean rank; None where all of one side are alike."""
    ranks = np.stack([_ranks(one), _ranks(other)])
    if np.any(np.ptp(ranks, axis=1) == 0):
        return None
    return round(float(np.corrcoef(ranks)[0, 1]), 4)


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    given = np.asarray(values)
    return np.array([(given < value).sum() + ((given == value).sum() + 1) / 2 for value in given])


def _first_update(config: SiloConfig, run: str) -> tuple[int, bytes]:
    """Round and bytes of the first update of a run that left. Raises NotFoundError, VerificationError."""
    for record in read_records(config.state_dir / "audit"):
        if record["event"] == "egress.sent" and record.get("run") == run and record.get("kind") in UPDATE_KINDS:
            digest = str(record["payload"]["sha256"])
            path = config.state_dir / FOLDER / digest
            if not path.is_file():
                raise NotFoundError(
                    f"the update of round {record['round']} of run {run} left, and its bytes are kept here no longer",
                    hint="the policy's `retention.payload_days` says how long; report on a later run",
                    code="PAYLOAD_GONE",
                )
            payload = path.read_bytes()
            if sha256_hex(payload) != digest:
                raise VerificationError(f"{path} is not what was sent")
            return int(record["round"]), payload
    raise NotFoundError(f"no update of run {run} has left this silo")
