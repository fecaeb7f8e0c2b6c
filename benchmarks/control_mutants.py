"""Steps of the gate, each with the edit that takes it away: what `benchmarks.controls` plants beside rules and screens.

One tuple is (what is gone, file, the text that does it, what stands there instead). The text must stand in the file
exactly once; `tests/house/test_control_mutants.py` says when the code has moved on.
"""

from __future__ import annotations

CLOCKS = "fedsilo/treaty/clocks.py"
GATE, ENTRANCE, JUDGE = "silo/guard/gate.py", "silo/guard/entrance.py", "silo/guard/judge.py"
ENVELOPES, RELEASES, HALTS, FORCE = (
    "silo/guard/envelopes.py", "silo/guard/releases.py", "silo/guard/halts.py", "silo/guard/in_force.py",
)  # fmt: skip
COMMANDS, ORDERS = "certs/commands.py", "fedsilo/edge/audit_orders.py"
TRANSCRIPTS = "silo/guard/transcripts.py"
CODEC, ENGINE, SCREENING = "fedsilo/treaty/wire/codec.py", "policies/engine.py", "policies/screening.py"

STEPS: tuple[tuple[str, str, str, str], ...] = (
    # ---- the way out ----
    (
        "an offer that is denied as it stands goes on",
        GATE,
        'if decision.verdict == "deny":\n            return self._outcomes.denied(facts, decision, tensor_digests(',
        "if False:\n            return self._outcomes.denied(facts, decision, tensor_digests(",
    ),
    (
        "answers that are denied as offered go on",
        GATE,
        'if decision.verdict == "deny":\n            original = Original(',
        "if False:\n            original = Original(",
    ),
    (
        "the final refusal lets out",
        GATE,
        'if decision.verdict == "deny" or (decision.verdict == "allow" and not decision.may_leave):',
        "if False:",
    ),
    ("a held message leaves at once", GATE, 'if decision.verdict == "hold":', "if False:"),
    (
        "allowed messages are not counted",
        GATE,
        "sequence = self._judge.count(facts, run)",
        "sequence = self._ledger.next_sequence(run)",
    ),
    (
        "a halted gate sends",
        GATE,
        'if self.halted:\n            raise halted_error("sent"',
        'if False:\n            raise halted_error("sent"',
    ),
    (
        "deltas are neither clipped nor rounded",
        GATE,
        "codec.joined_factors(header, payload_bytes, tensors, fit)",
        "codec.joined_factors(header, payload_bytes, tensors)",
    ),
    (
        "answers with a hit are not withheld",
        GATE,
        'withheld = [bool(found) and block.on_hit == "withhold" for found in screened.hits]',
        "withheld = [False for _ in screened.hits]",
    ),
    (
        "answers without a hit are withheld",
        GATE,
        'withheld = [bool(found) and block.on_hit == "withhold" for found in screened.hits]',
        'withheld = [not found and block.on_hit == "withhold" for found in screened.hits]',
    ),
    ("hits are not counted", GATE, "self._judge.count_hits(message, screened)", "pass"),
    ("what is allowed is not kept until it is sent", GATE, "outbox_id = self._ledger.keep_until_sent(item)", "pass"),
    (
        "what is about to leave need not be on disk",
        "silo/guard/archive.py",
        "self._ledger.payloads.write(digest, payload)",
        "pass",
    ),
    ("what is kept has no limit", "silo/guard/archive.py", "self._make_room(len(payload))", "pass"),
    (
        "settled payloads stay where the policy archives none",
        "silo/guard/ledger.py",
        'self.drop_payloads([row["digest"]])',
        "pass",
    ),
    (
        "an exchange that broke off leaves no record",
        GATE,
        'self._outcomes.record("egress.indeterminate", allowed)',
        "pass",
    ),
    # ---- the way in ----
    ("any sender is believed", ENVELOPES, "if envelope.sender != coordinator_id:", "if False:"),
    ("any federation is believed", ENVELOPES, "if envelope.federation != federation:", "if False:"),
    (
        "a payload that was not signed is believed",
        ENVELOPES,
        "if payload is not None and envelope.payload_digest.hex() != codec.sha256_hex(payload):",
        "if False:",
    ),
    (
        "any signature is believed",
        ENVELOPES,
        "key.verify(envelope.signature, signed)",
        "pass",
    ),
    (
        "a replayed answer is believed",
        ENTRANCE,
        'self._ledger.accept_sequence("", envelope.sequence, carried=carried)',
        "pass",
    ),
    (
        "what the policy does not let in is let in",
        ENTRANCE,
        'if decision.verdict == "deny":\n            raise IngressDenied(envelope, decision, body)',
        "if False:\n            raise IngressDenied(envelope, decision, body)",
    ),
    ("a peer's donors have no largest share", ENTRANCE, "keep = within_share(body, good, most)", "keep = good"),
    (
        "donors that are wrong or hit are kept",
        ENTRANCE,
        "right is not None and (right or not block.verify_locally) and fine\n",
        "True\n",
    ),
    # ---- counting and recording ----
    (
        "a log that cannot be written does not halt",
        JUDGE,
        'if self.halted:\n            raise halted_error("recorded or sent"',
        'if False:\n            raise halted_error("recorded or sent"',
    ),
    ("the book of counts stays empty", JUDGE, "self.book.record(facts)", "pass"),
    (
        "time may go back",
        JUDGE,
        "return max(self._ledger.now(self._clock()), self._audit.latest_time)",
        "return self._clock()",
    ),
    ("a clock that jumped is believed", CLOCKS, "if wall - ran > limit + SLACK_SECONDS:", "if False:"),
    (
        "a coordinator follows a jump of its clock",
        "coordinator/clock_watch.py",
        "judged = judge(wall, stored=0.0, ran=self.believed + running - self._since)",
        "judged = judge(wall, stored=0.0)",
    ),
    (
        "a coordinator's log goes by a clock that jumped",
        "coordinator/daemon.py",
        "clock=self._watch.time,",
        "clock=self._watch.wall,",
    ),
    ("a start believes a clock ahead of the coordinator's", CLOCKS, "if wall - signed > limit:", "if False:"),
    ("a start believes a clock behind the coordinator's", CLOCKS, "if signed - wall > limit:", "if False:"),
    ("a gap is gone on with before anybody is asked", CLOCKS, "+ SLACK_SECONDS and not offline:", "and False:"),
    (
        "a clock's halt ends with its process",
        "silo/guard/daemon.py",
        "self._ledger.keep_clock_halt(asdict(fault))",
        "pass",
    ),
    (
        "an acceptance is of any halt of the clock",
        "silo/guard/clock_watch.py",
        'if str(command.arguments.get("halt", "")) != fault.digest:',
        "if False:",
    ),
    (
        "a time that was released is compared with in the log",
        "fedsilo/edge/audit_loading.py",
        "return t if event == CLOCK_ACCEPTED else max(latest, t)",
        "return max(latest, t)",
    ),
    ("budgets of a released time are refilled", "silo/guard/judge.py", "self.book.turn_back(now)", "pass"),
    (
        "short payloads have plain digests in the log",
        "silo/guard/records.py",
        "if kind in TENSOR_KINDS:\n        return",
        "if True:\n        return",
    ),
    # ---- bytes ----
    ("bytes that are not canonical are read", CODEC, "if canonical != payload:", "if False:"),
    (
        "-0 and denormals travel",
        CODEC,
        "bits[(bits & np.uint32(0x7F800000)) == 0] = 0",
        "pass",
    ),
    (
        "tensor names need no order",
        CODEC,
        "if places and name <= before:",
        "if False:",
    ),
    ("bytes behind the last tensor are read over", CODEC, "if offset != payload_bytes:", "if False:"),
    # ---- the engine ----
    (
        "a rule that fails lets pass",
        ENGINE,
        'outcome, reason, measured = "deny", "RULE_FAILED", type(error).__name__',
        'outcome, reason, measured = "ok", "RULE_FAILED", type(error).__name__',
    ),
    ("nobody having judged is an approval", ENGINE, "if denied or not judged:", "if denied:"),
    ("shadow mode sends", ENGINE, 'verdict="deny" if shadow else verdict,', "verdict=verdict,"),
    (
        "an offer that was not final may leave",
        ENGINE,
        'return self.verdict == "allow" and self.stage == FINAL',
        'return self.verdict == "allow"',
    ),
    (
        "fields without a class are not looked for",
        "policies/facts.py",
        'facts["fields_at_fault"] = fields_at_fault(message.body)',
        'facts["fields_at_fault"] = {}',
    ),
    # ---- persons ----
    (
        "what waited to be sent is not judged again",
        "silo/guard/outbox.py",
        "if reasons := judge.denied_by_now(item.kind, item.decision_seq):",
        "if reasons := []:",
    ),
    (
        "an index of another policy passes for this one's",
        "silo/guard/screens.py",
        "index = None if self._misfit(policy.file) else self._index",
        "index = self._index",
    ),
    ("an expired hold is approved", RELEASES, "if release.expires_at <= self._gate.now():", "if False:"),
    (
        "anybody may approve",
        RELEASES,
        "if not roles & set(command.roles):",
        "if False:",
    ),
    ("an approval of other bytes counts", RELEASES, "if given != value:", "if False:"),
    (
        "stored bytes may have changed",
        "silo/guard/payloads.py",
        "if sha256_hex(payload) != digest:",
        "if False:",
    ),
    (
        "a yes need not say what was shown",
        RELEASES,
        'if not (signed := command.arguments.get("shown")):',
        'if (signed := view["shown"]) is None:',
    ),
    ("a yes to other facts than were shown counts", RELEASES, 'if signed != view["shown"]:', "if False:"),
    ("an order to another federation's guard is obeyed", COMMANDS, "if command.federation != federation:", "if False:"),
    ("what is beside an order may be exchanged", COMMANDS, "if digest != sha256_hex(command.sealed):", "if False:"),
    (
        "a note may stand in what is signed",
        COMMANDS,
        "if inside := sorted(may_be & arguments.keys()):",
        "if inside := []:",
    ),
    (
        "a signature in the log is not looked at",
        ORDERS,
        "key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))",
        "pass",
    ),
    (
        "an order in the log may be of another person",
        ORDERS,
        "if [order.identity.name for order in orders] != people:",
        "if False:",
    ),
    ("an order counts in two records", ORDERS, "if signed in self._kept:", "if False:"),
    (
        "an answer in the log needs no order",
        ORDERS,
        'if self._kept and (named or record["event"] not in _ALSO_BY_NOBODY) and not _interrupted(record):',
        "if False:",
    ),
    (
        "an order in the log may be of another site",
        ORDERS,
        'if party.role == "silo" and party.name != site:',
        "if False:",
    ),
    (
        "an expired order stands in the log",
        ORDERS,
        'if record["t"] / 1000 > expires + EXPIRED_SECONDS_MAX:',
        "if False:",
    ),
    (
        "a certificate may have ended days before it was seen",
        ORDERS,
        "(at - ends).total_seconds() <= LATE_SECONDS_MAX",
        "True",
    ),
    ("one person is enough", RELEASES, "if len(approvals) < release.persons:", "if len(approvals) < 1:"),
    ("an answer counts after the hold has ended", RELEASES, 'if release.state != "held":', "if False:"),
    (
        "approvals outlive the policy they were given under",
        "silo/guard/ledger.py",
        "expires_at, release_id),\n            )\n            "
        'database.execute("DELETE FROM approvals WHERE release_id=?", (release_id,))',
        "expires_at, release_id),\n            )",
    ),
    ("anybody releases a halted kind", HALTS, "if ROLE not in command.roles:", "if False:"),
    ("one person releases a halted kind", HALTS, "if len(given) >= needed:", "if given:"),
    (
        "the yes to one halt counts for the next",
        HALTS,
        'if digest.removeprefix("sha256:") != self._digest(kind, since):',
        "if False:",
    ),
    (
        "a site's own patterns are not looked for",
        "policies/screens/__init__.py",
        "own = block.custom_file.patterns if block.custom_file is not None else ()",
        "own = ()",
    ),
    # ---- the policy in force ----
    ("a looser policy comes in at a start", FORCE, "if not looser:", "if True:"),
    ("a looser policy comes in while running", FORCE, "if looser := loosened(changes):", "if looser := []:"),
    ("a ledger that was taken away is a first start", FORCE, "if seen.records:", "if False:"),
    (
        "an older ledger goes on beside today's log",
        "silo/guard/ledger_check.py",
        "if heads is None or not heads.agree_with(log):",
        "if heads is None:",
    ),
    (
        "a restored ledger counts what it counted then",
        "silo/guard/ledger_recount.py",
        "book.raise_to(found.book)",
        "pass",
    ),
    (
        "the federation's charter binds nobody",
        "silo/guard/startup.py",
        "policy = read_effective(config.policy, config.charter, config.charter_sha256)",
        "policy = read_effective(config.policy, None, config.charter_sha256)",
    ),
    # ---- what all parties of a round sign ----
    (
        "a transcript that the coordinator did not sign is signed",
        TRANSCRIPTS,
        "return transcript if is_signed(transcript, coordinator, key, body.transcript_signature) else None",
        "return transcript",
    ),
    ("a transcript may name anything", TRANSCRIPTS, "        if wrong:\n", "        if False:\n"),
    (
        "a second transcript of a round is nothing",
        TRANSCRIPTS,
        "if fields := conflict(known, shown):",
        "if fields := ():",
    ),
    ("what peers signed instead is nothing", TRANSCRIPTS, "if counted.others:", "if False:"),
    ("a round begins with too few signatures", TRANSCRIPTS, "if len(signed) < least:", "if False:"),
    (
        "an agreement on another transcript begins the round",
        TRANSCRIPTS,
        "if body.transcript_sha256 != transcript.digest:\n            raise TranscriptRefused(\n"
        '                "TRANSCRIPT_DIFFERS", f"round',
        'if False:\n            raise TranscriptRefused(\n                "TRANSCRIPT_DIFFERS", f"round',
    ),
    (
        "a result of another transcript is believed",
        TRANSCRIPTS,
        "if not second and (body.transcript_sha256 != transcript.digest or not named <= set(transcript.silos)):",
        "if False:",
    ),
    (
        "countersignatures are not verified",
        "fedsilo/treaty/transcript.py",
        "if not is_signed(transcript, party, key, each.signature, digest=each.digest):",
        "if False:",
    ),
    ("one silo alone agrees with itself", "fedsilo/treaty/transcript.py", "min(2, planned)", "1"),
    # ---- what waits, what is kept from another run, what enters, what fails ----
    (
        "what waits goes out where persons are asked for by now",
        JUDGE,
        'return list(decision.reasons) if decision.verdict != "allow" else []',
        'return list(decision.reasons) if decision.verdict == "deny" else []',
    ),
    (
        "what was allowed before a policy goes out under it",
        JUDGE,
        "if kind in self.book.screen_halts:",
        "return []\n        if False:",
    ),
    (
        "an adapter of another run is not measured",
        "silo/guard/incoming_adapters.py",
        'after = None if view.last_adapter in ("", digest) else view.step_from',
        "after = None",
    ),
    ("a public set enters unread", "fedsilo/launch/cli_policy_change.py", "        if findings:", "        if False:"),
    (
        "a message that fails unexpectedly is not counted",
        "coordinator/driver.py",
        "                db.raise_sequence(session, silo, envelope.run, envelope.sequence)\n"
        "                self._counted(session, silo, ruling, self._book(session, silo))",
        "                pass",
    ),
)
