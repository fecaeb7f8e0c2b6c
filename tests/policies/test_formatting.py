"""`fedsilo policy fmt`: keys move, comments move with them, meaning stays."""

from __future__ import annotations

import itertools
import random

import pytest
from pydantic import BaseModel

from fedsilo.treaty.errors import UsageError
from fedsilo.treaty.strict_yaml import load
from policies.formatting import formatted
from policies.load import load_policy
from policies.model import PolicyFile
from tests.policies.setting import policy_text

RULESETS = ("pubswap", "pubswap-random", "deny_all")


def shuffled(text: str, seed: int) -> str:
    """The same policy with the keys of every top-level block, and of the blocks below it, in another order.

    Works on whole lines by their indentation alone, so that it knows nothing of what it tests.
    """
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if not line) + 1
    order = random.Random(seed)

    def mixed(block: list[str], column: int) -> list[str]:
        chunks: list[list[str]] = []
        pending: list[str] = []
        for line in block:
            begins = len(line) - len(line.lstrip()) == column and line.strip()
            if (begins and line.strip().startswith("#")) or not line.strip():
                pending.append(line)
            elif begins:
                chunks.append([*pending, line])
                pending = []
            else:
                chunks[-1] += [*pending, line]
                pending = []
        order.shuffle(chunks)
        made = []
        for chunk in chunks:
            key = next(n for n, line in enumerate(chunk) if line.strip() and not line.strip().startswith("#"))
            inner = chunk[key + 1 :]
            made += chunk[: key + 1]
            made += mixed(inner, column + 2) if inner and column < 4 else inner
        return made + pending

    return "\n".join(lines[:first] + mixed(lines[first:], 0)) + "\n"


def with_comments(text: str) -> str:
    """A comment above every key that names the key, and an empty line below the heading of the file."""
    lines = []
    text = text.replace("policy_version", "\npolicy_version", 1)
    for line in text.splitlines():
        key = line.strip().partition(":")[0]
        if line.strip() and not line.strip().startswith("#"):
            lines.append(f"{line[: len(line) - len(line.lstrip())]}# about {key}")
        lines.append(line)
    return "\n".join(lines) + "\n"


def order_in(model: type[BaseModel], value: dict[str, object]) -> bool:
    names = [field.alias or name for name, field in model.model_fields.items()]
    places = [names.index(key) for key in value]
    return places == sorted(places)


@pytest.mark.parametrize("ruleset", RULESETS)
def test_what_policy_init_writes_is_formatted(ruleset: str) -> None:
    text = policy_text(ruleset).encode()
    assert formatted(text, "policy.yaml") == text


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_keys_comes_back_to_one_with_the_same_digest(seed: int) -> None:
    text = with_comments(policy_text())
    other = shuffled(text, seed)
    assert other != text
    made = formatted(other.encode(), "policy.yaml")
    assert load_policy(made, "p").digest == load_policy(text.encode(), "p").digest
    assert formatted(made, "p") == made
    written = load(text.encode(), "p").value
    value = load(made, "p").value
    assert order_in(PolicyFile, value) and list(value["egress"]) == list(written["egress"])
    assert list(value["egress"]["lora.factors"]) == list(written["egress"]["lora.factors"])


@pytest.mark.parametrize("seed", range(3))
def test_every_comment_stays_with_its_key(seed: int) -> None:
    made = formatted(shuffled(with_comments(policy_text()), seed).encode(), "policy.yaml").decode().splitlines()
    keys = 0
    for above, line in itertools.pairwise(made):
        if above.strip().startswith("# about "):
            assert line.strip().startswith(above.strip().removeprefix("# about ")), (above, line)
            keys += 1
    assert keys > 100
    assert made[0].startswith("# FedSilo policy of")


def test_keys_within_one_line_are_put_in_order_too() -> None:
    text = policy_text()
    start, end = text.index("valid:\n"), text.index("\n# ---- how much")
    swapped = 'valid: {until: "2027-12-01T00:00:00Z", from: "2026-12-01T00:00:00Z"}  # half a year\n'
    text = text[:start] + swapped + text[end:]
    made = formatted(text.encode(), "policy.yaml").decode()
    assert 'valid: {from: "2026-12-01T00:00:00Z", until: "2027-12-01T00:00:00Z"}  # half a year\n' in made


def test_names_that_a_site_gives_keep_their_order() -> None:
    text = policy_text()
    start, end = text.index("      pass_at_1:\n"), text.index("      pass_at_1_greedy:\n")
    stop = end + (end - start) + len("_greedy")
    swapped = text[:start] + text[end:stop] + text[start:end] + text[stop:]
    assert formatted(swapped.encode(), "p") == swapped.encode()


def test_windows_lines_and_spaces_at_the_end_go() -> None:
    text = policy_text()
    odd = text.replace("\n", "  \r\n")
    assert formatted(odd.encode(), "p") == text.encode()


def test_what_is_no_policy_is_not_formatted() -> None:
    with pytest.raises(UsageError, match=r"p\.yaml:\d+"):
        formatted(policy_text().replace("mode: enforce", "mode: enfoce").encode(), "p.yaml")
