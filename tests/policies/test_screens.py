"""Text screens (T14 to T17, T21, T40): each finds what is planted, lets its counterpart pass, and says nothing more."""

from __future__ import annotations

import base64
import codecs
import hashlib
import random
import struct
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, get_args

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.protocol.errors import UsageError
from policies.model import Alphabet, Decoder, PatternName, ScreenName, TextScreens
from policies.screens import Hit, Material, OverlapIndex, ScreenFailed, screen_texts
from policies.screens.canary import count_canaries
from policies.screens.charset import count_characters
from policies.screens.normalise import canonical, fold, readings, squash, words
from policies.screens.overlap import build_index
from policies.screens.patterns import count_patterns
from tests.policies.evasion import EVERYTHING, material

KEY = bytes(range(32))
NAMES: tuple[ScreenName, ...] = get_args(ScreenName)
DECODERS: tuple[Decoder, ...] = get_args(Decoder)
PATTERNS: tuple[PatternName, ...] = get_args(PatternName)
HEADER = struct.Struct("<8sHHQQd")  # magic, n, width, records, n-grams, false-positive rate
NOTE = "crushing chest pain and a history of two earlier infarctions"


def index_of(texts: Iterable[str], *, n: int = 8, rate: float = 1e-9, **more: Any) -> OverlapIndex:
    return OverlapIndex.from_bytes(build_index(texts, key=KEY, n=n, false_positive_rate=rate, **more), key=KEY)


def overlap_hits(index: OverlapIndex, *texts: str, most: int = 0) -> list[Hit]:
    block = {"unit": "word", "n": index.n, "max_matching_ngrams": most, "false_positive_rate": 1e-9}
    return screen_texts(TextScreens.model_validate({"overlap": block}), ["overlap"], Material(index), texts)


# ---- the seam ----------------------------------------------------------------------------------------


def test_T15_every_screen_finds_what_is_planted_for_it_and_nothing_in_a_plain_answer() -> None:
    planted = {
        "pii_basic": "write to jane.doe@harbour-clinic.org",
        "overlap": "so " + NOTE,
        "canary": "so Canary-7391 Zebulon Quartermaine",
        "charset": "so\u200b what",
    }
    plain = "The answer is B: the left lung is larger than 2.5 litres."
    texts = [plain, *planted.values()]
    for place, screen in enumerate(planted, start=1):
        found = screen_texts(EVERYTHING, [screen], material(), texts)  # type: ignore[list-item]
        assert {hit.text for hit in found} == {place} and {hit.screen for hit in found} == {screen}


def test_T18_all_screens_look_at_all_texts_whatever_was_found_before() -> None:
    bad = "jane.doe@harbour-clinic.org Canary-7391 Zebulon Quartermaine\u200b " + NOTE
    found = screen_texts(EVERYTHING, NAMES, material(), [bad, "fine", bad])
    assert Counter((hit.text, hit.screen) for hit in found) == Counter(
        (text, name) for text in (0, 2) for name in NAMES
    )


def test_T40_a_hit_holds_a_code_of_a_closed_list_and_never_what_matched() -> None:
    secret = "zq" * 5
    bad = f"{secret}.x@harbour-clinic.org Canary-7391 Zebulon Quartermaine\u200b {NOTE} DOB 4 July 1961"
    found = screen_texts(EVERYTHING, NAMES, material(), [bad, bad[::-1]])
    codes = {hit.code.partition("/")[0] for hit in found}
    assert codes <= {*PATTERNS, "ngram", "canary", "alphabet", "run"} and len(codes) >= 5
    assert {hit.code.partition("/")[2] for hit in found} <= {"", "split", "spelled", *DECODERS}
    assert not any(part in str(found).lower() for part in (secret, "zebulon", "harbour", "crushing", "1961"))


@pytest.mark.parametrize("answers_left", range(8))
def test_screens_that_take_too_long_have_found_nothing(answers_left: int) -> None:
    left = iter([False] * answers_left + [True] * 8)
    texts = ["one", "two"]  # asked before each of two texts and of four screens
    if answers_left >= len(texts) + len(NAMES):
        assert screen_texts(EVERYTHING, NAMES, material(), texts, lambda: next(left)) == []
    else:
        with pytest.raises(ScreenFailed, match="longer than they may"):
            screen_texts(EVERYTHING, NAMES, material(), texts, lambda: next(left))


