"""Policy files: traps of YAML, missing site parts, references, identity (threats T34, T35)."""

from __future__ import annotations

import pytest

from fedsilo.files.site_policy import read_ruleset
from fedsilo.protocol.errors import UsageError
from policies.capacity import worst_case
from policies.load import INIT_HINT, load_policy
from policies.render import RULESETS, PlanSize
from tests.policies.setting import PLAN, SCHEMA, edited, policy_of, policy_text


def _line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


TRAPS = {
    "unknown key": (
        "    per_round: 1\n",
        "    per_round: 1\n    surprise: 1\n",
        "surprise",
        "known keys here: approvals",
    ),
    "unknown top key": ("mode: enforce", "screens: []\nmode: enforce", "screens", "known keys here: approvals, audit"),
    "duplicate key": ("    per_round: 1\n", "    per_round: 1\n    per_round: 2\n", "per_round: 2", "first at line"),
    "1e-6 is a string": ("        quantum: 0.0001", "        quantum: 1e-6", "1e-6", "1.0e-6"),
    "yes is no boolean": ("send_only_verified: true", "send_only_verified: yes", "send_only_verified", "true or false"),
    "anchor": ("kinds: [ack, refusal, checkpoint]", "kinds: &k [ack]", "&k", "write it out"),
    "date": ('until: "2027-12-01T00:00:00Z"', "until: 2027-12-01", "until", "quote it"),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_T35_yaml_traps_are_errors_with_line_and_hint(trap: str) -> None:
    old, new, where, hint = TRAPS[trap]
    text = policy_text().replace(old, new, 1)
    with pytest.raises(UsageError) as raised:
        policy_of(text)
    assert raised.value.exit_code == 2
    assert f"policy.yaml:{_line_of(text, where)}:" in raised.value.message
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    per_round: 1\n", '    per_round: "1"\n'),
        ("    per_round: 1\n", "    per_round: true\n"),
        ("    per_round: 1\n", "    per_round: 1.5\n"),
        ("    per_round: 1\n", "    per_round: 7 MB\n"),
        ("    per_round: 1\n", "    per_round: -1\n"),
        ("    per_round: 1\n", ""),
        ("rounds: [1, 200]", "rounds: [200, 1]"),
        ("    schema: adapter ", "    schema: other "),
        ("    set: public\n", "    set: elsewhere\n"),
        ("min_peers: 2", "min_peers: 5"),
        ("min_updates: 2", "min_updates: 1"),
        ("min_updates: 2", "min_updates: 5"),
        ('until: "2027', 'until: "2025'),
        ('id: "cardio-net"', 'id: "other-net"'),
        ("secure_aggregation: allowed", "secure_aggregation: required"),
        ("policy_version: 1", "policy_version: 2"),
        ("max_l2: 0.019", "max_l2: 0.001"),
        ("name: pubswap ", 'name: "a \\n b" '),
        ("name: pubswap ", 'name: "\\e[2J" '),
    ],
)
def test_T35_wrong_values_name_their_line(old: str, new: str) -> None:
    text = policy_text()
    assert old in text
    with pytest.raises(UsageError, match=r"^policy.yaml:\d+: ") as raised:
        policy_of(text.replace(old, new, 1))
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("text", [None, b"", b"  \n"])
def test_T34_without_a_policy_file_the_way_to_one_is_named(text: bytes | None) -> None:
    with pytest.raises(UsageError) as raised:
        load_policy(text, "policy.yaml")
    assert raised.value.hint == INIT_HINT


@pytest.mark.parametrize("name", RULESETS)
def test_T34_a_bare_ruleset_is_refused_and_a_rendered_one_is_not(name: str) -> None:
    with pytest.raises(UsageError, match="bare ruleset") as raised:
        load_policy(read_ruleset(name).encode(), f"{name}.yaml")
    assert raised.value.hint == INIT_HINT
    assert policy_of(policy_text(name)).file.name == name


def test_T34_a_ruleset_without_the_site_blocks_at_all_is_bare_too() -> None:
    with pytest.raises(UsageError, match="bare ruleset"):
        load_policy(b"policy_version: 1\nname: x\nmode: enforce\negress: {}\ningress: {}\n", "x.yaml")


