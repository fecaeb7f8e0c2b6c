"""Thirty held releases to find the bad ones in: `python -m benchmarks.releases --out DIR [--seed N]`.

Ten are planted bad and twenty are good. Each is made by a silo's real gate, policy, screens and guard, after rounds of
its own that people approved, and is written as it would stand before an operator:

    DIR/releases.fedrec     all of them, each for two minutes: fedconsole --replay DIR/releases.fedrec
    DIR/01.fedrec ...       one each; the run's name carries the number
    DIR/truth.json          which are bad, and why: for the scorer, not for the operator

`python -m benchmarks.releases --out DIR --score ANSWERS.jsonl` reads one JSON object a line

    {"number": 7, "answer": "approve" | "reject", "seconds": 31.5}

and says how many bad ones were rejected (at least 8 of 10), how many good ones were (at most 1), and the median of
seconds for a decision (under 60). A release without an answer was neither caught nor refused, and fails the set.

Names, values and texts follow the seed; certificates and the salts of the audit logs do not.
What it does not show: that an operator catches what is not planted here.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.release_cases import Case, cases, site
from benchmarks.release_site import HELD_SECONDS, DeskSource, Site
from console.recording import RecordingFile
from fedsilo.protocol.errors import FedSiloError, NotFoundError, OperationError, UsageError
from silo.guard.ledger import Release

SEED = 5
STRETCH_SECONDS = 120.0  # of each release in the recording of all
PAGE = {"limit": 100}
QUESTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((name, {}) for name in ("approvals", "outbox", "inbox", "ledger", "limits", "audit.status", "halts")),
    *((name, PAGE) for name in ("approvals", "outbox", "inbox", "audit")),
)
ANSWER = '{"number": 7, "answer": "approve" or "reject", "seconds": 31.5}'
CAUGHT_MIN, REFUSED_GOOD_MAX, MEDIAN_SECONDS_MAX = 8, 1, 60.0


class Tape:
    """The clock of a recording, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def write_set(out: Path, seed: int) -> dict[str, Any]:
    """Make the releases, record them in `out`, and return the truth.

    Raises:
        ConflictError: a recording is there already.
    """
    out.mkdir(parents=True, exist_ok=True)
    order = cases()
    random.Random(seed).shuffle(order)  # noqa: S311 - a fixed set
    tape, rows = Tape(), []
    with closing(RecordingFile(out / "releases.fedrec", include_local=True, clock=tape)) as everything:
        for number, case in enumerate(order, 1):
            tape.seconds = (number - 1) * STRETCH_SECONDS
            with closing(RecordingFile(out / f"{number:02}.fedrec", include_local=True, clock=tape)) as alone:
                rows.append(_recorded(case, number, seed, (everything, alone), tape))
                tape.seconds = number * STRETCH_SECONDS - 1.0
    truth = {"seed": seed, "stretch_seconds": STRETCH_SECONDS, "releases": rows}
    (out / "truth.json").write_text(json.dumps(truth, indent=1) + "\n")
    return truth


def _recorded(case: Case, number: int, seed: int, files: Sequence[RecordingFile], tape: Tape) -> dict[str, Any]:
    """Make one release, write what a console would read into each file, and return the truth of it."""
    with (
        tempfile.TemporaryDirectory(prefix=".making-", dir=files[0].path.parent) as folder,
        closing(site(Path(folder), f"release-{number:02}", seed * 1000 + number)) as silo,
    ):
        release = case.make(silo)
        silo.wait(HELD_SECONDS)
        silo.show()
        source = DeskSource(silo.desk)
        for file in files:
            file.snapshot(source.snapshot())
        tape.seconds += 1.0  # what happened before comes in while somebody looks, so the console lists it
        for event in source.watch():
            for file in files:
                file.event(event)
        for name, arguments in _questions(silo, release):
            try:
                answer = source.query(name, arguments)
            except NotFoundError:
                continue  # this version's guard does not answer it
            for file in files:
                file.answer(name, arguments, answer)
        for file in files:
            if file.trouble:
                raise OperationError(file.trouble)
        return {
            "number": number, "name": case.name, "bad": case.bad, "what": case.what, "release": release.id,
            "run": release.run, "kind": release.kind, "digest": release.digest,
            "far_end_until": f"{silo.far_end_until:%Y-%m-%dT%H:%M:%SZ}",
        }  # fmt: skip


