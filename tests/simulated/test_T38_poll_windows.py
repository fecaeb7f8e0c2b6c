"""T38: polls share the record of a window, and nothing is decided into a log that is not in its place."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from certs.commands import sign_command
from coordinator.config import load_config
from coordinator.main import Coordinator, check
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.polls import POLLS_MAX, WINDOW_SECONDS
from fedsilo.audit.reader import read_records
from fedsilo.audit.segments import LogLostError
from fedsilo.control.server import raise_for_reply
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files.identity_files import load_operator
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import DeniedError, FedSiloError, OperationError, UnreachableError
from fedsilo.protocol.place import Place
from silo.guard.commands import ends_when
from silo.guard.messages import Allowed
from tests.policies import setting
from tests.simulated.coordinator_parts import SILOS, House, SimulatedSilo, joined, until_quiet
from tests.simulated.queries import poll
from tests.simulated.test_coordinator_ingress import code_of
from tests.simulated.test_coordinator_queries import write_coordinator
from tests.world import Bench


def on_polls(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(folder / "audit") if record.get("kind") == "control.poll"]


def test_the_permission_is_on_disk_before_the_first_poll_leaves_and_the_others_add_nothing(bench: Bench) -> None:
    seen: list[int] = []
    bench.channel.on_send = lambda: seen.append(len(on_polls(bench.folder)))
    for _ in range(5):
        poll(bench)
        bench.clock_now += 3
    assert seen == [1] * 5
    (permission,) = on_polls(bench.folder)
    assert permission["event"] == "egress.decision" and permission["detail"]["window"]["polls_most"] == POLLS_MAX
    sequences = [envelope.sequence for envelope, _ in bench.channel.sent]
    assert sequences == list(range(sequences[0], sequences[0] + 5)) and permission["sequence"] == sequences[0]
    assert bench.gate.counters.messages["control.poll"] == 5

    bench.gate.close_windows()
    _, end = on_polls(bench.folder)
    size = sum(len(payload) for _, payload in bench.channel.sent)
    assert (end["event"], end["sequence"], end["payload"]["bytes"]) == ("egress.sent", sequences[-1], size)
    assert end["detail"] == {"polls": 5, "first": sequences[0]} and end["link"]["decision"] == permission["seq"]


def test_the_hour_another_run_and_another_policy_end_a_window(bench: Bench) -> None:
    poll(bench)
    bench.clock_now += WINDOW_SECONDS
    poll(bench)
    bench.gate.send(Place("run-1", 0, 0, "control.poll"), pb.Poll())
    bench.judge.policy = setting.edited("polls_per_minute: 1200", "polls_per_minute: 1100")
    bench.gate.send(Place("run-1", 0, 0, "control.poll"), pb.Poll())
    assert [record["event"] for record in on_polls(bench.folder)] == [
        "egress.decision",
        *["egress.sent", "egress.decision"] * 3,
    ]


def test_a_poll_beyond_the_rate_is_denied_inside_a_window_and_on_record(tmp_path: Path) -> None:
    policy = setting.edited("polls_per_minute: 1200", "polls_per_minute: 4")
    with closing(Bench(tmp_path / "silo", policy)) as bench:
        with pytest.raises(DeniedError):
            for _ in range(50):
                poll(bench)
        denied = on_polls(bench.folder)[-1]
        assert (denied["event"], denied["decision"]) == ("egress.decision", "deny")
        assert len(bench.channel.sent) < 50


def test_what_an_answer_brings_a_refusal_and_a_signature_have_records_of_their_own(bench: Bench) -> None:
    poll(bench)
    bench.channel.answer = "control.refusal", pb.Refusal(code="HALTED")
    poll(bench)
    bench.channel.answer = "run.end", pb.RunEnd()
    bench.gate.send(Place("", 0, 0, "control.poll"), pb.Poll())
    came = [record["kind"] for record in read_records(bench.folder / "audit") if record["event"] == "ingress.decision"]
    assert came == ["control.refusal", "run.end"]  # an empty answer to a window has none
    bench.gate.send(bench.judge.view.place("control.heartbeat"), pb.Heartbeat())
    bench.gate.send(Place("", 0, 0, "control.checkpoint"), pb.Checkpoint())  # its empty answer has one
    came = [record["kind"] for record in read_records(bench.folder / "audit") if record["event"] == "ingress.decision"]
    assert came == ["control.refusal", "run.end", "control.ack"]
    bench.gate.close_windows()
    end = next(record for record in on_polls(bench.folder) if record["event"] == "egress.sent")
    assert (end["detail"]["polls"], end["detail"]["refused"]) == (3, 1)


def test_a_poll_whose_outcome_nobody_knows_is_counted_as_one_that_may_have_left(bench: Bench) -> None:
    poll(bench)
    bench.channel.fails = UnreachableError("the line is down")
    with pytest.raises(UnreachableError):
        poll(bench)
    bench.gate.close_windows()
    end = on_polls(bench.folder)[-1]
    assert (end["event"], end["detail"]["polls"], end["detail"]["polls_most"]) == ("egress.sent", 1, 2)


def test_after_a_kill_a_window_is_closed_as_between_none_and_what_it_permits(bench: Bench) -> None:
    for _ in range(3):
        poll(bench)
    with closing(bench.restart()) as again:
        end = on_polls(again.folder)[-1]
        assert (end["event"], end["link"]["decision"]) == ("egress.indeterminate", on_polls(again.folder)[0]["seq"])
        assert (end["detail"]["polls"], end["detail"]["polls_most"]) == (0, POLLS_MAX)
        poll(again)  # the numbers go on, and so do the counts of the ledger
        assert again.channel.sent[0][0].sequence > bench.channel.sent[-1][0].sequence


# ---- the coordinator -------------------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path) -> Iterator[tuple[House, SimulatedSilo]]:
    made, silos = joined(tmp_path / "coordinator")
    yield made, silos[0]
    made.close()


def test_the_coordinator_records_a_window_of_each_silo_and_counts_it_at_its_stop(
    house: tuple[House, SimulatedSilo],
) -> None:
    made, silo = house
    before = len(on_polls(made.folder))
    for _ in range(6):
        silo.poll()
        made.advance(3)
    (permission,) = [record for record in on_polls(made.folder)[before:] if record["peer"].endswith(silo.name)]
    assert permission["event"] == "ingress.decision" and permission["detail"]["window"]["polls_most"] == POLLS_MAX
    made.driver.stop()
    (end,) = [
        record
        for record in on_polls(made.folder)
        if record["event"] == "ingress.polls" and record["link"]["decision"] == permission["seq"]
    ]
    assert end["detail"]["polls"] == 6 and end["detail"]["first"] == permission["sequence"]
    assert verify_logs([made.folder / "audit"])[0]["problems"] in ([], ["no signed checkpoint covers the records"])


def test_a_window_of_a_silo_that_has_gone_ends_with_its_hour(house: tuple[House, SimulatedSilo]) -> None:
    made, silo = house
    silo.poll()
    assert not [record for record in on_polls(made.folder) if record["event"] == "ingress.polls"]
    made.advance(WINDOW_SECONDS + 1)
    made.driver.tick()
    assert [record["detail"]["polls"] for record in on_polls(made.folder) if record["event"] == "ingress.polls"] == [1]


def test_a_coordinator_that_was_killed_closes_its_windows_as_one_or_more(house: tuple[House, SimulatedSilo]) -> None:
    made, silo = house
    for _ in range(3):
        silo.poll()
    made.close()
    with closing(House(made.folder, clock=made.clock)) as again:
        end = on_polls(again.folder)[-1]
        assert (end["event"], end["detail"]["polls"], end["detail"]["polls_most"]) == ("ingress.polls", 1, POLLS_MAX)


def test_T41_polls_after_an_acceptance_come_under_a_window_of_the_accepted_time(tmp_path: Path) -> None:
    init_ca(tmp_path / "ca", name="cardio-net", kind="federation")
    people: dict[str, Any] = {"alice": ["approver"]}
    provision_site(tmp_path / "main", site="main", federation_ca=tmp_path / "ca", people=people, is_coordinator=True)
    checked = check(load_config(write_coordinator(tmp_path / "main", SILOS)))
    ahead = [400 * 86_400.0]  # from the start, so that it is followed
    with Coordinator(checked, clock=lambda: time.time() + ahead[0]) as coordinator:
        house: Any = SimpleNamespace(
            driver=coordinator.driver, key=checked.identity.signing_key, schema=checked.schema,
        )  # fmt: skip
        silo = SimulatedSilo(house, SILOS[0])
        silo.poll()
        ahead[0] = 0.0
        certificate, key = load_operator(tmp_path / "main/id/alice.crt", tmp_path / "main/id/alice.key")
        command = sign_command(
            site="main", name="clock.accept", arguments={"halt": coordinator.clock()["digest"]},
            request_id="request-0001", expires=datetime.now(UTC) + timedelta(minutes=2),
            operator_certificate_pem=certificate, operator_key=key, federation="cardio-net",
        )  # fmt: skip
        raise_for_reply(coordinator.control_server.execute(command))
        silo.poll()
        records = list(coordinator.audit.records())
        names = [record["event"] for record in records if record["event"] != "clock.jump"]
        assert names == ["ingress.decision", "ingress.polls", "clock.accept", "ingress.decision"]
        assert records[-1]["detail"]["window"]["until"] <= time.time() + WINDOW_SECONDS


def _move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.rename(path)


def _link(path: Path) -> None:
    _move(path)
    path.symlink_to(path.with_name("elsewhere"))


def _lengthen(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"{}\n")


def _move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("audit.moved"))


WAYS = (Path.unlink, _move, _truncate, _empty, _replace, _link, _lengthen, _move_folder)
way = pytest.mark.parametrize("change", WAYS, ids=lambda change: change.__name__.strip("_"))


def _log(folder: Path) -> Path:
    (segment,) = (folder / "audit").glob("*.jsonl")
    return segment


@way
def test_T38_what_was_decided_does_not_leave_when_its_record_is_lost(
    bench: Bench, change: Callable[[Path], None]
) -> None:
    offered = bench.responses()
    assert isinstance(offered, Allowed)
    change(_log(bench.folder))
    with pytest.raises(LogLostError) as lost:
        bench.gate.transmit(offered)
    assert lost.value.code == bench.judge.halt_code == "LOG_LOST"
    assert bench.channel.sent == []
    with pytest.raises(OperationError):
        bench.gate.send(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
    assert bench.channel.sent == []


@way
def test_T38_nothing_more_is_decided_into_a_lost_log(bench: Bench, change: Callable[[Path], None]) -> None:
    bench.gate.send(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
    change(_log(bench.folder))
    with pytest.raises(LogLostError):
        bench.gate.send(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
    assert len(bench.channel.sent) == 1


def test_T38_a_file_that_is_put_back_is_gone_on_with_after_a_restart(bench: Bench) -> None:
    offered = bench.responses()
    assert isinstance(offered, Allowed)
    segment = _log(bench.folder)
    kept = segment.with_name("elsewhere")
    segment.rename(kept)
    with pytest.raises(LogLostError):
        bench.gate.transmit(offered)
    kept.rename(segment)
    with closing(bench.restart()) as again:
        (item,) = again.ledger.outbox("allowed")
        again.gate.retry(item)
        assert again.channel.kinds() == ["public.responses"]


def test_T38_a_log_that_is_read_backed_up_and_followed_is_in_its_place(bench: Bench) -> None:
    """The counterpart: what people do beside a running silo changes neither the file nor its length."""
    segment = _log(bench.folder)
    shutil.copytree(segment.parent, bench.folder / "backup")
    os.utime(segment)
    os.link(segment, bench.folder / "hard_link")
    bench.gate.send(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
    assert len(bench.channel.sent) == 1


@pytest.mark.quick(keep=3)
@way
def test_T38_a_coordinator_whose_log_is_lost_answers_nobody_more(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    house, silos = joined(tmp_path)
    until_quiet(silos)
    change(_log(Path(house.audit.directory).parent))
    answers: list[str] = []
    try:
        answers.append(code_of(silos[0].say("control.heartbeat", pb.Heartbeat())))
    except FedSiloError as error:
        answers.append(error.code)
    assert answers[0] in {"LOG_LOST", "HALTED"}
    assert house.driver.halted == "LOG_LOST"


def test_a_halt_says_what_ends_it(tmp_path: Path) -> None:
    assert ends_when("LOG_LOST", tmp_path) != ends_when("LOG_FULL", tmp_path)
