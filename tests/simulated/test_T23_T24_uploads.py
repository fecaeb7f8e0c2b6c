"""Uploads that are cut go on where they were cut, are the same message all the while, wait for their turn and leave
little behind; both ends are the real ones, the line is in memory."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import select

from coordinator import blobs
from coordinator import store as db
from coordinator.blobs import PARTIAL_SECONDS_MAX, PARTIALS_PER_SILO_MAX, PLACES, LineClosed, Uploads
from fedsilo.audit.reader import read_lines
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError
from tests.simulated.coordinator_parts import House, until_quiet
from tests.simulated.lines import UNIT_BYTES, Call, LineCut, LineSilo, divide_sizes, line_federation, restarted

NAMES = ("hospital_a", "hospital_b")
RUN = """\
run: run-1
method: pubswap
rounds: 1
local_steps: 2
swap_period: 2
prompts_per_step: 3
samples_per_prompt: 4
seed: 7
rollout: {max_new_tokens: 32}
quorum: 2
join_deadline_seconds: 60.0
round_deadline_seconds: 1000.0
"""
LIMIT_SECONDS = 30.0


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    divide_sizes(monkeypatch)


def whole_run(folder: Path, disturb: Callable[[House, list[LineSilo]], object]) -> tuple[House, list[LineSilo]]:
    house, silos = line_federation(folder, silos=NAMES)
    for silo in silos:
        silo.join()
    house.submit(RUN + "silos: [hospital_a, hospital_b]\n")
    disturb(house, silos)
    until_quiet(list(silos))
    return silos[0].house, silos


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    house, _ = whole_run(tmp_path_factory.mktemp("undisturbed"), lambda house, silos: None)
    assert house.run().state == "finished"
    house.close()
    return str(house.run().adapter_digest)


def cut_in_upload(silo: LineSilo, *, up: int | None, down: int | None, then: Callable[[], None]) -> list[int]:
    """Cut the line while factors go up; returns what then crossed of them, try by try."""
    crossed: list[int] = []
    exchange = silo.exchange

    def watched(envelope: pb.Envelope, payload: bytes, into: object = None) -> object:
        factors = envelope.kind == "lora.factors"
        if factors and not crossed:
            silo.up_bytes, silo.down_bytes = up, down
        try:
            return exchange(envelope, payload)
        finally:
            if factors:
                crossed.append(silo.crossed)

    silo.exchange = watched  # type: ignore[assignment, method-assign]
    silo.on_cut = then
    return crossed


def decisions(house: House, silo: LineSilo) -> list[dict[str, object]]:
    lines = (json.loads(line) for _, line in read_lines(house.folder / "audit"))
    return [
        line for line in lines
        if (line["event"], line.get("kind"), line.get("peer"))
        == ("ingress.decision", "lora.factors", silo.peer.spiffe_id)
    ]  # fmt: skip


@pytest.mark.parametrize("cut", ["line", "coordinator", "answer", "answer and coordinator"])
def test_T11_T23_T29_an_upload_goes_on_at_its_offset_and_is_one_message(
    cut: str, tmp_path: Path, undisturbed: str
) -> None:
    watched: list[list[int]] = []

    def disturb(_house: House, silos: list[LineSilo]) -> None:
        def then() -> None:
            if "coordinator" in cut:
                restarted(silos[0].house, silos)

        up, down = (None, -1) if "answer" in cut else (UNIT_BYTES, None)
        watched.append(cut_in_upload(silos[0], up=up, down=down, then=then))

    house, silos = whole_run(tmp_path, disturb)
    [tries] = watched
    total = len(silos[0].delta_payload(1, base_digest=house.run().base_digest))
    held = total if "answer" in cut else UNIT_BYTES
    assert tries == [UNIT_BYTES if "answer" not in cut else total, total - held]
    assert (house.run().state, house.run().adapter_digest) == ("finished", undisturbed)
    [decision] = decisions(house, silos[0])
    assert decision["decision"] == "allow"
    of_silo = select(db.Upload.digest).where(db.Upload.silo == silos[0].name, db.Upload.kind == "lora.factors")
    assert len(house.rows(lambda session: session.scalars(of_silo).all())) == 1
    assert list(house.blobs.arriving.iterdir()) == []


@pytest.fixture
def cut_once(tmp_path: Path) -> tuple[House, LineSilo, bytes]:
    """A silo whose upload was cut after a unit, and what it was sending."""
    house, silos = line_federation(tmp_path, silos=NAMES)
    for silo in silos:
        silo.join()
    house.submit(RUN + "silos: [hospital_a, hospital_b]\n")
    for _ in range(2):
        for silo in silos[1:]:
            silo.live()
        cut_in_upload(silos[0], up=UNIT_BYTES, down=None, then=lambda: None)
        silos[0].on_cut = None
        try:
            silos[0].live()
        except LineCut:
            break
    assert silos[0].last is not None and silos[0].last[0].kind == "lora.factors"
    assert [path.stat().st_size for path in house.blobs.arriving.iterdir()] == [UNIT_BYTES]
    return house, silos[0], silos[0].last[1]


def test_T29_other_bytes_under_the_same_digest_are_refused_and_the_right_ones_taken(
    cut_once: tuple[House, LineSilo, bytes],
) -> None:
    house, silo, payload = cut_once
    other = payload[:-1] + bytes([payload[-1] ^ 1])
    with pytest.raises(LineCut, match="UNAVAILABLE"):  # it may be the beginning that is wrong, which lay here
        silo.again(payload=other)
    assert list(house.blobs.arriving.iterdir()) == [] and decisions(house, silo) == []
    assert silo.last is not None
    silo.last = (silo.last[0], payload)
    refusal = silo.again(payload=other)
    assert isinstance(refusal, pb.Refusal) and refusal.code == "DIGEST_MISMATCH"
    assert list(house.blobs.arriving.iterdir()) == [] and silo.crossed == len(payload)
    assert silo.last is not None
    silo.last = (silo.last[0], payload)
    assert isinstance(silo.again(), pb.Ack) and silo.crossed == len(payload)
    assert [decision["decision"] for decision in decisions(house, silo)] == ["deny", "allow"]


def test_T29_a_beginning_that_changed_on_the_disk_is_not_taken_for_the_message(
    cut_once: tuple[House, LineSilo, bytes],
) -> None:
    house, silo, payload = cut_once
    [partial] = house.blobs.arriving.iterdir()
    with partial.open("r+b") as file:
        file.seek(100)
        file.write(bytes([payload[100] ^ 1]))
    with pytest.raises(LineCut, match="UNAVAILABLE"):  # no fault of the silo's, so no refusal, and nothing is counted
        silo.again()
    assert isinstance(silo.again(), pb.Ack) and silo.crossed == len(payload)
    assert [decision["decision"] for decision in decisions(house, silo)] == ["allow"] and not house.driver.halted


@pytest.mark.parametrize("state", ["stopping", "halted", "running"])
def test_T29_T39_an_upload_that_nobody_judged_need_not_cross_again(
    cut_once: tuple[House, LineSilo, bytes], state: str
) -> None:
    house, silo, payload = cut_once
    if state == "stopping":
        house.driver.stop()
    elif state == "halted":
        house.driver.halt(OperationError("no space left"))
    else:  # the counterpart is judged and refused
        envelope = silo.envelope("lora.factors", payload, run="run-1", number=2)
        silo.last = (envelope, payload)
    refusal = silo.again()
    assert isinstance(refusal, pb.Refusal) and silo.crossed == len(payload) - UNIT_BYTES  # all of it is there
    assert refusal.code == ("ROUND_CLOSED" if state == "running" else "HALTED")
    left = [path.stat().st_size for path in house.blobs.arriving.iterdir()]
    assert left == ([] if state == "running" else [len(payload)])
    assert [decision["decision"] for decision in decisions(house, silo)] == ["deny"]
    house = restarted(house, [silo])
    envelope = silo.envelope("lora.factors", payload, run="run-1", number=1)
    assert isinstance(silo.deliver(envelope, payload), pb.Ack)
    assert silo.crossed == (len(payload) if state == "running" else 0)
    assert decisions(house, silo)[-1]["decision"] == "allow" and list(house.blobs.arriving.iterdir()) == []


@pytest.mark.parametrize("extra", [1, -1])
def test_T23_more_than_was_announced_is_refused_and_leaves_nothing_and_after_less_it_is_gone_on_with(
    cut_once: tuple[House, LineSilo, bytes], extra: int
) -> None:
    house, silo, payload = cut_once
    envelope = silo.envelope("lora.factors", payload, run="run-1", number=1)
    opening = pb.Frame(opening=pb.Opening(envelope=envelope, payload_bytes=len(payload)))
    rest = payload[UNIT_BYTES:] + b"x" if extra > 0 else payload[UNIT_BYTES:-1]
    frames = [pb.Frame(chunk=rest[at : at + UNIT_BYTES]) for at in range(0, len(rest), UNIT_BYTES)]
    answers = list(silo.service.exchange(iter([opening, *frames]), Call(silo.peer)))  # type: ignore[arg-type]
    assert answers[0].admitted.offset == UNIT_BYTES and answers[1].opening.envelope.kind == "control.refusal"
    assert codec.decode(pb.Refusal, answers[2].chunk).code == "MALFORMED"
    # gRPC ends the stream of a line that broke as that of a silo that stops too early: what came stays
    kept = [each.stat().st_size for each in house.blobs.arriving.iterdir()]
    assert kept == ([] if extra > 0 else [len(payload) - 1])
    assert isinstance(silo.again(), pb.Ack) and silo.crossed == (len(payload) if extra > 0 else 1)


def test_T23_pieces_are_bounded_by_number_size_and_age(tmp_path: Path) -> None:
    house, _ = line_federation(tmp_path, silos=())
    now = [tmp_path.stat().st_mtime]
    line = Uploads(house.blobs, now_seconds=lambda: now[0])

    def begin(silo: str, digest: str, announced: int = 100) -> int:
        with line.arriving(silo, digest * 64, announced) as upload:
            offset = upload.offset
            upload.write(digest.encode())
        return offset

    def left() -> set[str]:
        return {path.name.removesuffix(".partial") for path in house.blobs.arriving.iterdir()}

    for age, digest in enumerate("abcd"):
        begin("hospital_a", digest)
        path = house.blobs.arriving / f"hospital_a.{digest * 64}.partial"
        os.utime(path, (now[0] + age, now[0] + age))
    begin("hospital_b", "a")
    assert PARTIALS_PER_SILO_MAX == 2
    assert left() == {f"hospital_a.{'c' * 64}", f"hospital_a.{'d' * 64}", f"hospital_b.{'a' * 64}"}
    assert begin("hospital_b", "a") == 1  # gone on with
    assert begin("hospital_b", "a", announced=1) == 0  # longer than what is announced: not its beginning
    now[0] += PARTIAL_SECONDS_MAX + 100.0
    begin("hospital_b", "e")
    assert left() == {f"hospital_b.{'e' * 64}"}
    at = now[0]
    os.utime(house.blobs.arriving / f"hospital_b.{'e' * 64}.partial", (at, at))
    for seconds, kept in ((PARTIAL_SECONDS_MAX, {f"hospital_b.{'e' * 64}"}), (PARTIAL_SECONDS_MAX + 1.0, set())):
        now[0] = at + seconds
        line.sweep()  # nobody begins another one
        assert left() == kept


def test_T24_uploads_wait_in_their_order_and_nothing_of_them_is_taken(tmp_path: Path) -> None:
    house, _ = line_federation(tmp_path, silos=())
    line, order = Uploads(house.blobs), list[str]()
    ended = [Call(None) for _ in range(3)]  # type: ignore[arg-type]
    leave = threading.Event()

    def upload(silo: str, call: Call) -> None:
        call.add_callback(line.wake)
        try:
            with line.turn(silo, is_active=call.is_active, cut=call.cancel):
                order.append(silo)
                leave.wait(LIMIT_SECONDS)
        except LineClosed:
            order.append(f"{silo} left")

    def until_waiting(number: int) -> None:
        with line._changed:
            assert line._changed.wait_for(lambda: line.waiting == number, LIMIT_SECONDS)

    with ExitStack() as stack:
        places = [stack.enter_context(line.turn(f"first_{number}", is_active=lambda: True, cut=lambda: None))
                  for number in range(PLACES)]  # fmt: skip
        assert len(places) == PLACES == 4 and line.waiting == 0
        threads = []
        for number, call in enumerate(ended):
            threads.append(threading.Thread(target=upload, args=(f"later_{number}", call)))
            threads[-1].start()
            until_waiting(number + 1)
        ended[1].cancel()  # whoever goes leaves the queue
        threads[1].join(LIMIT_SECONDS)
        assert order == ["later_1 left"] and line.waiting == 2
    leave.set()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert sorted(order[1:]) == ["later_0", "later_2"] and line.waiting == 0


def test_T24_two_calls_of_one_silo_keep_another_from_no_place(tmp_path: Path) -> None:
    """A silo whose older call has not gone yet stands in the queue twice, and has one place."""
    house, _ = line_federation(tmp_path, silos=())
    line, has_place = Uploads(house.blobs), threading.Event()

    def upload(silo: str) -> None:
        with line.turn(silo, is_active=lambda: True, cut=lambda: None):
            has_place.set()

    with ExitStack() as stack:
        for number in range(PLACES - 1):
            stack.enter_context(line.turn(f"first_{number}", is_active=lambda: True, cut=lambda: None))
        again = threading.Thread(target=upload, args=("first_0",))
        again.start()
        with line._changed:
            assert line._changed.wait_for(lambda: line.waiting == 1, LIMIT_SECONDS)
        other = threading.Thread(target=upload, args=("other",))
        other.start()
        assert has_place.wait(LIMIT_SECONDS) and again.is_alive()
        other.join(LIMIT_SECONDS)
    again.join(LIMIT_SECONDS)


def test_T24_the_first_to_come_is_the_first_to_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "PLACES", 1)
    house, _ = line_federation(tmp_path, silos=())
    line, order, threads = Uploads(house.blobs), list[int](), []

    def upload(number: int) -> None:
        with line.turn(f"silo_{number}", is_active=lambda: True, cut=lambda: None):
            order.append(number)

    with line.turn("first", is_active=lambda: True, cut=lambda: None):
        for number in range(8):
            threads.append(threading.Thread(target=upload, args=(number,)))
            threads[-1].start()
            with line._changed:
                assert line._changed.wait_for(lambda: line.waiting == len(threads), LIMIT_SECONDS)
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert order == list(range(8))


def test_T24_a_silo_that_waits_has_sent_its_opening_alone(
    cut_once: tuple[House, LineSilo, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    house, silo, payload = cut_once
    monkeypatch.setattr(blobs, "PLACES", 1)
    line, answers = silo.service.uploads, list[object]()
    with line.turn("hospital_b", is_active=lambda: True, cut=lambda: None):
        sending = threading.Thread(target=lambda: answers.append(silo.again()))
        sending.start()
        with line._changed:
            assert line._changed.wait_for(lambda: line.waiting == 1, LIMIT_SECONDS)
        house.clock.seconds += 10_000.0
        silo.service.watchdog.look()  # it waits through no fault of its own
        assert silo.call.active and silo.crossed == 0 and answers == []
    sending.join(LIMIT_SECONDS)
    assert isinstance(answers[0], pb.Ack) and silo.crossed == len(payload) - UNIT_BYTES


def test_T24_a_silo_that_goes_away_while_it_waits_ends_its_call_without_a_word(
    cut_once: tuple[House, LineSilo, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What leaves the handler as an error gRPC writes into the log with a traceback, one for each call."""
    _, silo, payload = cut_once
    monkeypatch.setattr(blobs, "PLACES", 1)
    line, call, left = silo.service.uploads, Call(silo.peer), list[object]()
    envelope = silo.envelope("lora.factors", payload, run="run-1", number=1)
    opening = pb.Frame(opening=pb.Opening(envelope=envelope, payload_bytes=len(payload)))

    def served() -> None:
        left.append(list(silo.service.exchange(iter([opening]), call)))  # type: ignore[arg-type]

    with line.turn("hospital_b", is_active=lambda: True, cut=lambda: None):
        serving = threading.Thread(target=served)
        serving.start()
        with line._changed:
            assert line._changed.wait_for(lambda: line.waiting == 1, LIMIT_SECONDS)
        call.cancel()
        serving.join(LIMIT_SECONDS)
    assert left == [[]] and call.status == ""
    assert isinstance(silo.again(), pb.Ack)


