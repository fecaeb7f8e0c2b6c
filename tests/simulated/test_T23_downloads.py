"""An adapter whose download is cut goes on at the byte where it stopped, and is compared as a whole; the coordinator's
service and the silo's keeping are the real ones, the line is in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.aggregate import initial_adapter
from coordinator.blobs import BytesPayload
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError, PeerError, UnreachableError, WireCode
from fedsilo.protocol.place import Place
from silo.guard.adapters import AdapterStore
from silo.guard.coordinator_client import CoordinatorClient
from silo.guard.run import fetch
from tests.simulated.coordinator_parts import RUN_YAML, SILOS
from tests.simulated.lines import LARGE, UNIT_BYTES, LineCut, LineSilo, divide_sizes, line_federation

ADAPTER = initial_adapter(LARGE, 7)  # what the run starts from, by its seed
DIGEST = codec.sha256_hex(ADAPTER)


class Talk:
    """Says it over the line; what a gate does to an answer is its digest's comparison."""

    def __init__(self, silo: LineSilo) -> None:
        self.silo = silo
        self.asked: list[int] = []

    def say(self, place: Place, body: pb.Fetch, *, into: Any) -> Any:
        self.asked.append(body.offset)
        payload = codec.encode(body)
        reply = self.silo.exchange(self.silo.envelope(place.kind, payload), payload, into)
        content = cast(BytesPayload, reply.payload).data
        if codec.sha256_hex(content) != reply.envelope.payload_digest.hex():
            raise PeerError(WireCode.DIGEST_MISMATCH, "the payload is not the one that its envelope names")
        answered = reply.envelope.kind
        return SimpleNamespace(place=place._replace(kind=answered), kind=answered, payload=content)


class Site:
    """A silo with its adapters, and a run's first adapter at the coordinator."""

    def __init__(self, folder: Path) -> None:
        self.house, silos = line_federation(folder / "coordinator", silos=SILOS)
        for silo in silos:
            silo.join()
        self.house.submit(RUN_YAML)
        self.silo, self.folder = silos[0], folder / "adapters"
        self.talk = Talk(self.silo)
        self.restart()

    def restart(self) -> None:
        """The silo's process, anew on the same folder."""
        self.adapters = AdapterStore(self.folder)

    def fetch(self, *, cut_at: int | None = None, digest: str = DIGEST) -> Any:
        self.silo.down_bytes = cut_at
        return fetch(cast(CoordinatorClient, self.talk), self.adapters, digest, run="", bytes_max=len(ADAPTER))

    def partial(self) -> Path:
        [path] = self.folder.glob("*.partial")
        return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    divide_sizes(monkeypatch)
    return Site(tmp_path)


@pytest.mark.parametrize("killed", [False, True])
def test_T29_a_download_goes_on_at_its_offset_and_is_whole(place: Site, killed: bool) -> None:
    assert len(ADAPTER) > UNIT_BYTES
    with pytest.raises(LineCut):
        place.fetch(cut_at=UNIT_BYTES)
    assert place.partial().read_bytes() == ADAPTER[:UNIT_BYTES]
    if killed:
        place.restart()
    answer = place.fetch()
    assert place.talk.asked == [0, UNIT_BYTES] and place.silo.came == len(ADAPTER) - UNIT_BYTES
    assert answer.payload == ADAPTER
    place.adapters.keep(DIGEST, answer.payload, 1.0)
    assert place.adapters.find(DIGEST) == ADAPTER and list(place.folder.glob("*.partial")) == []


def test_T29_a_kept_beginning_that_is_not_the_adapters_is_thrown_away(place: Site) -> None:
    with pytest.raises(LineCut):
        place.fetch(cut_at=UNIT_BYTES)
    place.partial().write_bytes(bytes(UNIT_BYTES))
    with pytest.raises(UnreachableError, match="not its beginning"):
        place.fetch()
    assert place.fetch().payload == ADAPTER
    assert place.talk.asked == [0, UNIT_BYTES, 0]


