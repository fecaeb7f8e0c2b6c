"""Bytes of a policy file in, a checked `Policy` out, with the site's own patterns where it names a file of them.

Both are read strictly, with file and line of whatever is wrong (T35). Reading the bytes is the caller's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import KINDS_OF_FREEZE, TURNS
from fedsilo.protocol.strict_yaml import Document, Path, load, validate
from policies.custom_patterns import FILE_NAME, CustomFile, CustomPattern, PatternsFile, compiled
from policies.fields import epoch_seconds
from policies.kinds import POLICY_FILE
from policies.model import GONE, NO_GONE_BLOCKS, GoneBlocks, PatternName, Policy, PolicyFile, without_gone

INIT_HINT = "fedsilo policy init --ruleset pubswap --model DIR --public FILE --federation BUNDLE"
# What a shipped ruleset cannot know: a file without one of these belongs to no site.
SITE_KEYS = ("federation", "valid", "model", "lora_schemas", "public_sets")


def load_policy(text: bytes | None, source: str, beside: Beside | None = None, *, kept: bool = False) -> Policy:
    """Parse and check a policy file.

    Args:
        text: the file's bytes; None when there is no file.
        source: its name, for messages.
        beside: reads a file in the policy's folder; None where it is a text without one.
        kept: it is read to judge the past, so it may name kinds that are gone.

    Raises:
        UsageError: no file, a bare ruleset, or any mistake in it, with file, line and hint.
    """
    if text is None or not text.strip():
        what = "there is no policy file" if text is None else "the policy file is empty"
        raise UsageError(f"{source}: {what}, so nothing may leave this site", hint=INIT_HINT, code="NO_POLICY")
    document = load(text, source)
    if not isinstance(document.value, dict):
        raise UsageError(f"{source}:1: a policy is a mapping of keys", hint=INIT_HINT)
    missing = [key for key in SITE_KEYS if key not in document.value or _unfilled(document.value[key])]
    # A ruleset's own keys are all known: beside an unknown one, a site's key is not lacking but misspelled.
    if missing and "egress" in document.value and document.value.keys() <= PolicyFile.model_fields.keys():
        raise UsageError(
            f"{source}: this is a bare ruleset, without the site's own {', '.join(missing)}",
            hint=INIT_HINT,
            code="BARE_RULESET",
        )
    document, custom_text = with_custom_file(document, beside)
    gone = NO_GONE_BLOCKS
    if kept and isinstance(egress := document.value.get("egress"), dict):
        gone = validate(GoneBlocks, replace(document, value={kind: egress.get(kind) for kind in GONE}))
        document = replace(document, value=without_gone(document.value))
    file, digest = validate(POLICY_FILE, document), sha256_hex(text)
    policy = Policy(file, source, digest, document.lines, custom_text=custom_text, gone=gone)
    _check_references(policy.file, document)
    return policy


def _unfilled(value: Any) -> bool:
    """Return whether a shipped ruleset's placeholder, such as $schema_sha256, still stands in a block."""
    if isinstance(value, dict):
        return any(_unfilled(child) for child in value.values())
    if isinstance(value, list):
        return any(_unfilled(child) for child in value)
    return isinstance(value, str) and value.startswith("$")


