"""`silo report`: what a site's own people ask about a run. Answered from this site's state; nothing is sent."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsilo.cli.output import JsonOption, emit, guarded
from fedsilo.protocol.text import harmless

app = typer.Typer(no_args_is_help=True, help="What a run was worth to this site, and what it showed of it; never sent.")

_COLUMNS = 80
_ARMS = {"base": "base", "local_only": "local-only", "federated": "federated"}
_DIFFERENCES = {
    "federated_minus_local_only": "federated - local-only",
    "federated_minus_base": "federated - base",
    "local_only_minus_base": "local-only - base",
}


# Without it typer would make the one command of this group the group itself.
@app.callback()
def group() -> None:
    """What a run was worth to this site; shown here and never sent."""


@app.command()
@guarded("silo report benefit")
def benefit(
    config: Annotated[Path, typer.Option("--config", help="The site's configuration file.")] = Path("silo.yaml"),
    run: Annotated[str, typer.Option("--run", help="A finished run; by default the latest.")] = "",
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, max=1024, help="Answers a prompt; default: as the run evaluates.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Did joining help? Base, local-only and federated adapter on this site's own private holdout."""
    from silo.config import load_config
    from silo.report.measure import report_benefit

    def say(line: str) -> None:
        sys.stderr.write(f"{harmless(line, lines=True)}\n")
        sys.stderr.flush()

    found = report_benefit(load_config(config), run=run, samples=samples, say=say)
    emit("silo report benefit", found, json_output=json_output, text=lambda: benefit_text(found))


@app.command("case-mix")
@guarded("silo report case-mix")
def case_mix(
    config: Annotated[Path, typer.Option("--config", help="The site's configuration file.")] = Path("silo.yaml"),
    run: Annotated[str, typer.Option("--run", help="A finished run; by default the latest.")] = "",
    samples: Annotated[
        int, typer.Option("--samples", min=1, max=1024, help="Answers to each public question, with and without.")
    ] = 32,
    json_output: JsonOption = False,
) -> None:
    """What the first update of a run shows of this site's case mix, to whoever reads it alone (N7)."""
    from silo.config import load_config
    from silo.report.case_mix import report_case_mix

    def say(line: str) -> None:
        sys.stderr.write(f"{harmless(line, lines=True)}\n")
        sys.stderr.flush()

    found = report_case_mix(load_config(config), run=run, samples=samples, say=say)
    emit("silo report case-mix", found, json_output=json_output, text=lambda: case_mix_text(found))


def case_mix_text(found: Mapping[str, Any]) -> str:
    """The report in lines of at most 80 columns."""
    head = (
        f"run {found['run']} ({found['method']}), round {found['round']}, update {found['update'][:12]}; shown here "
        "and never sent."
    )
    lines = [*_wrapped(head), "", f"{'topic':30}{'gain, points':>14}{'questions':>11}{'private rows':>14}"]
    for row in found["topics"]:
        name = harmless(row["topic"])
        lines.append(
            f"{name if len(name) <= 29 else name[:28] + '+':30}{100 * row['gain']:+14.1f}{row['questions']:11}"
            f"{row['private_rows']:8} {100 * row['private_share']:3.0f} %"
        )
    correlation = found["rank_correlation"]
    told = "" if correlation is None else f" Rank correlation of gain and rows: {correlation:.2f}."
    return "\n".join([*lines, "", *_wrapped(found["sentence"] + told), "", *_wrapped(f"{found['definition']}.")])


def benefit_text(found: Mapping[str, Any]) -> str:
    """The report in lines of at most 80 columns."""
    holdout = found["holdout"]
    left_out = "".join(
        f", {holdout[name]} {words} and left out"
        for name, words in (("left_out_overlong", "too long"), ("left_out_public", "also public"))
        if holdout[name]
    )
    groups = f" in {holdout['groups']} groups" if holdout["groups"] != holdout["prompts"] else ""
    head = (
        f"run {found['run']} ({found['method']}), adapter {found['adapter'][:12]}; trainer isolation "
        f"{found['isolation']}; holdout {holdout['prompts']} prompts{groups}{left_out}, "
        f"{holdout['samples_per_prompt']} samples each. Shown here and never sent."
    )
    lines = [*_wrapped(head), "", f"{'pass@1, %':26}{'mean':>6}  {'95 % interval':16}{'greedy':>6}"]
    for arm, name in _ARMS.items():
        row = found["arms"][arm]
        lines.append(f"{name:26}{100 * row['pass_at_1']:6.1f}  {_ends(row['interval']):16}{100 * row['greedy']:6.1f}")
    lines += ["", "paired difference, points"]
    for key, name in _DIFFERENCES.items():
        row = found["differences"][key]
        lines.append(f"{name:26}{100 * row['mean']:+6.1f}  {_ends(row['interval'], signed=True)}")
    lines += ["", f"{'federated - local-only':26}{'mean':>6}  {'95 % interval':16}{'prompts':>7}"]
    for topic, part in found["per_topic"].items():
        row = part["differences"]["federated_minus_local_only"]
        shown = harmless(topic)
        name = shown if len(shown) <= 25 else shown[:24] + "+"
        lines.append(f"{name:26}{100 * row['mean']:+6.1f}  {_ends(row['interval'], signed=True):16}{part['prompts']:7}")
    verdict = found["verdict"]
    reach = verdict["detectable"]
    sentence = verdict["sentence"] + (
        f". A true difference of {100 * reach:.1f} points is one that such a holdout shows 4 times in 5."
        if reach is not None
        else "."
    )
    lines += ["", *_wrapped(sentence), ""]
    for name in ("local_only", "interval"):
        lines += _wrapped(f"{_ARMS.get(name, name)}: {found['definition'][name]}.")
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    """An interval stays on one line."""
    lines = textwrap.wrap(re.sub(r"(\[[^],]*), ([^]]*\])", "\\1,\u00a0\\2", text), _COLUMNS, break_on_hyphens=False)
    return [line.replace("\u00a0", " ") for line in lines]


def _ends(ends: list[float] | None, *, signed: bool = False) -> str:
    if ends is None:
        return "too few"
    low, high = (f"{100 * end:{'+' if signed else ''}.1f}" for end in ends)
    return f"[{low}, {high}]"
