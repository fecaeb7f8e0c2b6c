"""A run's figures as TensorBoard event files, from the answer of the query `curves`.

One folder a silo, so that TensorBoard draws the silos of one figure into one plot; what belongs to no silo is under
`all`. A file holds all values that there are and is replaced as a whole, so that writing again adds what is new.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedsilo.files.durable import make_private_directory, write_durably
from fedsilo.files.extras import install_hint
from fedsilo.protocol.errors import OperationError, UsageError
from fedsilo.protocol.plan import Name

FILE = "events.out.tfevents.fedsilo"
_NAME = TypeAdapter(Name)
VERSION = "brain.Event:2"  # of the format


def write_events(folder: Path, answer: Mapping[str, Any]) -> list[Path]:
    """Write `folder/RUN/SILO/events.out.tfevents.fedsilo`, of each silo in the answer.

    Args:
        folder: TensorBoard's --logdir; made where it is missing.
        answer: of the query `curves`.

    Raises:
        UsageError: the `science` extra is not installed.
        OperationError: the disk refused, or the daemon names a run or a silo by what is no name (T37).
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise UsageError("tensorboard is not installed", hint=install_hint("tensorboard")) from error
    by_silo: dict[str, list[Any]] = {}
    for series in answer["series"]:
        events = by_silo.setdefault(series["silo"] or "all", [Event(file_version=VERSION)])
        for point in series["points"]:
            value = Summary.Value(tag=series["name"], simple_value=point["value"])
            events.append(Event(step=point["x"], summary=Summary(value=[value])))
    written = []
    for silo, events in sorted(by_silo.items()):
        content = io.BytesIO()
        records = RecordWriter(content)
        for event in events:
            records.write(event.SerializeToString())
        path = folder / _plain_name(answer["run"]) / _plain_name(silo) / FILE
        make_private_directory(path.parent)
        write_durably(path, content.getvalue(), mode=0o600)  # a silo's figures tell something of its prompts
        written.append(path)
    return written


def _plain_name(name: str) -> str:
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        told = f"the daemon names a run or a silo {name[:80]!r}, which is no name"
        raise OperationError(told, code="ANSWER_UNUSABLE") from error
