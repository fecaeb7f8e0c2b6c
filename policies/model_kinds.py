"""Blocks of the kinds that methods beside PubSwap send and take in (methods 7.1, 7.3).

Three kinds of methods 7.1 have no block, no message and no code: public.logprobs, knowledge.logits and
synthetic.examples are off for every method of this version (docs/decisions/0010-kinds-of-further-methods.md).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from policies import lattice
from policies.facts_reft import LAYERS_MAX
from policies.fields import (
    Approvals,
    Closed,
    Integer,
    Least,
    Limit,
    MetricField,
    NormLimit,
    PinnedNumber,
    PinnedText,
    Positive,
    PositiveLimit,
    Range,
    plain_number,
)
from policies.model_screens import HitsPerDay, ScreenNames, TextOnlyNames

Quantum = Annotated[float, BeforeValidator(plain_number), Field(gt=0), lattice.MULTIPLE]
Permission = Annotated[Literal["denied", "allowed"], lattice.ladder("denied", "allowed")]


class Grid(MetricField):
    """Numbers from min to max on whole multiples of the quantum."""

    @model_validator(mode="after")
    def _has_values(self) -> Grid:
        if self.min > self.max:
            raise ValueError("min is above max")
        return self


class _GoneError(ValueError):
    hint = "take the block out: nothing of that kind leaves or comes in"


def _gone(block: object) -> None:
    """Refuse a block of a kind that no method sends any more."""
    if block is not None:
        raise _GoneError("no method of this version sends this kind")


# The tombstone of a kind: null in a policy's digest and in what a ledger keeps of one, as it was where no policy named
# the kind, so that such a policy is still the same. Its name is not given to another kind.
Gone = Annotated[None, BeforeValidator(_gone), SkipJsonSchema()]


def without_gone(content: dict[str, Any]) -> dict[str, Any]:
    """A policy as an older version kept it, without its blocks of such kinds: to take one out only tightens."""
    return {**content, "egress": {**content.get("egress", {}), **dict.fromkeys(GONE)}}


class _PublicRewards(Closed):
    set: PinnedText
    max_prompts_per_step: Limit
    samples_per_prompt: Limit
    per_round: Limit


class _DiagDrift(Closed):
    fields: dict[str, Grid]
    per_round: Limit


class _CountExamples(Closed):
    values: Grid
    per_round: Limit


class GoneBlocks(Closed):
    """Such blocks of a policy that a site kept: they allow nothing, and are part of the digest that its log names."""

    public_rewards: _PublicRewards | None = Field(None, alias="public.rewards")
    diag_drift: _DiagDrift | None = Field(None, alias="diag.drift")
    count_examples: _CountExamples | None = Field(None, alias="count.examples")


NO_GONE_BLOCKS = GoneBlocks()


# ---- a silo sends ----------------------------------------------------------------------------------


class CompetenceScore(Closed):
    """How many of the exemplars that the coordinator chose this silo answers right.

    Attributes:
        exemplars: how many one score is about; few say much about each (methods 4.9).
        max_per_step, max_per_day: scores.
    """

    set: PinnedText
    exemplars: Range
    max_per_step: Limit
    max_per_day: Limit
    per_round: Limit


class CompetenceAnswers(Closed):
    """This silo's own answers to exemplars, where the coordinator keeps the labels (`label_hidden`).

    A screen's hit refuses the message whole, and counts for the day.
    """

    set: PinnedText
    max_per_step: Limit
    max_per_day: Limit
    max_bytes_per_answer: Limit
    max_bytes_per_step: Limit
    per_round: Limit
    screens: ScreenNames = ()
    max_hits_per_day: HitsPerDay = None
    approvals: Approvals


class RewardScalar(Closed):
    """Scores of candidate answers. Whether one came from a stored answer or from a model is no field of it.

    Attributes:
        max_per_day: scores, over all questions: who may ask without end can search for a stored answer (methods 4.9).
        abstain: whether a silo may say that it cannot judge a question.
    """

    values: Grid
    max_questions_per_step: Limit
    max_candidates_per_question: Limit
    max_per_day: Limit
    abstain: Permission
    per_round: Limit


class Interventions(Closed):
    """Exactly these tensors: W and R (rank x width) and b (rank) of each layer and group, no others."""

    layers: Annotated[
        tuple[Annotated[Integer, Field(lt=1000)], ...], Field(min_length=1, max_length=LAYERS_MAX), lattice.SAME
    ]
    groups: Annotated[tuple[Literal["prefix", "suffix", "tied"], ...], Field(min_length=1), lattice.SAME]
    rank: PinnedNumber
    width: PinnedNumber
    dtype: Annotated[Literal["float32", "bfloat16"], lattice.SAME]
    max_l2: NormLimit  # of all W and b
    max_tensor_l2: NormLimit  # of one W or b

    @model_validator(mode="after")
    def _sorted(self) -> Interventions:
        for name, values in (("layers", self.layers), ("groups", self.groups)):
            if tuple(sorted(set(values))) != values:
                raise ValueError(f"{name} must be in ascending order, each once")
        if self.rank > self.width:
            raise ValueError("rank is above width")
        return self


class ReftIntervention(Interventions):
    """Whole interventions. max_orthonormality_error: largest entry of |R R^T - I|."""

    max_orthonormality_error: NormLimit
    per_round: Limit
    approvals: Approvals


class ProfileVector(Closed):
    """What a matchmaker may know of this silo.

    Attributes:
        families: of models; 1 where the family is not told.
        dynamic: how many recent figures, each of `values`.
        bins, parts: of the histogram of this silo's data; its whole numbers add up to `parts`, or there is none.
        min_records: private records behind the histogram.
    """

    families: PositiveLimit
    dynamic: Annotated[Integer, lattice.SAME]
    values: Grid
    bins: Annotated[Integer, lattice.SAME]
    parts: Annotated[Positive, lattice.SAME]
    min_records: Least
    per_round: Limit
    approvals: Approvals


class BanditReward(Closed):
    """What a match was worth to its taker."""

    max_abs: NormLimit
    quantum: Quantum
    per_match: Limit


class KnowledgePackage(Closed):
    """Answers to the prompts of a public transfer set.

    A screen's hit refuses the message whole, and counts for the day.

    Attributes:
        receiver: the matched peer, or the coordinator.
        confidence: of an answer; absent: none is told.
    """

    set: PinnedText
    receiver: Annotated[Literal["peer", "coordinator"], lattice.SAME]
    max_entries: Limit
    max_bytes_per_answer: Limit
    max_bytes: Limit
    confidence: Grid | None = None
    per_round: Limit
    screens: ScreenNames = ()
    max_hits_per_day: HitsPerDay = None
    approvals: Approvals


# ---- a silo takes in -------------------------------------------------------------------------------


class CompetenceAsk(Closed):
    """Exemplars by row of this silo's own copy of the set."""

    set: PinnedText
    exemplars: Range
    max_questions: Limit


