"""What a round's transcript says of the donors' pool, against what this site knows (`exchange: round_end`, T20, T21).

A transcript names, for each silo of the pool, one digest of the answers that it gave in the round before. Every silo
signs the same one before it trains: so the coordinator cannot tell two silos of two pools, and each silo sees that
its own answers stand there as it sent them, or that they are left out.

Does not stop: a coordinator that leaves a silo out, or draws other donors from the pool than the plan's seed says.
"""

from __future__ import annotations

from fedsilo.treaty.donor_pool import answers_digest
from fedsilo.treaty.plan import Plan
from fedsilo.treaty.transcript import Transcript
from silo.guard.ledger import Ledger
from silo.guard.messages import Allowed

_KIND = "public.responses"


def remember_taken(ledger: Ledger, allowed: Allowed) -> None:
    """The coordinator has taken a message of this silo; of answers, which they were. Raises OperationError."""
    if allowed.kind == _KIND:
        ledger.remember_of_run(allowed.run, f"answers/{allowed.round}", f"{allowed.step}:{allowed.digest}")


def pool_stands(transcript: Transcript, plan: Plan, ledger: Ledger, silo: str) -> bool:
    """Whether the pool is one that can be: none but with `exchange: round_end` and before the second round; of the
    plan's silos; and of this one's own answers, if they are in it, all that the coordinator took of them."""
    if plan.exchange != "round_end" or transcript.round == 1:
        return not transcript.pool
    told = transcript.pool.get(silo)
    own = told is None or told in _given(ledger, transcript.run, transcript.round - 1)
    return own and set(transcript.pool) <= set(plan.silos)


def _given(ledger: Ledger, run: str, number: int) -> set[str]:
    """Digests of this silo's answers of a round: those that were taken, without and with what the coordinator has not
    answered, which it may have taken or not."""
    parted = (one.split(":", 1) for one in ledger.remembered_of_run(run, f"answers/{number}"))
    taken = {int(step): digest for step, digest in parted}
    waiting = {
        item.step: item.digest
        for item in ledger.outbox("allowed")
        if (item.run, item.round, item.kind) == (run, number, _KIND)
    }
    return {answers_digest(each) for each in (taken, waiting | taken) if each}
