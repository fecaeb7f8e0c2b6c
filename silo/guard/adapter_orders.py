"""What people may order about global adapters: accept a held one anyway, refuse it, go back to an earlier one (T52).

Each order names the run and the digest that the person was shown, and is recorded before it is done (T36, T39). None of
them sends anything but the one code: an accepted adapter is trained on when a round begins with it, or with one that
passes against it; the round that is open goes on without this silo.
Does not stop: what this silo sent while it trained on an adapter that is rolled back; that is in the federation's mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from certs.commands import VerifiedCommand
from fedsilo.control.desk import ControlDesk
from fedsilo.protocol.errors import WireCode
from silo.guard.gate import Gate
from silo.guard.run import RunManager, SiloRun

Work = Callable[[VerifiedCommand], Any]


class _Orders(Protocol):
    @property
    def runs(self) -> RunManager: ...

    @property
    def gate(self) -> Gate: ...

    def run_of(self, command: VerifiedCommand) -> SiloRun: ...

    def recorded(
        self, event: str, command: VerifiedCommand, *, needed: bool, detail: Mapping[str, Any]
    ) -> dict[str, int]: ...


class AdapterOrders:
    """Args:
    orders: what all orders share.
    """

    def __init__(self, orders: _Orders) -> None:
        self._orders = orders

    def register(self, desk: ControlDesk, on_loop_with: Callable[[Work], Work]) -> None:
        desk.register_query("adapters", self.view)
        for name, work in (
            ("adapter.accept", self.accept), ("adapter.refuse", self.refuse), ("adapter.rollback", self.roll_back),
        ):  # fmt: skip
            desk.register_command(name, name, on_loop_with(work))

    def view(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The query `adapters`."""
        return self._orders.runs.acceptance.view(arguments)

    def accept(self, command: VerifiedCommand) -> dict[str, Any]:
        """Arguments {run, digest}. Raises NotFoundError, ConflictError, OperationError."""
        digest = self._held(command)
        told = self._orders.recorded("adapter.accept", command, needed=True, detail={"adapter": digest})
        runs = self._orders.runs
        runs.change_view(lambda view: runs.acceptance.accept(digest, view))
        return {"adapter": digest, "accepted": True, **told}

    def refuse(self, command: VerifiedCommand) -> dict[str, Any]:
        """Arguments {run, digest}. Raises as `accept`."""
        digest = self._held(command)
        told = self._orders.recorded("adapter.refuse", command, needed=True, detail={"adapter": digest})
        self._orders.runs.acceptance.refuse(digest)
        return {"adapter": digest, "accepted": False, **told}

    def roll_back(self, command: VerifiedCommand) -> dict[str, Any]:
        """Arguments {run, to}. Raises as `Acceptance.target`; OperationError: the log, or the disk, takes nothing."""
        run, runs = self._orders.run_of(command), self._orders.runs
        digest = runs.acceptance.target(run.plan.run, str(command.arguments.get("to", "")))
        told = self._orders.recorded("adapter.rollback", command, needed=True, detail={"adapter": digest})
        runs.change_view(lambda view: runs.acceptance.roll_back(digest, view))
        if left := runs.acceptance.is_refused(self._orders.gate.view.base_digest):
            runs.abandon_round(WireCode.ADAPTER_REFUSED)
        return {"adapter": digest, "round_left": left, **told}

    def _held(self, command: VerifiedCommand) -> str:
        run, digest = self._orders.run_of(command), str(command.arguments.get("digest", "")).removeprefix("sha256:")
        self._orders.runs.acceptance.require_held(run.plan.run, digest)
        return digest
