"""A case becomes a real message, what the measuring party knows, and what was let out before.

What a case leaves open is taken from the policy: a run whose plan is the largest one allowed, in its first round, at
its first public step. Nothing here looks at facts or rules: `measure` and `decide` do, as in the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message as ProtobufMessage

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import DTYPE_ITEM_BYTES, canonical_json, encode, sha256_hex
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.kinds import INBOUND_KINDS, MESSAGES, OUTBOUND_KINDS
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.strict_yaml import Path
from fedsilo.protocol.transcript import SIGNATURE_BYTES
from policies.cases import format as form
from policies.cases.amount import Amount
from policies.cases.format import ANOTHER, Case
from policies.cases.plans import plan_in, resolved
from policies.cases.screened import CANARIES, CORPUS
from policies.cases.site import ANOTHER_DIGEST, Site, sender_of
from policies.cases.values import (
    Filled,
    Tensors,
    faulty,
    fit,
    moved,
    norm,
    one_tensor,
    sentence,
    shares,
    spread,
    with_drawn,
)
from policies.fields import epoch_seconds
from policies.history import Approval, History, bucket_of
from policies.kind import block_of
from policies.message import Asked, Context, Facts, Message
from policies.schema import LoraSchema
from policies.screens import texts_of

_BASE_DIGEST = sha256_hex(b"base adapter of the round")
_ANOTHER_RUN = "another-run"
_TEXT_BYTES = 24
_BUCKETS = {
    "poll": "polls_per_minute",
    "control": "control_messages_per_minute",
    "content": "messages_per_minute",
}
_FINISH = {"stop": pb.FINISH_STOP, "length": pb.FINISH_LENGTH, "unset": pb.FINISH_UNSPECIFIED}
# What a site says of a round's training, and the limit of each.
_TRAINED = {"records": "min_records", "epochs": "max_local_epochs", "steps": "max_steps"}
_OTHER_DTYPE = {"float32": "bfloat16", "bfloat16": "float32"}

Value = TypeVar("Value")


@dataclass(frozen=True)
class Situation:
    """Attributes:
    message, context: for `measure`; what screens found is still to be put into the context.
    corpus, canaries: what the site's screens look for.
    history: what was let out before; needs the facts, since its limits are what this message leaves.
    """

    message: Message
    context: Context
    history: Callable[[Facts], History]
    corpus: tuple[str, ...]
    canaries: tuple[str, ...]


def build(case: Case, site: Site) -> Situation:
    """Raises UsageError: the case asks for what cannot be made, with file and line."""
    return _Builder(case, site).situation()


class _Builder:
    def __init__(self, case: Case, site: Site) -> None:
        self.case, self.site, self.policy = case, site, site.policy
        self.form, self.setting = case.message, case.setting
        self.kind = case.message.kind
        self.dtype = "float32"
        inbound = self.kind in INBOUND_KINDS and self.kind not in OUTBOUND_KINDS
        self.direction = self.form.direction or ("ingress" if inbound else "egress")
        self.sender = sender_of(case, self.kind, site)
        block, _ = block_of({"kind": self.kind, "sender": self.sender}, self.policy)
        self.block: Any = block
        self.plan = plan_in(case, site, ("setting", "plan"))
        self.public_steps = self.plan.public_steps() if isinstance(self.plan, Plan) else ()
        of_a_step = self.kind in ("public.responses", "public.donors")
        self.open_step = self._or(self.setting.step, next(iter(self.public_steps), 1) if of_a_step else 0)
        self.open_round = self._or(self.setting.round, 0 if self.kind == "round.open" else 1)
        later = {"round.open": self.open_round + 1, "run.plan": 0, "run.end": 0}
        in_run = not self.kind.startswith("control.")
        self.round = self._or(self.form.round, later.get(self.kind, self.open_round if in_run else 0))
        self.step = self._or(self.form.step, self.open_step if of_a_step else 0)

    @staticmethod
    def _or(value: Value | None, default: Value) -> Value:
        return default if value is None else value

    # ---- numbers of the case ----------------------------------------------------------------------------

    def whole(self, path: Path, amount: Amount | None, default: int, *limit: str, least: float | None = None) -> int:
        return default if amount is None else self._resolve(path, lambda: amount.whole(self.limit(*limit), least))

    def limit(self, *path: str) -> float | None:
        """A key of the kind's block; None where the policy has none."""
        value = self.block
        for name in path:
            value = getattr(value, name, None)
        return value if isinstance(value, int | float) else None

    def _resolve(self, path: Path, number: Callable[[], Value]) -> Value:
        return resolved(self.case, path, number)

    def _rows(self, path: Path, rows: Amount | tuple[int, ...] | None, default: int, limit: str) -> tuple[int, ...]:
        if isinstance(rows, tuple):
            return rows
        return tuple(range(self.whole(path, rows, default, limit)))

    # ---- the whole --------------------------------------------------------------------------------------

    def situation(self) -> Situation:
        if self.kind not in MESSAGES:
            body: ProtobufMessage = pb.Heartbeat()
            known: dict[str, Any] = {}
        else:
            body, known = self._body()
        tensors: Tensors | None = known.pop("tensors", None)
        size = len(encode(body)) + (tensors.elements * DTYPE_ITEM_BYTES.get(self.dtype, 4) + 8 if tensors else 0)
        key = "control_message_bytes" if self.kind.startswith("control.") else "message_bytes"
        counted = self.form.payload_bytes
        message = Message(
            direction=self.direction,
            place=Place(
                {"open": self.site.plan.run, "another": _ANOTHER_RUN, "none": ""}[self._run()],
                self.round,
                self.step,
                self.kind,
            ),
            sender=self.sender,
            payload_bytes=size
            if counted is None
            else self._resolve(
                ("message", "payload_bytes"), partial(counted.whole, getattr(self.policy.file.budgets, key))
            ),
            body=body,
            tensors=None if known.pop("no_values", False) else tensors,
        )
        answers = len(list(texts_of(body)))
        context = replace(self._context(), **{"verdicts": (True,) * answers, "token_counts": (1,) * answers, **known})
        corpus = CORPUS if self.setting.corpus is None else self.setting.corpus
        canaries = CANARIES if self.setting.canaries is None else self.setting.canaries
        return Situation(message, context, self._history, corpus, canaries)

    def _run(self) -> str:
        if self.form.run is not None:
            return self.form.run
        placed = self.round > 0 or self.step > 0
        return "none" if self.kind.startswith("control.") and not placed else "open"

    def _context(self) -> Context:
        file, setting = self.policy.file, self.setting
        pin = file.public_sets.get(getattr(self.block, "set", ""), next(iter(file.public_sets.values()), None))
        metrics = file.egress.metrics_eval
        topics = setting.topics if setting.topics is not None else (*(metrics.topics if metrics else ()), ANOTHER)
        run = setting.run or ("none" if self.kind == "run.plan" else "open")
        plan = self.plan if isinstance(self.plan, Plan) and run == "open" else None
        return Context(
            now_seconds=self._now(),
            expected_sender=self.site.spiffe(self.form.certificate) if self.form.certificate else self.sender,
            plan=plan,
            schema=self.site.schema if setting.lora_schema == "pinned" else None,
            base_digest=_BASE_DIGEST,
            open_round=self.open_round,
            open_step=self.open_step,
            refused_round=setting.refused_round,
            evaluated_digest=_BASE_DIGEST,
            public_set_sha256=pin.sha256 if pin and setting.public_set == "pinned" else ANOTHER_DIGEST,
            public_set_rows=self._or(setting.rows, pin.rows if pin else 0),
            topics=frozenset(topics),
            asked=self._question(),
            usable_records=setting.usable_records,
            witnesses=self._witnesses(),
            countersigns=setting.countersigns,
        )

    def _question(self) -> Asked:
        """What a coordinator's question leaves: {kind, fields} as a message of its own."""
        said = self.setting.question
        if said is None:
            return Asked()
        path, kind = ("setting", "question"), said.get("kind")
        if kind not in INBOUND_KINDS or set(said) - {"kind", "fields"}:
            raise self.case.mistake(path, "a question is {kind, fields} of what a coordinator sends")
        body = MESSAGES[kind]()
        self._put(path, said.get("fields", {}), body)
        return Asked().after(body)

    def _put(self, path: Path, fields: Mapping[str, Any], body: ProtobufMessage) -> None:
        try:
            json_format.ParseDict(dict(fields), body)
        except json_format.ParseError as error:
            raise self.case.mistake((*path, "fields"), f"{body.DESCRIPTOR.name}: {error}") from error

    def _witnesses(self) -> int | None:
        said, least = self.setting.witnesses, self.policy.file.audit.min_witnesses
        if isinstance(said, str):
            return None
        return least if said is None else self._resolve(("setting", "witnesses"), partial(said.whole, None, least))

    def _now(self) -> float:
        start, end = self.policy.valid_from_seconds, self.policy.valid_until_seconds
        words = {"": (start + end) / 2, "before valid": start - 1.0, "after valid": float(end)}
        if self.setting.now in words:
            return words[self.setting.now]
        try:
            return float(epoch_seconds(self.setting.now))
        except ValueError as error:
            hint = '"2027-06-01T00:00:00Z", before valid, or after valid'
            raise self.case.mistake(("setting", "now"), f"{self.setting.now!r} is no time", hint) from error

    def _history(self, facts: Facts) -> History:
        budgets, block = self.policy.file.budgets, self.block
        fits = {
            "messages_in_round": self._less(self.limit("per_round"), 1),
            "messages_in_step": 0,
            "messages_in_minute": getattr(budgets, _BUCKETS[bucket_of(self.kind)]) - 1,
            "rounds_released": self._less(self.limit("approvals", "first_rounds"), 1),
            "round_bytes": budgets.round_bytes - facts["payload_bytes"],
            "units_in_day": self._less(self.limit("max_per_day"), facts.get("units", 0))
            or self._less(self.limit("max_bytes_per_day"), facts.get("text_bytes", 0)),
            "screen_hits_in_day": self.limit("max_hits_per_day"),
            "day_bytes": budgets.day_bytes - facts["payload_bytes"],
            **{
                name: self._less(getattr(block, f"max_{limit}_per_round", None), facts.get(name, 0))
                for name, limit in (("responses", "responses"), ("tokens", "tokens"), ("text_bytes", "bytes"))
            },
        }
        before = self.case.before
        # The hits of the message at hand are among those of the day.
        counts: dict[str, Any] = {"screen_hits_in_day": facts.get("responses_hit", 0)} | {
            name: self._resolve(("before", name), partial(amount.whole, fits.get(name)))
            for name, amount in before.counts.items()
        }
        approvals = tuple(Approval(person, roles) for person, roles in before.approved_by.items())
        return History(**counts, screen_halted=before.screen_halted, approvals=approvals)

    @staticmethod
    def _less(limit: float | None, by: float) -> float | None:
        return None if limit is None else limit - by

    # ---- bodies -----------------------------------------------------------------------------------------

    def _body(self) -> tuple[ProtobufMessage, dict[str, Any]]:
        """The payload, and what the party knows because of it."""
        made: tuple[ProtobufMessage, dict[str, Any]]
        match self.form:
            case form.TensorMessage():
                made = self._tensors(self.form)
            case form.ResponsesMessage():
                made = self._responses(self.form)
            case form.DonorsMessage():
                made = self._donors(self.form)
            case form.MetricsMessage():
                made = self._metrics(self.form), {}
            case form.PlanMessage():
                if self.site.schema is None:
                    raise self._no_schema()
                plan = plan_in(self.case, self.site, ("message", "plan"))
                text = plan.canonical() if isinstance(plan, Plan) else canonical_json(plan).decode()
                made = pb.RunPlan(canonical_json=text), {}
            case form.RoundMessage():
                made = self._round_open(self.form), {}
            case form.ResultMessage():
                names = self.site.names[:1] if self.form.participants is None else self.form.participants
                made = pb.RoundResult(committed=True, adapter_digest=_BASE_DIGEST, participants=names), {}
                if self.kind == "round.agreed":
                    signed = [pb.Countersignature(silo=name, signature=bytes(SIGNATURE_BYTES)) for name in names]
                    made = pb.RoundAgreed(countersignatures=signed), {}
            case _:
                made = MESSAGES[self.kind](), {}
        body, known = made
        for name in ("round", "step"):
            if self.kind.startswith("control.") and name in body.DESCRIPTOR.fields_by_name:
                setattr(body, name, getattr(self, name))
        if self.kind == "run.end":
            body.MergeFrom(pb.RunEnd(outcome="finished", adapter_digest=_BASE_DIGEST))
        if self.form.fields:
            # What is given as a list replaces the list.
            for name in self.form.fields:
                if name in body.DESCRIPTOR.fields_by_name:
                    body.ClearField(name)
            self._put(("message",), self.form.fields, body)
        return body, known

    def _tensors(self, said: form.TensorMessage) -> tuple[ProtobufMessage, dict[str, Any]]:
        schema = self.site.schema
        if schema is None:
            raise self._no_schema()
        whole = self.kind == "global.adapter"
        # A whole adapter travels as the coordinator's float32 master, whatever the deltas travel in.
        values_on = "float32" if whole else schema.dtype
        self.dtype = _OTHER_DTYPE[values_on] if said.dtype == ANOTHER else said.dtype or values_on
        filled = self._filled(said, schema, values_on)
        faults = () if isinstance(said.tensors, str) else said.tensors
        length = norm(filled)
        own = self._last_adapter(filled, schema) if whole else {n: self._trained(n, key) for n, key in _TRAINED.items()}
        for fault in faults:
            try:
                filled = faulty(filled, fault, schema)
            except ValueError as error:
                raise self.case.mistake(("message", "tensors"), f"{fault}: {error}") from error
        tensors = Tensors(filled)
        base = said.base or ("none" if whole else "of the round")
        header = pb.Factors(
            base_digest={"of the round": _BASE_DIGEST, "another": ANOTHER_DIGEST, "none": ""}[base],
            schema_sha256=schema.digest if said.schema_ == "pinned" else ANOTHER_DIGEST,
            rank=self.whole(("message", "rank"), said.rank, schema.rank),
            scale=schema.scale if said.scale is None else said.scale,
            dtype=self.dtype,
            tensors=[pb.TensorEntry(name=name, shape=filled[name].shape) for name in sorted(filled)],
        )
        return header, {
            "tensors": tensors,
            "no_values": "not_given" in faults,
            "base_l2": self._base_l2(length),
            **own,
        }

    def _last_adapter(self, filled: Mapping[str, Filled], schema: LoraSchema) -> dict[str, Any]:
        said, most = self.setting.step_l2, self.limit("max_step_l2")
        if said is None:
            return {"last_adapter_first": True}
        if not isinstance(said, Amount):
            return {"last_adapter_rounds": 1}
        step = self._resolve(("setting", "step_l2"), partial(said.number, most))
        further = most is not None and step > most
        return {"last_adapter": Tensors(moved(filled, schema, step, further=further)), "last_adapter_rounds": 1}

    def _no_schema(self) -> UsageError:
        return self.case.mistake(
            ("message",), f"{self.kind} needs the policy's LoRA schema, which is not there",
            "put the schema file where the policy names it, or write it with `fedsilo policy schema make`",
        )  # fmt: skip

    def _trained(self, name: str, key: str) -> int | None:
        """On how much the update was trained: by default as little as it must be, or as much as it may be."""
        said: Amount | str | None = getattr(self.setting, name)
        limit = self.limit(key)
        if isinstance(said, str):
            return None
        if said is None:
            return None if limit is None else int(limit)
        return self._resolve(("setting", name), partial(said.whole, limit, limit))

    def _filled(self, said: form.TensorMessage, schema: LoraSchema, dtype: str) -> dict[str, Filled]:
        most, of_one = self.limit("max_l2"), self.limit("max_tensor_l2")
        shapes, whole = schema.shapes_of(self.kind), self.kind == "global.adapter"
        if not shapes:
            raise self.case.mistake(("message", "kind"), f"the LoRA schema has no tensors for {self.kind}")
        for name, amount, limit, make in (
            ("tensor_l2", said.tensor_l2, of_one, one_tensor),
            ("l2", said.l2, most, spread),
        ):
            if amount is not None:
                length = self._resolve(("message", name), partial(amount.number, limit))
                up = limit is not None and length > limit
                made = make(shapes, length, dtype, upwards=up)
                return with_drawn(made, schema, self.site.plan.seed, length, upwards=up) if whole else made
        longest = min([limit for limit in (most, of_one) if limit is not None], default=1.0)
        made = spread(shapes, longest / 2, dtype, upwards=False)
        return with_drawn(made, schema, self.site.plan.seed, None, upwards=False) if whole else made

    def _base_l2(self, length: float) -> float | None:
        said, most = self.setting.base_l2, self.limit("max_total_l2")
        if said == "unknown":
            return None
        left = None if most is None else max(0.0, (most - length) * (1 - 1e-12))
        if isinstance(said, Amount):
            return self._resolve(("setting", "base_l2"), lambda: said.number(left))
        return 1.0 if left is None else left / 2

    def _graded(self, grading: str, count: int) -> tuple[bool, ...] | None:
        if grading == "not graded":
            return None
        return tuple(grading == "correct" or (grading == "one wrong" and place > 0) for place in range(count))

    def _asked(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """What the open step asks for: by default what the plan has a step ask, and what the message answers."""
        if self.setting.asked is not None:
            return self.setting.asked
        planned = self.plan.prompts_per_step if isinstance(self.plan, Plan) else 0
        return tuple(sorted({*range(planned), *rows}))

    def _responses(self, said: form.ResponsesMessage) -> tuple[ProtobufMessage, dict[str, Any]]:
        plan, answers, here = self.plan, said.responses, ("message", "responses")
        planned = (plan.prompts_per_step, plan.samples_per_prompt) if isinstance(plan, Plan) else (1, 1)
        rows = self._rows(("message", "prompts"), said.prompts, planned[0], "max_prompts_per_step")
        samples_most = ("generation", "samples_per_prompt")
        samples = self.whole(("message", "samples"), said.samples, planned[1], *samples_most)
        if answers.count is not None:
            counts = shares(self.whole((*here, "count"), answers.count, 0, "max_responses_per_step"), len(rows))
        else:
            counts = [self.whole((*here, "per_prompt"), answers.per_prompt, 1, *samples_most)] * len(rows)
        total = sum(counts)
        each = self.whole((*here, "bytes_each"), answers.bytes_each, _TEXT_BYTES, "max_bytes_per_response")
        if answers.bytes_each is None:
            each = min(each, int(self.limit("max_bytes_per_response") or each))

        def body(sizes: list[int]) -> pb.PublicResponses:
            made = pb.PublicResponses(
                public_set_sha256=self._context().public_set_sha256 if said.set == "pinned" else ANOTHER_DIGEST
            )
            left = iter(sizes)
            for row, count in zip(rows, counts, strict=True):
                prompt = made.prompts.add(prompt_index=row, samples=samples)
                for _ in range(count):
                    size = next(left)
                    text = sentence(size) if answers.text is None else answers.text
                    prompt.responses.add(text=text, finish=_FINISH[answers.finish])
            return made

        sizes = [each] * total
        if answers.bytes is not None:
            target = self.whole((*here, "bytes"), answers.bytes, 0, "max_bytes_per_step")
            sizes = fit(sizes, target, lambda tried: len(encode(body(tried))))
        if answers.tokens is not None:
            tokens = shares(self.whole((*here, "tokens"), answers.tokens, 0, "max_tokens_per_step"), total)
        else:
            tokens_most = ("generation", "max_new_tokens")
            tokens = [self.whole((*here, "tokens_each"), answers.tokens_each, 1, *tokens_most)] * total
        return body(sizes), {
            "public_prompt_indices": self._asked(rows),
            "verdicts": self._graded(answers.graded, total),
            "token_counts": tuple(tokens) if answers.counted else None,
        }

    def _donors(self, said: form.DonorsMessage) -> tuple[ProtobufMessage, dict[str, Any]]:
        given, here = said.donors, ("message", "donors")
        planned = self.plan.prompts_per_step if isinstance(self.plan, Plan) else 1
        rows = self._rows(("message", "prompts"), said.prompts, planned, "max_prompts_per_step")
        count = self.whole((*here, "per_prompt"), given.per_prompt, 1, "max_donors_per_prompt")
        size = self.whole((*here, "bytes_each"), given.bytes_each, _TEXT_BYTES, "max_bytes_per_response")
        names = self.site.names
        origins = given.from_ or tuple(names[1:] or names)
        body = pb.PublicDonors()
        for row in rows:
            prompt = body.prompts.add(prompt_index=row)
            for place in range(count):
                donor = prompt.donors.add(origin=origins[place % len(origins)], position=place)
                donor.response.text = sentence(size) if given.text is None else given.text
                donor.response.finish = pb.FINISH_STOP
        for place in range(given.own if body.prompts else 0):
            body.prompts[0].donors.add(origin=names[place % len(names)])
        return body, {
            "public_prompt_indices": self._asked(rows),
            "verdicts": self._graded(given.graded, count * len(rows)),
        }

    def _metrics(self, said: form.MetricsMessage) -> ProtobufMessage:
        fields: Mapping[str, Any] = getattr(self.block, "fields", {})
        values = []
        asked: Mapping[str, Amount | None] = dict.fromkeys(fields) if said.metrics is None else said.metrics
        for key, amount in asked.items():
            name, _, topic = key.partition("/")
            field = fields.get(name)
            here = ("message", "metrics", key)
            if amount is None:
                value = field.min if field else 0.0
            else:
                least, most = (field.min, field.max) if field else (None, None)
                value = self._resolve(here, partial(amount.number, most, least))
            values.append((topic, name, float(value)))
        values.sort(key=lambda item: item[:2], reverse=said.order == "reversed")
        digest = {"of the round": _BASE_DIGEST if self.round else "", "another": ANOTHER_DIGEST, "none": ""}
        body = pb.MetricsEval(split=said.split, adapter_digest=digest[said.adapter])
        for topic, name, value in values * (2 if said.twice else 1):
            body.metrics.add(name=name, topic=topic, value=value)
        return body

    def _round_open(self, said: form.RoundMessage) -> ProtobufMessage:
        planned = self.plan.prompts_per_step if isinstance(self.plan, Plan) else 1
        rows = self._rows(("message", "prompts"), said.prompts, planned, "max_prompts_per_step")
        steps = self.public_steps if said.steps is None else said.steps
        return pb.RoundOpen(
            base_digest=_BASE_DIGEST if said.base == "given" else "",
            public_steps=[pb.PublicStep(step=step, prompt_indices=rows) for step in steps],
        )
