"""`fedsilo certs trial`, for a federation that is only tried out, and renewal with the keys that a party has."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.edge.identity_files import load_identity, load_operator, load_site
from fedsilo.launch.cli import fedsilo_app
from fedsilo.launch.provision import enrol_silo, init_ca, invite
from fedsilo.treaty.errors import NotAllowedError

SILOS = ("hospital_a", "hospital_b")


def certs(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit status and envelope of `fedsilo certs ... --json`."""
    done = CliRunner().invoke(fedsilo_app, ["certs", *map(str, arguments), "--json"])
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


@pytest.mark.parametrize("silos", ["", "hospital_a,hospital_a", "coordinator,hospital_a", "Hospital A"])
def test_a_trial_with_names_that_cannot_be_is_refused(tmp_path: Path, silos: str) -> None:
    assert certs("trial", "cardio-net", "--silos", silos, "--out", tmp_path / "trial")[0] == 2
    assert not (tmp_path / "trial").exists()


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
    assert certs("request", "--token", token, "--out", held, "--renew")[0] == 0
    status, _ = certs("sign", held / "hospital_a.request.json", "--ca", authority, "--out", files[0])
    assert status == 0
    after = load_identity(*files, role="silo")
    assert (files[1].read_bytes(), files[2].read_bytes()) == keys
    assert after.peer.signing_public_key == before.peer.signing_public_key
    assert after.not_after > before.not_after + timedelta(days=6)
    # a second renewal finds the first one's request beside the keys
    assert certs("request", "--token", invite(authority, "silo/hospital_a"), "--out", held, "--renew")[0] == 0


def test_T31_renewal_without_keys_or_with_keys_that_others_read_is_refused(tmp_path: Path) -> None:
    authority, held = tmp_path / "ca", tmp_path / "id"
    init_ca(authority, name="cardio-net", kind="federation")
    assert certs("request", "--token", invite(authority, "silo/nobody"), "--out", held, "--renew")[0] == 8
    enrol_silo(authority, held, "hospital_a")
    (held / "hospital_a.ed25519").chmod(0o644)
    status, _ = certs("request", "--token", invite(authority, "silo/hospital_a"), "--out", held, "--renew")
    assert status == 4
    assert not (held / "hospital_a.request.json").exists()
