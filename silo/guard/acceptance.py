"""Which global adapters this site trains from, measured on its own prompts first, and which it holds (T20, T52).

    first step of a round -> is its adapter the last accepted one?      -> train
                          -> measure it, and the last accepted one      -> accepted: train
                                                                        -> drop, too few: held, the round without us
    a person of the site  -> accept anyway | refuse | roll back         -> the next round

The first adapter of a run is measured against the base model. What is known is on the disk before it has an effect, so
a restart neither trains on a held adapter nor measures an accepted one again. Of what was measured nothing crosses:
the coordinator hears one code, ADAPTER_HELD or ADAPTER_REFUSED, and that this silo stands aside.

Without `acceptance:` in the site's configuration nothing is measured or held; what was trained from is kept all the
same, for `silo rollback`.

The rule: both answer the same prompts with the same random numbers. A drop counts that is larger than the site's limit
and whose 95 % interval (`silo.benefit.difference_interval`: paired by prompt, groups as clusters) lies below
zero. Where there is no drop that happens in at most one of forty measurements; how small a drop such prompts show 4
times in 5 is `detectable`. Too few prompts, or groups, hold the adapter as well: a gate that cannot judge does not let
in.

Does not stop: a backdoor whose trigger stands in none of the prompts that are measured; a loss below the limit round by
round; the one code, which tells the federation that such an adapter does worse here (up to one bit a round about the
holdout). A site that refuses alone is outvoted: the quorum goes on without it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fedsilo.control.answers import AdapterLimits, AdapterList, AdapterRow, MeasuredSet, filled, read, to_json
from fedsilo.control.server import Publish
from fedsilo.files.durable import write_durably
from fedsilo.protocol.codec import Buffer
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError, VerificationError, WireCode
from fedsilo.protocol.tasks import LoadAdapter
from silo.benefit import CONFIDENCE, POWER, difference_interval, student_quantile
from silo.config import Acceptance as AcceptanceLimits
from silo.config import SiloConfig
from silo.guard.adapters import AdapterStore
from silo.guard.decisions import Judge, RunView
from silo.measuring import MeasureHoldout, PromptSet

_log = logging.getLogger("fedsilo.silo")

FILE = "acceptance.json"
KEPT = 3  # accepted adapters that a rollback may go back to
HELD_KEPT = 2  # rounds go on while people look, and each may bring another one
REFUSED_KEPT = 64
Outcome = Literal["no_drop", "drop", "too_few"]
REASONS: Mapping[str, str] = {"drop": "HOLDOUT_DROP", "too_few": "HOLDOUT_TOO_FEW"}
DIGITS = 6


@dataclass(frozen=True)
class Verdicts:
    """One adapter, one set. groups: [P] number of each prompt's cluster; correct: [P] right answers of `samples`."""

    groups: tuple[int, ...]
    correct: tuple[int, ...]
    samples: int

    @staticmethod
    def parse(body: bytes | memoryview, samples: int) -> Verdicts:
        """Parse what the trainer reports. Raises OperationError: it does not parse."""
        try:
            fields = json.loads(bytes(body))
            groups, correct = (tuple(fields[name]) for name in ("groups", "correct"))
            if len(groups) != len(correct) or any(type(each) is not int for each in (*groups, *correct)):
                raise ValueError("lists of different lengths, or of more than numbers")
            if any(not 0 <= count <= samples for count in correct) or any(not 0 <= each < 1 << 31 for each in groups):
                raise ValueError("more right answers than answers, or no number of a group")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise OperationError(f"the trainer's verdicts do not parse: {error}", code="TRAINER_CONFUSED") from error
        return Verdicts(groups, correct, samples)

    def same_prompts(self, other: Verdicts) -> bool:
        """Return True if both are about the same prompts, as far as this process can see: it knows no prompt."""
        return (self.groups, self.samples) == (other.groups, other.samples)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Verdicts:
        return Verdicts(tuple(value["groups"]), tuple(value["correct"]), int(value["samples"]))


