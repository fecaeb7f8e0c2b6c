"""The page that says, threat by threat, what stands in the way, which tests try it and by which attack. Attacks come
from the tests' own list (`tests/hostile`); a control is a sentence here."""

from __future__ import annotations

# Threat -> (what is tried, what stands in the way). Tests are named after the threat: `test_T01_...`.
CONTROLS: dict[str, tuple[str, str]] = {
    "T1": ("tensors added, left out or renamed", "exactly the schema's names; rules `tensor set`, `schema`"),
    "T2": (
        "other shapes and number formats, names that carry text",
        "rules `tensor shapes`, `tensor dtype`, `rank and scale`",
    ),
    "T3": (
        "padding, unknown fields, a second encoding",
        "bytes are rebuilt from values; only the canonical encoding parses",
    ),
    "T4": ("bits that a number does not need", "rule `finite values`; -0 and denormals become 0"),
    "T5": ("low bits of allowed values", "narrowed by size and `randomise_low_bits`; the rest is N1"),
    "T6": (
        "data in a frozen factor",
        "a frozen factor is not in the schema of what is sent, and its digest is compared",
    ),
    "T7": ("a huge update, or one of a single record", "clipped, then the norms judged; rule `records of the round`"),
    "T8": ("private text in errors, status texts, metadata", "codes of a closed list; a call ends with a bare status"),
    "T9": ("metrics and counts that say something else", "named fields, ranges, a grid, one order"),
    "T10": ("telemetry and downloads of libraries", "no network at the trainer, probed at start"),
    "T11": ("bursts and counts of messages", "budgets and buckets on disk, counted before anything is sent"),
    "T12": ("prompts from outside the public set", "rows by number, of this site's own copy, whose hash is pinned"),
    "T13": ("other generation settings", "ranges in the policy; rule `plan stands` once a plan is accepted"),
    "T14": ("private text in a public answer", "answers are graded again here; screens where the policy names them"),
    "T15": ("memorised passages and canaries", "screens `pii_basic`, `overlap`, `canary`"),
    "T16": ("the same in disguise", "screens decode and normalise; what is missed is N3"),
    "T17": ("token ids and their spelling", "text only, and limits on its length"),
    "T18": (
        "asking again to learn from what is withheld",
        "rounds open once; one code for every no; a day's hits halt a kind",
    ),
    "T19": ("plans with extreme steps or on chosen records", "ranges in the policy; the guard draws the records"),
    "T20": (
        "an adapter with a trap, or another for one silo",
        "one transcript a round, signed by enough silos; norm, step from the last one, schema",
    ),
    "T21": ("poisoned answers of others", "graded again, peers only, a share each, never shown raw"),
    "T22": (
        "code in files and messages",
        "no pickle, no remote code; verifiers by name, in a process that can be killed",
    ),
    "T23": ("bombs: size, number, depth", "declared and bounded before it is read"),
    "T24": ("stalled and slow senders", "deadlines, and so many calls a silo"),
    "T25": ("no TLS, or an old one", "TLS 1.3 or nothing, in each call; there is no mode without"),
    "T26": (
        "an expired certificate on a line that stays open",
        "each call looks at both certificates' dates; a connection is not kept for long",
    ),
    "T28": ("a certificate used in another role", "one identity a certificate, and roles by exact match in each call"),
    "T29": ("replays, other rounds, runs and federations", "a signature over all of it, and numbers that only rise"),
    "T30": ("somebody else as the coordinator", "its certificate's role and its pinned signing key"),
    "T31": (
        "keys that leak by file modes, links or logs",
        "mode 0600, no links followed, nothing overwritten; looser files are refused",
    ),
    "T32": (
        "a hostile request for a certificate",
        "the CA copies two public keys and nothing else; each key signs the other, with a token used once",
    ),
    "T33": (
        "an outage since a certificate expired",
        "a warning while days are left; a renewal keeps the keys by which others know a party",
    ),
    "T34": (
        "no policy, or a loosened one",
        "no start without one; a running silo only tightens; looser needs two approvals and is recorded",
    ),
    "T35": (
        "surprises of YAML",
        "a strict reader: no anchors, no doubled or unknown keys; each mistake is named with its line",
    ),
    "T36": (
        "approving one's own, another or an old release",
        "a yes signs digest, policy and what was shown, counts once, and opens every finding",
    ),
    "T37": ("text that acts on a terminal", "shown as text, control characters spelled out"),
    "T38": (
        "an audit log edited, cut or forked",
        "Merkle tree, signed checkpoints, and cosignatures of the other parties",
    ),
    "T39": ("a kill, a torn write or a full disk", "recorded before it is sent; what cannot be recorded is not sent"),
    "T40": ("content or guessable digests in the log", "a closed list of fields, salted leaves, keyed digests"),
    "T41": (
        "a clock that is set back or jumps",
        "order is by number; time that has been seen does not come back, and a jump halts",
    ),
    "T42": (
        "a ledger that was reset, or restored from an older copy",
        "the log names its newest head; one that is behind needs two approvers, and is raised to what the log shows",
    ),
    "T48": ("silos that nobody knows", "peers are listed in the policy, and a least number of them"),
    "T50": ("all of the above from a silo without a guard", "the coordinator judges everything with the same rules"),
    "T51": (
        "an update scaled or turned round by a bad silo",
        "clipped to one norm; `aggregate: median` or `trimmed_mean`",
    ),
    "T52": (
        "a backdoor within every limit",
        "a site may try each adapter on its own prompts before it trains on it; people roll back",
    ),
    "T55": (
        "work that one message makes: answers that take long to grade",
        "all other rules judge first; a budget for a silo's answers to a step, a queue for each; orders do not wait",
    ),
    "T56": (
        "reward without solving: built-ins, exceptions and loops of the test's, from the solution",
        "what is tested is decided from the test alone; each assertion is counted, and none reached is wrong",
    ),
    "T57": ("retention that removes young records", "their age is what the other parties' cosignatures show"),
    "T58": (
        "one silo's update given to the others as the global adapter",
        "`federation.min_updates`: bound by plan and transcript, compared with each signed result",
    ),
    "T59": (
        "another policy, person or CA, written by whoever else may write there",
        "files that are obeyed, and each folder on the way to them, are root's or the daemon's own",
    ),
}

