"""A trainer that tries to get private data out: `fedsilo demo --leak`, `--attack NAME` and the X9 tests use it.

    python -m fedsilo.launch.hostile_trainer --address unix:PATH --attack NAME ... --report FILE

It is the real trainer with a hostile link: it trains as agreed, and in the messages of its choice puts values of its
own. It runs as the site's own user without walls and may read everything there, so only the guard stands in its way.
What each attempt was is written to --report for the demo to look up in the guard's audit log.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsilo.edge.task_files import read_tasks
from fedsilo.launch.hostile_attacks import ATTACKS
from fedsilo.treaty.errors import FedSiloError
from fedsilo.treaty.wire import codec
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from fedsilo.treaty.wire.codec import Array
from policies.capacity import PROGRESS_SECONDS
from silo.link import LinkMessage, MessageLink

_OFF_GRID = 0.0000123456789
_EMPTY_TENSORS = 2000
_BURST = 300
_ZERO_WIDTH = ("\u200b", "\u200c")

Prompts = Sequence[str]


# ---- factors -----------------------------------------------------------------------------------------


def factors_of(header: pb.Factors, arrays: Sequence[Array], *, beside: bytes = b"") -> bytes:
    """A tensor payload exactly as given: what `codec.encode_factors` would make canonical stays as it is."""
    head = codec.encode(header) + beside
    return (
        len(head).to_bytes(8, "little") + head + b"".join(array.astype("<f4", copy=False).tobytes() for array in arrays)
    )


def _tensors(change: Callable[[dict[str, Array], Prompts], None]) -> Callable[[bytes, Prompts], bytes]:
    """`change` is given a copy of the tensors by name."""

    def changed(body: bytes, prompts: Prompts) -> bytes:
        factors = codec.decode_factors(body)
        tensors = {name: np.array(values, np.float32) for name, values in factors.tensors.items()}
        change(tensors, prompts)
        header = _header_like(factors.header)
        for name in sorted(tensors):
            header.tensors.add(name=name, shape=tensors[name].shape)
        return factors_of(header, [tensors[name] for name in sorted(tensors)])

    return changed


def _header_like(header: pb.Factors) -> pb.Factors:
    made = pb.Factors()
    made.CopyFrom(header)
    del made.tensors[:]
    return made


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


def _rename_first(tensors: dict[str, Array], name_of: Callable[[str], str]) -> None:
    first = sorted(tensors)[0]
    tensors[name_of(first)] = tensors.pop(first)


def _one_more(tensors: dict[str, Array], prompts: Prompts) -> None:
    text = prompts[0].encode()
    tensors["model.layers.0.self_attn.q_proj.notes"] = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), dtype="<f4")


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
        _header_like(factors.header),
        [np.asarray(factors.tensors[row.name]) for row in factors.header.tensors],
    )
    header.tensors.extend([factors.header.tensors[0], *factors.header.tensors])
    return factors_of(header, [arrays[0], *arrays])


# ---- answers and metrics -----------------------------------------------------------------------------


def _answers(change: Callable[[pb.PublicResponses, Prompts], object]) -> Callable[[bytes, Prompts], bytes]:
    def changed(body: bytes, prompts: Prompts) -> bytes:
        message = codec.decode(pb.PublicResponses, body)
        change(message, prompts)
        return codec.encode(message)

    return changed


def _prompts_as_answers(message: pb.PublicResponses, prompts: Prompts) -> None:
    for row, prompt in zip(message.prompts, prompts, strict=False):
        del row.responses[:]
        row.responses.add(text=prompt, finish=pb.FINISH_STOP)


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


def _metrics(change: Callable[[pb.MetricsEval, Prompts], object]) -> Callable[[bytes, Prompts], bytes]:
    def changed(body: bytes, prompts: Prompts) -> bytes:
        message = codec.decode(pb.MetricsEval, body)
        change(message, prompts)
        return codec.encode(message)

    return changed


def _off_grid(message: pb.MetricsEval, prompts: Prompts) -> None:
    message.metrics[0].value += _OFF_GRID


def _per_prompt(message: pb.MetricsEval, prompts: Prompts) -> None:
    for prompt in prompts[:8]:
        message.metrics.add(name=f"p_{prompt.encode().hex()}"[:60], value=0.5)


def _out_of_range(message: pb.MetricsEval, prompts: Prompts) -> None:
    message.metrics[0].value = 1e300


def _digest_of_its_own(message: pb.MetricsEval, prompts: Prompts) -> None:
    message.adapter_digest = _as_digest(prompts[0])


# ---- which message carries what ----------------------------------------------------------------------


@dataclass(frozen=True)
class Forgery:
    """How one attack is made: the trainer's message that comes of `task` is replaced by those that `forge` makes, with
    a pause after each; of no task comes its answer to the plan."""

    task: str
    forge: Callable[[LinkMessage, Prompts], list[LinkMessage]]
    pause_seconds: float = 0.0


def _body(task: str, change: Callable[[bytes, Prompts], bytes]) -> Forgery:
    return Forgery(task, lambda said, prompts: [LinkMessage(said.type, said.fields, change(bytes(said.body), prompts))])


def _burst(said: LinkMessage, prompts: Prompts) -> list[LinkMessage]:
    numbers = itertools.cycle(prompts[0].encode())
    steps = [
        LinkMessage("step", {"round": next(numbers), "step": next(numbers), "phase": "rollout"}) for _ in range(_BURST)
    ]
    return [*steps, said]


def _one_record(said: LinkMessage, prompts: Prompts) -> list[LinkMessage]:
    return [LinkMessage(said.type, {**said.fields, "private_prompts": 1}, said.body)]


def _failure(said: LinkMessage, prompts: Prompts) -> list[LinkMessage]:
    return [LinkMessage("failed", {"code": prompts[0], "message": prompts[0], "hint": prompts[0]})]


_EXPORT, _GENERATE, _EVALUATE = "ExportDelta", "GeneratePublic", "Evaluate"
FORGERIES: dict[str, Forgery] = {
    "prompt_as_response": _body(_GENERATE, _answers(_prompts_as_answers)),
    "prompt_in_tensor_name": _body(
        _EXPORT, _tensors(lambda tensors, prompts: _rename_first(tensors, lambda _: prompts[0]))
    ),
    "extra_tensor": _body(_EXPORT, _tensors(_one_more)),
    "off_grid_number": _body(_EVALUATE, _metrics(_off_grid)),
    "missing_tensor": _body(_EXPORT, _tensors(lambda tensors, prompts: tensors.__delitem__(sorted(tensors)[0]))),
    "tensor_case_changed": _body(_EXPORT, _tensors(lambda tensors, prompts: _rename_first(tensors, str.upper))),
    "wrong_shape": _body(_EXPORT, _tensors(_turn_first)),
    "empty_tensors": _body(_EXPORT, _tensors(_empty)),
    "unknown_dtype": _body(_EXPORT, _header(lambda header, prompts: setattr(header, "dtype", "float12"))),
    "duplicate_tensor": _body(_EXPORT, _first_twice),
    "unknown_field": _body(_EXPORT, _header(lambda header, prompts: None, beside=True)),
    "padded_payload": _body(_EXPORT, lambda body, prompts: body + prompts[0].encode()),
    "header_of_its_own": _body(_EXPORT, _header(_header_of_its_own)),
    "base_digest_of_its_own": _body(
        _EXPORT, _header(lambda header, prompts: setattr(header, "base_digest", _as_digest(prompts[0])))
    ),
    "nan_payload": _body(_EXPORT, _tensors(_nan_payload)),
    "signs_of_zero": _body(_EXPORT, _tensors(_signs_of_zero)),
    "low_bits": _body(_EXPORT, _tensors(_low_bits)),
    "norm_blow_up": _body(_EXPORT, _tensors(_a_million_times)),
    "one_record": Forgery("", _one_record),
    "second_update": Forgery(_EXPORT, lambda said, prompts: [said, said]),
    "answers_reordered": _body(_GENERATE, _answers(_reordered)),
    "samples_as_number": _body(_GENERATE, _answers(_samples_as_number)),
    "answers_to_other_prompts": _body(_GENERATE, _answers(_to_other_prompts)),
    "overlong_response": _body(_GENERATE, _answers(_overlong)),
    "token_ids_beside_text": _body(
        _GENERATE, lambda body, prompts: body + _unknown_field(prompts[0].encode()) if body else body
    ),
    "hidden_characters": _body(_GENERATE, _answers(_hidden)),
    "metric_per_prompt": _body(_EVALUATE, _metrics(_per_prompt)),
    "metric_out_of_range": _body(_EVALUATE, _metrics(_out_of_range)),
    "digest_of_its_own": _body(_EVALUATE, _metrics(_digest_of_its_own)),
    # the guard speaks of a step at moments of its own clock: one of them comes while the step lasts
    "burst_of_progress": Forgery("PrivateStep", _burst, pause_seconds=1.2 * PROGRESS_SECONDS / _BURST),
    "text_in_exception": Forgery(_EVALUATE, _failure),
}


# ---- the link ----------------------------------------------------------------------------------------


class HostileLink:
    """A link that changes what its trainer says.

    Args:
        link: to the guard.
        attacks: names, each tried once, at the first message it fits.
        report: told {name, kind, run, round, step} of each attempt, and of `low_bits` the bits that it placed.
        crash: text of the failure reported in place of the last evaluation; empty for none.
        pause: waits so many seconds.
    """

    def __init__(
        self, link: MessageLink, attacks: Sequence[str], report: Callable[[dict[str, Any]], None], *, crash: str,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:  # fmt: skip
        self._link = link
        self._left = list(attacks)
        self._report = report
        self._crash = crash
        self._pause = pause
        self._prompts: list[str] = []
        self._rounds = 0
        self._run = ""

    def receive(self) -> LinkMessage:
        message = self._link.receive()
        if self._crash and _is_last_evaluation(message, self._rounds):
            # as a trainer does whose exception quotes what it was working on
            self._link.send(LinkMessage("failed", {"code": self._crash, "message": self._crash, "hint": self._crash}))
            return self._link.receive()
        if message.type == "configure":
            tasks = [task for path in message.fields["private"] for task in read_tasks(Path(path)).rows]
            self._prompts = [task.prompt for task in reversed(tasks)]
        elif message.type == "plan":
            plan = json.loads(message.fields["canonical_json"])
            self._rounds, self._run = int(plan["rounds"]), str(plan["run"])
        return message

    def send(self, message: LinkMessage) -> None:
        name = self._attack_for(message)
        forged = FORGERIES[name].forge(message, self._prompts) if name else [message]
        for each in forged:
            self._link.send(each)
            if name:
                self._pause(FORGERIES[name].pause_seconds)
        if not name or forged == [message]:
            return  # nothing to speak through here, such as a step without prompts
        self._left.remove(name)
        of_step = FORGERIES[name].task in ("GeneratePublic", "PrivateStep")
        attempt: dict[str, Any] = {"name": name, "kind": ATTACKS[name].kind, "run": self._run}
        attempt["round"] = int(message.fields.get("round", 1))
        attempt["step"] = int(message.fields["step"]) if of_step else 0
        if name == "low_bits":
            attempt["bits"] = sum(values.size for values in codec.decode_factors(message.body).tensors.values())
        self._report(attempt)

    def _attack_for(self, message: LinkMessage) -> str:
        """The next attack that this message could carry; empty for none. The base model's evaluation carries none."""
        if message.type == "planned":
            return next((name for name in self._left if not FORGERIES[name].task), "")
        if message.type != "done" or not int(message.fields["round"]):
            return ""
        return next((name for name in self._left if FORGERIES[name].task == message.fields["task"]), "")