def judge(before: Verdicts, after: Verdicts, limits: AcceptanceLimits) -> MeasuredSet:
    """Compare two adapters on one set.

    Args:
        before: the last accepted adapter.
        after: the one that comes in, on the same prompts.
        limits: the site's.
    """
    one, other = (np.array(each.correct, dtype=float) / each.samples for each in (before, after))  # [P]
    prompts = len(one)
    spread = difference_interval(other - one, np.array(after.groups)) if prompts else None
    outcome: Outcome = "no_drop"
    detectable = None
    mean = float((other - one).mean()) if prompts else 0.0
    if spread is None or prompts < limits.prompts_min:
        outcome, spread = "too_few", None
    else:
        reach = student_quantile(0.5 + CONFIDENCE / 2.0, spread.degrees) + student_quantile(POWER, spread.degrees)
        # what is found must lie beyond the limit, too
        detectable = round(min(1.0, max(limits.drop_max, reach * spread.standard_error)), DIGITS)
        if spread.high < 0 and mean < -limits.drop_max:
            outcome = "drop"
    return MeasuredSet(
        outcome=outcome,
        prompts=prompts,
        before=round(float(one.mean()), DIGITS) if prompts else 0.0,
        after=round(float(other.mean()), DIGITS) if prompts else 0.0,
        difference=round(mean, DIGITS),
        interval=None if spread is None else (round(spread.low, DIGITS), round(spread.high, DIGITS)),
        detectable=detectable,
    )


def sentence(name: str, figures: MeasuredSet, limits: AcceptanceLimits) -> str:
    """Return the figures of one set in words for the site's people."""
    where = "private holdout" if name == "private" else "held-out set"
    if figures.interval is None or figures.detectable is None:
        return (
            f"{where}: {figures.prompts} prompts are too few to say anything (acceptance.prompts_min is "
            f"{limits.prompts_min})"
        )
    low, high = figures.interval
    shown = (
        f"{100 * figures.before:.1f} % right before, {100 * figures.after:.1f} % with it: "
        f"{100 * figures.difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] "
        f"on {figures.prompts} prompts"
    )
    limit = f"limit -{100 * limits.drop_max:.1f}, a true drop of {100 * figures.detectable:.1f} shows 4 times in 5"
    return f"{where}: {shown}, {limit}" + ("; this is a drop" if figures.outcome == "drop" else "")


@dataclass(frozen=True)
class _Adapter:
    """An adapter that was accepted or is held. verdicts: by set."""

    row: AdapterRow
    verdicts: Mapping[PromptSet, Verdicts]

    @property
    def digest(self) -> str:
        return self.row.digest

    @property
    def after_round(self) -> int:
        return max(self.row.round - 1, 0)

    def to_json(self) -> dict[str, Any]:
        return {**to_json(self.row), "verdicts": {name: asdict(each) for name, each in self.verdicts.items()}}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> _Adapter:
        return _Adapter(
            read(AdapterRow, value), {name: Verdicts.from_json(each) for name, each in value["verdicts"].items()}
        )


@dataclass
class _Known:
    """State of one run, as on the disk. accepted, held (for people): the last ones, newest last."""

    run: str = ""
    accepted: list[_Adapter] = field(default_factory=list)
    held: list[_Adapter] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass
class _Measuring:
    """An adapter that is being measured, with factors of this silo's own where the method leaves it some. before,
    after: by set; asked: what the trainer works on, adapter and set."""

    run: str
    loaded: LoadAdapter
    with_own: bool = False
    before: dict[PromptSet, Verdicts] = field(default_factory=dict)
    after: dict[PromptSet, Verdicts] = field(default_factory=dict)
    asked: tuple[str, PromptSet] = ("", "private")


