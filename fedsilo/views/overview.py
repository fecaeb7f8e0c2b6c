"""The overview as lines: the bar on top, what needs a person, silos, the round. The screen and `fedconsole --once`
print the same.

At a silo everything is `local`; at a coordinator only what silos released. What another party does not tell reads
`hidden` or `-`, never 0. Pure: snapshot, time and width in, lines out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from fedsilo.control.answers import Halt
from fedsilo.protocol.kinds import TENSOR_KINDS, TEXT_KINDS_OUT
from fedsilo.views.conditions import condition_lines
from fedsilo.views.lines import (
    Glyphs,
    Line,
    Part,
    bar,
    bytes_text,
    clip,
    duration_text,
    flow,
    line,
    table,
    width_of,
    wrap,
)
from fedsilo.views.state import (
    HIDDEN,
    SKEW_SECONDS_MAX,
    CoordinatorState,
    Member,
    Release,
    SiloState,
    Snapshot,
    broken_text,
    halts_of,
    refusal_text,
    text_of,
    time_of,
    until_of,
)

CERTIFICATE_DAYS_SOON = 3  # a certificate lives 7 days and is renewed when a third is left (T33)
DAY_SECONDS = 86400.0
NEED_LINES_MAX = 5  # of one need, in the narrow column of a wide terminal
NOT_YET_TAKEN_UP = "not taken up yet: this silo starts, or is halted"
SINCE_START = "since this coordinator started"
ROUND_FIGURES = (("reward_mean", "reward mean", 1), ("pass_at_1", "pass@1 %", 100), ("kl", "kl", 1))
EQUIVOCATION_KIND = "round.open"  # halted when the coordinator told two silos different things


# ---- what needs a person ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Something that a person should look at.

    Args:
        key: names it for good.
        text: what it is.
        style: warn or bad.
        release: what `enter` opens, if it opens anything.
        twin: the command that deals with it, where the console has no screen for that.
        everywhere: it stands on every screen.
        halted: the kind that is halted, if that is what it is about.
    """

    key: str
    text: str
    style: str
    release: str = ""
    twin: str = ""
    everywhere: bool = False
    halted: str = ""