def test_T24_a_silos_newer_call_ends_its_older_one(tmp_path: Path) -> None:
    house, _ = line_federation(tmp_path, silos=())
    line, older = Uploads(house.blobs), Call(None)  # type: ignore[arg-type]
    entered = threading.Event()

    def again() -> None:
        with line.turn("hospital_a", is_active=lambda: True, cut=lambda: None):
            entered.set()

    newer = threading.Thread(target=again)
    with line.turn("hospital_a", is_active=older.is_active, cut=older.cancel):
        newer.start()
        with line._changed:
            assert line._changed.wait_for(lambda: line.waiting == 1, LIMIT_SECONDS)
        assert not entered.is_set()  # two never write one file
    assert entered.wait(LIMIT_SECONDS) and not older.active
    newer.join(LIMIT_SECONDS)
    line.stop()
    with pytest.raises(OperationError, match="stopping"), line.turn("x", is_active=lambda: True, cut=lambda: None):
        pass


# a unit in 120 s is 34 bytes a second
@pytest.mark.parametrize(("chunk_bytes", "ends"), [(32, True), (64, False)])
def test_T24_an_upload_may_take_long_and_not_stand_still(
    cut_once: tuple[House, LineSilo, bytes], monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, ends: bool
) -> None:
    house, silo, payload = cut_once
    monkeypatch.setattr(codec, "CHUNK_BYTES_MAX", chunk_bytes)
    [partial] = house.blobs.arriving.iterdir()
    partial.unlink()
    began = house.clock.seconds

    def pace() -> None:
        house.clock.seconds += 1.0
        silo.service.watchdog.look()

    silo.pace = pace
    if ends:
        with pytest.raises(LineCut, match="coordinator"):
            silo.again()
        assert house.clock.seconds - began < 130.0
        silo.pace = None
        kept = silo.crossed
        assert isinstance(silo.again(), pb.Ack)
        assert 0 < silo.crossed <= len(payload) - kept + chunk_bytes  # what came meanwhile is not lost
    else:
        assert isinstance(silo.again(), pb.Ack) and silo.crossed == len(payload)
        assert house.clock.seconds - began > 125.0  # longer than the limit for one unit
