"""Screen for text that repeats the private corpus: a keyed set of its n-grams (threats T14, T15, T16). Pure.

A word's value is a keyed BLAKE2b digest, an n-gram's the sum of its words' values modulo 2**64, and its fingerprint
AES-256 of that sum under a second key derived from the same one, cut to the width that gives the false-positive rate.
The sum of two different bags of words is the same for 2**-60 of the keys at most, and AES of sums that differ is a
pseudo-random function, so who has the file and not the key can tell how many n-grams it holds and nothing else: a
dictionary attack needs the key (T40). A sum knows no order: passages whose words or letters are reversed, or whose
neighbours change places, match too.

Layout, little endian: magic, n, width in bytes, records, n-grams, false-positive rate; the fingerprints, ascending; a
keyed digest of all before it. Nothing is allocated before the length is what the header says.

What this does not stop (N3): a passage of fewer than n words; a word of its own every n words; another grammatical
form, a synonym, a paraphrase, a translation; words run together; records shorter than n words, which have no n-gram;
an evader who knows the key. What the background holds is public and let through.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedsilo.protocol.errors import UsageError
from policies.model import FALSE_POSITIVE_RATE_MAX, GRAM_WORDS_MAX, GRAM_WORDS_MIN
from policies.screens.normalise import canonical, fold, words

KEY_BYTES = 32
GRAMS_MAX = 2**28  # 2 GiB of fingerprints at eight bytes
_MAGIC = b"FSGRAMS1"
_HEADER = struct.Struct("<8sHHQQd")
_DIGEST_BYTES = 32
_WIDTH_MAX = 8  # a fingerprint is a number of 64 bits
_RECORDS_AT_ONCE = 2000  # keeps words as Python objects few while numpy's calls stay large
_VOCABULARY_MAX = 2**20  # different words kept while building: a corpus of identifiers has no end of them

Values = NDArray[np.uint64]


class _Keys:
    """The two keys of one index, and what they make of words and sums."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise UsageError(f"the key of an overlap index has {KEY_BYTES} bytes, not {len(key)}", code="SCREEN_INDEX")
        self._words = hashlib.blake2b(key=key, person=b"words").digest()
        block = hashlib.blake2b(key=key, person=b"fingerprints", digest_size=32).digest()
        # One block for one value is the pseudo-random function wanted here; nothing is kept secret by a mode.
        self._blocks = Cipher(algorithms.AES(block), modes.ECB())  # noqa: S305
        self._file = hashlib.blake2b(key=key, person=b"file", digest_size=32).digest()

    def word(self, word: str) -> int:
        """0 for a word that canonical form leaves nothing of: such a word is in no n-gram."""
        made = canonical(word)
        if not made:
            return 0
        return int.from_bytes(hashlib.blake2b(made.encode(), key=self._words, digest_size=8).digest(), "little") | 1

    def fingerprints(self, sums: Values) -> Values:
        blocks = np.zeros((len(sums), 2), dtype="<u8")
        blocks[:, 0] = sums
        encryptor = self._blocks.encryptor()
        made = encryptor.update(blocks.tobytes()) + encryptor.finalize()
        return np.frombuffer(made, dtype="<u8")[::2].copy()

    def digest(self, data: memoryview) -> bytes:
        return hashlib.blake2b(data, key=self._file, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True)
class _Grams:
    """All n-grams of some texts: their sums, and the index of the text in which each begins and ends."""

    sums: Values
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


def _grams(values: Values, lengths: Sequence[int], n: int) -> _Grams:
    """values: (words,) of all texts one after another; lengths: words of each text."""
    of_text = np.repeat(np.arange(len(lengths)), lengths)
    is_gram = values != 0
    values, of_text = values[is_gram], of_text[is_gram]
    if len(values) < n:
        nothing = np.zeros(0, np.int64)
        return _Grams(np.zeros(0, np.uint64), nothing, nothing)
    total = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, out=total[1:])  # wraps, as it should: sums are modulo 2**64
    return _Grams(total[n:] - total[:-n], of_text[: len(values) - n + 1], of_text[n - 1 :])


