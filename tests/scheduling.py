"""Who runs beside whom under `--numprocesses`: two of the workers start federations, the others have the rest.

A federation waits half of its time, for a person, a deadline or a process that ends; the rest of the suite computes.
Side by side they keep two cores at work; one after the other they take minutes longer. More than two federations at
a time would wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

FEDERATIONS_MAX = 2
FOLDER = "tests/loopback/"
# Each of these has one federation for all its tests, and for those of its neighbours in the row.
SHARE_DEMO = ("test_demo", "test_T38_logs")
SHARE_SITES = (
    "test_hold_and_approve", "test_killed_silo", "test_methods", "test_policy_reload", "test_report",
    "test_control_queries", "test_T10_connect", "test_console_terminal",
)  # fmt: skip
# Each of their tests has a federation of its own, if it has one.
APART = ("test_interrupt", "test_tutorial", "test_bad_certificates", "test_bad_files", "test_bad_machine")
# The order in which federations begin. Long parts come first, so that the end finds all at work; and the first two need
# a base model each, which takes most of a minute where it was never built.
FIRST = (
    *SHARE_SITES, "test_other_peoples_text", "test_hostile_parties", *SHARE_DEMO, "test_interrupt", "test_tutorial",
)  # fmt: skip


def starts_federations(scope: str) -> bool:
    return scope.startswith(FOLDER)


class FederationsBesideTheRest(LoadScopeScheduling):
    """Gives a worker all tests of a file, or all that share a federation, in the order of collection."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        module = Path(file).stem
        if not starts_federations(file):
            return file
        if module in SHARE_SITES:
            return f"{FOLDER}sites"
        if module in SHARE_DEMO:
            return f"{FOLDER}demo"
        return nodeid if module in APART else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        """As the class above does, of what this worker takes first."""
        self.workqueue.move_to_end(next(self._wanted(node)), last=False)
        super()._assign_work_unit(node)

    def _wanted(self, node: WorkerController) -> Iterator[str]:
        federated = node in self.nodes[:FEDERATIONS_MAX]
        yield from (scope for scope in self.workqueue if starts_federations(scope) == federated)
        yield from self.workqueue
