"""`silo approvals`: what is held for persons, every fact about it, and their answers, each signed by a person.

With --offline the ledger of the state folder is read, by the guard's own readers, and nothing is locked, so a daemon
that works on the folder is not disturbed; nothing can be answered. Does not verify anything: the ledger carries no
signature, only the audit log does (`fedsilo audit verify`).
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.daemons import (
    SILO_YAML,
    OperatorOption,
    RequestOption,
    SiloOption,
    client_of,
    confirm,
    load_site,
    require_terminal,
    silo_command,
    type_back,
)
from fedsilo.cli.messages import columns_text, older
from fedsilo.cli.output import command, emit, recorded
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import ConflictError, HeldError, NotFoundError, OperationError, UsageError
from fedsilo.protocol.text import harmless

if TYPE_CHECKING:
    from fedsilo.control.answers import Comparison, ContentRow, Finding, Halt
    from fedsilo.control.client import ControlClient
    from silo.config import SiloConfig
    from silo.guard.ledger import Ledger, Release


# ---- a folder without its daemon -------------------------------------------------------------------------------------


UNREAD = "what held releases are made of: the policy in force was written by another version"

CERTIFICATE = "certificate"  # a row of a comparison
CERTIFICATE_UNKNOWN = "the coordinator's certificate is not on disk, so it is not compared"


class SiloFolder:
    """A silo's state folder as the source of the queries `approval`, `approval.comparison` and `approvals`.

    Args:
        state_dir: the silo's.
        address: of its coordinator, as its configuration says.

    Raises:
        NotFoundError: there is no ledger. OperationError: it cannot be read.
    """

    def __init__(self, state_dir: Path, address: str) -> None:
        from silo.guard.shown import KeptPolicy
        from silo.guard.site import LEDGER

        self._path = state_dir / LEDGER
        self._destination = {"address": address}
        if not self._path.is_file():
            raise NotFoundError(f"{state_dir} holds no ledger", hint="did this silo ever start?")
        with self._ledger() as ledger:
            self._as_of = ledger.latest_time
            policy = ledger.policy_in_force
        self._digest = policy.digest if policy else ""
        file = policy.file if policy else None
        self._policy = None if file is None else KeptPolicy(file, self._digest)

    def banner(self) -> str:
        """Return what people are told about answers that come from no daemon."""
        return f"OFFLINE, as of {utc(self._as_of)}: what the folder holds; no daemon was asked"

    def query(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """One answer. Raises NotFoundError: no such release. OperationError: the ledger cannot be read."""

        from fedsilo.control.answers import to_json
        from fedsilo.control.server import QueryArguments
        from silo.guard.answers.queries import release_page

        with self._ledger() as ledger:
            if name == "approvals":
                return to_json(release_page(ledger, arguments))
            release = ledger.release(QueryArguments(arguments, "release").text("release"))
            return self._view(ledger, release) if name == "approval" else to_json(self._comparison(ledger, release))

    @contextmanager
    def _ledger(self) -> Iterator[Ledger]:
        import sqlite3

        from silo.guard.ledger import Ledger

        try:
            ledger = Ledger(self._path, read_only=True)
            try:
                yield ledger
            finally:
                ledger.close()
        except sqlite3.Error as error:
            hint = "is it a ledger of this version?"
            raise OperationError(f"cannot read {self._path}: {error}", hint=hint) from error

    def _view(self, ledger: Ledger, release: Release) -> dict[str, Any]:
        """As the daemon shows it; of a policy that cannot be read, only what the ledger alone knows, with `missing`."""

        from fedsilo.control.answers import to_json
        from silo.guard.answers.release import ReleaseView, given_of

        if self._policy is not None:
            view = ReleaseView(ledger).view(release, self._policy, destination=self._destination)
            shown: dict[str, Any] = to_json(view)
            return shown
        answers = ledger.approvals(release.id)
        return {
            "id": release.id,
            "digest": release.digest,
            "revision": release.revision,
            "state": release.state,
            "run": release.run,
            "round": release.round,
            "step": release.step,
            "held_since": release.requested_at,
            "expires_at": release.expires_at,
            "policy": {"digest": release.policy_digest, "rules": to_json(release.rules)},
            "approvers": {"needed": release.persons, "roles": [], "people": [], "given": to_json(given_of(answers))},
            "missing": UNREAD,
        }

    def _comparison(self, ledger: Ledger, release: Release) -> Comparison:
        """Without the far end's certificate, which the running guard alone has seen, so it is not called changed."""
        from silo.guard.answers.release import ReleaseView

        told = ReleaseView(ledger).comparison(release, policy_digest=self._digest, destination=self._destination)
        known = tuple(row for row in told.rows if row.what != CERTIFICATE)
        unknown = CERTIFICATE_UNKNOWN if len(known) < len(told.rows) else ""
        return replace(told, rows=known, note="; ".join(filter(None, (told.note, unknown))))


