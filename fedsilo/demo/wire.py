"""Around a federation on one machine: canaries planted at every silo, a recorder in front of the coordinator, and what
the two say together once everything has stopped (threat X1).

Three views of what left must agree: each silo's audit log, the coordinator's, and the bytes on the wire.

A canary is a unique text, planted where a site keeps what must not leave. It is found in any of five forms: as it is,
normalised (NFKC, letters and digits only, case folded), reversed, as base64 at any of its three alignments, as
hexadecimal digits. What the search does not find: a canary that was encrypted, compressed, paraphrased or spread over
several values (N1).
"""

from __future__ import annotations

import base64
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ahocorasick
import numpy as np

from fedsilo.audit.log import sent_by_kind
from fedsilo.audit.reader import typed_records
from fedsilo.demo import digit_tasks
from fedsilo.demo.data import DataFolder, to_json_lines
from fedsilo.demo.sites import FEDERATION, Sites
from fedsilo.demo.wire_recorder import EndKeys, Unreadable, WireRecorder, recordings
from fedsilo.files.task_files import BAD_SHARE_MAX, read_tasks
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.randomness import generator, seed_of

COUNT = 200
Place = Literal["prompt", "id", "config", "environment", "exception"]
SHARE_MIN = 12  # of one silo: something in every place
CONFIG = 6  # each goes into a place of its own
FORMS = ("raw", "normalised", "reversed", "base64", "hex")
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")
_WHITE_SPACE = b" \t\r\n"
# Not a hexadecimal digit, so that no digest holds such a question by chance.
_LETTERS = "utsro"
_DIGITS = 6


@dataclass(frozen=True)
class Canary:
    """A planted text. `silo`: where; `place`: in what."""

    text: str
    silo: str
    place: Place


@dataclass(frozen=True)
class Finding:
    """A canary that was found, and in which form."""

    canary: Canary
    form: str