@pytest.mark.parametrize(
    ("name", "definitions", "given", "why"),
    [
        ("overlap", EVERYTHING, Material(canaries=("x" * 20,)), "no index"),
        ("canary", EVERYTHING, Material(material().overlap), "no canaries"),
        ("canary", EVERYTHING, Material(canaries=("short1",)), "6 letters and digits; 2 edits need 12"),
        ("overlap", EVERYTHING, Material(index_of([NOTE], n=5)), "8 words and its index has 5"),
        ("charset", TextScreens(), Material(), "does not define"),
    ],
)
def test_a_screen_that_cannot_run_says_which_and_why(
    name: ScreenName, definitions: TextScreens, given: Material, why: str
) -> None:
    with pytest.raises(ScreenFailed, match=why) as caught:
        screen_texts(definitions, [name], given, ["a text"])
    assert name in caught.value.message and "short1" not in caught.value.message
    assert screen_texts(EVERYTHING, [name], material(), ["a text"]) == []


# ---- one spelling for many ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("PaTiEnT", "patient"),
        ("\uff30\uff41\uff54ient", "patient"),
        ("p\u0430ti\u0435nt", "patient"),
        ("pa\u00adti\u200bent\u2060", "patient"),
        ("pati\u00e9nt pati\u0301ent", "patient patient"),
        ("&#112;ati&#x65;nt", "patient"),
        ("%70atient", "patient"),
        ("\\u0070ati\\x65nt", "patient"),
        ("\u0661\u0662\u0663", "123"),
        ("pa\x07tient\u202e", "patient"),
        ("pa\x07ti\x7fent", "patient"),
        ("a \u2014 \u201cb\u201d\u00a0c", "a - 'b' c"),
    ],
)
def test_T16_one_spelling_for_many(written: str, read: str) -> None:
    assert fold(written) == read
    assert fold(read) == read


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("p a t i e n t", ["patient"]),
        ("p.a.t.i.e.n.t p-a-t-i-e-n-t", ["patient", "patient"]),
        ("pa-ti-ent end.Start", ["patient", "endstart"]),
        ("p4t13n7 | p@7ient", ["patient", "patient"]),
        ("and/or a_b", ["and", "or", "a", "b"]),
        ("\u00e9t\u00e9 \u6f22\u5b57 \u00b2", ["ete", "\u6f22\u5b57", "2"]),
    ],
)
def test_T16_words_as_they_are_compared(written: str, read: list[str]) -> None:
    made = [word for word in map(canonical, words(fold(written))) if word]
    assert made == [canonical(word) for word in read]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_the_fast_way_through_bytes_reads_as_the_slow_way_through_unicode(text: str) -> None:
    """Text of other characters goes another way; a character that nothing keeps must make no difference."""
    other = "\u2603"
    for read in (lambda folded: "".join(squash(folded).split()), lambda folded: [w for w in words(folded) if w]):
        assert read(fold(text)) == read(fold(text) + f" {other}")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_at_all_is_screened(text: str) -> None:
    assert all(hit.count >= 1 for hit in screen_texts(EVERYTHING, NAMES, material(), [text]))


# Units of which an adversary makes a long text: of each pattern the beginning, of each decoder the alphabet.
UNITS = (
    *("a", "1 ", "0-", "ab12 ", "gb12 ", "a@", "a.a@a.", "a at a dot ", "(at) a dot ", "12 elm street ", "1 aa aa "),
    *("patient no ", "mrn 1 ", "born on the ", "dob 1/", "%41", "&#65;", "\\u0041", "QUFB", "QUFB\n", "4a ", "4a"),
    *("one ", "double ", "+1 ", "(1) ", "- ", "_", "\u200b", "\u00e9", "\u6f22", "a\u0301", "a b ", "a.", "1.", "x|"),
    *(" street", "12 flat ", "nhs ", "tel ", "call me on ", "&", "%", "\\"),
)


@pytest.mark.slow
def test_T23_no_text_takes_more_than_time_in_its_length() -> None:
    """Eight times as long may take sixteen times as long; what backtracks in squares takes sixty-four times.

    Times are of this process alone. Short ones are not judged: a tenth of a second for 16,000 characters is as fast as
    any text.
    """

    def seconds(text: str) -> float:
        began = time.process_time()
        screen_texts(EVERYTHING, NAMES, Material(material().overlap, ("aaaaaaaaaaaa", "121212121212")), [text])
        return time.process_time() - began

    slow = {}
    for unit in UNITS:
        long = seconds((unit * 16_000)[:16_000])
        if long > 0.1 and long > 16 * seconds((unit * 2_000)[:2_000]):
            slow[unit] = long
    assert slow == {}


