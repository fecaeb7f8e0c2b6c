"""`silo`: set up, check, run and steer one site. Reading goes to the daemon's control socket; every change is a command
signed with a person's key (`--operator`), so an approval names somebody. What `silo report` says is answered from this
site's state and sent nowhere."""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli import approvals as cli_approvals
from fedsilo.cli import curves as cli_curves
from fedsilo.cli import doctor
from fedsilo.cli import ledger as cli_ledger
from fedsilo.cli import messages as cli_messages
from fedsilo.cli import transfer as cli_transfer
from fedsilo.cli.daemons import (
    SILO_YAML,
    ContextOption,
    OperatorOption,
    RequestOption,
    SiloOption,
    client_of,
    clock_now,
    confirm,
    context_daemon,
    load_site,
    silo_command,
    silo_query,
)
from fedsilo.cli.options import (
    VERIFIERS,
    LearningRateOption,
    LocalStepsOption,
    PromptsOption,
    RoundsOption,
    SamplesOption,
    SwapPeriodOption,
    TemplateOption,
    TokensOption,
    given,
    size_text,
)
from fedsilo.cli.output import (
    PersonOption,
    TimeoutOption,
    command,
    emit,
    recorded,
    running,
    table,
    takes_version,
    write_err,
)
from fedsilo.files.durable import undone_on_failure
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.protocol.text import harmless

if TYPE_CHECKING:
    from fedsilo.control.answers import AdapterList, FreeForm, MeasuredSet, Metric, SiloStatus
    from silo.config import SiloConfig
    from silo.guard.checks import Preview


# ---- `silo adapters` and `silo rollback` -----------------------------------------------------------------------------


adapters_app = typer.Typer(no_args_is_help=True, help="Global adapters at this site: accepted, held, refused.")
DigestArgument = Annotated[str, typer.Argument(help="Of a held adapter, whole, as `silo adapters list` shows it.")]
RunOption = Annotated[str, typer.Option("--run", help="Name of the run, as `silo adapters list` shows it.")]


@command(adapters_app, "silo adapters list")
def list_(config: SiloOption = SILO_YAML) -> None:
    """Adapters that this silo trained from, newest first, and those that wait for a person.

    The figures are of this site's own prompts and are told to nobody else.
    """
    from fedsilo.control.answers import AdapterList, read

    with client_of(load_site(config)) as client:
        data = client.query("adapters", {})
    emit(data, lambda: _adapters_text(read(AdapterList, data)))


@command(adapters_app, "silo adapters accept")
def accept(
    digest: DigestArgument,
    operator: OperatorOption,
    run: RunOption,
    config: SiloOption = SILO_YAML,
    request_id: RequestOption = "",
) -> None:
    """Train on the held adapter all the same, from the next round that begins with it or passes against it."""
    arguments = {"run": run, "digest": digest}
    data = silo_command(load_site(config), operator, "adapter.accept", arguments, request_id)
    emit(data, f"accepted adapter {data['adapter'][:12]}: what comes next is compared with it{recorded(data)}")


@command(adapters_app, "silo adapters refuse")
def refuse(
    digest: DigestArgument,
    operator: OperatorOption,
    run: RunOption,
    config: SiloOption = SILO_YAML,
    request_id: RequestOption = "",
) -> None:
    """Never train on the held adapter in this run."""
    arguments = {"run": run, "digest": digest}
    data = silo_command(load_site(config), operator, "adapter.refuse", arguments, request_id)
    emit(
        data,
        f"refused adapter {data['adapter'][:12]}: rounds that begin with it go on without this silo" + recorded(data),
    )


def rollback(
    operator: OperatorOption,
    run: RunOption,
    to: Annotated[
        str, typer.Option("--to", help="Digest of an accepted adapter, or its beginning. Default: the last one.")
    ] = "",
    config: SiloOption = SILO_YAML,
    request_id: RequestOption = "",
) -> None:
    """Go back to an accepted adapter, whose file is hashed first; what came after it is refused.

    The last accepted one where an adapter is held, else the one before it. What was sent meanwhile stays with the
    others.
    """
    arguments = {"run": run, "to": to}
    data = silo_command(load_site(config), operator, "adapter.rollback", arguments, request_id)
    left = "; the open round goes on without this silo" if data["round_left"] else ""
    emit(data, f"back to adapter {data['adapter']}: what comes next is compared with it{left}{recorded(data)}")


