"""The overlap index as the trainer provides it: of what, under which name, built once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fedsilo.protocol.errors import UsageError
from policies.screens import Material, screen_texts
from policies.screens.overlap import OverlapIndex
from silo.guard.screens import Screens, index_key
from silo.link import Link, LinkMessage
from silo.trainer.data import IndexSettings, provide_index, read_fields
from tests.algorithms.test_worker import configuration, folder, guard_end
from tests.simulated.screening import PRIVATE, PUBLIC, policy

__all__ = ["folder", "guard_end"]  # fixtures are found by their names
KEY = bytes(range(32))
SETTINGS = IndexSettings(KEY, 8, 1e-6, True)


def hits(scratch: Path, name: str, text: str) -> int:
    index = OverlapIndex.from_bytes((scratch / name).read_bytes(), key=KEY)
    definitions = policy(["overlap"]).file.text_screens
    return sum(hit.count for hit in screen_texts(definitions, ["overlap"], Material(overlap=index), [text]))


def test_T15_prompts_and_answers_of_every_record_are_in_it_and_the_public_set_is_not(tmp_path: Path) -> None:
    answer = "first the left door then the right door and after that the long corridor to the garden"
    rows = (*PRIVATE, dataclasses.replace(PRIVATE[0], id="3", prompt=PUBLIC[0].prompt, answer=answer))
    told = provide_index(SETTINGS, rows, PUBLIC, tmp_path)
    assert told["records"] == 3
    assert hits(tmp_path, told["file"], PRIVATE[1].prompt) > 0
    assert hits(tmp_path, told["file"], answer) > 0
    # What stands in the public set is no secret, even where a private record repeats it.
    assert hits(tmp_path, told["file"], PUBLIC[0].prompt) == 0
    without = provide_index(dataclasses.replace(SETTINGS, background=False), rows, PUBLIC, tmp_path)
    assert hits(tmp_path, without["file"], PUBLIC[0].prompt) > 0


def test_a_restart_builds_nothing_and_a_changed_corpus_or_setting_does(tmp_path: Path) -> None:
    first = provide_index(SETTINGS, PRIVATE, PUBLIC, tmp_path)
    again = provide_index(SETTINGS, PRIVATE, PUBLIC, tmp_path)
    assert (first["built"], again["built"]) == (True, False)
    assert first["file"] == again["file"]
    names = {first["file"]}
    changes = (
        (SETTINGS, PRIVATE[:1], PUBLIC),
        (SETTINGS, PRIVATE, ()),
        (dataclasses.replace(SETTINGS, n=9), PRIVATE, PUBLIC),
        (dataclasses.replace(SETTINGS, false_positive_rate=1e-7), PRIVATE, PUBLIC),
        (dataclasses.replace(SETTINGS, key=bytes(32)), PRIVATE, PUBLIC),
    )
    for settings, private, public in changes:
        told = provide_index(settings, private, public, tmp_path)
        assert told["built"]
        names.add(told["file"])
        assert [path.name for path in tmp_path.iterdir()] == [told["file"]]  # older ones are gone
    assert len(names) == 1 + len(changes)


def test_T39_a_file_that_was_cut_short_is_built_again(tmp_path: Path) -> None:
    told = provide_index(SETTINGS, PRIVATE, PUBLIC, tmp_path)
    path = tmp_path / told["file"]
    path.write_bytes(path.read_bytes()[:-3])
    assert provide_index(SETTINGS, PRIVATE, PUBLIC, tmp_path)["built"]
    assert hits(tmp_path, told["file"], PRIVATE[0].prompt) > 0


def test_without_a_folder_or_with_a_full_disk_it_says_why(tmp_path: Path) -> None:
    assert provide_index(None, PRIVATE, PUBLIC, tmp_path) == {}
    assert "scratch" in provide_index(SETTINGS, PRIVATE, PUBLIC, None)["why"]
    (tmp_path / "file").write_text("")
    assert "cannot be written" in provide_index(SETTINGS, PRIVATE, PUBLIC, tmp_path / "file")["why"]


def test_settings_of_another_form_are_refused() -> None:
    good = {"key": KEY.hex(), "n": 8, "false_positive_rate": 1e-6, "background": True}
    assert read_fields(IndexSettings, good, "index") == SETTINGS
    without = {name: value for name, value in good.items() if name != "n"}
    for wrong in ({**good, "key": "zz"}, {**good, "key": 7}, without, {**good, "n": None}, {**good, "more": 1}):
        with pytest.raises(UsageError):
            read_fields(IndexSettings, wrong, "index")


@pytest.mark.slow
@pytest.mark.torch
def test_T15_the_trainers_process_leaves_the_index_where_the_guard_opens_it(folder: Path, guard_end: Link) -> None:
    """Over the real link: what the guard asks for in `configure`, the trainer names in `ready`."""
    key = index_key(bytes(32))
    screens, overlap = Screens(key=key), policy(["overlap"])
    asked = screens.index_wanted(overlap.file)
    guard_end.send(LinkMessage("configure", {**configuration(folder), "screen_index": asked}))
    ready = guard_end.receive()
    assert ready.type == "ready", ready.fields
    assert ready.fields["screen_index"]["records"] == 40
    assert len(screens.troubles(overlap)) == 1
    screens.take_index(folder / "scratch", ready.fields["screen_index"], asked)
    assert screens.troubles(overlap) == []
