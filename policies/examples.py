"""A good message of every kind under the policy in hand, and what the judging party knows of it.

Each kind's file has its example; here is what they are made for: who takes part, the largest run that the policy
allows, and where in it the message stands. Cases of a policy, tests and measurements change what they are about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import DTYPE_ITEM_BYTES, encode, sha256_hex
from fedsilo.protocol.factors import TURNS, UPDATE_KIND, initial_frozen_sha256
from fedsilo.protocol.kinds import KINDS as ROWS
from fedsilo.protocol.kinds import MESSAGES
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Lora, Optimiser, Plan, Rollout
from policies import screens
from policies.kind import ANOTHER, BASE_DIGEST, Around, Example
from policies.kinds import KINDS
from policies.message import Context, Message, Screened
from policies.model import Policy, TextScreens
from policies.schema import LoraSchema
from policies.screens.overlap import OverlapIndex, build_index

ANOTHER_DIGEST = sha256_hex(ANOTHER.encode())
# What the screens of an example look for: one that has nothing to look for cannot run, and denies.
CORPUS = ("A record of this site that no case repeats: seven grey herons waited by the frozen harbour wall.",)
CANARIES = ("canary-of-no-case-4c1f7a",)
_KEY = bytes(32)
_SEED = 1


@dataclass(frozen=True)
class Site:
    """A policy and the LoRA schema that it pins; None where it pins none or the file is not at hand."""

    policy: Policy
    schema: LoraSchema | None

    @property
    def names(self) -> list[str]:
        return [peer.rpartition("/")[2] for peer in self.policy.file.federation.peers]

    @cached_property
    def plan(self) -> Plan:
        """The largest run that the policy allows, by a method that it can take part in."""
        plans = [self._plan_of(name) for name in METHODS]
        return next((plan for plan in plans if self._takes_part(plan)), plans[0])

    def _takes_part(self, plan: Plan) -> bool:
        """Return whether the policy names all that the plan's method lives on; it can do without metrics."""
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
        run_plan, answers, opened = file.ingress.run_plan, file.egress.public_responses, file.ingress.round_open

        def most(name: str, *others: int | None) -> int:
            known = [value for value in (getattr(run_plan, name)[1] if run_plan else None, *others) if value]
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
        learning_rate = run_plan.learning_rate[1] if run_plan else 1e-5
        temperature = min(max(1.0, run_plan.temperature[0]), run_plan.temperature[1]) if run_plan else 1.0
        return Plan(
            run="case-run",
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


def named_kinds(policy: Policy) -> set[str]:
    """Return the kinds that one of the two sides of a policy names."""
    names = set()
    for _, kind, block in policy.file.blocks():
        names |= {f"control.{name}" for name in block.kinds} if kind == "control" else {kind}
    return names


def example(kind: str, site: Site, direction: str = "") -> tuple[Message, Context]:
    """Return a message of the kind that the site's policy lets through if it names the kind, and what is known of it.

    Args:
        kind: one that the policy does not name has an empty message.
        site: the policy, and the schema that tensors are made by.
        direction: of a kind that goes both ways, or another than its own; by default a kind that leaves, leaves.

    Raises:
        UsageError: tensors, and the schema is not at hand.
    """
    row, policy, plan = ROWS.get(kind), site.policy, site.plan
    direction = direction or ("egress" if row is not None and row.sent else "ingress")
    file, sent = policy.file, direction == "egress"
    block = (file.egress if sent else file.ingress).block("control" if kind.startswith("control.") else kind)
    made = Example(MESSAGES.get(kind, pb.Heartbeat)())
    if block is not None:
        made = KINDS[kind].example(Around(kind, policy, block, site.schema, plan, sent))
    at, place = 1, row.place if row is not None else ""
    turns = [UPDATE_KIND[fixed] for fixed in TURNS[plan.lora.freeze]]
    if kind in turns:
        at += turns.index(kind)  # the first round whose update it is
    if kind == "run.plan" or (kind.startswith("control.") and "round" not in made.body.DESCRIPTOR.fields_by_name):
        at = 0
    public = next(iter(plan.public_steps()), 1) if place == "open step" else 0
    step = public or ("step" in place)
    message = Message(
        direction,
        Place(plan.run if at or not kind.startswith("control.") else "", at, int(step), kind),
        file.federation.peers[0] if sent else file.federation.coordinator,
        len(encode(made.body)) + _bytes_of(made),
        made.body,
        made.tensors,
    )
    texts = len(list(screens.texts_of(made.body)))
    pin = file.public_sets.get(getattr(block, "set", ""), next(iter(file.public_sets.values()), None))
    context = Context(
        now_seconds=(policy.valid_from_seconds + policy.valid_until_seconds) / 2,
        expected_sender=message.sender,
        plan=None if kind == "run.plan" else plan,
        schema=site.schema,
        base_digest=BASE_DIGEST,
        open_round=0 if kind == "round.open" else at,
        open_step=public,
        evaluated_digest=BASE_DIGEST,
        public_set_sha256=pin.sha256 if pin else ANOTHER_DIGEST,
        public_set_rows=pin.rows if pin else 0,
        topics=frozenset(file.egress.metrics_eval.topics if file.egress.metrics_eval else ()),
        witnesses=file.audit.min_witnesses,
        verdicts=(True,) * texts,
        token_counts=(1,) * texts,
    )
    return message, replace(context, **made.known)


def _bytes_of(made: Example) -> int:
    """Bytes of the tensors behind their header, whose shapes it has."""
    if made.tensors is None or not isinstance(made.body, pb.Factors):
        return 0
    elements = sum(math.prod(entry.shape) for entry in made.body.tensors)
    return elements * DTYPE_ITEM_BYTES[made.body.dtype] + 8


# ---- screens ---------------------------------------------------------------------------------------


def screens_of(message: Message, policy: Policy) -> tuple[TextScreens | None, tuple[Any, ...]]:
    """Return what decides a screen's result beside the texts: its settings, and which screens the policy asks for."""
    sent = message.sender != policy.file.federation.coordinator
    block = (policy.file.egress if sent else policy.file.ingress).block(message.kind)
    names = screens.asked(block, message.kind, message.direction)
    return (policy.file.text_screens, names) if names else (None, ())


def screened(message: Message, policy: Policy, corpus: Sequence[str], canaries: Sequence[str]) -> Screened | None:
    """Return what the guard's screens would find; None where the policy asks for no screen."""
    definitions, names = screens_of(message, policy)
    if definitions is None or not names:
        return None
    index, overlap = None, definitions.overlap
    if overlap is not None:
        built = build_index(corpus, key=_KEY, n=overlap.n, false_positive_rate=overlap.false_positive_rate)
        index = OverlapIndex.from_bytes(built, key=_KEY)
    material = screens.Material(overlap=index, canaries=tuple(canaries))
    return screens.screen(policy.file, names, list(screens.texts_of(message.body)), material)
