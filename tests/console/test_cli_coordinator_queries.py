"""The CLI twins of the console's screens at a coordinator: a real driver, log and database behind a real control
socket, answers as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.audit.segments import segments
from fedsilo.cli import coordinator as cli_coordinator
from tests.console import states
from tests.console.commands import Site
from tests.coordinator_folder import write_coordinator
from tests.simulated.coordinator_parts import SILOS, House, federation, until_quiet
from tests.simulated.queries import as_json, same, slow
from tests.simulated.test_coordinator_queries import deny, panel_of

WAIT_SECONDS = 30


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made, silos = federation(tmp_path_factory.mktemp("house"))
    with closing(made):
        for each in silos:
            each.join()
        made.submit()
        until_quiet(silos)
        deny(silos[1])
        yield made


@pytest.fixture
def ask(site: Site, house: House, tmp_path: Path) -> Any:
    for name, answer in panel_of(house, site.desk).queries().items():
        site.desk.register_query(name, answer)
    state = states.coordinator()
    state["silos"][3]["refusal"]["code"] = "TOKENIZER_MISMATCH"
    site.desk.set_state(state)
    config = write_coordinator(tmp_path, SILOS)
    config.write_text(f"{config.read_text()}control: {{socket: {site.socket}}}\n")

    def run(*arguments: str, text: bool = False) -> tuple[int, Any]:
        told = [*arguments, "--config", str(config), *([] if text else ["--json"])]
        result = CliRunner().invoke(cli_coordinator.app, told)
        return result.exit_code, result.output if text else json.loads(result.stdout)

    return run


@pytest.mark.slow
def test_outbox_and_inbox_say_what_the_daemon_says(house: House, ask: Any) -> None:
    code, listed = ask("inbox", "list")
    assert code == 0 and listed["command"] == "coordinator inbox list"
    assert same(listed["data"]["messages"], slow(house.audit, "ingress")[:100])
    (denied,) = ask("inbox", "list", "--verdict", "deny", "--kind", "public.responses")[1]["data"]["messages"]
    code, shown = ask("inbox", "show", str(denied["seq"]))
    assert code == 0 and shown["data"]["message"]["rules"] and shown["data"]["would_pass"]
    assert ask("inbox", "show", "999999999")[0] == 8
    code, listed = ask("outbox", "list")
    assert code == 0 and listed["data"]["messages"] == as_json(panel_of(house))["outbox"]({})["messages"]
    code, page = ask("outbox", "list", "--limit", "1", "--kind", "round.open", "--run", "run-1")
    (first,) = page["data"]["messages"]
    assert (first["kind"], first["round"], first["peer"]) == ("round.open", 2, "hospital_a")
    code, page = ask("outbox", "list", "--limit", "1", "--kind", "round.open", "--before", page["data"]["next"])
    assert page["data"]["messages"][0]["peer"] == "hospital_b"
    assert ask("outbox", "list", "--silo", "hospital_c", "--waiting")[1]["data"]["messages"] == []
    assert ask("outbox", "list", "--control")[1]["data"]["sent"] > listed["data"]["sent"]
    assert ask("outbox", "show", first["seq"])[1]["data"] == {"message": first, "waiting": []}
    code, text = ask("outbox", "show", first["seq"], text=True)
    assert code == 0 and "round.open  to hospital_a  run-1, round 2" in text
    code, text = ask("outbox", "list", text=True)
    assert code == 0 and "messages sent, 0 wait" in text
    assert ask("outbox", "show", "no such row")[0] == 2 and ask("outbox", "show", "run-1/9/x/y")[0] == 8


@pytest.mark.slow
def test_records_and_a_break_is_exit_status_7(house: House, ask: Any) -> None:
    whole = list(house.audit.records())[::-1]
    assert ask("audit", "list")[1]["data"]["records"] == whole[:100]
    loud = [row for row in whole if not str(row.get("kind", "")).startswith("control.")]
    assert ask("audit", "list", "--no-control", "--limit", "20")[1]["data"]["records"] == loud[:20] != whole[:20]
    assert ask("audit", "show", "1")[1]["data"] == whole[-2] and ask("audit", "show", "99999999")[0] == 8
    code, text = ask("audit", "status", text=True)
    assert code == 0 and "never verified" in text and "spiffe://cardio-net/silo/hospital_a: not seen" in text

    def ended() -> Any:
        assert ask("audit", "verify")[0] in (0, 7)
        deadline = time.monotonic() + WAIT_SECONDS
        while (answer := ask("audit", "status"))[1]["data"]["verifying"]:
            assert time.monotonic() < deadline
        return answer

    code, status = ended()
    assert (code, status["data"]["verified_to"]) == (0, house.audit.size)
    (_, path), *_ = segments(house.audit.directory)
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"round":1', b'"round":3', 1))
    code, status = ended()
    path.write_bytes(before)
    assert (code, status["error"]["code"]) == (7, "VERIFICATION_FAILED") and status["data"]["broken"]["why"]


def test_one_silo_is_shown_and_a_stranger_is_not(ask: Any) -> None:
    code, shown = ask("silos", "show", "hospital_a")
    assert code == 0 and shown["data"]["state"] == "joined"
    code, text = ask("silos", "show", "clinic_e", text=True)
    assert code == 0 and "tokenizer expected a, got b" in text and "said isolation" in text
    code, refused = ask("silos", "show", "\x1b[2J")
    assert (code, refused["error"]["code"]) == (8, "NOT_FOUND") and refused["error"]["message"].isprintable()
