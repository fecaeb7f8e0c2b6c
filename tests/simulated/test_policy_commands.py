"""`fedsilo policy propose|activate|fmt|check --charter` and `silo check` on a site's folder, as people give them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.cli.policy import app
from fedsilo.protocol.errors import NotAllowedError
from policies.load import load_policy
from silo.guard.checks import check_site
from tests.policies import setting
from tests.simulated.policy_site import PolicySite, text_of

LOOSER, TIGHTER = ("min_peers: 2", "min_peers: 1"), ("min_peers: 2", "min_peers: 3")
TWO = ("policy_change: 1", "policy_change: 2")

Run = Callable[..., tuple[int, Any]]


@pytest.fixture
def place(tmp_path: Path) -> PolicySite:
    made = PolicySite(tmp_path / "site")
    made.policy_is(text_of(TWO))
    made.start()
    return made


def run(*arguments: object) -> tuple[int, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def proposed(place: PolicySite, text: str, person: str = "alice", *more: object) -> tuple[int, Any]:
    new = place.folder / "new.yaml"
    new.write_text(text)
    return run("propose", new, "--config", place.folder / "silo.yaml", "--operator", person, *more)


def activate(place: PolicySite, path: object, person: str, digest: str, *more: object) -> tuple[int, Any]:
    return run(
        "activate", path, "--config", place.folder / "silo.yaml", "--operator", person, "--expect-digest", digest, *more
    )


def test_T34_from_a_looser_draft_to_a_start(place: PolicySite) -> None:
    before = (place.folder / "policy.yaml").read_text()
    code, answer = proposed(place, text_of(TWO, LOOSER))
    assert code == 0, answer
    data = answer["data"]
    assert data["proposer"] == "alice" and data["needed"] == 2 and data["looser"] == ["federation.min_peers"]
    assert data["changes"] == [{"field": "federation.min_peers", "before": 2, "after": 1, "direction": "looser"}]
    assert (place.folder / "policy.yaml").read_text() == before  # proposing changes nothing

    code, answer = activate(place, data["proposal"], "bob", data["after"])
    assert (code, answer["data"]["approvers"], answer["data"]["in_place"]) == (9, ["bob"], False)
    assert answer["error"]["code"] == "HELD"
    assert (place.folder / "policy.yaml").read_text() == before
    code, answer = activate(place, data["proposal"], "bob", data["after"])
    assert (code, answer["error"]["code"]) == (6, "CONFLICT")
    code, answer = activate(place, data["proposal"], "carol", data["after"])
    assert (code, answer["data"]["approvers"], answer["data"]["in_place"]) == (0, ["bob", "carol"], True)
    assert (place.folder / "policy.yaml").read_text() == text_of(TWO, LOOSER)
    (kept,) = (place.folder / "proposals").glob("*.policy.replaced.yaml")
    assert kept.read_text() == before
    assert place.start().how == "approved"
    code, answer = activate(place, data["proposal"], "carol", data["after"])
    assert (code, answer["error"]["code"]) == (6, "STALE_PROPOSAL")


def test_T36_activate_signs_only_what_was_shown_to_another_person(place: PolicySite) -> None:
    _, answer = proposed(place, text_of(TWO, LOOSER))
    path, after = answer["data"]["proposal"], answer["data"]["after"]
    code, answer = activate(place, path, "bob", "0" * 64)
    assert (code, answer["error"]["code"]) == (6, "STALE_VIEW")
    code, answer = run("activate", path, "--config", place.folder / "silo.yaml", "--operator", "bob")
    assert code == 2 and "--expect-digest" in answer["error"]["message"]
    for person in ("alice", "dave", "vera"):
        code, answer = activate(place, path, person, after)
        assert (code, answer["error"]["code"]) == (4, "NOT_ALLOWED"), person
    assert list(Path(path).parent.glob("*.approval")) == []
    assert activate(place, path, "bob", after)[0] == 9


def test_T34_propose_prints_the_digest_that_activate_wants_to_be_told(place: PolicySite) -> None:
    (place.folder / "new.yaml").write_text(text_of(TWO, LOOSER))
    words = ["propose", str(place.folder / "new.yaml"), "--config", str(place.folder / "silo.yaml")]
    said = CliRunner().invoke(app, [*words, "--operator", "alice"])
    digest = load_policy(text_of(TWO, LOOSER).encode(), "new.yaml").digest
    assert said.exit_code == 0 and f"\nafter {digest}\n" in said.output


def test_T34_propose_asks_for_a_reason_to(place: PolicySite, tmp_path: Path) -> None:
    code, answer = proposed(place, text_of(TWO, TIGHTER))
    assert (code, answer["error"]["code"]) == (2, "NOT_LOOSER") and "silo reload" in answer["error"]["hint"]
    code, answer = proposed(place, text_of(TWO, LOOSER), "vera")
    assert (code, answer["error"]["code"]) == (4, "NOT_ALLOWED")
    assert not (place.folder / "proposals").exists()
    fresh = PolicySite(tmp_path / "fresh")
    fresh.policy_is(text_of())
    code, answer = proposed(fresh, text_of(LOOSER))
    assert (code, answer["error"]["code"]) == (8, "NOT_FOUND")
    assert proposed(place, text_of(TWO, LOOSER))[0] == 0


def test_T34_a_looser_charter_comes_in_the_same_way(tmp_path: Path) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    place.configure(charter=text_of(TIGHTER))
    place.start()
    charter = tmp_path / "charter.yaml"
    charter.write_text(text_of())
    code, answer = proposed(place, text_of(), "alice", "--charter", charter)
    assert code == 0 and answer["data"]["looser"] == ["federation.min_peers"]
    code, answer = activate(place, answer["data"]["proposal"], "bob", answer["data"]["after"])
    assert code == 0 and answer["data"]["in_place"]
    assert (place.folder / "charter.yaml").read_text() == text_of()
    assert place.start().how == "approved"


def test_T34_silo_check_says_beforehand_that_a_start_would_be_refused(place: PolicySite) -> None:
    def found() -> dict[str, Any]:
        results, _, _ = check_site(place.config, reach_coordinator=False)
        return next(row for row in results if row["check"] == "policy against the one last in force")

    assert found()["ok"] and found()["found"] == "same"
    place.policy_is(text_of(TWO, LOOSER))
    row = found()
    assert row["ok"] is False and row["code"] == "POLICY_LOOSER" and "federation.min_peers" in row["found"]
    with pytest.raises(NotAllowedError):
        place.start()


def test_T34_silo_check_says_what_the_charter_does(place: PolicySite) -> None:
    place.configure(charter=text_of(TWO, TIGHTER).replace("set: public\n    content", "set: other\n    content"))
    text = (place.folder / "charter.yaml").read_text().replace("  public:\n    file", "  other:\n    file")
    place.configure(charter=text.replace("set: public\n", "set: other\n"))
    results, look, _ = check_site(place.config, reach_coordinator=False)
    row = next(row for row in results if row["check"] == "policy")
    assert row["ok"] and "charter.yaml" in row["found"] and "tightens" in row["found"]
    assert any("egress public.responses" in warning and "denied" in warning for warning in look.warnings)
    place.configure(charter=text_of(TWO))
    assert not any(
        "nothing in common" in warning for warning in check_site(place.config, reach_coordinator=False)[1].warnings
    )


def updates_in_a_mean(folder: Path, policy: str, charter: str) -> dict[str, Any]:
    """What `silo check` says of the two files."""
    place = PolicySite(folder / "site")
    place.policy_is(policy)
    place.configure(charter=charter)
    results, _, _ = check_site(place.config, reach_coordinator=False)
    return next(row for row in results if row["check"] == "updates in a mean")


@pytest.mark.parametrize(("site", "charter"), [(1, 1), (0, 1), (1, 0), (0, 0)])
def test_T58_silo_check_takes_a_federation_of_one_silo(tmp_path: Path, site: int, charter: int) -> None:
    """Its policy and its charter each say `min_updates: 1`, or leave it out, which means the same."""
    stated = setting.policy_text(peers=(setting.SILO,), min_peers=1)
    silent = "".join(line for line in stated.splitlines(keepends=True) if "min_updates" not in line)
    row = updates_in_a_mean(tmp_path, stated if site else silent, stated if charter else silent)
    assert row["ok"] and row["found"] == "at least 1 of 1"


@pytest.mark.parametrize(("least", "ok"), [(2, True), (3, False)])
def test_T58_silo_check_names_the_file_that_asks_for_more_updates_than_there_are_silos_in_common(
    tmp_path: Path, least: int, ok: bool
) -> None:
    """The site's policy lists four silos, and the charter two of them."""
    policy = setting.policy_text().replace("min_updates: 2", f"min_updates: {least}")
    row = updates_in_a_mean(tmp_path, policy, setting.policy_text(peers=setting.PEERS[:2]))
    assert row["ok"] is ok
    if not ok:
        assert "policy.yaml" in row["found"] and "3 updates" in row["found"] and row["code"] == "MIN_UPDATES"


def test_show_and_hash_name_the_effective_policy(place: PolicySite) -> None:
    place.configure(charter=text_of(TWO, TIGHTER))
    policy, charter = place.folder / "policy.yaml", place.folder / "charter.yaml"
    effective = place.site().policy
    assert run("show", policy, "--effective", charter)[1]["data"]["policy_sha256"] == effective.digest
    assert run("show", policy)[1]["data"]["policy_sha256"] == effective.parts[0].digest != effective.digest