def _is_last_evaluation(message: LinkMessage, rounds: int) -> bool:
    fields = message.fields
    return message.type == "task" and fields["task"] == "Evaluate" and 0 < rounds == int(fields["round"])


def main(arguments: Sequence[str] | None = None) -> int:
    from silo.trainer.fences import set_offline
    from silo.trainer.worker import Worker, dial_patiently

    parser = argparse.ArgumentParser(prog="python -m fedsilo.launch.hostile_trainer", description="A hostile trainer.")
    parser.add_argument("--address", required=True, help="the guard: unix:PATH")
    parser.add_argument("--attack", action="append", default=[], choices=FORGERIES, help="what to try; may be repeated")
    parser.add_argument("--report", type=Path, required=True, help="gets a JSON line for each attempt")
    parser.add_argument("--crash", default="", help="text of a failure in place of the last evaluation")
    parser.add_argument("--wait-seconds", type=float, default=0.0, help="keep dialling so long until the guard listens")
    options = parser.parse_args(arguments)
    set_offline(os.environ)

    def report(attempt: dict[str, Any]) -> None:
        with options.report.open("a", encoding="utf-8") as out:
            out.write(json.dumps(attempt) + "\n")

    try:
        link = dial_patiently(options.address, None, options.wait_seconds)
        try:
            Worker(HostileLink(link, options.attack, report, crash=options.crash), None).run()
        finally:
            link.close()
    except FedSiloError as error:
        sys.stderr.write(f"error: {error.message} [{error.code}]\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
