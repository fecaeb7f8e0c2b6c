"""`fedsilo policy`: write, check and show what may leave a site, and the way to a looser one. From files only."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli import policy_test as cli_policy_test
from fedsilo.cli.daemons import SILO_YAML, OperatorOption, SiloOption, confirm, load_site, operator_of
from fedsilo.cli.options import (
    LearningRateOption,
    LocalStepsOption,
    PromptsOption,
    RoundsOption,
    SamplesOption,
    SwapPeriodOption,
    TokensOption,
    given,
    size_text,
)
from fedsilo.cli.output import command, emit, existing, existing_policy, table
from fedsilo.files.durable import write_durably
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import ConflictError, HeldError, NotFoundError, OperationError, UsageError

if TYPE_CHECKING:
    from policies.compare import Change
    from policies.model import Policy, PolicyFile
    from policies.schema import LoraSchema
    from silo.config import SiloConfig
    from silo.guard.ledger import PolicyInForce
    from silo.guard.signed_files import People


# ---- `fedsilo policy propose|activate` -------------------------------------------------------------------------------


OVERLAP_WORDS = 8  # in a row that count as a passage of a private record, where the policy says nothing of it
_CLOCKS_DIFFER = timedelta(minutes=5)  # a guard whose clock is behind must not find it valid for too long


def propose(
    new: Annotated[Path, typer.Argument(metavar="NEW.yaml", help="The policy that shall take the site's place.")],
    operator: OperatorOption,
    config: SiloOption = SILO_YAML,
    charter: Annotated[
        Path | None, typer.Option("--charter", help="A changed federation charter that shall come with it.")
    ] = None,
    public: Annotated[
        list[Path] | None,
        typer.Option("--public", help="File of a public set that NEW.yaml pins anew, where it does not lie beside it."),
    ] = None,
) -> None:
    """Propose a looser policy, signed by the person who proposes it. It takes approvals by others, and a restart.

    A file of own patterns that NEW.yaml names, and that lies beside it, is part of the proposal.

    A public set that the policy in force does not pin is linted first (`fedsilo public lint`), with this site's records
    and canaries; where anything is found, nothing is signed. `policy activate` lints again for each approver. Nobody
    else does: a proposer and approvers who all sign with another program bring in a set that was never linted.
    """
    from fedsilo.control.client import sign_as
    from fedsilo.files.site_policy import files_beside
    from policies.compare import effective
    from policies.load import load_policy
    from silo.guard import policy_change, signed_files
    from silo.guard.policy_change import loosened

    site = load_site(config)
    last, before, people = _in_force(site)
    text = _text(new)
    place = charter or site.charter
    beside = None if place is None else load_policy(_text(place).encode(), str(place))
    policy = effective(load_policy(text.encode(), str(new), files_beside(new)), beside)
    custom_text = None if policy.own.custom_text is None else policy.own.custom_text.decode()
    texts = policy_change.Texts(text, None if charter is None else _text(charter), custom_text)
    changes = _changes(before, policy.file)
    looser = loosened(changes)
    if before is not None and not looser:
        raise UsageError(
            f"{new} is not looser than the policy in force {last.digest[:12]}, so nobody has to approve it",
            hint=f"put it at {site.policy}, then: silo reload --config {config} --operator NAME",
            code="NOT_LOOSER",
        )
    linted = _linted(site, before, policy.file, [new.parent, site.policy.parent], public or [])
    needed = before.approvals.policy_change if before else signed_files.PERSONS_UNKNOWN
    signed = sign_as(
        operator_of(site, operator),
        signed_files.PROPOSE,
        policy_change.proposal_arguments(texts, last.digest, policy.digest),
        expires=people.now + timedelta(hours=people.hours) - _CLOCKS_DIFFER,
    )
    folder = site.policy.parent / signed_files.PROPOSALS
    path, proposal = policy_change.write_proposal(folder, texts, signed, people)
    data = {
        "proposal": str(path),
        "id": proposal.id,
        "proposer": proposal.proposer,
        "before": proposal.before,
        "after": proposal.after,
        "expires": utc(proposal.expires.timestamp()),
        "needed": needed,
        "looser": looser,
        "changes": [_row(change) for change in changes],
        "linted": linted,
    }
    emit(
        data,
        lambda: (
            f"{_table(changes)}\n{_lint_lines(linted)}"
            f"proposal {path} by {proposal.proposer}, until {utc(proposal.expires.timestamp())}\n"
            f"after {proposal.after}\n"
            f"next: {needed} of {', '.join(_others(people, proposal.proposer)) or 'nobody: no other approver'}: "
            f"fedsilo policy activate {path} --config {config} --operator NAME"
        ),
    )


def activate(
    proposal: Annotated[Path, typer.Argument(metavar="PROPOSAL", help="File that `policy propose` wrote.")],
    operator: OperatorOption,
    config: SiloOption = SILO_YAML,
    expect_digest: Annotated[
        str, typer.Option("--expect-digest", help="Digest of the policy that you were shown.")
    ] = "",
    public: Annotated[
        list[Path] | None,
        typer.Option(
            "--public",
            help="File of a public set that the proposal pins anew, where it does not lie beside the policy.",
        ),
    ] = None,
) -> None:
    """Approve a proposed policy as another person than its proposer; the last one needed puts it in place.

    It comes into force at the next start of the silo, which verifies the signatures again. A public set that the policy
    in force does not pin is linted here too, whatever the proposer's program did; where anything is found, nothing is
    signed. The start compares its hash alone, so approvers who sign with another program put an unlinted set in place.
    """
    from fedsilo.control.client import sign_as
    from policies.load import load_policy
    from silo.guard import policy_change, signed_files

    site = load_site(config)
    last, before, people = _in_force(site)
    found = policy_change.read_proposal(proposal, people)
    if found.before != last.digest:
        raise ConflictError(
            f"{proposal} is for the policy {found.before[:12]}; in force is {last.digest[:12]}",
            hint="propose it again",
            code="STALE_PROPOSAL",
        )
    charter = None if site.charter is None else load_policy(existing(site.charter).read_bytes(), str(site.charter))
    policy = found.policy(charter)
    changes = _changes(before, policy.file)
    # The proposer is the one whom an approver must not have to trust: their lint may never have run (T12).
    linted = _linted(site, before, policy.file, [proposal.parent, site.policy.parent], public or [])
    confirm(
        found.after,
        expect_digest,
        f"{_table(changes)}\n\nthe policy:",
        hint="the proposer's `fedsilo policy propose` printed it as `after`",
    )
    needed = before.approvals.policy_change if before else signed_files.PERSONS_UNKNOWN
    signed = sign_as(
        operator_of(site, operator),
        signed_files.APPROVE,
        policy_change.approval_arguments(found),
        expires=found.expires,
    )
    given = policy_change.write_approval(proposal, found, signed, people)
    approvers, refused = policy_change.approvers_of(proposal, found, people)
    complete = len(approvers) >= needed
    if complete:
        policy_change.put_in_place(proposal, found, site.policy, site.charter)
    warnings = list(refused)
    if complete and policy.charter is not None and site.charter_sha256 not in (None, policy.charter.digest):
        warnings.append(f"set charter_sha256 in {config} to {policy.charter.digest}, or the silo does not start")
    data = {
        "proposal": str(proposal),
        "approval": str(given),
        "approvers": list(approvers),
        "needed": needed,
        "in_place": complete,
        "after": found.after,
        "expires": utc(found.expires.timestamp()),
        "changes": [_row(change) for change in changes],
        "linted": linted,
    }
    waits = HeldError(
        f"{needed - len(approvers)} more of {needed} approvals are needed before {found.after[:12]} is put in place",
        hint=f"fedsilo policy activate {proposal} --config {config} --operator NAME",
    )
    emit(
        data,
        _lint_lines(linted)
        + f"{len(approvers)} of {needed} approvals: {', '.join(approvers)}"
        + (
            f"\n{site.policy} is in place; it comes into force at the next start, before {data['expires']}: "
            f"silo stop, then silo start --config {config}"
            if complete
            else ""
        ),
        warnings=warnings,
        error=None if complete else waits,
    )


def _linted(
    site: SiloConfig, before: PolicyFile | None, after: PolicyFile, folders: Sequence[Path], given: Sequence[Path]
) -> list[dict[str, str]]:
    """Lint each public set that `after` pins and `before` does not (threat T12).

    What this does not stop: people who propose and approve with another program than this one (the guard compares
    hashes, and lints nothing), a set that is first in force without any proposal (the site's first start), and what the
    lint itself does not find (fedsilo/cli/public.py).

    Args:
        site: whose records and canaries it is compared with.
        before: the policy in force; None: every set counts as new.
        after: the policy that is proposed.
        folders: where the file that a pin names is looked for.
        given: files by hand, told apart by their hashes.

    Raises:
        NotFoundError: the set's file is not there, or is another one.
        OperationError: the lint found something.
    """
    from fedsilo.cli.public import lint_set
    from fedsilo.files.task_files import read_tasks
    from silo.guard.screens import read_canaries

    known = {pin.sha256 for pin in before.public_sets.values()} if before is not None else set()
    pins = {name: pin for name, pin in after.public_sets.items() if pin.sha256 not in known}
    linted = []
    for name, pin in pins.items():
        places = [*given, *(folder / pin.file for folder in folders)]
        file = next((each for each in places if each.is_file() and read_tasks(each).sha256 == pin.sha256), None)
        if file is None:
            raise NotFoundError(
                f"public set {name} is not pinned by the policy in force, and no file with its SHA-256 {pin.sha256} is "
                f"at {' or '.join(dict.fromkeys(map(str, places)))}, so nobody can look at it",
                hint="--public FILE, the set that the federation agreed on",
                code="PUBLIC_SET_MISSING",
            )
        overlap = after.text_screens.overlap
        canaries = read_canaries(site.data.canaries) if site.data.canaries is not None else ()
        findings = lint_set(
            file, private=site.data.private, canaries=canaries, n=overlap.n if overlap else OVERLAP_WORDS
        )
        if findings:
            codes = sorted({finding.code for finding in findings})
            private = " ".join(f"--private {path}" for path in site.data.private)
            raise OperationError(
                f"public set {name} ({file}): lint found {', '.join(codes)} in "
                f"{len({finding.line for finding in findings})} lines; a set enters only where it finds nothing",
                hint=f"fedsilo public lint {file} {private}",
                code="LINT_FINDINGS",
            )
        linted.append({"set": name, "file": str(file), "sha256": pin.sha256})
    return linted


def _lint_lines(linted: list[dict[str, str]]) -> str:
    return "".join(f"public set {row['set']} ({row['file']}): lint found nothing\n" for row in linted)


def _in_force(site: SiloConfig) -> tuple[PolicyInForce, PolicyFile | None, People]:
    """The policy last in force, what it says (None: not in this version's words), and who may sign.

    Raises:
        NotFoundError: none was ever in force here.
    """
    from fedsilo.files.identity_files import load_site as load_people
    from silo.guard import signed_files
    from silo.guard.ledger import Ledger
    from silo.guard.site import LEDGER

    path = site.state_dir / LEDGER
    last, latest = None, 0.0
    if path.is_file():
        ledger = Ledger(path, read_only=True)
        last, latest = ledger.policy_in_force, ledger.latest_time
        ledger.close()
    if last is None:
        raise NotFoundError(
            f"no policy has been in force at {site.silo} yet", hint="the first `silo start` takes the one that is there"
        )
    before = last.file
    hours = before.approvals.expiry_hours if before else signed_files.HOURS_UNKNOWN
    pem, roles = load_people(site.identity.site_ca, site.identity.operators, site=site.silo)
    now = datetime.fromtimestamp(max(time.time(), latest), UTC)
    return (
        last,
        before,
        signed_files.People(site.silo, pem, roles, now, min(hours, signed_files.HOURS_MAX), site.federation),
    )


def _others(people: People, proposer: str) -> list[str]:
    return [person for person in people.roles.who_may("change.approve") if person != proposer]


def _changes(before: PolicyFile | None, after: PolicyFile) -> list[Change]:
    from policies.compare import compare

    return compare(before, after) if before is not None else []


def _row(change: Change) -> dict[str, Any]:
    return {"field": change.name, "before": change.before, "after": change.after, "direction": change.direction}


def _table(
    changes: list[Change],
    none: str = "the policy in force cannot be read by this version: every field may be another",
) -> str:
    if not changes:
        return none
    rows = [(change.name, str(change.before), str(change.after), change.direction) for change in changes]
    return table(("field", "before", "after", ""), rows)


def _text(path: Path) -> str:
    from fedsilo.files.durable import read_regular

    try:
        return read_regular(existing_policy(path), hint="name a file, such as policy.yaml").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}", hint="save it as UTF-8 text") from error


# ---- commands --------------------------------------------------------------------------------------------------------


app = typer.Typer(no_args_is_help=True, help="Write, check and show what may leave a site.")
schema_app = typer.Typer(no_args_is_help=True, help="The LoRA schema: which tensors may leave.")
app.add_typer(schema_app, name="schema")

_ModelOption = Annotated[Path, typer.Option("--model", help="Model folder (config.json, safetensors, tokenizer).")]
_RankOption = Annotated[int, typer.Option("--rank", help="LoRA rank of the federation.")]
_AlphaOption = Annotated[float, typer.Option("--alpha", help="LoRA alpha; the scale is alpha / rank.")]
_TargetsOption = Annotated[str, typer.Option("--targets", help='"all-linear" or module names with commas.')]
_DtypeOption = Annotated[str, typer.Option("--dtype", help="Values of updates: float32 or bfloat16.")]
_ShiftOption = Annotated[int, typer.Option("--shift-rank", help="Rank of the base's shift (aggregate: fedex, flora).")]
_FreezeOption = Annotated[
    str,
    typer.Option(
        "--freeze",
        help="Factors that are not trained: none, A, alternate (A in odd rounds, B in even ones) or AB (with a core).",
    ),
]
_ForceOption = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
_CharterOption = Annotated[
    Path | None, typer.Option("--charter", help="The federation's charter: judge by what both allow.")
]
_FileArgument = Annotated[Path, typer.Argument(help="Policy file.")]

_TIMED_RULE = "valid"  # the rule that compares times
DIGEST = re.compile(r"[0-9a-f]{64}")

# N1 to N7 of the threat model, said wherever a policy is judged.
NOTICES = (
    "N1: a malicious program inside the silo can hide data in weight values and wording; limits narrow this, none "
    "ends it",
    "N2: without differential privacy (off here) adapters and answers can leak membership and content",
    "N3: text screens are tripwires that know patterns, not meaning; where a policy names none, answers leave as "
    "written",
    "N4: noise per silo would not help full adapters of 3 to 32 silos, and there is none",
    "N5: the coordinator sees each silo's delta; a secure sum would hide who sent what, not what the sum says",
    "N6: what has left cannot be unlearned or called back",
    "N7: the coordinator can read from a site's updates which topics it trains on most",
    "peers are known by the federation's CA alone: whoever holds it can mint one",
)


@command(app, "policy init")
def init(
    ruleset: Annotated[str, typer.Option("--ruleset", help="pubswap, fedavg, deny_all: docs/reference/rulesets.md.")],
    model: _ModelOption,
    public: Annotated[Path, typer.Option("--public", help="Public prompts, JSONL.")],
    federation: Annotated[Path, typer.Option("--federation", help="federation.json from `coordinator init`.")],
    held_out: Annotated[Path | None, typer.Option("--held-out", help="Held-out prompts, JSONL.")] = None,
    site: Annotated[str, typer.Option("--site", help="Name of this site, for the heading.")] = "this site",
    out: Annotated[Path, typer.Option("--out", help="Policy file to write; the schema goes beside it.")] = Path(
        "policy.yaml"
    ),
    rank: _RankOption = 32,
    alpha: _AlphaOption = 64.0,
    targets: _TargetsOption = "all-linear",
    dtype: _DtypeOption = "",
    least_isolation: Annotated[
        str, typer.Option("--least-isolation", help="namespaces, user, container or waived.")
    ] = "namespaces",
    first_rounds: Annotated[
        int, typer.Option("--first-rounds", help="Rounds in which a person approves the factors.")
    ] = 1,
    valid_days: Annotated[int, typer.Option("--valid-days", help="Days until the policy expires.")] = 180,
    rounds: RoundsOption = None,
    local_steps: LocalStepsOption = None,
    swap_period: SwapPeriodOption = None,
    prompts_per_step: PromptsOption = None,
    samples_per_prompt: SamplesOption = None,
    max_new_tokens: TokensOption = None,
    learning_rate: LearningRateOption = None,
    force: _ForceOption = False,
) -> None:
    """Write this site's commented policy and LoRA schema from its own files.

    The limits follow from the size of plan that the federation's bundle states; the options from --rounds to
    --learning-rate put the site's own numbers in its place.
    """
    from fedsilo.files.site_policy import SiteInputs, make_site_policy
    from policies.load import load_policy

    schema_path = out.parent / "lora_schema.json"
    _refuse_existing([out, schema_path], force)
    made = make_site_policy(
        SiteInputs(
            ruleset=ruleset,
            model=model,
            public=public,
            bundle=federation,
            now_seconds=time.time(),
            site=site,
            held_out=held_out,
            schema_file=schema_path.name,
            rank=rank,
            alpha=alpha,
            targets=targets,
            dtype=dtype,
            least_isolation=least_isolation,
            first_rounds=first_rounds,
            valid_days=valid_days,
            limits=given(
                rounds=rounds,
                local_steps=local_steps,
                swap_period=swap_period,
                prompts_per_step=prompts_per_step,
                samples_per_prompt=samples_per_prompt,
                max_new_tokens=max_new_tokens,
                learning_rate=learning_rate,
            ),
        )
    )
    _write(schema_path, made.schema_text)
    _write(out, made.policy_text.encode())
    digest = load_policy(made.policy_text.encode(), str(out)).digest
    emit(
        {
            "policy": str(out),
            "schema": str(schema_path),
            "policy_sha256": digest,
            "schema_sha256": made.schema.digest,
            "plan_size": made.size.to_json(),
        },
        f"wrote {out} and {schema_path}\npolicy {digest}\n{size_text(made.size.to_json())}\n"
        f"next: read it, then `fedsilo policy check {out}`; and keep cases beside it that say what must never leave: "
        f"`fedsilo policy test DIR --policy {out} --coverage --mutate`",
        warnings=made.warnings,
    )


@command(app, "policy check")
def check(file: _FileArgument, charter: _CharterOption = None) -> None:
    """Check a policy: schema, references, hashes of the files it names; say what it does not promise."""
    from fedsilo.files.site_policy import read_effective, read_pinned_schema, read_policy
    from fedsilo.files.task_files import read_tasks
    from policies.capacity import (
        capacity_lines,
        record_warnings,
        standstill_warnings,
        text_warnings,
        unused_screen_warnings,
        worst_case,
    )
    from policies.load import custom_in_words
    from policies.model import SetPin

    policy = read_policy(existing_policy(file))
    schema = None
    if policy.file.egress.updates:
        schema = read_pinned_schema(policy, file.parent)
    unseen = []
    pins: list[tuple[tuple[str, str], SetPin]] = [
        (("public_sets", name), pin) for name, pin in policy.file.public_sets.items()
    ]
    if policy.file.held_out:
        pins.append((("held_out", ""), policy.file.held_out))
    for path, pin in pins:
        place = file.parent / pin.file
        if not place.is_file():
            unseen.append(f"{pin.file}: not found from here, so its hash was not compared")
            continue
        found = read_tasks(place).sha256
        if found != pin.sha256:
            raise UsageError(
                f"{policy.source}:{policy.line_of((*path, 'sha256'))}: {place} has hash {found}, not {pin.sha256}",
                hint="if the file is right, write the policy again with `fedsilo policy init`",
            )
    policy = read_effective(file, charter and existing(charter))
    rows, notices = worst_case(policy, schema), [*NOTICES, *_split_notice(policy)]
    emit(
        {
            "policy_sha256": policy.digest,
            "name": policy.file.name,
            "worst_case_per_round": rows,
            "capacity_per_round": _capacity(policy, schema),
            "custom_patterns": custom_in_words(policy.file),
            "notices": notices,
        },
        lambda: "\n".join(
            [
                f"{file}: good, policy {policy.digest}{f', with {charter}' if charter else ''}",
                *_custom_lines(policy),
                *_worst_case_lines(rows),
                *capacity_lines(_capacity(policy, schema)),
                *(f"not promised: {notice}" for notice in notices),
            ]
        ),
        warnings=[
            *standstill_warnings(policy, schema, time.time()),
            *text_warnings(policy),
            *record_warnings(policy),
            *unused_screen_warnings(policy),
            *unseen,
        ],
    )


def _split_notice(policy: Any) -> list[str]:
    """Return what too few peers that must sign leave open (T20)."""
    least, peers = policy.file.federation.min_peers, len(policy.file.federation.peers)
    if 2 * least > peers:
        return []
    return [
        f"T20: two groups of {least} of the {peers} peers can be shown two transcripts of one round, and each trains "
        f"on its own; federation.min_peers of at least {peers // 2 + 1} excludes it, in a run with all of them"
    ]


@command(app, "policy show")
def show(
    file: _FileArgument,
    effective: Annotated[
        Path | None, typer.Option("--effective", metavar="CHARTER", help="Show what this and CHARTER allow together.")
    ] = None,
) -> None:
    """Show what a policy lets out, and the most that one round may carry."""
    from fedsilo.files.site_policy import read_effective
    from policies.capacity import text_warnings, worst_case

    policy = read_effective(existing_policy(file), effective and existing(effective))
    schema, warnings = _pinned_schema(policy.own, file.parent)
    warnings = [*text_warnings(policy), *warnings]
    rows = worst_case(policy, schema)
    data = {
        "policy_sha256": policy.digest,
        "policy": policy.file.model_dump(mode="json", by_alias=True),
        "worst_case_per_round": rows,
    }
    text = "\n".join(_summary(policy, rows))
    emit(data, text, warnings=warnings)


@command(app, "policy hash")
def hash_(file: _FileArgument, charter: _CharterOption = None) -> None:
    """Print a policy's identity: the hash of its meaning, not of its comments. A silo that joined under a charter
    judges by what both allow, and its records name that: give the charter for it."""
    from fedsilo.files.site_policy import read_effective

    digest = read_effective(existing_policy(file), charter and existing(charter)).digest
    emit({"policy_sha256": digest}, digest)


@command(app, "policy diff")
def diff(
    before: Annotated[Path, typer.Argument(help="The policy in force.")],
    after: Annotated[Path, typer.Argument(help="The policy to compare it with.")],
    fail_on: Annotated[
        str, typer.Option("--fail-on", help="looser: exit 1 where anything is looser or cannot be compared.")
    ] = "",
) -> None:
    """Every field that differs, and whether the change is tighter or looser."""
    from fedsilo.files.site_policy import read_policy
    from policies.compare import compare

    if fail_on not in ("", "looser"):
        raise UsageError(f"--fail-on {fail_on!r} is not known", hint="--fail-on looser")
    changes = compare(*(read_policy(existing_policy(file), kept=True).file for file in (before, after)))
    rows = [_row(change) for change in changes]
    opened = [change.name for change in changes if change.direction in ("looser", "incomparable")]
    error = None
    if fail_on and opened:
        error = OperationError(
            f"not tighter: {', '.join(opened[:8])}{' ...' if len(opened) > 8 else ''}",
            code="LOOSER",
            hint="say why it has to be looser to whoever approves this policy",
        )
    data = {"changes": rows, "tighter_or_equal": not opened}
    emit(data, lambda: _table(changes, "the two policies allow the same"), error=error)


@command(app, "policy explain")
def explain(
    record: Annotated[int, typer.Argument(min=0, help="Number of a decision in the log.")],
    log: Annotated[Path, typer.Option("--log", help="Folder of the audit log, or the state folder around it.")],
    policy: Annotated[Path, typer.Option("--policy", help="Policy to judge it by.")] = Path("policy.yaml"),
    charter: _CharterOption = None,
) -> None:
    """Every rule's verdict on a recorded message, with the measured value, the limit and its line in the policy."""
    from fedsilo.audit.reader import read_records
    from fedsilo.cli.audit import existing_log, reading_warnings
    from fedsilo.files.site_policy import read_effective
    from policies.capacity import worst_case
    from policies.replay import DECISIONS, replayed

    folder = existing_log(log)
    found = next((row for row in read_records(folder, record) if row["seq"] == record), None)
    if found is None or found["event"] not in DECISIONS:
        told = f"record {record} of {folder} is no decision" if found else f"{folder} has no record {record}"
        raise NotFoundError(told, hint="fedsilo audit tail --log shows them")
    judged_by = read_effective(existing_policy(policy), charter and existing(charter), kept=True)
    judged = replayed(found, judged_by)
    if judged.decision is None:
        raise NotFoundError(f"record {record} cannot be judged again: {judged.why}")
    schema, warnings = _pinned_schema(judged_by.own, policy.parent)
    data = {
        **judged.to_json(),
        "rules": [result.to_json() for result in judged.decision.results],
        "worst_case_per_round": worst_case(judged_by, schema),
        "capacity_per_round": _capacity(judged_by, schema),
    }
    warnings = [*reading_warnings(folder), *warnings]
    emit(data, lambda: _explain_text(data), warnings=warnings)


command(app, "policy test")(cli_policy_test.test)
command(app, "policy propose")(propose)
command(app, "policy activate")(activate)


@command(schema_app, "policy schema make")
def schema_make(
    model: _ModelOption,
    out: Annotated[Path, typer.Option("--out", help="Schema file to write.")] = Path("lora_schema.json"),
    rank: _RankOption = 32,
    alpha: _AlphaOption = 64.0,
    targets: _TargetsOption = "all-linear",
    dtype: _DtypeOption = "float32",
    freeze: _FreezeOption = "none",
    shift_rank: _ShiftOption = 0,
    force: _ForceOption = False,
) -> None:
    """Write the LoRA schema of a model folder."""
    from fedsilo.files.model_folder import lora_schema_of

    _refuse_existing([out], force)
    schema = lora_schema_of(model, rank, alpha, targets, dtype=dtype, freeze=freeze, shift_rank=shift_rank)
    _write(out, schema.canonical() + b"\n")
    data = {
        "schema": str(out),
        "schema_sha256": schema.digest,
        "tensors": len(schema.tensors),
        "values": schema.elements,
        "payload_bytes": schema.update_bytes,
    }
    text = (
        f"wrote {out}: {len(schema.updates[0])} tensors, {schema.elements} values, {schema.update_bytes} bytes a round"
    )
    emit(data, f"{text}\nschema {schema.digest}")


def _pinned_schema(policy: Policy, folder: Path) -> tuple[LoraSchema | None, list[str]]:
    """The schema that the policy pins, or none and why: factors then count as large as the largest message."""
    from fedsilo.files.site_policy import read_pinned_schema

    if not policy.file.egress.updates:
        return None, []
    try:
        return read_pinned_schema(policy, folder), []
    except UsageError as error:
        kind = ", ".join(policy.file.egress.updates)
        return None, [f"{kind} counts as large as budgets.message_bytes allows: {error.message}"]


def _refuse_existing(paths: list[Path], force: bool) -> None:
    for path in paths:
        if path.exists() and not force:
            raise UsageError(f"{path} exists", hint="move it away, or say --force")


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, data)


def _capacity(policy: Policy, schema: LoraSchema | None) -> list[dict[str, Any]]:
    from policies.capacity import capacities

    return [row.to_json() for row in capacities(policy, schema)]


def _worst_case_lines(rows: list[dict[str, Any]]) -> list[str]:
    return [
        f"at most per round: {row['kind']}: {row['messages']} messages, {row['payload_bytes']:,} bytes" for row in rows
    ] or ["at most per round: nothing but control messages, where the policy names any"]


def _summary(policy: Policy, rows: list[dict[str, Any]]) -> list[str]:
    file = policy.file
    lines = [
        f"{file.name}  {file.mode}  {policy.digest}",
        f"federation {file.federation.id}, {len(file.federation.peers)} peers, "
        f"valid {file.valid.from_} to {file.valid.until}",
    ]
    for side, block in (("out", file.egress), ("in", file.ingress)):
        kinds = []
        for name, field in type(block).model_fields.items():
            value = getattr(block, name)
            if name == "control" and value:
                kinds += [f"control.{kind}" for kind in value.kinds]
            elif value is not None:
                kinds.append(str(field.alias))
        lines.append(f"{side}: {', '.join(kinds) or 'nothing'}")
    return [*lines, *_custom_lines(policy), *_worst_case_lines(rows)]


def _custom_lines(policy: Policy) -> list[str]:
    from policies.load import custom_in_words, custom_of

    if (custom := custom_of(policy.file)) is None:
        return []
    return [f"pii_basic: {custom_in_words(policy.file)}: {', '.join(each.name for each in custom.patterns)}"]


def _explain_text(data: dict[str, Any]) -> str:
    from policies.capacity import capacity_lines

    rows = [
        [
            rule["outcome"],
            rule["rule"],
            f"{Path(rule['file']).name}:{rule['line']}",
            *(_short(dated(rule["rule"], rule[side])) for side in ("measured", "limit")),
        ]
        for rule in data["rules"]
        if rule["outcome"] != "n.a."
    ]
    silent = sum(rule["outcome"] == "n.a." for rule in data["rules"])
    verdict = f"record {data['seq']}: {data['kind']} was {data['recorded']}, this policy says {data['replayed']}"
    return "\n".join(
        [
            verdict + (f" ({', '.join(data['reasons'])})" if data["reasons"] else ""),
            table(("verdict", "rule", "file:line", "measured", "limit"), rows),
            f"{silent} rules do not apply to this kind",
            *_worst_case_lines(data["worst_case_per_round"]),
            *capacity_lines(data["capacity_per_round"]),
        ]
    )


def dated(rule: str, value: Any) -> Any:
    """A rule on times counts seconds; a person reads dates."""
    if rule != _TIMED_RULE or value is None:
        return value
    moments = value if isinstance(value, list) else [value]
    return [utc(float(moment)) for moment in moments]


def _short(value: Any) -> str:
    """In full but for digests: a number that is cut or rounded cannot be compared with its limit."""
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    text = str(value)
    return f"{text[:12]}..." if DIGEST.fullmatch(text) else text