def needs_of(snapshot: Snapshot, now: float) -> list[Need]:
    """Most urgent first; the order does not change while the set stays the same."""
    needs: list[Need] = []
    time = snapshot.server_now(now)
    match snapshot.state:
        case SiloState() as state:
            if state.halted:
                ends = "silo resume --accept-clock" if state.clock.get("halt") else ""
                told = f"HALTED: {state.halted}: nothing is sent"
                needs.append(Need("halt", told, "bad", twin=ends, everywhere=True))
            if state.waits:
                needs.append(Need("waits", f"WAITS: {state.waits}", "bad", twin="silo status", everywhere=True))
            if differs := text_of(state.clock.get("told")):
                told = f"this silo's clock is {differs}: compare the clocks of both machines"
                needs.append(Need("clock", told, "warn", twin="silo status", everywhere=True))
            if broken := broken_text(state.audit):
                told = f"AUDIT LOG BROKEN at {broken}: 6 shows it; stop this silo and keep its folder"
                needs.append(Need("audit", told, "bad", twin="silo audit verify", everywhere=True))
            needs += [_halted(halt, time) for halt in halts_of(snapshot)]
            needs += [
                Need(release.id, _held(release, time), "warn", release.id)
                for release in state.releases
                if not release.deferred_until(snapshot.viewer, time)
            ]
            if state.adapter_held:
                twin = "silo adapters list"
                told = f"adapter {state.adapter_held[:12]} held: worse here, this silo sits out; after looking: {twin}"
                needs.append(Need("adapter", told, "warn", twin=twin))
            if state.coordinator.link == "down":
                fault = state.coordinator.fault or "no cause told"
                needs.append(Need("link", f"coordinator {state.coordinator.address} down: {fault}", "warn"))
            days = (until_of(state.certificate_until) - time) / DAY_SECONDS
            if days <= CERTIFICATE_DAYS_SOON:
                when = f"ends in {_days(days)}" if days > 0 else "HAS ENDED"
                text = f"this silo's certificate {when}"
                needs.append(Need("certificate", text, "warn" if days > 0 else "bad", everywhere=True))
            needs += [Need(f"trouble {text}", text, "warn", twin="silo check") for text in state.screens.troubles]
        case CoordinatorState() as at_coordinator:
            if at_coordinator.halted:
                needs.append(Need("halt", f"HALTED: {at_coordinator.halted}", "bad", everywhere=True))
            if at_coordinator.waits:
                told = f"WAITS: {at_coordinator.waits}"
                needs.append(Need("waits", told, "bad", twin="coordinator status", everywhere=True))
            if off := text_of(at_coordinator.clock.get("told")):
                told = f"this coordinator's clock is {off}"
                needs.append(Need("clock", told, "bad", twin="coordinator accept-clock", everywhere=True))
            if broken := broken_text(at_coordinator.audit):
                told = f"AUDIT LOG BROKEN at {broken}: 6 shows it; stop it and keep its folder"
                needs.append(Need("audit", told, "bad", twin="coordinator audit verify", everywhere=True))
            for member in at_coordinator.members:
                if member.state == "refused":
                    told = f"{member.silo} refused: {refusal_text(member.refusal or {}) or HIDDEN}"
                    needs.append(Need(f"refused {member.silo}", told, "bad"))
                elif member.state == "silent":
                    seen = time_of(member.last_seen)
                    since = f"for {duration_text(time - seen)}" if seen else SINCE_START
                    told = f"{member.silo} silent {since}: its guard is down or its line is cut; ask its people"
                    needs.append(Need(f"silent {member.silo}", told, "bad"))
                elif member.error:
                    needs.append(Need(f"error {member.silo}", f"{member.silo} reports {member.error}", "warn"))
                if member.clock:
                    told = f"the clock of {member.silo} is {member.clock}: compare the clocks of both machines"
                    needs.append(Need(f"clock {member.silo}", told, "warn"))
    if abs(snapshot.skew_seconds) > SKEW_SECONDS_MAX:
        text = f"clocks differ by {abs(snapshot.skew_seconds):.0f} s: daemon and this machine"
        needs.append(Need("skew", text, "warn", everywhere=True))
    return needs


def _halted(halt: Halt, time: float) -> Need:
    since = f" since {duration_text(time - halt.since)}" if halt.since else ""
    given = f", {len(halt.given)} of {halt.needed} approved its release" if halt.needed else ""
    twin = f"silo approvals release {halt.kind}"
    what = "two transcripts of one round are signed, nothing" if halt.kind == EQUIVOCATION_KIND else "none of it"
    text = f"{halt.kind} HALTED{since}: {what} is sent{given}; after looking: {twin}"
    return Need(f"halt {halt.kind}", text, "bad", twin=twin, halted=halt.kind)


def standing_lines(snapshot: Snapshot, now: float, cells: int, glyphs: Glyphs) -> list[Line]:
    """Return what concerns every screen: a halt, a certificate that ends, clocks that differ."""
    everywhere = [need for need in needs_of(snapshot, now) if need.everywhere]
    return need_lines(everywhere, "", cells, glyphs, most=2)


def _held(release: Release, time: float) -> str:
    kinds = ", ".join(kind.kind for kind in release.leaves.kinds)
    left = release.left_seconds(time)
    ends = "EXPIRED" if left <= 0 else f"ends {duration_text(left)}"
    what = f"kind and size {HIDDEN}" if "leaves" in release.hidden else f"{kinds} {bytes_text(release.leaves.bytes)}"
    hidden_given = f"approvals {HIDDEN}, {release.approvers.needed} needed"
    given = (
        hidden_given if "given" in release.hidden else f"{len(release.given)} of {release.approvers.needed} approved"
    )
    return f"{release.id} held: {what}, {given}, {ends}"