# ---- pii_basic ---------------------------------------------------------------------------------------

PERSONAL: list[tuple[PatternName, str, str]] = [
    ("email", "jane.doe@example.org", "jane@example"),
    ("email", "jane (at) example [dot] org", "look (at) example two"),
    ("email", "jane dot doe at example dot org", "look at the dot product"),
    ("phone", "+44 20 7946 0958", "+44 20 79"),
    ("phone", "020 7946 0958", "0.2079460958"),
    ("phone", "(212) 555-0123", "(212) 555"),
    ("phone", "call me on 5550123", "5550123"),
    ("ssn_us", "536-90-4399", "666-90-4399"),
    ("ssn_us", "SSN: 536904399", "536904399"),
    ("nhs_number", "943 476 5919", "943 476 5918"),
    ("iban", "GB82 WEST 1234 5698 7654 32", "GB82 WEST 1234 5698 7654 33"),
    ("iban", "DE89370400440532013000 please", "DE89370400440532013001 please"),
    ("iban", "FR76 3000 6000 0112 3456 7890 189", "FR76 3000 6000 0112 3456 7890 188"),
    ("iban", "NO93 8601 1117 947", "NO93 8601 1117 948"),
    ("mrn_like", "MRN: 00482913", "urn: 00482913"),
    ("mrn_like", "hospital no. H482913", "hospital beds 482913"),
    ("date_of_birth", "DOB 04/07/1961", "on 04/07/1961"),
    ("date_of_birth", "born on 4 July 1961", "sworn on 4 July 1961"),
    ("street_address", "at 12 Elm Street", "12 miles of the street"),
    ("street_address", "flat 3, 221b Baker St.", "3 of the saints"),
]


@pytest.mark.parametrize(("name", "text", "counterpart"), PERSONAL)
def test_T15_personal_data_is_found_and_what_only_looks_like_it_is_not(
    name: PatternName, text: str, counterpart: str
) -> None:
    assert count_patterns([name], readings(f"Well, {text} it is.")) == {name: 1}
    assert count_patterns([name], readings(f"Well, {counterpart} it is.")) == {}
    others = [pattern for pattern in PATTERNS if pattern != name]
    assert name not in count_patterns(others, readings(text))  # a pattern that is not asked for is not looked for


def test_T15_check_digits_agree_with_the_standards_worked_by_hand() -> None:
    """NHS: weights 10 to 2, modulus 11. IBAN: letters as numbers from ten, first four last, remainder 1 of 97."""
    drawn = random.Random(5)
    for _ in range(300):
        digits = [drawn.randrange(10) for _ in range(10)]
        check = (11 - sum(weight * digit for weight, digit in zip(range(10, 1, -1), digits, strict=False)) % 11) % 11
        written = "".join(map(str, digits))
        text = f"{written[:3]} {written[3:6]} {written[6:]}"
        assert bool(count_patterns(["nhs_number"], readings(text))) == (check == digits[9] and check != 10)
    for _ in range(100):
        account = "".join(drawn.choices("0123456789", k=18))
        number = int(account + "131400")  # DE with check digits 00, at the end
        right = 98 - number % 97
        for check in {right, (right + drawn.randrange(1, 90)) % 97 + 2}:
            found = count_patterns(["iban"], readings(f"it is DE{check:02d}{account} there"))
            # the German account number carries no check of its own
            assert bool(found) == (check % 97 == right % 97)


@pytest.mark.parametrize("before", ["ab12 ", "1 ", "x", "12 34 ", "gb99 "])
def test_T16_a_decoy_in_front_does_not_hide_a_number(before: str) -> None:
    for name, number in (("iban", "GB82 WEST 1234 5698 7654 32"), ("ssn_us", "536-90-4399"), ("email", "j@x.org")):
        spaced = before if name == "email" else f"{before.strip()} "
        assert count_patterns([name], readings(spaced + number)) == {name: 1}  # type: ignore[list-item]


# ---- overlap -----------------------------------------------------------------------------------------