def build_index(
    records: Iterable[str], *, key: bytes, n: int, false_positive_rate: float, background: Iterable[str] = ()
) -> bytes:
    """The index of a corpus as bytes, which OverlapIndex.from_bytes reads.

    Args:
        records: the private texts, read once.
        key: 32 secret bytes; who has them and the index can test guesses at the corpus.
        n: words of an n-gram, in their canonical form.
        false_positive_rate: largest share of n-grams that are not in the corpus and yet match.
        background: public texts, whose n-grams are left out.

    Raises:
        UsageError: a size is out of range, or the corpus has more than GRAMS_MAX different n-grams.
    """
    _check_sizes(n, false_positive_rate)
    keys = _Keys(key)
    count = 0

    def counted() -> Iterator[str]:
        nonlocal count
        for record in records:
            count += 1
            yield record

    prints = _all_fingerprints(counted(), keys, n)
    public = _all_fingerprints(background, keys, n)
    if len(public):
        prints = prints[~np.isin(prints, public, assume_unique=True)]
    if len(prints) > GRAMS_MAX:
        raise UsageError(f"the corpus has {len(prints)} n-grams, more than {GRAMS_MAX}", code="SCREEN_INDEX")
    width = _width(len(prints), false_positive_rate)
    cut = _distinct(prints >> np.uint64(8 * (_WIDTH_MAX - width)))
    body = np.ascontiguousarray(cut.astype("<u8").view(np.uint8).reshape(-1, _WIDTH_MAX)[:, :width]).tobytes()
    made = _HEADER.pack(_MAGIC, n, width, count, len(cut), false_positive_rate) + body
    return made + keys.digest(memoryview(made))


def _check_sizes(n: int, rate: float) -> None:
    if not GRAM_WORDS_MIN <= n <= GRAM_WORDS_MAX:
        raise UsageError(
            f"an overlap index has n-grams of {GRAM_WORDS_MIN} to {GRAM_WORDS_MAX} words, not {n}", code="SCREEN_INDEX"
        )
    if not 0 < rate <= FALSE_POSITIVE_RATE_MAX:
        raise UsageError(
            f"false_positive_rate is above 0 and at most {FALSE_POSITIVE_RATE_MAX}, not {rate:g}", code="SCREEN_INDEX"
        )


def _width(grams: int, rate: float) -> int:
    """Bytes of a fingerprint so that one that is not in the set equals one of it with at most this probability."""
    return next((width for width in range(1, _WIDTH_MAX) if grams / 2 ** (8 * width) <= rate), _WIDTH_MAX)


def _all_fingerprints(texts: Iterable[str], keys: _Keys, n: int) -> Values:
    """Return the fingerprint of every n-gram that lies within one text; sorted, each once, in full width."""
    numbers: dict[str, int] = {}
    values = np.zeros(0, np.uint64)
    parts: list[Values] = []
    rest = iter(texts)
    while batch := list(islice(rest, _RECORDS_AT_ONCE)):
        if len(numbers) > _VOCABULARY_MAX:
            numbers, values = {}, values[:0]
        texts_words = [words(fold(text)) for text in batch]
        places = _numbered(texts_words, numbers)
        fresh = list(islice(numbers, len(values), None))
        values = np.concatenate([values, np.fromiter(map(keys.word, fresh), np.uint64, len(fresh))])
        grams = _grams(values[places], [len(text) for text in texts_words], n)
        parts.append(_distinct(keys.fingerprints(grams.sums[grams.begins == grams.ends])))
    return _distinct(np.concatenate(parts)) if parts else np.zeros(0, np.uint64)


def _distinct(values: Values) -> Values:
    """Ascending, each once. numpy's unique hashes, which took eight tenths of a build."""
    values.sort()
    first = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values[first]


def _numbered(texts: Sequence[Sequence[str]], numbers: dict[str, int]) -> NDArray[np.int64]:
    """Every word of all texts as a number; a word that `numbers` does not have yet gets the next one."""
    for text in texts:
        for word in set(text).difference(numbers):
            numbers[word] = len(numbers)
    every = map(numbers.__getitem__, chain.from_iterable(texts))
    return np.fromiter(every, np.int64, sum(map(len, texts)))


@dataclass(frozen=True)
class Matches:
    """(texts,) counts each: n-grams within the text, and those it shares with a neighbour."""

    within: NDArray[np.int64]
    split: NDArray[np.int64]