class RewardAsk(Closed):
    """Questions by row, and candidate answers to judge."""

    set: PinnedText
    max_questions: Limit
    max_candidates_per_question: Limit
    max_bytes_per_candidate: Limit
    screens: TextOnlyNames = ()


class MatchDirective(Closed):
    """With whom to exchange knowledge: a peer of the policy and of the plan."""


class PackageIn(Closed):
    """A knowledge package: the matched peer's, or what the coordinator's model answers."""

    set: PinnedText
    origin: Annotated[Literal["peer", "coordinator"], lattice.SAME]
    max_entries: Limit
    max_bytes_per_answer: Limit
    max_bytes: Limit
    screens: TextOnlyNames = ()


class ReftAggregate(Interventions):
    """What the coordinator made of the other silos' interventions. Its R need not be orthonormal: the silo makes it."""


class KindsOut(Closed):
    """Further keys of `egress`."""

    reft_intervention: ReftIntervention | None = Field(None, alias="reft.intervention")
    public_rewards: Gone = Field(None, alias="public.rewards")
    competence_score: CompetenceScore | None = Field(None, alias="competence.score")
    competence_answers: CompetenceAnswers | None = Field(None, alias="competence.answers")
    reward_scalar: RewardScalar | None = Field(None, alias="reward.scalar")
    profile_vector: ProfileVector | None = Field(None, alias="profile.vector")
    bandit_reward: BanditReward | None = Field(None, alias="bandit.reward")
    knowledge_package: KnowledgePackage | None = Field(None, alias="knowledge.package")
    diag_drift: Gone = Field(None, alias="diag.drift")
    count_examples: Gone = Field(None, alias="count.examples")


GONE = tuple(str(field.alias) for field in KindsOut.model_fields.values() if field.annotation is type(None))


class KindsIn(Closed):
    """Further keys of `ingress`."""

    reft_aggregate: ReftAggregate | None = Field(None, alias="reft.aggregate")
    competence_ask: CompetenceAsk | None = Field(None, alias="competence.ask")
    reward_ask: RewardAsk | None = Field(None, alias="reward.ask")
    match_directive: MatchDirective | None = Field(None, alias="match.directive")
    knowledge_package: PackageIn | None = Field(None, alias="knowledge.package")
