"""Text screens: tripwires for private text in what a party sends or lets in (threats T14 to T17, T21). Pure.

    patterns.py   pii_basic   what looks like personal data, and a site's own patterns
    overlap.py    overlap     passages of the private corpus, against a keyed index
    canary.py     canary      planted strings, within some edits
    charset.py    charset     the alphabet, and runs of signs
    normalise.py  how all of them but charset read a text: one spelling for many, decoded where it decodes

`screen_texts` runs every screen it is asked for over every text, whatever another one found, so that what it takes
says little about the private corpus (T18). A hit names a text by its position and what was found by a code of a
closed list; it never holds what matched.

What screens do not stop (N3): meaning. Whoever rewrites a passage passes all of them; tests/vectors/evasion.jsonl
lists what is known to pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import OperationError, UsageError
from fedsilo.protocol.kinds import TEXT_KINDS_IN, TEXT_KINDS_OUT
from policies.message import EVALUATION_ERRORS, Facts, Screened
from policies.model import TEXT_ONLY, PolicyFile, ScreenName, TextScreens
from policies.screens.canary import count_canaries
from policies.screens.charset import count_characters
from policies.screens.normalise import Reading, readings, rotated, words
from policies.screens.overlap import OverlapIndex
from policies.screens.patterns import count_patterns


class ScreenFailed(OperationError):
    """A screen could not run, so nothing is known of any text; whoever asked must let none of them pass."""

    default_code = "SCREEN_FAILED"


@dataclass(frozen=True)
class Hit:
    """A screen's hit in one text.

    Attributes:
        text: position in the texts that were screened.
        screen: its name in the policy.
        code: what was found and how it was read, such as "email", "ngram/reversed" or "canary/base64".
        count: how often: patterns, n-grams, canaries, characters.
    """

    text: int
    screen: ScreenName
    code: str
    count: int


@dataclass(frozen=True)
class Material:
    """Screening material of a party, from its own files: the index of its private corpus, and its planted strings."""

    overlap: OverlapIndex | None = None
    canaries: tuple[str, ...] = ()


def screen_texts(
    definitions: TextScreens,
    names: Sequence[ScreenName],
    material: Material,
    texts: Sequence[str],
    time_is_over: Callable[[], bool] = lambda: False,
) -> list[Hit]:
    """Hits of every named screen in every text, by screen in the order of the names and by text.

    Args:
        definitions: the policy's.
        names: of the screens.
        material: this party's own files, as far as it has them.
        texts: of one message.
        time_is_over: asked before each text is read, each screen runs and each own pattern is looked for (B5: too slow
            is a failure).

    Raises:
        ScreenFailed: a screen is not defined, or lacks its material, or its material does not fit its definition, or
            the time was over before the last one had run.
    """

    def in_time() -> None:
        if time_is_over():
            raise ScreenFailed("the screens took longer than they may")

    read: list[list[Reading]] = []
    for text in texts if set(names) - {"charset"} else ():
        in_time()
        read.append(readings(text))
    hits: list[Hit] = []
    for name in names:
        in_time()
        for number, counts in enumerate(_counts(definitions, name, material, texts, read, in_time)):
            hits += [Hit(number, name, code, count) for code, count in sorted(counts.items())]
    return hits


def _counts(
    definitions: TextScreens,
    name: ScreenName,
    material: Material,
    texts: Sequence[str],
    read: list[list[Reading]],
    in_time: Callable[[], None],
) -> list[dict[str, int]]:
    """Codes and counts of one screen for each text."""
    match name:
        case "pii_basic" if (block := definitions.pii_basic) is not None:
            own = block.custom_file.patterns if block.custom_file is not None else ()
            return [count_patterns(block.patterns, reading, own, in_time) for reading in read]
        case "overlap" if (settings := definitions.overlap) is not None:
            index = material.overlap
            if index is None:
                raise ScreenFailed("screen overlap has no index of the private corpus")
            if index.n != settings.n:
                raise ScreenFailed(f"screen overlap wants n-grams of {settings.n} words and its index has {index.n}")
            return _overlaps(index, settings.max_matching_ngrams, read)
        case "canary" if (wanted := definitions.canary) is not None:
            if not material.canaries:
                raise ScreenFailed("screen canary has no canaries")
            try:
                return count_canaries(material.canaries, wanted.max_edit_distance, wanted.decode, read)
            except UsageError as error:
                raise ScreenFailed(f"screen canary cannot run: {error.message}", hint=error.hint) from error
        case "charset" if (allowed := definitions.charset) is not None:
            return [count_characters(allowed.allow, allowed.max_run_nonword, text) for text in texts]
    raise ScreenFailed(f"text_screens does not define the screen {name}")


def _overlaps(index: OverlapIndex, most: int, read: list[list[Reading]]) -> list[dict[str, int]]:
    """N-grams of each text that the index has, where they are more than `most`.

    All texts as written are compared as one sequence, so that a passage split over two answers is seen. Each reading
    is compared in four spellings of every word: as it is, reversed, by rot13, and by both. The order of words is no
    part of an n-gram, so reversed words are the whole of reversed text.
    """
    overlaps: list[dict[str, int]] = [{} for _ in read]
    for decoder in sorted({reading.decoder for text in read for reading in text}):
        parts = [
            (number, words(reading.text))
            for number, text in enumerate(read)
            for reading in text
            if reading.decoder == decoder
        ]
        matches = index.matching([part for _, part in parts], [spelling for _, spelling in _SPELLINGS])
        for (way, _), counted in zip(_SPELLINGS, matches, strict=True):
            code = f"ngram/{decoder or way}" if decoder or way else "ngram"
            for (number, _), within, split in zip(parts, counted.within, counted.split, strict=True):
                over = 0 if decoder else int(split)  # decoded passages have no order among each other
                if within + over > most:
                    for name, count in ((code, int(within)), ("ngram/split", over)):
                        if count:
                            overlaps[number][name] = overlaps[number].get(name, 0) + count
    return overlaps


_SPELLINGS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("", lambda word: word),
    ("reversed", lambda word: word[::-1]),
    ("rot13", rotated),
    ("rot13", lambda word: rotated(word)[::-1]),
)


# ---- what screens found, as facts -----------------------------------------------------------------
# All screens are asked at once, over all texts, without an early end (T18), and whatever goes wrong in one of them is a
# refusal of the whole message (B5). Facts hold counts and codes of a closed list, never a text or the place of one.

NO_MATERIAL = Material()
TEXT_KINDS = (*TEXT_KINDS_OUT, *TEXT_KINDS_IN)


def texts_of(body: ProtobufMessage) -> Iterator[str]:
    """Return every text of a model in a message, in its order; one that is left out is empty, as the facts count it.

    A donor without a text is the receiver's own answer, which is not in the message.
    """
    if isinstance(body, pb.Response):
        yield body.text
        return
    for field in body.DESCRIPTOR.fields:
        if field.message_type is None or (isinstance(body, pb.Donor) and not body.HasField(field.name)):
            continue
        value = getattr(body, field.name)
        for child in value if field.is_repeated else (value,):
            yield from texts_of(child)


def asked(block: object, kind: str, direction: str) -> tuple[ScreenName, ...]:
    """Screens that the judging party must have run.

    A coordinator that receives silos' texts has none of their data, and screens answers to public prompts only: other
    texts are screened where they leave.

    Args:
        block: of the kind, of the side that sends it; None or one without screens asks for none.
        kind: of the message.
        direction: egress at who sends it, ingress at who receives it.
    """
    names: tuple[ScreenName, ...] = tuple(sorted(getattr(block, "screens", ())))
    if direction == "egress" or not hasattr(block, "max_hits_per_day"):
        return names
    return tuple(name for name in names if name in TEXT_ONLY) if kind == "public.responses" else ()


def settings_of(file: PolicyFile, name: ScreenName) -> str:
    """SHA-256 of a screen's definition, defaults filled in; empty where the file has none.

    It stands beside a screen's result in the log, so that a replay sees whether the settings are still the same.
    """
    definition = getattr(file.text_screens, name)
    if definition is None:
        return ""
    values = definition.model_dump(mode="json", by_alias=True)
    if (custom := values.pop("custom_file", None)) is not None:
        values["custom_patterns"] = [canonical_json(pattern).decode() for pattern in custom["patterns"]]
    # A list here is a set: in another order it says the same.
    settings = {key: sorted(value) if isinstance(value, list) else value for key, value in values.items()}
    return sha256_hex(canonical_json(settings))


def screen(
    file: PolicyFile,
    names: Sequence[ScreenName],
    texts: Sequence[str],
    material: Material,
    time_is_over: Callable[[], bool] = lambda: False,
) -> Screened:
    """Run the named screens over every text. Never raises for what a text or the material holds: a failure denies.

    Args:
        file: the policy with the screens' definitions.
        names: of the screens.
        texts: of one message.
        material: this party's own files, as far as it has them.
        time_is_over: asked in between; a run that takes too long has failed.
    """
    if not names:
        return Screened({}, (), tuple({} for _ in texts))
    counts: list[Counter[str]] = [Counter() for _ in texts]
    try:
        for hit in screen_texts(file.text_screens, names, material, texts, time_is_over):
            counts[hit.text][f"{hit.screen}/{hit.code}"] += hit.count
    except EVALUATION_ERRORS:
        # One that fails leaves nothing known of any text: all count as not run.
        return Screened({}, tuple(names), ())
    return Screened({name: settings_of(file, name) for name in names}, (), tuple(dict(count) for count in counts))


def kept(screened: Screened, positions: Iterable[int]) -> Screened:
    """Return the screening of the texts that are left of a message; what failed stays failed."""
    return screened if screened.failed else replace(screened, hits=tuple(screened.hits[place] for place in positions))


def screen_facts(screened: Screened | None, texts: int) -> Facts:
    """Facts of a message with `texts` texts. A result for another number of texts is none: then nothing ran."""
    if screened is None or screened.failed or len(screened.hits) != texts:
        return {
            "screens": {},
            "screens_failed": list(screened.failed) if screened is not None else [],
            "screen_hits": {},
            "responses_hit": 0,
        }
    return {
        "screens": dict(screened.ran),
        "screens_failed": [],
        "screen_hits": totals(screened.hits),
        "responses_hit": sum(bool(hits) for hits in screened.hits),
    }


def totals(hits: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Hits by screen and code over all texts, such as {"pii_basic/email": 2}."""
    total: Counter[str] = Counter()
    for one in hits:
        total.update(one)
    return {code: total[code] for code in sorted(total)}


def hits_in_words(facts: Mapping[str, Any]) -> str:
    """Return in words which screens ran over a message and what they found; never a text."""
    ran = ", ".join(sorted(facts.get("screens", {})))
    if not ran:
        return "no text screens ran over this message"
    hits = ", ".join(f"{code} {count}" for code, count in facts.get("screen_hits", {}).items())
    number = facts.get("responses_hit", 0)
    return f"screens {ran}: " + (f"{number} responses with hits ({hits})" if number else "no hit")
