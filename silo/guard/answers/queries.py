"""Every query that the control server of a silo answers, by name, and the small ones themselves: lists of what the
ledger keeps, the site's certificates, settings and log.

Names, places and digests; of a key or a secret only where its file is. Of the guard's log whole lines of its own form
are shown, without what the trainer said in them: that process sees private prompts, and what it prints or reports may
quote one (threat T8). So the trainer's own log is not shown here at all; who may read the files of the daemon's user
reads it with `silo logs --trainer`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedsilo.audit.index import LogIndex
from fedsilo.audit.log import AuditLog
from fedsilo.audit.witness import OWN_HISTORY_LOST
from fedsilo.control.answers import (
    AnswerGiven,
    CertificateRow,
    Comparison,
    ContentRow,
    HeldRelease,
    LedgerPage,
    LogLines,
    ReleasePage,
    ReleaseRow,
    SettingRow,
)
from fedsilo.control.audit_queries import AuditView, MessageView
from fedsilo.control.server import QueryArguments, QueryHandler
from fedsilo.control.site_files import certificate_file, settings_of
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import NotAllowedError, NotFoundError
from silo.guard.answers.curves import CurveView, FigureHistory
from silo.guard.answers.limits import LimitsView
from silo.guard.answers.release import ReleaseView
from silo.guard.answers.rounds import RoundView
from silo.guard.decisions import Judge
from silo.guard.ledger import Ledger, Release
from silo.guard.releases import Releases
from silo.guard.site import Site

PAGE_DEFAULT, PAGE_MAX = 100, 500
STATES = ("held", "approved", "rejected", "expired", "missed", "denied")
LINES_DEFAULT, LINES_MAX = 200, 1_000
LOG_BYTES_MAX = 1 << 20  # of the end of a log that is looked at
LINE_CHARACTERS_MAX = 500
_OWN_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ ")
# The guard's own words, behind which the trainer's may begin.
QUOTED = re.compile(r"(the trainer(?:'s| is gone| went away| \w+)?(?!\w)|private lines left out:|cannot run:).+")


class Queries:
    """Queries that a guard answers. Each query runs in the asking thread, and takes none of the loop's time.

    Args:
        site, judge, ledger, audit, releases: read only.

    Attributes:
        index: of the log.
        records: of the log, and its verification.
    """

    def __init__(
        self,
        site: Site,
        judge: Judge,
        ledger: Ledger,
        audit: AuditLog,
        releases: Releases,
        history: FigureHistory,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._site = site
        self._judge = judge
        self._ledger = ledger
        self._releases = releases
        self._shows = ReleaseView(ledger)
        self._clock = clock
        self.index = LogIndex(audit.directory, lambda: audit.size)
        self._messages = MessageView(self.index, lambda: judge.policy)
        self.records = AuditView(
            audit,
            self.index,
            witnesses=self._coordinator,
            contradicting=self._contradicting,
            now_seconds=clock,
        )
        self._limits = LimitsView(
            ledger,
            self.index,
            policy=lambda: judge.policy,
            view=lambda: judge.view,
            schema=site.schema,
            now_seconds=clock,
        )
        self._curves = CurveView(lambda: site.config.silo, ledger, history)
        self._rounds = RoundView(
            lambda: site.config.silo,
            ledger,
            self.index,
            view=lambda: judge.view,
            policy=lambda: judge.policy.digest,
            now_seconds=clock,
        )

    def handlers(self) -> dict[str, QueryHandler]:
        """Return each query by its name."""
        return {
            "approvals": lambda arguments: release_page(self._ledger, arguments),
            "approval": lambda arguments: self.held(self._named(arguments)),
            "approval.comparison": self._comparison,
            "outbox": self._messages.outbox,
            "inbox": self._messages.inbox,
            "audit": self.records.page,
            "audit.status": self.records.status,
            "audit.verify": self.records.verify,
            "limits": self._limits.limits,
            "ledger": lambda arguments: ledger_page(self._ledger, arguments),
            "round": self._rounds.round,
            "curves": self._curves.curves,
            "certificates": lambda arguments: certificates(self._site, arguments, self._clock()),
            "settings": lambda arguments: settings(self._site, arguments),
            "logs": lambda arguments: log_lines(self._site, arguments),
        }

    def held(self, release: Release) -> HeldRelease:
        """Return everything a person must see of a release before answering; facts and digests, never content."""
        # it may change in another thread
        destination, people = dict(self._releases.destination), self._site.roles.people
        return self._shows.view(release, self._judge.policy, destination=destination, people=people)

    def _comparison(self, arguments: Mapping[str, Any]) -> Comparison:
        """Return a whole release beside the last one of its kind; figures and digests, never content."""
        return self._shows.comparison(
            self._named(arguments), policy_digest=self._judge.policy.digest, destination=self._releases.destination
        )

    def _named(self, arguments: Mapping[str, Any]) -> Release:
        """Return the release that a query names. Raises UsageError, NotFoundError."""
        return self._ledger.release(QueryArguments(arguments, "release").text("release"))

    def _coordinator(self) -> tuple[str, ...]:
        return (self._judge.policy.file.federation.coordinator,)

    def _contradicting(self) -> tuple[str, ...]:
        lost = bool(self._judge.halted) and self._judge.halt_code == OWN_HISTORY_LOST
        return self._coordinator() if lost else ()


# ---- held releases and the ledger ----


def release_page(ledger: Ledger, arguments: Mapping[str, Any]) -> ReleasePage:
    """Releases that were ever held, newest first: {before, limit, state, kind}, each optional.

    Raises:
        UsageError: an argument.
    """
    query = QueryArguments(arguments, "before", "limit", "state", "kind")
    limit = query.limit(default=PAGE_DEFAULT, most=PAGE_MAX)
    rows, total = ledger.release_page(
        state=query.text("state", among=STATES), kind=query.text("kind"), before=query.number("before"), limit=limit + 1
    )
    shown = rows[:limit]
    return ReleasePage(
        releases=tuple(_row(ledger, release) for _, release in shown),
        total=total,
        next=shown[-1][0] if len(rows) > limit else None,
    )


def _row(ledger: Ledger, release: Release) -> ReleaseRow:
    given = ledger.approvals(release.id)
    return ReleaseRow(
        id=release.id,
        **release.place._asdict(),
        bytes=release.payload_bytes,
        digest=release.digest,
        policy_digest=release.policy_digest,
        revision=release.revision,
        state=release.state,
        held_since=release.requested_at,
        expires_at=release.expires_at,
        needed=release.persons,
        given=tuple(one.person for one in given if one.verdict == "approve"),
        answers=tuple(AnswerGiven(one.person, one.verdict, utc(one.at), one.reason_code, one.reason) for one in given),
    )


def ledger_page(ledger: Ledger, arguments: Mapping[str, Any]) -> LedgerPage:
    """Runs, budget counts, and content that was let out, newest first: {before, limit}, each optional. There is no
    ledger of a privacy budget, and it says so.

    Raises:
        UsageError: an argument.
    """
    query = QueryArguments(arguments, "before", "limit")
    limit = query.limit(default=PAGE_DEFAULT, most=PAGE_MAX)
    rows, total = ledger.outbox_page(query.number("before"), limit + 1)
    shown = rows[:limit]
    return LedgerPage(
        dp="off: no privacy budget is kept, and none is claimed",
        runs=ledger.runs(),
        history=ledger.book or {},
        content=tuple(
            ContentRow(
                **item.place._asdict(),
                digest=item.digest,
                bytes=item.payload_bytes,
                state=item.state,
                at=utc(item.at),
            )
            for item in shown
        ),
        total=total,
        next=shown[-1].id if len(rows) > limit else None,
    )


# ---- the site itself ----


def certificates(site: Site, arguments: Mapping[str, Any], now: float) -> list[CertificateRow]:
    """Return this site's certificates, as the files are now, and the authorities above them; never a key.

    Raises:
        UsageError: an argument; it takes none.
    """
    QueryArguments(arguments)
    files = site.config.identity
    running = site.identity.peer.fingerprint
    named: list[tuple[str, Path | None, str]] = [
        ("this silo", files.certificate, running),
        ("the link to the trainer", files.link_certificate, ""),
        ("the federation CA", files.federation_ca, ""),
        ("the site CA", files.site_ca, ""),
    ]
    named += [
        (f"the operator {person}", path, "")
        for person in sorted(site.roles.people)
        if (path := files.certificate.parent / f"{person}.crt").is_file()
    ]
    return [certificate_file(whose, file, now, in_use) for whose, file, in_use in named if file is not None]


def settings(site: Site, arguments: Mapping[str, Any]) -> list[SettingRow]:
    """Return every key of the site's configuration as this guard runs with it. No key file is read.

    Raises:
        UsageError: an argument; it takes none.
    """
    QueryArguments(arguments)
    return settings_of(site.config, site.config.source)


def log_lines(site: Site, arguments: Mapping[str, Any]) -> LogLines:
    """The newest lines of the guard's log.

    Args:
        site: whose.
        arguments: {lines} (200, at most 1000), {source: "guard"}.

    Raises:
        UsageError: an argument that is not one of these.
        NotAllowedError: the trainer's log.
        NotFoundError: there is no log.
    """
    query = QueryArguments(arguments, "lines", "source")
    wanted = query.number("lines", default=LINES_DEFAULT, least=1, most=LINES_MAX) or LINES_DEFAULT
    if query.text("source", among=("guard", "trainer")) == "trainer":
        raise NotAllowedError(
            "the trainer's log may quote private text, so the control socket does not show it",
            hint="silo logs --trainer, as the user whose files they are",
        )
    path = site.config.state_dir / "logs" / "guard.log"
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - LOG_BYTES_MAX))
            text = stream.read(LOG_BYTES_MAX).decode("utf-8", "replace")
    except FileNotFoundError as error:
        raise NotFoundError("this guard has no log file yet") from error
    lines = text.split("\n")[1 if size > LOG_BYTES_MAX else 0 : -1]
    own = [line for line in lines if _OWN_LINE.match(line)]
    shown = [QUOTED.sub(r"\1 (left out)", line)[:LINE_CHARACTERS_MAX] for line in own]
    left_out = len(lines) - len(own) + sum(QUOTED.search(line) is not None for line in own)
    return LogLines(lines=tuple(shown[-wanted:]), left_out=left_out)