def _adapters_text(adapters: AdapterList) -> str:
    limits = adapters.limits
    lines = [
        f"run {adapters.run or '-'}",
        "adapters are not measured: silo.yaml has no acceptance:"
        if limits is None
        else f"measured on {' and '.join(limits.prompts)}: held for a drop beyond {100 * limits.drop_max:.1f} "
        f"points, or with fewer than {limits.prompts_min} prompts",
    ]
    for held in adapters.held:
        lines += [
            f"HELD: adapter {held.digest} of round {held.round}",
            f"  {held.said}",
            f"  silo adapters accept|refuse {held.digest} --run {adapters.run} --operator NAME, or silo rollback",
        ]
    rows = [(each.round, each.digest, each.how, _points_text(each.figures)) for each in adapters.accepted]
    lines.append(table(("round", "accepted", "how", "points"), rows) if rows else "none is accepted yet")
    lines += [f"refused: {digest}" for digest in adapters.refused]
    return "\n".join(lines)


def _points_text(figures: Mapping[str, MeasuredSet]) -> str:
    return "; ".join(
        f"{name} {100 * each.difference:+.1f} [{100 * each.interval[0]:+.1f}, {100 * each.interval[1]:+.1f}], "
        f"would show a drop of {100 * (each.detectable or 0.0):.1f}"
        if each.interval
        else f"{name}: {each.prompts} prompts, too few"
        for name, each in figures.items()
    )


# ---- `silo report` ---------------------------------------------------------------------------------------------------


report_app = typer.Typer(
    no_args_is_help=True, help="What a run was worth to this site, and what it showed of it; never sent."
)

_COLUMNS = 80
_ARMS = {"base": "base", "local_only": "local-only", "federated": "federated"}
_DIFFERENCES = {
    "federated_minus_local_only": "federated - local-only",
    "federated_minus_base": "federated - base",
    "local_only_minus_base": "local-only - base",
}


# Without it typer would make the one command of this report the report itself.
@report_app.callback()
def report() -> None:
    """Show what a run was worth to this site; the result is never sent."""


@command(report_app, "silo report benefit")
def benefit(
    config: Annotated[Path, typer.Option("--config", help="The site's configuration file.")] = Path("silo.yaml"),
    run: Annotated[str, typer.Option("--run", help="A finished run; by default the latest.")] = "",
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, max=1024, help="Answers a prompt; default: as the run evaluates.")
    ] = None,
) -> None:
    """Did joining help? Base, local-only and federated adapter on this site's own private holdout."""
    from silo.config import load_config
    from silo.report.measure import report_benefit

    found = report_benefit(load_config(config), run=run, samples=samples, say=_say)
    emit(found, lambda: benefit_text(found))


@command(report_app, "silo report case-mix")
def case_mix(
    config: Annotated[Path, typer.Option("--config", help="The site's configuration file.")] = Path("silo.yaml"),
    run: Annotated[str, typer.Option("--run", help="A finished run; by default the latest.")] = "",
    samples: Annotated[
        int, typer.Option("--samples", min=1, max=1024, help="Answers to each public question, with and without.")
    ] = 32,
) -> None:
    """Show what the first update of a run reveals of this site's case mix to whoever reads it alone (N7)."""
    from silo.config import load_config
    from silo.report.case_mix import report_case_mix

    found = report_case_mix(load_config(config), run=run, samples=samples, say=_say)
    emit(found, lambda: case_mix_text(found))


def _say(line: str) -> None:
    write_err(f"{harmless(line, lines=True)}\n")


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


# ---- what `silo status` prints ---------------------------------------------------------------------------------------


