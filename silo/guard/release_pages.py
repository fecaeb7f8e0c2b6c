"""Pages of what the ledger keeps: releases that were held, and content that was let out. For whoever has a ledger open,
the daemon or a reader of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsilo.audit.message_index import utc
from fedsilo.control.query_arguments import Asked
from silo.guard.ledger import Ledger, Release

PAGE_DEFAULT, PAGE_MAX = 100, 500
STATES = ("held", "approved", "rejected", "expired", "missed", "denied")


def release_page(ledger: Ledger, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Releases that were ever held, newest first: {before, limit, state, kind}, each optional.

    Returns:
        `releases`, `total` of them, and `next` to pass as `before`, null at the end.

    Raises:
        UsageError: an argument.
    """
    asked = Asked(arguments, "before", "limit", "state", "kind")
    limit = asked.limit(default=PAGE_DEFAULT, most=PAGE_MAX)
    rows, total = ledger.release_page(
        state=asked.text("state", among=STATES), kind=asked.text("kind"), before=asked.number("before"),
        limit=limit + 1,
    )  # fmt: skip
    shown = rows[:limit]
    return {
        "releases": [_row(ledger, release) for _, release in shown],
        "total": total,
        "next": shown[-1][0] if len(rows) > limit else None,
    }


def _row(ledger: Ledger, release: Release) -> dict[str, Any]:
    answers = ledger.approvals(release.id)
    return {
        "id": release.id,
        "kind": release.kind,
        "run": release.run,
        "round": release.round,
        "step": release.step,
        "bytes": release.payload_bytes,
        "digest": release.digest,
        "policy_digest": release.policy_digest,
        "revision": release.revision,
        "state": release.state,
        "held_since": release.requested_at,
        "expires_at": release.expires_at,
        "needed": release.persons,
        "given": [one.person for one in answers if one.verdict == "approve"],
        "answers": [
            {
                "person": one.person,
                "verdict": one.verdict,
                "at": utc(one.at),
                "reason": one.reason_code,
                "note": one.reason,
            }
            for one in answers
        ],
    }


def ledger_page(ledger: Ledger, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Runs, budget counts, and content that was let out, newest first: {before, limit}, each optional. There is no
    ledger of a privacy budget, and it says so.

    Raises:
        UsageError: an argument.
    """
    asked = Asked(arguments, "before", "limit")
    limit = asked.limit(default=PAGE_DEFAULT, most=PAGE_MAX)
    rows, total = ledger.outbox_page(asked.number("before"), limit + 1)
    shown = rows[:limit]
    return {
        "dp": "off: no privacy budget is kept, and none is claimed",
        "runs": ledger.runs(),
        "history": ledger.book or {},
        "content": [
            {
                "kind": item.kind, "run": item.run, "round": item.round, "step": item.step, "digest": item.digest,
                "bytes": item.payload_bytes, "state": item.state, "at": utc(item.at),
            }
            for item in shown
        ],
        "total": total,
        "next": shown[-1].id if len(rows) > limit else None,
    }  # fmt: skip
