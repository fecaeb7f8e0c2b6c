"""kill -9 of a silo in the middle of a round, and its return: nothing stays behind, and nobody waits for the dead."""

from __future__ import annotations

from fedsilo.treaty.isolation import RUNGS
from tests.loopback.federation import Federation, command, descendants, living, records


def test_the_run_goes_on_without_a_killed_silo_which_then_joins_again(sites: Federation) -> None:
    survivor, victim = "hospital_b", "hospital_c"
    submitted = sites.submit(
        "killed", silos=[survivor, victim], swap_period=4, public_step_deadline_seconds=2.0, round_deadline_seconds=20.0
    )
    assert submitted.exit_code == 0
    sites.until_state(victim, lambda state: state.get("run") == "killed" and int(state.get("step") or 0) >= 1)
    below = descendants(sites.pid(victim))
    assert below
    sites.kill(victim)
    committed = sites.until_committed("killed", 1)  # at the deadline, since the dead say nothing
    assert committed["participants"] == [survivor]
    assert living(below) == []  # the trainer hangs on its guard's leash

    # Back again it says that it has nothing for this round, so nobody waits for its evaluation; then it takes part.
    sites.start(victim)
    assert sites.ended("killed")["state"] == "finished"
    assert sites.run("after", silos=[survivor, victim])["rounds"][0]["participants"] == [survivor, victim]
    lines = records(sites.site(victim).audit_log)
    assert [line["event"] for line in lines].count("start") == 2
    # one certificate in both lives, told once; and behind which walls the trainer was when the plan was accepted
    (enrolled,) = [line["detail"] for line in lines if line["event"].startswith("key.")]
    assert len(enrolled["fingerprint"]) == 64 and enrolled["identity"].endswith(f"/silo/{victim}")
    accepted = [line["detail"]["isolation"] for line in lines if line["event"] == "plan.accept"]
    assert accepted and all(rung in RUNGS for rung in accepted)
    verdicts = command("fedsilo", "audit", "verify", *(site.audit_log for site in sites.sites.all())).data
    assert all(row["verified"] for row in verdicts)
