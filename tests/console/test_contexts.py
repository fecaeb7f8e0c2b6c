"""The file of contexts: what is refused with its line, who may write it, and that what is written is read back."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fedsilo.cli.contexts import (
    ContextEntry,
    context_given,
    context_named,
    contexts,
    contexts_path,
    current_context,
    write,
)
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, NotFoundError, UsageError

GOOD = """current: prod
contexts:
  prod:
    kind: silo
    site: hospital_a
    socket: a/control.sock
    operator_certificate: alice.crt
    operator_key: alice.key
  hub:
    kind: coordinator
    socket: /run/hub.sock
"""


def kept(folder: Path, text: str = GOOD, mode: int = 0o600) -> Path:
    path = folder / "contexts.yaml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_is_read_with_paths_that_count_from_it(tmp_path: Path) -> None:
    path = kept(tmp_path)
    files = tmp_path / "alice.crt", tmp_path / "alice.key"
    prod = ContextEntry("prod", "silo", tmp_path / "a/control.sock", "hospital_a", None, *files, f"{path}:3")
    found = contexts(path)
    assert list(found) == ["prod", "hub"] and current_context(path) == "prod" and found["prod"] == prod
    assert found["hub"].socket == Path("/run/hub.sock") and found["hub"].site == ""
    assert context_given("hub", path).kind == "coordinator"
    with pytest.raises(FedSiloError) as refused:
        context_given("hib", path)
    assert "prod, hub" in refused.value.hint


def test_without_a_file_there_is_no_context(tmp_path: Path) -> None:
    assert contexts(tmp_path / "none.yaml") == {} and current_context(tmp_path / "none.yaml") == ""
    with pytest.raises(NotFoundError, match="'prod'"):
        context_named("prod", tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kind: silo", "kind: sily", ":4: contexts.prod.kind: "),
        ("    site: hospital_a\n", "", ":3: context 'prod' "),
        ("kind: coordinator", "kind: coordinator\n    site: x", ":9: context 'hub' "),
        ("    operator_key: alice.key\n", "", ":3: operator_certificate and operator_key "),
        ("current: prod", "current: other", ":1: there is no context 'other'"),
        ("  hub:", "  '../hub':", "a context cannot be called '../hub'"),
        ("    kind: silo\n", "    kind: silo\n    password: x\n", "unknown key 'contexts.prod.password'"),
        ("socket: /run/hub.sock", "socket: ''", "contexts.hub.socket: "),
        ("  hub:", "  prod:", "'prod' stands twice"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(UsageError) as refused:
        contexts(kept(tmp_path, GOOD.replace(old, new)))
    assert said in str(refused.value)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666, None])
def test_a_file_of_another_person_or_that_others_may_write_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    path = kept(tmp_path, mode=0o644)
    assert contexts(path)
    if mode is not None:
        path.chmod(mode)
    elif os.geteuid() == 0:
        os.chown(path, 65_534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NotAllowedError) as refused:
        contexts(path)
    assert refused.value.code == "WRITABLE_BY_OTHERS"


def test_what_is_written_is_read_back_and_is_the_persons_own(tmp_path: Path) -> None:
    path = tmp_path / "new" / "contexts.yaml"
    odd = ContextEntry("no", "silo", Path("/run/a: b #c/é.sock"), "1e-6", Path("/etc/silo.yaml"))
    entries = {"no": odd, "2026-01-01": ContextEntry("2026-01-01", "coordinator", Path("/run/hub.sock"))}
    assert write(entries, "no", path) == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for read, written in zip(contexts(path).values(), entries.values(), strict=True):
        for name in ("name", "kind", "socket", "site", "config"):
            assert getattr(read, name) == getattr(written, name)
    assert current_context(path) == "no"
    write({}, "", path)
    assert contexts(path) == {} and current_context(path) == ""


def test_a_relative_file_may_be_written_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    kept(tmp_path / "sub")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSILO_CONTEXTS", "sub/contexts.yaml")
    for given in (None, Path("sub/contexts.yaml")):
        for _ in range(2):
            write(contexts(given), current_context(given), given)
        found = contexts(given)["prod"]
        assert found.socket == tmp_path / "sub/a/control.sock" and found.operator_key == tmp_path / "sub/alice.key"


@pytest.mark.parametrize(
    ("entry", "current"),
    [
        (ContextEntry("a b", "coordinator", Path("x")), ""),
        (ContextEntry("a", "coordinator", Path("x\ny")), ""),
        (ContextEntry("a", "silo", Path("x")), ""),
        (ContextEntry("a", "coordinator", Path("x")), "b"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, entry: ContextEntry, current: str) -> None:
    path = kept(tmp_path)
    with pytest.raises(UsageError):
        write({entry.name: entry}, current, path)
    assert path.read_text() == GOOD
    write({"a": ContextEntry("a", "coordinator", Path("x"))}, "a", path)
    assert current_context(path) == "a"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("silo:a=/s", ("silo:a", "silo", "/s", "a")),
        ("coordinator=/s", ("coordinator", "coordinator", "/s", "")),
        ("prod=silo:a=/s=1", ("prod", "silo", "/s=1", "a")),
        ("hub-2=coordinator=/s", ("hub-2", "coordinator", "/s", "")),
        *((wrong, None) for wrong in ("silo=x", "silo:=x", "silo:a=", "coordinator:a=x", "x=y", "=silo:a=x")),
        ("a b=silo:a=x", None),
    ],
)
def test_a_context_is_given_with_or_without_a_label(text: str, expected: tuple[str, str, str, str] | None) -> None:
    if expected is None:
        with pytest.raises(UsageError):
            context_given(text)
        return
    found = context_given(text)
    assert (found.name, found.kind, str(found.socket), found.site) == expected


@pytest.mark.parametrize(
    ("environment", "path"),
    [
        ({"FEDSILO_CONTEXTS": "/x/c.yaml"}, Path("/x/c.yaml")),
        ({"FEDSILO_CONTEXTS": "x/c.yaml"}, Path.cwd() / "x" / "c.yaml"),
        ({"XDG_CONFIG_HOME": "/x"}, Path("/x/fedsilo/contexts.yaml")),
        ({"XDG_CONFIG_HOME": "x"}, Path.home() / ".config/fedsilo/contexts.yaml"),
    ],
)
def test_where_the_file_lies_follows_the_person(environment: dict[str, str], path: Path) -> None:
    assert contexts_path(environment) == path