def _questions(silo: Site, release: Release) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a console may ask of a silo while this release is open."""
    yield from QUESTIONS
    yield "approvals", {**PAGE, "kind": release.kind}
    yield "approval.comparison", {"release": release.id}
    for known in silo.bench.ledger.releases():
        yield "approval", {"release": known.id}
    for record in silo.bench.audit.records():
        if record["event"] == "egress.decision" and record["kind"] == release.kind:
            yield "outbox", {"seq": record["seq"]}


def score(truth: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How well the answers tell bad from good, beside what is asked for.

    Args:
        truth: of `write_set`.
        answers: {"number", "answer": approve or reject, "seconds"}.

    Raises:
        UsageError: an answer to no release, a second one to the same, or one that is neither.
    """
    numbers = {row["number"]: row for row in truth["releases"]}
    given: dict[int, Mapping[str, Any]] = {}
    for line, answer in enumerate(answers, 1):
        number, seconds = answer.get("number"), answer.get("seconds")
        if isinstance(number, bool) or not isinstance(number, int) or number not in numbers:
            raise _wrong(line, answer, "number", f"is no release of the set, which has 1 to {len(numbers)}")
        if number in given:
            raise _wrong(line, answer, "number", "was answered before")
        if answer.get("answer") not in ("approve", "reject"):
            raise _wrong(line, answer, "answer", "is neither approve nor reject")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 86_400:
            raise _wrong(line, answer, "seconds", "is no time that a decision takes, from 0 to below 86400")
        given[number] = answer
    rejected = {number for number, answer in given.items() if answer["answer"] == "reject"}
    bad = {number for number, row in numbers.items() if row["bad"]}
    median = statistics.median(answer["seconds"] for answer in given.values()) if given else None
    figures = {
        "caught": len(rejected & bad), "caught_min": CAUGHT_MIN, "bad": len(bad),
        "good_refused": len(rejected - bad), "good_refused_max": REFUSED_GOOD_MAX, "good": len(numbers) - len(bad),
        "median_seconds": median, "median_seconds_max": MEDIAN_SECONDS_MAX,
        "unanswered": sorted(set(numbers) - set(given)),
        "missed": {row["name"]: row["what"] for number, row in numbers.items() if number in bad - rejected},
    }  # fmt: skip
    figures["passed"] = (
        not figures["unanswered"]
        and figures["caught"] >= CAUGHT_MIN
        and figures["good_refused"] <= REFUSED_GOOD_MAX
        and median is not None
        and median < MEDIAN_SECONDS_MAX
    )
    return figures


def _wrong(line: int, answer: Mapping[str, Any], name: str, why: str) -> UsageError:
    told = f"{name} {answer[name]!r} {why}" if name in answer else f"{name} is missing"
    return UsageError(f"answer {line}: {told}", hint=f"a line reads {ANSWER}")


def read_truth(out: Path) -> dict[str, Any]:
    """Raises NotFoundError, UsageError."""
    path = out / "truth.json"
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist", hint="python -m benchmarks.releases --out DIR makes the set")
    try:
        value = json.loads(path.read_text())
        if not isinstance(value, dict) or not {"number", "name", "bad", "what"} <= value["releases"][0].keys():
            raise ValueError("no releases")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not the truth of a set of releases") from error
    return value


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Raises NotFoundError, UsageError."""
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist")
    answers = []
    for row, text in enumerate(path.read_text().splitlines(), 1):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{path}:{row}: not JSON", hint=f"a line reads {ANSWER}") from error
        if not isinstance(value, dict):
            raise UsageError(f"{path}:{row}: not a JSON object", hint=f"a line reads {ANSWER}")
        answers.append(value)
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the set")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--score", type=Path, metavar="ANSWERS", help=f"JSON lines, each {ANSWER}; no set is made")
    given = parser.parse_args(arguments)
    try:
        if given.score is None:
            truth = write_set(given.out, given.seed)
            print(json.dumps({"releases": len(truth["releases"]), "out": str(given.out), "seed": given.seed}))
            return 0
        figures = score(read_truth(given.out), read_answers(given.score))
    except FedSiloError as error:
        print(f"error: {error.line} [{error.code}]", file=sys.stderr)
        return error.exit_code
    print(json.dumps(figures, indent=1))
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