def _days(days: float) -> str:
    return f"{days:.0f} days" if days >= 2 else f"{days * 24:.0f} hours"


def need_lines(needs: list[Need], selected: str, cells: int, glyphs: Glyphs, *, most: int) -> list[Line]:
    """Return one line for each need, the selected one marked; those that do not fit are counted."""
    lines: list[Line] = []
    for need in needs[:most]:
        mark = glyphs.cursor if need.key == selected else " "
        sign = glyphs.bad if need.style == "bad" else glyphs.need
        opens = "  enter: open" if need.release and need.key == selected else ""
        rows = wrap(need.text, max(cells - 4, 20), need.style)
        lines.append(
            line(
                (f"{mark}{sign} ", need.style),
                *rows[0],
                (opens if len(rows) == 1 and width_of(rows[0]) + 17 < cells else "", "dim"),
            )
        )
        lines += [line("   ", *row) for row in rows[1:NEED_LINES_MAX]]
    if len(needs) > most:
        lines.append(line((f"   and {len(needs) - most} more", "dim")))
    return lines


def paused_lines(snapshot: Snapshot, cells: int, glyphs: Glyphs) -> list[Line]:
    """That the coordinator says that it paused the run. It is no need: nobody here can do anything about it."""
    state = snapshot.state
    if not isinstance(state, SiloState) or not state.run_paused:
        return []
    last = ", as it last told" if state.coordinator.link == "down" else ""
    rows = wrap(f"run paused by the coordinator{last}: it goes on when people there resume it", cells - 4, "warn")
    return [line((f" {glyphs.away} " if index == 0 else "   ", "warn"), *row) for index, row in enumerate(rows)]


# ---- tables ----------------------------------------------------------------------------------------


def silos_lines(snapshot: Snapshot, now: float, cells: int, glyphs: Glyphs, *, most: int = 1000) -> list[Line]:
    """Args:
    most: silos; of more than that those with trouble come first, and the rest is counted."""
    match snapshot.state:
        case SiloState() as state:
            return _own_silo(state, snapshot.server_now(now), cells, glyphs)
        case CoordinatorState() as at_coordinator:
            return _members(at_coordinator, snapshot.server_now(now), cells, glyphs, most)
    return [line(("…  …  …", "dim"))]


WAIVED = "walls waived: the trainer reaches files and network here; why: silo check"  # one line of 80 columns


def _own_silo(state: SiloState, time: float, cells: int, glyphs: Glyphs) -> list[Line]:
    sign, style = (
        (glyphs.bad, "bad") if state.halted else (glyphs.need, "warn") if state.releases else (glyphs.live, "ok")
    )
    reward, score = state.figure("reward_mean"), state.figure("pass_at_1")
    sent = sum(row.bytes for row in state.left)
    days = (until_of(state.certificate_until) - time) / DAY_SECONDS
    header = ["", "silo", "state", "round", "reward", "pass@1", "budget", "sent", "cert"]
    row: list[Part] = [
        (sign, style), (state.silo, "strong"), (HIDDEN if "phase" in state.absent else state.phase or "-", style),
        (f"r{state.round}" if state.run else "-", ""),
        (f"{reward.value:.2f}" if reward else "-", ""), (f"{100 * score.value:.1f}" if score else "-", ""),
        (f"DP {state.dp}" if state.dp else "-", "dim"), (bytes_text(sent), ""),
        (f"{math.floor(days)}d" if math.isfinite(days) else "-", "warn" if days <= CERTIFICATE_DAYS_SOON else ""),
    ]  # fmt: skip
    lines = table(header, [row], cells, right=frozenset({3, 4, 5, 6, 7, 8}))
    address = HIDDEN if "address" in state.coordinator.absent else state.coordinator.address
    link = {"live": "ok", "down": "bad"}.get(state.coordinator.link, "dim")
    isolation = text_of(state.trainer.get("isolation"))
    facts = [
        line(("trainer walls ", "dim"), isolation or "not told"),
        line(("coordinator ", "dim"), f"{address} ", (state.coordinator.link, link)),
        line(("audit ", "dim"), f"{state.audit.size} records"),
        line(("other silos ", "dim"), ("hidden: not told to this silo", "dim")),
    ]
    why = wrap(WAIVED, cells, "warn") if isolation == "waived" else []
    return [*lines, *flow(facts, cells), *why]


