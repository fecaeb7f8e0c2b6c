"""Figures of what a silo itself trained name no adapter, and leave only under a method that has each silo evaluate its
own state (T9); under the rulesets of such methods no update leaves."""

from __future__ import annotations

import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.methods import METHODS
from tests.policies.messages import NAMED, Case, good
from tests.policies.setting import BASE_DIGEST

OTHER = "b" * 64
OWN = sorted(name for name, method in METHODS.items() if method.evaluates_own)


def figures(method: str, digest: str, *, number: int = 1, came_to: str = "") -> Case:
    """Figures of a round of a run of this method; `came_to`: the adapter that the round ended in."""
    case = good("metrics.eval", METHODS[method].ruleset)
    plan = case.context.plan
    assert plan is not None
    known = case.knowing(plan=plan.model_copy(update={"method": method}), evaluated_digest=came_to)
    return known.but(adapter_digest=digest, round=number)


@pytest.mark.parametrize("method", OWN)
def test_T09_own_figures_name_no_adapter(method: str) -> None:
    assert figures(method, "").decided().reasons == ()
    assert figures(method, OTHER).decided().reasons == ("ADAPTER_DIGEST",), "64 digits that the trainer could steer"
    assert figures(method, "", number=0).decided().reasons == ()
    assert figures(method, OTHER, number=0).decided().reasons == ("ADAPTER_DIGEST",)


def test_T09_where_all_silos_evaluate_one_adapter_it_is_named_or_nothing_is_evaluated() -> None:
    assert figures("pubswap", BASE_DIGEST, came_to=BASE_DIGEST).decided().reasons == ()
    for digest, came_to in (("", BASE_DIGEST), ("", ""), (OTHER, BASE_DIGEST)):
        assert figures("pubswap", digest, came_to=came_to).decided().reasons == ("ADAPTER_DIGEST",)


@pytest.mark.parametrize("ruleset", sorted(METHODS[name].ruleset for name in OWN))
def test_no_update_leaves_where_silos_keep_what_they_train(ruleset: str) -> None:
    update = good("lora.factors", "pubswap")
    assert update.decided().reasons == ()
    assert "KIND_NOT_ALLOWED" in update.decided(NAMED[ruleset]).reasons
    assert NAMED[ruleset].file.ingress.global_adapter is None
    opening = good("round.open", ruleset)
    assert isinstance(opening.message.body, pb.RoundOpen) and opening.decided().reasons == ()
    assert opening.but(base_digest=BASE_DIGEST).decided().reasons == ("ROUND_NOT_OPEN",)
