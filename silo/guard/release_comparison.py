"""All of a held release beside the last one of its kind that left, for whoever wants more than the one line of it;
where none has left, beside the last one that did not.

Figures, digests and names only. Tensors are compared by their norms, one by one where both messages still lie here, the
largest change first; a value of a tensor, an answer or a prompt is never shown.
Does not show: what changed inside of equal norms, and nothing of a message that was not archived.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedsilo.audit.message_index import utc
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array
from fedsilo.protocol.errors import FedSiloError
from fedsilo.protocol.services import OUTBOUND_KINDS
from silo.guard.ledger import Ledger, Release
from silo.guard.messages import parsed
from silo.guard.release_findings import KEPT_IN, Against, ends_of

TENSORS_SHOWN = 12
BYTES_MAX = 64 << 20  # of both messages; a fraction of a second, once for each release
FIGURES_MAX = 80
# Facts that are of the one message by their nature, and so always differ or are shown elsewhere.
_OWN = frozenset({"now", "round", "step", "run", "kind", "direction", "sequence", "history", "sender", "peer"})


class ReleaseComparison:
    """Args:
    ledger: what left, and the bytes of what still lies here. One that is opened for reading has no bytes.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._compared: dict[tuple[str, str], dict[str, Any]] = {}  # of the two that were asked for last

    def comparison(
        self,
        release: Release,
        last: Against | None,
        *,
        policy_digest: str,
        destination: Mapping[str, str],
        told: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Args:
            release: held, or over.
            last, told: the one it is compared with, and what is said of that, as `ReleaseView.beside`.
            policy_digest: of the policy in force.
            destination: address and certificate of the far end.

        Returns:
            `rows` of {what, before, now, differs}, `tensors` of {name, before, now, times} with norms, `note` where
            something could not be compared, and `against`: what it is compared with, null for a first release. Its
            `state` is "left", or what became of one that did not leave, and `rejected_by` names who said no to it.
        """
        if last is None:
            return {"release": release.id, "kind": release.kind, "against": None, "rows": [], "tensors": [],
                    "tensors_total": 0, "note": "first release, nothing to compare"}  # fmt: skip
        kept = self._ledger.kept_of_release(release.id)
        parts = self._parts(release, last)
        rows = [*_identity(release, last, kept, policy_digest, destination), *_figures(release.facts, last.facts)]
        notes = [*told]
        if not last.facts:
            notes.append("no person was asked for that one, so of its figures only the size is known")
        if kept.get("base") and not kept.get("ended_in") and release.round > 1:
            notes.append("what the round before ended in is not known, so the base is compared with nothing")
        item, answers = last.item, self._ledger.approvals(last.release) if last.release else []
        return {
            "release": release.id,
            "kind": release.kind,
            "against": {
                "run": item.run, "round": item.round, "step": item.step, "digest": item.digest, "at": utc(item.at),
                "state": item.state if item.state in KEPT_IN else "left",
                "approved_by": [one.person for one in answers if one.verdict == "approve"],
                "rejected_by": [one.person for one in answers if one.verdict == "reject"],
            },
            "rows": [*rows, *parts["rows"]],
            "tensors": parts["tensors"],
            "tensors_total": parts["total"],
            "note": "; ".join([*notes, *parts["notes"]]),
        }  # fmt: skip

    # ---- what lies in both messages ----------------------------------------------------------------

    def _parts(self, release: Release, last: Against) -> dict[str, Any]:
        key = release.digest, last.item.digest
        if key not in self._compared:
            self._compared = {key: self._measured(release, last)}
        return self._compared[key]

    def _measured(self, release: Release, last: Against) -> dict[str, Any]:
        found: dict[str, Any] = {"rows": [], "tensors": [], "total": 0, "notes": []}
        payloads = getattr(self._ledger, "payloads", None)
        if payloads is None or last.item.digest not in payloads or release.digest not in payloads:
            return found | {"notes": ["the bytes of both are not here, so nothing inside of them is compared"]}
        if release.payload_bytes + last.item.payload_bytes > BYTES_MAX:
            return found | {"notes": ["too big to compare what lies inside"]}
        try:
            (body, now), (body_before, before) = (
                parsed(release.kind, payloads.read(digest), OUTBOUND_KINDS) for digest in key_of(release, last)
            )
        except FedSiloError:
            return found | {"notes": ["one of both cannot be read"]}
        if now is not None and before is not None:
            tensors = list(_tensors(now, before))
            return found | {"tensors": tensors[:TENSORS_SHOWN], "total": len(tensors)}
        if isinstance(body, pb.PublicResponses) and isinstance(body_before, pb.PublicResponses):
            asked = {prompt.prompt_index for prompt in body.prompts}
            earlier = {prompt.prompt_index for prompt in body_before.prompts}
            return found | {"rows": [_row("public prompts, of them not in that one", 0, len(asked - earlier))]}
        return found


def key_of(release: Release, last: Against) -> tuple[str, str]:
    return release.digest, last.item.digest


def _row(what: str, before: Any, now: Any) -> dict[str, Any]:
    return {"what": what, "before": before, "now": now, "differs": before != now}


def _identity(
    release: Release, last: Against, kept: Mapping[str, Any], policy_digest: str, destination: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    yield _row("bytes", last.item.payload_bytes, release.payload_bytes)
    yield _row("sha256", last.item.digest, release.digest)
    if last.policy_digest:
        yield _row("policy", last.policy_digest, policy_digest)
    went = last.kept.get("destination", {})
    if went:
        for what, before, now in zip(("address", "certificate"), ends_of(went), ends_of(destination), strict=True):
            yield _row(what, before, now)
    if kept.get("base") and kept.get("ended_in"):
        yield _row("base, and what the last round ended in", str(kept["ended_in"]), str(kept["base"]))


def _figures(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Facts that are one number or word, and numbers by name one level down; those that differ first."""
    ours, theirs = dict(_flat(now)), dict(_flat(before))
    names = [name for name in ours if name in theirs] if theirs else []
    rows = [_row(name, theirs[name], ours[name]) for name in names]
    return sorted(rows, key=lambda row: not row["differs"])[:FIGURES_MAX]


def _flat(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if name in _OWN:
            continue
        if isinstance(value, str | int | float):
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", one) for key, one in value.items() if isinstance(one, int | float))


def _tensors(now: Mapping[str, Array], before: Mapping[str, Array]) -> Iterator[dict[str, Any]]:
    """By how much each norm changed, in either direction; a tensor that only one of both has comes first."""
    rows = []
    for name in {**now, **before}:
        ours, theirs = _norm(now.get(name)), _norm(before.get(name))
        times = ours / theirs if ours and theirs else None
        rows.append({"name": name, "before": theirs, "now": ours, "times": times})
    change = lambda row: math.inf if row["times"] is None else abs(math.log(row["times"]))  # noqa: E731
    yield from sorted(rows, key=change, reverse=True)


def _norm(values: Array | None) -> float | None:
    return None if values is None else float(np.linalg.norm(np.ravel(values).astype(np.float64)))
