"""Writes a site's own policy: a shipped ruleset, the site's hashes, and limits that follow from plan and model size.

The result is commented YAML that `load_policy` accepts as it is. Text comes in and goes out; the caller reads and
writes the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, Decimal
from string import Template
from typing import Any

from fedsilo.protocol.aggregation import shift_bound
from fedsilo.protocol.codec import DTYPE_ITEM_BYTES
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import is_drawn
from policies.kinds.adapters import CLIP_MARGIN
from policies.load import load_policy
from policies.model import MIN_UPDATES
from policies.schema import LoraSchema

RULESETS = (
    "pubswap",
    "pubswap-random",
    "pubswap-strict",
    "fedavg",
    "ffa-lora",
    "fedsa-lora",
    "fed-sb",
    "rolora",
    "fedex",
    "flora",
    "fedreft",
    "fedgrpo",
    "knexa",
    "knexa-random",
    "knexa-heuristic",
    "fedid-central",
    "local-only",
    "responses-only",
    "deny_all",
)

# Bytes that one token of an answer may take, for limits in bytes: generous for one answer, tighter on a whole step.
_TOKEN_BYTES_OF_RESPONSE = 16
_TOKEN_BYTES_OF_STEP = 8
_HEADER_BYTES_OF_RESPONSE = 64
_ROUNDS_PER_DAY_MAX = 200
_RUNS_PER_DAY = 24  # one of the intended length every hour
_SIZE_MAX = 10**9
_CONTROL_MESSAGE_BYTES = 32768
# Largest |R R^T - I| of rows that are orthonormal but for the rounding of the wire's values: two rows of length 1 whose
# values each move by half a unit in the last place differ by at most twice that in their product (2**-8 for bfloat16).
_ORTHONORMALITY_ERROR = {"float32": 1e-4, "bfloat16": 2.0**-7}
_REFT_RANK = 8  # as in LoReFT's examples
_REFT_GROUPS = 2  # prefix and suffix
_TENSOR_HEADER_BYTES = 48
_SCORE_BYTES = 32
_SMALLEST_MESSAGE_BYTES = 65536
_STRICT_FIRST_ROUNDS = 3  # of pubswap-strict: nobody asks for fewer


@dataclass(frozen=True)
class PlanSize:
    """The largest plan a site is ready to run. The defaults hold the published experiments of PubSwap and the demo.

    A federation says in its bundle what it means to run, and a site may say less, or more.
    """

    rounds: int = 200
    local_steps: int = 120  # tau
    swap_period: int = 2  # tau_swap
    prompts_per_step: int = 16  # b
    samples_per_prompt: int = 16  # K
    max_new_tokens: int = 2048
    epochs: int = 2
    learning_rate: float = 1e-3

    @property
    def public_steps(self) -> int:
        return max(1, self.local_steps // self.swap_period)

    def changed(self, limits: Mapping[str, Any], source: str) -> PlanSize:
        """Return the size with some numbers replaced. Raises UsageError: no such number, not a number, or out of
        range."""
        for name, value in limits.items():
            known = getattr(self, name, None) if name in self.to_json() else None
            if known is None:
                raise UsageError(
                    f"{source}: {name!r} is no size of a plan", hint=f"one of: {', '.join(self.to_json())}"
                )
            numbers = (int, float) if isinstance(known, float) else (int,)
            least = 0 if isinstance(known, float) else 1
            if isinstance(value, bool) or not isinstance(value, numbers) or not least <= value <= _SIZE_MAX:
                raise UsageError(f"{source}: {name} {value!r} is no size of a plan")
        return replace(self, **{name: type(getattr(self, name))(value) for name, value in limits.items()})

    def looser_than(self, other: PlanSize) -> list[str]:
        """Return what this allows and `other` does not, in words."""
        looser = []
        for name, value in self.to_json().items():
            limit = getattr(other, name)
            # More public steps are more text, and a smaller period makes more of them.
            if value < limit if name == "swap_period" else value > limit:
                looser.append(f"{name} {value:g} (the federation means {limit:g})")
        return looser

    def to_json(self) -> dict[str, int | float]:
        return asdict(self)


@dataclass(frozen=True)
class SiteFacts:
    """Facts of a site that a ruleset cannot know.

    Attributes:
        site: name of the silo (or "coordinator" for the charter).
        peers: SPIFFE ids of all silos of the federation, this one included.
        topics: labels of the held-out file; empty without one.
        hidden_shape: (layers, width of a hidden state) of the model; (0, 0) where it is not known.
    peers_max_l2: of the longest delta that a peer may send; where this site's own may be longer, that counts.
        valid_from, valid_until: UTC such as "2026-12-01T00:00:00Z".
        first_rounds: rounds in which a person approves this site's factors.
        server_optimisers: that a plan may move the adapter by.
    """

    site: str
    federation: str
    coordinator: str
    coordinator_key_sha256: str
    peers: tuple[str, ...]
    schema: LoraSchema
    schema_file: str
    tokenizer_sha256: str
    template_sha256: str
    public_file: str
    public_sha256: str
    public_rows: int
    valid_from: str
    valid_until: str
    held_out_file: str = ""
    held_out_sha256: str = ""
    held_out_rows: int = 0
    topics: tuple[str, ...] = ()
    min_peers: int = 1
    hidden_shape: tuple[int, int] = (0, 0)
    peers_max_l2: float = 0.0
    least_isolation: str = "namespaces"
    first_rounds: int = 1
    size: PlanSize = PlanSize()
    server_optimisers: tuple[str, ...] = ()


def render_policy(ruleset: str, site: SiteFacts) -> str:
    """Fill a ruleset's text with a site's facts.

    Args:
        ruleset: text of a file in policies/rulesets.
        site: the site's own hashes and names, and the size of plan to allow.

    Raises:
        UsageError: the result is not a valid policy; says where.
    """
    values = {name: _yaml(value) for name, value in _values(site).items()}
    if "$reft_layers" in ruleset and site.hidden_shape == (0, 0):
        raise UsageError(
            "the model's config.json does not say how many layers it has and how wide they are",
            hint="hidden_size and num_hidden_layers",
        )
    text = Template(ruleset).substitute(values)
    if site.server_optimisers:
        allowed = f"    server_optimiser: {_yaml(site.server_optimisers)}\n"
        text = text.replace("\n  run.plan:\n", f"\n  run.plan:\n{allowed}", 1)
    # What is written must be readable: a mistake shows here and not at the silo's next start.
    load_policy(text.encode(), f"policy of {site.site}")
    return text


def _values(site: SiteFacts) -> dict[str, Any]:
    size, schema = site.size, site.schema
    responses = size.prompts_per_step * size.samples_per_prompt
    step_bytes = responses * (size.max_new_tokens * _TOKEN_BYTES_OF_STEP + _HEADER_BYTES_OF_RESPONSE)
    response_bytes = size.max_new_tokens * _TOKEN_BYTES_OF_RESPONSE
    round_of_responses = step_bytes * size.public_steps
    rounds_per_day = min(_ROUNDS_PER_DAY_MAX, _RUNS_PER_DAY * size.rounds)
    round_bytes = schema.update_bytes + round_of_responses + 65536
    updates = size.epochs * size.local_steps
    clip_l2, max_l2 = delta_limits(size, schema)
    # Peers' deltas are bound by the charter, not by this site's own limit; no mean is longer than the longest delta.
    max_step_l2 = max(max_l2, site.peers_max_l2)
    largest = max(math.prod(shape) for update in schema.updates for _, shape in update)
    max_tensor_l2 = min(max_l2, _two_digits(2 * size.learning_rate * updates * math.sqrt(largest)))
    # A starts uniform with variance 1/(3 in), so its norm is sqrt(rank/3) for each adapted matrix, and so does a frozen
    # B; the others start at 0.
    drawn = sum(name.endswith(".lora_A") or is_drawn(name, schema.freeze) for name, _ in schema.tensors)
    start_l2 = math.sqrt(drawn * schema.rank / 3)
    held_out: Any = None
    if site.held_out_sha256:
        held_out = {"file": site.held_out_file, "sha256": site.held_out_sha256, "rows": site.held_out_rows}
    return {
        "site": site.site,
        "least_isolation": site.least_isolation,
        "federation": site.federation,
        "coordinator": site.coordinator,
        "coordinator_key_sha256": site.coordinator_key_sha256,
        "peers": list(site.peers),
        "min_peers": site.min_peers,
        "min_updates": min(MIN_UPDATES, len(site.peers)),
        "valid_from": site.valid_from,
        "valid_until": site.valid_until,
        "base_model_sha256": schema.base_model_sha256,
        "tokenizer_sha256": site.tokenizer_sha256,
        "template_sha256": site.template_sha256,
        "schema_file": site.schema_file,
        "schema_sha256": schema.digest,
        "rank": schema.rank,
        "dtype": schema.dtype,
        "public_file": site.public_file,
        "public_sha256": site.public_sha256,
        "public_rows": site.public_rows,
        "held_out": held_out,
        "topics": list(site.topics),
        "first_rounds": site.first_rounds,
        "strict_first_rounds": max(_STRICT_FIRST_ROUNDS, site.first_rounds),
        "message_bytes": max(schema.payload_bytes, step_bytes, 65536),  # the adapter comes in whole
        "control_message_bytes": _CONTROL_MESSAGE_BYTES,
        "round_bytes": round_bytes,
        "day_bytes": round_bytes * rounds_per_day,
        "clip_l2": clip_l2,
        "max_l2": max_l2,
        "max_tensor_l2": max_tensor_l2,
        "max_step_l2": max_step_l2,
        # Twice the start bounds any draw of it, and each round adds a step: a run whose every round goes the same way
        # still fits.
        "max_total_l2": _two_digits(2 * start_l2 + size.rounds * max_step_l2),
        **_shift_values(schema, size.rounds, max_step_l2),
        "rounds": size.rounds,
        "local_steps": size.local_steps,
        # A site with fewer records than a batch uses each in every step; a pass may end inside the round.
        "local_epochs": size.local_steps + 1,
        "prompts_per_step": size.prompts_per_step,
        "samples_per_prompt": size.samples_per_prompt,
        "max_new_tokens": size.max_new_tokens,
        "learning_rate": size.learning_rate,
        "public_steps": size.public_steps,
        "responses_per_step": responses,
        "responses_per_round": responses * size.public_steps,
        "tokens_per_step": responses * size.max_new_tokens,
        "tokens_per_round": responses * size.max_new_tokens * size.public_steps,
        "bytes_per_response": response_bytes,
        "bytes_per_step": max(step_bytes, response_bytes),
        "bytes_per_round": max(round_of_responses, response_bytes),
        "bytes_per_day": max(round_of_responses, response_bytes) * rounds_per_day,
        **_kind_values(
            site,
            rounds_per_day=rounds_per_day,
            movement=0.5 * size.learning_rate * updates,
            step_bytes=step_bytes,
            answer_bytes=size.max_new_tokens * _TOKEN_BYTES_OF_STEP + _HEADER_BYTES_OF_RESPONSE,
        ),
    }


def _shift_values(schema: LoraSchema, rounds: int, delta_l2: float) -> dict[str, Any]:
    """Limits of the base's shift, for deltas dA, dB of at most `delta_l2` together."""
    fedex, flora = (shift_bound(name, schema.scale, schema.rank, delta_l2) for name in ("fedex", "flora"))
    values = {"fedex_step_l2": fedex, "fedex_l2": rounds * fedex, "flora_step_l2": flora, "flora_l2": rounds * flora}
    return {"shift_rank": schema.shift_rank, **{name: _two_digits(value) for name, value in values.items()}}


