"""Two packages with one verifier's name and other words train on other rewards: the hello, the plan, the record of the
run and the trainer tell them apart, and a mixture is refused unless it is allowed."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from coordinator import store as db
from coordinator.config import load_config
from coordinator.ingress import check_hello
from coordinator.main import check
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.grading.own_verifiers import own_verifiers_sha256
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, UsageError
from fedsilo.protocol.plan import plan_from_canonical
from policies import kinds
from silo.config import config_from
from silo.guard.site import own_verifiers, require_part, trained_with
from tests.algorithms.test_grading_mixture import DOSAGE, installed
from tests.algorithms.tiny import make_plan
from tests.coordinator_folder import write_coordinator
from tests.policies import setting
from tests.simulated.coordinator_parts import AGREED, federation, hello
from tests.world import Loop

__all__ = ["installed"]
EXAMPLE = (Path(__file__).parents[2] / "examples" / "hospital_a.yaml").read_text()


def test_the_digest_follows_name_version_and_every_file_and_loads_nothing(installed: Path) -> None:
    def of(*names: str) -> str:
        return own_verifiers_sha256(names)

    first = of("dosage")
    assert len(first) == 64 and first == of("dosage*0.5+exact*0.5", "math") == of("dosage", "dosage*0.9+format*0.1")
    assert of("math", "exact*0.9+format*0.1") == of() == ""
    assert of("dosage", "empty") not in (first, of("empty"))
    assert "dosage" not in sys.modules
    (installed / "dosage.py").write_text(DOSAGE.replace("mg", "g"))
    other = of("dosage")
    assert other != first
    (installed / "dosage.py").write_text(DOSAGE)
    assert of("dosage") == first
    info = installed / "hospital_graders-1.2.dist-info" / "METADATA"
    info.write_text(info.read_text().replace("1.2", "1.3"))
    assert of("dosage") != first


def test_a_package_is_compared_with_all_its_files_but_not_with_what_python_compiled(installed: Path) -> None:
    (installed / "dosage.py").unlink()
    package = installed / "dosage"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").write_text(DOSAGE)
    (package / "table.json").write_text("{}")
    first = own_verifiers_sha256(["dosage"])
    (package / "__pycache__" / "a.pyc").write_text("x")
    assert own_verifiers_sha256(["dosage"]) == first
    (package / "table.json").write_text("[]")
    second = own_verifiers_sha256(["dosage"])
    (package / "table.json").rename(package / "tables.json")
    assert len({first, second, own_verifiers_sha256(["dosage"])}) == 3


def test_what_cannot_be_compared_is_refused(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no_such_module, which is not installed"):
        own_verifiers_sha256(["broken"])
    monkeypatch.setattr("fedsilo.grading.own_verifiers.SOURCE_BYTES_MAX", 10)
    with pytest.raises(UsageError, match="too large to compare"):
        own_verifiers_sha256(["dosage"])


A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(("agreed", "told"), [("", A), (A, ""), (A, B), (A, A)])
def test_a_coordinator_takes_other_own_verifiers_only_if_mixing_is_allowed(agreed: str, told: str) -> None:
    ours = dataclasses.replace(AGREED, own_verifiers_sha256=agreed)
    said = hello(own_verifiers_sha256=told)
    assert not kinds.fields_at_fault(said)
    check_hello(said, dataclasses.replace(ours, mixed_verifiers="allow"))
    if agreed == told:
        check_hello(said, ours)
        return
    with pytest.raises(PeerError, match=f"expected {agreed or 'none'}, got {told or 'none'}") as caught:
        check_hello(said, dataclasses.replace(ours, mixed_base="allow"))
    assert caught.value.code == "VERIFIER_MISMATCH"


def test_the_hello_is_refused_at_join_and_what_was_told_is_kept(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    refusal = silos[0].join(own_verifiers_sha256="9" * 64)
    assert (refusal.code, refusal.field, refusal.expected, refusal.got) == (
        "VERIFIER_MISMATCH", "own_verifiers_sha256", "", "9" * 64,
    )  # fmt: skip
    member = house.rows(lambda session: session.get_one(db.Member, "hospital_a"))
    assert json.loads(member.hello)["own_verifiers_sha256"] == "9" * 64


def test_a_coordinator_has_the_agreed_digest_from_its_file_and_tells_what_its_charter_denies(tmp_path: Path) -> None:
    init_ca(tmp_path / "ca", name="cardio-net", kind="federation")
    people: dict[str, Any] = {"alice": ["operator"]}
    provision_site(tmp_path / "main", site="main", federation_ca=tmp_path / "ca", people=people, is_coordinator=True)
    path = write_coordinator(tmp_path / "main", ["hospital_a"])
    plain = check(load_config(path))
    assert (plain.agreed.own_verifiers_sha256, plain.agreed.mixed_verifiers, plain.warnings) == ("", "refuse", ())
    agreed = f'own_verifiers_sha256: "{A}", mixed_verifiers: allow, lora_schema: '
    path.write_text(path.read_text().replace("lora_schema: ", agreed).replace("verifier: exact", "verifier: code"))
    checked = check(load_config(path))
    assert (checked.agreed.own_verifiers_sha256, checked.agreed.mixed_verifiers) == (A, "allow")
    assert "code runs programs" in checked.warnings[0] and "send_only_verified: false" in checked.warnings[1]
    charter = path.with_name("charter.yaml")
    charter.write_text(charter.read_text().replace("send_only_verified: true", "send_only_verified: false"))
    assert len(check(load_config(path)).warnings) == 1


@pytest.mark.parametrize("planned", ["", "same", "b" * 64])
def test_a_silo_takes_a_plan_with_other_own_verifiers_only_if_mixing_is_allowed(installed: Path, planned: str) -> None:
    text = EXAMPLE.replace("verifier: choice", "verifier: dosage*0.9+exact*0.1", 1)
    config = config_from(text.encode(), Path("/site/silo.yaml"))
    own = own_verifiers(config)
    assert len(own) == 64 and json.loads(trained_with(config))["own_verifiers_sha256"] == own
    plan = make_plan(load=config.model.load, silos=(config.silo, "b"))
    plan = plan.model_copy(update={"own_verifiers_sha256": own if planned == "same" else planned})
    assert plan_from_canonical(plan.canonical()) == plan
    require_part(plan.model_copy(update={"mixed_verifiers": "allow"}), config)
    if planned == "same":
        require_part(plan, config)
        return
    with pytest.raises(UsageError, match="own verifiers") as caught:
        require_part(plan, config)
    assert caught.value.code == "VERIFIER_MISMATCH"


def test_the_guard_tells_its_own_verifiers_in_the_hello(tmp_path: Path, installed: Path) -> None:
    loop = Loop(tmp_path / "a", setting.policy_of(setting.policy_text()))
    try:
        for verifier in ("exact", "dosage"):
            config = loop.guard._site.config
            cast(Any, config).data.verifier = verifier
            loop.guard._client.join("namespaces")
            (_, payload) = loop.coordinator.bodies("control.hello")[-1]
            assert pb.Hello.FromString(payload).own_verifiers_sha256 == own_verifiers_sha256([verifier])
    finally:
        loop.close()
