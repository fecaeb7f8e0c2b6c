"""`text_screens.pii_basic.custom_file` (T15, T16, T23, T34, T35): a site's own patterns, as part of its policy."""

from __future__ import annotations

import base64
import codecs
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.files.site_policy import read_effective, read_policy
from fedsilo.protocol.errors import UsageError
from policies.capacity import unused_screen_warnings
from policies.cases import judge, load_cases, mutate
from policies.compare import compare, effective, meet
from policies.custom_patterns import INSTRUCTIONS_MAX, PATTERNS_MAX, CustomPattern
from policies.examples import Site
from policies.kinds import policy_file
from policies.load import custom_in_words, custom_of, load_policy, read_patterns
from policies.model import Policy, TextScreens
from policies.screens import NO_MATERIAL, Material, ScreenFailed, screen, screen_texts, settings_of
from policies.screens.normalise import readings
from policies.screens.patterns import count_patterns
from tests.policies import own_patterns as own
from tests.policies.setting import SCHEMA, is_tightening

KEY = "text_screens.pii_basic.custom_file"


def found(text: str, *patterns: dict[str, Any]) -> dict[str, int]:
    return count_patterns((), readings(text), [CustomPattern.model_validate(each) for each in patterns])


def patterns_file(pattern: str, more: str = "") -> bytes:
    return f"patterns:\n  - name: one\n    pattern: '{pattern}'\n{more}".encode()


# ---- reading -----------------------------------------------------------------------------------------


def test_a_policy_has_the_patterns_of_the_file_that_it_names() -> None:
    custom = custom_of(own.policy().file)
    assert custom is not None and custom.file == own.NAME
    assert [pattern.name for pattern in custom.patterns] == ["study_number", "ward"]
    assert custom_in_words(own.policy().file) == f"2 own patterns of {own.NAME}"
    assert own.policy().custom_text == own.PATTERNS.encode()
    without = own.policy(text=own.policy_text().replace(own.NAME, "null"))
    assert custom_of(without.file) is None and custom_in_words(without.file) == "" and without.custom_text is None


@pytest.mark.parametrize(
    ("old", "new", "place", "words"),
    [
        ("patterns:\n", "pattern:\n", f"{own.NAME}:2", "unknown key 'pattern' (did you mean 'patterns'?)"),
        ("    pattern: '[0-9]", "    patern: '[0-9]", f"{own.NAME}:6", "unknown key"),
        ("after_words: [ward, bay]", "after_words: ward", f"{own.NAME}:7", "must be a list"),
        ("after_words: [ward, bay]", "after_words: [w]", f"{own.NAME}:7", "at least 2"),
        ("after_words: [ward, bay]", "after_words: [ward, \"st\u00e4tte\"]", f"{own.NAME}:7", "U+00E4 never stands"),
        ("name: ward", "name: Ward", f"{own.NAME}:5", "must match"),
        ("name: ward", "name: ward/7", f"{own.NAME}:5", "must match"),
        ("name: ward", "name: email", f"{own.NAME}:5", "a shipped pattern's name"),
        ("name: ward", "name: study_number", f"{own.NAME}:5", "stands twice"),
        ("'[0-9]{1,2}[a-d]'", "'[0-9]{1,2'", f"{own.NAME}:6", ""),  # RE2 reads the brace as a sign
        ("'[0-9]{1,2}[a-d]'", "'([0-9]{1,2}'", f"{own.NAME}:6", "no regular expression of RE2's: missing )"),
        ("'[0-9]{1,2}[a-d]'", "'a)(b'", f"{own.NAME}:6", "no regular expression of RE2's"),
        ("'[0-9]{1,2}[a-d]'", "'(?=7)[a-d]'", f"{own.NAME}:6", "no look-around"),
        ("'[0-9]{1,2}[a-d]'", r"'([a-d])\1'", f"{own.NAME}:6", "back-reference"),
        ("'[0-9]{1,2}[a-d]'", r"'\Q7'", f"{own.NAME}:6", "no regular expression of RE2's"),
        ("'[0-9]{1,2}[a-d]'", "'(?:[a-z]{100}){9}[0-9]{900}x{300}y{900}'", f"{own.NAME}:6", "instructions"),
        ("'[0-9]{1,2}[a-d]'", "'[0-9]*'", f"{own.NAME}:6", "matches an empty text"),
        ("'[0-9]{1,2}[a-d]'", "'x|'", f"{own.NAME}:6", "matches an empty text"),
        ("'[0-9]{1,2}[a-d]'", r"'\b'", f"{own.NAME}:6", "matches an empty text"),
        ("'[0-9]{1,2}[a-d]'", r"'\B'", f"{own.NAME}:6", "matches an empty text"),
        ("'[0-9]{1,2}[a-d]'", "'(?m)$'", f"{own.NAME}:6", "matches an empty text"),
        ("'[0-9]{1,2}[a-d]'", "''", f"{own.NAME}:6", "at least 1"),
        ("'[0-9]{1,2}[a-d]'", f"'{'x' * 257}'", f"{own.NAME}:6", "at most 256"),
        ("'[0-9]{1,2}[a-d]'", "77", f"{own.NAME}:6", "must be text"),
        ("'[0-9]{1,2}[a-d]'", "\"stra\u00dfe\"", f"{own.NAME}:6", "U+00DF never stands in a text as the screens read"),
        ("'[0-9]{1,2}[a-d]'", "\"a\\u200bb\"", f"{own.NAME}:6", "invisible characters"),
        ("patterns:\n", "patterns: &a\n", f"{own.NAME}:2", "anchors"),
        (own.PATTERNS[own.PATTERNS.index("patterns:"):], "patterns: []\n", f"{own.NAME}:2", "at least 1"),
        (own.PATTERNS, "- one\n", f"{own.NAME}:1", "a mapping"),
        (own.PATTERNS, "", f"{own.NAME}", "'patterns' is missing"),
    ],
)  # fmt: skip
def test_T35_a_mistake_in_the_file_names_its_line_and_the_good_file_loads(
    old: str, new: str, place: str, words: str
) -> None:
    assert own.PATTERNS.count(old) == 1
    text = own.PATTERNS.replace(old, new)
    if not words:
        assert custom_of(own.policy(text).file) is not None
        return
    with pytest.raises(UsageError) as refused:
        own.policy(text)
    assert refused.value.message.startswith(place) and words in refused.value.message
    own.policy()