def _members(state: CoordinatorState, time: float, cells: int, glyphs: Glyphs, most: int) -> list[Line]:
    if not state.members:
        return [line(("no silo is invited yet: coordinator.yaml names them", "dim"))]
    members, rest = state.members, len(state.members) - most
    if rest > 0:
        fine = [member.is_here and not member.error for member in members]
        by_trouble = sorted(zip(fine, members, strict=True), key=lambda pair: pair[0])
        members = tuple(member for _, member in by_trouble[:most])
    rows = [_member(member, time, glyphs) for member in members]
    header = ["", "silo", "state", "round", "step", "pass@1", "in", "seen", "cert", "walls"]
    if cells < 90:
        header, rows = header[:-1], [row[:-1] for row in rows]
    lines = table(header, rows, cells, right=frozenset({3, 4, 5, 6, 7, 8}))
    return [*lines, line((f"and {rest} more: coordinator silos list", "dim"))] if rest > 0 else lines


def standing_text(state: str) -> str:
    return state.replace("_", " ")


def _member(member: Member, time: float, glyphs: Glyphs) -> list[Part]:
    if member.is_dead:
        sign, style = glyphs.bad, "bad"
    elif member.is_here and not member.error:
        sign, style = glyphs.live, "ok"
    else:
        sign, style = glyphs.away, "warn" if member.error or member.state == "only_greets" else "dim"
    last_seen = time_of(member.last_seen)
    seen = duration_text(time - last_seen) if last_seen else "never"
    days = (until_of(member.certificate_until) - time) / DAY_SECONDS
    until = f"{math.floor(days)}d" if math.isfinite(days) else "-"
    return [
        (sign, style), (member.silo, "strong"), (f"{standing_text(member.state)} {member.error}".strip(), style),
        (f"r{member.round}" if member.round else "-", ""), (str(member.step) if member.step else "-", ""),
        (f"{100 * member.pass_at_1:.1f}" if member.pass_at_1 is not None else "-", ""),
        (bytes_text(member.received_bytes) if member.received_bytes is not None else "-", ""),
        (seen, "bad" if member.state == "silent" else ""),
        (until, "warn" if days <= CERTIFICATE_DAYS_SOON else ""),
        (text_of(member.hello.get("isolation")) or "-", ""),
    ]  # fmt: skip


def round_title(snapshot: Snapshot) -> str:
    match snapshot.state:
        case SiloState() as state if state.run:
            return f"Run {state.run} · {state.method} · round {state.round} of {state.rounds}"
        case SiloState() as state if state.last_run.run:
            return f"Run {state.last_run.run} · {state.last_run.state}"
        case CoordinatorState() as at_coordinator if at_coordinator.current:
            run = at_coordinator.current
            return f"Run {run.run} · {run.method} · round {run.round} of {run.rounds}"
    return "Round"


def round_lines(snapshot: Snapshot, cells: int, glyphs: Glyphs) -> list[Line]:
    match snapshot.state:
        case SiloState() as state:
            return _own_round(state, cells, glyphs)
        case CoordinatorState() as at_coordinator:
            return _run_lines(at_coordinator, cells, glyphs)
    return [line(("…", "dim"))]


def over(snapshot: Snapshot, leaving: str) -> list[Line]:
    """Return a note that the run is over and how to go on from here, once it is."""
    state = snapshot.state
    if not isinstance(state, SiloState) or state.run or not state.last_run.run or state.last_run.state == "running":
        return []
    return [line((f"{state.last_run.run} {state.last_run.state}: ", "strong"), (leaving, "accent"))]