def bags(text: str, n: int) -> list[frozenset[tuple[str, int]]]:
    """Every n-gram as a multiset of its words, the slow way."""
    spelled = text.split()
    return [frozenset(Counter(spelled[place : place + n]).items()) for place in range(len(spelled) - n + 1)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("xyz ", min_size=1, max_size=40), max_size=6),
    st.lists(st.text("xyz ", min_size=1, max_size=40), max_size=2),
    st.text("xyz ", max_size=60),
    st.integers(3, 5),
)
def test_T15_the_index_counts_as_a_set_of_bags_of_words_does(
    records: list[str], background: list[str], text: str, n: int
) -> None:
    def spread(texts: list[str]) -> list[str]:
        # each letter as a word of three, since letters that stand alone are joined
        return [" ".join(3 * letter for letter in each if letter != " ") for each in texts]

    records, background, [text] = spread(records), spread(background), spread([text])
    known = {bag for record in records for bag in bags(record, n)} - {
        bag for each in background for bag in bags(each, n)
    }
    index = index_of(records, n=n, background=background)
    assert index.records == len(records) and index.grams == len(known)
    counted = index.matching([text.split()], [str])[0]
    assert int(counted.within[0]) == sum(bag in known for bag in bags(text, n))


def test_T15_a_run_of_n_words_is_found_and_one_of_fewer_is_not() -> None:
    index = index_of([f"yesterday {NOTE} again"])
    eight = " ".join(NOTE.split()[:8])
    assert overlap_hits(index, f"So: {eight.upper()}!") == [Hit(0, "overlap", "ngram", 1)]
    assert overlap_hits(index, f"So: {' '.join(NOTE.split()[:7])} once") == []
    assert overlap_hits(index, NOTE) == [Hit(0, "overlap", "ngram", 3)]
    assert overlap_hits(index, NOTE, most=3) == []


def test_T14_a_passage_of_another_request_is_found_in_whichever_answer_it_turns_up() -> None:
    index = index_of([NOTE])
    half = NOTE.split()
    assert {hit.text for hit in overlap_hits(index, "plain", NOTE, "plain")} == {1}
    parts = overlap_hits(index, "plain", " ".join(half[:5]), " ".join(half[5:]), "plain")
    assert {(hit.text, hit.code) for hit in parts} == {(1, "ngram/split"), (2, "ngram/split")}
    assert overlap_hits(index, " ".join(half[:5]), "plain", " ".join(half[5:])) == []


def test_T15_no_ngram_reaches_over_two_records() -> None:
    index = index_of([" ".join(NOTE.split()[:5]), " ".join(NOTE.split()[5:])], n=8)
    assert index.grams == 0
    assert overlap_hits(index, NOTE) == []


def test_public_text_is_subtracted() -> None:
    public = "which of the following is the most likely diagnosis"
    assert overlap_hits(index_of([public, NOTE]), public) != []
    index = index_of([public, NOTE], background=[public])
    assert overlap_hits(index, public) == [] and overlap_hits(index, NOTE) != []


def test_the_false_positive_rate_is_at_most_the_one_asked_for() -> None:
    """A coarse one, so that it shows: 600 n-grams in two bytes are 0.009 of all, 1,000 in three 0.00006."""
    drawn = random.Random(7)

    def text(letters: str, length: int) -> str:
        return " ".join("".join(drawn.choices(letters, k=7)) for _ in range(length))

    index = index_of([text("abcdefgh", 607)], rate=0.01)
    assert 595 <= index.grams <= 600  # two may share a fingerprint of two bytes
    assert index.chance == index.grams / 2**16 <= 0.01
    asked = 60_000
    matched = int(index.matching([text("nopqrstu", asked + 7).split()], [str])[0].within[0])
    expected = asked * index.chance
    assert abs(matched - expected) < 5 * expected**0.5  # five standard deviations of a Poisson count
    assert index_of([text("abcdefgh", 1007)], rate=0.01).chance < 0.0001  # the next width


def test_T40_a_fingerprint_is_two_keyed_functions_of_the_words() -> None:
    """By hand for one n-gram, each step with the key that is its own; without either key the file would differ."""

    def derived(purpose: bytes, size: int) -> bytes:
        return hashlib.blake2b(key=KEY, person=purpose, digest_size=size).digest()

    spelled = [canonical(word) for word in NOTE.split()[:8]]
    total = 0
    for word in spelled:
        digest = hashlib.blake2b(word.encode(), key=derived(b"words", 64), digest_size=8).digest()
        total += int.from_bytes(digest, "little") | 1
    cipher = Cipher(algorithms.AES256(derived(b"fingerprints", 32)), modes.ECB()).encryptor()  # noqa: S305
    block = cipher.update((total % 2**64).to_bytes(8, "little") + bytes(8))
    data = build_index([" ".join(NOTE.split()[:8])], key=KEY, n=8, false_positive_rate=1e-9)
    _, _, width, _, grams, _ = HEADER.unpack_from(data)
    assert grams == 1 and data[HEADER.size : -32] == block[:8][-width:]  # little endian: its leading bytes