def make_canaries(seed: int, silos: Sequence[str], *, tokenizer: str, count: int = COUNT) -> tuple[Canary, ...]:
    """`count` distinct canaries, shared out evenly.

    Args:
        seed: they follow from it, so that a demo can be repeated.
        silos: names, at least one.
        tokenizer: `digits` or `bytes`; what the model can read, since the prompts among them are trained on.
        count: of all silos together.

    Raises:
        ValueError: too few for something in every place of every silo.
    """
    if count // len(silos) < SHARE_MIN:
        raise ValueError(f"{count} canaries are too few for {len(silos)} silos")
    draws = generator(seed_of(seed, "canaries"))
    made: dict[str, Canary] = {}
    for number, silo in enumerate(silos):
        share = count // len(silos) + (number < count % len(silos))
        some = min(6, share // 8)
        counts: dict[Place, int] = {"id": some, "config": CONFIG, "environment": some, "exception": min(4, some)}
        places: list[Place] = [place for place, many in counts.items() for _ in range(many)]
        places += ["prompt"] * (share - len(places))
        for place in places:
            text = _text(draws, place, tokenizer)
            while text in made:
                text = _text(draws, place, tokenizer)
            made[text] = Canary(text, silo, place)
    return tuple(made.values())


def control_text(seed: int) -> str:
    """The positive control, part of a name that is allowed to leave: a search that does not find it finds nothing."""
    return "control" + _hex(generator(seed_of(seed, "canary-control")))


def _text(draws: np.random.Generator, place: Place, tokenizer: str) -> str:
    if place == "prompt" and tokenizer == "digits":
        letter = _LETTERS[int(draws.integers(len(_LETTERS)))]
        return f"{letter}{draws.integers(10**_DIGITS):0{_DIGITS}d}="
    if place == "prompt":
        return f"Patient {_hex(draws)}: which dose of {_hex(draws)}?"
    return f"canary-{_hex(draws)}"


def _hex(draws: np.random.Generator) -> str:
    return draws.bytes(8).hex()


def rows_of(canaries: Iterable[Canary], *, topic: str, verifier: str) -> list[dict[str, str]]:
    """Private task rows that carry the prompt and id canaries; each is a question that can be trained on."""
    rows = []
    for number, canary in enumerate(canaries):
        if canary.place == "prompt":
            rows.append({"id": f"planted-{number}", "prompt": canary.text, "answer": _answer(canary.text, verifier)})
        elif canary.place == "id":
            ordinary = digit_tasks.question("reverse", f"{number:04d}")
            rows.append({"id": canary.text, "prompt": ordinary, "answer": _answer(ordinary, verifier)})
    return [{**row, "topic": topic} for row in rows]


def _answer(prompt: str, verifier: str) -> str:
    for topic, operation in digit_tasks.OPERATIONS.items():
        if verifier == "exact" and re.fullmatch(rf"{operation.letter}\d+=", prompt):
            return digit_tasks.answer(topic, prompt[1:-1])
    return "A" if verifier == "choice" else "4"


class Search:
    """Finds every form of every canary in one pass per view of the bytes (Aho and Corasick 1975).

    Args:
        canaries: at least one.
    """

    def __init__(self, canaries: Iterable[Canary]) -> None:
        self._views = {name: ahocorasick.Automaton() for name in ("raw", "normalised", "compact", "lower")}
        for canary in canaries:
            for view, form, needle in _needles(canary.text):
                # one text may be a form of two canaries; both are reported
                findings: list[Finding] = self._views[view].get(needle, [])
                self._views[view].add_word(needle, [*findings, Finding(canary, form)])
        for automaton in self._views.values():
            automaton.make_automaton()

    def find(self, data: bytes, *, text: bool = True) -> set[Finding]:
        """Return every canary in `data`.

        Args:
            data: any bytes.
            text: False for bytes of numbers: what is left of millions of them when all but letters and digits are
                dropped spells a short question by chance, so they are not normalised.
        """
        compact = data.translate(None, _WHITE_SPACE)
        distinct = {
            "raw": data.decode("latin-1"),
            "compact": compact.decode("latin-1"),
            "lower": compact.lower().decode("latin-1"),
        }
        if text:
            distinct["normalised"] = normalised(data.decode("utf-8", "ignore"))
        return {
            finding
            for name, view in distinct.items()
            for _, findings in self._views[name].iter(view)
            for finding in findings
        }


def normalised(text: str) -> str:
    """NFKC, case folded, nothing but letters and digits."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return _NOT_ALPHANUMERIC.sub("", folded)


def _needles(text: str) -> Iterable[tuple[str, str, str]]:
    """(view, form, what to look for there). The bytes of a view are compared as Latin-1 text."""
    data = text.encode()
    plain = normalised(text)
    yield "raw", "raw", data.decode("latin-1")
    yield "raw", "reversed", text[::-1].encode().decode("latin-1")
    yield "normalised", "normalised", plain
    yield "normalised", "reversed", plain[::-1]
    yield "lower", "hex", data.hex()
    for alignment in range(3):
        for encoded in (base64.b64encode(bytes(alignment) + data), base64.urlsafe_b64encode(bytes(alignment) + data)):
            # characters that hold bits of a neighbour differ with it: only those of the canary alone are looked for
            first = -(-alignment * 8 // 6)
            last = (alignment + len(data)) * 8 // 6
            yield "compact", "base64", encoded[first:last].decode("ascii")


@dataclass(frozen=True)
class Planted:
    """The canaries that were planted.

    Attributes:
        canaries: none of them may leave.
        control: part of a run's name, which is allowed to leave, and must be found.
    """

    canaries: tuple[Canary, ...]
    control: str

    def texts(self, silo: str, place: str) -> list[str]:
        return [canary.text for canary in self.canaries if (canary.silo, canary.place) == (silo, place)]

    def environment(self, silo: str) -> dict[str, str]:
        """Variables for a silo's processes."""
        return {f"PLANTED_{number}": text for number, text in enumerate(self.texts(silo, "environment"))}


def plant(sites: Sites, data: DataFolder, seed: int, *, external: Iterable[str] = ()) -> Planted:
    """Put canaries into each silo's rows, file names, configuration, policy, and into lines that raise when parsed.

    Args:
        sites: written, not started.
        data: what they were made from; its files stay as they are.
        seed: of the canaries.
        external: silos whose trainer somebody else starts.

    Raises:
        OperationError: a configuration is not as `make_sites` writes it.
    """
    silos = [site.name for site in sites.silos]
    planted = Planted(make_canaries(seed, silos, tokenizer=data.description.tokenizer), control_text(seed))
    for site in sites.silos:
        source = data.private[site.name]
        collection, folder, inner, name, in_config, in_policy = planted.texts(site.name, "config")
        private = site.folder / folder / inner / f"{name}.jsonl"
        private.parent.mkdir(parents=True)
        own = [canary for canary in planted.canaries if canary.silo == site.name]
        read = read_tasks(source.path)
        rows = rows_of(own, topic=read.rows[0].topic, verifier=source.verifier)
        raising = planted.texts(site.name, "exception")
        good = read.lines + len(rows)
        while raising and len(raising) >= BAD_SHARE_MAX * (good + len(raising)):
            raising.pop()  # of a small file; with so many bad lines the silo would not start
        broken = "".join(f'{{"id": "{text}", "prompt": \n' for text in raising)
        private.write_bytes(source.path.read_bytes() + to_json_lines(rows) + broken.encode())
        edits = {
            r"^  private: \[.*\]$": f'  private: ["{private}"]',
            r"^  collection: .*$": f"  collection: {collection}",
        }
        if site.name in set(external):
            edits[r"^  launch: child$"] = "  launch: external"
        _edit(site.config, edits, comment=in_config)
        _edit(site.folder / "policy.yaml", {}, comment=in_policy)
    return planted


def _edit(path: Path, edits: Mapping[str, str], *, comment: str) -> None:
    text = path.read_text(encoding="utf-8")
    for pattern, line in edits.items():
        matches = re.findall(pattern, text, flags=re.MULTILINE)
        if len(matches) != 1:
            raise OperationError(f"{path} has {len(matches)} lines like {pattern!r}, one is expected")
        text = text.replace(matches[0], line, 1)
    path.write_text(f"{text}# {comment}\n", encoding="utf-8")


class Witness:
    """Canaries and recorder of one federation.

    Args:
        sites: written for this, with the recorder's address as the coordinator's, and not started.
        data: what they were made from.
        seed: of the canaries.
        folder: for what crosses.
        port: the recorder's.
        external: silos whose trainer somebody else starts.
        federation: its name.

    Raises:
        OperationError: as `plant`.
    """

    def __init__(
        self,
        sites: Sites,
        data: DataFolder,
        seed: int,
        folder: Path,
        *,
        port: int,
        external: Iterable[str] = (),
        federation: str = FEDERATION,
    ) -> None:
        def keys(name: str, folder: Path) -> EndKeys:
            return EndKeys(folder / "id" / f"{name}.crt", folder / "id" / f"{name}.key")

        here = sites.coordinator
        self._sites = sites
        self._folder = folder
        self.planted = plant(sites, data, seed, external=external)
        self._recorder = WireRecorder(
            folder,
            coordinator=keys(here.name, here.folder),
            silos={f"spiffe://{federation}/silo/{site.name}": keys(site.name, site.folder) for site in sites.silos},
            trust_root=here.folder / "id" / "federation_ca.crt",
            upstream=sites.listen,
            port=port,
        )

    def start(self) -> None:
        """Start the recorder between the parties. Raises OperationError: the port is taken."""
        self._recorder.start()

    def stop(self) -> None:
        self._recorder.stop()

    def search(self, controls: Iterable[str] = ()) -> WireVerdict:
        """After `stop`. `controls`: texts that were let out; by default the planted one."""
        return search_recordings(self._folder, self.planted.canaries, list(controls) or [self.planted.control])


# ---- afterwards --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WireVerdict:
    """Result of the search.

    Attributes:
        found: canaries that are on the wire, the controls not among them.
        control_found: the search sees what is there: each control is in a message of every silo that sent any.
        messages: complete ones from silos, by (silo, kind): (number, payload bytes).
        cut: calls that ended within a message; they are searched too.
        bytes_searched: of all connections, both ways.
        unreadable: why the search would prove nothing; empty when it does.
    """

    found: frozenset[Finding]
    control_found: bool
    messages: Mapping[tuple[str, str], tuple[int, int]]
    bytes_searched: int
    cut: int = 0
    unreadable: str = ""


def search_recordings(folder: Path, canaries: Iterable[Canary], controls: Iterable[str]) -> WireVerdict:
    """Search everything that crossed, both ways, for all canaries and for the controls, each of which must be there.

    Raises:
        ValueError: there is no control, so the search could not be seen to work.
    """
    planted = {text: Canary(text, "", "config") for text in controls}
    if not planted:
        raise ValueError("a search without a positive control proves nothing")
    search = Search([*canaries, *planted.values()])
    findings: set[Finding] = set()
    controls_of: dict[str, set[str]] = {}
    cut = 0
    numbers: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    searched = 0
    try:
        for recording in recordings(folder):
            searched += len(recording.raw)
            cut += recording.cut
            findings |= {finding for view, text in recording.views() for finding in search.find(view, text=text)}
            if recording.upward:
                for message in recording.messages:
                    numbers[recording.silo, message.envelope.kind] += 1
                    sizes[recording.silo, message.envelope.kind] += len(message.payload)
                    raw = {finding.canary.text for finding in search.find(message.whole) if finding.form == "raw"}
                    controls_of.setdefault(recording.silo, set()).update(raw & planted.keys())
    except Unreadable as error:
        return WireVerdict(frozenset(), False, {}, searched, unreadable=str(error))
    return WireVerdict(
        frozenset(finding for finding in findings if finding.canary.text not in planted),
        bool(controls_of) and all(raw == planted.keys() for raw in controls_of.values()),
        {key: (numbers[key], sizes[key]) for key in sorted(numbers)},
        searched,
        cut,
    )


def disagreements(sites: Sites, verdict: WireVerdict) -> list[str]:
    """Return where a silo's audit log and the wire count differently."""
    rows = []
    for site in sites.silos:
        logged = sent_by_kind(typed_records(site.audit_log))
        counted = {kind: count for (silo, kind), count in verdict.messages.items() if silo == site.name}
        rows += [
            f"{site.name} {kind}: its log says {logged.get(kind)}, the wire {counted.get(kind)}"
            for kind in sorted(logged.keys() | counted.keys())
            if logged.get(kind) != counted.get(kind)
        ]
    return rows


def figures(planted: Planted, verdict: WireVerdict) -> dict[str, Any]:
    """Return the fields of `fedsilo demo --json` about the wire: two results, and what they rest on."""
    return {
        "canaries_on_wire": None if verdict.unreadable else len({finding.canary for finding in verdict.found}),
        "positive_control_found": verdict.control_found,
        "wire": {
            "canaries": len(planted.canaries),
            "forms": list(FORMS),
            "control": planted.control,
            "messages": sum(count for count, _ in verdict.messages.values()),
            "bytes": verdict.bytes_searched,
            "cut": verdict.cut,
            "found": sorted(
                f"{finding.canary.silo} {finding.canary.place} ({finding.form})" for finding in verdict.found
            ),
            "unreadable": verdict.unreadable,
        },
    }


def fault(sites: Sites, verdict: WireVerdict) -> str:
    """Why the proof does not hold, in a sentence; empty when it does."""
    if verdict.unreadable:
        return f"what crossed cannot be searched: {verdict.unreadable}"
    if verdict.found:
        names = sorted({f"{finding.canary.silo} {finding.canary.place}" for finding in verdict.found})
        return f"{len(names)} planted texts are on the wire: {', '.join(names[:8])}"
    if not verdict.control_found:
        return "the planted control was not found on the wire, so the search proves nothing"
    differing = disagreements(sites, verdict)
    return f"audit logs and wire count differently: {'; '.join(differing)}" if differing else ""
