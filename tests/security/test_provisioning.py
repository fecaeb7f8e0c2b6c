"""T31, T32 on disk: modes, links, half-done work, and a whole site made by the functions the commands call."""

from __future__ import annotations

import json
import os
import stat
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsilo.cli import certs as cli_certs
from fedsilo.demo import provision
from fedsilo.files.durable import write_private
from fedsilo.files.identity_files import load_coordinator_key, load_identity, load_operator, load_site
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError, OperationError, UsageError
from tests.security.people import NOW


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    folder = tmp_path / "federation"
    provision.init_ca(folder, name="cardio-net", kind="federation", now=NOW)
    return folder


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def load(folder: Path, name: str = "a", role: str = "silo") -> str:
    certificate, key, signing_key = (folder / f"{name}.{suffix}" for suffix in ("crt", "key", "ed25519"))
    return load_identity(certificate, key, signing_key, folder / "federation_ca.crt", role=role, now=NOW).spiffe_id  # type: ignore[arg-type]


def test_T31_keys_are_0600_whatever_the_umask(federation: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        provision.enrol_silo(federation, tmp_path / "id", "a", now=NOW)
    finally:
        os.umask(before)
    found = modes(tmp_path / "id")
    assert found == {"a.key": 0o600, "a.ed25519": 0o600, "a.crt": 0o644, "federation_ca.crt": 0o644}
    assert stat.S_IMODE((tmp_path / "id").stat().st_mode) == 0o700
    assert modes(federation)["ca.key"] == modes(federation)["tokens.json"] == 0o600
    assert load(tmp_path / "id") == "spiffe://cardio-net/silo/a"


@pytest.mark.parametrize("name", ["a.key", "a.ed25519"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_T31_a_looser_key_is_refused_and_named(federation: Path, tmp_path: Path, name: str, mode: int) -> None:
    provision.enrol_silo(federation, tmp_path / "id", "a", now=NOW)
    (tmp_path / "id" / name).chmod(mode)
    with pytest.raises(NotAllowedError, match=f"{name} has mode {mode:04o}") as caught:
        load(tmp_path / "id")
    assert caught.value.hint == f"chmod 600 {tmp_path / 'id' / name}"
    (tmp_path / "id" / name).chmod(0o600)
    load(tmp_path / "id")


def test_T31_keys_are_never_replaced_nor_written_through_a_link(federation: Path, tmp_path: Path) -> None:
    provision.enrol_silo(federation, tmp_path / "id", "a", now=NOW)
    key = (tmp_path / "id" / "a.key").read_bytes()
    with pytest.raises(ConflictError, match="exists already"):
        provision.enrol_silo(federation, tmp_path / "id", "a", now=NOW)
    assert (tmp_path / "id" / "a.key").read_bytes() == key
    assert load(tmp_path / "id") == "spiffe://cardio-net/silo/a"

    target = tmp_path / "elsewhere"
    (tmp_path / "id" / "b.ed25519").symlink_to(target)
    with pytest.raises(ConflictError, match="exists already"):
        provision.request(tmp_path / "id", provision.invite(federation, "silo/b", now=NOW))
    assert not target.exists()
    assert not (tmp_path / "id" / "b.key").exists()  # made before the link was met, and taken away again


def test_T31_nothing_is_left_when_the_disk_fills_midway(
    federation: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = write_private

    def full_at_second(path: Path, data: bytes) -> None:
        if path.suffix == ".ed25519":
            raise OperationError(f"cannot write {path}: No space left on device")
        real(path, data)

    monkeypatch.setattr(provision, "write_private", full_at_second)
    with pytest.raises(OperationError, match="No space"):
        provision.enrol_silo(federation, tmp_path / "id", "a", now=NOW)
    assert list((tmp_path / "id").iterdir()) == []


def test_T32_a_token_works_once_on_disk_too(federation: Path, tmp_path: Path) -> None:
    token = provision.invite(federation, "silo/a", now=NOW)
    enrolment = provision.request(tmp_path / "id", token)
    data = enrolment.request.read_bytes()
    # A server's names are not for a silo; the refusal comes before the token is spent.
    with pytest.raises(UsageError, match="no coordinator"):
        provision.sign(federation, data, dns_names=["localhost"], now=NOW)
    issued = provision.sign(federation, data, now=NOW)
    assert issued.spiffe_id == "spiffe://cardio-net/silo/a"
    with pytest.raises(NotAllowedError, match="used before"):
        provision.sign(federation, data, now=NOW)
    assert [row["spiffe_id"] for row in provision.list_issued(federation)] == [issued.spiffe_id]
    assert token.encode() not in (federation / "tokens.json").read_bytes()


def test_T32_a_ca_invites_only_whom_it_may_vouch_for(federation: Path, tmp_path: Path) -> None:
    provision.init_ca(tmp_path / "site", name="a", kind="site", now=NOW)
    for folder, wrong in ((federation, "operator/alice"), (tmp_path / "site", "silo/a"), (federation, "silo/../a")):
        with pytest.raises(UsageError):
            provision.invite(folder, wrong, now=NOW)
    with pytest.raises(ConflictError, match="exists already"):
        provision.init_ca(federation, name="other", kind="federation", now=NOW)
    with pytest.raises(NotFoundError, match="holds no CA"):
        provision.open_ca(tmp_path / "nowhere")


def test_T28_a_whole_site_stands_and_swapped_roots_are_named(federation: Path, tmp_path: Path) -> None:
    main = provision.provision_site(
        tmp_path / "main",
        site="main",
        federation_ca=federation,
        people={"carol": ["operator"]},
        is_coordinator=True,
        now=NOW,
    )
    public = (main / "coordinator.pub").read_bytes()
    people = {"alice": ["approver"], "bob": ["viewer", "operator"]}
    site = provision.provision_site(
        tmp_path / "a",
        site="a",
        federation_ca=federation,
        people=people,  # type: ignore[arg-type]
        coordinator_public_key=public,
        now=NOW,
    )
    assert set(modes(site)) == {
        *("a.crt", "a.key", "a.ed25519", "federation_ca.crt", "site_ca.crt", "roles.yaml", "coordinator.pub"),
        *("alice.crt", "alice.key", "bob.crt", "bob.key"),
    }
    assert load(main, "main", "coordinator") == "spiffe://cardio-net/coordinator/main"
    assert load(site) == "spiffe://cardio-net/silo/a"
    pem, roles = load_site(site / "site_ca.crt", site / "roles.yaml", site="a")
    assert roles.people == {person: frozenset(has) for person, has in people.items()}
    assert pem == (site / "site_ca.crt").read_bytes()
    load_operator(site / "alice.crt", site / "alice.key", site / "site_ca.crt", now=NOW)
    # The pinned key is the one the coordinator signs with.
    identity = load_identity(
        main / "main.crt",
        main / "main.key",
        main / "main.ed25519",
        main / "federation_ca.crt",
        role="coordinator",
        now=NOW,
    )
    pinned = load_coordinator_key(site / "coordinator.pub")
    assert pinned == identity.signing_key.public_key()

    with pytest.raises(NotAllowedError, match="not the site CA of 'a'"):
        load_site(site / "federation_ca.crt", site / "roles.yaml", site="a")
    with pytest.raises(NotAllowedError, match=r"alice.key does not match .*bob.crt"):
        load_operator(site / "bob.crt", site / "alice.key", site / "site_ca.crt", now=NOW)
    with pytest.raises(NotAllowedError, match=r"alice.crt: .*expired"):
        load_operator(site / "alice.crt", site / "alice.key", site / "site_ca.crt", now=NOW + timedelta(hours=9))
    with pytest.raises(UsageError, match="needs the coordinator's public key"):
        provision.provision_site(tmp_path / "b", site="b", federation_ca=federation, people={}, now=NOW)


def test_T31_the_commands_say_what_is_wrong_in_one_envelope(tmp_path: Path) -> None:
    runner = CliRunner()

    def run(*arguments: str) -> dict[str, object]:
        result = runner.invoke(cli_certs.app, [*arguments, "--json"])
        answer = json.loads(result.stdout)
        assert answer["ok"] == (result.exit_code == 0)
        return {"exit": result.exit_code, **answer}

    ca, folder = str(tmp_path / "ca"), tmp_path / "id"
    assert run("ca-init", "net", "--kind", "federation", "--out", ca)["ok"]
    token = run("invite", "silo/a", "--ca", ca)["data"]["token"]  # type: ignore[index]
    assert run("request", "--token", token, "--out", str(folder))["ok"]
    sign = ("sign", str(folder / "a.request.json"), "--ca", ca, "--out", str(folder / "a.crt"))
    assert run(*sign)["ok"]
    again = run(*sign)
    assert again["exit"] == 4
    assert "used before" in again["error"]["message"]  # type: ignore[index]
    check = ["check", "--certificate", f"{folder}/a.crt", "--key", f"{folder}/a.key", "--root", f"{ca}/ca.crt"]
    check += ["--signing-key", f"{folder}/a.ed25519"]
    assert run(*check, "--role", "silo")["data"]["spiffe_id"] == "spiffe://net/silo/a"  # type: ignore[index]
    assert "wrong role" in run(*check, "--role", "coordinator")["error"]["message"]  # type: ignore[index]
    (folder / "a.key").chmod(0o644)
    loose = run(*check, "--role", "silo")
    assert loose["exit"] == 4
    assert loose["error"]["hint"] == f"chmod 600 {folder}/a.key"  # type: ignore[index]
    assert len(run("list", "--ca", ca)["data"]["certificates"]) == 1  # type: ignore[index]
    assert run("show", f"{folder}/a.crt")["data"]["names"] == ["UniformResourceIdentifier:spiffe://net/silo/a"]  # type: ignore[index]
    assert run("show", str(tmp_path / "absent"))["exit"] == 8
