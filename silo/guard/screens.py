"""The guard's text screens: what they need of this site's own files, one run over all texts of a message, and one over
archived texts by another policy.

The trainer builds the overlap index of the private records with a key that the guard hands it. The guard
never opens the records, only that one file, and as an untrusted one: a plain file of bounded size in the scratch
folder, parsed strictly, with the key that its grams are hashed by. Canaries are a file of the site that only the guard
reads. A screen whose material is missing denies the message (SCREEN_FAILED); `troubles` says why beforehand.

`fedsilo audit replay --rescreen` asks the daemon, since index and canaries live here and the texts do not leave this
site (T15, T18, T40): a signed command with the policy, by whoever may read payloads. Each payload that is read for it
stands in the log with the person's name, as one that is shown does. The answer has counts by screen and code, as facts,
never a text. It does not tell what the screens would have found with the records, the index and the canaries of then.

Does not stop: a trainer that builds its index of other records than it trains on (N1).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from certs.commands import VerifiedCommand
from fedsilo.audit.log import AuditLog
from fedsilo.control.server import ControlServer
from fedsilo.files.durable import read_private
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.errors import FedSiloError, NotFoundError, UsageError
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from fedsilo.protocol.text import harmless
from policies import screens
from policies.compare import effective
from policies.load import custom_in_words, load_policy
from policies.message import Screened
from policies.model import Policy, PolicyFile, ScreenName
from policies.replay import DECISIONS, screened_otherwise, screens_asked
from policies.screens import Material, screen_facts, texts_of
from policies.screens.overlap import OverlapIndex
from silo.config import SiloConfig, place_of
from silo.guard.ledger import Ledger, OutboxItem
from silo.guard.trainer_report import TEXT_CHARACTERS_MAX

_log = logging.getLogger("fedsilo.silo")

INDEX_BYTES_MAX = 1 << 28  # 256 MiB: a hundred times what 100 k records take
SCREEN_SECONDS_MAX = 60.0  # a hundred times what 256 answers of 500 tokens take
CANARIES_MAX = 10_000
CANARY_CHARACTERS_MIN = 8  # with two edits allowed, a shorter one is found in any text
CANARY_CHARACTERS_MAX = 1024
_INDEX_NAME = re.compile(r"overlap-[0-9a-f]{64}\.index")
_WORDS_OF_ABSENCE = {
    "overlap": "the trainer has made no overlap index",
    "canary": "data.canaries names no file in this site's configuration",
}

_NO_SCRATCH = "trainer.scratch says nowhere where the external trainer leaves its overlap index"
_MADE_OTHERWISE = "the trainer's overlap index was made with other settings"


def index_key(site_secret: bytes) -> bytes:
    """The key that grams of private records are hashed by. It tells nothing of the site secret."""
    return hmac.new(site_secret, b"fedsilo overlap index", hashlib.sha256).digest()


class Screens:
    """Runs the text screens that the policy names.

    Args:
        canaries: texts that must never leave; read by `read_canaries`.
        key: of the overlap index, from `index_key`.
        public_sha256: of this site's public file.
        monotonic: seconds, for how long one message may take.

    Attributes:
        trouble_of_index: why there is no overlap index, while there is none.
        runs: how often the screens were run over a message's texts. It is the same with and without a hit (T18).
    """

    def __init__(
        self,
        *,
        canaries: Sequence[str] = (),
        key: bytes = b"",
        public_sha256: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._canaries = tuple(canaries)
        self._key = key
        self._public_sha256 = public_sha256
        self._index: OverlapIndex | None = None
        self._index_settings: Mapping[str, Any] | None = None
        self.trouble_of_index = _WORDS_OF_ABSENCE["overlap"]
        self.runs = 0

    def screen(self, policy: Policy, names: Sequence[ScreenName], texts: Sequence[str]) -> Screened:
        """One run of the named screens over every text, hit or no hit. Too slow is a failure, which denies (B5)."""
        self.runs += 1
        end = self._monotonic() + SCREEN_SECONDS_MAX
        # An index that exempts what this policy does not would find too little: then the screen fails instead (T15).
        index = None if self._misfit(policy.file) else self._index
        material = Material(overlap=index, canaries=self._canaries)
        return screens.screen(policy.file, names, texts, material, time_is_over=lambda: self._monotonic() > end)

    def index_wanted(self, file: PolicyFile) -> dict[str, Any] | None:
        """Return what the trainer is told to build, as a field of `configure`; None where no kind is screened for
        overlap.

        Passages of the background set count as public only where that set is the public file of this site.
        """
        settings = file.text_screens.overlap
        if "overlap" not in file.screens_named or settings is None:
            return None
        background = file.public_sets.get(settings.background_set or "")
        return {
            "key": self._key.hex(),
            "n": settings.n,
            "false_positive_rate": settings.false_positive_rate,
            "background": background is not None and background.sha256 == self._public_sha256,
        }

    def take_index(self, folder: Path | None, told: object, wanted: Mapping[str, Any] | None = None) -> None:
        """Open the index that the trainer says it has written. Whatever is wrong with it, there is none then.

        Args:
            folder: the trainer's scratch folder, as the guard sees it; None where it cannot.
            told: `screen_index` of the trainer's `ready`.
            wanted: `index_wanted`, by which it was told to make it.
        """
        self._index_settings = wanted
        self._index, self.trouble_of_index = None, _WORDS_OF_ABSENCE["overlap"]
        name = told.get("file") if isinstance(told, Mapping) else None
        if folder is None:
            self.trouble_of_index = _NO_SCRATCH
            return
        if not isinstance(name, str) or not _INDEX_NAME.fullmatch(name):
            why = told.get("why") if isinstance(told, Mapping) else None
            if isinstance(why, str):
                # Not for the state: the trainer has seen private prompts, and words of its own may quote one (T8).
                _log.warning("%s: %s", _WORDS_OF_ABSENCE["overlap"], harmless(why, TEXT_CHARACTERS_MAX))
                self.trouble_of_index += "; the guard's log says why"
            return
        try:
            self._index = OverlapIndex.from_bytes(_read_untrusted(folder / name), key=self._key)
        except FedSiloError as error:
            self.trouble_of_index = f"the trainer's overlap index cannot be used: {error.message}"

    def lacking(self, file: PolicyFile, names: Sequence[ScreenName]) -> list[str]:
        """Return why some of these screens cannot run here as this file sets them, which need not be the one in
        force."""
        return [f"screen {name} cannot run: {why}" for name, why in self._missing(file).items() if name in names]

    def troubles(self, policy: Policy) -> list[str]:
        """Return why a screen that the policy names cannot run here; a line for each."""
        missing = self._missing(policy.file)
        return [
            f"{policy.source}:{policy.line_of(path)}: {path[1]} is denied while its screen {name} cannot run: {why}"
            for path, names in screens_by_place(policy)
            for name, why in missing.items()
            if name in names
        ]

    def _missing(self, file: PolicyFile) -> dict[str, str]:
        """Return why screens cannot run here as this file sets them, by their names."""
        index = self.trouble_of_index if self._index is None else ""
        whys = {
            "overlap": _MADE_OTHERWISE if self._misfit(file) else index,
            "canary": "" if self._canaries else _WORDS_OF_ABSENCE["canary"],
        }
        return {name: why for name, why in whys.items() if why}

    def _misfit(self, file: PolicyFile) -> bool:
        """The index is there, and was made as another policy than this one wants it."""
        return self._index is not None and self.index_wanted(file) != self._index_settings


def screens_by_place(policy: Policy) -> list[tuple[tuple[str, str, str], tuple[ScreenName, ...]]]:
    """Each key `screens` of a policy: its place in the file and the names in it."""
    named = (((side, kind, "screens"), getattr(block, "screens", ())) for side, kind, block in policy.file.blocks())
    return [(path, names) for path, names in named if names]


def check_screens(config: SiloConfig, policy: Policy) -> str:
    """For `silo check`: whether the screens that the policy names can have their material here; what they will have.

    Raises:
        UsageError: one cannot, with the policy's line; until it can, its kind is denied.
        NotFoundError, NotAllowedError: as `site_canaries`.
    """
    canaries = site_canaries(config, policy)
    screens = Screens(canaries=canaries)
    if config.trainer.launch == "child" or config.trainer.scratch is not None:
        screens.trouble_of_index = ""  # the trainer makes it when it starts
    else:
        screens.trouble_of_index = _NO_SCRATCH
    troubles = screens.troubles(policy)
    if troubles:
        raise UsageError("; ".join(troubles), hint="docs/how-to/screen-answers.md", code="SCREEN_FAILED")
    named = sorted(policy.file.screens_named)
    if not named:
        return "the policy names none"
    own = custom_in_words(policy.file) if "pii_basic" in named else ""
    return f"{', '.join(named)}; {len(canaries)} canaries{f'; {own}' if own else ''}"


def site_canaries(config: SiloConfig, policy: Policy) -> tuple[str, ...]:
    """This site's canaries, before a start and in `silo check`.

    Raises:
        UsageError: the policy screens for canaries and the configuration names no file of them, with both lines.
        NotFoundError, NotAllowedError: there is no such file, or others may read it.
    """
    path, place = config.data.canaries, place_of(config, "data.canaries")
    asking = next((path for path, names in screens_by_place(policy) if "canary" in names), None)
    asks = f"{policy.source}:{policy.line_of(asking)}: {asking[1]} is screened for canaries" if asking else ""
    hint = "random texts, one a line, mode 0600, as `silo init` makes them; docs/how-to/screen-answers.md"
    if path is None:
        if asks:
            raise UsageError(
                f"{asks}, and data.canaries names no file of them ({place})", hint=hint, code="SCREEN_FAILED"
            )
        return ()
    try:
        return read_canaries(path)
    except NotFoundError as error:
        message = f"{place}: data.canaries: {error.message}" + (f", and {asks}" if asks else "")
        raise NotFoundError(message, hint=f"put it back, or write one: {hint}") from error


def read_canaries(path: Path) -> tuple[str, ...]:
    """Texts that must never leave: one a line, bare or as JSON ("text" or {"canary": "text"}); empty lines are none.

    Raises:
        NotFoundError, NotAllowedError: no such file, or others may read it: who knows a canary can write around it.
        UsageError: a line that is none, with its number.
    """
    try:
        lines = read_private(path).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from error
    canaries = tuple(_canary(path, number, line) for number, line in enumerate(lines, start=1) if line.strip())
    if not canaries:
        raise UsageError(f"{path} holds no canary", hint="one a line; remove data.canaries where there are none")
    if len(canaries) > CANARIES_MAX:
        raise UsageError(f"{path} holds {len(canaries)} canaries; {CANARIES_MAX} are allowed")
    return canaries


def _canary(path: Path, number: int, line: str) -> str:
    text: object = line.strip()
    if line.lstrip()[:1] in ('"', "{"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{number}: not JSON") from error
        text = value.get("canary") if isinstance(value, dict) else value
    if not isinstance(text, str) or not CANARY_CHARACTERS_MIN <= len(text) <= CANARY_CHARACTERS_MAX:
        raise UsageError(
            f"{path}:{number}: a canary is a text of {CANARY_CHARACTERS_MIN} to {CANARY_CHARACTERS_MAX} characters",
            hint='as it stands, or as JSON: {"canary": "..."}',
        )
    return text


def _read_untrusted(path: Path) -> bytes:
    """The trainer's own file, through one descriptor: no link, nothing but a plain file, no more than the bound.

    Raises:
        UsageError: it is something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UsageError(f"{path} is not a plain file")
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            data = stream.read(INDEX_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    if len(data) > INDEX_BYTES_MAX:
        raise UsageError(f"{path} has more than {INDEX_BYTES_MAX} bytes")
    return data


# ---- archived texts screened again -------------------------------------------------------------------------------

COMMAND = "audit.rescreen"
# Of one command, which the loop's thread carries out between two exchanges: it goes on where the last one ended.
PAYLOADS_MAX = 64
SECONDS_MAX = 30.0  # with the last message's 60 s of screens, still less than a command waits for its answer
RECORDS_MAX = 20_000

_CAME_IN = "what came in is not archived"
_STAYED = "what did not leave under this record is not archived"
_GONE = "its payload is not archived: the policy did not ask for it then, or retention has deleted it since"


class Rescreening:
    """Runs the screens of today over payloads that left earlier, by signed command.

    Args:
        ledger: knows which payload a decision was about, and has the bytes.
        screens: of this site, with the index and the canaries that they have now.
    """

    def __init__(self, ledger: Ledger, audit: AuditLog, screens: Screens) -> None:
        self._ledger = ledger
        self._audit = audit
        self._screens = screens

    def register(self, control_server: ControlServer, on_loop: Callable[[Callable[[], Any]], Any]) -> None:
        """The command, for whom `audit show --payload` is too."""
        control_server.register_command(
            COMMAND, "payload.read", lambda command: on_loop(lambda: self.rescreen(command))
        )

    def rescreen(self, command: VerifiedCommand) -> dict[str, Any]:
        """Return what a policy's screens find in the archived texts that they have not seen.

        Args:
            command: arguments {policy, charter, custom_file, since}: three files' texts, the second perhaps empty, the
                third left out where the policy names none; the first record.

        Returns:
            {"policy": digest of what was asked, "rows", "next": where to go on, or None}. A row is of one decision
            whose recorded facts do not tell what these screens say: {"seq", "hmac_sha256", "facts"}, or, where nobody
            can tell, {"seq", "hmac_sha256", "why"}.

        Raises:
            UsageError: no policy, or a wrong one; no number.
        """
        policy, since = _policy_of(command.arguments), command.arguments.get("since", 0)
        if not isinstance(since, int) or isinstance(since, bool) or since < 0:
            raise UsageError("from which record on? its number is needed")
        left = {item.decision_seq: item for item in self._ledger.outbox()}
        rows: list[dict[str, Any]] = []
        self._read, end = 0, time.monotonic() + SECONDS_MAX
        for record in self._audit.records(since):
            over = self._read == PAYLOADS_MAX or time.monotonic() > end
            if over or record["seq"] >= since + RECORDS_MAX:
                return {"policy": policy.digest, "rows": rows, "next": record["seq"]}
            final = record.get("facts", {}).get("final", {})
            if record["event"] not in DECISIONS or not final or not screened_otherwise(final, policy):
                continue
            row = self._found(record, policy, left.get(record["seq"]), command)
            key = "why" if isinstance(row, str) else "facts"
            rows.append({"seq": record["seq"], "hmac_sha256": record["payload"].get("hmac_sha256", ""), key: row})
        return {"policy": policy.digest, "rows": rows, "next": None}

    def _found(
        self, record: Mapping[str, Any], asked: Policy, item: OutboxItem | None, command: VerifiedCommand
    ) -> dict[str, Any] | str:
        """Facts of the screens, or why there are none."""
        if record["direction"] == "ingress":
            return _CAME_IN
        if item is None:
            return _STAYED
        names = screens_asked(record["facts"]["final"], asked)
        if lacking := self._screens.lacking(asked.file, names):
            return "; ".join(lacking)
        if not item.archived or item.digest not in self._ledger.payloads:
            return _GONE
        try:
            body, _ = parsed(item.kind, self._ledger.payloads.read(item.digest), OUTBOUND_KINDS)
        except FedSiloError as error:
            return error.message
        self._read += 1
        self._audit.append(
            "payload.read", **item.place._asdict(),
            detail={
                "person": command.person, "certificate": command.certificate_fingerprint, "command": COMMAND,
                "screened_by": asked.digest,
            },
            link={"decision": item.decision_seq},
        )  # fmt: skip
        texts = list(texts_of(body))
        screened = self._screens.screen(asked, names, texts)
        if screened.failed:
            return f"screens {', '.join(screened.failed)} failed here"
        return screen_facts(screened, len(texts))


def _policy_of(arguments: Mapping[str, Any]) -> Policy:
    """The policy of a command, with its own patterns, tightened by its charter. Raises UsageError."""
    text, charter = arguments.get("policy"), arguments.get("charter", "")
    if not isinstance(text, str) or not isinstance(charter, str):
        raise UsageError("by which policy? its text is needed")
    custom = arguments.get("custom_file")
    if not isinstance(custom, str | None):
        raise UsageError("custom_file is the text of a file")
    beside = None if custom is None else lambda name: (custom.encode(), name)
    own = load_policy(text.encode(), "policy.yaml", beside, kept=True)
    return effective(own, load_policy(charter.encode(), "charter.yaml", kept=True)) if charter else own