def test_T35_more_patterns_than_may_be_are_refused_and_as_many_as_may_are_not() -> None:
    rows = [f"  - {{name: n{number}, pattern: 'x{number}'}}\n" for number in range(PATTERNS_MAX + 1)]
    assert len(read_patterns(("patterns:\n" + "".join(rows[:-1])).encode(), "p")) == PATTERNS_MAX
    with pytest.raises(UsageError, match="p:1: patterns: must have at most 64 items"):
        read_patterns(("patterns:\n" + "".join(rows)).encode(), "p")


@pytest.mark.parametrize(
    "name",
    ["../site.patterns.yaml", "a/site.patterns.yaml", "/etc/site.patterns.yaml", "policy.yaml", ".patterns.yaml", "5",
     "[site.patterns.yaml]", "{file: site.patterns.yaml, patterns: []}", '"site.patterns.yaml\\n"', '""'],
)  # fmt: skip
def test_T35_only_a_file_in_the_policys_own_folder_can_be_named(name: str) -> None:
    """And none whose name another file of a site could have: an approved proposal writes it."""
    text = own.policy_text()
    line = text[: text.index("custom_file")].count("\n") + 1
    with pytest.raises(UsageError) as refused:
        own.policy(text=text.replace(f"custom_file: {own.NAME}", f"custom_file: {name}"))
    assert refused.value.message.startswith(f"policy.yaml:{line}: {KEY}: must name a file in the policy's own folder")


def test_T34_without_its_file_a_policy_does_not_load(tmp_path: Path) -> None:
    place = tmp_path / "policy.yaml"
    place.write_text(own.policy_text())
    line = own.policy_text()[: own.policy_text().index("custom_file")].count("\n") + 1
    (tmp_path / own.NAME).mkdir()
    for said in (" it is a folder", "is not there, as far as this program can see"):
        with pytest.raises(UsageError) as refused:
            read_policy(place)
        assert refused.value.message.startswith(f"{place}:{line}: {KEY}: ") and said in refused.value.message
        assert refused.value.code == "NO_CUSTOM_FILE"
        if (tmp_path / own.NAME).exists():
            (tmp_path / own.NAME).rmdir()
    (tmp_path / own.NAME).write_text(own.PATTERNS)
    assert read_policy(place).digest == own.policy().digest
    (tmp_path / own.NAME).write_bytes(b"# " + b"x" * (1 << 20) + own.PATTERNS.encode())
    with pytest.raises(UsageError, match=" 1048576 bytes"):
        read_policy(place)
    (tmp_path / own.NAME).write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_policy(place)


