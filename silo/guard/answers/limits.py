"""The query `limits`: every limit of the policy in force that counts over messages, how much of it is used, and how
many rounds like the last one the rest is good for.

A limit of a single message (its bytes, its norm, its tokens) counts nothing and is not here: the decision on each
message shows it. What is used is read from the ledger, as the next decision will. For whoever may open the control
socket: numbers only. DP has no ledger, and "dp" says "off".

Does not promise: the forecast takes the next rounds to be as the last complete one, counts messages of content only,
and a policy that changes changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.audit.index import HOLD_ENDS, LogIndex
from fedsilo.control.answers import CapacityRow, Forecast, LimitRow, Limits, SpentRow, read, read_rows
from fedsilo.control.server import QueryArguments
from fedsilo.protocol.kinds import KINDS, of_place
from policies.capacity import NOT_COUNTED, capacities
from policies.history import MINUTE_SECONDS, HistoryBook
from policies.model import UNLIMITED, Policy, PolicyFile
from policies.schema import LoraSchema
from silo.guard.decisions import RunView
from silo.guard.ledger import Ledger

RELEASES_SHOWN = 50
ROUND_ROWS, ROUND_ROWS_MAX = 250, 2_000  # messages looked at to find the last complete round, at a time and in all
ROUNDS_BESIDE = 4
FIGURES = of_place("past round or base")  # content, and no round's worth of it
_GB = 10**9
ALL, CONTENT, CONTROL, POLL = "all", "content", "control.*", "control.poll"

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Limit:
    """One limit of the policy, and how much of it is used.

    Attributes:
        path: the key in the policy.
        kind: of the messages that count.
        used, most: in `unit`.
        window: minute, round, match, day (UTC), or life: as long as the site keeps its state.
        counts: of a day's limit, what a round's messages add to it: bytes, or this kind's units; else empty.
    """

    path: KeyPath
    kind: str
    used: int
    most: int
    unit: str
    window: str
    counts: str = ""

    def row(self, policy: Policy) -> LimitRow:
        return LimitRow(
            limit=self.path[-1],
            kind=self.kind,
            used=self.used,
            max=self.most,
            unit=self.unit,
            window=self.window,
            line=line_of(policy, self.path),
        )


class LimitsView:
    """Answers the query `limits`.

    Args:
        ledger: what was counted.
        index: what left.
        schema: this site's adapter.
        now_seconds: UTC; no earlier than the ledger's latest time counts.
    """

    def __init__(
        self,
        ledger: Ledger,
        index: LogIndex,
        *,
        policy: Callable[[], Policy],
        view: Callable[[], RunView],
        schema: LoraSchema,
        now_seconds: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._index = index
        self._policy = policy
        self._view = view
        self._schema = schema
        self._now_seconds = now_seconds
        self._capacity: tuple[str, tuple[CapacityRow, ...]] = ("", ())

    def limits(self, arguments: Mapping[str, Any]) -> Limits:
        """Return every counting limit.

        Raises:
            UsageError: an argument; it takes none.
            FedSiloError: the log cannot be read.
        """
        QueryArguments(arguments)
        policy, view = self._policy(), self._view()
        book = HistoryBook.from_json(self._ledger.book or {})
        now = max(self._now_seconds(), self._ledger.latest_time)
        stored = sum(self._ledger.payloads.sizes.values())
        limits = list(counted(policy.file, book, view, now=now, stored_bytes=stored))
        if self._capacity[0] != policy.digest:
            rows = [row.to_json() for row in capacities(policy, self._schema)]
            self._capacity = policy.digest, read_rows(CapacityRow, rows)
        page = self._index.page("egress", limit=RELEASES_SHOWN, verdict="allow")
        return Limits(
            rows=tuple(limit.row(policy) for limit in limits),
            capacity=self._capacity[1],
            not_counted=NOT_COUNTED,
            dp="off",
            forecast=forecast(policy, limits, self._last_round(view)),
            releases=tuple(read(SpentRow, {**row, "at": row["time"]}) for row in page.rows),
        )

    def _last_round(self, view: RunView) -> list[dict[str, Any]]:
        """Return what the newest finished round let out; of a first round that is still open, what it let out while
        nothing of it is held, since what leaves while an update waits for people says little of a whole round. What
        people rejected counts, since the next round asks for it again. A round of nothing but figures is left out."""
        rounds: dict[tuple[str, int], list[dict[str, Any]]] = {}
        before: int | None = None
        for _ in range(ROUND_ROWS_MAX // ROUND_ROWS):
            page = self._index.page("egress", before=before, limit=ROUND_ROWS, verdict="allow")
            for row in page.rows:
                here = row["run"], row["round"]
                if all(here) and not row["kind"].startswith("control."):
                    rounds.setdefault(here, []).append(row)
            before = page.next
            # An evaluation may leave some rounds late, so messages of neighbouring rounds stand between each other.
            if before is None or len(rounds) > ROUNDS_BESIDE:
                break
        for row in self._index.page("egress", limit=ROUND_ROWS, verdict="hold").rows:
            here = row["run"], row["round"]
            let_out = {(each["kind"], each["step"]) for each in rounds.get(here, ())}
            kept_back = row["outcome"] in HOLD_ENDS and row["outcome"] != "approved"
            if kept_back and (row["kind"], row["step"]) not in let_out:
                rounds.setdefault(here, []).append(row)
        newest = sorted(rounds, key=lambda place: -max(row["seq"] for row in rounds[place]))
        whole = [place for place in newest if any(row["kind"] not in FIGURES for row in rounds[place])]
        open_round = view.run, view.round
        held = any((release.run, release.round) == open_round for release in self._ledger.releases("held"))
        before = any(place != open_round and place[0] == view.run for place in whole)
        if open_round in whole and (held or before):
            whole.remove(open_round)
        return rounds[whole[0]] if whole else []


# ---- what counts -----------------------------------------------------------------------------------


def counted(file: PolicyFile, book: HistoryBook, view: RunView, *, now: float, stored_bytes: int) -> Iterator[Limit]:
    """Every limit of a policy that is compared with a count over messages, as the rules compare it.

    Args:
        file: the policy.
        book: what was counted.
        view: where the run stands.
        now: UTC seconds.
        stored_bytes: payloads kept on the disk.
    """
    count, place = book.counts.get, f"{view.run}/{view.round}"
    today, budgets = time.strftime("%Y-%m-%d", time.gmtime(now)), file.budgets
    yield Limit(("budgets", "round_bytes"), CONTENT, count(f"{place}/bytes", 0), budgets.round_bytes, "bytes", "round")
    day_bytes = book.days.get(today, 0)
    yield Limit(("budgets", "day_bytes"), ALL, day_bytes, budgets.day_bytes, "bytes", "day", "bytes")
    for key, bucket, kind in (
        ("messages_per_minute", "content", CONTENT),
        ("control_messages_per_minute", "control", CONTROL),
        ("polls_per_minute", "poll", POLL),
    ):
        recent = sum(moment > now - MINUTE_SECONDS for moment in book.recent.get(bucket, ()))
        yield Limit(("budgets", key), kind, recent, getattr(budgets, key), "messages", "minute")
    for name, field in type(file.egress).model_fields.items():
        block, kind = getattr(file.egress, name), field.alias or name
        if block is None or kind == "control":
            continue
        path = "egress", kind
        if hasattr(block, "per_round"):
            unit = "sets" if kind in file.egress.updates else "messages"
            yield Limit((*path, "per_round"), kind, count(f"{place}/{kind}", 0), block.per_round, unit, "round")
        if kind == "public.responses":
            for key, counter, unit in (
                ("max_responses_per_round", "responses", "responses"),
                ("max_tokens_per_round", "tokens", "tokens"),
                ("max_bytes_per_round", "text_bytes", "bytes"),
            ):
                yield Limit((*path, key), kind, count(f"{place}/{counter}", 0), getattr(block, key), unit, "round")
            if block.max_bytes_per_day != UNLIMITED:
                used = book.units.get(today, {}).get(kind, 0)
                yield Limit((*path, "max_bytes_per_day"), kind, used, block.max_bytes_per_day, "bytes", "day")
        if hasattr(block, "per_match"):
            used = count(f"{view.run}/match/{view.asked.match}/{kind}", 0)
            yield Limit((*path, "per_match"), kind, used, block.per_match, "messages", "match")
        if hasattr(block, "max_per_day"):
            used = book.units.get(today, {}).get(kind, 0)
            yield Limit((*path, "max_per_day"), kind, used, block.max_per_day, KINDS[kind].units, "day", kind)
        if (most := getattr(block, "max_hits_per_day", None)) is not None:
            used = book.screen_hits.get(today, {}).get(kind, 0)
            yield Limit((*path, "max_hits_per_day"), kind, used, most, "hits", "day")
    most = file.retention.outbox_max_gb * _GB
    # What was answered makes room for what comes, so nothing is forecast from it.
    yield Limit(("retention", "outbox_max_gb"), CONTENT, stored_bytes, most, "bytes", "life")


def forecast(policy: Policy, limits: list[Limit], last: list[dict[str, Any]]) -> Forecast:
    """Return how many rounds like the last one still fit.

    Args:
        policy: in force.
        limits: as `counted`.
        last: messages of the last round.
    """
    if not last:
        return Forecast(rounds_left=None, bound_by="no round has let anything out yet")
    costs = {"bytes": sum(row["bytes"] for row in last)}
    for row in last:
        costs[row["kind"]] = costs.get(row["kind"], 0) + row["items"]
    fits = [
        (max(0, limit.most - limit.used) // costs[limit.counts], limit)
        for limit in limits
        if costs.get(limit.counts, 0) > 0
    ]
    if not fits:
        return Forecast(rounds_left=None, bound_by="no limit of a day counts what a round lets out")
    left, bound = min(fits, key=lambda item: item[0])
    by = f"{bound.path[-1]} of this UTC day ({line_of(policy, bound.path)})"
    return Forecast(rounds_left=left, bound_by=by)


def line_of(policy: Policy, path: KeyPath) -> str:
    """File and line of the value that binds: of the site's own file, or of the charter where that one is tighter."""
    value = _value(policy.file, path)
    part = next((each for each in policy.parts if _value(each.file, path) == value), policy.own)
    return f"{Path(part.source).name}:{part.line_of(path)}"


def _value(file: PolicyFile, path: KeyPath) -> object:
    value: object = file
    for key in path:
        value = getattr(value, key.replace(".", "_"), None)
    return value