def _check_references(file: PolicyFile, document: Document) -> None:
    """Names used in one block must be declared in another, and limits must not contradict each other."""

    def refuse(path: Path, message: str, hint: str = "") -> UsageError:
        return UsageError(f"{document.source}:{document.line_of(path)}: {message}", hint=hint)

    federation = file.federation
    prefix = f"spiffe://{federation.id}/"
    for index, peer in enumerate(federation.peers):
        if not peer.startswith(prefix + "silo/"):
            raise refuse(("federation", "peers", index), f"peer {peer!r} is not a silo of {federation.id!r}")
    if len(set(federation.peers)) != len(federation.peers):
        raise refuse(("federation", "peers"), "a peer is listed twice")
    if not federation.coordinator.startswith(prefix + "coordinator/"):
        raise refuse(("federation", "coordinator"), f"it is not a coordinator of {federation.id!r}")
    if federation.min_peers > len(federation.peers):
        raise refuse(("federation", "min_peers"), f"{federation.min_peers} exceeds the {len(federation.peers)} peers")
    if federation.min_updates == 1 < len(federation.peers):
        raise refuse(
            ("federation", "min_updates"),
            f"1 is for a federation of one silo, and this one lists {len(federation.peers)}",
            "with one update in it, the others would be given that silo's own as the global adapter: 2 or more",
        )
    stated = document.value["federation"].get("min_updates", federation.min_updates)
    if stated > len(federation.peers):
        raise refuse(
            ("federation", "min_updates"),
            f"{stated} updates in a mean, and the federation lists {len(federation.peers)} "
            f"silo{'s' * (len(federation.peers) > 1)}",
        )
    available = len(set(file.audit.witnesses) & {"coordinator"})
    available += len(federation.peers) - 1 if "peers" in file.audit.witnesses else 0
    if file.audit.min_witnesses > available:
        raise refuse(("audit", "min_witnesses"), f"{file.audit.min_witnesses} exceeds the {available} that count")
    if epoch_seconds(file.valid.from_) >= epoch_seconds(file.valid.until):
        raise refuse(("valid", "until"), "it is not after `from`")
    for name, pin in file.lora_schemas.items():
        if pin.base_model_sha256 != file.model.base_model_sha256:
            raise refuse(("lora_schemas", name, "base_model_sha256"), "it differs from model.base_model_sha256")
    uses: list[tuple[Path, str, Mapping[str, Any]]] = []
    for side, kind, block in file.blocks():
        if (schema := getattr(block, "schema_name", None)) is not None:
            uses.append(((side, kind, "schema"), schema, file.lora_schemas))
        if (public := getattr(block, "set", None)) is not None:
            uses.append(((side, kind, "set"), public, file.public_sets))
    for path, name, declared in uses:
        if name not in declared:
            raise refuse(path, f"{name!r} is not declared", f"declared: {', '.join(sorted(declared)) or 'none'}")
    for kind, update in file.egress.updates.items():
        freeze = file.lora_schemas[update.schema_name].freeze
        if kind not in KINDS_OF_FREEZE[freeze]:
            kinds = KINDS_OF_FREEZE[freeze][: len(TURNS[freeze])]
            raise refuse(
                ("egress", kind, "schema"),
                f"schema {update.schema_name!r} has freeze: {freeze}, so its updates leave as {' and '.join(kinds)}",
            )
    _check_screens(file, refuse)
    if file.egress.metrics_eval:
        for name, metric in file.egress.metrics_eval.fields.items():
            if metric.min > metric.max:
                raise refuse(("egress", "metrics.eval", "fields", name), "min is above max")


def _check_screens(file: PolicyFile, refuse: Callable[[Path, str, str], UsageError]) -> None:
    """A screen that is named is defined, and a kind that leaves says how many hits a day may have."""
    for side, kind, block in file.blocks():
        names, path = getattr(block, "screens", ()), (side, kind, "screens")
        for name in names:
            if getattr(file.text_screens, name) is None:
                raise refuse(path, f"screen {name!r} has no definition", f"add {name} under text_screens")
        if len(set(names)) != len(names):
            raise refuse(path, "a screen is named twice", "name it once")
        if names and getattr(block, "max_hits_per_day", 0) is None:
            raise refuse(
                path,
                "screens need max_hits_per_day",
                f"how many texts with a hit one day may have before {kind} halts; 0 halts at the first",
            )


# ---- the file of a site's own patterns ------------------------------------------------------------

KEY: Path = ("text_screens", "pii_basic", "custom_file")
HINT = "docs/how-to/screen-answers.md has an example"
# The bytes of a file in the policy's own folder and its name for messages. Raises UsageError: there is none to read.
Beside = Callable[[str], tuple[bytes, str]]


def custom_of(file: PolicyFile) -> CustomFile | None:
    """A policy's own patterns, if it has any."""
    screen = file.text_screens.pii_basic
    return screen.custom_file if screen is not None else None


