"""Two rounds on text that nobody here wrote: the samples of examples/data, graded as mathematics and as choices.

A model of 0.3 M parameters learns nothing from it and need not; the whole path must carry it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loopback.federation import Demo, command, counted, demo, living, records

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parents[2] / "examples" / "data"
ROUNDS, PUBLIC_STEPS = 2, 1


@pytest.fixture(scope="module")
def text_demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    root = tmp_path_factory.mktemp("text")
    written = command(
        "fedsilo", "data", "from-sets", root / "data", "--sets", SAMPLES, "--private", "clinic=medqa",
        "--private", "school=gsm8k", "--private", "institute=dmmath", "--public", "gsm8k", "--rows", "20",
        "--public-rows", "16", "--held-out-rows", "8",
    ).data  # fmt: skip
    verifiers = {row["file"]: row["verifier"] for row in written["files"]}
    assert verifiers == {
        "private/clinic.jsonl": "choice", "private/school.jsonl": "math", "private/institute.jsonl": "math",
        "public.jsonl": "math", "held_out.jsonl": "math",
    }  # fmt: skip
    return demo(root / "out", "--data", str(root / "data"))


def test_two_rounds_of_text_finish_and_every_log_verifies(text_demo: Demo) -> None:
    data = text_demo.data
    assert (data["state"], data["processes"]) == ("finished", 7)
    assert [(row["round"], row["state"]) for row in data["rounds"]] == [(1, "committed"), (2, "committed")]
    assert sorted(data["per_silo"]) == ["clinic", "institute", "school"]
    assert [row["verified"] for row in data["audit"]] == [True] * 4
    assert living(text_demo.seen) == []


def test_each_silo_sent_its_update_and_nothing_of_its_rows(text_demo: Demo) -> None:
    came_in = records(text_demo.out / "coordinator" / "state" / "audit")
    for silo in ("clinic", "institute", "school"):
        reported = {row["kind"]: [row["messages"], row["bytes"]] for row in text_demo.data["left"] if
                    row["silo"] == silo}  # fmt: skip
        assert reported == counted(records(text_demo.out / silo / "state" / "audit"), "egress.sent")
        assert reported == counted(came_in, "ingress.decision", f"/silo/{silo}")
        assert reported["lora.factors"][0] == ROUNDS and reported["metrics.eval"][0] == ROUNDS + 1
        assert reported.get("public.responses", [0])[0] <= ROUNDS * PUBLIC_STEPS


def test_no_private_prompt_or_answer_key_came_to_the_coordinator(text_demo: Demo) -> None:
    """T1 on real text: no 40 characters of any private prompt stand in anything the coordinator keeps."""
    kept = b"".join(
        path.read_bytes() for path in sorted((text_demo.out / "coordinator" / "state").rglob("*")) if path.is_file()
    )
    public = (text_demo.out.parent / "data" / "public.jsonl").read_text()
    private = [
        json.loads(line)["prompt"]
        for path in sorted((text_demo.out.parent / "data" / "private").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(private) >= 30
    for prompt in private:
        piece = prompt[10:50]
        if piece not in public:
            assert piece.encode() not in kept and json.dumps(piece)[1:-1].encode() not in kept


def test_what_arrived_was_graded_before_it_was_taken(text_demo: Demo) -> None:
    """The guard's own verdict on each answer, and the coordinator's, are facts of the logged decisions."""
    graded = dict.fromkeys(("clinic", "institute", "school", "coordinator"), 0)
    for site in graded:
        for line in records(text_demo.out / site / "state" / "audit"):
            if line.get("kind") == "public.responses" and line["event"].endswith(".decision"):
                facts = line["facts"].get("final", line["facts"])
                assert facts["graded"] is True and facts["responses_wrong"] == 0
                graded[site] += facts["responses_correct"]
    assert graded["coordinator"] == graded["clinic"] + graded["institute"] + graded["school"]
