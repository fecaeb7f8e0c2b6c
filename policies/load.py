"""Bytes of a policy file in, a checked `Policy` out. Reading the file is the caller's part; rules do no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.freezing import FREEZE_OF_KIND, UPDATE_KIND
from fedsilo.protocol.strict_yaml import Document, Path, load, validate
from policies.custom_file import Beside, with_custom_file
from policies.fields import epoch_seconds
from policies.model import PolicyFile
from policies.model_kinds import GONE, NO_GONE_BLOCKS, GoneBlocks, without_gone

INIT_HINT = "fedsilo policy init --ruleset pubswap --model DIR --public FILE --federation BUNDLE"
# What a shipped ruleset cannot know: a file without one of these belongs to no site.
SITE_KEYS = ("federation", "valid", "model", "lora_schemas", "public_sets")


@dataclass(frozen=True)
class Policy:
    """A site's policy (or the coordinator's charter): the rules, and where each stands in its file.

    Attributes:
        file: the validated content.
        source: file name, for refusals.
        file_sha256: of the bytes as read; `digest` instead ignores comments and key order.
        parts: the site's own policy and the federation's charter, where this is what both allow together
            (`compare.effective`); source, lines and file_sha256 are then those of the site's own.
        custom_text: bytes of the file of own patterns, as read; None where the site's own policy names none.
        gone: of a kept policy, the blocks of kinds that are gone; part of its digest, and of nothing else.
    """

    file: PolicyFile
    source: str
    file_sha256: str
    lines: Mapping[Path, int]
    parts: tuple[Policy, ...] = ()
    custom_text: bytes | None = None
    gone: GoneBlocks = NO_GONE_BLOCKS

    def line_of(self, path: Path) -> int:
        """Line of a key, or of the nearest key above it that stands in the file."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON after defaults: the policy's identity."""
        content = self.file.model_dump(mode="json", by_alias=True)
        content["egress"] |= self.gone.model_dump(mode="json", by_alias=True)
        return sha256_hex(canonical_json(content))

    @property
    def own(self) -> Policy:
        """The site's own policy: where files lie is each site's own matter, and a meet of two places is none."""
        return self.parts[0] if self.parts else self

    @property
    def charter(self) -> Policy | None:
        """The federation's charter that has a part in this policy."""
        return self.parts[-1] if self.parts else None

    @property
    def digests(self) -> dict[str, str]:
        """What a record says of the policy that decided: what is in force, and the files that it is made of."""
        digests = {"effective": self.digest, "file": self.file_sha256}
        return digests | {"charter": self.charter.file_sha256} if self.charter else digests

    @cached_property
    def valid_from_seconds(self) -> int:
        return epoch_seconds(self.file.valid.from_)

    @cached_property
    def valid_until_seconds(self) -> int:
        return epoch_seconds(self.file.valid.until)

    @cached_property
    def peers(self) -> frozenset[str]:
        return frozenset(self.file.federation.peers)


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
    file, digest = validate(PolicyFile, document), sha256_hex(text)
    policy = Policy(file, source, digest, document.lines, custom_text=custom_text, gone=gone)
    _check_references(policy.file, document)
    return policy


def _unfilled(value: Any) -> bool:
    """Whether a shipped ruleset's placeholder, such as $schema_sha256, still stands in a block."""
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
    for side, kind, block in blocks_of(file):
        if (schema := getattr(block, "schema_name", None)) is not None:
            uses.append(((side, kind, "schema"), schema, file.lora_schemas))
        if (public := getattr(block, "set", None)) is not None:
            uses.append(((side, kind, "set"), public, file.public_sets))
    for path, name, declared in uses:
        if name not in declared:
            raise refuse(path, f"{name!r} is not declared", f"declared: {', '.join(sorted(declared)) or 'none'}")
    for kind, update in file.egress.updates.items():
        freeze = file.lora_schemas[update.schema_name].freeze
        if FREEZE_OF_KIND[kind] != freeze:
            raise refuse(
                ("egress", kind, "schema"),
                f"schema {update.schema_name!r} has freeze: {freeze}, so its updates leave as {UPDATE_KIND[freeze]}",
            )
    _check_screens(file, refuse)
    if file.egress.metrics_eval:
        for name, metric in file.egress.metrics_eval.fields.items():
            if metric.min > metric.max:
                raise refuse(("egress", "metrics.eval", "fields", name), "min is above max")


def blocks_of(file: PolicyFile) -> Iterator[tuple[str, str, object]]:
    """(side, kind, block) of every kind that the policy names."""
    for side in ("egress", "ingress"):
        half = getattr(file, side)
        for name, field in type(half).model_fields.items():
            if (block := getattr(half, name)) is not None:
                yield side, field.alias or name, block


def _check_screens(file: PolicyFile, refuse: Callable[[Path, str, str], UsageError]) -> None:
    """A screen that is named is defined, and a kind that leaves says how many hits a day may have."""
    for side, kind, block in blocks_of(file):
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
