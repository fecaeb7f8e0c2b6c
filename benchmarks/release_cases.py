"""The thirty releases of `benchmarks.releases`: what was sent before each, what is held, and whether it is sound.

A case drives a `Site` up to the moment in which a person has to answer. What is wrong with a bad one is allowed by the
policy: what policy denies no person is asked about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

from benchmarks.release_site import ROUND_SECONDS, Site, policy
from silo.guard.ledger import Release
from tests.simulated import screening

Make: TypeAlias = Callable[[Site], Release]

USUAL_TEXTS, USUAL_WORDS = 12, 14


@dataclass(frozen=True)
class Case:
    """Attributes:
    name: stable.
    bad: a person should not let it go.
    what: what was planted, in words; empty for a good one.
    make: drives the site.
    """

    name: str
    bad: bool
    what: str
    make: Make


def site(folder: Path, run: str, seed: int) -> Site:
    return Site(folder, run, seed, policy())


def _earlier(site: Site, rounds: int = 2) -> None:
    """Rounds with an answer and an update each, approved and sent; then the next one is open."""
    for _ in range(rounds):
        site.let_go(site.hold_responses(_texts(site), _words(site)))
        site.wait(ROUND_SECONDS / 2)
        site.let_go(site.hold_factors(_norm(site)))
        site.wait(ROUND_SECONDS / 2)
        site.open_round(site.round + 1)


def _norm(site: Site) -> float:
    return site.random.uniform(0.85, 1.15)


def _texts(site: Site) -> int:
    return USUAL_TEXTS + site.random.randint(-3, 3)


def _words(site: Site) -> int:
    return USUAL_WORDS + site.random.randint(-3, 3)


# ---- good ------------------------------------------------------------------------------------------


def _update(rounds: int) -> Make:
    def make(site: Site) -> Release:
        _earlier(site, rounds)
        if rounds:  # the round's answers leave before its update
            site.let_go(site.hold_responses(_texts(site), _words(site)))
        return site.hold_factors(_norm(site))

    return make


def _answers(rounds: int) -> Make:
    def make(site: Site) -> Release:
        _earlier(site, rounds)
        return site.hold_responses(_texts(site), _words(site))

    return make


# ---- bad -------------------------------------------------------------------------------------------


def _near_match(site: Site) -> Release:
    _earlier(site)
    return site.hold_responses(_texts(site), _words(site), planted=screening.PLANTED["overlap"])


def _norm_outlier(site: Site) -> Release:
    _earlier(site)
    return site.hold_factors(2.15)


def _changed_policy(site: Site) -> Release:
    _earlier(site)
    block = site.bench.judge.policy.file.egress.lora_factors
    assert block is not None
    looser = {f"    max_l2: {block.max_l2:g} ": f"    max_l2: {8 * block.max_l2:g} "}
    looser |= {f"    max_tensor_l2: {block.max_tensor_l2:g}\n": f"    max_tensor_l2: {8 * block.max_tensor_l2:g}\n"}
    usual = site.usual_l2
    site.bench.judge.policy = policy(looser)
    return site.hold_factors(usual / site.usual_l2)


def _changed_base(site: Site) -> Release:
    _earlier(site)
    site.open_round(site.round, base="ba5e" * 16)
    return site.hold_factors(_norm(site))


def _expired_certificate(site: Site) -> Release:
    """The certificate is the one of before; its last hour was three days ago."""
    site.coordinator(site.address, timedelta(hours=1))
    _earlier(site)
    site.wait(timedelta(days=3).total_seconds())
    return site.hold_factors(_norm(site))


def _budget_jump(site: Site) -> Release:
    _earlier(site, 8)
    site.let_go(site.hold_responses(2 * USUAL_TEXTS, _words(site)))
    return site.hold_factors(_norm(site))


def _new_destination(site: Site) -> Release:
    _earlier(site)
    site.coordinator("198.51.100.23:7443")
    return site.hold_responses(_texts(site), _words(site))


def _another_form(site: Site) -> Release:
    _earlier(site)
    site.restart(policy(rank=16), run=f"{site.run}-next", rank=16)
    return site.hold_factors(_norm(site))


def _longer_answers(site: Site) -> Release:
    _earlier(site)
    return site.hold_responses(2 * USUAL_TEXTS, 4 * USUAL_WORDS - 8)


def _second_of_the_round(site: Site) -> Release:
    _earlier(site)
    site.let_go(site.hold_factors(_norm(site)))
    site.wait(120.0)
    return site.hold_factors(_norm(site))


def cases() -> list[Case]:
    """All of them, in the order of their names."""
    bad = {
        "near-match": ("one answer repeats words of a private record", _near_match),
        "norm-outlier": ("the update is more than twice as long as those before", _norm_outlier),
        "changed-policy": ("the policy in force was made looser since the last release", _changed_policy),
        "changed-base": ("the round starts from another adapter than the last round ended in", _changed_base),
        "expired-certificate": ("the far end's certificate ended three days ago", _expired_certificate),
        "budget-jump": ("nearly all of the day's bytes are used", _budget_jump),
        "new-destination": ("it goes to another address and certificate than before", _new_destination),
        "another-form": ("the tensors have another rank than those before, and twice the bytes", _another_form),
        "longer-answers": ("twice as many answers, and three times as long", _longer_answers),
        "second-of-the-round": ("a second update of a round whose first one left", _second_of_the_round),
    }
    good: list[tuple[str, Make]] = []
    for number in range(10):
        good.append((f"usual-update-{number}", _update((0, 1, 1, 2, 2, 2, 3, 3, 4, 2)[number])))
        good.append((f"usual-answers-{number}", _answers((0, 1, 1, 2, 2, 2, 3, 3, 4, 2)[number])))
    found = [Case(name, True, what, make) for name, (what, make) in bad.items()]
    return sorted([*found, *(Case(name, False, "", make) for name, make in good)], key=lambda case: case.name)
