"""Steps of the gate, each with the edit that takes it away: what `benchmarks.controls` plants beside rules and screens.

One tuple is (what is gone, the function that did it as `module:Class.method`, the code there that did it, the code that
is there instead). It is found as Python and not as text: see `benchmarks.mutants.Edit`, and
`tests/house/test_control_mutants.py`, which says when the code has moved on.
"""

from __future__ import annotations

# Each module is named once, so that a move changes one line.
COMMANDS = "certs.commands"
COORDINATOR_MAIN = "coordinator.main"
DRIVER = "coordinator.driver"
AUDIT_LOG = "fedsilo.audit.log"
ORDERS = "fedsilo.audit.orders"
POLICY_CHANGE = "fedsilo.cli.policy"
CLOCKS = "fedsilo.protocol.clocks"
TRANSCRIPT = "fedsilo.protocol.transcript"
CODEC = "fedsilo.protocol.codec"
ADAPTER_FOLDER = "fedsilo.files.adapter_folder"
RUN_REQUEST = "fedsilo.files.run_request"
PRODUCTS = "fedsilo.protocol.products"
ENGINE = "policies.engine"
RULES = "policies.rules"
SCREENS = "policies.screens"
ARCHIVE = "silo.guard.archive"
CLOCK_WATCH = "silo.guard.clock_watch"
LOOP = "silo.guard.loop"
ENVELOPE = "fedsilo.protocol.envelope"
GATE = "silo.guard.gate"
GUARD_COMMANDS = "silo.guard.commands"
GUARD_POLICY_CHANGE = "silo.guard.policy_change"
RUN = "silo.guard.run"
DECISIONS = "silo.guard.decisions"
LEDGER = "silo.guard.ledger"
LEDGER_CHECK = "silo.guard.ledger_check"
RELEASES = "silo.guard.releases"
GUARD_SCREENS = "silo.guard.screens"
SITE = "silo.guard.site"
ROUND_AGREEMENT = "silo.guard.round_agreement"

