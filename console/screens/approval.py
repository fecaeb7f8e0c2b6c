"""Screen 3, one release: every fact that a person needs, and from here only the answer.

The screen keeps the release as it was shown. When the daemon holds other bytes, another policy or another revision,
the screen greys out and neither answer works: approve exactly what was shown. Each finding is opened before `A` works,
for this release as it was shown; what is found later is to be opened too. The daemon asks for the same (threat T36).
Below it are the screens with texts to scroll through: a finding, the payload, the comparison with the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll

from console.actions import Context, title_of
from console.base import Lines, ScrolledScreen, TextDialog
from console.dialogs import ConfirmDialog, DeferDialog, OrderDialog
from console.lock import Outcome
from console.orders import Order, PayloadReading, approval, choices, payload_reading, rejection
from console.screens.approvals import HistoryScreen
from fedsilo.control.answers import Comparison, HeldPayload, read
from fedsilo.views import overview, releases
from fedsilo.views.lines import Line, line, width_of, wrap
from fedsilo.views.releases import PAYLOAD_AWAY, comparison_lines, finding_lines, payload_lines
from fedsilo.views.state import (
    NO_LONGER,
    Question,
    Release,
    changed_since,
    ended,
    ending_text,
    mapping,
    release_of,
    text_of,
)

COMPARISON, PAYLOAD = "comparison", "payload"  # keys of the answers


class TextScreen(ScrolledScreen):
    """Lines of one release, scrolled.

    Args:
        release: as it was shown.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+d,pagedown", "pages(1)", show=False),
        Binding("ctrl+u,pageup", "pages(-1)", show=False),
        Binding("g,home", "end(False)", show=False),
        Binding("G,end", "end(True)", show=False),
    ]
    own_keys = " esc Back  i JSON  Y Twin  ? Help"

    def __init__(self, release: Release) -> None:
        super().__init__()
        self.release = release

    def action_pages(self, pages: int) -> None:
        self.action_scroll(pages * max(self.room - 1, 1))

    def action_end(self, last: bool) -> None:
        self.body.scroll_to(y=self.body.max_scroll_y if last else 0, animate=False)

    def context(self) -> Context:
        return replace(super().context(), release=self.release.id, digest=f"sha256:{self.release.digest}")


class ComparisonScreen(TextScreen):
    called = "comparison"

    def wants(self) -> Mapping[str, Question]:
        return {COMPARISON: ("approval.comparison", {"release": self.release.id})}

    def lines(self, cells: int) -> list[Line]:
        answer = self.inspected()
        rows = self.awaited_lines(COMPARISON, cells, there=answer is not None)
        return rows if answer is None else [*rows, *comparison_lines(read(Comparison, answer), cells)]

    def inspected(self) -> Any:
        answer = self.fed.snapshot.answers.get(COMPARISON)
        return answer if mapping(answer).get("release") == self.release.id else None

    def crumb(self) -> str:
        return "beside the last one"


class PayloadScreen(TextScreen):
    """What a ticket stands for, which is good for one look: asked for until it is there, and kept by this screen alone.

    Args:
        release: as it was shown.
        ticket: of the daemon, for the signed reading.
    """

    called = "payload"
    own_keys = " esc Back  Y Twin  ? Help"  # of its JSON only a part could be drawn; the lines have all of it
    ALLOW_SELECT: ClassVar[bool] = False  # what is selected may be copied out of the console

    def __init__(self, release: Release, ticket: str) -> None:
        super().__init__(release)
        self._ticket = ticket
        self._shown: HeldPayload | None = None

    def wants(self) -> Mapping[str, Question]:
        return {} if self._shown is not None else {PAYLOAD: ("approvals.payload", {"ticket": self._ticket})}

    def redraw(self) -> None:
        if self._shown is None:
            told = read(HeldPayload, self.fed.snapshot.answers.get(PAYLOAD))
            if told.sha256 == self.release.digest:
                self._shown = told
        super().redraw()

    def lines(self, cells: int) -> list[Line]:
        if self._shown is not None:
            return payload_lines(self._shown, cells, self.fed.glyphs)
        return self.awaited_lines(PAYLOAD, cells, there=False)

    def crumb(self) -> str:
        return "what would leave"