def test_T34_a_charter_names_no_file_and_a_site_under_one_does(tmp_path: Path) -> None:
    """It goes from the coordinator to the sites as one text."""
    for name in ("policy.yaml", "charter.yaml"):
        (tmp_path / name).write_text(own.policy_text())
    (tmp_path / own.NAME).write_text(own.PATTERNS)
    with pytest.raises(UsageError, match=r"charter\.yaml:[0-9]+: .* as a charter is") as refused:
        read_effective(tmp_path / "policy.yaml", tmp_path / "charter.yaml")
    assert refused.value.code == "NO_CUSTOM_FILE"
    (tmp_path / "charter.yaml").write_text(own.policy_text().replace(own.NAME, "null"))
    both = read_effective(tmp_path / "policy.yaml", tmp_path / "charter.yaml")
    assert custom_of(both.file) == custom_of(own.policy().file) and both.custom_text is not None


# ---- what they find ----------------------------------------------------------------------------------


def test_T15_each_own_pattern_is_found_and_its_counterpart_is_not() -> None:
    assert found("the study HX-4711 and hx-12", own.STUDY, own.WARD) == {"study_number": 1}
    assert found("the study HX-471 and xhx-4711", own.STUDY, own.WARD) == {}
    # with a word before it, at most 24 characters away, which begins where a word begins
    for text in ("ward 7b", "in Ward no. 7B", "bay: 12c", "ward" + " " * 24 + "7b"):
        assert found(text, own.WARD) == {"ward": 1}, text
    for text in ("7b", "7b ward", "forward 7b", "ward" + " " * 25 + "7b", "ward 7e"):
        assert found(text, own.WARD) == {}, text


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("study hx-4711 it is", "study_number"),
        ("study \uff28\uff38-\uff14\uff17\uff11\uff11", "study_number"),  # full width
        ("study \u041d\u0425-4711", "study_number"),  # Cyrillic letters that look like these
        ("study H\u200bX-47\u00ad11", "study_number"),
        ("study &#72;X-4711", "study_number"),
        ("study HX-4711"[::-1], "study_number/reversed"),
        (codecs.encode("study HX-4711", "rot13"), "study_number/rot13"),
        (base64.b64encode(b"study HX-4711 it is").decode(), "study_number/base64"),
        (b"study HX-4711 it is".hex(), "study_number/hex"),
    ],
)
def test_T16_own_patterns_see_every_reading_that_the_shipped_ones_see(text: str, code: str) -> None:
    assert found(text, own.STUDY) == {code: 1}
    assert found(text, {"name": "other", "pattern": "hy-[0-9]{4}"}) == {}


def test_T16_digits_that_are_spelled_out_are_digits_for_own_patterns_too() -> None:
    badge = {"name": "badge", "pattern": "badge [0-9]{8}"}
    assert found("badge four seven one one four seven one one", badge) == {"badge/spelled": 1}
    assert found("badge four seven one one four seven one", badge) == {}


def test_T40_a_hit_is_the_patterns_name_and_never_what_matched() -> None:
    file = own.policy().file
    texts = [own.FOUND["study_number"], "the answer is 12", own.FOUND["ward"], "to jane@example.org HX-4711"]
    screened = screen(file, ("pii_basic",), texts, NO_MATERIAL)
    assert screened.hits == (
        {"pii_basic/study_number": 1}, {}, {"pii_basic/ward": 1}, {"pii_basic/email": 1, "pii_basic/study_number": 1},
    )  # fmt: skip
    assert "4711" not in str(screened) and "7b" not in str(screened)


CATASTROPHES = [r"(a+)+$", r"(a|a)*b", r"(a|aa)+z", r"(.*)*x{3}", r"([a-z]+)*[0-9]!", r"(?:a.*z)|a.*y"]


@pytest.mark.parametrize("pattern", CATASTROPHES)
def test_T23_a_pattern_that_would_backtrack_for_ever_takes_time_linear_in_the_text(pattern: str) -> None:
    """Sixteen times the text takes about sixteen times as long; with backtracking, more than a human life."""
    (made,) = read_patterns(patterns_file(pattern), "p")

    def seconds(characters: int) -> float:
        text, best = b"a" * characters, float("inf")
        for _ in range(3):
            start = time.perf_counter()
            made.is_in(text)
            best = min(best, time.perf_counter() - start)
        return best

    made.is_in(b"a" * (1 << 20))  # the automaton is made
    # quadratic would be 256; the floor keeps the clock's own steps out of the ratio
    assert seconds(1 << 20) / max(seconds(1 << 16), 1e-4) < 100