STEPS: tuple[tuple[str, str, str, str], ...] = (
    (
        "a silo takes a result that its table has for another",
        f"{ROUND_AGREEMENT}:Agreement._result",
        'body.results and own["sha256"] != body.adapter_digest',
        "False",
    ),
    (
        "what rounding hides of a shift's length does not count",
        f"{PRODUCTS}:l2_most",
        "l2_of(product) + len(product[0]) * ROUNDING * size_of(product)",
        "l2_of(product)",
    ),
    # ---- the way out ----
    (
        "an offer that is denied as it stands goes on",
        f"{GATE}:Gate._offer_update",
        'decision.verdict == "deny"',
        "False",
    ),
    ("answers that are denied as offered go on", f"{GATE}:Gate._offer_texts", 'decision.verdict == "deny"', "False"),
    (
        "the final refusal lets out",
        f"{GATE}:Gate.decide_payload",
        'decision.verdict == "deny" or (decision.verdict == "allow" and not decision.may_leave)',
        "False",
    ),
    ("a held message leaves at once", f"{GATE}:Gate.decide_payload", 'decision.verdict == "hold"', "False"),
    (
        "allowed messages are not counted",
        f"{GATE}:Gate.decide_payload",
        "self.judge.count(facts, place.run)",
        "self._ledger.next_sequence(run)",
    ),
    ("what was recorded may be gone when it is sent", f"{GATE}:Gate.transmit", "self.judge.check_recorded()", "pass"),
    (
        "deltas are neither clipped nor rounded",
        f"{GATE}:Gate._offer_update",
        "codec.joined_factors(header, payload_bytes, tensors, fit)",
        "codec.joined_factors(header, payload_bytes, tensors)",
    ),
    (
        "answers with a hit are not withheld",
        f"{GATE}:Gate._offer_texts",
        '[bool(hits) and block.on_hit == "withhold" for hits in screened.hits]',
        "[False for _ in screened.hits]",
    ),
    ("answers without a hit are withheld", f"{GATE}:Gate._offer_texts", "bool(hits)", "not hits"),
    ("hits are not counted", f"{GATE}:Gate._offer_texts", "self.judge.count_hits(message, screened)", "pass"),
    (
        "what is allowed is not kept until it is sent",
        f"{GATE}:Gate.decide_payload",
        "outbox_id = self._ledger.keep_until_sent(item)",
        "pass",
    ),
    (
        "what is about to leave need not be on disk",
        f"{ARCHIVE}:Archive.keep",
        "self._ledger.payloads.write(digest, payload)",
        "pass",
    ),
    ("what is kept has no limit", f"{ARCHIVE}:Archive.keep", "self._make_room(len(payload))", "pass"),
    (
        "settled payloads stay where the policy archives none",
        f"{LEDGER}:Ledger.settle_outbox",
        'self.drop_payloads([row["digest"]])',
        "pass",
    ),
    (
        "an exchange that broke off leaves no record",
        f"{GATE}:Gate.transmit",
        'self._outcomes.record("egress.indeterminate", allowed)',
        "pass",
    ),
    # ---- the way in ----
    ("any sender is believed", f"{GATE}:check_answer", "envelope.sender != coordinator_id", "False"),
    ("any federation is believed", f"{GATE}:check_answer", "envelope.federation != federation", "False"),
    (
        "a payload that was not signed is believed",
        f"{GATE}:check_answer",
        "payload is not None and envelope.payload_digest.hex() != sha256_hex(payload)",
        "False",
    ),
    ("any signature is believed", f"{ENVELOPE}:check_signature", "key.verify(envelope.signature, signed)", "pass"),
    (
        "a replayed answer is believed",
        f"{GATE}:Ingress.let_in",
        'self._ledger.accept_sequence("", envelope.sequence, carried=carried)',
        "pass",
    ),
    ("what the policy does not let in is let in", f"{GATE}:Ingress.let_in", 'decision.verdict == "deny"', "False"),
    (
        "a peer's donors have no largest share",
        f"{GATE}:Ingress._without_bad_donors",
        "within_share(body, good, most)",
        "good",
    ),
    (
        "donors that are wrong or hit are kept",
        f"{GATE}:Ingress._without_bad_donors",
        "right is not None and (right or not block.verify_locally) and fine",
        "True",
    ),
    # ---- counting and recording ----
    ("a log that cannot be written does not halt", f"{DECISIONS}:Judge.halting", "if self.halted:", "if False:"),
    ("the book of counts stays empty", f"{DECISIONS}:Judge.count", "self.book.record(facts)", "pass"),
    (
        "time may go back",
        f"{DECISIONS}:Judge.now",
        "max(self._ledger.now(self.clock()), self._audit.latest_time)",
        "self.clock()",
    ),
    ("a clock that jumped is believed", f"{CLOCKS}:judge", "wall - ran > limit + SLACK_SECONDS", "False"),
    (
        "a coordinator follows a jump of its clock",
        f"{COORDINATOR_MAIN}:ClockWatch._look",
        "judge(wall, stored=0.0, ran=self.believed + running - self._since)",
        "judge(wall, stored=0.0)",
    ),
    (
        "a coordinator's log goes by a clock that jumped",
        f"{COORDINATOR_MAIN}:Coordinator._open",
        "self._watch.time",
        "self._watch.wall",
    ),
    ("a start believes a clock ahead of the coordinator's", f"{CLOCKS}:judge", "wall - signed > limit", "False"),
    ("a start believes a clock behind the coordinator's", f"{CLOCKS}:judge", "signed - wall > limit", "False"),
    (
        "a gap is gone on with before anybody is asked",
        f"{CLOCKS}:judge",
        "gap > SIGNED_SECONDS_MAX + SLACK_SECONDS and not offline",
        "gap > SIGNED_SECONDS_MAX and False",
    ),
    (
        "a clock's halt ends with its process",
        f"{LOOP}:Guard._look_at_clock",
        "self._ledger.keep_clock_halt(asdict(fault))",
        "pass",
    ),
    (
        "an acceptance is of any halt of the clock",
        f"{CLOCK_WATCH}:ClockWatch.begin_acceptance",
        'str(command.arguments.get("halt", "")) != fault.digest',
        "False",
    ),
    (
        "a time that was released is compared with in the log",
        f"{AUDIT_LOG}:latest_t",
        "t if event == CLOCK_ACCEPTED else max(latest, t)",
        "max(latest, t)",
    ),
    ("budgets of a released time are refilled", f"{DECISIONS}:Judge.accept_clock", "self.book.turn_back(now)", "pass"),
    ("short payloads have plain digests in the log", f"{DECISIONS}:Judge.digests", "kind in TENSOR_KINDS", "True"),
    # ---- bytes ----
    ("bytes that are not canonical are read", f"{CODEC}:decode", "canonical != payload", "False"),
    ("-0 and denormals travel", f"{CODEC}:canonical_values", "bits[(bits & np.uint32(0x7F800000)) == 0] = 0", "pass"),
    ("tensor names need no order", f"{CODEC}:FactorsReader.__init__", "places and name <= before", "False"),
    (
        "bytes behind the last tensor are read over",
        f"{CODEC}:FactorsReader.__init__",
        "offset != payload_bytes",
        "False",
    ),
    # ---- the engine ----
    (
        "a rule that fails lets pass",
        f"{ENGINE}:_judge",
        '("deny", "RULE_FAILED", type(error).__name__)',
        '("ok", "RULE_FAILED", type(error).__name__)',
    ),
    ("nobody having judged is an approval", f"{ENGINE}:decide", "denied or not judged", "denied"),
    ("shadow mode sends", f"{ENGINE}:decide", '"deny" if shadow else verdict', "verdict"),
    (
        "an offer that was not final may leave",
        f"{ENGINE}:Decision.may_leave",
        'self.verdict == "allow" and self.stage == FINAL',
        'self.verdict == "allow"',
    ),
    ("fields without a class are not looked for", f"{ENGINE}:measure", "faults(message.body, CATALOGUE)", "{}"),
    # ---- persons ----
    (
        "what waited to be sent is not judged again",
        f"{DECISIONS}:Outcomes.once_more",
        "self._judge.reasons_not_to_retry(item.kind, item.decision_seq)",
        "[]",
    ),
    (
        "an index of another policy passes for this one's",
        f"{GUARD_SCREENS}:Screens.screen",
        "None if self._misfit(policy.file) else self._index",
        "self._index",
    ),
    ("an expired hold is approved", f"{RELEASES}:Releases.approve", "release.expires_at <= self._judge.now()", "False"),
    ("anybody may approve", f"{RELEASES}:Releases.approve", "not roles & set(command.roles)", "False"),
    ("an approval of other bytes counts", f"{RELEASES}:Releases._shown", "given != value", "False"),
    ("stored bytes may have changed", f"{LEDGER}:Payloads.read", "sha256_hex(payload) != digest", "False"),
    (
        "a yes need not say what was shown",
        f"{RELEASES}:Releases._opened",
        'not (signed := command.arguments.get("shown"))',
        "(signed := shown.digest) is None",
    ),
    ("a yes to other facts than were shown counts", f"{RELEASES}:Releases._opened", "signed != shown.digest", "False"),
    (
        "an order to another federation's guard is obeyed",
        f"{COMMANDS}:verify_command",
        "command.federation != federation",
        "False",
    ),
    (
        "what is beside an order may be exchanged",
        f"{COMMANDS}:_arguments_of",
        "digest != sha256_hex(command.sealed)",
        "False",
    ),
    ("a note may stand in what is signed", f"{COMMANDS}:_arguments_of", "sorted(may_be & arguments.keys())", "[]"),
    (
        "a signature in the log is not looked at",
        f"{ORDERS}:_Log._opened",
        "key.verify(signature, signed, ec.ECDSA(hashes.SHA256()))",
        "pass",
    ),
    (
        "an order in the log may be of another person",
        f"{ORDERS}:_Log._compare",
        "[order.identity.name for order in orders] != people",
        "False",
    ),
    ("an order counts in two records", f"{ORDERS}:_Log._opened", "signed in self._kept", "False"),
    (
        "an answer in the log needs no order",
        f"{ORDERS}:_Log._verdict",
        "self._kept and (named or record.event not in _ALSO_BY_NOBODY) and not _interrupted(record)",
        "False",
    ),
    (
        "an order in the log may be of another site",
        f"{ORDERS}:_Log._of_this_party",
        'party.role == "silo" and party.name != site',
        "False",
    ),
    (
        "an expired order stands in the log",
        f"{ORDERS}:_Log._compare",
        "record.t / 1000 > expires + EXPIRED_SECONDS_MAX",
        "False",
    ),
    (
        "a certificate may have ended days before it was seen",
        f"{ORDERS}:_Log._anchored",
        "(at - ends).total_seconds() <= LATE_SECONDS_MAX",
        "True",
    ),
    ("one person is enough", f"{RELEASES}:Releases.approve", "release.persons", "1"),
    ("an answer counts after the hold has ended", f"{RELEASES}:Releases._shown", 'release.state != "held"', "False"),
    (
        "approvals outlive the policy they were given under",
        f"{LEDGER}:Ledger.replace_judgement",
        'database.execute("DELETE FROM approvals WHERE release_id=?", (release_id,))',
        "pass",
    ),
    ("anybody releases a halted kind", f"{GUARD_COMMANDS}:Halts.lift_halt", "ROLE not in command.roles", "False"),
    ("one person releases a halted kind", f"{GUARD_COMMANDS}:Halts.lift_halt", "if len(given) >= needed:", "if given:"),
    (
        "the yes to one halt counts for the next",
        f"{GUARD_COMMANDS}:Halts.lift_halt",
        'digest.removeprefix("sha256:") != self._digest(kind, since)',
        "False",
    ),
    (
        "a site's own patterns are not looked for",
        f"{SCREENS}:_counts",
        "block.custom_file.patterns if block.custom_file is not None else ()",
        "()",
    ),
    # ---- the policy in force ----
    ("a looser policy comes in at a start", f"{GUARD_POLICY_CHANGE}:step_to", "not looser", "True"),
    ("a looser policy comes in while running", f"{GUARD_POLICY_CHANGE}:reload", "loosened(changes)", "[]"),
    (
        "a ledger that was taken away is a first start",
        f"{GUARD_POLICY_CHANGE}:step_to",
        "if seen.records:",
        "if False:",
    ),
    (
        "an older ledger goes on beside today's log",
        f"{LEDGER_CHECK}:disagreement",
        "heads is None or not heads.agree_with(log)",
        "heads is None",
    ),
    (
        "a restored ledger counts what it counted then",
        f"{LEDGER}:Ledger.raise_to",
        "book.raise_to(found.book)",
        "pass",
    ),
    ("the federation's charter binds nobody", f"{SITE}:effective_policy", "config.charter", "None"),
    # ---- what all parties of a round sign ----
    (
        "a transcript that the coordinator did not sign is signed",
        f"{ROUND_AGREEMENT}:Agreement._signed",
        "transcript if is_signed(transcript, coordinator, key, body.transcript_signature) else None",
        "transcript",
    ),
    ("a transcript may name anything", f"{ROUND_AGREEMENT}:Agreement._take", "if wrong:", "if False:"),
    (
        "a second transcript of a round is nothing",
        f"{ROUND_AGREEMENT}:Agreement._compare_shown",
        "conflict(known, shown)",
        "()",
    ),
    ("what peers signed instead is nothing", f"{ROUND_AGREEMENT}:Agreement.compare", "if counted.others:", "if False:"),
    ("a round begins with too few signatures", f"{ROUND_AGREEMENT}:Agreement._agreed", "len(signed) < least", "False"),
    (
        "an agreement on another transcript begins the round",
        f"{ROUND_AGREEMENT}:Agreement._agreed",
        "body.transcript_sha256 != transcript.digest",
        "False",
    ),
    (
        "a result of another transcript is believed",
        f"{ROUND_AGREEMENT}:Agreement._result",
        "not second and (body.transcript_sha256 != transcript.digest or not named <= set(transcript.silos))",
        "False",
    ),
    (
        "countersignatures are not verified",
        f"{TRANSCRIPT}:count",
        "not is_signed(transcript, party, key, each.signature, digest=each.digest)",
        "False",
    ),
    ("one silo alone agrees with itself", f"{TRANSCRIPT}:needed", "min(2, planned)", "1"),
    # ---- what waits, what is kept from another run, what enters, what fails ----
    (
        "what waits goes out where persons are asked for by now",
        f"{DECISIONS}:Judge.reasons_not_to_retry",
        'decision.verdict != "allow"',
        'decision.verdict == "deny"',
    ),
    (
        "what was allowed before a policy goes out under it",
        f"{DECISIONS}:Judge.reasons_not_to_retry",
        ('if kind in self.book.screen_halts:\n    return ["SCREEN_HALT"]'),
        ('return []\nif False:\n    return ["SCREEN_HALT"]'),
    ),
    (
        "an adapter of another run is not measured",
        f"{RUN}:RunManager.adapter",
        'None if view.last_adapter in ("", digest) else view.step_from',
        "None",
    ),
    (
        "a run starts from an adapter that is not finite",
        f"{ADAPTER_FOLDER}:_FoundFactors.__getitem__",
        "not np.isfinite(values).all()",
        "False",
    ),
    (
        "a run starts from an adapter longer than the charter's limits",
        f"{RUN_REQUEST}:_refuse_too_long",
        "start.l2 > limit",
        "False",
    ),
    ("a public set enters unread", f"{POLICY_CHANGE}:_linted", "if findings:", "if False:"),
    (
        "a message that fails unexpectedly is not counted",
        f"{DRIVER}:Driver._take",
        (
            "db.raise_sequence(session, silo, envelope.run, envelope.sequence)\n"
            "self._counted(session, silo, ruling, self._book(session, silo))"
        ),
        "pass",
    ),
)
