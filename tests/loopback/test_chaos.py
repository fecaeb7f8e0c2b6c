"""A sample of `benchmarks.chaos`: real daemons that die by SIGKILL at calls that make something durable."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.chaos_federation import COORDINATOR, federation
from benchmarks.chaos_tracer import why_not

SEED = 11
VICTIMS = (COORDINATOR, "hospital_a")
# Of what a run writes: where the coordinator commits, where the guard's ledger and the logs of both do.
COMMITS = {COORDINATOR: ("coordinator.db-wal", "audit/*.jsonl"), "hospital_a": ("ledger.sqlite#-wal", "audit/*.jsonl")}


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_X05_daemons_killed_at_durable_calls_end_with_the_adapter_of_an_undisturbed_run(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The same federation carries out the same run twice, of the same seed: left alone, and with kills."""
    rng = random.Random(SEED)  # faults that can be repeated
    with federation(tmp_path) as made:
        for name in VICTIMS:
            made.lives[name].traced = True
        for name in made.site:
            made.start(name)
        assert made.submit("calm", 1) is None
        begun = {name: dict(made.lives[name].seen) for name in VICTIMS if made.calls(name) is not None}
        assert made.run("calm", 1) == "finished" and not made.notes
        for name in VICTIMS:
            made.calls(name)
            label = f"fdatasync state/{rng.choice(COMMITS[name])}"
            calls = made.lives[name].seen[label] - begun[name].get(label, 0)
            assert calls > 10, label
            made.kill_at(name, label, rng.randrange(2, calls), rng.choice(("before", "after")))
        assert made.run("killed", 1) == "finished"
        assert made.stop() == [] and made.notes == []
        struck = {name: [one["struck"] for one in made.lives[name].struck] for name in VICTIMS}
        assert struck == {name: ["kill"] for name in VICTIMS}
        assert made.adapter("killed") == made.adapter("calm") != ""
        assert made.problems() == {"audit": [], "lost": [], "twice": []}