PANELS_CELLS_MIN, PANELS_ROWS_MIN = 100, 30
ENDED = "approval"  # key of the answer
_ANSWERS = ("approve", "reject", "defer")


class ApprovalScreen(ScrolledScreen):
    CSS = """
    ApprovalScreen {
        #head { display: none; }
        #panels { display: none; height: auto; }
        #left-panels, #right-panels { width: 1fr; height: auto; }
        #answers-box { display: none; border: heavy $warning; border-title-color: $warning; }
        &.-panels #column { display: none; }
        &.-panels #head, &.-panels #panels, &.-panels #answers-box { display: block; }
        &.-ascii #answers-box { border: ascii $warning; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("A", "offer('approve')", show=False),
        Binding("R", "offer('reject')", show=False),
        Binding("D", "offer('defer')", show=False),
        Binding("enter,f", "finding", show=False),
        Binding("v", "payload", show=False),
        Binding("d", "difference", show=False),
        Binding("h", "history", show=False),
        Binding("p", "rules", show=False),
        Binding("y", "copy", show=False),
    ]
    called = "approval"

    def wants(self) -> Mapping[str, Question]:
        """Once it is held no more: how it ended, and by whom, until the daemon has told that."""
        asks = self.shown.ended_at and not self._end_told
        return {ENDED: ("approval", {"release": self.shown.id})} if asks else {}

    def __init__(self, release: Release) -> None:
        super().__init__()
        self.shown = release
        self._result: Line | None = None
        self._busy = False
        self._settled = False
        self._end_told = False
        # Ids of the findings that were opened here. What changed is opened as another screen, which begins with none.
        self.opened: frozenset[str] = frozenset()

    def panes(self) -> ComposeResult:
        with VerticalScroll(id="body"):
            yield Lines(id="column")
            yield Lines(id="head")
            with Horizontal(id="panels"):
                with Vertical(id="left-panels"):
                    yield Lines(id="leaves-box", classes="box")
                    yield Lines(id="budget-box", classes="box")
                with Vertical(id="right-panels"):
                    yield Lines(id="policy-box", classes="box")
                    yield Lines(id="diff-box", classes="box")
                    yield Lines(id="findings-box", classes="box")
            yield Lines(id="answers-box", classes="box")

    # ---- drawing -----------------------------------------------------------------------------------

    def draw(self) -> None:
        width, height = self.app.size
        greyed = self.greyed or bool(self._changed())
        panels = width >= PANELS_CELLS_MIN and height >= PANELS_ROWS_MIN and self._draw_panels(self.room, greyed=greyed)
        self.set_class(panels, "-panels")
        if not panels:
            fed = self.fed
            rows = releases.one_column(
                self.shown, width - 2, self.room, time=self.daemon_now, opened=self.opened, person=fed.lock.person,
                banner=fed.snapshot.link.banner,
            )  # fmt: skip
            self.query_one("#column", Lines).draw(rows, greyed=greyed)

    def redraw(self) -> None:
        self._follow()
        super().redraw()

    def _follow(self) -> None:
        """Update the shown release with other people's approvals and with its end."""
        snapshot = self.fed.snapshot
        changed, held = self._changed(), snapshot.release(self.shown.id)
        if self._settled and self.shown.ended_at:
            # a snapshot from before the answer may still come in; what tells of an end cannot be older than it
            self._follow_end(mapping(snapshot.answers.get(ENDED)))
            return
        if not changed:
            # who else approved meanwhile is no change of what is approved
            self.shown = held or self.shown
        elif held is None and not self.shown.ended_at:
            now = snapshot.server_now(self.fed.now())
            self.shown = ended(self.shown, NO_LONGER, self.shown.given, now)
        if held is None and self.shown.ended_at and self.shown.state == NO_LONGER:
            self._follow_end(mapping(snapshot.answers.get(ENDED)))

    def _follow_end(self, answer: Mapping[str, Any]) -> None:
        """Show how the release ended, as the daemon answers when asked. The facts stay as they were shown."""
        if answer.get("id") != self.shown.id or answer.get("digest") != self.shown.digest:
            return
        told = release_of(answer)
        if told.state != "held":
            self._end_told = True
            self.shown = replace(
                ended(self.shown, ending_text(told), told.given, self.shown.ended_at), approvers=told.approvers
            )

    def _changed(self) -> str:
        return changed_since(self.shown, self.fed.snapshot) if self.fed.snapshot.state is not None else ""

    def _draw_panels(self, room: int, *, greyed: bool) -> bool:
        """False where the boxes do not go into the room: one column has the same facts in fewer rows, and what can be
        answered at a glance is not to be scrolled."""
        fed, release = self.fed, self.shown
        width = self.app.size.width - 2
        inner = width // 2 - 4
        head = releases.header(
            release, width, time=self.daemon_now, opened=self.opened, person=fed.lock.person,
            banner=fed.snapshot.link.banner,
        )  # fmt: skip
        answers = releases.answers(release, width - 4)
        difference = releases.difference(release, inner)
        summary = [*releases.policy_summary(release, inner), *releases.uses(release, inner)]
        findings = releases.findings(release, inner)
        budget = releases.budget(release, inner)
        beside = room - len(head) - (len(answers) + 2)
        # the rules give way, so what has a length of its own stands above or below them
        most = beside - (len(difference) + 2) - (len(findings) + 2) - (len(summary) + 2)
        leaves = [
            *releases.leaves(release, inner),
            *(line(("stays ", "dim"), *row) if not index else line("      ", *row)
              for index, row in enumerate(releases.stays(release, inner - 6))),
        ]  # fmt: skip
        rules = releases.rules(release, inner, most=max(most, 1))
        if len(rules) > most or len(leaves) + len(budget) + 4 > beside:
            return False
        self.query_one("#head", Lines).draw(head, greyed=greyed)
        self.box("#leaves-box", f"1 What leaves {fed.snapshot.site}", leaves, greyed=greyed)
        self.box("#policy-box", "2 Policy in force", [*summary, *rules], greyed=greyed)
        self.box("#budget-box", "3 Privacy budget", budget, greyed=greyed)
        self.box("#diff-box", "4 Against the last release", difference, greyed=greyed)
        self.box("#findings-box", "5 Findings", findings, greyed=greyed)
        self.box("#answers-box", "6 Answered" if release.ended_at else "6 If you answer", answers, greyed=greyed)
        return True

    def notices(self, cells: int) -> list[Line]:
        """Return the result of the answer, or a note that the release shown is no longer held as shown."""
        told = super().notices(cells)
        if self._result is not None:
            text, style = "".join(text for text, _ in self._result), self._result[0][1]
            over = overview.over(self.fed.snapshot, self.fed.leaving) if self._settled else []
            if self.shown.ended_at and not self._settled:  # somebody else answered first, and who stands with it
                over = [line((f"{self.shown.id}: {self.shown.state}", "warn"))]
            return [*wrap(text, cells, style)[:3], *over, *(told if not self._settled else [])]
        if self.shown.ended_at:
            return [line((f"{self.shown.id}: {self.shown.state}; nothing can be answered any more", "warn")), *told]
        if changed := self._changed():
            return [line((f"CHANGED: {changed} (esc, then open it again)", "bad")), *told]
        return told

    def crumb(self) -> str:
        return self.shown.id

    def keys(self) -> Line:
        """While facts are below the screen, the key to them stands in place of those that the help has as well."""
        keys = self._keys(below=self.more_below)
        return (*keys, ("  j more below", "accent")) if self.more_below else keys

    def _keys(self, *, below: bool) -> Line:
        why = self.why_not(approve=True)
        if self._settled or self.shown.ended_at:
            return line(" esc Back  n Next  h History  d Diff  p Policy  ? Help")
        if self.fed.snapshot.link.banner:  # of what is played back nothing is answered
            found = "f Finding  " if self.shown.noticed else ""
            return line(f" esc Back  n Next  {found}h History  d Diff  p Policy  ? Help")
        if self.fed.snapshot.link.state == "disconnected":
            return line(" r Try now  esc Back  n Next  p Policy  ? Help")
        other = self.why_not(approve=False)
        unlock = not self.fed.lock.open and not self.fed.read_only
        keys: Line = line(
            (" L Unlock ", "accent") if unlock else "",
            (" A Approve…", "strong" if not why else "gone"),
            ("  R Reject…", "strong" if not other else "gone"),
            ("  D Defer…", "strong" if not other else "gone"),
            "  f Finding" if self.shown.noticed else "  h History",
            "" if below and unlock else "  v Payload",
            "" if below else "  d Diff" if unlock else "  d Diff  p Policy",  # eight, in 80 cells
            "  ? Help",
        )
        if below:
            return keys
        shown = f"  {why}" if why else ""
        return (*keys, (shown, "warn")) if len(shown) + width_of(keys) < self.app.size.width else keys

    # ---- answering ---------------------------------------------------------------------------------

    def why_not(self, *, approve: bool) -> str:
        """Why an answer is off now, or nothing."""
        if self._settled:
            return "it was answered here"
        if self._busy:
            return "an answer is on its way"
        if why := self.fed.why_not_send((approval if approve else rejection)(self.shown)):
            return why
        body = self.body
        if self.too_small or (body.max_scroll_y > 0 and body.scroll_y < body.max_scroll_y and not self._read_to_end):
            return "read to the end first (j)"
        left = self.shown.not_opened(self.opened) if approve else ()
        return f"{releases.unread_text(left)} (f)" if left else ""

    _read_to_end = False

    def action_scroll(self, step: int) -> None:
        super().action_scroll(step)
        self._read_to_end = self._read_to_end or self.body.scroll_target_y >= self.body.max_scroll_y
        self.redraw()

    def act(self, action: str) -> None:
        if action not in _ANSWERS:
            super().act(action)
            return
        if why := self.why_off(action):
            self.fed.say(f"{title_of(action)}: {why}")
            return
        if action == "defer":
            time = self.daemon_now
            self.app.push_screen(DeferDialog(self.shown, time, self.fed.lock.person), self._ordered)
            return
        approve = action == "approve"
        dialog = ConfirmDialog(
            self.shown, approve=approve, signer=self.fed.lock.person, opened=self.opened,
            note="" if approve else self._note,
        )  # fmt: skip

        def answered(answer: Order | None) -> None:
            if not approve:
                self._note = dialog.note
            self._answered(answer, "approving…" if approve else "rejecting…")

        self.app.push_screen(dialog, answered)

    _note = ""  # that a person typed for a no and did not sign yet

    def _ordered(self, order: Order | None) -> None:
        if order is None:
            self.fed.say("cancelled: nothing was asked for")
            return
        self._busy = True
        reads = isinstance(order, PayloadReading)
        self._result = line(("asking for the payload…" if reads else "putting it off…", "warn"))
        self.redraw()
        self.fed.send(order, self._carried_out)

    def _carried_out(self, outcome: Outcome) -> None:
        """Show what came of an order that answers nothing; for a reading, the daemon gave a ticket for one look."""
        self._show(outcome)
        ticket = text_of(outcome.result.get("ticket"))
        if outcome.ok and ticket and self.fed.screen is self:
            self.fed.open_below(PayloadScreen(self.shown, ticket))

    def _show(self, outcome: Outcome) -> None:
        self._busy = False
        self._result = line((outcome.text, "ok" if outcome.ok else "bad"))
        if self.is_mounted:
            self.redraw()
        else:
            self.fed.say(f"{self.shown.id}: {outcome.text}")  # somebody went on meanwhile

    def _answered(self, answer: Order | None, doing: str) -> None:
        if answer is None:
            self.fed.say("cancelled: nothing was answered" + ("; R has your note still" if self._note else ""))
            return
        self._busy = True
        self._result = line((doing, "warn"))  # of the answer, not of the release: a no sends nothing
        self.redraw()
        self.fed.send(answer, self.finished)

    def finished(self, outcome: Outcome) -> None:
        """Show the daemon's answer and keep it on the screen; the facts are from now on those after the answer."""
        self._settled = outcome.ok
        state = text_of(outcome.result.get("state"))
        if outcome.ok and state and state != "held":
            people = outcome.result.get("given")
            given = tuple(map(text_of, people)) if isinstance(people, list) else self.shown.given
            self.shown = ended(self.shown, state, given, self.daemon_now)
        self._show(outcome)

    # ---- reading -----------------------------------------------------------------------------------

    def action_finding(self) -> None:
        """The next finding that was not opened; when each was, from the first one again."""
        noticed = self.shown.noticed
        if not noticed:
            self.fed.say("nothing unusual was found")
            return
        left = self.shown.not_opened(self.opened)
        finding = left[0] if left else noticed[self._again % len(noticed)]
        self._again = 0 if left else self._again + 1
        self.opened |= {finding.id}
        number_of, shown = f"{noticed.index(finding) + 1} of {len(noticed)}", self.shown
        banner = self.fed.snapshot.link.banner
        dialog = TextDialog("Finding", lambda cells: finding_lines(finding, number_of, cells, shown, banner=banner))
        self.app.push_screen(dialog)

    _again = 0

    def action_payload(self) -> None:
        if self._settled or self.shown.ended_at:
            self.fed.say("it is not held any more; what left and was archived: fedsilo audit show RECORD --payload")
            return
        order = payload_reading(self.shown, self.fed.lock.person)
        if self.fed.snapshot.link.banner:
            self.fed.say(PAYLOAD_AWAY)
        elif why := self.fed.why_not_send(order):
            self.fed.say(f"payload: {why}")
        else:
            self.app.push_screen(OrderDialog(order, self.fed.lock.person), self._ordered)

    def action_difference(self) -> None:
        self.fed.open_below(ComparisonScreen(self.shown))

    def action_history(self) -> None:
        self.fed.open_below(HistoryScreen(self.shown.leaves.kinds[0].kind if self.shown.leaves.kinds else ""))

    def action_rules(self) -> None:
        shown = self.shown

        def lines(cells: int) -> list[Line]:
            rows = [row for rule in shown.rules for row in releases.rule_lines(rule, cells)]
            return [*releases.policy_summary(shown, cells), *rows]

        self.app.push_screen(TextDialog("Policy, every rule that applies", lines))

    def action_copy(self) -> None:
        self.fed.copy(f"sha256:{self.shown.digest}")

    def context(self) -> Context:
        shown = self.shown
        return replace(
            super().context(), release=shown.id, digest=f"sha256:{shown.digest}",
            policy_digest=f"sha256:{shown.policy.digest}", shown=shown.shown,
            kind=shown.leaves.kinds[0].kind if shown.leaves.kinds else "",
            findings=tuple(finding.id for finding in shown.noticed if finding.id in self.opened),
        )  # fmt: skip

    def why_off(self, action: str) -> str:
        if action == "payload":
            return self.fed.why_not_send(payload_reading(self.shown, self.fed.lock.person))
        if action not in _ANSWERS:
            return ""
        if why := self.why_not(approve=action == "approve"):
            return why
        late = action == "defer" and not choices(self.shown, self.daemon_now)
        return "it expires before anybody could be asked again" if late else ""

    def inspected(self) -> Any:
        return self.shown