def step_of(state: SiloState) -> int:
    """Steps of the round that are begun. What comes after the last one has no step and is told as step 0: while the
    round's update is held, all steps are over."""
    update = any(
        kind.kind in TENSOR_KINDS
        for release in state.releases if release.round == state.round for kind in release.leaves.kinds
    )  # fmt: skip
    return state.local_steps if update and not state.step else state.step


def _own_round(state: SiloState, cells: int, glyphs: Glyphs) -> list[Line]:
    if not state.run and state.last_run.state == "running":
        return [line((f"{state.last_run.run} is {NOT_YET_TAKEN_UP}", "warn"))]
    if not state.run and state.last_run.run:
        return [
            line(("this silo waits for the next run", "dim")),
            line(
                ("what it came to  ", "dim"), f"fedsilo run show {state.last_run.run}", ("  at the coordinator", "dim")
            ),
        ]
    if not state.run:
        return [line(("no rounds yet  ", "dim"), "fedsilo run submit run.yaml", ("  at the coordinator", "dim"))]
    step = step_of(state)
    done = step / state.local_steps if state.local_steps else 0.0
    where = f"step {step}/{state.local_steps} {state.phase}" + (" PAUSED" if state.paused else "")
    lines = [line(*bar(done, min(24, max(cells - width_of([(where, "")]) - 2, 4)), glyphs), " ", where)]
    facts = [
        line((f"{title} ", "dim"), f"{scale * figure.value:.3g}", (f" {figure.source} r{figure.round}", "dim"))
        for name, title, scale in ROUND_FIGURES
        if (figure := state.figure(name))
    ]
    if state.donors.wanted:
        facts.append(line(("donors ", "dim"), f"{state.donors.used} of {state.donors.wanted} wanted"))
    return [*lines, *flow(facts, cells)]


def _run_lines(state: CoordinatorState, cells: int, glyphs: Glyphs) -> list[Line]:
    run = state.current
    if run is None:
        return [line(("no runs yet  ", "dim"), "fedsilo run submit run.yaml")]
    style = {"running": "ok", "finished": "ok", "failed": "bad", "aborted": "bad"}.get(run.state, "warn")
    done = run.round / run.rounds if run.rounds else 0.0
    words = line(" ", (run.state, style), f" round {run.round}/{run.rounds}", f"  {run.reason}" if run.reason else "")
    if not run.silos:
        return [
            line((run.state, style), " for silos: ", *_here(state.members)),
            line(("it begins when all that it names are here; S begins with those that are", "dim")),
        ]
    members = tuple(member for member in state.members if member.silo in run.silos)
    return [
        line(*bar(done, 20, glyphs), *words),
        line(("silos ", "dim"), *_here(members), ("  figures: released only", "dim")),
    ]


def _here(members: tuple[Member, ...]) -> Line:
    """Return the count of silos that are here, and the names of those that are silent or refused."""
    dead = [f"{member.silo} {member.state}" for member in members if member.is_dead]
    here = sum(member.is_here for member in members)
    return line(f"{here} of {len(members)} here", (f", {', '.join(dead)}" if dead else "", "bad"))


def _rank(kind: str) -> int:
    if kind.startswith("control."):
        return 3
    return 0 if kind in TEXT_KINDS_OUT else 1 if kind in TENSOR_KINDS else 2


def left_lines(state: SiloState, cells: int, *, most: int = 1000) -> list[Line]:
    """Return the lines on what left this silo, by kind: text, changes to the model, other content, then the
    protocol's own messages. Where all of them take more than `most` lines, the protocol's own kinds are one row with
    their sum. Text is the last to be cut."""
    if not state.left:
        return [line(("nothing has left this silo", "dim"))]
    order = sorted(state.left, key=lambda row: (_rank(row.kind), row.kind))
    rows: list[list[Part]] = [
        [
            (row.kind, "dim" if row.kind.startswith("control.") else ""),
            (str(row.messages), ""),
            (bytes_text(row.bytes), ""),
        ]
        for row in order
    ]
    own = [row for row in order if row.kind.startswith("control.")]
    if len(rows) + 1 > most and len(own) > 1:
        sums = sum(row.messages for row in own), sum(row.bytes for row in own)
        rows = rows[: len(rows) - len(own)]
        rows.append([(f"control.*, {len(own)} kinds", "dim"), (str(sums[0]), ""), (bytes_text(sums[1]), "")])
    return table(["kind", "messages", "payload"], rows, cells, right=frozenset({1, 2}))