def test_what_was_kept_of_another_adapter_goes_and_a_refusal_keeps_nothing(place: Site) -> None:
    with pytest.raises(LineCut):
        place.fetch(cut_at=UNIT_BYTES)
    assert place.fetch(digest="ab" * 32).kind == "control.refusal"
    assert list(place.folder.glob("*.partial")) == []
    assert place.fetch().payload == ADAPTER and place.talk.asked == [0, 0, 0]
    assert place.fetch().payload == ADAPTER and place.silo.came == 0  # all of it was there, and only not kept yet
    assert place.talk.asked[-1] == len(ADAPTER)
    place.partial().unlink()
    with pytest.raises(LineCut):
        place.fetch(cut_at=UNIT_BYTES)
    Path(place.house.blobs.get(DIGEST).path).unlink()
    assert place.fetch().kind == "control.refusal" and place.talk.asked[-1] == UNIT_BYTES
    assert list(place.folder.glob("*.partial")) == []


def test_T23_an_answer_from_elsewhere_than_was_asked_is_refused(place: Site) -> None:
    with pytest.raises(LineCut):
        place.fetch(cut_at=UNIT_BYTES)
    cut = place.silo.service.exchange

    def moved(*arguments: Any) -> Any:
        for frame in cut(*arguments):
            if frame.WhichOneof("part") == "opening":
                frame.opening.offset -= 1
            yield frame

    place.silo.service.exchange = moved  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="where it was asked"):
        place.fetch()
    place.silo.service.exchange = cut  # type: ignore[method-assign]
    assert place.fetch().payload == ADAPTER


@pytest.mark.parametrize(("seconds", "ends"), [(121.0, True), (119.0, False)])
def test_T24_a_silo_may_take_long_over_a_download_and_not_stand_still(place: Site, seconds: float, ends: bool) -> None:
    def pace() -> None:
        place.house.clock.seconds += seconds
        place.silo.service.watchdog.look()

    place.silo.pace = lambda: pace() if place.silo.came else None
    if ends:
        with pytest.raises(LineCut, match="coordinator"):
            place.fetch()
        place.silo.pace = None
    assert place.fetch().payload == ADAPTER


def test_T39_an_adapter_is_on_the_disk_before_anything_names_it(place: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is measured from it (T20): named and lost to a power cut, it would keep the silo out of its run."""
    done: list[tuple[str, int]] = []
    flush, replace = os.fdatasync, Path.replace

    def flushed(descriptor: int) -> None:
        flush(descriptor)
        done.append(("flushed", os.fstat(descriptor).st_size))

    def replaced(path: Path, target: Path) -> Path:
        done.append((target.name, path.stat().st_size))
        return replace(path, target)

    monkeypatch.setattr(os, "fdatasync", flushed)
    monkeypatch.setattr(Path, "replace", replaced)
    answer = place.fetch()
    place.adapters.keep(DIGEST, answer.payload, 1.0)
    names = [name for name, _ in done]
    assert names[-2:] == [DIGEST, "known.json"] and done[names.index(DIGEST)] == (DIGEST, len(ADAPTER))
    assert ("flushed", len(ADAPTER)) in done[: names.index(DIGEST)]


def test_T29_what_lies_there_under_an_adapters_name_is_kept_only_as_it_came(place: Site) -> None:
    """As long as the adapter, and other bytes: a disk's after a power cut, where the adapter then comes another way."""
    (place.folder / f"{DIGEST}.partial").write_bytes(bytes(len(ADAPTER)))
    place.adapters.keep(DIGEST, ADAPTER, 1.0)
    assert place.adapters.find(DIGEST) == ADAPTER and list(place.folder.glob("*.partial")) == []


def test_T39_a_disk_that_takes_no_adapter_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = AdapterStore(tmp_path / "adapters")

    def full(_descriptor: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, store.arriving(DIGEST, len(ADAPTER)) as arriving:
        patched.setattr(os, "write", full)
        with pytest.raises(OperationError, match=rf"in {tmp_path / 'adapters'}: No space left on device") as told:
            arriving.write(ADAPTER)
    assert "free space there" in told.value.hint
    assert list((tmp_path / "adapters").glob("*.partial")) == []
    with store.arriving(DIGEST, len(ADAPTER)) as arriving:  # the counterpart
        arriving.write(ADAPTER)
        assert arriving.size_bytes == len(ADAPTER)