def test_identity_ignores_comments_and_order_but_not_values() -> None:
    policy = policy_of(policy_text())
    reordered = policy_of(policy_text().replace("  id: ", "  # a comment\n  id: ", 1))
    assert policy.digest == reordered.digest and policy.file_sha256 != reordered.file_sha256
    assert edited("    per_round: 1\n", "    per_round: 2\n").digest != policy.digest


def test_a_key_knows_its_line() -> None:
    text = policy_text()
    policy = policy_of(text)
    assert policy.line_of(("egress", "lora.factors", "max_l2")) == _line_of(text, "max_l2:")
    assert policy.line_of(("egress", "lora.factors", "nothing")) == _line_of(text, "lora.factors:")


def test_default_limits_hold_the_published_experiments_and_the_demo() -> None:
    """Worst round of PubSwap's experiments (tau 120, swap period 2, b = K = 8, 2048 tokens), computed here by hand."""
    policy = policy_of(policy_text(size=PlanSize()))
    responses = policy.file.egress.public_responses
    plan = policy.file.ingress.run_plan
    assert responses is not None and plan is not None
    assert responses.max_responses_per_round >= 8 * 8 * 60
    assert responses.max_tokens_per_round >= 8 * 8 * 60 * 2048
    assert responses.max_bytes_per_step >= 8 * 8 * 2048 * 4 and responses.max_bytes_per_response >= 2048 * 8
    assert plan.learning_rate[0] <= 1e-5 and plan.learning_rate[1] >= 1e-3
    for key in ("local_steps", "prompts_per_step", "samples_per_prompt"):
        low, high = getattr(plan, key)
        assert low <= getattr(PLAN, key) <= high


def test_worst_case_of_a_round_is_the_sum_of_its_limits() -> None:
    rows = {row["kind"]: row for row in worst_case(policy_of(policy_text()), SCHEMA)}
    # b 3 x K 4 = 12 answers a step, 2 public steps, 32 tokens of 8 bytes and 64 bytes of header each
    assert rows["public.responses"]["messages"] == 2
    assert rows["public.responses"]["payload_bytes"] == 2 * 12 * (32 * 8 + 64)
    assert rows["lora.factors"]["payload_bytes"] == SCHEMA.payload_bytes
    assert worst_case(policy_of(policy_text("deny_all"))) == []


@pytest.mark.parametrize(
    ("written", "misspelled", "named"),
    [
        ("max_l2:", "max_l3:", "egress.lora.factors.max_l3' (did you mean 'max_l2'?)"),
        # A site's own key, whose absence alone makes a bare ruleset.
        ("public_sets:", "public_set:", "public_set' (did you mean 'public_sets'?)"),
    ],
)
def test_a_misspelled_key_is_named_with_its_line(written: str, misspelled: str, named: str) -> None:
    text = policy_text()
    line = text[: text.index(written)].count("\n") + 1
    with pytest.raises(UsageError) as caught:
        policy_of(text.replace(written, misspelled, 1))
    assert caught.value.message == f"policy.yaml:{line}: unknown key '{named}"
    policy_of(text)


# U+202E turns text around, U+200D joins letters unseen, U+00AD and U+FEFF are not shown, U+E0041 is a tag.
@pytest.mark.parametrize(
    "mark", ["\u202e", "\u2066", "\u200d", "\u200b", "\u00ad", "\ufeff", "\U000e0041", "\u0085", "\u2028"]
)
def test_T37_a_policy_holds_no_character_that_hides_or_turns_text(mark: str) -> None:
    text = policy_text()
    written = text.replace('"sort up"', f'"sort\\U{ord(mark):08x}up"', 1)
    assert written != text
    line = next(number for number, each in enumerate(written.split("\n"), 1) if "\\U" in each)
    with pytest.raises(UsageError, match=f"policy.yaml:{line}: .*invisible characters: U\\+{ord(mark):04X}"):
        policy_of(written)


def test_T37_letters_of_any_script_and_their_accents_stay() -> None:
    name = "caf\u00e9 \u65e5\u672c \u05e9\u05c1 e\u0301"
    metrics = policy_of(policy_text().replace('"sort up"', f'"{name}"', 1)).file.egress.metrics_eval
    assert metrics is not None and name in metrics.topics
