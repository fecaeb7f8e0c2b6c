"""What a power cut leaves of payloads that were acknowledged: a name outlives it once the folder that holds it was
flushed with the name in it, and a file in a folder does if each folder above it did."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from coordinator import blobs as blobs_module
from coordinator.blobs import Blobs, BytesPayload, FilePayload
from fedsilo.protocol.errors import OperationError


class Disk:
    """The names in each folder as they were when it was last flushed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._flushed: dict[Path, set[str]] = {}
        monkeypatch.setattr(os, "fsync", self._flush)

    def _flush(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            self._flushed[path] = {each.name for each in path.iterdir()}

    def outlives(self, path: Path, above: Path) -> bool:
        """Whether a file is still found from the folder `above` after a power cut."""
        names = path.relative_to(above).parts
        return all(name in self._flushed.get(above.joinpath(*names[:depth]), set()) for depth, name in enumerate(names))


def test_T39_a_kept_payload_is_found_after_a_power_cut_also_as_the_first_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    blobs = Blobs(tmp_path)
    numbered = [BytesPayload(str(number).encode()) for number in range(40)]
    folders = {payload.digest[:2] for payload in numbered}
    assert 1 < len(folders) < len(numbered)  # one is the first of its folder, another is not
    for payload in numbered:
        assert disk.outlives(Path(blobs.keep(payload).path), tmp_path)
    # the counterpart: what was spooled and not kept has no name that lasts
    with blobs.spool() as spool:
        spool.write(b"x")
        arriving = spool.finish()
        assert not disk.outlives(Path(arriving.path), tmp_path)


@pytest.mark.parametrize("folder_only", [True, False])
def test_T39_a_payload_whose_names_a_kill_left_unflushed_is_flushed_when_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder_only: bool
) -> None:
    disk, payload = Disk(monkeypatch), BytesPayload(b"payload")
    place = tmp_path / "blobs" / payload.digest[:2] / payload.digest
    Blobs(tmp_path)
    place.parent.mkdir()
    if not folder_only:
        place.write_bytes(payload.data)
    assert not disk.outlives(place, tmp_path)
    kept = Blobs(tmp_path).keep(payload)
    assert isinstance(kept, FilePayload) and kept.read_at(0, kept.size_bytes) == payload.data
    assert disk.outlives(place, tmp_path)


def test_T39_a_disk_that_fails_while_a_payload_is_spooled_is_told_of_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a fault once, to the flush that runs while more comes: it gets no name all the same."""
    monkeypatch.setattr(blobs_module, "FLUSHED_BYTES", 1 << 14)
    faults = iter([OSError(errno.EIO, os.strerror(errno.EIO))])

    def flush(_descriptor: int) -> None:
        for fault in faults:
            raise fault

    monkeypatch.setattr(os, "fdatasync", flush)
    blobs = Blobs(tmp_path)
    with blobs.spool() as spool:
        spool.write(b"x" * 20_000)
        with pytest.raises(OperationError, match="Input/output"):
            spool.finish()
    assert not any(blobs.arriving.iterdir())
    with blobs.spool() as spool:  # its counterpart
        spool.write(b"x" * 20_000)
        assert blobs.keep(spool.finish()).size_bytes == 20_000
