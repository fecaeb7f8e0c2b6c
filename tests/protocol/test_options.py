"""Options of a method: part of the signed plan, known to that method alone, and absent where nobody stated any."""

from __future__ import annotations

from typing import Any

import pytest

from fedsilo.files.run_request import check_form, read_request
from fedsilo.protocol.errors import PeerError, UsageError
from fedsilo.protocol.methods import METHODS, require_exchange
from fedsilo.protocol.methods.pubswap.options import SelfSwap
from fedsilo.protocol.plan import Plan, parameters_of, plan_from_canonical
from tests.policies.setting import PLAN

RUN = "run: r\nmethod: {method}\nrounds: 1\nlocal_steps: 2\nseed: 1\n{options}"


def plan_of(method: str, options: str = "") -> Plan:
    return check_form(read_request(RUN.format(method=method, options=options).encode(), "run.yaml"))


def with_options(method: str, options: dict[str, Any]) -> Plan:
    return PLAN.model_copy(update={"method": method, "options": options})


def test_a_plan_without_options_keeps_its_digest() -> None:
    plain = PLAN.canonical()
    assert '"options"' not in plain and plan_from_canonical(plain) == PLAN
    assert plan_of("self-swap", "options: {further: null}\n") == plan_of("self-swap"), "null is the default"
    with pytest.raises(PeerError, match="not in canonical form"):
        plan_from_canonical(plain.replace('"optimiser"', '"options":{},"optimiser"', 1))


def test_stated_options_are_in_the_signed_plan_and_before_the_people_who_approve_it() -> None:
    stated = plan_of("self-swap", "options: {further: 5}\n")
    assert stated.options == {"further": 5} and plan_from_canonical(stated.canonical()) == stated
    assert SelfSwap.times(stated) == 5 and SelfSwap.times(plan_of("self-swap")) == len(stated.silos) - 1
    assert stated.digest != plan_of("self-swap", "options: {further: 6}\n").digest
    assert parameters_of(stated)["options.further"] == 5
    assert not any(name.startswith("options") for name in parameters_of(plan_of("self-swap")))


@pytest.mark.parametrize(
    ("method", "options", "place", "fault"),
    [
        ("self-swap", "options:\n  further: -1\n", "run.yaml:7", "must be at least 0"),
        ("self-swap", "options: {further: 1.5}\n", "run.yaml:6", "further"),
        ("self-swap", "options: {furher: 1}\n", "run.yaml:6", "did you mean 'further'"),
        ("pubswap", "options: {further: 1}\n", "run.yaml:6", "unknown key 'further'"),
        ("self-swap", "options: 3\n", "run.yaml:6", "options"),
    ],
)
def test_a_wrong_option_is_refused_with_its_line(method: str, options: str, place: str, fault: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan_of(method, options)
    assert refused.value.message.startswith(f"{place}: ") and fault in refused.value.message


@pytest.mark.parametrize(
    ("method", "options"),
    [("pubswap", {"further": 1}), ("self-swap", {"further": "1"}), ("self-swap", {"other": 1})],
)
def test_a_silo_refuses_a_signed_plan_with_a_wrong_option(method: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        require_exchange(with_options(method, options))
    assert refused.value.code == "OPTIONS" and refused.value.message.startswith(f"options.{next(iter(options))}: ")
    assert require_exchange(with_options("self-swap", {"further": 1})) is METHODS["self-swap"]


def test_every_method_has_defaults_for_its_options() -> None:
    for method in METHODS.values():
        assert method.options().stated() == {}, method.name
