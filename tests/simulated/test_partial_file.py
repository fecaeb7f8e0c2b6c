"""A file that grows by what a line brings, whatever the sizes of its pieces and wherever the line is cut."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.edge import partial_file
from fedsilo.edge.partial_file import PartialFile

WHOLE_BYTES = 40_000
# a piece, or the line is cut and the file opened again, or all of it comes anew
EVENTS = st.lists(st.one_of(st.integers(1, 9000), st.sampled_from(("cut", "again"))), max_size=12)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page and four of them: the least that a disk takes without the page cache."""
    monkeypatch.setattr(partial_file, "ROOM_BYTES", 4096)
    monkeypatch.setattr(partial_file, "BLOCK_BYTES", 16384)


@given(events=EVENTS, hashed=st.booleans())
def test_T23_a_file_is_what_was_written_however_it_was_cut(events: list[int | str], hashed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, expected = Path(folder) / "a.partial", b""
        file = PartialFile(path, whole_bytes=WHOLE_BYTES, hashed=hashed)
        for number, event in enumerate(events):
            if event == "cut":
                file.close()
                assert path.read_bytes() == expected
                file = PartialFile(path, whole_bytes=WHOLE_BYTES, synced_bytes=len(expected), hashed=hashed)
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


def test_T23_what_is_gathered_is_written_when_it_fills_a_room(tmp_path: Path) -> None:
    path = tmp_path / "a.partial"
    file = PartialFile(path, whole_bytes=WHOLE_BYTES)
    file.write(b"a" * 5000)
    assert path.stat().st_size == 4096
    file.write(b"b" * 3192)
    assert path.stat().st_size == 8192
    file.drop()
    assert not path.exists()
