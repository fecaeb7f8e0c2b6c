"""`silo approvals payload|diff|history`: what would leave, what is beside it, and what was answered before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.output import JsonOption, emit, guarded, table
from fedsilo.cli.silo_control import CONFIG_DEFAULT, ConfigOption, OperatorOption, client_of, command, load_site
from fedsilo.protocol.clocks import utc

if TYPE_CHECKING:
    from fedsilo.cli.silo_folder import SiloFolder
    from fedsilo.control.client import ControlClient
    from silo.config import SiloConfig

PAGE_ROWS = 500  # the daemon's most
PEOPLE_SHOWN = 8
OfflineOption = Annotated[
    bool, typer.Option("--offline", help="Read the site's state folder; no daemon is asked, and it need not run.")
]
ReleaseArgument = Annotated[str, typer.Argument(help="Such as r1/hospital_a/0.")]


@contextmanager
def source_of(site: SiloConfig, *, offline: bool) -> Iterator[tuple[ControlClient | SiloFolder, list[str]]]:
    """What answers queries, and what a person is told of it: the daemon, or what its state folder holds.

    Raises:
        NotFoundError: there is no ledger in the folder. OperationError: it cannot be read.
    """
    if not offline:
        with client_of(site) as client:
            yield client, []
        return
    from fedsilo.cli.silo_folder import SiloFolder

    folder = SiloFolder(site.state_dir, site.silo, site.coordinator.address)
    yield folder, [folder.banner()]


def every_page(client: ControlClient | SiloFolder, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All releases that the arguments choose, newest first, page after page."""
    releases: list[Any] = []
    before = None
    while True:
        page = client.query("approvals", {**arguments, "limit": PAGE_ROWS, "before": before})
        releases += page["releases"]
        before = page.get("next")
        if before is None:
            return {"releases": releases}


def add_to(app: typer.Typer) -> None:
    """The commands below, under `silo approvals`."""
    app.command("payload")(payload)
    app.command("diff")(diff)
    app.command("history")(history)


@guarded("silo approvals payload")
def payload(
    release: ReleaseArgument, operator: OperatorOption, config: ConfigOption = CONFIG_DEFAULT,
    json_output: JsonOption = False,
) -> None:  # fmt: skip
    """What would leave: answers beside their public prompts, tensors by name, shape, norm and histogram. Recorded."""
    site = load_site(config)
    with client_of(site) as client:
        shown = client.query("approval", {"release": release})
    ticket = command(site, operator, "approvals.payload", {"release": release, "digest": shown["digest"]}, "")
    with client_of(site) as client:
        data = client.query("approvals.payload", {"ticket": ticket["ticket"]})
    emit("silo approvals payload", data, json_output=json_output, text=lambda: payload_text(data))


def payload_text(data: Mapping[str, Any]) -> str:
    """Linear text; `emit` spells out what a terminal obeys or hides."""
    lines = [f"{data['release']} {data['kind']}, {data['bytes']} bytes, sha256:{data['sha256']}"]
    for row in data.get("answers", ()):
        known = row["prompt"] is not None
        lines += ["", f"public row {row['row']}", *_quoted(row["prompt"] if known else "not in this site's public set")]
        for number, text in enumerate(row["answers"], 1):
            lines += [f"answer {number} of {len(row['answers'])}, {len(text)} characters", *_quoted(text)]
    if "tensors" in data:
        rows = [
            (one["name"], "x".join(map(str, one["shape"])), one["type"], one["norm"], _histogram(one["histogram"]))
            for one in data["tensors"]
        ]
        edges = ", ".join(f"{edge:g}" for edge in data["edges"])
        lines += [table(("tensor", "shape", "type", "L2", "negative|zero|positive"), rows), f"counts from {edges} up"]
    if "content" in data:
        import json

        lines.append(json.dumps(data["content"], indent=2, ensure_ascii=False))
    return "\n".join(lines)


def _quoted(text: str) -> list[str]:
    """Each line behind a bar, so that no answer can pass for a line of ours."""
    return [f"  | {row}" for row in text.split("\n")]


def _histogram(counts: Mapping[str, Any]) -> str:
    bad = f" not finite {counts['not_finite']}" if counts["not_finite"] else ""
    return f"{_counts(counts['negative'])}|{counts['zero']}|{_counts(counts['positive'])}{bad}"