def custom_in_words(file: PolicyFile) -> str:
    """Return the number of own patterns in words; empty where there are none."""
    custom = custom_of(file)
    if custom is None:
        return ""
    number = len(custom.patterns)
    return f"{number} own pattern{'' if number == 1 else 's'} of {custom.file}"


def with_custom_file(document: Document, beside: Beside | None) -> tuple[Document, bytes | None]:
    """The policy's document with the file's content in place of its name, and the file's bytes.

    Args:
        document: of the policy file.
        beside: reads a file in its folder; None where no file stands beside it.

    Raises:
        UsageError: not the name of such a file, no such file, or a mistake in it, with its line.
    """
    name, place = _named(document), _place(document)
    if not name:
        return document, None
    if beside is None:
        raise UsageError(
            f"{place}: {name} cannot be read: this policy is a text without a folder, as a charter is",
            hint="own patterns stand in a site's own policy; take the key out here",
            code="NO_CUSTOM_FILE",
        )
    try:
        text, source = beside(name)
    except UsageError as error:
        raise UsageError(f"{place}: {error.message}", hint=error.hint, code="NO_CUSTOM_FILE") from error
    patterns = read_patterns(text, source)
    return replace(document, value=_replaced(document.value, CustomFile(file=name, patterns=patterns))), text


def name_of_custom_file(text: bytes, source: str) -> str:
    """The file that a policy's text names; empty where it names none. Raises UsageError: no name of such a file."""
    return _named(load(text, source))


def _named(document: Document) -> str:
    value = document.value
    for key in KEY[:-1]:
        value = value.get(key) if isinstance(value, dict) else None
    name = value.get(KEY[-1]) if isinstance(value, dict) else None
    if name is None:
        return ""
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        raise UsageError(
            f"{_place(document)}: must name a file in the policy's own folder, by a name that ends in .patterns.yaml",
            hint="such as site.patterns.yaml, in small letters, without a folder",
        )
    return name


def _place(document: Document) -> str:
    return f"{document.place(KEY)}: {'.'.join(map(str, KEY))}"


def read_patterns(text: bytes, source: str) -> tuple[CustomPattern, ...]:
    """The patterns of a file, in its order.

    Raises:
        UsageError: names source and line.
    """
    # Pure, but with tables that a policy without own patterns does not need.
    from policies.screens.normalise import fold

    document = load(text, source)
    if not isinstance(document.value, dict):
        raise UsageError(f"{source}:1: a file of patterns is a mapping with the key `patterns`", hint=HINT)
    patterns = validate(PatternsFile, document).patterns
    first: dict[str, int] = {}
    for number, pattern in enumerate(patterns):
        place = f"{document.place(('patterns', number, 'name'))}: patterns.{number}"
        if pattern.name in get_args(PatternName):
            raise UsageError(f"{place}.name: {pattern.name} is a shipped pattern's name", hint="choose another")
        if pattern.name in first:
            raise UsageError(f"{place}.name: {pattern.name} stands twice", hint=f"first at line {first[pattern.name]}")
        first[pattern.name] = document.line_of(("patterns", number, "name"))
        for key, written in (("pattern", pattern.pattern), *(("after_words", word) for word in pattern.after_words)):
            for character in written:
                if not character.isascii() and (read := fold(character)) != character:
                    raise UsageError(
                        f"{document.place(('patterns', number, key))}: patterns.{number}.{key}: U+{ord(character):04X} "
                        f"never stands in a text as the screens read it",
                        hint=f"write {read!r}" if read else "leave it out",
                    )
        try:
            compiled(pattern.pattern, pattern.after_words)
        except ValueError as error:
            raise UsageError(
                f"{document.place(('patterns', number, 'after_words'))}: patterns.{number}: with its words {error}",
                hint="fewer or shorter words",
            ) from error
    return patterns


def _replaced(value: Any, custom: CustomFile) -> Any:
    screens, screen = KEY[0], KEY[1]
    block = {**value[screens][screen], KEY[2]: custom}
    return {**value, screens: {**value[screens], screen: block}}