def status_text(state: FreeForm, *, reached_by: str = "") -> str:
    """A silo's state as a table. `reached_by` stands behind each further command, so that it reaches this silo."""
    from fedsilo.control.answers import SiloStatus, read
    from fedsilo.views.state import broken_text

    silo = read(SiloStatus, state)
    if "held" in silo.absent:  # it answers before it has a state
        return table(("what", "now"), [("state", "starting: not all of it stands yet")])
    link, broken = silo.coordinator, broken_text(silo.audit)
    made_of = silo.policy.made_of if len(silo.policy.made_of) > 1 else ()
    rows = [
        ("silo", f"{silo.silo} ({silo.role}) of {silo.federation}"),
        ("state", _phase_text(silo)),
        ("run", _run_text(silo)),
        ("trainer", _trainer_text(silo.trainer)),
        ("private", private_text(silo.trainer.get("ready", {}))),
        ("policy", f"{silo.policy.name} {silo.policy.digest[:12]}, DP off"),
        *(("made of", f"{part['file']} {part['digest'][:12]}") for part in made_of),
        *_clock_rows(silo.clock),
        ("coordinator", f"{link.address} {link.link} {link.fault}"),
        ("audit", f"{silo.audit.size} records{f', BROKEN at {broken}' if broken else ''}"),
        *_figure_rows(silo.metrics),
    ]
    rows += [("left", f"{row.messages} {row.kind}, {row.bytes} bytes since it was started") for row in silo.left]
    rows += [
        ("HELD", f"{held.id} {held.leaves.bytes} bytes: silo approvals show {held.id}{reached_by}")
        for held in silo.held
    ]
    if silo.adapter_held:
        rows.append(("HELD", f"adapter {silo.adapter_held[:12]}: silo adapters list{reached_by}"))
    return table(("what", "now"), rows)


def _clock_rows(clock: FreeForm) -> list[tuple[str, str]]:
    """Nothing while this machine's clock and the coordinator's agree."""
    rows = [("CLOCK", f"{clock['told']}: compare both machines' clocks")] if clock.get("told") else []
    if clock.get("halt"):
        rows.append(
            ("CLOCK", "nothing goes on until an approver accepts it: silo resume --accept-clock --operator NAME")
        )
    return rows


_BY_SILO = ("left", "declined")


def _run_text(silo: SiloStatus) -> str:
    last, became = silo.last_run.run, silo.last_run.state
    if silo.run:
        at = f"{silo.run} round {silo.round} of {silo.rounds} step {silo.step}"
        return f"{at}, paused by the coordinator" if silo.run_paused else at
    if became == "running":
        return f"{last} is not taken up: this silo starts, or is halted"
    by = " by this silo" if became in _BY_SILO else ""
    return f"none is open; the last: {last}, {became}{by}" if last else "none is open"


def _phase_text(silo: SiloStatus) -> str:
    if silo.halted:
        return f"{silo.phase}: {silo.halted}"
    if silo.waits:
        return f"WAITS: {silo.waits}"
    # while a release is held, or a task is finished, the phase is that
    paused = silo.paused and silo.phase != "paused"
    return f"{silo.phase}{', paused: no further step is begun' if paused else ''}"


def _figure_rows(metrics: Mapping[str, Metric]) -> list[tuple[str, str]]:
    """A line for each figure of the trainer's newest task of each sort, with that task, since tasks differ. None of it
    leaves by being shown."""
    from fedsilo.control.figures import FIGURES

    rows = []
    for name, item in metrics.items():
        step = f" step {item.step}" if item.step else ""
        words = f"{name}, {FIGURES[name].meaning}" if name in FIGURES else name.replace("_", " ")
        rows.append(("figure", f"{item.task} of round {item.round}{step}: {words}: {_number_text(item.value)}"))
    return rows


