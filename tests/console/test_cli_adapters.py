"""`silo adapters` and `silo rollback`: what they print of a guard's answers, and exit statuses of refusals (T52)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fedsilo.cli import silo as cli_silo
from tests.console.commands import ALICE, Site, printed, run
from tests.simulated.test_T20_adapter_step import POLICY
from tests.simulated.test_T52_acceptance import DIGEST, LIMITS, accepted_and_held
from tests.world import Loop

WHO = ("--run", "run-1", *ALICE)


@pytest.fixture
def loop(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """A guard that holds one adapter and accepted another, behind the site's socket."""
    with closing(Loop(tmp_path / "silo", POLICY, acceptance=LIMITS)) as made:
        made.offer_plan()
        accepted_and_held(made)
        orders = dataclasses.replace(made.guard.orders, on_loop=lambda work: work())
        site.answer(adapters=orders.runs.acceptance.view)
        works = {"accept": orders.accept_adapter, "refuse": orders.refuse_adapter, "rollback": orders.roll_back}
        for verb, work in works.items():
            site.desk.register_command(f"adapter.{verb}", f"adapter.{verb}", work)
        site.configure(monkeypatch, cli_silo)
        yield made


def test_T52_what_is_held_is_listed_with_its_figures_and_the_commands(loop: Loop) -> None:
    status, text = printed(cli_silo.app, "adapters", "list")
    assert status == 0 and f"HELD: adapter {DIGEST['backdoor']} of round 2" in text
    assert "100.0 % right before, 67.0 % with it: -33.0 points" in text
    assert "would show a drop of" in text  # of the accepted one, whose interval came through
    assert f"silo adapters accept|refuse {DIGEST['backdoor']} --run run-1" in text
    status, told = run(cli_silo.app, "adapters", "list")
    assert status == 0 and told["data"]["held"][0]["digest"] == DIGEST["backdoor"]


def test_T52_orders_are_done_with_their_exit_statuses(loop: Loop) -> None:
    def order(*words: str) -> tuple[int, str]:
        return printed(cli_silo.app, *words, *WHO)

    assert order("adapters", "accept", "ff" * 32)[0] == 6
    assert order("rollback", "--to", "ffff")[0] == 8
    status, text = order("adapters", "accept", DIGEST["backdoor"])
    assert status == 0 and DIGEST["backdoor"][:12] in text and "audit record" in text
    assert order("adapters", "refuse", DIGEST["backdoor"])[0] == 8  # none is held any more
    path = loop.folder / "adapters" / DIGEST["honest"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\x01")
    assert order("rollback")[0] == 7
    path.write_bytes(whole)
    status, text = order("rollback")
    assert status == 0 and f"back to adapter {DIGEST['honest']}" in text
    status, text = printed(cli_silo.app, "adapters", "list")
    assert f"refused: {DIGEST['backdoor']}" in text and "HELD" not in text


def test_T52_a_refusal_is_signed_and_listed(loop: Loop) -> None:
    status, text = printed(cli_silo.app, "adapters", "refuse", DIGEST["backdoor"], *WHO)
    assert status == 0 and f"refused adapter {DIGEST['backdoor'][:12]}" in text
