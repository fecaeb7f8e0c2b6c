"""A small site for the policy tests: schema, plan, policy text, and one good message of each kind with its context."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from fedsilo.files.site_policy import read_ruleset
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.aggregation import averaged
from fedsilo.protocol.codec import decode_factors, encode, encode_factors
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Lora, Plan, Rollout
from policies.compare import compare
from policies.engine import Context, Decision, History, Message, decide, measure
from policies.load import load_policy
from policies.model import Policy, PolicyFile
from policies.render import PlanSize, SiteFacts, render_policy
from policies.schema import LoraSchema

COORDINATOR = "spiffe://cardio-net/coordinator/main"
SILO = "spiffe://cardio-net/silo/hospital_a"
PEERS = tuple(f"spiffe://cardio-net/silo/hospital_{letter}" for letter in "abcd")
NOW = 1_800_000_000.0
HASH = {name: f"{number:064x}" for number, name in enumerate(("base", "tokenizer", "template", "public", "held"), 1)}
BASE_DIGEST = "ab" * 32

SCHEMA = LoraSchema(
    base_model_sha256=HASH["base"],
    rank=2,
    alpha=4.0,
    dtype="float32",
    targets="all-linear",
    tensors=(
        ("model.layers.0.self_attn.q_proj.lora_A", (2, 6)),
        ("model.layers.0.self_attn.q_proj.lora_B", (4, 2)),
    ),
)
SIZE = PlanSize(local_steps=4, prompts_per_step=3, samples_per_prompt=4, max_new_tokens=32)


def site_facts(**changes: Any) -> SiteFacts:
    facts = SiteFacts(
        site="hospital_a",
        federation="cardio-net",
        coordinator=COORDINATOR,
        coordinator_key_sha256="0" * 64,
        peers=PEERS,
        schema=SCHEMA,
        schema_file="lora_schema.json",
        tokenizer_sha256=HASH["tokenizer"],
        template_sha256=HASH["template"],
        public_file="public.jsonl",
        public_sha256=HASH["public"],
        public_rows=10,
        valid_from="2026-12-01T00:00:00Z",
        valid_until="2027-12-01T00:00:00Z",
        held_out_file="held_out.jsonl",
        held_out_sha256=HASH["held"],
        held_out_rows=8,
        topics=("sort up", "rotate"),
        hidden_shape=(2, 16),
        min_peers=2,
        first_rounds=0,
        size=SIZE,
    )
    return dataclasses.replace(facts, **changes)


@functools.cache
def policy_text(ruleset: str = "pubswap", **changes: Any) -> str:
    return render_policy(read_ruleset(ruleset), site_facts(**changes))


@functools.cache  # policies never change, and hundreds of tests load the same few
def policy_of(text: str) -> Policy:
    return load_policy(text.encode(), "policy.yaml")


def edited(old: str, new: str, ruleset: str = "pubswap", **changes: Any) -> Policy:
    text = policy_text(ruleset, **changes)
    assert text.count(old) >= 1, old
    return policy_of(text.replace(old, new, 1))


PLAN = Plan(
    run="run-1",
    federation="cardio-net",
    method="pubswap",
    silos=("hospital_a", "hospital_b", "hospital_c", "hospital_d"),
    rounds=3,
    local_steps=4,
    swap_period=2,
    prompts_per_step=3,
    samples_per_prompt=4,
    seed=1,
    rollout=Rollout(max_new_tokens=32),
    lora=Lora(rank=2, alpha=4.0, schema_sha256=SCHEMA.digest),
    base_model_sha256=HASH["base"],
    tokenizer_sha256=HASH["tokenizer"],
    template_sha256=HASH["template"],
    public_set_sha256=HASH["public"],
    public_set_rows=10,
    held_out_sha256=HASH["held"],
    quorum=2,
)
MEAN = averaged(PLAN, PLAN.silos)  # what a round of that plan does with its updates


def context(**changes: Any) -> Context:
    base = Context(
        now_seconds=NOW,
        expected_sender=SILO,
        plan=PLAN,
        schema=SCHEMA,
        base_digest=BASE_DIGEST,
        base_l2=1.0,
        open_round=1,
        open_step=2,
        public_set_sha256=HASH["public"],
        public_set_rows=10,
        open_steps={2: (1, 4, 7), 4: (0, 9, 2)},
        evaluated_digest=BASE_DIGEST,
        public_prompt_indices=(1, 4, 7),
        topics=frozenset({"sort up", "rotate"}),
        records=6,
        epochs=1,
        steps=4,
    )
    return dataclasses.replace(base, **changes)


def zeros() -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    return {name: np.zeros(shape, np.float32) for name, shape in SCHEMA.tensors}


def tensor_message(
    tensors: dict[str, np.ndarray[Any, np.dtype[Any]]] | None = None, *, through_codec: bool = True, **changes: Any
) -> Message:
    """lora.factors from hospital_a in round 1; header fields among `changes` are put into the header."""
    tensors = {name: values + np.float32(0.001) for name, values in zeros().items()} if tensors is None else tensors
    header: dict[str, Any] = {
        "base_digest": BASE_DIGEST,
        "schema_sha256": SCHEMA.digest,
        "rank": 2,
        "scale": 2.0,
        "dtype": "float32",
    }
    header.update({key: changes.pop(key) for key in list(changes) if key in header})
    payload = encode_factors(tensors, **header)
    factors = decode_factors(payload)
    message = Message(
        "egress", Place("run-1", 1, 0, "lora.factors"), SILO, len(payload), factors.header,
        factors.tensors if through_codec else tensors,
    )  # fmt: skip
    return with_changes(message, **changes)


def small_message(kind: str, body: Any, *, round_number: int = 0, step: int = 0, **changes: Any) -> Message:
    message = Message("egress", Place("run-1", round_number, step, kind), SILO, len(encode(body)), body)
    return with_changes(message, **changes)


def with_changes(message: Message, **changes: Any) -> Message:
    """Return a message with other fields, or in another place."""
    place = message.place._replace(**{name: changes.pop(name) for name in Place._fields if name in changes})
    return dataclasses.replace(message, place=place, **changes)


def inbound(kind: str, body: Any, *, round_number: int = 0, step: int = 0, **changes: Any) -> Message:
    changes = {"direction": "ingress", "sender": COORDINATOR, **changes}
    return small_message(kind, body, round_number=round_number, step=step, **changes)


def responses_body(*prompts: tuple[int, tuple[str, ...]], samples: int = 4) -> pb.PublicResponses:
    body = pb.PublicResponses(public_set_sha256=HASH["public"])
    for index, texts in prompts:
        entry = body.prompts.add(prompt_index=index, samples=samples)
        for text in texts:
            entry.responses.add(text=text, finish=pb.FINISH_STOP)
    return body


def responses_message(*prompts: tuple[int, tuple[str, ...]], samples: int = 4, **changes: Any) -> Message:
    prompts = prompts or ((1, ("12", "12")), (4, ()), (7, ("9",)))
    body = responses_body(*prompts, samples=samples)
    return small_message("public.responses", body, round_number=1, step=2, **changes)


def metrics_message(*metrics: tuple[str, str, float], round_number: int = 1, **changes: Any) -> Message:
    body = pb.MetricsEval(split="held_out", adapter_digest=BASE_DIGEST)
    for name, topic, value in metrics or (("pass_at_1", "", 0.2817), ("pass_at_1", "rotate", 0.5)):
        body.metrics.add(name=name, topic=topic, value=value)
    return small_message("metrics.eval", body, round_number=round_number, **changes)


def donors_message(*donors: tuple[int, str, str | None], **changes: Any) -> Message:
    body = pb.PublicDonors()
    for index in sorted({index for index, _, _ in donors}):
        entry = body.prompts.add(prompt_index=index)
        for _, origin, text in (donor for donor in donors if donor[0] == index):
            donor = entry.donors.add(origin=origin)
            if text is not None:
                donor.response.text, donor.response.finish = text, pb.FINISH_STOP
    return inbound("public.donors", body, round_number=1, step=2, **changes)


def judged(message: Message, policy: Policy, *, history: History | None = None, **changes: Any) -> Decision:
    facts = measure(message, context(**changes))
    return decide(facts, policy, history or History())


GRADED = {"verdicts": (True, True, True), "token_counts": (2, 2, 1)}
FROM_COORDINATOR = {"expected_sender": COORDINATOR}


def is_tightening(before: PolicyFile, after: PolicyFile) -> bool:
    """Return whether everything that `after` allows was allowed before."""
    return all(change.direction in ("tighter", "cosmetic") for change in compare(before, after))