def _number_text(value: Any) -> str:
    """Four digits that mean something; a mapping of counts as its items."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_number_text(count)}" for name, count in value.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _trainer_text(trainer: FreeForm) -> str:
    if "waiting_for" in trainer:
        return f"not there yet: waiting for it to dial {trainer['waiting_for']}"
    level, probes = trainer.get("isolation", "-"), trainer.get("probes", {})
    if why := trainer.get("why_waived"):
        return f"isolation {level}: {why}"
    silent = [name for name, result in probes.items() if result.get("outcome") == "silent"]
    refused = sum(result.get("outcome") == "refused" for result in probes.values())
    shown = [f"{refused} ways out tried and refused"] if probes else []
    if silent:
        controls = [address for places in trainer.get("controls", {}).values() for address in places]
        shown.append(f"{', '.join(silent)} dropped ({', '.join(controls)} answer the guard, and not the trainer)")
    return f"isolation {level}{': ' if shown else ''}{'; '.join(shown)}"


def isolation_text(levels: Mapping[str, Any]) -> str:
    """Return one line on the isolation of each trainer in a run. levels: {silo: isolation levels, oldest first}."""
    return ", ".join(f"{silo} {' then '.join(names)}" for silo, names in levels.items()) or "not told"


def private_text(ready: FreeForm) -> str:
    """Return how many private rows are used and what was left out, as the trainer said when it was ready."""
    dropped = ready.get("dropped") or {}
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    left_out = f", {sum(dropped.values())} lines left out ({reasons}): `silo check` lists them" if dropped else ""
    held_back = ready.get("holdout_rows")
    aside = f" to train on, {held_back} set aside" if held_back else ""
    return f"{ready.get('private_rows', '-')} rows{aside}{left_out}"


# ---- what `silo check` prints of prompts -----------------------------------------------------------------------------


_LABELS = {"private": "private", "public": "public", "held_out": "held-out"}
TOPICS_SHOWN_MAX = 12


def prompts_text(found: Preview) -> str:
    """Lengths of the three sets, their topics, and the prompts that were asked for, each as the model reads it."""
    rows = [
        (_LABELS[name], str(each.rows), *map(str, each.prompt_tokens or "-----"), _answers(each.answer_tokens))
        for name, each in found.sets.items()
    ]
    text = "\n\ntokens of a prompt\n" + table(
        ("set", "rows", "least", "median", "90 %", "99 %", "most", "answer, median to most"), rows
    )
    topics = sorted({topic for each in found.sets.values() for topic in each.topics})
    shown = [
        (topic[:40], *(str(each.topics.get(topic, 0)) for each in found.sets.values()))
        for topic in topics[:TOPICS_SHOWN_MAX]
    ]
    text += "\n\nrows by topic\n" + table(("topic", *(_LABELS[name] for name in found.sets)), shown)
    if len(topics) > TOPICS_SHOWN_MAX:
        text += f"\nand {len(topics) - TOPICS_SHOWN_MAX} more topics"
    for each in found.prompts:
        text += f"\n\n--- {each.id[:80]}, {each.file}:{each.line}, {each.tokens} tokens, as the model reads it"
        text += "".join(f"\n| {line}" for line in each.text.split("\n"))
    return text


def _answers(tokens: tuple[int, ...]) -> str:
    return f"{tokens[1]} to {tokens[4]}" if tokens else "-"


# ---- `silo` ----------------------------------------------------------------------------------------------------------


app = typer.Typer(no_args_is_help=True, help="One site: guard and trainer, approvals, what left and what was held.")
takes_version(app)
app.add_typer(cli_approvals.app, name="approvals")
_messages = cli_messages.Program(
    "silo",
    SILO_YAML,
    SiloOption,
    silo_query,
    {
        "outbox": "Every outbound message and the rules that judged it.",
        "inbox": "Every message that came in and the rules that judged it.",
        "outbox list": "Outbound messages, newest first: what was decided on each, and whether it left.",
        "outbox show": "One decision with every rule's verdict, and what would have passed.",
        "inbox list": "What came in, newest first, and what was decided on each.",
        "inbox show": "One decision with every rule's verdict, and what would have been let in.",
        "audit list": cli_messages.RECORDS_HELP.format("silo"),
        "audit show": cli_messages.RECORD_HELP.format("silo"),
        "certs": "This site's certificates and the authorities above them, as a running silo sees them.",
        "settings": "Every setting that a running silo uses, and where it comes from.",
    },
)
cli_messages.add_to(app, _messages, cli_ledger.app)
command(app, "silo round")(cli_curves.silo_round)
app.add_typer(report_app, name="report")
app.add_typer(adapters_app, name="adapters")
command(app, "silo rollback")(rollback)
cli_transfer.add_to_silo(app)
doctor.add_to(app, "silo")


# ---- set up ----------------------------------------------------------------------------------------


@command(app, "silo init")
def init(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    model: Annotated[Path, typer.Option("--model", help="Hugging Face model folder.")],
    private: Annotated[
        Path, typer.Option("--private", help="Private prompts: JSON lines, one JSON array, or Parquet.")
    ],
    public: Annotated[Path, typer.Option("--public", help="Public prompts, in the same forms.")],
    held_out: Annotated[Path, typer.Option("--held-out", help="Held-out prompts, in the same forms.")],
    verifier: Annotated[
        str, typer.Option("--verifier", help=f"How answers are graded: {VERIFIERS}, or one that a package brings.")
    ],
    federation: Annotated[Path, typer.Option("--federation", help="federation.json from `coordinator init`.")],
    ruleset: Annotated[str, typer.Option("--ruleset", help="pubswap, pubswap-strict, fedavg ...")] = "pubswap",
    public_verifier: Annotated[str, typer.Option("--public-verifier", help="Default: the same.")] = "",
    holdout_share: Annotated[
        float, typer.Option("--holdout-share", min=0.0, max=0.5, help="Private rows never trained on, to report on.")
    ] = 0.1,
    load: Annotated[
        str, typer.Option("--load", help="fp32, bf16, nf4 or fp8. Default: as the federation's bundle says.")
    ] = "",
    template: TemplateOption = "",
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="NAME=COLUMN",
            help="What the private file calls id, prompt, answer, topic or group, such as prompt=question; repeatable.",
        ),
    ] = None,
    rank: Annotated[int, typer.Option("--rank", help="LoRA rank.")] = 32,
    alpha: Annotated[float, typer.Option("--alpha", help="LoRA alpha.")] = 64.0,
    least_isolation: Annotated[
        str, typer.Option("--least-isolation", help="Least accepted isolation level.")
    ] = "namespaces",
    first_rounds: Annotated[int, typer.Option("--first-rounds", help="Rounds in which a person approves.")] = 1,
    silos_on_this_host: Annotated[
        int, typer.Option("--silos-on-this-host", min=1, help="They share the cores: torch threads follow from it.")
    ] = 1,
    rounds: RoundsOption = None,
    local_steps: LocalStepsOption = None,
    swap_period: SwapPeriodOption = None,
    prompts_per_step: PromptsOption = None,
    samples_per_prompt: SamplesOption = None,
    max_new_tokens: TokensOption = None,
    learning_rate: LearningRateOption = None,
    out: Annotated[Path, typer.Option("--out", help="Folder to write into.")] = Path(),
    person: PersonOption = [],  # noqa: B006  # typer reads the default, nobody changes it
) -> None:
    """Write the site's configuration, policy, LoRA schema and canaries. Keys come from `fedsilo certs`.

    The policy's limits follow from the size of plan that the federation's bundle states; the options from --rounds to
    --learning-rate put the site's own numbers in its place.
    """
    from fedsilo.demo.provision import people_of, take_from_bundle, write_roles
    from fedsilo.demo.sites import SiloFiles, write_silo_files
    from fedsilo.files.model_folder import choice_of
    from fedsilo.files.site_policy import SiteInputs, read_bundle

    taken = [out / "id" / each for each in ("federation_ca.crt", "coordinator.pub", "roles.yaml")]
    written_here = ("silo.yaml", "policy.yaml", "charter.yaml", "lora_schema.json", "canaries.txt")
    with undone_on_failure(out, [*taken, *(out / each for each in written_here)]):
        take_from_bundle(out / "id", read_bundle(federation))
        if person:
            write_roles(out / "id", name, people_of(person))
        written = write_silo_files(
            SiloFiles(
                site=SiteInputs(
                    ruleset=ruleset,
                    model=model,
                    public=public,
                    bundle=federation,
                    now_seconds=time.time(),
                    site=name,
                    rank=rank,
                    alpha=alpha,
                    least_isolation=least_isolation,
                    first_rounds=first_rounds,
                    limits=given(
                        rounds=rounds,
                        local_steps=local_steps,
                        swap_period=swap_period,
                        prompts_per_step=prompts_per_step,
                        samples_per_prompt=samples_per_prompt,
                        max_new_tokens=max_new_tokens,
                        learning_rate=learning_rate,
                    ),
                    template=choice_of(template),
                ),
                out=out,
                private=private,
                verifier=verifier,
                public_verifier=public_verifier or verifier,
                held_out=held_out,
                holdout_share=holdout_share,
                load=load,
                fields=_fields_of(fields or ()),
                silos_on_this_host=silos_on_this_host,
            )
        )
    warnings = written.pop("warnings")
    config = written["config"]
    keys = "" if (out / "id" / f"{name}.key").exists() else f"fedsilo certs request --token TOKEN --out {out / 'id'}; "
    emit(
        written,
        f"wrote {written['config']}, {written['policy']}, {written['schema']}, {written['canaries']}\n"
        f"{size_text(written['plan_size'])}\n"
        f"next: read the policy; plant canaries; {keys}silo check --config {config}; silo start --config {config}",
        warnings=warnings,
    )


def _fields_of(given_fields: Sequence[str]) -> dict[str, str]:
    """Raises UsageError: one is not NAME=COLUMN, or stands twice. Which names there are, the configuration says."""
    found: dict[str, str] = {}
    for each in given_fields:
        name, is_given, column = each.partition("=")
        if not is_given or not column or name in found:
            raise UsageError(
                f"--field {each!r} is not NAME=COLUMN, each name once", hint="as in --field prompt=question"
            )
        found[name] = column
    return found


@command(app, "silo join")
def join(config: SiloOption = SILO_YAML) -> None:
    """Dial the coordinator once, judge its certificate and compare it with the policy's pins. Sends no message."""
    from silo.guard.checks import look_at_coordinator
    from silo.guard.site import load_site_parts

    read = load_site(config)
    if read.coordinator.by_files:
        raise UsageError(
            f"{read.source} says `address: files`: this silo dials nobody",
            hint="silo start, then silo export-release says hello",
        )
    site = load_site_parts(read, make_secret=False)
    fingerprint = look_at_coordinator(site, datetime.now(UTC))["certificate"]
    data = {
        "silo": site.config.silo,
        "coordinator": site.policy.file.federation.coordinator,
        "address": site.config.coordinator.address,
        "certificate": fingerprint,
        "key_pinned": True,
    }
    emit(
        data,
        f"{data['address']} is {data['coordinator']}, certificate {fingerprint[:16]}, key as pinned; "
        f"`silo start` says hello",
    )


