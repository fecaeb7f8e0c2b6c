"""LoadAdapter begins a round with an adapter, LoadOwn with what this silo has trained; ExportDelta ends it with the
difference of the local factors to the round's start. LoadReference brings the adapter that the KL term is against. Of
what a method leaves to each silo (`Run.stays`), neither comes in nor goes out anything."""

from __future__ import annotations

import numpy as np

from fedsilo.protocol.codec import Buffer, decode_factors
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.factors import initial_factors
from fedsilo.protocol.tasks import ExportDelta, LoadAdapter, LoadOwn, LoadReference
from silo.trainer.run import Done, Run
from silo.trainer.scale_out import BAD_TASK


def load(run: Run, task: LoadAdapter, body: Buffer) -> Done:
    """Begin a round with an adapter. Raises PeerError: the adapter does not fit the schema."""
    run.adapter.load(run.tensors_of(body), task.round)
    run.base_digest = task.digest
    return _begun(run)


def load_own(run: Run, task: LoadOwn, body: Buffer) -> Done:
    """Begin a round with what was trained so far; the first one with factors drawn from the plan's seed, as a
    coordinator draws those that all silos begin with."""
    if run.position is None:
        shapes = [(name, tuple(each.shape)) for name, each in run.adapter.factors.items()]
        run.adapter.load(initial_factors(shapes, run.plan.seed, run.plan.lora.freeze), task.round)
    else:
        run.adapter.take_turn(task.round)
    return _begun(run)


def _begun(run: Run) -> Done:
    run.learner.start_round()
    run.open_step = None
    # here and not after the evaluation: an abandoned round has none, and its donors are not the next one's
    run.donors_trained = 0
    return Done({})


def load_reference(run: Run, task: LoadReference, body: Buffer) -> Done:
    """Keep an adapter as what the KL term is against. Raises PeerError: it does not fit the schema."""
    tensors = {name: np.array(values) for name, values in decode_factors(body).tensors.items()}
    with run.adapter.replaced_by(tensors):
        pass  # it fits
    run.learner.reference = tensors
    return Done({})


def export_delta(run: Run, task: ExportDelta, body: Buffer) -> Done:
    """Export the difference of the factors to the round's start. Raises OperationError: no adapter was loaded."""
    if not run.base_digest:
        raise OperationError("no adapter was loaded, so there is no difference to export", code=BAD_TASK)
    payload = run.adapter.exported(run.base_digest, run.plan.lora.schema_sha256, run.buffer, run.stays)
    return Done({"drift": run.adapter.drift()}, payload)