def delta_limits(size: PlanSize, schema: LoraSchema) -> tuple[float, float]:
    """(clip_l2, max_l2) of the deltas of plans of a size.

    Each AdamW step moves a value by about the learning rate at most; half of all steps the same way is more than any
    honest round we have measured, so the clip leaves those alone.
    """
    clip_l2 = _two_digits(0.5 * size.learning_rate * size.epochs * size.local_steps * math.sqrt(schema.elements))
    return clip_l2, _two_digits(clip_l2 * CLIP_MARGIN * 1.005)


def _two_digits(value: float) -> float:
    """Round up to two significant digits, so that people can read the limit."""
    if value == 0:
        return 0.0
    unit = Decimal(1).scaleb(Decimal(repr(value)).adjusted() - 1)
    return float((Decimal(repr(value)) / unit).to_integral_value(rounding=ROUND_CEILING) * unit)


def _yaml(value: Any) -> str:
    """A value as YAML that our strict loader reads back: JSON, but floats with a dot before the exponent."""
    if isinstance(value, float):
        text = repr(value)
        mantissa, mark, exponent = text.partition("e")
        return text if not mark or "." in mantissa else f"{mantissa}.0e{exponent}"
    return json.dumps(value, ensure_ascii=True)


def _kind_values(
    site: SiteFacts, *, rounds_per_day: int, movement: float, step_bytes: int, answer_bytes: int
) -> dict[str, Any]:
    """Placeholders of the rulesets beside those of PubSwap.

    Args:
        site: whose policy it is.
        rounds_per_day: that the site is ready for.
        movement: of one value in one round, at most.
        step_bytes: text of the answers to one step's prompts.
        answer_bytes: of one answer, on average.
    """
    size, dtype, (layers, width) = site.size, site.schema.dtype, site.hidden_shape
    adapter_bytes, update_bytes = site.schema.payload_bytes * (4 // DTYPE_ITEM_BYTES[dtype]), site.schema.update_bytes
    rank = min(_REFT_RANK, max(width, 1))
    numbers = 2 * rank * width + rank
    tensors = layers * _REFT_GROUPS * 3
    reft_bytes = layers * _REFT_GROUPS * numbers * DTYPE_ITEM_BYTES[dtype] + tensors * _TENSOR_HEADER_BYTES
    # W starts as a linear layer does, uniform within 1/sqrt(width): one W has norm sqrt(rank/3).
    start = math.sqrt(rank / 3)
    reft_moved = size.rounds * movement
    scores_bytes = size.prompts_per_step * (size.samples_per_prompt * 9 + _SCORE_BYTES)
    package_bytes = site.public_rows * answer_bytes
    budgets = {
        "update": (max(adapter_bytes, _SMALLEST_MESSAGE_BYTES), update_bytes),
        "package": (max(package_bytes, _SMALLEST_MESSAGE_BYTES), package_bytes),
        "scores": (max(step_bytes, _SMALLEST_MESSAGE_BYTES), 2 * size.local_steps * scores_bytes),
        "reft": (max(reft_bytes, _SMALLEST_MESSAGE_BYTES), reft_bytes),
        "answers": (max(step_bytes, _SMALLEST_MESSAGE_BYTES), step_bytes * size.public_steps),
        "figures": (_SMALLEST_MESSAGE_BYTES, 0),
    }
    values: dict[str, Any] = {}
    for name, (message, a_round) in budgets.items():
        round_bytes = a_round + _SMALLEST_MESSAGE_BYTES
        values |= {
            f"{name}_message_bytes": message,
            f"{name}_round_bytes": round_bytes,
            f"{name}_day_bytes": round_bytes * rounds_per_day,
        }
    scores_per_day = size.prompts_per_step * size.local_steps * rounds_per_day
    return values | {
        "package_bytes": package_bytes,
        "scores_per_day": scores_per_day,
        "rewards_per_day": scores_per_day * size.samples_per_prompt,
        "reft_layers": list(range(layers)),
        "reft_rank": rank,
        "reft_width": width,
        "reft_max_l2": _two_digits(math.sqrt(layers * _REFT_GROUPS) * (start + reft_moved * math.sqrt(numbers))),
        "reft_max_tensor_l2": _two_digits(2 * (start + reft_moved * math.sqrt(rank * max(width, 1)))),
        "orthonormality_error": _ORTHONORMALITY_ERROR[dtype],
    }


def ruleset_name(name: str, known: Sequence[str] = RULESETS) -> str:
    """The name, if there is such a ruleset. Raises UsageError naming those there are."""
    if name not in known:
        raise UsageError(f"there is no ruleset {name!r}", hint=f"one of: {', '.join(known)}")
    return name
