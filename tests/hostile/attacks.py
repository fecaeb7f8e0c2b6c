"""Every attack that tests/security/test_X09_* make, the four of `fedsilo demo --leak` among them: who tries what, and
what must come of it (threat model, X9). The attackers themselves are `trainer` and `coordinator` beside this.

What the list does not show: an attack that nobody thought of, and anything hidden inside allowed values (N1), of which
the entries that survive are examples and not the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Party = Literal["trainer", "coordinator"]
# denied      by the rule named: recorded with every rule's verdict, and nothing of the message is used or sent
# refused     not believed at all, with the reason named: wrong signature, sequence, form
# dropped     the answers in question are taken out and counted by the silo they are from; the rest is used
# clipped     made as small as the policy says, and then let out
# rebuilt     let out, written anew from the values alone, so that what was put beside them is gone
# stopped     no message of the closed set: the trainer is ended, and the run goes on without its silo
# survives    let out or let in: the documented limit named
Outcome = Literal["denied", "refused", "dropped", "clipped", "rebuilt", "stopped", "survives"]
# What the audit record says for each.
DECISIONS: dict[Outcome, str] = {
    "denied": "deny",
    "refused": "deny",
    "dropped": "drop",
    "clipped": "clip",
    "rebuilt": "allow",
    "stopped": "stop",
    "survives": "allow",
}


@dataclass(frozen=True)
class Attack:
    """Attributes:
    threats: rows of the threat model.
    kind: of the message it speaks through.
    outcome: what must come of it.
    rule: that denies; for `refused` and `stopped` the recorded reason; for `survives` the limit (N1, N3).
    sentence: what is tried.
    """

    name: str
    party: Party
    threats: tuple[str, ...]
    kind: str
    outcome: Outcome
    rule: str
    sentence: str

    @property
    def decision(self) -> str:
        return DECISIONS[self.outcome]

    @property
    def consequence(self) -> str:
        """What must happen, in a few words."""
        by = f" ({self.rule})" if self.rule else ""
        return f"{self.outcome}{by}"


def _of(party: Party, *rows: tuple[str, str, str, Outcome, str, str]) -> tuple[Attack, ...]:
    return tuple(
        Attack(name, party, tuple(threats.split()), kind, outcome, rule, sentence)
        for name, threats, kind, outcome, rule, sentence in rows
    )


_FACTORS, _ANSWERS, _METRICS = "lora.factors", "public.responses", "metrics.eval"
TRAINER = _of(
    "trainer",
    # the four of `fedsilo demo --leak`
    (
        "prompt_as_response",
        "T14",
        _ANSWERS,
        "denied",
        "answers graded again",
        "answers public prompts with private prompts",
    ),
    ("prompt_in_tensor_name", "T1", _FACTORS, "denied", "tensor set", "renames a tensor to a private prompt"),
    ("extra_tensor", "T1", _FACTORS, "denied", "tensor set", "adds a tensor whose values spell a private prompt"),
    ("off_grid_number", "T9", _METRICS, "denied", "metric grid", "hides digits behind those of a score"),
    # ---- factors ----
    ("missing_tensor", "T1", _FACTORS, "denied", "tensor set", "says something by which tensors are left out"),
    ("tensor_case_changed", "T1", _FACTORS, "denied", "tensor set", "says something by upper and lower case in a name"),
    ("wrong_shape", "T2", _FACTORS, "denied", "tensor shapes", "gives a tensor the same values in another shape"),
    ("empty_tensors", "T2", _FACTORS, "denied", "tensor set", "adds 2000 empty tensors whose names carry prompts"),
    ("unknown_dtype", "T2", _FACTORS, "stopped", "TRAINER_CONFUSED", "states a number format that does not exist"),
    ("duplicate_tensor", "T3", _FACTORS, "stopped", "TRAINER_CONFUSED", "sends a tensor twice under one name"),
    ("unknown_field", "T3", _FACTORS, "stopped", "TRAINER_CONFUSED", "puts a prompt into a field that does not exist"),
    ("padded_payload", "T3", _FACTORS, "stopped", "TRAINER_CONFUSED", "appends a prompt to the bytes of the tensors"),
    ("header_of_its_own", "T3", _FACTORS, "rebuilt", "", "puts a prompt into the header's digest, rank and scale"),
    (
        "base_digest_of_its_own",
        "T3",
        _FACTORS,
        "denied",
        "base adapter",
        "writes a prompt where the base adapter's digest belongs",
    ),
    ("nan_payload", "T4", _FACTORS, "denied", "finite values", "spells a prompt in the free bits of NaN"),
    ("signs_of_zero", "T4", _FACTORS, "rebuilt", "", "spells a prompt in +0, -0 and denormal numbers"),
    ("low_bits", "T5", _FACTORS, "survives", "N1", "spells a prompt in the lowest bit of each value"),
    ("norm_blow_up", "T7", _FACTORS, "clipped", "L2 of the delta", "sends the update a million times as large"),
    (
        "one_record",
        "T7",
        _FACTORS,
        "denied",
        "records of the round",
        "has every step of the run train on one record",
    ),
    ("second_update", "T7 T11", _FACTORS, "stopped", "TRAINER_CONFUSED", "sends two updates in one round"),
    # ---- answers ----
    (
        "answers_reordered",
        "T9",
        _ANSWERS,
        "denied",
        "prompts in the step's order",
        "says something by the order of its answers",
    ),
    (
        "samples_as_number",
        "T9 T11",
        _ANSWERS,
        "denied",
        "samples per prompt",
        "says a number where the count of its samples belongs",
    ),
    (
        "answers_to_other_prompts",
        "T12",
        _ANSWERS,
        "denied",
        "public prompts of the open step",
        "answers prompts that nobody asked for",
    ),
    (
        "overlong_response",
        "T17",
        _ANSWERS,
        "denied",
        "bytes of one response",
        "sends an answer far longer than the plan allows",
    ),
    (
        "token_ids_beside_text",
        "T17",
        _ANSWERS,
        "stopped",
        "TRAINER_CONFUSED",
        "puts token ids of its choice beside the text",
    ),
    (
        "hidden_characters",
        "T16",
        _ANSWERS,
        "denied",
        "answers graded again",
        "appends a prompt in invisible characters to right answers",
    ),
    # ---- metrics, progress, errors ----
    ("metric_per_prompt", "T9", _METRICS, "denied", "metric names and topics", "adds a score for each private prompt"),
    ("metric_out_of_range", "T9", _METRICS, "denied", "metric range", "reports a score of 10^300"),
    (
        "digest_of_its_own",
        "T9",
        _METRICS,
        "denied",
        "metrics of the round's adapter",
        "writes a prompt where the adapter's digest belongs",
    ),
    (
        "burst_of_progress",
        "T11 T9",
        "control.progress",
        "rebuilt",
        "",
        "reports 150 steps with numbers of its choice at once",
    ),
    (
        "text_in_exception",
        "T8",
        "control.error",
        "stopped",
        "TRAINER_FAILED",
        "fails with private text as code, message and hint",
    ),
)
_PLAN, _ROUND, _AGREED, _ADAPTER = "run.plan", "round.open", "round.agreed", "global.adapter"
_DONORS, _ACK = "public.donors", "control.ack"
COORDINATOR = _of(
    "coordinator",
    # ---- plans ----
    ("wrong_public_set", "T12", _PLAN, "denied", "plan sets", "names another public set than the one pinned here"),
    ("text_in_plan", "T12", _PLAN, "denied", "measured", "puts a prompt of its own into the plan"),
    ("subset_plan", "T19", _PLAN, "denied", "measured", "names the private records to train on"),
    ("temperature_out_of_range", "T13", _PLAN, "denied", "plan temperature", "asks for a temperature of 9"),
    (
        "max_new_tokens_out_of_range",
        "T13",
        _PLAN,
        "denied",
        "plan max new tokens",
        "asks for a million tokens an answer",
    ),
    ("samples_out_of_range", "T13", _PLAN, "denied", "plan samples per prompt", "asks for 4096 answers to each prompt"),
    ("other_template", "T13", _PLAN, "denied", "plan model", "asks for another chat template"),
    ("learning_rate_out_of_range", "T19", _PLAN, "denied", "plan learning rate", "asks for a learning rate of 100"),
    ("steps_out_of_range", "T19", _PLAN, "denied", "plan local steps", "asks for a million steps on few records"),
    ("plan_of_strangers", "T48", _PLAN, "denied", "plan peers", "adds silos that nobody here knows"),
    # ---- in the middle of a run ----
    ("plan_changed", "T13", _PLAN, "denied", "plan stands", "sends the open run's plan again with another temperature"),
    ("other_run", "T29", _ROUND, "denied", "run", "sends the round of a run that this silo has no part in"),
    (
        "round_opened_again",
        "T18",
        _ROUND,
        "denied",
        "rounds go forward",
        "opens the open round again with other prompts",
    ),
    ("text_in_refusal", "T12 T37", "control.refusal", "denied", "fields", "puts terminal escapes into a refusal"),
    ("text_beside_ack", "T3 T12", _ACK, "refused", "UNKNOWN_FIELD", "puts text into a field that does not exist"),
    ("replayed_reply", "T29", _ACK, "refused", "SEQUENCE_REPLAYED", "sends an answer of an earlier exchange again"),
    ("reordered_replies", "T29", _ACK, "refused", "SEQUENCE_REPLAYED", "gives two answers in the wrong order"),
    ("other_federation", "T29", _ACK, "refused", "SENDER_MISMATCH", "sends what it signed for another federation"),
    ("other_sender", "T29 T30", _ACK, "refused", "SENDER_MISMATCH", "speaks in the name of a silo"),
    ("wrong_key", "T29 T30", _ACK, "refused", "SIGNATURE_INVALID", "signs with another key than the pinned one"),
    ("other_payload", "T29", _ACK, "refused", "DIGEST_MISMATCH", "exchanges the payload under a good signature"),
    # ---- donors ----
    (
        "wrong_donors",
        "T21",
        _DONORS,
        "dropped",
        "donors graded here",
        "passes wrong answers on as other silos' right ones",
    ),
    (
        "donors_with_escapes",
        "T21 T37",
        _DONORS,
        "dropped",
        "donors graded here",
        "puts control characters and a right-to-left override into answers",
    ),
    (
        "donors_of_a_stranger",
        "T21",
        _DONORS,
        "denied",
        "donors are peers",
        "passes answers on of a silo that does not exist",
    ),
    ("text_in_origin", "T21 T12", _DONORS, "denied", "fields", "puts an instruction where the name of a silo belongs"),
    ("too_many_donors", "T21", _DONORS, "denied", "donors per prompt", "passes 4096 answers to one prompt on"),
    (
        "donors_to_other_prompts",
        "T21 T12",
        _DONORS,
        "denied",
        "donors of the open step",
        "passes answers on to prompts that the step does not ask",
    ),
    ("donors_of_another_round", "T29", _DONORS, "denied", "round", "passes the answers of another round on"),
    # ---- rounds ----
    (
        "unknown_prompt_index",
        "T12",
        _ROUND,
        "denied",
        "prompts are rows of the public set",
        "asks for a row that the public set does not have",
    ),
    (
        "text_in_round",
        "T12 T3",
        _ROUND,
        "refused",
        "UNKNOWN_FIELD",
        "puts a prompt of its own beside the rows it asks for",
    ),
    (
        "same_prompt_twice",
        "T18",
        _ROUND,
        "denied",
        "prompts are rows of the public set",
        "asks one prompt twice in a step",
    ),
    (
        "too_many_prompts",
        "T18",
        _ROUND,
        "denied",
        "prompts per public step",
        "asks for more prompts than the plan says",
    ),
    ("unplanned_step", "T18", _ROUND, "denied", "public steps of the plan", "makes a private step public"),
    ("same_prompts_each_round", "T18", _ROUND, "survives", "N3", "asks the same prompts in every round"),
    # ---- adapters ----
    (
        "adapter_beside_transcript",
        "T20",
        _ROUND,
        "refused",
        "TRANSCRIPT_DIFFERS",
        "names another adapter than the transcript that all sign",
    ),
    (
        "transcript_unsigned",
        "T20",
        _ROUND,
        "refused",
        "TRANSCRIPT_UNSIGNED",
        "changes the transcript without signing it again",
    ),
    (
        "adapter_of_one_silo",
        "T20",
        _AGREED,
        "refused",
        "TOO_FEW_SIGNATURES",
        "signs one transcript for one silo and another, with another adapter, for the rest",
    ),
    (
        "adapter_of_another_digest",
        "T20",
        _ADAPTER,
        "refused",
        "DIGEST_MISMATCH",
        "hands out other bytes than the round names",
    ),
)
ATTACKS: dict[str, Attack] = {attack.name: attack for attack in (*TRAINER, *COORDINATOR)}


def named(*names: str) -> tuple[Attack, ...]:
    """The attacks of these names, each once, in the order of the list."""
    assert set(names) <= ATTACKS.keys(), names
    return tuple(attack for attack in ATTACKS.values() if attack.name in names)
