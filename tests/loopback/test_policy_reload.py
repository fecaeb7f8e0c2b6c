"""T34 on running daemons: a signed `silo reload` tightens; what is looser is refused, and the silo goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.loopback.federation import Federation, Reply, command, records

SILO = "hospital_c"


@pytest.mark.slow
def test_T34_a_running_silo_tightens_and_never_loosens(sites: Federation) -> None:
    site = sites.site(SILO)
    path = site.config.parent / "policy.yaml"

    def said(*arguments: object) -> Reply:
        return command("silo", *arguments, "--config", site.config)

    def in_force() -> dict[str, Any]:
        shown: dict[str, Any] = said("status").data["policy"]
        return shown

    first = in_force()
    assert [Path(part["file"]).name for part in first["made_of"]] == ["policy.yaml", "charter.yaml"]
    text = path.read_text()
    tighter = text.replace("expiry_hours: 24", "expiry_hours: 23")
    assert tighter != text
    path.write_text(tighter)
    reloaded = said("reload", "--operator", "alice")
    assert (reloaded.exit_code, reloaded.data["change"]) == (0, "tighter")
    assert reloaded.data["fields"] == ["approvals.expiry_hours"]
    second = in_force()
    assert second["digest"] == reloaded.data["policy"] != first["digest"]

    path.write_text(text)
    refused = said("reload", "--operator", "alice")
    assert (refused.exit_code, refused.envelope["error"]["code"]) == (4, "POLICY_LOOSER")
    assert "approvals.expiry_hours" in refused.envelope["error"]["message"]
    path.write_text("mode: [")
    broken = said("reload", "--operator", "alice")
    assert broken.exit_code == 2 and "stays in force" in broken.envelope["error"]["message"]
    assert in_force() == second
    path.write_text(tighter)  # what the next start finds

    log = records(site.audit_log)
    loaded = [line["detail"]["change"] for line in log if line["event"] == "policy.load"]
    # Other tests of these sites may have started this one again, with the policy it had.
    assert (loaded[0], set(loaded[1:-1]) <= {"same"}, loaded[-1]) == ("first", True, "tighter")
    assert [line["reasons"] for line in log if line["event"] == "policy.reload_refused"] == [
        ["POLICY_LOOSER"], ["INVALID_INPUT"],
    ]  # fmt: skip
    decided = [line["policy"]["effective"] for line in log if line["event"] == "egress.decision"]
    assert decided[0] == first["digest"]
    sites.until_state(SILO, lambda state: state["coordinator"]["link"] == "live")