def test_T40_without_the_key_the_file_answers_no_guess() -> None:
    """A dictionary attack: whoever has the file tries the very record, by every hash that needs no key."""
    data = build_index([NOTE], key=KEY, n=8, false_positive_rate=1e-9)
    other = build_index([NOTE], key=KEY[::-1], n=8, false_positive_rate=1e-9)
    assert data == build_index([NOTE], key=KEY, n=8, false_positive_rate=1e-9)  # with the key it does
    _, _, width, _, grams, _ = HEADER.unpack_from(data)
    pieces = {data[place : place + width] for place in range(HEADER.size, len(data) - 32, width)}
    assert len(pieces) == grams == len(NOTE.split()) - 7
    assert not any(piece in other for piece in pieces)
    spelled = NOTE.split()
    guesses = [" ".join(spelled[place : place + 8]).encode() for place in range(len(spelled) - 7)]
    for name in ("sha256", "sha1", "md5", "blake2b", "blake2s"):
        for guess in guesses:
            digest = hashlib.new(name, guess).digest()
            assert not any(piece in digest or piece[::-1] in digest for piece in pieces)
    assert not any(word.encode() in data for word in spelled if len(word) > 3)
    with pytest.raises(UsageError, match="another key"):
        OverlapIndex.from_bytes(data, key=KEY[::-1])


GOOD = build_index([NOTE, "another record of nine words that is not short"], key=KEY, n=8, false_positive_rate=1e-9)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_X04_one_changed_byte_is_refused(place: int, change: int) -> None:
    changed = bytearray(GOOD)
    changed[place] ^= change
    with pytest.raises(UsageError) as caught:
        OverlapIndex.from_bytes(bytes(changed), key=KEY)
    assert caught.value.code == "SCREEN_INDEX"
    assert OverlapIndex.from_bytes(GOOD, key=KEY).records == 2


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.builds(lambda length: GOOD[:length], st.integers(0, len(GOOD) - 1))))
def test_X04_bytes_that_are_no_index_are_refused(data: bytes) -> None:
    with pytest.raises(UsageError):
        OverlapIndex.from_bytes(data, key=KEY)


def test_T23_a_header_that_promises_more_than_there_is_allocates_nothing() -> None:
    """Even one whose digest is right, as a trainer that has the key can make it."""
    magic, n, width, records, grams, rate = HEADER.unpack_from(GOOD)
    secret = hashlib.blake2b(key=KEY, person=b"file", digest_size=32).digest()

    def made(*values: Any, body: bytes) -> bytes:
        start = HEADER.pack(magic, *values) + body
        return start + hashlib.blake2b(start, key=secret, digest_size=32).digest()

    body = GOOD[HEADER.size : -32]
    assert OverlapIndex.from_bytes(made(n, width, records, grams, rate, body=body), key=KEY).grams == grams
    for values, broken in (
        ((n, width, records, 2**40, rate), body),
        ((n, width, records, grams, 2.0), body),
        ((n, width, records, grams, float("nan")), body),
        ((n, 0, records, grams, rate), body),
        ((n, 9, records, grams, rate), body),
        ((n, 8, records, grams, rate), b"".join(place.to_bytes(8, "little") for place in range(grams))),
        ((2, width, records, grams, rate), body),
        ((n, width, records, grams, rate), body[::-1]),
        ((n, width, records, grams, rate), body + b"\0"),
    ):
        with pytest.raises(UsageError):
            OverlapIndex.from_bytes(made(*values, body=broken), key=KEY)


@pytest.mark.parametrize(
    "changes", [{"key": b"short"}, {"n": 2}, {"n": 65}, {"false_positive_rate": 0.0}, {"false_positive_rate": 0.5}]
)
def test_an_index_out_of_range_is_not_built(changes: dict[str, Any]) -> None:
    good = {"key": KEY, "n": 8, "false_positive_rate": 1e-9}
    assert build_index([NOTE], **good)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        build_index([NOTE], **{**good, **changes})


def test_an_index_of_nothing_matches_nothing() -> None:
    index = index_of([])
    assert (index.records, index.grams, index.chance) == (0, 0, 0)
    assert overlap_hits(index, NOTE, "") == []


# ---- canary ------------------------------------------------------------------------------------------