@command(app, "silo check")
def check(
    config: SiloOption = SILO_YAML,
    offline: Annotated[bool, typer.Option("--offline", help="Do not dial the coordinator.")] = False,
    prompts: Annotated[
        int | None,
        typer.Option(
            "--prompts", min=0, max=20, help="Show so many private prompts. Default: 3 on a terminal, else 0."
        ),
    ] = None,
) -> None:
    """Check files, keys, policy, data, model, isolation and the line to the coordinator; start and send nothing."""
    import copy

    from silo.guard.checks import check_site

    # What is written to a file or to another program tends to be kept and sent on, so private prompts are not in it
    # unless somebody says so.
    shown = prompts if prompts is not None else 3 * (sys.stdout.isatty() and not running().json_output)
    results, look, errors = check_site(
        load_site(config), reach_coordinator=not offline, read_prompts=True, show_prompts=shown
    )
    error = copy.copy(errors[0]) if errors else None
    if error is not None:
        # The first fault decides code and exit status, as it would at `silo start`; its words stand in the table.
        failed = ", ".join(result["check"] for result in results if result["ok"] is False)
        untried = sum(result["ok"] is None for result in results)
        more = f", {untried} not tried" if untried else ""
        error.message = f"{len(errors)} of {len(results)} checks failed{more}: {failed}"
    words = {True: "ok", False: "FAILED", None: "-"}
    rows = [(words[result["ok"]], result["check"], result["found"]) for result in results]
    hidden = None if shown else {"prompts"}
    lengths = None if look.preview is None else look.preview.model_dump(mode="json", exclude=hidden)
    data = {"checks": results, "data": lengths}
    emit(
        data,
        lambda: table(("", "check", "found"), rows) + ("" if look.preview is None else prompts_text(look.preview)),
        warnings=look.warnings,
        error=error,
    )