class OverlapIndex:
    """An opened index. `records`, `n` and `false_positive_rate` are what its builder said.

    Attributes:
        grams: different n-grams it holds.
        chance: with which an n-gram that it does not hold matches; at most false_positive_rate.
    """

    def __init__(self, prints: Values, keys: _Keys, *, n: int, width: int, records: int, rate: float) -> None:
        self.n, self.records, self.false_positive_rate, self.grams = n, records, rate, len(prints)
        self.chance = len(prints) / 2 ** (8 * width)
        self._prints, self._keys, self._shift = prints, keys, np.uint64(8 * (_WIDTH_MAX - width))
        self._near = _Near(prints, 8 * width)

    @classmethod
    def from_bytes(cls, data: bytes, *, key: bytes) -> OverlapIndex:
        """Read an index. Raises UsageError for bytes that build_index did not make with this key."""
        keys = _Keys(key)
        if len(data) < _HEADER.size + _DIGEST_BYTES:
            raise _broken("it is too short")
        magic, n, width, records, grams, rate = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise _broken("it does not begin as one")
        _check_sizes(n, rate)
        if not 1 <= width <= _WIDTH_MAX or grams > GRAMS_MAX or width != _width(grams, rate):
            raise _broken("its header is inconsistent")
        if len(data) != _HEADER.size + grams * width + _DIGEST_BYTES:
            raise _broken("its length is not what its header says")
        if keys.digest(memoryview(data)[:-_DIGEST_BYTES]) != data[-_DIGEST_BYTES:]:
            raise _broken("it was made with another key, or changed since")
        prints = np.zeros((grams, _WIDTH_MAX), np.uint8)
        prints[:, :width] = np.frombuffer(data, np.uint8, grams * width, _HEADER.size).reshape(grams, width)
        values = prints.view("<u8")[:, 0]
        if bool((values[1:] <= values[:-1]).any()):
            raise _broken("its fingerprints are not in order")
        return cls(values, keys, n=n, width=width, records=records, rate=rate)

    def matching(self, texts: Sequence[Sequence[str]], views: Sequence[Callable[[str], str]]) -> list[Matches]:
        """Return, for each view (a function of a word), the n-grams of each text that are in the index.

        n-grams that begin in one text and end in a later one count for both: a passage may be split.
        texts: the words of each.
        """
        numbers: dict[str, int] = {}
        places, lengths = _numbered(texts, numbers), [len(text) for text in texts]
        matches = []
        for view in views:
            values = np.fromiter((self._keys.word(view(word)) for word in numbers), np.uint64, len(numbers))
            grams = _grams(values[places], lengths, self.n)
            hit = self._contains(grams.sums)
            begins, ends = grams.begins[hit], grams.ends[hit]
            within, over = begins == ends, begins != ends
            split = np.bincount(begins[over], minlength=len(texts)) + np.bincount(ends[over], minlength=len(texts))
            matches.append(Matches(np.bincount(begins[within], minlength=len(texts)), split))
        return matches

    def _contains(self, sums: Values) -> NDArray[np.bool_]:
        fingerprints = self._keys.fingerprints(sums) >> self._shift
        inside = np.zeros(len(fingerprints), np.bool_)
        near = np.flatnonzero(self._near.may_hold(fingerprints))
        if len(self._prints) and len(near):
            places = np.searchsorted(self._prints, fingerprints[near])
            inside[near] = self._prints[np.minimum(places, len(self._prints) - 1)] == fingerprints[near]
        return inside


class _Near:
    """One bit for each leading part of a fingerprint: most of what is not in the set needs no search in it."""

    def __init__(self, prints: Values, bits: int) -> None:
        # eight bits to sixteen bits for each fingerprint, so at most one in eight of the others is searched for
        self._leading = min(bits, max(16, len(prints).bit_length() + 3))
        self._shift = np.uint64(bits - self._leading)
        self._bits = np.zeros(2 ** max(0, self._leading - 3), np.uint8)
        leading = prints >> self._shift
        np.bitwise_or.at(self._bits, leading >> np.uint64(3), np.uint8(1) << (leading & np.uint64(7)).astype(np.uint8))

    def may_hold(self, fingerprints: Values) -> NDArray[np.bool_]:
        leading = fingerprints >> self._shift
        bits = self._bits[leading >> np.uint64(3)] >> (leading & np.uint64(7)).astype(np.uint8)
        set_bits: NDArray[np.bool_] = bits & 1 != 0
        return set_bits


def _broken(why: str) -> UsageError:
    return UsageError(
        f"the overlap index cannot be used: {why}", hint="let the trainer build it again", code="SCREEN_INDEX"
    )
