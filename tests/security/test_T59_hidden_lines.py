"""A file that is the authority has no line that people and `grep` do not see (threat T59)."""

from __future__ import annotations

import pytest

from certs.roles import load_roles
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.strict_yaml import load
from policies.load import load_policy
from tests.policies.setting import policy_text

HIDDEN = ("\u0085", "\u2028", "\u2029", "\r")


@pytest.mark.parametrize("character", HIDDEN, ids=ascii)
def test_T59_a_key_behind_a_break_that_only_yaml_sees_is_refused(character: str) -> None:
    text = f"first: 1\n# a comment{character}second: 2\n"
    with pytest.raises(UsageError) as refused:
        load(text.encode(), "file.yaml")
    assert refused.value.message.startswith("file.yaml:2: ") and f"U+{ord(character):04X}" in refused.value.message
    visible = load(f"first: 1\r\n# a comment{ascii(character)[1:-1]}second: 2\r\n".encode(), "file.yaml")
    assert visible.value == {"first": 1}


@pytest.mark.parametrize("character", HIDDEN, ids=ascii)
def test_T59_an_escape_in_a_quoted_text_is_seen_and_passes(character: str) -> None:
    assert load(f'name: "a\\u{ord(character):04x}b"\n'.encode(), "file.yaml").value == {"name": f"a{character}b"}


@pytest.mark.parametrize("character", HIDDEN, ids=ascii)
def test_T59_policies_and_roles_are_read_so(character: str) -> None:
    policy = policy_text()
    load_policy(f"{policy}# seen by two people\n".encode(), "policy.yaml")
    with pytest.raises(UsageError):
        load_policy(f"{policy}# seen by two people{character}".encode(), "policy.yaml")
    with pytest.raises(UsageError) as refused:
        load_roles(f"# seen{character}".encode(), "roles.yaml")
    assert f"U+{ord(character):04X}" in refused.value.message