@command(app, "silo start")
def start(
    config: SiloOption = SILO_YAML,
    quiet: Annotated[bool, typer.Option("--quiet", help="Log to the file in state_dir only.")] = False,
) -> None:
    """Run guard and trainer in the foreground until Ctrl-C, SIGTERM or `silo stop`."""
    # gRPC's own lines on stderr would stand beside ours, which name the cause; it reads this when it loads.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from fedsilo.cli.own_names import refuse_foreign_names
    from fedsilo.files.extras import need
    from fedsilo.files.long_lived import one_thread_for_sums

    one_thread_for_sums(os.environ)
    refuse_foreign_names()
    from silo.guard.main import prepare_logging, serve
    from silo.guard.site import thread_warning

    loaded = load_site(config)
    if loaded.trainer.launch == "child":
        need("torch", "transformers")  # before anything is opened or dialled
    prepare_logging(loaded, to_stderr=not quiet)
    warning = thread_warning(loaded)

    def ready(facts: Mapping[str, Any]) -> None:
        emit(
            dict(facts),
            f"ready: {facts['silo']} of {facts['federation']}, trainer {facts['isolation']}, policy "
            f"{facts['policy']['name']} {facts['policy']['digest'][:12]}, control {facts['control_socket']}, private "
            f"{private_text(facts['private'])}",
            warnings=[warning] if warning else [],
        )

    serve(loaded, ready=ready)


