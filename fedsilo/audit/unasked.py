"""What left, by whether people were asked about it, and by which line of the policy they were not.

Counted from the records that say a message was sent, each by the decision that it names: the number of the records of
people's yes stands there, and of the rule `approvals` the line of the policy that it read.
What this cannot show: that a record told the truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from fedsilo.audit.counting import count_of, mapping_of, text_of
from fedsilo.audit.poll_window import messages_of

ROWS_MAX = 500
_DECISIONS_MAX = 4096  # whose messages may still be sent, or sent again: honestly that comes at once
CONTROL = "control."
# What became of a message: people said yes, nobody was asked, or the decision is not in the log any more.
ASKED, UNASKED, NOT_TOLD = "asked", "unasked", "not told"
Why = tuple[str, str, str, int]  # kind, policy, which file of it, line; 0 where no line speaks of the kind


class Unasked:
    """Messages that left, record by record."""

    def __init__(self) -> None:
        self._decisions: dict[int, tuple[str, Why]] = {}
        self._content: Counter[str] = Counter()
        self._control = 0
        self._rows: dict[Why, list[int]] = {}  # -> messages, bytes, first and last record
        self._not_listed = 0

    def decided(self, record: Mapping[str, Any]) -> None:
        """An `egress.decision`."""
        if record["decision"] != "allow":
            return
        asked = bool(mapping_of(record.get("link")).get("approvals"))
        rule: Mapping[str, Any] = next((one for one in record.get("rules", ()) if one.get("rule") == "approvals"), {})
        file = "charter" if rule.get("file") == "charter" else "policy"
        policy = text_of(mapping_of(record.get("policy")).get("effective"))
        why = (record["kind"], policy, file if rule else "", count_of(rule.get("line")))
        self._decisions[record["seq"]] = (ASKED if asked else UNASKED, why)
        if len(self._decisions) > _DECISIONS_MAX:
            del self._decisions[next(iter(self._decisions))]

    def sent(self, record: Mapping[str, Any], kind: str) -> None:
        """An `egress.sent`. kind: under which it is counted."""
        found = self._decisions.get(record["link"].get("decision", -1))
        became = found[0] if found else NOT_TOLD
        if kind.startswith(CONTROL):
            self._control += messages_of(record)
        else:
            self._content[became] += 1
        if found is None or became == ASKED:
            return
        why = (kind, *found[1][1:])
        if why not in self._rows and len(self._rows) >= ROWS_MAX:
            self._not_listed += 1
            return
        row = self._rows.setdefault(why, [0, 0, record["seq"], record["seq"]])
        row[0], row[1], row[3] = row[0] + messages_of(record), row[1] + record["payload"]["bytes"], record["seq"]

    def to_json(self) -> dict[str, Any]:
        """`left_asked`: messages with content by whether people said yes, and those of the protocol; `left_unasked`:
        a row for each kind and line."""
        return {
            "left_asked": {
                "asked": self._content[ASKED], "unasked": self._content[UNASKED],
                "not_told": self._content[NOT_TOLD], "control": self._control,
            },
            "left_unasked": [
                {
                    "kind": kind, "policy": policy, "file": file, "line": line, "messages": messages,
                    "bytes": size, "first": first, "last": last,
                }
                for (kind, policy, file, line), (messages, size, first, last) in sorted(
                    self._rows.items(), key=lambda item: (item[0][0].startswith(CONTROL), item[0])
                )
            ],
            "left_unasked_not_listed": self._not_listed,
        }  # fmt: skip
