"""ExportDelta: the difference of the local factors to the round's start."""

from __future__ import annotations

from fedsilo.protocol.codec import Buffer, factors_head, joined_factors
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.tasks import ExportDelta
from silo.trainer.run import Done, Run
from silo.trainer.scale_out import BAD_TASK


def carry_out(run: Run, task: ExportDelta, body: Buffer) -> Done:
    """Raises OperationError: no adapter was loaded."""
    if not run.base_digest:
        raise OperationError("no adapter was loaded, so there is no difference to export", code=BAD_TASK)
    delta = run.adapter.delta()
    header, size_bytes = factors_head(
        delta,
        base_digest=run.base_digest,
        schema_sha256=run.plan.lora.schema_sha256,
        rank=run.adapter.shape.rank,
        scale=run.adapter.shape.scale,
        dtype="float32",
    )
    into = run.room.take(size_bytes) if run.room is not None else None
    return Done({"drift": run.adapter.drift()}, joined_factors(header, size_bytes, delta, into=into))
