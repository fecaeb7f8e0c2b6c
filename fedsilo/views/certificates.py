"""Certificates as rows and lines: whose, until when, by which mark, what happens when one ends and what renews it.

Days are counted by the daemon's clock, which is the one that will refuse a certificate. The marks stand at 30, 7 and 1
days before the end, each with its word; a mark is an alarm (`!`) once two thirds of the certificate's own life are over
as well, since a person's certificate of eight hours would otherwise be one from its first minute. Pure: the answer of
the query `certificates` in, lines out.

Does not show: whether a certificate was revoked, for there is no revocation list, and whether to trust it, which
`fedsilo certs check` tells from the files. Key material is in no answer and so in no line.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from fedsilo.control.answers import CertificateRow
from fedsilo.views.columns import Column
from fedsilo.views.lines import Glyphs, Line, Part, field, line, whole, wrap
from fedsilo.views.state import SKEW_SECONDS_MAX, Snapshot, time_of

DAY_SECONDS = 86_400.0
MARK_DAYS = (1, 7, 30)
ALARM_SHARE = 1 / 3  # of its life that is left, as `fedsilo certs check` warns
CA = "CA"
ENDS_NAMED_MAX = 2
ALARMS_NAMED_MAX = 3
NOT_REVOKED = "there is no revocation list: a certificate ends by its date"

_ENDS = {
    "silo": "the silo can reach no coordinator and takes no part in any round: nothing leaves it. What is held there "
    "stays held, and nothing at the site is lost.",
    "coordinator": "no silo talks to this coordinator any more: every run stands still until it is renewed. The silos "
    "keep what they hold.",
    "guard": "guard and trainer no longer take each other's word: the trainer is not started, so no step begins. "
    "Nothing leaves.",
    "trainer": "guard and trainer no longer take each other's word: the trainer gets no further step. Nothing leaves.",
    "operator": "this person can sign no answer any more; looking needs no certificate. Others of the site still can.",
    CA: "every certificate below it ends with it, whatever date stands in them: all parties under it stop at once. "
    "Begin weeks before, for every party has to be given the next root by a way of its own.",
}
_UNKNOWN_END = "whoever asks for it refuses it from then on."


# ---- rows ------------------------------------------------------------------------------------------


class ShownCertificate(CertificateRow):
    """A certificate with how it stands at the moment it is shown.

    Attributes:
        left: until its end, in words.
        days: until its end; 0 where no end can be read or no clock is known.
        soon: it is good as it is, and within a mark of its end.
    """

    state: str
    style: str
    left: str
    days: float
    soon: bool


def certificate_id(row: CertificateRow) -> str:
    """Return what names it: a file holds one certificate; what came without a file has its fingerprint."""
    return " ".join(filter(None, (row.whose, row.file or row.fingerprint)))


def certificate_rows(answer: Sequence[CertificateRow], now: float, glyphs: Glyphs) -> list[ShownCertificate]:
    """Return the daemon's rows with how each stands now, what ends first on top; one whose end nobody can read comes
    last. `now` is by the daemon's clock; 0 while it is not known."""
    rows = []
    for row in answer:
        state, style = state_of(row, now, glyphs)
        left = _ends_in_seconds(row, now)
        rows.append(
            ShownCertificate(
                **vars(row), state=state, style=style, left=left_text(left) or "-", days=left / DAY_SECONDS,
                soon=_ends_soon(row, now),
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: time_of(row.not_after) or math.inf)


def _ends_soon(row: CertificateRow, now: float) -> bool:
    """It is good as it is, and within a mark of its end."""
    since, until = time_of(row.not_before), time_of(row.not_after)
    good = not row.fault and row.in_use is not False and since <= now < until
    return good and until - now <= MARK_DAYS[-1] * DAY_SECONDS


def _ends_in_seconds(row: CertificateRow, now: float) -> float:
    """Until the certificate ends, by the daemon's clock; 0 where no end can be read or no clock is known."""
    until = time_of(row.not_after)
    return until - now if until and now else 0.0


def state_of(row: CertificateRow, now: float, glyphs: Glyphs) -> Part:
    """Return sign and words of how a certificate stands, worst first."""
    since, until = time_of(row.not_before), time_of(row.not_after)
    if row.fault:
        return f"{glyphs.bad} cannot be read", "bad"
    if not until:
        return f"{glyphs.bad} no end is told", "bad"
    if not now:
        return f"{glyphs.away} no clock yet", "dim"
    if now < since:
        return f"{glyphs.bad} NOT YET VALID", "bad"
    if now >= until:
        return f"{glyphs.bad} EXPIRED", "bad"
    if row.in_use is False:
        return f"{glyphs.need} not in use yet", "warn"
    left = until - now
    mark = next((days for days in MARK_DAYS if left <= days * DAY_SECONDS), 0)
    if not mark:
        return f"{glyphs.live} good", "ok"
    words = f"within {mark} day{'s' if mark > 1 else ''}"
    if since and left > (until - since) * ALARM_SHARE:
        return f"{glyphs.live} {words}", ""
    return f"{glyphs.need} {words}", "bad" if mark == MARK_DAYS[0] else "warn"


def left_text(seconds: float) -> str:
    """Such as 212 d, 14 h or -3 d; nothing where there is nothing to count."""
    if not seconds:
        return ""
    sign, size = ("-" if seconds < 0 else ""), abs(seconds)
    if size >= 2 * DAY_SECONDS:
        return f"{sign}{size // DAY_SECONDS:.0f} d"
    return f"{sign}{size // 3600:.0f} h" if size >= 3600 else f"{sign}{size // 60:.0f} min"


def _pinned_word(row: CertificateRow) -> str:
    if not row.fingerprint or row.pinned is None:
        return ""
    return "root" if row.pinned else "by the root"


COLUMNS = (
    Column("whose", lambda row: (row.whose, ""), 23, worth=0, grows=True),
    Column("state", lambda row: (row.state, row.style), 17, worth=0),
    Column("left", lambda row: (row.left, ""), 6, worth=0, right=True, order=lambda row: row.days),
    Column("role", lambda row: (row.role, ""), 11, worth=2),
    Column("valid until UTC", lambda row: (_minute(row.not_after) or "-", ""), 16, worth=1),
    Column("pinned", lambda row: (_pinned_word(row), ""), 11, worth=5),
    Column("issuer", lambda row: (row.issuer, ""), 18, worth=6, grows=True),
    Column("fingerprint", lambda row: (ends_of(row.fingerprint), "dim"), 13, worth=3),
    Column("names", lambda row: (" ".join(row.names), ""), 20, worth=4, grows=True),
    Column("subject", lambda row: (row.subject, ""), 16, worth=7, grows=True),
)


def _minute(moment: str) -> str:
    return moment[:16].replace("T", " ")


def _second(moment: str) -> str:
    """Return a time as in the table, with its seconds."""
    return f"{moment[:19].replace('T', ' ')} UTC" if time_of(moment) else moment


def ends_of(fingerprint: str) -> str:
    """Both ends of a fingerprint, which people compare by telephone; the whole one is a key away."""
    return f"{fingerprint[:6]}…{fingerprint[-6:]}" if len(fingerprint) > 13 else fingerprint


# ---- head ------------------------------------------------------------------------------------------


def head_lines(rows: Sequence[ShownCertificate], snapshot: Snapshot, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return what needs somebody first, and whether the clocks that judge it agree."""
    alarms = [row for row in rows if row.style in ("bad", "warn")]
    wrong = [row for row in alarms if not row.soon]
    ending = [row for row in alarms if row.soon]
    told: list[Line] = []
    for found, what in ((wrong, "to put right"), (ending, "to renew before the end")):
        if found:
            names = ", ".join(row.whose for row in found[:ALARMS_NAMED_MAX])
            more = f" and {len(found) - ALARMS_NAMED_MAX} more" if len(found) > ALARMS_NAMED_MAX else ""
            bad = any(row.style == "bad" for row in found)
            how = "" if told else " (enter says how)"
            told += wrap(f"{glyphs.need} {len(found)} of {len(rows)} {what}{how}: {names}{more}", cells,
                         "bad" if bad else "warn")[:2]  # fmt: skip
    if ending and any(row.soon and row not in alarms for row in rows):
        text = f"{glyphs.need} within: two thirds of its own life are over; {glyphs.live} within: not yet, no alarm"
        told += wrap(text, cells, "dim")[:2]
    if rows and not alarms:
        told += wrap(f"{glyphs.live} {len(rows)} certificates, none is near its end for its kind", cells, "ok")[:1]
    return [*told, *_next_lines(rows, cells), *clock_lines(snapshot, cells, glyphs)]


def _next_lines(rows: Sequence[ShownCertificate], cells: int) -> list[Line]:
    """Return what ends within a day, or else what ends first. People's certificates are made for hours, so their end is
    no alarm, and yet nobody answers a release without one."""
    ahead = [row for row in rows if row.days > 0]
    soon = [row for row in ahead if row.days <= 1.0] or ahead[:1]
    if not soon:
        return []
    told = [f"{row.whose} in {row.left}" for row in soon[:ENDS_NAMED_MAX]]
    more = f" and {len(soon) - ENDS_NAMED_MAX} more" if len(soon) > ENDS_NAMED_MAX else ""
    people = any(_life_seconds(row) <= DAY_SECONDS and row.role == "operator" for row in soon)
    name = "ends next "
    shown = wrap(f"{', '.join(told)}{more}", max(cells - len(name), 20))
    lines = [line((name if not index else " " * len(name), "dim"), *row) for index, row in enumerate(shown[:2])]
    hint = "a person's certificate lasts some hours and is made anew when needed"
    return [*lines, *(wrap(hint, cells, "dim")[:1] if people else [])]


def _life_seconds(row: CertificateRow) -> float:
    since, until = time_of(row.not_before), time_of(row.not_after)
    return until - since if since and until else math.inf


def clock_lines(snapshot: Snapshot, cells: int, glyphs: Glyphs) -> list[Line]:
    """Whose clock counts, and how far this machine's differs from it."""
    skew = snapshot.skew_seconds
    if snapshot.state is None:
        return []
    if snapshot.link.banner:
        return wrap("days are counted from the time of what is shown, not from now", cells, "dim")[:1]
    if abs(skew) > SKEW_SECONDS_MAX:
        way = "ahead of" if skew > 0 else "behind"
        text = f"{glyphs.need} clock skew: the daemon's clock is {abs(skew):.0f} s {way} this machine's; "
        return wrap(text + "days here count by the daemon's. Set the wrong one right (NTP) before renewing.", cells,
                    "warn")[:2]  # fmt: skip
    return [line(("clock skew ", "dim"), f"{abs(skew):.0f} s", (" between the daemon and this machine", "dim"))]


# ---- one whole -------------------------------------------------------------------------------------


def detail_lines(row: CertificateRow, now: float, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return one certificate whole: its state, what happens when it ends, what renews it, and every other field."""
    state, style = state_of(row, now, glyphs)
    left = _ends_in_seconds(row, now)
    lines = [*field("whose", row.whose, cells, "strong"), *field("state", state, cells, style)]
    if row.fault:
        lines += field("fault", row.fault, cells, "bad")
        lines += field("file", row.file, cells)
        return [*lines, line(""), *field("look", f"fedsilo certs show {shlex.quote(row.file)}", cells)]
    life = time_of(row.not_after) - time_of(row.not_before)
    until = f"{_second(row.not_after)}  {_left_words(left)}"
    lines += field("valid until", until, cells)
    lines += [line(""), line(("when it ends", "strong")), *wrap(_ENDS.get(row.role, _UNKNOWN_END), cells)]
    lines += [line(""), line(("what renews it", "strong"))]
    for who, command in renewal_of(row):
        lines += wrap(who, cells, "dim")
        lines += [line("  ", *each) for each in whole(command, cells - 2, "accent")]
    lines.append(line(""))
    facts = [
        ("subject", row.subject), ("role", row.role),
        *(("names" if not index else "", name) for index, name in enumerate(row.names or ["none"])),
        ("issuer", row.issuer), ("fingerprint", row.fingerprint), ("valid from", _second(row.not_before)),
        ("life", f"{left_text(life)} in all" if life > 0 else ""),
        ("pinned", {
            "root": "yes: a root that this daemon takes nobody else's word for",
            "by the root": "no: it is good as long as a pinned root vouches for it",
        }.get(_pinned_word(row), "")),
        ("in use", {
            True: "yes", False: "no: the daemon still runs with the one before; it reads the file when it starts",
        }.get(row.in_use, "") if row.in_use is not None else ""),
        ("file", row.file), ("revoked", NOT_REVOKED),
    ]  # fmt: skip
    for name, text in facts:
        lines += field(name, text, cells) if text else []
    return lines


def renewal_of(row: CertificateRow) -> list[tuple[str, str]]:
    """Return who does what, and the command; the keys stay the same, since logs and pins know a party by them."""
    role, file = row.role, row.file or "FILE.crt"
    if role == CA:
        return [
            ("a root is not renewed: a new one is made, in a new folder", "fedsilo certs ca-init NAME --kind KIND "
             "--out FOLDER"),
            ("then every party below it asks again, with the keys that it has", "fedsilo certs renew --token TOKEN "
             "--out FOLDER"),
        ]  # fmt: skip
    name = next((each.rpartition("/")[2] for each in row.names if each.startswith("spiffe://")), "")
    identity = f"{role or 'ROLE'}/{name or 'NAME'}"
    folder = shlex.quote(file.rpartition("/")[0] or ".")
    authority = "the consortium" if role in ("silo", "coordinator") else "this site's CA"
    dns = " --dns HOST" if role == "coordinator" else ""
    restart = "" if role == "operator" else "; the daemon reads it when it is started again"
    return [
        (f"{authority} makes a token, good once", f"fedsilo certs invite {shlex.quote(identity)} --ca CA_FOLDER"),
        ("whoever has the keys asks with them", f"fedsilo certs renew --token TOKEN --out {folder}"),
        (f"{authority} signs{restart}", f"fedsilo certs sign REQUEST --ca CA_FOLDER{dns} --out {shlex.quote(file)}"),
    ]


def _left_words(seconds: float) -> str:
    if not seconds:
        return ""
    return f"in {left_text(seconds)}" if seconds > 0 else f"ended {left_text(-seconds)} ago"