def event_lines(snapshot: Snapshot, cells: int, glyphs: Glyphs, *, most: int) -> list[Line]:
    """Newest first, one line each: a box that is cut at its end loses the oldest."""
    if most <= 0:
        return []
    shown = snapshot.events[-most:][::-1]
    lines = [
        clip(line((event.time[11:19], "dim"), f" {event.name} ", (event.text, "dim")), cells, glyphs.more)
        for event in shown
    ]
    if not lines:
        return [line(("the daemon has told of no event yet", "dim"))]
    if snapshot.events_missed:
        kept = lines[: max(most - 1, 1)]
        lines = [*kept, line((f"{snapshot.events_missed} events missed", "warn"))]
    return lines


@dataclass(frozen=True)
class Lock:
    """Who may currently sign at this console."""

    person: str = ""
    seconds_left: float = 0.0
    read_only: bool = False
    banner: str = ""  # what the console says of its source, such as that a recording is played back

    @property
    def open(self) -> bool:
        return bool(self.person) and not self.read_only and self.seconds_left > 0

    def words(self) -> list[Part]:
        """Return the bar's words for the lock, behind its banner, the whole text first and then shorter ones."""
        words = self._words()
        if not self.banner:
            return words
        (longest, _), (shortest, _), banner = words[0], words[-1], shorter(self.banner)
        return [*((f"{each} {longest}", "warn") for each in banner), (f"{banner[-1]} {shortest}", "warn")]

    def _words(self) -> list[Part]:
        if self.read_only:
            return [("READ-ONLY", "dim")]
        if not self.open:
            return [("LOCKED", "strong")]
        unlocked = f"{self.person} UNLOCKED"
        return [(f"{unlocked} {duration_text(self.seconds_left)}", "warn"), (unlocked, "warn")]


def shorter(told: str) -> list[str]:
    """Return what a source or a recording says of itself, the whole text first and then shorter ones.

    The words in capitals are in each: what it is, and that it holds local data.
    """
    first, *more = told.partition(": ")[0].split(", ")
    without_date = [piece for piece in more if not piece[:1].isdigit()]
    capitals = [piece for piece in without_date if piece.isupper()]
    words = first.split(" ")
    what = " ".join(takewhile(str.isupper, words)) or first
    begins = [[first, *more], [first, *without_date], [first, *capitals], [" ".join(words[:2]), *capitals],
              [what, *capitals], [what, *(piece.removeprefix("WITH ") for piece in capitals)]]  # fmt: skip
    return list(dict.fromkeys([told, *map(", ".join, begins)]))


def link_words(snapshot: Snapshot, now: float, glyphs: Glyphs) -> list[Part]:
    """Return the state of the console's connection, the whole text first and then shorter ones."""
    match snapshot.link.state:
        case "loading":
            return [(f"{glyphs.away} loading", "dim")]
        case "disconnected":
            return [(f"{glyphs.bad} DISCONNECTED", "bad")]
    if snapshot.link.banner:
        return [(text, "warn") for text in shorter(snapshot.link.banner)]
    if snapshot.is_stale(now):
        return [(f"{glyphs.need} STALE {duration_text(snapshot.age_seconds(now))}", "warn")]
    latency = snapshot.link.latency_seconds
    live = f"{glyphs.live} live"
    return [(f"{live} {max(round(1000 * latency), 1)} ms", "ok"), (live, "ok")] if latency else [(live, "ok")]


