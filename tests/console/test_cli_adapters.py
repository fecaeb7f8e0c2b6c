"""`silo adapters` and `silo rollback`: what they print of a guard's answers, and exit statuses of refusals (T52)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.cli import silo as cli_adapters
from fedsilo.cli import silo as cli_silo
from tests.console.test_real_desk import Site, site
from tests.simulated.test_T20_adapter_step import POLICY
from tests.simulated.test_T52_acceptance import DIGEST, LIMITS, accepted_and_held
from tests.world import Loop

__all__ = ["site"]  # a fixture is found by its name


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path / "silo", POLICY, acceptance=LIMITS)
    made.offer_plan()
    accepted_and_held(made)
    yield made
    made.close()


@pytest.fixture
def ask(site: Site, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Any:
    orders = dataclasses.replace(loop.guard.orders, on_loop=lambda work: work())
    site.desk.register_query("adapters", orders.runs.acceptance.view)
    for verb, work in (
        ("accept", orders.accept_adapter), ("refuse", orders.refuse_adapter), ("rollback", orders.roll_back)
    ):  # fmt: skip
        site.desk.register_command(f"adapter.{verb}", f"adapter.{verb}", work)
    config = SimpleNamespace(
        silo="hospital_a", federation="cardio-net", control=SimpleNamespace(socket=site.socket),
        identity=SimpleNamespace(certificate=site.folder / "hospital_a.crt"),
    )  # fmt: skip
    monkeypatch.setattr(cli_adapters, "load_site", lambda path: config)

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli_silo.app, list(arguments))
        return result.exit_code, result.output

    return run


def test_T52_what_is_held_is_listed_with_its_figures_and_the_commands(ask: Any) -> None:
    status, text = ask("adapters", "list")
    assert status == 0 and f"HELD: adapter {DIGEST['backdoor']} of round 2" in text
    assert "100.0 % right before, 67.0 % with it: -33.0 points" in text and "this is a drop" in text
    assert f"silo adapters accept|refuse {DIGEST['backdoor']} --run run-1" in text
    status, text = ask("adapters", "list", "--json")
    assert status == 0 and json.loads(text)["data"]["held"][0]["digest"] == DIGEST["backdoor"]


def test_T52_orders_are_done_with_their_exit_statuses(ask: Any, loop: Loop) -> None:
    who = ("--run", "run-1", "--operator", "alice")
    assert ask("adapters", "accept", "ff" * 32, *who)[0] == 6
    assert ask("rollback", *who, "--to", "ffff")[0] == 8
    status, text = ask("adapters", "accept", DIGEST["backdoor"], *who)
    assert status == 0 and f"accepted adapter {DIGEST['backdoor'][:12]}" in text and "audit record" in text
    assert ask("adapters", "refuse", DIGEST["backdoor"], *who)[0] == 8  # none is held any more
    path = loop.folder / "adapters" / DIGEST["honest"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\x01")
    assert ask("rollback", *who)[0] == 7
    path.write_bytes(whole)
    status, text = ask("rollback", *who)
    assert status == 0 and f"back to adapter {DIGEST['honest']}" in text
    status, text = ask("adapters", "list")
    assert f"refused: {DIGEST['backdoor']}" in text and "HELD" not in text


def test_T52_a_refusal_is_signed_and_listed(ask: Any) -> None:
    status, text = ask("adapters", "refuse", DIGEST["backdoor"], "--run", "run-1", "--operator", "alice")
    assert status == 0 and f"refused adapter {DIGEST['backdoor'][:12]}" in text
