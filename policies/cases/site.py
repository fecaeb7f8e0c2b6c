"""What the cases of a policy take from it: who takes part, and the largest run that it allows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fedsilo.protocol.averaging import initial_frozen_sha256
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.kinds import INBOUND_KINDS, MESSAGES, OUTBOUND_KINDS
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Lora, Optimiser, Plan, Rollout
from policies.cases.format import ANOTHER, UNNAMED, UPDATE, Case
from policies.model import Policy
from policies.schema import LoraSchema

ANOTHER_DIGEST = sha256_hex(ANOTHER.encode())
_RUN = "case-run"
_SEED = 1


@dataclass(frozen=True)
class Site:
    """A policy and the LoRA schema that it pins; None where it pins none or the file is not at hand."""

    policy: Policy
    schema: LoraSchema | None

    @property
    def names(self) -> list[str]:
        return [peer.rpartition("/")[2] for peer in self.policy.file.federation.peers]

    def spiffe(self, name: str) -> str:
        """Of a word in a case: this site, coordinator, another coordinator, a silo's name, or an id as it stands."""
        federation = self.policy.file.federation
        if name == "coordinator":
            return federation.coordinator
        if name == "another coordinator":
            return f"{federation.coordinator.rpartition('/')[0]}/{ANOTHER}"
        if name == "this site":
            return federation.peers[0]
        return name if "/" in name else f"spiffe://{self.policy.file.federation.id}/silo/{name}"

    @cached_property
    def plan(self) -> Plan:
        """The largest run that the policy allows, by a method that it can take part in."""
        plans = [self._plan_of(name) for name in METHODS]
        return next((plan for plan in plans if self._takes_part(plan)), plans[0])

    def _takes_part(self, plan: Plan) -> bool:
        """Whether the policy names all that the plan's method lives on; it can do without metrics."""
        file, method = self.policy.file, METHODS[plan.method]
        if not method.kinds_under(plan) - {"metrics.eval"} <= named_kinds(self.policy):
            return False
        block = file.egress.public_responses
        return block is None or not (method.sends_wrong_answers and block.send_only_verified)

    @cached_property
    def _frozen_sha256(self) -> str:
        schema = self.schema
        return initial_frozen_sha256(schema.tensors, _SEED, schema.freeze) if schema else ANOTHER_DIGEST

    def _plan_of(self, method: str) -> Plan:
        file = self.policy.file
        asked, answers, opened = file.ingress.run_plan, file.egress.public_responses, file.ingress.round_open

        def most(name: str, *others: int | None) -> int:
            known = [value for value in (getattr(asked, name)[1] if asked else None, *others) if value]
            return max(1, int(min(known, default=1)))

        prompts = most(
            "prompts_per_step",
            answers.max_prompts_per_step if answers else None,
            opened.max_prompts_per_step if opened else None,
            next((pin.rows for pin in file.public_sets.values()), None),
        )
        samples = most("samples_per_prompt", answers.generation.samples_per_prompt if answers else None)
        update = next(iter(file.egress.updates.values()), None)
        steps = most("local_steps", update.max_steps if update else None)
        public = answers.max_responses_per_round // (prompts * samples) if answers else steps
        schemas, sets = file.lora_schemas, file.public_sets
        pin = schemas.get(update.schema_name if update else "", next(iter(schemas.values()), None))
        public_pin = sets.get(answers.set if answers else "", next(iter(sets.values()), None))
        learning_rate = asked.learning_rate[1] if asked else 1e-5
        temperature = min(max(1.0, asked.temperature[0]), asked.temperature[1]) if asked else 1.0
        return Plan(
            run=_RUN,
            federation=file.federation.id,
            method=method,
            silos=tuple(self.names),
            quorum=min(file.federation.min_updates, len(self.names)),
            rounds=most("rounds"),
            local_steps=steps,
            swap_period=steps // (public + 1) + 1,  # the smallest with at most `public` public steps in a round
            prompts_per_step=prompts,
            samples_per_prompt=samples,
            seed=_SEED,
            optimiser=Optimiser(learning_rate=learning_rate or 1e-5),
            rollout=Rollout(
                temperature=temperature,
                max_new_tokens=most("max_new_tokens", answers.generation.max_new_tokens if answers else None),
            ),
            lora=Lora(
                rank=pin.rank if pin else 1,
                alpha=self.schema.alpha if self.schema else 2.0 * (pin.rank if pin else 1),
                schema_sha256=pin.sha256 if pin else ANOTHER_DIGEST,
                freeze=pin.freeze if pin else "none",
                frozen_sha256=self._frozen_sha256 if pin and pin.freeze != "none" else "",
            ),
            base_model_sha256=file.model.base_model_sha256,
            tokenizer_sha256=file.model.tokenizer_sha256,
            template_sha256=file.model.template_sha256,
            public_set_sha256=public_pin.sha256 if public_pin else ANOTHER_DIGEST,
            public_set_rows=public_pin.rows if public_pin else 1,
            held_out_sha256=file.held_out.sha256 if file.held_out else ANOTHER_DIGEST,
            wire_dtype=pin.dtype if pin else "float32",
        )


def sender_of(case: Case, kind: str, site: Site) -> str:
    """SPIFFE id of who sends the message of a case: as it says, or whoever sends such a kind."""
    inbound = kind in INBOUND_KINDS and kind not in OUTBOUND_KINDS
    return site.spiffe(case.message.sender or ("coordinator" if inbound else "this site"))


def kinds_of(case: Case, policy: Policy) -> list[str]:
    """The kind of a case; for `unnamed` each kind of this version that the policy names in neither direction, for
    `update` each adapter update that it lets out."""
    if case.message.kind == UPDATE:
        return list(policy.file.egress.updates)
    if case.message.kind != UNNAMED:
        return [case.message.kind]
    named = named_kinds(policy)
    return sorted(kind for kind in MESSAGES if kind not in named)


def named_kinds(policy: Policy) -> set[str]:
    """Kinds that one of the two sides of a policy names."""
    found = set()
    for side in (policy.file.egress, policy.file.ingress):
        for name, field in type(side).model_fields.items():
            block = getattr(side, name)
            if name == "control":
                found |= {f"control.{kind}" for kind in block.kinds} if block else set()
            elif block is not None:
                found.add(str(field.alias or name))
    return found
