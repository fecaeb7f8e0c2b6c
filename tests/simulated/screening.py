"""A site whose policy screens answers: policies, private records with their index, a text planted for each screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsilo.files.task_files import Task
from fedsilo.grading.verdict import Verdict, judged
from policies.model import Policy
from silo.guard.screens import Screens, index_key
from silo.trainer.data import IndexSettings, provide_index, read_fields
from tests.policies import setting
from tests.world import Bench

SITE_SECRET = bytes(range(64, 96))
PRIVATE = tuple(
    Task(id=str(number), prompt=prompt, answer="stays", topic="sort up")
    for number, prompt in enumerate(
        (
            "the fifty year old man from the harbour came twice in march with pain behind the left knee",
            "she has taken seven milligrams of the blue tablets every evening since her second operation in june",
        )
    )
)
PUBLIC = (Task(id="p", prompt="how many of the ten red boxes on the long shelf are empty now", answer="12", topic="x"),)
CANARY = "quiet-harbour-lantern-7731"
# What a right answer (it ends in 12) may carry, by the screen that finds it.
PLANTED = {
    "pii_basic": "ask jane.doe@hospital.example about it, 12",
    "overlap": "came twice in march with pain behind the left knee, 12",
    "canary": f"the word is {CANARY} and 12",
    "charset": "clear \x1b[2J the screen, 12",
}
NAMES = tuple(sorted(PLANTED))
DEFINITIONS = """text_screens:
  pii_basic: {patterns: [email, phone]}
  overlap: {unit: word, n: 8, max_matching_ngrams: 0, background_set: public, false_positive_rate: 0.000001}
  canary: {max_edit_distance: 1, decode: [base64, hex, reversed]}
  charset: {allow: [latin, digits, punctuation, math], max_run_nonword: 40}
"""


class EndGrader:
    """Right when the text ends in the reference, as a verifier that reads the last number would say."""

    def grade_many(self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None) -> list[Verdict]:
        return [judged(response.endswith(reference)) for response, reference in pairs]


def words(text: str) -> int:
    return len(text.split())


def policy_text(
    names: Sequence[str] = NAMES,
    *,
    on_hit: str = "withhold",
    max_hits_per_day: int | None = 10,
    persons: int = 1,
    release: int = 1,
    definitions: str = DEFINITIONS,
    donor_screens: Sequence[str] = (),
    share: float | None = None,
    ruleset: str = "pubswap",
) -> str:
    """The shipped ruleset with screens at public.responses and public.donors."""
    text = setting.policy_text(ruleset)
    keys = f"    screens: [{', '.join(names)}]\n    on_hit: {on_hit}\n"
    if max_hits_per_day is not None:
        keys += f"    max_hits_per_day: {max_hits_per_day}\n"
    head, found, tail = text.partition("    send_only_verified:")
    assert found
    tail = tail.replace("      persons: 1", f"      persons: {persons}", 1)
    text = head + keys + found + tail
    donors = f"    screens: [{', '.join(donor_screens)}]\n" if donor_screens else ""
    donors += f"    max_share_per_peer: {share}\n" if share is not None else ""
    text = text.replace("    verify_locally:", donors + "    verify_locally:", 1)
    text = text.replace("  release_after_halt: 1", f"  release_after_halt: {release}", 1)
    return f"{text}\n{definitions}"


def policy(names: Sequence[str] = NAMES, **changes: Any) -> Policy:
    return setting.policy_of(policy_text(names, **changes))


def screens(folder: Path, *, canaries: Sequence[str] = (CANARY,), index: bool = True) -> Screens:
    """The guard's screens with this site's canaries and the index that a trainer has made in `folder`."""
    made = Screens(canaries=canaries, key=index_key(SITE_SECRET), public_sha256=setting.HASH["public"])
    if index:
        wanted = made.index_wanted(policy(["overlap"]).file)
        settings = None if wanted is None else read_fields(IndexSettings, wanted, "the index")
        made.take_index(folder, provide_index(settings, PRIVATE, PUBLIC, folder), wanted)
    return made


def bench(folder: Path, asked: Policy, **changes: Any) -> Bench:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"screens": screens(folder / "scratch"), "grader": EndGrader(), **changes}
    return Bench(folder / "silo", asked, count_tokens=words, **given)