class Acceptance:
    """Measures each adapter that comes in, and holds one that answers worse than the last accepted one.

    Args:
        config: of the site: its limits (None: nothing is measured) and where to keep what is known.
        judge, adapters: the guard's parts.
    """

    def __init__(self, config: SiloConfig, *, judge: Judge, adapters: AdapterStore, publish: Publish) -> None:
        self._limits = config.acceptance
        self._path = config.state_dir / FILE
        self._judge = judge
        self._adapters = adapters
        self._publish = publish
        self._known = self._read()
        self._measuring: _Measuring | None = None

    def _read(self) -> _Known:
        if not self._path.is_file():
            return _Known()
        try:
            stored = json.loads(self._path.read_text())
            accepted, held = ([_Adapter.from_json(each) for each in stored[name]] for name in ("accepted", "held"))
            return _Known(stored["run"], accepted, held, stored["refused"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise OperationError(
                f"{self._path} cannot be read: {error}", hint="it is written by the daemon alone; put back a copy of it"
            ) from error

    def _write(self) -> None:
        known = self._known
        accepted, held = ([each.to_json() for each in rows] for rows in (known.accepted, known.held))
        stored = {"run": known.run, "accepted": accepted, "held": held, "refused": known.refused}
        write_durably(self._path, json.dumps(stored).encode(), mode=0o600)

    @property
    def held(self) -> str:
        """Digest of the newest adapter that waits for a person; empty where none does."""
        return self._known.held[-1].digest if self._known.held else ""

    # ---- what the loop asks ------------------------------------------------------------------------

    def anchored(self, view: RunView) -> RunView:
        """The next adapter is measured from the last accepted one (T20), and not from one that is held."""
        if self._limits is None:
            return view
        return self._anchored(view)

    def _anchored(self, view: RunView) -> RunView:
        accepted = self._known.accepted if self._known.run == view.run else []
        digest, after_round = (accepted[-1].digest, accepted[-1].after_round) if accepted else ("", 0)
        return replace(view, last_adapter=digest, last_adapter_round=after_round)

    def kept(self, run: str) -> frozenset[str]:
        """Digests of adapters that stay in the store."""
        known = self._known
        return frozenset(each.digest for each in (*known.accepted, *known.held) if known.run == run)

    def due(self, run: str, loaded: LoadAdapter, *, with_own: bool = False) -> MeasureHoldout | WireCode | None:
        """Return what is to be done with a round's adapter before the first step of training on it.

        Args:
            run: the open one.
            loaded: the adapter.
            with_own: this silo computes with factors of its own beside it, which change as it trains. Both adapters
                are then measured with today's.

        Returns:
            None: nothing. A task: for the trainer, with `payload`; `take` gets the answer. A code: this site does not
            train on it, and says so.
        """
        known, digest = self._known, loaded.digest
        if known.run != run:
            known = self._known = _Known(run)
        if known.accepted and known.accepted[-1].digest == digest:
            return None
        if digest in known.refused:
            return WireCode.ADAPTER_REFUSED
        if digest in [each.digest for each in known.held]:
            return WireCode.ADAPTER_HELD
        if self._limits is None:
            self._accept(loaded, "taken", {}, {})
            return None
        if self._measuring is None or (self._measuring.run, self._measuring.loaded) != (run, loaded):
            self._measuring = _Measuring(run, loaded, with_own)
        return self._next(self._measuring)

    @property
    def asked_digest(self) -> str:
        """Digest of the adapter that the task of `due` is about; empty for the base model."""
        assert self._measuring is not None  # noqa: S101  # `due` gave a task
        return self._measuring.asked[0]

    def payload(self) -> Buffer:
        """Return the payload of that adapter; empty for the base model."""
        digest = self.asked_digest
        payload = self._adapters.find(digest) if digest else b""
        if payload is None:
            raise OperationError(f"adapter {digest[:12]}, which was here a moment ago, cannot be read any more")
        return payload

    def _next(self, measuring: _Measuring) -> MeasureHoldout | None:
        assert self._limits is not None  # noqa: S101  # else nothing is measured
        stored: Mapping[PromptSet, Verdicts] = self._known.accepted[-1].verdicts if self._known.accepted else {}
        if measuring.with_own:
            stored = {}  # what the last adapter reaches depends on what this silo has trained since
        for name in self._limits.prompts:
            if name not in measuring.after:
                measuring.asked = (measuring.loaded.digest, name)
                return MeasureHoldout(self._limits.samples, measuring.loaded.round, name)
            if name in measuring.before:
                continue
            known = stored.get(name)
            if known is not None and known.same_prompts(measuring.after[name]):
                measuring.before[name] = known
                continue
            digest = self._last_digest
            if digest and self._adapters.find(digest) is None:
                _log.warning("adapter %s is gone: what comes in is compared with the base model", digest[:12])
                digest = ""
            measuring.asked = (digest, name)
            return MeasureHoldout(self._limits.samples, measuring.loaded.round, name)
        return None

    def take(self, body: Buffer) -> WireCode | None:
        """The trainer's answer. A code: the adapter is held.

        Raises:
            OperationError: it does not parse, or is about other prompts; or it cannot be kept, and then nothing counts.
        """
        measuring, limits = self._measuring, self._limits
        assert measuring is not None and limits is not None  # noqa: S101  # a task was given
        digest, name = measuring.asked
        answer = Verdicts.parse(body, limits.samples)
        if name not in measuring.after:
            measuring.after[name] = answer
        elif digest not in ("", self._last_digest):
            return None  # people chose another one to compare with meanwhile
        elif answer.same_prompts(measuring.after[name]):
            measuring.before[name] = answer
        else:
            raise OperationError("the trainer's verdicts are about different prompts", code="TRAINER_CONFUSED")
        if self._next(measuring) is not None:
            return None
        self._measuring, loaded = None, measuring.loaded
        before, after = measuring.before, measuring.after
        figures: dict[str, MeasuredSet] = {name: judge(before[name], after[name], limits) for name in limits.prompts}
        reasons = sorted({REASONS[each.outcome] for each in figures.values() if each.outcome in REASONS})
        summary = "; ".join(sentence(name, each, limits) for name, each in figures.items())
        self._judge.record(
            "adapter.verdict",
            run=measuring.run,
            round=loaded.round,
            kind="global.adapter",
            decision="hold" if reasons else "allow",
            reasons=reasons,
            detail={"adapter": loaded.digest, "against": self._last_digest, **to_json(figures)},
        )
        if not reasons:
            _log.info("adapter %s of round %d: %s", loaded.digest[:12], loaded.round, summary)
            self._accept(loaded, "measured", figures, after)
            return None
        row = AdapterRow(
            digest=loaded.digest, round=loaded.round, how="", reasons=tuple(reasons), against=self._last_digest,
            figures=figures, said=summary, absent=frozenset({"how"}),
        )  # fmt: skip
        held = _Adapter(row, dict(after))
        self._known.held = [*self._known.held, held][-HELD_KEPT:]
        self._write()
        _log.warning(
            "held: adapter %s of round %d; %s; `silo adapters list` shows it", loaded.digest[:12], loaded.round, summary
        )
        self._publish("adapter.held", {"adapter": loaded.digest, "round": loaded.round, "reasons": reasons})
        return WireCode.ADAPTER_HELD

    @property
    def _last_digest(self) -> str:
        return self._known.accepted[-1].digest if self._known.accepted else ""

    def _accept(
        self, loaded: LoadAdapter, how: str, figures: Mapping[str, MeasuredSet], verdicts: Mapping[PromptSet, Verdicts]
    ) -> None:
        never_held = frozenset({"reasons", "against", "said"})
        row = filled(AdapterRow, digest=loaded.digest, round=loaded.round, how=how, figures=figures, absent=never_held)
        self._add(_Adapter(row, dict(verdicts)))
        self._write()

    def _add(self, adapter: _Adapter) -> None:
        known = self._known
        known.accepted = [*(each for each in known.accepted if each.digest != adapter.digest), adapter][-KEPT:]
        known.held = []  # what is held was compared with another one

    # ---- what people order -------------------------------------------------------------------------

    def require_held(self, run: str, digest: str) -> None:
        """Raises NotFoundError: no adapter is held; ConflictError: others than the person was shown."""
        held = [each.digest for each in self._known.held if self._known.run == run]
        if not held:
            raise NotFoundError("no adapter is held here", hint="`silo adapters list` shows what is")
        if digest not in held:
            raise ConflictError(
                "other adapters are held than the one that was shown", hint="read it again", code="STALE_VIEW"
            )

    def accept(self, digest: str, view: RunView) -> RunView:
        """A held adapter is trained on all the same. Raises OperationError: it cannot be kept; then it stays held."""
        held = next(each for each in self._known.held if each.digest == digest)
        row = replace(held.row, how="person", absent=frozenset())
        self._kept_or_as_before(lambda: self._add(replace(held, row=row)))
        if self._measuring is not None:
            self._measuring.before.clear()
        return self._anchored(view)

    def refuse(self, digest: str) -> None:
        """A held adapter is never trained on in this run. Raises as `accept`."""
        self._kept_or_as_before(lambda: self._refuse({digest}))

    def _refuse(self, digests: Collection[str]) -> None:
        known = self._known
        known.refused = [*(each for each in known.refused if each not in digests), *sorted(digests)][-REFUSED_KEPT:]
        known.held = [each for each in known.held if each.digest not in digests]

    def target(self, run: str, to: str) -> str:
        """Digest of the adapter that a rollback goes back to, which is here and whole.

        Args:
            run: the open one.
            to: digest or its beginning; empty: the last accepted adapter where one is held, else the one before it.

        Raises:
            NotFoundError: there is none, or it is not kept any more.
            ConflictError: more than one begins so.
            VerificationError: its file is not what the digest names.
        """
        known = self._known
        digests = [each.digest for each in known.accepted] if known.run == run else []
        known_here = f"accepted here: {', '.join(each[:12] for each in digests) or 'none'}"
        if to:
            fits = [each for each in digests if each.startswith(to.removeprefix("sha256:"))]
            if len(fits) > 1:
                raise ConflictError(f"more than one accepted adapter begins with {to[:64]!r}", hint=known_here)
        else:
            fits = digests[-1:] if known.held else digests[-2:-1]
        if not fits:
            what = f"adapter {to[:64]!r} is none of those" if to else "there is no earlier adapter"
            raise NotFoundError(f"{what} that a rollback can go back to", hint=known_here)
        if self._adapters.find(fits[0]) is None:
            if self._adapters.has_file(fits[0]):
                raise VerificationError(
                    f"the file of adapter {fits[0][:12]} is not what its digest names", hint=known_here
                )
            raise NotFoundError(f"adapter {fits[0][:12]} is not here any more", hint=known_here, code="ADAPTER_GONE")
        return fits[0]

    def roll_back(self, digest: str, view: RunView) -> RunView:
        """Go on from `target`: what was accepted after it, or is held, is refused from here on. Raises as `accept`."""
        self._kept_or_as_before(lambda: self._back_to(digest))
        if self._measuring is not None:
            self._measuring.before.clear()
        self._publish("adapter.rolled_back", {"adapter": digest})
        return self._anchored(view)

    def _back_to(self, digest: str) -> None:
        known = self._known
        place = [each.digest for each in known.accepted].index(digest)
        self._refuse({each.digest for each in (*known.accepted[place + 1 :], *known.held)})
        known.refused = [each for each in known.refused if each != digest]
        known.accepted = known.accepted[: place + 1]

    def _kept_or_as_before(self, change: Callable[[], None]) -> None:
        before = replace(self._known)
        try:
            change()
            self._write()
        except OperationError:
            self._known = before
            raise

    def is_refused(self, digest: str) -> bool:
        return digest in self._known.refused

    def view(self, arguments: Mapping[str, Any]) -> AdapterList:
        """The query `adapters`: limits, what was accepted, what is held, newest first, and refused. Local."""
        known, limits = self._known, self._limits
        return AdapterList(
            run=known.run,
            limits=None if limits is None else read(AdapterLimits, limits.model_dump()),
            accepted=tuple(each.row for each in reversed(known.accepted)),
            held=tuple(each.row for each in reversed(known.held)),
            refused=tuple(known.refused),
        )