def test_T23_own_patterns_that_take_too_long_are_a_failure() -> None:
    """The clock is asked before each of them."""
    custom = custom_of(own.policy().file)
    assert custom is not None
    definitions = TextScreens.model_validate({"pii_basic": {"patterns": ["email"], "custom_file": custom}})

    def screened(looks: int) -> object:
        clock = itertools.count()
        return screen_texts(definitions, ["pii_basic"], Material(), ["x"], lambda: next(clock) >= looks)

    with pytest.raises(ScreenFailed):  # one for the text, one for the screen, one for each pattern
        screened(3)
    assert screened(4) == []


def test_T23_the_size_of_a_compiled_pattern_is_bounded_with_its_words() -> None:
    near = f"[0-9]{{{INSTRUCTIONS_MAX // 2 - 20}}}"  # RE2 repeats at most a thousand times
    assert read_patterns(patterns_file(near), "p")
    words = "    after_words: [" + ", ".join(f"w{number:02}{'x' * 29}" for number in range(16)) + "]\n"
    assert read_patterns(patterns_file("[0-9]{100}", words), "p")
    wide = "[0-9]{900}(?:xy){350}"
    assert read_patterns(patterns_file(wide), "p")
    with pytest.raises(UsageError, match=r"p:4: .*with its words it takes [0-9]+ instructions"):
        read_patterns(patterns_file(wide, words), "p")


# ---- the policy's identity, and in which direction a change goes --------------------------------------


def test_a_changed_file_is_a_changed_policy_and_a_comment_in_it_is_not() -> None:
    digest = own.policy().digest
    assert own.policy(own.PATTERNS.replace("{4}", "{5}")).digest != digest
    assert own.policy(own.MORE).digest != digest != own.policy(own.FEWER).digest
    assert own.policy(own.PATTERNS.replace("[ward, bay]", "[ward]")).digest != digest
    assert own.policy(own.PATTERNS.replace("# what is ours", "# ours")).digest == digest
    assert own.policy(own.PATTERNS.replace("[ward, bay]", "[bay, ward]")).digest == digest


def test_a_policy_without_own_patterns_has_the_digest_that_it_would_have_without_the_key() -> None:
    text = own.policy_text()
    null = own.policy(text=text.replace(own.NAME, "null"))
    absent = own.policy(text=text.replace(f", custom_file: {own.NAME}", ""))
    assert null.digest == absent.digest and settings_of(null.file, "pii_basic") == settings_of(absent.file, "pii_basic")
    assert "custom_file" not in str(null.file.model_dump(mode="json"))


def test_the_dump_of_a_policy_is_the_policy() -> None:
    """The ledger keeps it so."""
    file = own.policy().file
    assert policy_file(file.model_dump(mode="json", by_alias=True)) == file


@pytest.mark.parametrize(
    ("after", "direction"),
    [
        (own.MORE, "tighter"),
        (own.FEWER, "looser"),
        (own.PATTERNS.replace("{4}", "{5}"), "incomparable"),
        (own.PATTERNS.replace("name: ward", "name: room"), "incomparable"),
        (own.PATTERNS.replace("[ward, bay]", "[ward]"), "incomparable"),
        (own.MORE.replace("[ward, bay]", "[ward]"), "incomparable"),
    ],
)
def test_T34_more_patterns_are_tighter_and_whatever_takes_one_away_is_not(after: str, direction: str) -> None:
    (change,) = compare(own.policy().file, own.policy(after).file)
    assert (change.name, change.direction) == (f"{KEY}.patterns", direction)
    assert {"name": "study_number", "pattern": r"\bHX-[0-9]{4}\b", "after_words": []} in change.before