# ---- look ------------------------------------------------------------------------------------------


@command(app, "silo status")
def status(
    config: Annotated[
        Path | None,
        typer.Option("--config", help="silo.yaml. Default: the one here, else the current context, if it is a silo."),
    ] = None,
    context: ContextOption = "",
) -> None:
    """Show what the silo does now, what waits for people, and what left."""

    chosen = context_daemon("silo", context, config, here=SILO_YAML)
    with chosen.connect() if chosen is not None else client_of(load_site(config or SILO_YAML)) as client:
        snapshot = client.snapshot()
    state = {**snapshot.state, "time": snapshot.time}
    file = config if chosen is None else chosen.config
    reached_by = f" --config {shlex.quote(str(file))}" if file is not None else ""
    if chosen is not None and file is None:
        reached_by = f", in the folder of {chosen.site}'s silo.yaml"
    emit(state, lambda: status_text(state, reached_by=reached_by))


@command(app, "silo logs")
def logs(
    config: SiloOption = SILO_YAML,
    lines: Annotated[int, typer.Option("--lines", min=1, help="Last so many.")] = 50,
    trainer: Annotated[bool, typer.Option("--trainer", help="The trainer's log in place of the guard's.")] = False,
) -> None:
    """The end of the guard's or trainer's log. Logs stay at the site; nothing uploads them."""
    path = load_site(config).state_dir / "logs" / ("trainer.log" if trainer else "guard.log")
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist", hint="the silo has not been started yet")
    shown = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    emit({"path": str(path), "lines": shown}, "\n".join(shown))


# ---- change ----------------------------------------------------------------------------------------


@command(app, "silo pause")
def pause(operator: OperatorOption, config: SiloOption = SILO_YAML, request_id: RequestOption = "") -> None:
    """Finish the step at hand and begin no other until `silo resume`."""
    data = silo_command(load_site(config), operator, "pause", {}, request_id)
    text = f"paused: the trainer begins no further step{recorded(data)}"
    warnings = [] if "record" in data else ["this silo is halted, so the order is not in its audit log: silo status"]
    if data.get("until_restart"):
        warnings.append("nor could it be kept: it ends with the guard")
    emit(data, text, warnings=warnings)


