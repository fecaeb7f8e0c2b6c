"""LoadAdapter: a round begins with an adapter."""

from __future__ import annotations

from fedsilo.protocol.codec import Buffer, decode_factors
from fedsilo.protocol.tasks import LoadAdapter
from silo.trainer.run import Done, Run


def carry_out(run: Run, task: LoadAdapter, body: Buffer) -> Done:
    """Raises PeerError: the adapter does not fit the schema."""
    run.adapter.load(decode_factors(body).tensors)
    run.learner.start_round()
    run.base_digest = task.digest
    run.open_step = None
    # here and not after the evaluation: an abandoned round has none, and its donors are not the next one's
    run.donors_trained = 0
    return Done({})
