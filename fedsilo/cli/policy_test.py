"""`fedsilo policy test`: cases that a site keeps beside its policy. Files only, no network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.output import emit, existing, existing_policy, table
from fedsilo.files.durable import read_regular
from fedsilo.protocol.errors import OperationError, UsageError

if TYPE_CHECKING:
    from fedsilo.cli.check_reports import Check
    from policies.cases import Case, Coverage, NotFor, Outcome, Tried
    from policies.examples import Site
    from policies.model import Policy

CODES = {
    "CASE_FAILED": "The policy decides a case in another way than the case expects.",
    "NOT_COVERED": "No case shows this rule, limit or kind both passing and refused.",
    "LIMIT_SURVIVES": "This limit can be loosened and no case notices.",
}


def test(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of case files (*.yaml), or such files.")
    ],
    policy: Annotated[Path, typer.Option("--policy", help="Policy to test.")] = Path("policy.yaml"),
    show_coverage: Annotated[
        bool, typer.Option("--coverage", help="Which rules and limits were seen passing and refusing.")
    ] = False,
    fail_under: Annotated[
        float, typer.Option("--fail-under", min=0, max=100, help="With --coverage: exit 1 below this percentage.")
    ] = 100.0,
    mutate: Annotated[
        bool, typer.Option("--mutate", help="Loosen each limit of the policy in turn; a case must notice.")
    ] = False,
    output: Annotated[str, typer.Option("--output", help="text, json, junit or sarif.")] = "text",
) -> None:
    """Decide every case by the policy and compare with what the case expects.

    Exit status 1: a case failed, coverage is below --fail-under, or a loosened limit went unnoticed; 2: invalid input.
    """
    from fedsilo.cli.check_reports import output_format, written
    from fedsilo.files.site_policy import read_policy
    from policies import cases as engine

    form = output_format(output)
    tested = read_policy(existing_policy(policy))
    site = _site(tested, policy.parent)
    cases = [case for folder in folders for case in read_cases(folder)]
    outcomes, left_out = list(engine.judge(cases, site)), list(engine.not_for(cases, site))
    covered = engine.coverage(outcomes, site) if show_coverage else None
    tried = list(engine.mutate(outcomes, site)) if mutate else None
    wrong = _wrong(outcomes, covered, fail_under, tried)
    data = {
        "policy_sha256": tested.digest,
        "not_for_this_policy": [each.to_json() for each in left_out],
        "cases": [outcome.to_json() for outcome in outcomes],
        "coverage": None if covered is None else _coverage_json(covered),
        "mutants": None if tried is None else [each.to_json() for each in tried],
    }

    def text() -> str:
        if form == "text":
            return _text(outcomes, left_out, covered, tried, tested)
        checks = [*_case_checks(outcomes), *_coverage_checks(covered), *_mutation_checks(tried, tested)]
        return written(form, "fedsilo policy test", checks, CODES)

    error = OperationError("; ".join(wrong), code="CASES_FAILED", hint=_hint(covered, tried)) if wrong else None
    unseen = [] if form == "text" else [_not_for(each) for each in left_out]
    emit(data, text, error=error, warnings=unseen)


def read_cases(folder: Path) -> list[Case]:
    """Cases of all *.yaml and *.yml files of a folder, in name order, or of one file.

    Raises:
        UsageError: no case at all, or a mistake in a file, with its line.
    """
    from policies.cases import load_cases

    files = [existing(folder)]
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml"))
    cases = [case for file in files for case in load_cases(read_regular(file), str(file))]
    if not cases:
        raise UsageError(f"{folder}: there are no case files (*.yaml)", hint="docs/how-to/write-a-policy.md shows one")
    return cases


def _site(policy: Policy, folder: Path) -> Site:
    """The policy with its LoRA schema. A schema that is not there matters only to a case with tensors."""
    from fedsilo.files.site_policy import read_pinned_schema
    from policies.examples import Site

    pins = policy.file.lora_schemas
    present = any((folder / pin.file).is_file() for pin in pins.values())
    return Site(policy, read_pinned_schema(policy, folder) if present and policy.file.egress.updates else None)


def _wrong(
    outcomes: list[Outcome], covered: Coverage | None, fail_under: float, tried: list[Tried] | None
) -> list[str]:
    """Return what makes the command fail, in words."""
    failed = sum(not outcome.passed for outcome in outcomes)
    survivors = sum(not each.noticed_by for each in tried or ())
    return [
        words
        for bad, words in (
            (failed, f"{failed} of {len(outcomes)} cases failed"),
            (
                covered is not None and covered.percent() < fail_under,
                f"coverage {covered.percent() if covered else 0:.1f} % is below {fail_under:g} %",
            ),
            (survivors, f"{survivors} of {len(tried or ())} loosened limits went unnoticed"),
        )
        if bad
    ]


def _hint(covered: Coverage | None, tried: list[Tried] | None) -> str:
    if any(not each.noticed_by for each in tried or ()):
        return "for each survivor, write a case just beyond the limit, such as `limit + 1`, and one just within it"
    if covered is not None and any(not row.covered for row in covered.rows):
        return "for each row, write the case that is missing: one allowed, one refused"
    return ""


def _coverage_json(covered: Coverage) -> dict[str, Any]:
    return {
        "percent": round(covered.percent(), 2),
        "percent_of_rules": round(covered.percent("rule"), 2),
        "percent_of_limits": round(covered.percent("limit"), 2),
        "rows": [row.to_json() for row in covered.rows],
        "not_shown_by_messages": [
            {"limit": name, "line": line, "kept_by": why} for name, line, why in covered.elsewhere
        ],
    }


# ---- as checks ---------------------------------------------------------------------------------------


def _case_checks(outcomes: list[Outcome]) -> list[Check]:
    from fedsilo.cli.check_reports import Check

    return [
        Check(
            outcome.case.source,
            outcome.name,
            "CASE_FAILED",
            "" if outcome.passed else _failure(outcome),
            outcome.case.source,
            outcome.case.line,
        )
        for outcome in outcomes
    ]


def _coverage_checks(covered: Coverage | None) -> list[Check]:
    from fedsilo.cli.check_reports import Check

    return [
        Check(
            "coverage",
            f"{row.what} {row.name}",
            "NOT_COVERED",
            "" if row.covered else f"seen passing {row.passed} times, refused {row.stopped} times",
            row.file,
            row.line,
        )
        for row in (covered.rows if covered else ())
        if row.asked
    ]


def _mutation_checks(tried: list[Tried] | None, policy: Policy) -> list[Check]:
    from fedsilo.cli.check_reports import Check

    return [
        Check(
            "mutants",
            f"{each.name}: {each.before} -> {each.after}",
            "LIMIT_SURVIVES",
            "" if each.noticed_by else f"no case notices {each.name} {each.after} instead of {each.before}",
            policy.source,
            each.line,
        )
        for each in tried or ()
    ]


def _failure(outcome: Outcome) -> str:
    return "\n".join([f"expected {outcome.expected}, the policy says {outcome.said}", *_explanation(outcome)])


def _explanation(outcome: Outcome) -> list[str]:
    return outcome.decision.explain().splitlines()


# ---- as text -----------------------------------------------------------------------------------------


def _not_for(each: NotFor) -> str:
    return f"not for this policy: {each.case.source}:{each.case.line}: {each.name}: {each.why}"


def _text(
    outcomes: list[Outcome], left_out: list[NotFor], covered: Coverage | None, tried: list[Tried] | None, policy: Policy
) -> str:
    failed = [outcome for outcome in outcomes if not outcome.passed]
    lines = [
        f"{len(outcomes) - len(failed)} of {len(outcomes)} cases passed, policy {policy.source} {policy.digest[:12]}"
    ]
    lines += [_not_for(each) for each in left_out]
    for outcome in failed:
        lines += [
            f"FAILED {outcome.case.source}:{outcome.case.line}: {outcome.name}",
            f"  expected {outcome.expected}, the policy says {outcome.said}",
            *(f"  {line}" for line in _explanation(outcome)),
        ]
    if covered is not None:
        lines += ["", *_coverage_text(covered)]
    if tried is not None:
        lines += ["", *_mutation_text(tried, policy)]
    return "\n".join(lines)


def _coverage_text(covered: Coverage) -> list[str]:
    rows = [
        (
            "n.a." if not row.asked else "yes" if row.covered else "NO",
            row.what,
            row.name,
            row.line or "",
            row.passed,
            row.stopped,
        )
        for row in covered.rows
    ]
    return [
        f"coverage {covered.percent():.1f} %: rules {covered.percent('rule'):.1f} %, "
        f"limits {covered.percent('limit'):.1f} %, kinds not named {covered.percent('unnamed kind'):.1f} %",
        table(("covered", "what", "name", "line", "passed", "refused"), rows),
        *(f"not shown by messages: {name} (line {line}): {why}" for name, line, why in covered.elsewhere),
    ]


def _mutation_text(tried: list[Tried], policy: Policy) -> list[str]:
    survivors = [each for each in tried if not each.noticed_by]
    return [
        f"{len(tried) - len(survivors)} of {len(tried)} loosened limits were noticed",
        *(
            f"SURVIVES {policy.source}:{each.line}: {each.name}: {each.before} -> {each.after} ({each.how})"
            for each in survivors
        ),
    ]
