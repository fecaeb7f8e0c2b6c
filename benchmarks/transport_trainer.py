"""A trainer that trains nothing, for `benchmarks.transport`: it dials the guard over the real link and answers each
task at once. Its update is one constant in every number, so that the mean of all silos is known by hand.

    python -m benchmarks.transport_trainer --address unix:PATH --constant 0.00006103515625

`silo.yaml` names it by `trainer.launch: external`. It ends with each run, as a trainer does, and dials again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array, Buffer, decode_factors, encode, factors_head, joined_factors
from fedsilo.sandbox.probes import run_probes
from silo.link import LinkClosed, LinkMessage, MessageLink
from silo.reusable_buffer import ReusableBuffer
from silo.trainer.worker import dial_patiently, set_offline

WAIT_SECONDS = 600.0
PRIVATE_PROMPTS = 64


class ConstantTrainer:
    """Args:
    link: to the guard.
    constant: what its update holds in every number, float32.
    """

    def __init__(self, link: MessageLink, constant: float) -> None:
        self._link = link
        self._constant = np.float32(constant)
        self._schema: dict[str, Any] = {}
        self._schema_sha256 = ""
        self._base_digest = ""
        self._update: dict[str, Array] = {}
        self._buffer = ReusableBuffer()

    def run(self) -> None:
        """Until the guard says `stop` or goes away."""
        with contextlib.suppress(LinkClosed):
            while (message := self._link.receive()).type != "stop":
                self._link.send(self._answer(message))

    def _answer(self, message: LinkMessage) -> LinkMessage:
        match message.type:
            case "probe":
                return LinkMessage("probed", {"results": run_probes(message.fields)})
            case "configure":
                return LinkMessage("ready", {"private_rows": PRIVATE_PROMPTS, "split": "none"})
            case "plan":
                return self._plan(message.fields)
            case _:
                return self._task(message)

    def _plan(self, fields: dict[str, Any]) -> LinkMessage:
        self._schema = fields["lora_schema"]
        self._schema_sha256 = json.loads(fields["canonical_json"])["lora"]["schema_sha256"]
        self._update = {
            row["name"]: np.full(row["shape"], self._constant, np.float32) for row in self._schema["tensors"]
        }
        return LinkMessage("planned", {"overlong": {}, "private_prompts": PRIVATE_PROMPTS})

    def _task(self, message: LinkMessage) -> LinkMessage:
        task, number = message.fields["task"], message.fields["round"]
        body: Buffer = b""
        if task == "LoadAdapter":
            decode_factors(message.body)
            self._base_digest = message.fields["digest"]
        elif task == "ExportDelta":
            header, size_bytes = factors_head(
                self._update,
                base_digest=self._base_digest,
                schema_sha256=self._schema_sha256,
                rank=self._schema["rank"],
                scale=self._schema["alpha"] / self._schema["rank"],
                dtype="float32",
            )
            body = joined_factors(header, size_bytes, self._update, into=self._buffer.take(size_bytes))
        elif task == "Evaluate":
            if message.body:
                decode_factors(message.body)
            body = encode(measured(message.fields["digest"], number))
        fields = {"task": task, "round": number, "step": message.fields.get("step", 0), "metrics": {}}
        return LinkMessage("done", fields, body)


def measured(digest: str, round_number: int) -> pb.MetricsEval:
    """An evaluation that found nothing right."""
    message = pb.MetricsEval(split="held_out", adapter_digest=digest)
    for name in (*(["donors_trained"] if round_number else []), "pass_at_1", "pass_at_1_greedy"):
        message.metrics.add(name=name, topic="", value=0.0)
    return message


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--address", required=True, help="the guard: unix:PATH")
    parser.add_argument("--constant", type=float, required=True, help="every number of its update")
    given = parser.parse_args(arguments)
    dial_again_and_again(given.address, lambda link: ConstantTrainer(link, given.constant))
    return 0


def dial_again_and_again(address: str, make: Callable[[MessageLink], ConstantTrainer]) -> None:
    """Serve one link after the other, until nobody answers any more."""
    set_offline(os.environ)
    while True:
        try:
            link = dial_patiently(address, None, WAIT_SECONDS)
        except LinkClosed:
            return
        with contextlib.closing(link):
            make(link).run()


if __name__ == "__main__":
    sys.exit(main())