def _counts(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


@guarded("silo approvals diff")
def diff(
    release: ReleaseArgument, config: ConfigOption = CONFIG_DEFAULT, offline: OfflineOption = False,
    json_output: JsonOption = False,
) -> None:  # fmt: skip
    """All of a release beside the last one of its kind that left, or, where none has, that did not."""
    with source_of(load_site(config), offline=offline) as (source, told):
        data = source.query("approval.comparison", {"release": release})
    emit("silo approvals diff", data, json_output=json_output, text=lambda: diff_text(data), warnings=told)


def diff_text(data: Mapping[str, Any]) -> str:
    against = data["against"]
    if against is None:
        return f"{data['release']}: {data['note']}"
    state = against.get("state", "left")
    people = ", ".join(against["approved_by"])
    became = [f"left {against['at']}", f"approved by {people}" if people else "nobody was asked"]
    if state != "left":
        by = ", ".join(against["rejected_by"])
        became = [f"held since {against['at']}", f"{state}{f' by {by}' if by else ''}: it did not leave"]
    lines = [
        f"{data['release']} against round {against['round']} of {against['run']}: {became[0]}",
        became[1],
        table(
            ("", "what", "before", "now"),
            [("DIFFERS" if row["differs"] else "same", row["what"], row["before"], row["now"]) for row in data["rows"]],
        ),
    ]
    if data["tensors"]:
        rows = [
            (one["name"], _number(one["before"]), _number(one["now"]), f"x{one['times']:.2f}" if one["times"] else "")
            for one in data["tensors"]
        ]
        lines += [
            f"L2 of {len(rows)} of {data['tensors_total']} tensors, largest change first",
            table(("tensor", "before", "now", "times"), rows),
        ]
    return "\n".join([*lines, *([f"note: {data['note']}"] if data["note"] else [])])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


@guarded("silo approvals history")
def history(
    config: ConfigOption = CONFIG_DEFAULT,
    kind: Annotated[str, typer.Option("--kind", help="Only of this message kind.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=500, help="Rows of one page.")] = 100,
    before: Annotated[int | None, typer.Option("--before", min=0, help="`next` of the page before.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every page.")] = False,
    offline: OfflineOption = False,
    json_output: JsonOption = False,
) -> None:
    """Releases that were ever held, newest first: who answered, when, and on which bytes."""
    chosen = {"kind": kind} if kind else {}
    with source_of(load_site(config), offline=offline) as (source, told):
        if everything:
            data = every_page(source, chosen)
        else:
            data = source.query("approvals", {**chosen, "limit": limit, "before": before})
    rows = [
        (row["id"], row["kind"], row["state"], _answers(row), row["digest"][:12], row["policy_digest"][:8])
        for row in data["releases"]
    ]
    more = f"\nolder ones: --before {data['next']}" if data.get("next") is not None else ""
    header = ("release", "kind", "state", "answers", "sha256", "policy")
    emit(
        "silo approvals history", data, json_output=json_output,
        text=lambda: (table(header, rows) if rows else "nothing was ever held") + more, warnings=told,
    )  # fmt: skip


def _answers(row: Mapping[str, Any]) -> str:
    """Who answered what and when; of a no also the reason code and the note, where the daemon tells them."""
    told = (
        " ".join(filter(None, (one["person"], one["verdict"], one.get("reason"), one["at"], _noted(one))))
        for one in row["answers"]
    )
    return ", ".join(told) or "nobody"


def _noted(answer: Mapping[str, Any]) -> str:
    """What a person wrote to a no, in quotes."""
    return f'"{answer["note"]}"' if answer.get("note") else ""


def answered_lines(approvers: Mapping[str, Any]) -> list[str]:
    """How many said yes of how many that are needed, and a line for each answer: a no is none of them.

    Args:
        approvers: {"needed", "roles", "people", "given"} of the query `approval`; given has yes and no, and people are
            the names behind the roles, where they are known.
    """
    given, people = approvers["given"], approvers.get("people", ())
    count = sum(one["verdict"] == "approve" for one in given)
    more = [f"and {len(people) - PEOPLE_SHOWN} more"] if len(people) > PEOPLE_SHOWN else []
    roles, names = " or ".join(approvers["roles"]), ", ".join([*people[:PEOPLE_SHOWN], *more])
    who = f", by {roles}{': ' if names else ''}{names}" if roles else ""
    words = {"approve": "approved", "reject": "REJECTED"}
    return [
        f"approvals {count} of {approvers['needed']} given{who}",
        *(
            "  " + " ".join(
                [f"{words.get(one['verdict'], one['verdict'])} by {one['person']} at {utc(one['at'])}",
                 *([f"reason {one['reason']}"] if one.get("reason") else []), *filter(None, [_noted(one)])]
            )
            for one in given
        ),
    ]  # fmt: skip
