"""The figures of a run, by name: unit, and what each says. `fedsilo curves`, its queries and the reference read it.

A silo's own figures stay at the silo; released are those that its policy lets out in `metrics.eval`. Does not show that
a figure is true: it is what the trainer said of itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Attributes:
    unit: empty for a number without one.
    meaning: one sentence without a full stop.
    when: in which steps it is reported; empty: in every training step."""

    unit: str
    meaning: str
    when: str = ""


_PUBLIC, _EACH_ROUND = "public steps", "once a round, and before the first"
_PROVEN, _ENOUGH = "with rollout.agreement_share above 0", "once 4,000 tokens were looked at"
FIGURES: Mapping[str, Figure] = {
    # what is reached
    "reward_mean": Figure("0..1", "mean reward of the silo's own answers, before any swap"),
    "pass_at_1": Figure("share", "correct share of sampled answers to the held-out set", _EACH_ROUND),
    "pass_at_1_greedy": Figure("share", "correct share where the likeliest token is taken each time", _EACH_ROUND),
    "gap": Figure("share", "best silo's pass@1 less the worst one's", "at the coordinator, once a round"),
    # the update
    "kl": Figure("nats", "mean KL (k3) from kl_reference before the update", "with kl_coefficient above 0"),
    "entropy": Figure("nats", "mean entropy of the next token before the update", "with entropy_coefficient above 0"),
    "clip_share": Figure("share", "trained tokens whose gradient the clip took, over the epochs after the first"),
    "importance_truncated_share": Figure("share", "own tokens whose importance weight the cap cut or dropped",
                                         "with importance_correction"),
    "importance_missing": Figure("tokens", "own tokens without an engine's log-probability, whose weight is 0",
                                 "with importance_correction"),
    "grad_norm": Figure("L2", "norm of the last epoch's gradient, before it is cut to grad_norm_max"),
    "drift": Figure("L2", "distance of the adapter's factors from where the round began"),
    "update_norm": Figure("L2", "norm of a silo's released update", "at the coordinator, once a round"),
    # the answers
    "tokens": Figure("tokens", "tokens of the step's own answers; by round their sum"),
    "truncated_share": Figure("share", "answers that reached max_new_tokens without an end"),
    "zero_variance_share": Figure("share", "prompts whose answers all earned the same, so that they teach nothing; of "
                                  "public steps with donors' answers"),
    "logp_own": Figure("nats", "mean log-probability of a token of own answers that are trained on"),
    # the swap
    "zero_variance_share_before": Figure("share", "zero_variance_share before donors' answers came in", _PUBLIC),
    "donors_wanted": Figure("donors", "answers of other silos that the prompts could use", _PUBLIC),
    "donors_found": Figure("donors", "answers of other silos that were offered", _PUBLIC),
    "donors_used": Figure("donors", "of these, trained on", _PUBLIC),
    "logp_donor": Figure("nats", "mean log-probability of a token of donors' answers under the own model", _PUBLIC),
    "alpha_mean": Figure("share", "share of a prompt's answers that donors took the place of, mean", _PUBLIC),
    "alpha_max": Figure("share", "the same, of the prompt with the most", _PUBLIC),
    "alpha_histogram": Figure("prompts", "by that share", "public steps, in the status alone"),
    "swapped_share": Figure("share", "prompts in which any answer was swapped", _PUBLIC),
    "beta_mean": Figure("L2", "change of a prompt's gradient by one swapped answer, mean", "some public steps"),
    "beta_max": Figure("L2", "the same, the largest", "some public steps"),
    "omega": Figure("L2", "K times the mean over prompts of alpha times beta: 0 where nothing was swapped, elsewhere "
                          "the mean of those that beta is measured of; how far swapping may pull the update",
                    "some public steps"),
    # does the engine compute the adapter (docs/explain/agreement.md)
    "rollout_kl": Figure("nats", "KL of the rollout engine from the trainer, a token", _PROVEN),
    "rollout_kl_limit": Figure("nats", "where rollout_kl stops the step", _PROVEN),
    "stale_previous": Figure("", "0: the engine has this adapter, 1: that of the rollout before", _ENOUGH),
    "stale_start": Figure("", "the same towards the adapter that the round began with", _ENOUGH),
    "stale_base": Figure("", "the same towards the base model without adapter", _ENOUGH),
    "stale_detectable_steps": Figure("steps", "staleness that the tokens so far would have shown", _ENOUGH),
    "adapter_visible_share": Figure("share", "of the adapter's effect, what the engine's precision lets through",
                                    _ENOUGH),
    "marker_distance": Figure("nats", "how far answers under the marker adapter are from the trainer's under it",
                              "from the first marker on"),
    "marker_contrast": Figure("nats", "how far they would be without it", "from the first marker on"),
    # time and memory
    "seconds": Figure("s", "the whole task"),
    "rollout_seconds": Figure("s", "sampling answers"),
    "grade_seconds": Figure("s", "grading answers"),
    "agreement_seconds": Figure("s", "proving that the engine computes the adapter"),
    "update_seconds": Figure("s", "forward and backward passes, and the optimiser"),
    "rollout_tokens_per_second": Figure("tokens/s", "answer tokens sampled"),
    "update_tokens_per_second": Figure("tokens/s", "answer tokens trained on, each epoch counted"),
    "memory_peak_bytes": Figure("bytes", "the most that the trainer's process has held so far"),
}  # fmt: skip


def unit_of(name: str) -> str:
    """Empty for a figure without one, or one that is not of this table (a metric that a policy names itself)."""
    return FIGURES[name].unit if name in FIGURES else ""