def test_T34_taking_the_file_away_is_looser_and_another_name_for_it_changes_nothing() -> None:
    text = own.policy_text()
    with_it, without = own.policy().file, own.policy(text=text.replace(own.NAME, "null")).file
    assert [(each.name, each.direction) for each in compare(with_it, without)] == [(KEY, "looser")]
    assert [(each.name, each.direction) for each in compare(without, with_it)] == [(KEY, "tighter")]
    renamed = load_policy(
        text.replace(own.NAME, "other.patterns.yaml").encode(), "p", own.beside(own.PATTERNS, "other.patterns.yaml")
    )
    assert {each.direction for each in compare(with_it, renamed.file)} == {"cosmetic"}
    assert settings_of(renamed.file, "pii_basic") == settings_of(with_it, "pii_basic")
    assert settings_of(without, "pii_basic") != settings_of(with_it, "pii_basic")
    reordered = own.PATTERNS[: own.PATTERNS.index("  -")] + own.PATTERNS[own.PATTERNS.index("  - name: ward") :]
    reordered += own.PATTERNS[own.PATTERNS.index("  -") : own.PATTERNS.index("  - name: ward")]
    assert compare(with_it, own.policy(reordered).file) == []
    assert own.policy(reordered).digest == own.policy().digest
    assert settings_of(own.policy(reordered).file, "pii_basic") == settings_of(with_it, "pii_basic")


def test_T34_the_meet_of_two_has_the_patterns_of_both() -> None:
    badge = "patterns:\n  - {name: badge, pattern: 'badge [0-9]{6}'}\n  - {name: ward, pattern: 'ward [0-9]+'}\n"
    one, other = own.policy().file, own.policy(badge).file
    both = meet(one, other)
    assert both == meet(other, one) and is_tightening(one, both) and is_tightening(other, both)
    custom = custom_of(both)
    assert custom is not None
    assert sorted(pattern.name for pattern in custom.patterns) == ["badge", "study_number", "ward", "ward"]
    alone = own.policy(text=own.policy_text().replace(own.NAME, "null"))
    assert custom_of(meet(alone.file, one)) == custom_of(one)
    assert effective(own.policy(), alone).digest != alone.digest
    # both patterns of the one name count
    hits = screen(both, ("pii_basic",), ["in ward 7b"], NO_MATERIAL).hits
    assert hits == ({"pii_basic/ward": 2},)


SOME = [
    own.STUDY, own.WARD, {"name": "badge", "pattern": "badge"}, {"name": "any_digit", "pattern": "[0-9]"},
    {"name": "ends", "pattern": "12$"}, {"name": "study_number", "pattern": "HX"},
]  # fmt: skip
TEXTS = st.text(alphabet="hx-4711 ward7bdgen\u0425\n", max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.sets(st.sampled_from(range(len(SOME)))), st.data())
def test_X02_adding_patterns_never_lets_a_text_pass_that_was_stopped(
    texts: list[str], fewer: set[int], data: st.DataObject
) -> None:
    more = fewer | data.draw(st.sets(st.sampled_from(range(len(SOME)))))

    def stopped(chosen: set[int]) -> list[bool]:
        file = {"file": own.NAME, "patterns": [SOME[number] for number in sorted(chosen)]}
        definitions = TextScreens.model_validate({"pii_basic": {"patterns": ["email"], "custom_file": file}})
        hit = {each.text for each in screen_texts(definitions, ["pii_basic"], Material(), texts)}
        return [number in hit for number in range(len(texts))]

    assert all(after >= before for before, after in zip(stopped(fewer), stopped(more), strict=True))


# ---- what works with policies ------------------------------------------------------------------------


def test_T15_an_own_pattern_that_is_taken_away_is_noticed_by_its_case_and_not_without_it() -> None:
    cases = """
kind: public.responses
cases:
  - {name: none, expect: allow}
  - {name: study, text: the study HX-4711, expect: deny, reasons: [SCREEN_HIT]}
"""
    site = Site(own.policy(), SCHEMA)
    outcomes = list(judge(load_cases(cases.encode(), "c.yaml"), site))
    assert [outcome.name for outcome in outcomes if not outcome.passed] == []
    tried = [(each.after, each.noticed_by) for each in mutate(outcomes, site) if each.name == f"{KEY}.patterns"]
    left = {each[0]["name"]: noticed_by for each, noticed_by in tried}
    assert left == {"ward": "study", "study_number": ""}  # nobody wrote a case for the ward


def test_a_screen_that_no_kind_names_is_said_to_never_run_with_own_patterns_or_not() -> None:
    text = own.policy_text(("charset",))
    policy: Policy = load_policy(text.encode(), "policy.yaml", own.beside(own.PATTERNS))
    assert sum("text_screens.pii_basic never runs" in each for each in unused_screen_warnings(policy)) == 1
    assert not any("pii_basic" in each for each in unused_screen_warnings(own.policy()))