def top_bar(snapshot: Snapshot, lock: Lock, now: float, cells: int, glyphs: Glyphs) -> Line:
    """Left to right by worth. What does not fit is said in fewer words, or dropped; lock, link and count never are, and
    the party is the last to go: nobody may take one site for another."""
    needs = len(needs_of(snapshot, now))
    match snapshot.state:
        case SiloState() as state:
            context, policy = f"{state.federation}{glyphs.dot}silo:{state.silo}", _policy(state)
        case CoordinatorState() as at_coordinator:
            context = f"{at_coordinator.federation}{glyphs.dot}coordinator:{at_coordinator.coordinator}"
            policy = f"charter {snapshot.policy_digest[:8]}" if snapshot.policy_digest else ""
        case _:
            context, policy = "", ""
    nothing = "nothing needs you" if snapshot.state is not None else "needs: not known yet"
    if isinstance(snapshot.state, SiloState) and "halted" in snapshot.state.absent:
        nothing = f"needs: some {HIDDEN}"  # a halt would not be told
    counts: list[Part] = [(nothing, "dim")]
    if needs:
        counts = [(f"{glyphs.need} {needs_text(needs)}", "warn"), (f"{glyphs.need} {needs}", "warn")]
    party = context.rpartition(glyphs.dot)[2]
    names = [(text, "strong") for text in (context, party, party.partition(":")[2]) if text]
    always = list(_fewer_words(counts, link_words(snapshot, now, glyphs), lock.words()))
    for count, link, locked in always:
        for name in names:
            if _takes([count, name, link, locked]) <= cells:
                more = [(policy, "dim")] if policy else []
                fits = _takes([count, name, link, *more, locked]) <= cells
                return _spaced([count, name, link, *(more if fits else []), locked])
    return _spaced(next((shown for shown in always if _takes(shown) <= cells), always[-1]))


def needs_text(needs: int) -> str:
    """Return the number of things that need the person who looks."""
    return f"{needs} need{'s' if needs == 1 else ''} you"


def _fewer_words(counts: Sequence[Part], links: Sequence[Part], locks: Sequence[Part]) -> Iterator[list[Part]]:
    """The three, each in all its words first; then in fewer, the link before the lock and the count at the end."""
    yield [counts[0], links[0], locks[0]]
    for link in links[1:]:
        yield [counts[0], link, locks[0]]
    for lock in locks[1:]:
        yield [counts[0], links[-1], lock]
    for count in counts[1:]:
        yield [count, links[-1], locks[-1]]


def _takes(parts: Sequence[Part]) -> int:
    """Cells of these parts, a space before the first and two before each other."""
    return width_of(parts) + 2 * len(parts) - 1


def _spaced(parts: Sequence[Part]) -> Line:
    return tuple(piece for index, part in enumerate(parts) for piece in [("  " if index else " ", ""), part])


def _policy(state: SiloState) -> str:
    if not state.policy.digest:
        return "no policy told"
    charter = " with charter" if len(state.policy.made_of) > 1 else ""
    return f"{state.policy.name or 'policy'} {state.policy.digest[:8]}{charter}"


def once_lines(snapshot: Snapshot, now: float, cells: int, glyphs: Glyphs) -> list[Line]:
    """The overview as linear text, without boxes."""
    lines = [top_bar(snapshot, Lock(read_only=True), now, cells, glyphs)]
    lines += condition_lines(snapshot, now, cells, opened_at=now, waits_for="the daemon", below_at=now)
    needs = needs_of(snapshot, now)
    lines += [line(("needs you", "strong"))] if needs else []
    lines += [*need_lines(needs, "", cells, glyphs, most=20), *paused_lines(snapshot, cells, glyphs)]
    lines += [line(("silos", "strong")), *silos_lines(snapshot, now, cells, glyphs)]
    lines += [line((round_title(snapshot), "strong")), *round_lines(snapshot, cells, glyphs)]
    if isinstance(snapshot.state, SiloState):
        lines += [line(("left this silo", "strong")), *left_lines(snapshot.state, cells)]
    return lines
