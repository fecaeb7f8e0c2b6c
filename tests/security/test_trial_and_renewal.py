"""`fedsilo certs trial`, for a federation that is only tried out, and renewal with the keys that a party has."""

from __future__ import annotations

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from certs.encoding import public_key_bytes, read_one_certificate
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.demo.provision import enrol_coordinator, enrol_operator, enrol_silo, init_ca, invite, provision_site
from fedsilo.files.identity_files import load_identity, load_operator, load_site
from fedsilo.protocol.errors import NotAllowedError, OperationError

SILOS = ("hospital_a", "hospital_b")


def certs(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit status and envelope of `fedsilo certs ... --json`."""
    done = CliRunner().invoke(cli_fedsilo.app, ["certs", *map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_a_trial_has_every_party_with_people_of_its_own_site_only(tmp_path: Path) -> None:
    out = tmp_path / "trial"
    status, envelope = certs("trial", "cardio-net", "--silos", ",".join(SILOS), "--out", out)
    assert status == 0 and list(envelope["data"]["folders"]) == ["coordinator", *SILOS]
    assert "trial" in envelope["warnings"][0]
    pinned = (out / "coordinator" / "id" / "coordinator.pub").read_bytes()
    for folder, name, role, people in (
        ("coordinator", "main", "coordinator", ("carol",)),
        *((silo, silo, "silo", ("alice", "bob")) for silo in SILOS),
    ):
        held = out / folder / "id"
        files = (held / f"{name}.crt", held / f"{name}.key", held / f"{name}.ed25519", held / "federation_ca.crt")
        party = load_identity(*files, role=role)  # type: ignore[arg-type]  # one of two literals
        assert party.spiffe_id == f"spiffe://cardio-net/{role}/{name}"
        assert party.not_after - datetime.now(UTC) > timedelta(days=6.9)
        _, roles = load_site(held / "site_ca.crt", held / "roles.yaml", site=name)
        assert set(roles.people) == set(people) and roles.who_may("release.approve") == people
        for person in people:
            load_operator(held / f"{person}.crt", held / f"{person}.key", held / "site_ca.crt")
        assert (held / "coordinator.pub").read_bytes() == pinned
    # T28: alice of one hospital is nobody at the other
    other = out / "hospital_b" / "id" / "site_ca.crt"
    mine = out / "hospital_a" / "id"
    with pytest.raises(NotAllowedError):
        load_operator(mine / "alice.crt", mine / "alice.key", other)


@pytest.mark.parametrize(
    "silos",
    ["", "hospital_a,hospital_a", "Hospital A"]
    # a folder, a file or a site of that name is somebody else's
    + [f"hospital_a,{name}" for name in ("coordinator", "federation_ca", "site_ca", "guard", "trainer", "main")]
    + [f"hospital_a,{name}" for name in ("alice", "bob", "carol")],
)
def test_a_trial_with_names_that_cannot_be_is_refused_before_a_key_is_made(tmp_path: Path, silos: str) -> None:
    assert certs("trial", "cardio-net", "--silos", silos, "--out", tmp_path / "trial")[0] == 2
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_fails_half_way_leaves_nothing_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, made = tmp_path / "trial", []

    def second_site_fails(folder: Path, **site: Any) -> Path:
        made.append(folder.name)
        if len(made) == 2:
            assert any(folder.parent.rglob("*.key"))
            raise OperationError("the disk is full")
        return provision_site(folder, **site)

    with monkeypatch.context() as patched:
        patched.setattr("fedsilo.demo.provision.provision_site", second_site_fails)
        status, envelope = certs("trial", "cardio-net", "--silos", ",".join(SILOS), "--out", out)
    assert (status, envelope["error"]["message"]) == (1, "the disk is full")
    assert made == ["coordinator", "hospital_a"] and list(tmp_path.iterdir()) == []
    out.mkdir()  # an empty folder is as good as none
    assert certs("trial", "cardio-net", "--silos", ",".join(SILOS), "--out", out)[0] == 0
    assert {path.name for path in out.iterdir()} == {"coordinator", "federation_ca", *SILOS}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


def test_a_trial_does_not_take_the_current_folder_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, envelope = certs("trial", "cardio-net", "--silos", "hospital_a", "--out", ".")
    assert (status, envelope["error"]["code"]) == (6, "CONFLICT")
    assert list(tmp_path.iterdir()) == []


def test_T31_a_trial_never_writes_over_another(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("something")
    status, envelope = certs("trial", "cardio-net", "--silos", "hospital_a", "--out", tmp_path)
    assert (status, envelope["error"]["code"]) == (6, "CONFLICT")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_T33_renewal_keeps_both_keys_and_moves_the_date(tmp_path: Path) -> None:
    authority, held = tmp_path / "ca", tmp_path / "id"
    init_ca(authority, name="cardio-net", kind="federation")
    enrol_silo(authority, held, "hospital_a", lifetime=timedelta(hours=1))
    files = (held / "hospital_a.crt", held / "hospital_a.key", held / "hospital_a.ed25519", held / "federation_ca.crt")
    keys = files[1].read_bytes(), files[2].read_bytes()
    before = load_identity(*files, role="silo")

    token = invite(authority, "silo/hospital_a")
    assert certs("request", "--token", token, "--out", held)[0] == 6  # keys are never replaced
    assert certs("renew", "--token", token, "--out", held)[0] == 0
    status, _ = certs("sign", held / "hospital_a.request.json", "--ca", authority, "--out", files[0])
    assert status == 0
    after = load_identity(*files, role="silo")
    assert (files[1].read_bytes(), files[2].read_bytes()) == keys
    assert after.peer.signing_public_key == before.peer.signing_public_key
    assert after.not_after > before.not_after + timedelta(days=6)
    # a second renewal finds the first one's request beside the keys
    assert certs("renew", "--token", invite(authority, "silo/hospital_a"), "--out", held)[0] == 0
    assert stat.S_IMODE((held / "hospital_a.request.json").stat().st_mode) == 0o600


def test_T33_an_expired_certificate_a_coordinator_s_and_a_person_s_are_renewed_with_their_keys(tmp_path: Path) -> None:
    long_ago = datetime.now(UTC) - timedelta(days=30)
    federation, site = tmp_path / "federation", tmp_path / "site"
    init_ca(federation, name="cardio-net", kind="federation", now=long_ago)
    init_ca(site, name="hospital_a", kind="site", now=long_ago)
    enrol_silo(federation, tmp_path / "silo", "hospital_a", now=long_ago)
    enrol_coordinator(federation, tmp_path / "main", "main")
    enrol_operator(site, tmp_path / "people", "alice", now=long_ago)
    for authority, short_id, folder in (
        (federation, "silo/hospital_a", "silo"),
        (federation, "coordinator/main", "main"),
        (site, "operator/alice", "people"),
    ):
        held, name = tmp_path / folder, short_id.partition("/")[2]
        before = key_of(held / f"{name}.crt")
        status, envelope = certs("renew", "--token", invite(authority, short_id), "--out", held)
        assert status == 0 and (envelope["data"]["signing_key"] is None) == (folder == "people")
        assert certs("sign", held / f"{name}.request.json", "--ca", authority, "--out", held / f"{name}.crt")[0] == 0
        assert key_of(held / f"{name}.crt") == before


def key_of(certificate: Path) -> bytes:
    return public_key_bytes(read_one_certificate(certificate.read_bytes(), what="it"))


def test_T31_renewal_without_keys_or_with_keys_that_others_read_is_refused(tmp_path: Path) -> None:
    authority, held = tmp_path / "ca", tmp_path / "id"
    init_ca(authority, name="cardio-net", kind="federation")
    assert certs("renew", "--token", invite(authority, "silo/nobody"), "--out", held)[0] == 8
    assert not held.exists()
    enrol_silo(authority, held, "hospital_a")
    (held / "hospital_a.ed25519").chmod(0o644)
    status, _ = certs("renew", "--token", invite(authority, "silo/hospital_a"), "--out", held)
    assert status == 4
    assert not (held / "hospital_a.request.json").exists()


def test_T31_a_token_for_another_identity_of_that_name_is_not_answered_with_the_keys_there(tmp_path: Path) -> None:
    """One folder, one name: the silo hospital_a, a person and a coordinator called so, and a silo elsewhere."""
    federation, site, other, held = (tmp_path / name for name in ("federation", "site", "other", "id"))
    init_ca(federation, name="cardio-net", kind="federation")
    init_ca(site, name="hospital_a", kind="site")
    init_ca(other, name="other-net", kind="federation")
    enrol_silo(federation, held, "hospital_a")
    (held / "hospital_a.request.json").write_text("as it was")
    for authority, short_id in (
        (site, "operator/hospital_a"),
        (site, "trainer/hospital_a"),
        (federation, "coordinator/hospital_a"),
        (other, "silo/hospital_a"),
    ):
        status, envelope = certs("renew", "--token", invite(authority, short_id), "--out", held)
        assert (status, envelope["error"]["code"]) == (4, "NOT_ALLOWED")
        message = envelope["error"]["message"]
        assert "is the certificate of spiffe://cardio-net/silo/hospital_a, the token is for spiffe://" in message
        assert short_id in message
    assert (held / "hospital_a.request.json").read_text() == "as it was"
    assert certs("renew", "--token", invite(federation, "silo/hospital_a"), "--out", held)[0] == 0


@pytest.mark.parametrize(
    ("ending", "said"), [("key", "does not match"), ("ed25519", "is not the key that"), ("crt", "not a PEM certif")]
)
def test_T31_renewal_with_a_file_of_another_enrolment_is_refused(tmp_path: Path, ending: str, said: str) -> None:
    authority, held, stray = tmp_path / "ca", tmp_path / "id", tmp_path / "stray"
    init_ca(authority, name="cardio-net", kind="federation")
    for folder in (held, stray):
        enrol_silo(authority, folder, "hospital_a")
    wrong = b"no certificate" if ending == "crt" else (stray / f"hospital_a.{ending}").read_bytes()
    (held / f"hospital_a.{ending}").write_bytes(wrong)
    status, envelope = certs("renew", "--token", invite(authority, "silo/hospital_a"), "--out", held)
    assert status == 4 and said in envelope["error"]["message"]
    assert not (held / "hospital_a.request.json").exists()
