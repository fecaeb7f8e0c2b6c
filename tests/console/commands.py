"""A silo's control server behind a real unix socket, two people with keys, and programs that are run against it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from certs.commands import VerifiedCommand
from fedsilo.control.server import ControlServer
from fedsilo.protocol.errors import ConflictError
from tests.console.states import DIGEST

WAIT_SECONDS = 20
ALICE = ("--operator", "alice")


@dataclass
class Site:
    """Alice is an approver of it, bob a viewer.

    Attributes:
        authority: PEM of the site's CA.
        approved: commands that `approve` took.
        answers: by query; a value, or a function of the arguments.
    """

    desk: ControlServer
    socket: Path
    folder: Path
    authority: bytes
    approved: list[VerifiedCommand] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)

    def person(self, name: str) -> tuple[Path, Path]:
        return self.folder / f"{name}.crt", self.folder / f"{name}.key"

    def approve(self, command: VerifiedCommand) -> Mapping[str, Any]:
        """Carry `approvals.approve` out; a test may put another function in its place."""
        if command.arguments["digest"] != DIGEST:
            raise ConflictError("digest is not what was shown", code="STALE_VIEW")
        self.approved.append(command)
        return {"release": command.arguments["release"], "state": "sent", "given": [command.person], "needed": 1}

    def answer(self, **answers: Any) -> None:
        """Answer these queries from now on; `_` in a name stands for a dot."""
        for name, value in answers.items():
            query = name.replace("_", ".")
            if query not in self.answers:
                self.desk.register_query(query, self._answer_to(query))
            self.answers[query] = value

    def _answer_to(self, query: str) -> Callable[[Mapping[str, Any]], Any]:
        def told(arguments: Mapping[str, Any]) -> Any:
            value = self.answers[query]
            return value(arguments) if callable(value) else value

        return told

    def configure(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, **more: Any) -> SimpleNamespace:
        """Have commands of these modules read a configuration that names this site."""
        config = SimpleNamespace(
            silo="hospital_a",
            federation="cardio-net",
            control=SimpleNamespace(socket=self.socket),
            identity=SimpleNamespace(certificate=self.folder / "hospital_a.crt"),
            **more,
        )
        for module in modules:
            monkeypatch.setattr(module, "load_site", lambda path: config)
        return config


def printed(app: typer.Typer, *words: object) -> tuple[int, str]:
    """Exit status of a command, and all that it prints."""
    result = CliRunner().invoke(app, [*map(str, words)])
    return result.exit_code, result.output


def run(app: typer.Typer, *words: object) -> tuple[int, dict[str, Any]]:
    """Exit status of a command, and its envelope."""
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    return result.exit_code, json.loads(result.stdout)


def failed(app: typer.Typer, *words: object) -> tuple[int, str]:
    """Exit status and code of a command that is refused."""
    status, told = run(app, *words)
    return status, told["error"]["code"]