@command(app, "silo resume")
def resume(
    operator: OperatorOption,
    config: SiloOption = SILO_YAML,
    request_id: RequestOption = "",
    accept_clock: Annotated[
        bool,
        typer.Option("--accept-clock", help="Go on after a clock that was wrong: it counts as it is now (approvers)."),
    ] = False,
    expect_digest: Annotated[
        str, typer.Option("--expect-digest", help="Of the clock's halt, as you were shown it; with --accept-clock.")
    ] = "",
) -> None:
    """Go on after `silo pause`, or after a clock that was found wrong.

    Set the clock right before it is accepted: no later time that this site has seen is compared with after that.
    """
    site = load_site(config)
    if expect_digest and not accept_clock:
        raise UsageError("--expect-digest is of a clock's halt", hint="give --accept-clock too")
    if accept_clock:
        digest = expect_digest.removeprefix("sha256:") or _clock_halt_shown(site)
        data = silo_command(site, operator, "clock.accept", {"halt": digest}, request_id)
        now, released = utc(data["accepted"]), utc(data["released"])
        text = f"the clock counts as it is now, {now}; {released} is released and compared with no more{recorded(data)}"
        emit(data, text)
        return
    data = silo_command(site, operator, "resume", {}, request_id)
    emit(data, f"resumed{recorded(data)}")


def _clock_halt_shown(site: SiloConfig) -> str:
    """The digest of the clock's halt, once it was shown and typed back. Raises NotFoundError: there is none."""
    with client_of(site) as client:
        halt = (client.snapshot().state.get("clock") or {}).get("halt")
    if not halt:
        raise NotFoundError("nothing is halted for its clock here", hint="`silo status` shows what is")
    digest = str(halt["digest"])
    hint = "`silo status --json` names it: data.clock.halt.digest"
    confirm(digest, "", f"{halt['message']}\n{clock_now()}", hint=hint)
    return digest


@command(app, "silo leave")
def leave(
    operator: OperatorOption,
    run: Annotated[str, typer.Option("--run", help="Name of the run, as `silo status` shows it.")],
    config: SiloOption = SILO_YAML,
    request_id: RequestOption = "",
) -> None:
    """Leave the open run for good, tell the coordinator, and stay in the federation. It cannot be undone.

    What is held or not sent yet never leaves; what was sent stays with the others. The next run asks anew.
    """
    data = silo_command(load_site(config), operator, "leave", {"run": run}, request_id)
    text = f"left run {run} for good; the coordinator is told{recorded(data)}"
    emit(data, text)


@command(app, "silo reload")
def reload_(operator: OperatorOption, config: SiloOption = SILO_YAML, request_id: RequestOption = "") -> None:
    """Read policy and charter again and put them in force, if nothing in them is looser; else the old ones stay."""
    data = silo_command(load_site(config), operator, "policy.reload", {}, request_id)
    fields = f": {', '.join(data['fields'])}" if data["fields"] else ""
    emit(
        data,
        f"policy {data['policy']} is in force, {data['change']}{fields}{recorded(data)}",
        warnings=[f"the silo ends: {data['ends']}"] if data["ends"] else [],
    )


@command(app, "silo stop")
def stop(
    operator: OperatorOption,
    config: SiloOption = SILO_YAML,
    request_id: RequestOption = "",
    timeout: TimeoutOption = 30.0,
) -> None:
    """End guard and trainer, and wait for it. The open round goes on without this silo."""
    from fedsilo.demo.processes import wait_for_end

    site = load_site(config)
    data = silo_command(site, operator, "stop", {}, request_id)
    lock = site.state_dir / "lock"
    # Who may command the daemon need not be a user of this machine who may see its files.
    seen = os.access(lock, os.W_OK)
    if seen:
        wait_for_end(lock, timeout)
    emit(
        data,
        ("stopped" if seen else "stopping") + recorded(data),
        warnings=[] if seen else [f"{lock} is not yours to look at, so its end was not waited for"],
    )
