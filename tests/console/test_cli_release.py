"""`silo approvals release` over a gate that its screens halted (T18), and a whole round approved in one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli import approvals as cli_approvals
from fedsilo.control.answers import HaltList
from silo.guard.answers.queries import ledger_page
from silo.guard.commands import Halts
from silo.guard.messages import Allowed, Denied
from tests.console.commands import ALICE, Site, failed, printed, run
from tests.console.test_typed_back import on_terminal
from tests.simulated import screening
from tests.world import Bench

APP = cli_approvals.app
KIND = "public.responses"


@pytest.fixture
def bench(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Halted: it had one hit, and none is allowed."""
    with closing(screening.bench(tmp_path / "bench", screening.policy(["pii_basic"], max_hits_per_day=0))) as made:
        assert isinstance(made.responses((1, (screening.PLANTED["pii_basic"],)), (4, ()), (7, ())), Denied)
        halts = Halts(made.judge, made.ledger)
        site.answer(halts=lambda arguments: HaltList(halts=tuple(halts.rows())), approvals={"releases": []})
        site.answer(ledger=lambda arguments: ledger_page(made.ledger, arguments))
        site.desk.register_command("approvals.release", "halt.release", halts.lift_halt)
        site.configure(monkeypatch, cli_approvals)
        yield made


def test_T18_release_is_signed_by_an_approver_over_what_is_halted(bench: Bench) -> None:
    _, listed = run(APP, "list")
    (row,) = listed["data"]["halts"]
    assert (row["kind"], row["given"], row["needed"], len(listed["warnings"])) == (KIND, [], 1, 1)
    proof = ("--expect-digest", row["digest"])
    assert failed(APP, "release", KIND, "--operator", "bob", *proof) == (4, "NOT_ALLOWED")  # a viewer
    assert failed(APP, "release", KIND, *ALICE, "--expect-digest", "0" * 64) == (6, "STALE_VIEW")
    assert failed(APP, "release", KIND, *ALICE) == (2, "INVALID_INPUT")  # no terminal
    assert failed(APP, "release", "lora.factors", *ALICE) == (8, "NOT_FOUND")
    assert isinstance(bench.responses((1, ("12",)), (4, ()), (7, ())), Denied)
    status, answer = run(APP, "release", KIND, *ALICE, *proof)
    assert status == 0 and answer["data"]["released"] is True
    assert isinstance(bench.responses((1, ("12",)), (4, ()), (7, ())), Allowed)
    assert run(APP, "list")[1]["data"]["halts"] == []


@pytest.mark.parametrize("right", [True, False])
def test_on_a_terminal_the_digest_is_shown_and_typed_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    digest = Halts(bench.judge, bench.ledger).rows()[0].digest
    screen = on_terminal(monkeypatch)
    monkeypatch.setattr(cli_approvals.typer, "prompt", lambda text: digest[-4:] if right else "none")
    config = cli_approvals.load_site(Path("silo.yaml"))
    if right:
        assert cli_approvals.halt_shown(config, KIND) == digest and digest in screen.getvalue()
    else:
        with pytest.raises(cli_approvals.UsageError):
            cli_approvals.halt_shown(config, KIND)


@pytest.mark.parametrize("right", [True, False])
def test_a_whole_round_is_read_before_any_of_it_is_approved_and_the_update_goes_last(
    site: Site, bench: Bench, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    order = ["r3/hospital_a/1", "r3/hospital_a/2", "r3/hospital_a/10", "r3/hospital_a/0"]
    rows = [{"id": name, "kind": "lora.factors" if name == order[-1] else KIND} for name in sorted(order)]
    digests = {name: f"{number:064x}" for number, name in enumerate(order, 0xABCD)}
    approved: list[tuple[str, str]] = []

    def approve(config: Any, operator: str, name: str, arguments: Any, request_id: str) -> Any:
        approved.append((arguments["release"], arguments["digest"]))
        return {"release": arguments["release"], "state": "approved", "given": [operator], "needed": 1}

    shown = {"state": "held", "revision": 1, "policy": {"digest": "ef" * 32}, "noticed": []}
    every = {"releases": [*rows, {"id": "r2/hospital_a/0", "kind": "lora.factors"}]}
    monkeypatch.setattr(cli_approvals, "every_page", lambda client, wanted: every)
    site.answer(approval=lambda asked: shown | {"id": asked["release"], "digest": digests[asked["release"]]})
    monkeypatch.setattr(cli_approvals, "silo_command", approve)  # what is signed with real keys has tests of its own
    monkeypatch.setattr(cli_approvals, "release_text", lambda data, columns: str(data["id"]))
    whole = ("approve", "r3/hospital_a", *ALICE)
    status, answer = run(APP, *whole)
    assert (status, approved) == (2, []) and ", ".join(order[:3]) in answer["error"]["hint"]
    assert failed(APP, *whole, "--expect-digest", "0" * 64) == (2, "INVALID_INPUT")
    assert failed(APP, "approve", "r4/hospital_a", *ALICE) == (8, "NOT_FOUND")

    typed = [digests[name][-4:] for name in order[:-1]] + [digests[order[-1]][-4:] if right else "none"]
    monkeypatch.setattr(cli_approvals, "require_terminal", lambda *_: None)
    monkeypatch.setattr(cli_approvals.typer, "prompt", lambda text: typed.pop(0))
    monkeypatch.setattr(cli_approvals.typer, "echo", lambda text: None)
    on_terminal(monkeypatch)
    status, text = printed(APP, *whole)
    assert (status, approved) == ((0, [(name, digests[name]) for name in order]) if right else (2, [])), text
