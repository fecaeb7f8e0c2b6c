"""T59: files that a party obeys are refused where others may write them, or a folder on the way to them, and have no
line that people and `grep` do not see.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from certs.roles import load_roles
from fedsilo.files.durable import require_authority, write_durably
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, OperationError, UsageError
from fedsilo.protocol.strict_yaml import load
from policies.load import load_policy
from silo.guard.checks import check_site
from silo.guard.main import serve
from silo.guard.site import require_authority_files
from tests.policies.setting import policy_text
from tests.simulated.policy_site import PolicySite, text_of

CODE = "WRITABLE_BY_OTHERS"
OTHER = 65_534  # a user who is neither root nor whoever runs the tests


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name).resolve()


def refused(path: Path) -> NotAllowedError:
    with pytest.raises(NotAllowedError) as error:
        require_authority(path)
    assert error.value.code == CODE and error.value.hint
    return error.value


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o622])
def test_T59_a_file_that_others_may_write_is_refused(folder: Path, mode: int) -> None:
    path = folder / "roles.yaml"
    write_durably(path, b"site: a\n")
    require_authority(path)
    path.chmod(mode)
    error = refused(path)
    assert str(path) in error.message and error.hint == f"chmod go-w {path}"
    path.chmod(mode & ~0o022)
    require_authority(path)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_T59_a_folder_on_the_way_that_others_may_write_is_refused(folder: Path, mode: int, depth: int) -> None:
    places = [folder, folder / "site", folder / "site" / "id"]
    places[-1].mkdir(parents=True)
    path = places[-1] / "roles.yaml"
    write_durably(path, b"site: a\n")
    require_authority(path)
    places[depth].chmod(mode)
    error = refused(path)
    assert str(places[depth]) in error.message and error.hint == f"chmod go-w {places[depth]}"
    places[depth].chmod(mode | stat.S_ISVTX)  # as /tmp is: nobody moves there what is somebody else's
    require_authority(path)


def test_T59_links_are_followed_and_each_folder_that_holds_one_counts(folder: Path) -> None:
    for name in ("real", "first", "second"):
        (folder / name).mkdir()
    path = folder / "real" / "roles.yaml"
    write_durably(path, b"site: a\n")
    (folder / "second" / "link").symlink_to("../real/roles.yaml")
    (folder / "first" / "link").symlink_to(folder / "second" / "link")
    require_authority(folder / "first" / "link")
    for name in ("real", "first", "second"):
        (folder / name).chmod(0o777)
        refused(folder / "first" / "link")
        (folder / name).chmod(0o755)
    require_authority(folder / "first" / "link")
    path.chmod(0o666)
    refused(folder / "first" / "link")


def test_T59_what_is_not_there_is_for_whoever_reads_it_and_a_loop_has_an_end(folder: Path) -> None:
    require_authority(folder / "nowhere" / "roles.yaml")
    (folder / "loop").symlink_to("loop")
    with pytest.raises(OperationError):
        require_authority(folder / "loop")


@pytest.mark.parametrize("whose", ["file", "folder", "link"])
def test_T59_what_belongs_to_somebody_else_is_refused(
    folder: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root gives it away; anybody else asks as another user."""
    (folder / "id").mkdir()
    path, link = folder / "id" / "roles.yaml", folder / "link"
    write_durably(path, b"site: a\n")
    link.symlink_to(path)
    require_authority(link)
    if os.geteuid() == 0:
        os.chown({"file": path, "folder": path.parent, "link": link}[whose], OTHER, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "chown" in refused(link).hint


# ---- where it is asked -------------------------------------------------------------------------------------------

OBEYED = ("silo.yaml", "policy.yaml", "id/roles.yaml", "id/site_ca.crt", "id/federation_ca.crt", "id/coordinator.pub")


@pytest.fixture
def place(tmp_path: Path) -> PolicySite:
    site = PolicySite(tmp_path / "site")
    site.policy_is(text_of())
    for name in ("federation_ca.crt", "coordinator.pub"):
        (site.folder / "id" / name).write_bytes(b"x")
    return site


@pytest.mark.parametrize("name", OBEYED)
def test_T59_each_file_that_a_site_obeys_is_looked_at(place: PolicySite, name: str) -> None:
    require_authority_files(place.config)
    (place.folder / name).chmod(0o666)
    with pytest.raises(NotAllowedError) as error:
        require_authority_files(place.config)
    assert error.value.code == CODE and name in error.value.message


def test_T59_so_are_the_charter_and_the_patterns_that_the_policy_names(place: PolicySite) -> None:
    place.configure(charter=text_of())
    require_authority_files(place.config)
    (place.folder / "charter.yaml").chmod(0o666)
    with pytest.raises(NotAllowedError):
        require_authority_files(place.config)


def test_T59_silo_check_and_silo_start_refuse_and_say_which(place: PolicySite) -> None:
    def checked() -> dict[str, object]:
        results, _, _ = check_site(place.config, reach_coordinator=False)
        (found,) = [result for result in results if result["check"] == "files that rule this site"]
        return found

    assert checked()["ok"] is True
    (place.folder / "id").chmod(0o777)
    found = checked()
    assert (found["ok"], found["code"]) == (False, CODE) and str(place.folder / "id") in str(found["hint"])
    with pytest.raises(NotAllowedError) as error:
        serve(place.config, ready=lambda _: None)
    assert error.value.code == CODE
    (place.folder / "id").chmod(0o700)
    with pytest.raises(FedSiloError) as other:  # the counterpart: it gets as far as the certificate
        serve(place.config, ready=lambda _: None)
    assert other.value.code != CODE


HIDDEN = ("\u0085", "\u2028", "\u2029", "\r")


@pytest.mark.parametrize("character", HIDDEN, ids=ascii)
def test_T59_a_key_behind_a_break_that_only_yaml_sees_is_refused(character: str) -> None:
    text = f"first: 1\n# a comment{character}second: 2\n"
    with pytest.raises(UsageError) as refused:
        load(text.encode(), "file.yaml")
    assert refused.value.message.startswith("file.yaml:2: ") and f"U+{ord(character):04X}" in refused.value.message
    visible = load(f"first: 1\r\n# a comment{ascii(character)[1:-1]}second: 2\r\n".encode(), "file.yaml")
    assert visible.value == {"first": 1}


@pytest.mark.parametrize("character", HIDDEN, ids=ascii)
def test_T59_an_escape_in_a_quoted_text_is_seen_and_passes(character: str) -> None:
    assert load(f'name: "a\\u{ord(character):04x}b"\n'.encode(), "file.yaml").value == {"name": f"a{character}b"}


@pytest.mark.parametrize("character", HIDDEN, ids=ascii)
def test_T59_policies_and_roles_are_read_so(character: str) -> None:
    policy = policy_text()
    load_policy(f"{policy}# seen by two people\n".encode(), "policy.yaml")
    with pytest.raises(UsageError):
        load_policy(f"{policy}# seen by two people{character}".encode(), "policy.yaml")
    with pytest.raises(UsageError) as refused:
        load_roles(f"# seen{character}".encode(), "roles.yaml")
    assert f"U+{ord(character):04X}" in refused.value.message
