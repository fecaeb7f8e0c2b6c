"""What a person sees of a payload: answers beside public prompts, tensors by name, shape, type, norm and histogram.

A tensor's values are never shown. The histogram counts by powers of ten with the sign, on edges that are the same for
every tensor, so that no edge is a value; the norm has three digits. Texts are given whole and unchanged, since JSON
escapes them: whoever draws them passes them through the one function that makes text safe (T37).
Does not stop: a person who may read a payload from telling others what it says. The log has who read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import json_format

from fedsilo.files.task_files import Task
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.services import INBOUND_KINDS, OUTBOUND_KINDS, TENSOR_KINDS
from silo.guard.messages import parsed

SHOWN_BYTES_MAX = 1 << 20
TENSORS_MAX = 512
# Of the absolute value; below the first counts as zero.
EDGES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


def payload_view(payload: bytes, kind: str, prompts: Sequence[Task]) -> dict[str, Any]:
    """One of `tensors`, `answers` and `content`, by kind.

    Args:
        payload: canonical bytes.
        kind: of the message.
        prompts: rows of this site's own copy of the public set, never of the message.

    Raises:
        UsageError: too big to be read by a person.
    """
    require_readable(kind, len(payload))
    kinds = OUTBOUND_KINDS if kind in OUTBOUND_KINDS else INBOUND_KINDS
    body, tensors = parsed(kind, payload, kinds)
    if tensors is not None:
        rows = [tensor_row(name, values) for name, values in sorted(tensors.items())[:TENSORS_MAX]]
        return {"tensors": rows, "tensors_total": len(tensors), "edges": list(EDGES)}
    if isinstance(body, pb.PublicResponses):
        return {"answers": [_answered(prompt, prompts) for prompt in body.prompts]}
    return {"content": json_format.MessageToDict(body, preserving_proto_field_name=True)}


def require_readable(kind: str, size_bytes: int) -> None:
    """Raises UsageError: too big to be read by a person."""
    if kind not in TENSOR_KINDS and size_bytes > SHOWN_BYTES_MAX:
        raise UsageError(f"the payload has {size_bytes} bytes; at most {SHOWN_BYTES_MAX} are shown")


def _answered(prompt: pb.PromptResponses, prompts: Sequence[Task]) -> dict[str, Any]:
    known = prompt.prompt_index < len(prompts)
    return {
        "row": prompt.prompt_index,
        "prompt": prompts[prompt.prompt_index].prompt if known else None,
        "answers": [response.text for response in prompt.responses],
    }


def tensor_row(name: str, values: Array) -> dict[str, Any]:
    """Name, shape, type, norm and histogram: counts below -edge …, about zero, … above edge."""
    flat = np.ravel(values).astype(np.float64)
    size, bad = np.abs(flat), ~np.isfinite(flat)
    places = np.searchsorted(np.asarray(EDGES), size, side="right")
    counted: Mapping[str, Any] = {
        "negative": np.bincount(places[(flat < 0) & ~bad], minlength=len(EDGES) + 1)[1:].tolist(),
        "zero": int(((places == 0) & ~bad).sum()),
        "positive": np.bincount(places[(flat > 0) & ~bad], minlength=len(EDGES) + 1)[1:].tolist(),
        "not_finite": int(bad.sum()),
    }
    return {
        "name": name, "shape": list(values.shape), "type": str(values.dtype), "norm": f"{np.linalg.norm(flat):.3g}",
        "histogram": dict(counted),
    }  # fmt: skip
