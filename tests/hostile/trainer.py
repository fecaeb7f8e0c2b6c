"""Trainers that try to get private data out in every way that the X9 tests know: `fedsilo demo --leak` makes four of
them, these are the rest.

    python -m tests.hostile.trainer --address unix:PATH --attack NAME ... --report FILE
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedsilo.demo import hostile_trainer
from fedsilo.demo.hostile_trainer import (
    EVALUATE,
    EXPORT,
    GENERATE,
    Forgery,
    Prompts,
    factors_of,
    header_like,
    of_body,
    rename_first,
    with_answers,
    with_metrics,
    with_tensors,
)
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array
from policies.capacity import PROGRESS_SECONDS
from silo.link import LinkMessage, MessageLink
from tests.hostile.attacks import ATTACKS

_EMPTY_TENSORS = 2000
_BURST = 150
_ZERO_WIDTH = ("\u200b", "\u200c")


def pause(seconds: float) -> None:
    """Does not wait: in memory nothing else has to happen meanwhile. The program does wait (below)."""


# ---- factors -----------------------------------------------------------------------------------------


def _header(
    change: Callable[[pb.Factors, Prompts], object], *, beside: bool = False
) -> Callable[[bytes, Prompts], bytes]:
    """`change` is given the header; the values stay."""

    def changed(body: bytes, prompts: Prompts) -> bytes:
        factors = codec.decode_factors(body)
        header = pb.Factors()
        header.CopyFrom(factors.header)
        change(header, prompts)
        extra = _unknown_field(prompts[0].encode()) if beside else b""
        return factors_of(header, [factors.tensors[entry.name] for entry in factors.header.tensors], beside=extra)

    return changed


def _unknown_field(content: bytes) -> bytes:
    """Field 15, bytes, which no message has."""
    content = content[:127]
    return bytes([15 << 3 | 2, len(content)]) + content


def _turn_first(tensors: dict[str, Array], prompts: Prompts) -> None:
    first = sorted(tensors)[0]
    tensors[first] = tensors[first].reshape(tensors[first].shape[::-1])


def _empty(tensors: dict[str, Array], prompts: Prompts) -> None:
    for number, prompt in zip(range(_EMPTY_TENSORS), itertools.cycle(prompts), strict=False):
        tensors[f"{number:04d} {prompt[:40]}"] = np.zeros(0, np.float32)


def _bits_of(prompts: Prompts, count: int) -> Array:
    """`count` bits of the prompts, one after the other, from the beginning again where there are too few."""
    bits = np.unpackbits(np.frombuffer("\n".join(prompts).encode(), np.uint8))
    return np.resize(bits, count)


def _spell(tensors: dict[str, Array], prompts: Prompts, write: Callable[[Array, Array], Array]) -> None:
    """Replace the bit patterns of all values, taken in name order, by what `write` makes of them and the bits."""
    bits = _bits_of(prompts, sum(values.size for values in tensors.values()))
    for name in sorted(tensors):
        values = tensors[name]
        part, bits = bits[: values.size], bits[values.size :]
        patterns = write(values.reshape(-1).view(np.uint32), part.astype(np.uint32))
        tensors[name] = patterns.astype(np.uint32).view(np.float32).reshape(values.shape)


def _nan_payload(tensors: dict[str, Array], prompts: Prompts) -> None:
    _spell(tensors, prompts, lambda patterns, bits: np.uint32(0x7FC00000) | bits)


def _signs_of_zero(tensors: dict[str, Array], prompts: Prompts) -> None:
    # by turns a sign of zero and the lowest bit of a denormal number
    def write(patterns: Array, bits: Array) -> Array:
        return np.where(np.arange(bits.size) % 2 == 0, bits << np.uint32(31), bits)

    _spell(tensors, prompts, write)


def _low_bits(tensors: dict[str, Array], prompts: Prompts) -> None:
    _spell(tensors, prompts, lambda patterns, bits: patterns & np.uint32(0xFFFFFFFE) | bits)


def read_low_bits(tensors: Mapping[str, Array], byte_count: int) -> bytes:
    """What a receiver reads out of `low_bits`; the counterpart, for whoever measures what got through."""
    patterns = [np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint32) for name in sorted(tensors)]
    return np.packbits(np.concatenate(patterns).astype(np.uint8) & 1).tobytes()[:byte_count]


def _a_million_times(tensors: dict[str, Array], prompts: Prompts) -> None:
    for name in tensors:
        tensors[name] = tensors[name] * np.float32(1e6) + np.float32(1e3)


def _header_of_its_own(header: pb.Factors, prompts: Prompts) -> None:
    header.schema_sha256 = _as_digest(prompts[0])
    header.rank, header.scale = 1_234_567, 8.9


def _as_digest(text: str) -> str:
    return text.encode().hex()[:64].ljust(64, "0")


def _first_twice(body: bytes, prompts: Prompts) -> bytes:
    factors = codec.decode_factors(body)
    header, arrays = (
        header_like(factors.header),
        [np.asarray(factors.tensors[row.name]) for row in factors.header.tensors],
    )
    header.tensors.extend([factors.header.tensors[0], *factors.header.tensors])
    return factors_of(header, [arrays[0], *arrays])


# ---- answers and metrics -----------------------------------------------------------------------------


def _reordered(message: pb.PublicResponses, prompts: Prompts) -> None:
    rows = list(message.prompts)[::-1]
    del message.prompts[:]
    message.prompts.extend(rows)


def _samples_as_number(message: pb.PublicResponses, prompts: Prompts) -> None:
    for row, prompt in zip(message.prompts, prompts, strict=False):
        row.samples = 1_000 + int.from_bytes(prompt.encode()[:2], "little")


def _to_other_prompts(message: pb.PublicResponses, prompts: Prompts) -> None:
    asked = {row.prompt_index for row in message.prompts}
    for row in message.prompts:
        row.prompt_index = next(index for index in itertools.count() if index not in asked)
        asked.add(row.prompt_index)


def _overlong(message: pb.PublicResponses, prompts: Prompts) -> None:
    for row in message.prompts[:1]:
        row.samples = max(1, row.samples)
        del row.responses[:]
        row.responses.add(text=prompts[0] * 200, finish=pb.FINISH_STOP)


def _hidden(message: pb.PublicResponses, prompts: Prompts) -> None:
    answers = [response for row in message.prompts for response in row.responses]
    # one byte of it in each, since an answer that is too long is not even graded
    for answer, bits in zip(answers, _bits_of(prompts, 8 * len(answers)).reshape(-1, 8), strict=True):
        answer.text += "".join(_ZERO_WIDTH[bit] for bit in bits)


def _per_prompt(message: pb.MetricsEval, prompts: Prompts) -> None:
    for prompt in prompts[:8]:
        message.metrics.add(name=f"p_{prompt.encode().hex()}"[:60], value=0.5)


def _out_of_range(message: pb.MetricsEval, prompts: Prompts) -> None:
    message.metrics[0].value = 1e300


def _digest_of_its_own(message: pb.MetricsEval, prompts: Prompts) -> None:
    message.adapter_digest = _as_digest(prompts[0])


def _burst(said: LinkMessage, prompts: Prompts) -> Iterator[LinkMessage]:
    numbers = itertools.cycle(prompts[0].encode())
    for _ in range(_BURST):
        yield LinkMessage("step", {"round": next(numbers), "step": next(numbers), "phase": "rollout"})
        # the guard speaks of a step at moments of its own clock: one of them comes while the step lasts
        pause(1.2 * PROGRESS_SECONDS / _BURST)
    yield said


def _one_record(said: LinkMessage, prompts: Prompts) -> list[LinkMessage]:
    return [LinkMessage(said.type, {**said.fields, "private_prompts": 1}, said.body)]


def _failure(said: LinkMessage, prompts: Prompts) -> list[LinkMessage]:
    return [LinkMessage("failed", {"code": prompts[0], "message": prompts[0], "hint": prompts[0]})]


FORGERIES: dict[str, Forgery] = {
    **hostile_trainer.FORGERIES,
    "missing_tensor": of_body(EXPORT, with_tensors(lambda tensors, prompts: tensors.__delitem__(sorted(tensors)[0]))),
    "tensor_case_changed": of_body(EXPORT, with_tensors(lambda tensors, prompts: rename_first(tensors, str.upper))),
    "wrong_shape": of_body(EXPORT, with_tensors(_turn_first)),
    "empty_tensors": of_body(EXPORT, with_tensors(_empty)),
    "unknown_dtype": of_body(EXPORT, _header(lambda header, prompts: setattr(header, "dtype", "float12"))),
    "duplicate_tensor": of_body(EXPORT, _first_twice),
    "unknown_field": of_body(EXPORT, _header(lambda header, prompts: None, beside=True)),
    "padded_payload": of_body(EXPORT, lambda body, prompts: body + prompts[0].encode()),
    "header_of_its_own": of_body(EXPORT, _header(_header_of_its_own)),
    "base_digest_of_its_own": of_body(
        EXPORT, _header(lambda header, prompts: setattr(header, "base_digest", _as_digest(prompts[0])))
    ),
    "nan_payload": of_body(EXPORT, with_tensors(_nan_payload)),
    "signs_of_zero": of_body(EXPORT, with_tensors(_signs_of_zero)),
    "low_bits": of_body(EXPORT, with_tensors(_low_bits)),
    "norm_blow_up": of_body(EXPORT, with_tensors(_a_million_times)),
    "one_record": Forgery("", _one_record),
    "second_update": Forgery(EXPORT, lambda said, prompts: [said, said]),
    "answers_reordered": of_body(GENERATE, with_answers(_reordered)),
    "samples_as_number": of_body(GENERATE, with_answers(_samples_as_number)),
    "answers_to_other_prompts": of_body(GENERATE, with_answers(_to_other_prompts)),
    "overlong_response": of_body(GENERATE, with_answers(_overlong)),
    "token_ids_beside_text": of_body(
        GENERATE, lambda body, prompts: body + _unknown_field(prompts[0].encode()) if body else body
    ),
    "hidden_characters": of_body(GENERATE, with_answers(_hidden)),
    "metric_per_prompt": of_body(EVALUATE, with_metrics(_per_prompt)),
    "metric_out_of_range": of_body(EVALUATE, with_metrics(_out_of_range)),
    "digest_of_its_own": of_body(EVALUATE, with_metrics(_digest_of_its_own)),
    "burst_of_progress": Forgery("PrivateStep", _burst),
    "text_in_exception": Forgery(EVALUATE, _failure),
}


class HostileLink(hostile_trainer.HostileLink):
    """A link that makes any of them, and says in its report of which kind the message was."""

    forgeries = FORGERIES
    step_tasks = (GENERATE, "PrivateStep")

    def __init__(
        self, link: MessageLink, attacks: Sequence[str], report: Callable[[dict[str, Any]], None], *, crash: str
    ) -> None:
        super().__init__(
            link, attacks, lambda attempt: report({**attempt, "kind": ATTACKS[attempt["name"]].kind}), crash=crash
        )

    def attack_for(self, message: LinkMessage) -> str:
        """Return as well what the answer to the plan, which comes of no task, could carry."""
        return self.next_attack("") if message.type == "planned" else super().attack_for(message)


if __name__ == "__main__":
    pause = time.sleep
    sys.exit(hostile_trainer.main(link_class=HostileLink))
