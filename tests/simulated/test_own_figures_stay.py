"""What a silo measures of its steps stays there: with figures and without, the same bytes leave (T8, T18)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsilo.control.figures import FIGURES
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.kinds import KINDS
from silo.guard.answers.state import _METRICS_KEPT, _METRICS_SHOWN
from tests.policies import setting
from tests.simulated import test_round_again as round_again
from tests.simulated.queries import as_json
from tests.world import Loop

# One value of each figure of the drift bound, as a trainer reports it with a step.
MEASURED: dict[str, Any] = {
    "alpha_mean": 0.25, "alpha_max": 0.5, "alpha_histogram": {"0.000": 1, "0.500": 2}, "swapped_share": 0.5,
    "donors_wanted": 3, "donors_found": 2, "donors_used": 2, "zero_variance_share": 0.375,
    "zero_variance_share_before": 0.75,
    "beta_mean": 0.0625, "beta_max": 0.125, "omega": 0.0875, "logp_own": -1.5, "logp_donor": -4.5, "drift": 0.03125,
}  # fmt: skip


def everything_sent(folder: Path, metrics: dict[str, Any]) -> tuple[list[tuple[str, int, int, bytes]], Loop]:
    """(kind, round, step, payload) of each message of a round whose steps report these figures."""
    loop = Loop(folder, setting.policy_of(setting.policy_text()))
    round_again.begin(loop)
    says = loop.trainer_says

    def with_figures(kind: str, body: bytes = b"", **fields: Any) -> None:
        says(kind, body, **{**fields, "metrics": metrics})

    loop.trainer_says = with_figures  # type: ignore[method-assign]
    round_again.all_of(loop)
    sent = [(each.kind, each.round, each.step, bytes(payload)) for each, payload in loop.coordinator.sent]
    return sent, loop


def test_T08_the_same_bytes_leave_whatever_a_step_measured(tmp_path: Path) -> None:
    without, one = everything_sent(tmp_path / "without" / "a", {})
    measured, other = everything_sent(tmp_path / "with" / "a", MEASURED)
    assert {kind for kind, *_ in measured} >= {"lora.factors", "public.responses", "control.poll"}
    assert [each for each in measured if each[0] != "control.checkpoint"] == [
        each for each in without if each[0] != "control.checkpoint"
    ]
    shown = other.state()["metrics"]
    assert {name: shown[name]["value"] for name in MEASURED if name in _METRICS_SHOWN} == {
        name: value for name, value in MEASURED.items() if name in _METRICS_SHOWN
    }
    series = as_json(other.guard.queries)["curves"]({})["series"]
    curves = {each["name"]: each["points"][-1]["value"] for each in series}
    assert {name: curves[name] for name in MEASURED if name != "alpha_histogram"} == {
        name: float(value) for name, value in MEASURED.items() if name != "alpha_histogram"
    }
    one.close()
    other.close()


def test_each_of_them_is_kept_and_has_its_line_in_the_list_of_figures() -> None:
    assert set(MEASURED) <= {*_METRICS_SHOWN, *_METRICS_KEPT} & set(FIGURES)


def test_no_message_has_a_field_of_their_names() -> None:
    """But for those that a site's policy names itself (metrics.eval), which are values under a name."""
    fields = {field.name for kind in KINDS.values() for field in kind.message.DESCRIPTOR.fields}
    assert fields and not fields & {*MEASURED} and pb.MetricsEval.DESCRIPTOR.fields_by_name


@pytest.mark.parametrize(
    ("histogram", "shown"),
    [
        ({"0.000": 1, "0.500": 2}, {"0.000": 1, "0.500": 2}),
        ({"0.333": 1, "0.250": 4}, {"other": 1, "0.250": 4}),
        ({f"{number}": 1 for number in range(500)}, None),
    ],
    ids=["as it is", "a share that the plan cannot have", "too many"],
)
def test_a_histogram_has_the_shares_that_the_plan_allows(histogram: dict[str, int], shown: Any, loop: Loop) -> None:
    round_again.begin(loop)
    loop.trainer_says("done", task="LoadAdapter", round=1, metrics={"alpha_histogram": histogram})
    assert loop.state()["metrics"]["alpha_histogram"]["value"] == shown
