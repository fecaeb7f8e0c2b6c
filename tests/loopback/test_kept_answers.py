"""Real daemons, started on folders that an earlier version left, answer every query as that version did, byte for byte.

What is kept and how it is compared: `tests.answers`, `tools.vectors`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import answers
from tests.answers import ROOT, Daemon, Party

KEPT = answers.kept_answers(ROOT / "tests/vectors/before_folders.answers.jsonl.xz")
PARTIES = list(dict.fromkeys(one.party for one in KEPT))


@pytest.fixture(scope="module")
def daemons() -> Iterator[dict[str, Daemon]]:
    folder = Path(tempfile.mkdtemp(prefix="fv"))  # short: a socket's path has at most 107 bytes
    try:
        kept = answers.unpacked(ROOT / "tests/vectors/before_folders.tar.xz", folder)
        with answers.running(kept, PARTIES) as running:
            yield running
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("party", PARTIES, ids=lambda party: party.folder)
def test_every_query_is_answered_as_before(daemons: dict[str, Daemon], party: Party) -> None:
    found = []
    for kept in KEPT:
        if kept.party == party:
            told = daemons[party.folder].answer(kept.name, kept.arguments)
            found += [
                f"{kept.name or 'state'} {kept.arguments} {line}" for line in answers.differences(kept.text, told)
            ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("program", list(answers.QUERIES))
def test_every_query_there_is_has_an_answer_that_tells_something(program: str) -> None:
    told = {one.name for one in KEPT if one.party.program == program and _tells(one.text)}
    assert {name for name in told if not name.startswith("!")} - {""} == answers.QUERIES[program]


def _tells(text: str) -> bool:
    """Whether an answer is no refusal, and not all empty."""
    if not text.startswith(("{", "[")):
        return False
    value = json.loads(text)
    return any(value.values()) if isinstance(value, dict) else bool(value)


def test_a_renamed_key_and_another_order_are_noticed() -> None:
    kept = '{"size":3,"next":null}'
    assert answers.differences(kept, kept) == []
    assert answers.differences(kept, '{"length":3,"next":null}')
    assert answers.differences(kept, '{"next":null,"size":3}')
    assert answers.differences(kept, '{"size":3.0,"next":null}')
    assert answers.differences(kept, '{"size": 3,"next":null}') == ["the same values, written otherwise"]