# ---- reading ---------------------------------------------------------------------------------------------------------


TEXT_CELLS = 100
PAGE_ROWS = 500  # the daemon's most
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Read the site's state folder; no daemon is asked, and it need not run.")
]
ReleaseArgument = Annotated[str, typer.Argument(help="Such as r1/hospital_a/0.")]


@contextmanager
def source_of(site: SiloConfig, *, offline: bool) -> Iterator[tuple[ControlClient | SiloFolder, list[str]]]:
    """Yield what answers queries, and what a person is told of it: the daemon, or its state folder.

    Raises:
        NotFoundError: there is no ledger in the folder. OperationError: it cannot be read.
    """
    if not offline:
        with client_of(site) as client:
            yield client, []
        return

    folder = SiloFolder(site.state_dir, site.coordinator.address)
    yield folder, [folder.banner()]


def every_page(client: ControlClient | SiloFolder, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return all releases that the arguments choose, newest first, page after page."""
    releases: list[Any] = []
    before = None
    while True:
        page = client.query("approvals", {**arguments, "limit": PAGE_ROWS, "before": before})
        releases += page["releases"]
        before = page.get("next")
        if before is None:
            return {"releases": releases}


app = typer.Typer(no_args_is_help=True, help="Releases that wait for persons.")


@command(app, "silo approvals payload")
def payload(release: ReleaseArgument, operator: OperatorOption, config: SiloOption = SILO_YAML) -> None:
    """What would leave: answers beside their public prompts, tensors by name, shape, norm and histogram. Recorded."""
    site = load_site(config)
    with client_of(site) as client:
        shown = client.query("approval", {"release": release})
    ticket = silo_command(site, operator, "approvals.payload", {"release": release, "digest": shown["digest"]}, "")
    with client_of(site) as client:
        data = client.query("approvals.payload", {"ticket": ticket["ticket"]})

    def text() -> str:
        from fedsilo.control.answers import HeldPayload, read
        from fedsilo.views.lines import UNICODE, to_text
        from fedsilo.views.releases import payload_lines

        return to_text(payload_lines(read(HeldPayload, data), TEXT_CELLS, UNICODE))

    emit(data, text)


@command(app, "silo approvals diff")
def diff(release: ReleaseArgument, config: SiloOption = SILO_YAML, offline: OfflineOption = False) -> None:
    """All of a release beside the last one of its kind that left, or, where none has, that did not."""
    with source_of(load_site(config), offline=offline) as (source, told):
        data = source.query("approval.comparison", {"release": release})

    def text() -> str:
        from fedsilo.control.answers import Comparison, read
        from fedsilo.views.lines import to_text
        from fedsilo.views.releases import comparison_lines

        return to_text(comparison_lines(read(Comparison, data), TEXT_CELLS))

    emit(data, text, warnings=told)


@command(app, "silo approvals history")
def history(
    config: SiloOption = SILO_YAML,
    kind: Annotated[str, typer.Option("--kind", help="Only of this message kind.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="Rows of one page.")] = 100,
    before: Annotated[int | None, typer.Option("--before", min=0, help="`next` of the page before.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every page.")] = False,
    offline: OfflineOption = False,
) -> None:
    """Releases that were ever held, newest first: who answered, when, and on which bytes."""
    chosen = {"kind": kind} if kind else {}
    with source_of(load_site(config), offline=offline) as (source, told):
        if everything:
            data = every_page(source, chosen)
        else:
            data = source.query("approvals", {**chosen, "limit": limit, "before": before})

    def text() -> str:
        from fedsilo.control.answers import ReleaseRow, read_rows
        from fedsilo.views.approvals import HISTORY_COLUMNS

        rows = read_rows(ReleaseRow, data["releases"])
        told = columns_text(HISTORY_COLUMNS, rows) if rows else "nothing was ever held"
        return told + older(data.get("next"))

    emit(data, text, warnings=told)


# ---- answering -------------------------------------------------------------------------------------------------------


MINUTES_MAX = 527_040.0  # 366 days; a release expires long before
_COLUMNS_MIN, _COLUMNS_MAX = 60, 120
_OF_ONE = re.compile(r"/\d+$")


@command(app, "silo approvals list")
def approvals_list(
    config: SiloOption = SILO_YAML, everything: Annotated[bool, typer.Option("--all", help="Settled ones too.")] = False
) -> None:
    """Releases that wait for persons, and what may leave and waits in the outbox."""
    from fedsilo.control.answers import HaltList, LedgerPage, ReleaseRow, read, read_rows, to_json

    with client_of(load_site(config)) as client:
        data = every_page(client, {} if everything else {"state": "held"})
        halts = read(HaltList, client.query("halts", {})).halts
        content = read(LedgerPage, client.query("ledger", {})).content
    data["halts"] = to_json(halts)
    warnings = [*map(_halt_line, halts), *(_waiting_line(row) for row in content if row.state == "allowed")]

    def text() -> str:
        from fedsilo.views.approvals import GIVEN, HISTORY_COLUMNS

        rows = read_rows(ReleaseRow, data["releases"])
        return columns_text((*HISTORY_COLUMNS, GIVEN), rows) if rows else "nothing is held"

    emit(data, text, warnings=warnings)


def _waiting_line(row: ContentRow) -> str:
    """The line is down, or something that was allowed earlier waits too."""
    return f"{row.kind} of round {row.round} of run {row.run} may leave and waits in the outbox since {row.at}"


def _halt_line(halt: Halt) -> str:
    what = "this silo is halted, two transcripts of one round are signed," if halt.kind == "round.open" else ""
    return (
        f"{what or halt.kind + ' is halted by its text screens'} since {utc(halt.since)}: {len(halt.given)} of "
        f"{halt.needed} approvers have released it (silo approvals release {halt.kind})"
    )


@command(app, "silo approvals show")
def approvals_show(
    release: Annotated[str, typer.Argument(help="Such as r1/hospital_a/0.")],
    config: SiloOption = SILO_YAML,
    offline: OfflineOption = False,
) -> None:
    """Every fact a person needs before answering, or of a release that is over, who answered; never the content."""
    with source_of(load_site(config), offline=offline) as (source, told):
        data = source.query("approval", {"release": release})
    emit(data, lambda: release_text(data), warnings=told)


def release_text(data: Mapping[str, Any], *, columns: int | None = None) -> str:
    """Every fact, as the console has them; within `columns`, where these are given, rules that are ok share lines."""
    from fedsilo.views.lines import to_text
    from fedsilo.views.releases import printed
    from fedsilo.views.state import release_of

    missing = f"\nnot told here: {data['missing']}; its running daemon tells it" if "missing" in data else ""
    rows = printed(release_of(data), columns or TEXT_CELLS, time=time.time(), every_rule=columns is None)
    return to_text(rows) + missing


@command(app, "silo approvals approve")
def approve(
    release: Annotated[
        str, typer.Argument(help="Such as r1/hospital_a/0; r1/hospital_a for all that is held of round 1.")
    ],
    operator: OperatorOption,
    expect_digest: Annotated[str, typer.Option("--expect-digest", help="SHA-256 that you were shown.")] = "",
    expect_policy: Annotated[str, typer.Option("--expect-policy", help="Policy digest that you were shown.")] = "",
    expect_shown: Annotated[
        str, typer.Option("--expect-shown", help="Digest of the facts that you were shown: `shown` of approvals show.")
    ] = "",
    ack_finding: Annotated[
        list[str], typer.Option("--ack-finding", help="Id of a finding that you have read; once for each.")
    ] = [],  # noqa: B006  # typer reads the default, nobody changes it
    request_id: RequestOption = "",
    config: SiloOption = SILO_YAML,
) -> None:
    """Approve exactly these bytes under this policy, with every finding read.

    On a terminal the ends of the findings' ids and of the digest may be typed after reading the facts; of a whole
    round, nothing is answered before all of it was read. Exit 9 while more approvals are needed: this one counts.
    """
    loaded = load_site(config)
    group = [release]
    if not _OF_ONE.search(release):
        if expect_digest or expect_policy or expect_shown or request_id:
            raise UsageError(
                "--expect-digest, --expect-policy, --expect-shown and --request-id are of one release",
                hint=f"such as {release}/0",
            )
        group = _held_of_round(loaded, release)
    read = [
        digests_shown(loaded, name, expect_digest, expect_policy, facts=expect_shown, acknowledged=ack_finding)
        for name in group
    ]  # all of them, before the first is answered
    answers = []
    for arguments in read:
        given = {"acknowledged": list(ack_finding)} | arguments
        answers.append(silo_command(loaded, operator, "approvals.approve", given, request_id))
    waiting = [answer for answer in answers if answer["state"] == "held"]
    data = answers[0] if group == [release] else {"releases": answers}

    def text() -> str:
        from fedsilo.views.approvals import came_to

        return "\n".join(
            f"{each['release']}: {came_to(each['state'])}, {len(each['given'])} of {each['needed']} approvals"
            f"{recorded(each)}"
            for each in answers
        )

    emit(data, text, error=_still_held(waiting[0]) if waiting else None)


def _still_held(answer: Mapping[str, Any]) -> HeldError:
    left = int(answer["needed"]) - len(answer["given"])
    return HeldError(
        f"{answer['release']} stays held: {left} more of {answer['needed']} approvals are needed",
        hint="it takes another person: silo approvals show names the roles",
    )


def _held_of_round(config: SiloConfig, group: str) -> list[str]:
    """Releases of a round (r1/hospital_a) that wait, answers first: when the last update is there the round closes.

    Raises:
        NotFoundError: none waits. UsageError: no terminal, on which each is read.
    """
    from fedsilo.control.answers import ReleaseRow, read_rows

    with client_of(config) as client:
        held = read_rows(ReleaseRow, every_page(client, {"state": "held"})["releases"])
    of_round = [row for row in held if row.id.rpartition("/")[0] == group]
    if not of_round:
        raise NotFoundError(f"nothing is held of {group!r}", hint="silo approvals list shows what is")
    of_round.sort(key=lambda row: (row.kind != "public.responses", int(row.id.rpartition("/")[2])))
    names = [row.id for row in of_round]
    require_terminal("one release, --expect-digest, --expect-policy and --expect-shown", f"held: {', '.join(names)}")
    return names


@command(app, "silo approvals reject")
def reject(
    release: Annotated[str, typer.Argument(help="Such as r1/hospital_a/0.")],
    operator: OperatorOption,
    reason_code: Annotated[str, typer.Option("--reason", help="CONTENT, TIMING, POLICY, UNEXPECTED or OTHER.")],
    text: Annotated[
        str, typer.Option("--text", help="A note of at most 500 characters; it stays at this site, beside the log.")
    ] = "",
    expect_digest: Annotated[str, typer.Option("--expect-digest", help="SHA-256 that you were shown.")] = "",
    expect_policy: Annotated[str, typer.Option("--expect-policy", help="Policy digest that you were shown.")] = "",
    request_id: RequestOption = "",
    config: SiloOption = SILO_YAML,
) -> None:
    """Say no. The coordinator learns only that this silo declined."""
    from fedsilo.audit.record import NOTE_CHARACTERS_MAX, note_text
    from silo.guard.releases import REJECT_CODES

    if reason_code not in REJECT_CODES:
        raise UsageError(f"reason code {reason_code[:40]!r} is not known", hint=f"one of: {', '.join(REJECT_CODES)}")
    if len(text) > NOTE_CHARACTERS_MAX:
        raise UsageError(f"a note has at most {NOTE_CHARACTERS_MAX} characters, this one has {len(text)}")
    loaded = load_site(config)
    why = {"reason_code": reason_code, "reason": note_text(text)}
    arguments = digests_shown(loaded, release, expect_digest, expect_policy) | why
    data = silo_command(loaded, operator, "approvals.reject", arguments, request_id)
    emit(data, f"{data['release']}: rejected{recorded(data)}")


@command(app, "silo approvals defer")
def defer(
    release: Annotated[str, typer.Argument(help="Such as r1/hospital_a/0.")],
    operator: OperatorOption,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=1.0, max=MINUTES_MAX, help="For so long you are not asked.")
    ] = None,
    until: Annotated[str, typer.Option("--until", metavar="TIME", help="Or until then: 2026-07-01T10:30:00Z.")] = "",
    expect_digest: Annotated[str, typer.Option("--expect-digest", help="SHA-256 that you were shown.")] = "",
    expect_policy: Annotated[str, typer.Option("--expect-policy", help="Policy digest that you were shown.")] = "",
    request_id: RequestOption = "",
    config: SiloOption = SILO_YAML,
) -> None:
    """Put an answer off, for yourself only. It stops no clock: what expires is refused."""
    seconds = _until(minutes, until, request_id)
    loaded = load_site(config)
    arguments = digests_shown(loaded, release, expect_digest, expect_policy) | {"until_seconds": seconds}
    data = silo_command(loaded, operator, "approvals.defer", arguments, request_id)
    emit(
        data,
        f"{data['release']}: you are asked again at {utc(data['deferred_until'])}; it expires at "
        f"{utc(data['expires_at'])}{recorded(data)}",
    )


def _until(minutes: float | None, until: str, request_id: str) -> float:
    """Seconds since 1970. Raises UsageError: neither, both, no time, or a repetition that would name another one."""
    if (minutes is None) == (not until):
        raise UsageError("say for how long: --minutes or --until", hint="one of the two")
    if minutes is not None:
        if request_id:
            raise UsageError(
                "--minutes count from now, so the same request id would be given to another command",
                hint=f"--until {utc(time.time() + minutes * 60.0)} says the same each time",
            )
        return time.time() + minutes * 60.0
    try:
        moment = datetime.fromisoformat(until)
    except ValueError as error:
        raise UsageError(f"--until {until[:40]!r} is no time", hint="such as 2026-07-01T10:30:00Z") from error
    if moment.tzinfo is None:
        raise UsageError(f"--until {until[:40]!r} says no time zone", hint=f"{until[:40]}Z is in UTC")
    return moment.timestamp()


@command(app, "silo approvals release")
def release(
    kind: Annotated[str, typer.Argument(help="The halted kind, such as public.responses; or round.open.")],
    operator: OperatorOption,
    expect_digest: Annotated[str, typer.Option("--expect-digest", help="Of the halt, as you were shown it.")] = "",
    request_id: RequestOption = "",
    config: SiloOption = SILO_YAML,
) -> None:
    """Let a kind leave again that its text screens halted, or this silo go on after two transcripts of one round
    (round.open). Look first at what was found: fedsilo audit tail."""
    loaded = load_site(config)
    digest = halt_shown(loaded, kind, expect_digest)
    data = silo_command(loaded, operator, "approvals.release", {"kind": kind, "digest": digest}, request_id)
    state = "may leave again" if data["released"] else "still halted"
    emit(data, f"{data['kind']}: {state}, {len(data['given'])} of {data['needed']} approvers{recorded(data)}")


def halt_shown(config: SiloConfig, kind: str, expected: str = "") -> str:
    """The digest of a halt that a person was shown. Raises NotFoundError: there is none; else as `confirm` does."""
    from fedsilo.control.answers import HaltList, read

    if expected:  # the daemon compares it
        return expected.removeprefix("sha256:")
    with client_of(config) as client:
        halts = {row.kind: row for row in read(HaltList, client.query("halts", {})).halts}
    if kind not in halts:
        raise NotFoundError(f"{kind[:40]!r} is not halted", hint="`silo approvals list` shows what is")
    text = f"{_halt_line(halts[kind])}\nreleasing {kind}"
    confirm(halts[kind].digest, "", text, hint="silo approvals list --json names it")
    return halts[kind].digest


def digests_shown(
    config: SiloConfig,
    release: str,
    digest: str,
    policy: str,
    *,
    facts: str = "",
    acknowledged: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Digests for a signed answer: as given, or, on a terminal, of what is shown here and typed back. With
    `acknowledged`, ids of findings that were read, it is for a yes: that has the digest of the facts too, and the
    other findings are shown and typed back, each alone.

    Raises:
        NotFoundError, ConflictError: there is no such release, or it is no longer held.
        UsageError: no terminal and not both digests, or something else was typed.
    """
    from fedsilo.control.answers import HeldRelease, read

    is_yes = acknowledged is not None
    if digest and policy and (facts or not is_yes):
        given = {"digest": digest.removeprefix("sha256:"), "policy_digest": policy.removeprefix("sha256:")}
        return {"release": release, **given, **({"shown": facts} if is_yes else {})}
    with client_of(config) as client:
        data = client.query("approval", {"release": release})
    shown = read(HeldRelease, data)
    if shown.state != "held":
        raise ConflictError(f"release {shown.id} is {shown.state}, no longer held", code="NOT_HELD")
    needed = "--expect-digest, --expect-policy and --expect-shown" if is_yes else "--expect-digest and --expect-policy"
    require_terminal(needed, f"silo approvals show {release} --json names them")
    columns = max(_COLUMNS_MIN, min(shutil.get_terminal_size().columns, _COLUMNS_MAX)) - 1
    typer.echo(release_text(data, columns=columns))
    opened: dict[str, Any] = {}
    if acknowledged is not None:
        opened = {"acknowledged": _opened(shown.noticed, acknowledged, columns), "shown": shown.shown}
    # Asked for last, so it stands here again: the first line may have scrolled away.
    typer.echo(harmless(f"\nanswering {shown.id}\nsha256:{shown.digest}", lines=True))
    type_back(shown.digest)
    return {
        "release": release,
        "digest": shown.digest,
        "policy_digest": shown.policy.digest,
        "revision": shown.revision,
        **opened,
    }


def _opened(noticed: Sequence[Finding], acknowledged: Sequence[str], columns: int) -> list[str]:
    """Ids of the findings: those that were named, and each other one once it was shown alone and typed back."""
    from fedsilo.views.lines import to_text, whole
    from fedsilo.views.releases import evidence_lines

    left = [one for one in noticed if one.id not in acknowledged]
    for number, one in enumerate(left, 1):
        rows = to_text([*whole(one.says, columns), *evidence_lines(one, columns)])
        typer.echo(harmless(f"\nfinding {number} of {len(left)}\n{rows}\n{one.id}", lines=True))
        type_back(one.id)
    return [*acknowledged, *(one.id for one in left)]