# Numbers that no control and no test bears -> why.
WITHOUT_CONTROL: dict[str, str] = {
    "T27": "a stolen certificate: there is no revocation list, so it is good until its date",
    "T43, T44, T45": "mistakes in differential privacy: there is none yet (N2)",
    "T46, T47, T49": "attacks on secure sums: there are none yet",
    "T53, T54": "what an attacker infers from what a policy allows, such as who was in it: not tried yet (N2, N7)",
}


def threats_page() -> str:
    from tests.hostile.attacks import ATTACKS
    from tools.reference import markdown_table

    rows = [
        (
            threat,
            tried,
            control,
            ", ".join(f"`{name}`" for name, one in ATTACKS.items() if threat in one.threats) or "-",
        )
        for threat, (tried, control) in CONTROLS.items()
    ]
    attacks = [(f"`{attack.name}`", attack.party, attack.sentence, attack.consequence) for attack in ATTACKS.values()]
    return "\n\n".join(
        [
            "# Threats, controls, attacks",
            "What is tried, what stands in the way, and by which attack it is tried. Each threat has tests named "
            "after it: `pytest -k T01` runs those of T1. What none of it stops is said in "
            "[the threat model](../explain/threat-model.md).",
            markdown_table(("threat", "what is tried", "what stands in the way", "attack"), rows),
            "Without a control and without a test:\n\n"
            + "\n".join(f"- {threats}: {why}." for threats, why in WITHOUT_CONTROL.items()),
            "## The attacks\n\n`fedsilo demo --leak` makes the first four in a federation on this machine, `--attack "
            "NAME` one of them, and ends with exit code 1 if one was not denied, or not made at all. The tests make "
            "every one against a real guard (`tests/hostile`, `tests/security/test_X09_*`), and fail if one does not "
            "come to what stands here. *Denied* and *refused*: recorded "
            "with the rule or reason, and nothing is generated, trained on or sent for it. *Stopped*: the trainer is "
            "ended and the run goes on without its silo. *Rebuilt*: let out without what was put beside the values. "
            "*Survives*: the limit named is not closed, and an attack that is stopped there is a mistake of this page.",
            markdown_table(("attack", "who", "what it does", "what must come of it"), attacks),
        ]
    )
