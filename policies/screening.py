"""What text screens found in one message, as facts: which ran, how they were set, how many hits of which code.

The screens themselves are in `policies/screens`; here they are asked all at once, over all texts, without an early end
(threat T18), and whatever goes wrong in one of them is a refusal of the whole message (B5). Facts hold counts and codes
of a closed list, never a text or the place of one in a message.
What this does not stop: private text in words that no screen knows (N3).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.kinds import TEXT_KINDS_IN, TEXT_KINDS_OUT
from policies.message import EVALUATION_ERRORS, Facts, Screened
from policies.model import TEXT_ONLY, PolicyFile, ScreenName
from policies.screens import Material, never, screen_texts

__all__ = ["NO_MATERIAL", "TEXT_ONLY", "Material", "Screened", "asked", "kept", "screen", "screen_facts", "settings_of"]

NO_MATERIAL = Material()
TEXT_KINDS = (*TEXT_KINDS_OUT, *TEXT_KINDS_IN)


def texts_of(body: ProtobufMessage) -> Iterator[str]:
    """Every text of a model in a message, in its order; one that is left out is empty, as the facts count it.

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
    time_is_over: Callable[[], bool] = never,
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
    """The same for the texts that are left of a message; what failed stays failed."""
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
    """For people: which screens ran over a message and what they found; never a text."""
    ran = ", ".join(sorted(facts.get("screens", {})))
    if not ran:
        return "no text screens ran over this message"
    found = ", ".join(f"{code} {count}" for code, count in facts.get("screen_hits", {}).items())
    number = facts.get("responses_hit", 0)
    return f"screens {ran}: " + (f"{number} responses with hits ({found})" if number else "no hit")