def distance(pattern: str, text: str) -> int:
    """Least edits from the pattern to some passage of the text, by the table that every textbook has."""
    above = [0] * (len(text) + 1)
    for row, letter in enumerate(pattern, start=1):
        here = [row]
        for column, other in enumerate(text, start=1):
            here.append(min(above[column - 1] + (letter != other), above[column] + 1, here[-1] + 1))
        above = here
    return min(above)


@settings(max_examples=300, deadline=None)
@given(st.text("nkm", min_size=8, max_size=18), st.text("nkm", max_size=40), st.integers(0, 3), st.data())
def test_T16_a_canary_is_found_within_its_edits_and_not_beyond(
    canary: str, around: str, edits: int, data: st.DataObject
) -> None:
    """Three letters, so that pieces recur and near misses are many."""
    if len(canary) < 4 * (edits + 1):
        with pytest.raises(UsageError, match=f"need {4 * (edits + 1)}"):
            count_canaries((canary,), edits, (), [readings("x")])
        return
    text = list(around + canary)
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + 1] = data.draw(st.sampled_from((["n"], ["k", "m"], [])))
        text = text or ["m"]
    written = "".join(text)
    found = count_canaries((canary,), edits, (), [readings(written)])
    assert bool(found[0]) == (distance(canary, written) <= edits)


@pytest.mark.parametrize("decoder", DECODERS)
def test_T16_each_decoder_is_used_when_the_policy_names_it(decoder: Decoder) -> None:
    canary = "otter-lantern-52-violet-0816"
    disguised = {
        "base64": base64.b64encode(canary.encode()).decode(),
        "hex": canary.encode().hex(),
        "reversed": canary[::-1],
        "rot13": codecs.encode(canary, "rot13"),
    }[decoder]
    text = readings(f"so {disguised} .")
    assert count_canaries((canary,), 2, (decoder,), [text]) == [{f"canary/{decoder}": 1}]
    assert count_canaries((canary,), 2, tuple(set(DECODERS) - {decoder}), [text]) == [{}]


def test_T15_several_canaries_in_several_texts_are_counted_apart() -> None:
    canaries = ("otter-lantern-52-violet", "copper-meadow-77-saddle")
    texts = [readings(text) for text in (canaries[0], "none", f"{canaries[1]} {canaries[0]} {canaries[0]}")]
    assert count_canaries(canaries, 1, (), texts) == [{"canary": 1}, {}, {"canary": 2}]


# ---- charset -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "alphabet"),
    [
        ("na\u00efve \u0153uvre e\u0301 \ufb01n", "latin"),
        ("\u03b1\u03b2 \u00b5", "greek"),
        ("\u0430\u0431", "cyrillic"),
        ("\u6f22\u5b57", "han"),
        ("0123456789 \u00b2 \u00bd", "digits"),
        ("(a) \u201cb\u201d \u2014 c; 5 \u20ac, x_1 \u00a0", "punctuation"),
        ("\u2264 \u00b1 \u2211 \U0001d465 37 \u00b0", "math"),
        ("\U0001f642 \u2713", "symbols"),
    ],
)
def test_T17_a_character_is_allowed_by_its_alphabet_alone(text: str, alphabet: Alphabet) -> None:
    rest: tuple[Alphabet, ...] = ("latin", "digits", "punctuation")
    assert count_characters({*rest, alphabet}, 40, text) == {}
    others = [each for each in get_args(Alphabet) if each != alphabet]
    assert count_characters(others, 40, text).get("alphabet", 0) >= 1


@pytest.mark.parametrize("hidden", ["\u200b", "\u202e", "\x07", "\x1b", "\ue000", "\U000e0041", "\ufeff", "\u2028"])
def test_T16_T21_what_does_not_show_is_allowed_by_no_alphabet(hidden: str) -> None:
    assert count_characters(get_args(Alphabet), 40, f"plain {hidden}{hidden} words") == {"alphabet": 2}
    assert count_characters(get_args(Alphabet), 40, "plain \t\r\n words") == {}


@given(st.text("a-. _1", max_size=30), st.integers(0, 6))
def test_a_run_of_signs_is_too_long_when_it_is_longer_than_allowed(text: str, most: int) -> None:
    runs, length = 0, 0
    for character in f"{text}a":
        if character.isalnum():
            runs += length > most
            length = 0
        else:
            length += 1
    assert count_characters(("latin", "digits", "punctuation"), most, text) == ({"run": runs} if runs else {})
