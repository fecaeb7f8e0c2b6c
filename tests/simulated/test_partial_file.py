"""A file that grows by what a line brings, whatever the sizes of its pieces and wherever the line is cut."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.files import durable
from fedsilo.files.durable import PartialFile

WHOLE_BYTES = 40_000
# a piece, or the line is cut and the file opened again, or all of it comes anew
EVENTS = st.lists(st.one_of(st.integers(1, 9000), st.sampled_from(("cut", "again"))), max_size=12)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "FLUSHED_BYTES", 16384)


@given(events=EVENTS, hashed=st.booleans())
def test_T23_a_file_is_what_was_written_however_it_was_cut(events: list[int | str], hashed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, expected = Path(folder) / "a.partial", b""
        file = PartialFile(path, whole_bytes=WHOLE_BYTES, hashed=hashed)
        for number, event in enumerate(events):
            if event == "cut":
                file.close()
                assert path.read_bytes() == expected
                file = PartialFile(path, whole_bytes=WHOLE_BYTES, hashed=hashed)
                assert file.resumed_at == len(expected)
            elif event == "again":
                file.restart()
                expected = b""
            elif isinstance(event, int) and len(expected) + event <= WHOLE_BYTES:
                chunk = bytes([number + 1]) * event
                file.write(chunk)
                expected += chunk
            assert file.size_bytes == len(expected)
        assert not hashed or file.digest == hashlib.sha256(expected).hexdigest()
        if expected:
            seen = file.view()
            file.close()
            path.unlink()
            assert seen == expected, "what was mapped outlives the name"
        else:
            file.close()


def test_T39_it_is_on_the_disk_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    file = PartialFile(tmp_path / "a.partial", whole_bytes=WHOLE_BYTES)
    for _ in range(4):
        file.write(b"a" * 9000)
    file.close()
    # The first one begins when 16,384 bytes are there, and is over by the end in any case; the last one has all.
    assert flushed[0] >= 18_000 and flushed[-1] == 36_000 and len(flushed) >= 2


def test_T39_a_disk_that_fails_while_more_comes_is_told_of_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = iter([OSError(errno.EIO, os.strerror(errno.EIO))])  # the kernel tells of it once

    def flush(_descriptor: int) -> None:
        for fault in faults:
            raise fault

    monkeypatch.setattr(os, "fdatasync", flush)
    file = PartialFile(tmp_path / "a.partial", whole_bytes=WHOLE_BYTES)
    file.write(b"a" * 20_000)
    with pytest.raises(OSError, match="Input/output"):
        file.close()
    file = PartialFile(tmp_path / "b.partial", whole_bytes=WHOLE_BYTES)  # its counterpart
    file.write(b"a" * 20_000)
    file.close()


def test_T23_what_is_dropped_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.partial"
    file = PartialFile(path, whole_bytes=WHOLE_BYTES)
    file.write(b"a" * 20_000)
    file.drop()
    assert not path.exists()
    file.close()


def test_T39_where_no_thread_can_be_had_all_is_flushed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    flushed: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: flushed.append(os.fstat(descriptor).st_size))
    file = PartialFile(tmp_path / "a.partial", whole_bytes=WHOLE_BYTES)
    file.write(b"a" * 20_000)
    file.close()
    assert flushed == [20_000]
    file = PartialFile(tmp_path / "b.partial", whole_bytes=WHOLE_BYTES)
    file.write(b"a" * 20_000)
    file.drop()
    assert not (tmp_path / "b.partial").exists()
