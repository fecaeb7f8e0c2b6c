"""A kind is one row, one file and one good message, which a policy that names the kind lets through."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import policies.kinds
from fedsilo.protocol.kinds import KINDS as ROWS
from fedsilo.protocol.kinds import MESSAGES
from policies.engine import History, decide, measure
from policies.examples import CANARIES, CORPUS, Site, example, named_kinds, screened
from policies.kinds import KINDS, MODULES, policy_file
from policies.model import Policy
from policies.render import RULESETS
from tests.policies.messages import PROBE, SCHEMAS, a_method_that_sends_everything, policy_named
from tests.policies.setting import SCHEMA

SITES = {name: Site(policy_named(name), SCHEMAS.get(name, SCHEMA)) for name in (*RULESETS, "further")}
WAYS = [
    (name, kind, direction)
    for name, site in SITES.items()
    for kind in sorted(named_kinds(site.policy))
    for direction, side in (("egress", site.policy.file.egress), ("ingress", site.policy.file.ingress))
    if (block := side.block("control" if ROWS[kind].is_control else kind)) is not None
    and (not ROWS[kind].is_control or kind.removeprefix("control.") in block.kinds)
]
# What a method of this version sends, in the small run of these tests.
RUN_HERE = {"pubswap", "pubswap-random", "fedavg", "ffa-lora"}


def verdict(kind: str, direction: str, site: Site, policy: Policy) -> tuple[str, tuple[str, ...]]:
    message, context = example(kind, site, direction)
    context = dataclasses.replace(context, screened=screened(message, policy, CORPUS, CANARIES))
    if context.plan is not None:
        context = dataclasses.replace(context, plan=context.plan.model_copy(update={"method": PROBE}))
    with a_method_that_sends_everything():
        decision = decide(measure(message, context), policy, History(rounds_released=1 << 20))
    return decision.verdict, decision.reasons


def test_every_row_has_its_file() -> None:
    folder = Path(policies.kinds.__file__).parent
    assert {row.module for row in ROWS.values()} == {path.stem for path in folder.glob("*.py")} - {"__init__"}
    in_files = {kind.name: (module.__name__.rpartition(".")[2], kind) for module in MODULES for kind in module.KINDS}
    assert in_files.keys() == ROWS.keys() == KINDS.keys()
    for name, (file, kind) in in_files.items():
        row = ROWS[name]
        assert (file, kind.sent is not None, kind.taken is not None) == (row.module, row.sent, row.taken), name


def test_every_kind_is_named_by_some_policy_here() -> None:
    assert {kind for _, kind, _ in WAYS} == MESSAGES.keys()


@pytest.mark.parametrize(("name", "kind", "direction"), WAYS)
def test_an_example_passes_where_the_policy_names_its_kind_and_is_denied_without_its_block(
    name: str, kind: str, direction: str
) -> None:
    site = SITES[name]
    good, reasons = verdict(kind, direction, site, site.policy)
    if kind == "run.plan" and name not in RUN_HERE:
        assert set(reasons) <= {"PLAN_METHOD", "PLAN_SCHEMA", "PLAN_SIZE"}
        return
    assert (good, reasons) == ("allow", ())
    content = site.policy.file.model_dump(by_alias=True)
    side = content[direction]
    if ROWS[kind].is_control:
        left = [each for each in side["control"]["kinds"] if each != kind.removeprefix("control.")]
        side["control"] = {**side["control"], "kinds": left}
    else:
        side[kind] = None
    without = dataclasses.replace(site.policy, file=policy_file(content))
    denied, reasons = verdict(kind, direction, site, without)
    assert denied == "deny" and "KIND_NOT_ALLOWED" in reasons


# The first policy here that names a kind, for each way that it goes.
FIRST = {(kind, direction): name for name, kind, direction in reversed(WAYS)}


@pytest.mark.parametrize("name", SITES)
def test_what_a_policy_does_not_name_is_denied_and_judged_without_a_failure(name: str) -> None:
    named = {(kind, direction) for of, kind, direction in WAYS if of == name}
    unnamed = FIRST.keys() - named
    assert unnamed or name == "further"
    for kind, direction in sorted(unnamed):
        denied, reasons = verdict(kind, direction, SITES[FIRST[kind, direction]], SITES[name].policy)
        assert denied == "deny" and "KIND_NOT_ALLOWED" in reasons, (kind, direction)
        assert "RULE_FAILED" not in reasons, (kind, direction)
