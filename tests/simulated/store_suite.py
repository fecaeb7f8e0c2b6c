"""What the coordinator asks of its database, whichever it is. A subclass says at which URL; it is collected, this not.

    class TestSqlite(StoreSuite):
        @pytest.fixture
        def url(self, tmp_path): return f"sqlite:///{tmp_path / 'coordinator.db'}"

The database at the URL is empty when a test begins, and keeps what is committed when a `Store` is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from coordinator import outbox
from coordinator import store as db
from coordinator.runs import stored_events, stored_life
from coordinator.store import Store
from fedsilo.protocol import rounds
from fedsilo.protocol.errors import OperationError, UsageError
from fedsilo.protocol.place import Place
from tests.protocol.paper_run import PaperRun, timeless
from tests.simulated.paper_federation import plan_of

LARGEST_ROUND = 2**32 - 1  # of an unsigned 32-bit field of the envelope
LARGEST = 2**63 - 1  # of a signed 64-bit column: sequences and bytes


def run_row(name: str = "run-1", **changes: Any) -> db.Run:
    fields = {"ordinal": 1, "state": "waiting", "request": "{}", "submitted_at": "2026-01-01T00:00:00Z"}
    return db.Run(name=name, **(fields | changes))


def item(session: Session, silo: str, kind: str, run: str = "run-1") -> None:
    outbox.queue(session, silo, Place(run, 0, 0, kind), b"\x00\xff" + kind.encode())


class StoreSuite:
    @pytest.fixture
    def url(self, tmp_path: Any) -> str:
        raise NotImplementedError

    @pytest.fixture
    def opened(self, url: str) -> Iterator[Callable[[], Store]]:
        """Opens the database, each time as a process that has just started."""
        stores: list[Store] = []

        def again() -> Store:
            for store in stores:
                store.close()
            stores.append(Store(url))
            return stores[-1]

        yield again
        for store in stores:
            store.close()

    # ---- transactions ----------------------------------------------------------------------------------

    def test_what_is_committed_is_there_after_a_restart_and_what_failed_is_not(self, opened: Any) -> None:
        store = opened()
        with store.transaction() as session:
            session.add(run_row())
        with pytest.raises(ZeroDivisionError), store.transaction() as session:
            session.add(run_row("run-2"))
            session.flush()
            raise ZeroDivisionError
        with opened().transaction() as session:
            assert session.scalars(select(db.Run.name)).all() == ["run-1"]

    def test_who_waits_for_the_end_of_a_transaction_is_told_of_the_one_end_it_has(self, opened: Any) -> None:
        store, told = opened(), []

        def change(name: str) -> None:
            store.once_committed(lambda: told.append(f"{name} committed"))
            for order in (1, 2):
                store.once_undone(lambda order=order: told.append(f"{name} undone {order}"))

        with store.transaction():
            change("first")
        with pytest.raises(ZeroDivisionError), store.transaction():
            change("second")
            raise ZeroDivisionError
        assert told == ["first committed", "second undone 2", "second undone 1"]

    def test_a_commit_that_the_database_refuses_is_undone_as_well(self, opened: Any) -> None:
        store, told = opened(), []
        with store.transaction() as session:
            session.add(run_row())
        with pytest.raises(IntegrityError), store.transaction() as session:
            store.once_undone(lambda: told.append("undone"))
            session.add(run_row())
        assert told == ["undone"]
        with store.transaction() as session:
            assert session.scalar(select(func.count()).select_from(db.Run)) == 1

    def test_two_threads_lose_no_count(self, opened: Any) -> None:
        store, guard = opened(), threading.Lock()

        def count() -> None:
            for _ in range(20):
                with guard, store.transaction() as session:
                    key = {"silo": "a", "run": "", "round_number": 0, "kind": "control.poll", "direction": "in"}
                    db.count_message(session, **key, payload_bytes=3)

        threads = [threading.Thread(target=count) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with store.transaction() as session:
            [row] = db.traffic_table(session)
        assert (row["messages"], row["bytes"]) == (40, 120)

    def test_a_text_with_a_nul_is_refused_before_the_database_sees_it(self, opened: Any) -> None:
        store = opened()
        with store.transaction() as session:
            session.add(run_row(request=db.as_json({"a": "\0"})))  # escaped, as in all JSON, it is none
        with pytest.raises(UsageError) as refused, store.transaction() as session:
            session.add(run_row("run-2", request="a\0b"))
        assert refused.value.code == "NUL_IN_TEXT"
        with pytest.raises(UsageError), store.transaction() as session:
            session.scalar(select(db.Run).where(db.Run.name == "run\0"))
        with store.transaction() as session:
            assert session.scalars(select(db.Run.name)).all() == ["run-1"]

    # ---- counters --------------------------------------------------------------------------------------

    def test_a_sequence_only_grows_and_takes_the_largest_number(self, opened: Any) -> None:
        store = opened()
        with store.transaction() as session:
            assert db.sequence_of(session, "a", "run-1", "in") == 0
            for value in (5, 3, 9, 8):
                db.raise_sequence(session, "a", "run-1", value)
            db.set_sequence(session, "a", "", "out", LARGEST)
        with opened().transaction() as session:
            assert db.sequence_of(session, "a", "run-1", "in") == 9
            assert db.sequence_of(session, "a", "", "out") == LARGEST
            assert db.sequence_of(session, "a", "run-2", "in") == db.sequence_of(session, "b", "run-1", "in") == 0

    def test_what_the_rules_count_is_replaced_and_kept(self, opened: Any) -> None:
        with opened().transaction() as session:
            assert db.counts_of(session, "a") == ""
            db.set_counts(session, "a", '{"é": 1}')
            db.set_counts(session, "a", '{"é": 2}')
        with opened().transaction() as session:
            assert db.counts_of(session, "a") == '{"é": 2}' and db.counts_of(session, "b") == ""

    def test_a_database_without_a_free_connection_has_a_name(self, opened: Any) -> None:
        store = opened()
        pool = store._engine.pool
        pool._timeout = 0.05
        with ExitStack() as stack:
            for _ in range(pool.size() + max(pool._max_overflow, 0)):
                stack.enter_context(store._engine.connect())
            with (
                pytest.raises(OperationError, match="no connection to the coordinator's database became free"),
                store.transaction() as session,
            ):
                session.add(run_row())
        with store.transaction() as session:
            assert session.get(db.Run, "run-1") is None
            session.add(run_row())

    # ---- the journal of a run --------------------------------------------------------------------------

    def test_the_stored_events_of_a_run_give_its_life_again(self, opened: Any) -> None:
        paper = PaperRun(plan_of(method="fedavg-grpo", silos=("a", "b"), rounds=1))
        for silo in "ab":
            paper.say(rounds.PlanTaken(silo))
        for silo in "ab":
            paper.say(rounds.Contribution(silo, "lora.factors", 1, 0, 1, silo * 64))
        with opened().transaction() as session:
            for event in paper.journal:
                fields = db.as_json(rounds.to_fields(event))
                session.add(db.Transition(run="run-1", ordinal=db.next_ordinal(session, "run-1"), event=fields))
                session.flush()
            session.add(db.Transition(run="run-2", ordinal=1, event="{}"))
        with opened().transaction() as session:
            assert stored_events(session, "run-1") == paper.journal
            assert timeless(stored_life(session, paper.plan)) == timeless(paper.life)
            assert db.next_ordinal(session, "run-1") == len(paper.journal) + 1 and db.next_ordinal(session, "none") == 1

    def test_one_place_of_a_journal_holds_one_event(self, opened: Any) -> None:
        store = opened()
        with store.transaction() as session:
            session.add(db.Transition(run="run-1", ordinal=1, event="{}"))
        with pytest.raises(IntegrityError), store.transaction() as session:
            session.add(db.Transition(run="run-1", ordinal=1, event="[]"))

    def test_one_contribution_is_kept_once(self, opened: Any) -> None:
        def upload() -> db.Upload:
            return db.Upload(run="run-1", round=1, step=0, kind="lora.factors", silo="a", digest="d" * 64,
                             payload_bytes=LARGEST, norm=0.1, received_at="2026-01-01T00:00:00Z")  # fmt: skip

        store = opened()
        with store.transaction() as session:
            session.add(upload())
        with pytest.raises(IntegrityError), store.transaction() as session:
            session.add(upload())
        with store.transaction() as session:
            [kept] = session.scalars(select(db.Upload)).all()
            assert (kept.payload_bytes, kept.norm) == (LARGEST, 0.1)

    # ---- the outbox ------------------------------------------------------------------------------------

    def test_an_outbox_gives_what_is_oldest_and_drops_what_was_taken_in(self, opened: Any) -> None:
        with opened().transaction() as session:
            for silo, kind in (("a", "run.plan"), ("b", "run.plan"), ("a", "round.open"), ("a", "run.end")):
                item(session, silo, kind)
        with opened().transaction() as session:
            first = outbox.first_item(session, "a")
            assert first is not None and (first.kind, first.payload) == ("run.plan", b"\x00\xffrun.plan")
            assert outbox.first_item(session, "a", but=["run-1"]) is None
            assert outbox.never_given(session, "a", "run-1", "run.plan")
            outbox.give(session, "a", first.id, 7)
        with opened().transaction() as session:
            assert not outbox.never_given(session, "a", "run-1", "run.plan")
            assert outbox.take_in(session, "a", 6) == []
            assert [each.kind for each in outbox.take_in(session, "a", LARGEST)] == ["run.plan"]
            assert outbox.take_in(session, "a", LARGEST) == [], "it is gone"
            outbox.withdraw(session, "a", "run-1")
        with opened().transaction() as session:
            assert outbox.first_item(session, "a") is None and outbox.first_item(session, "b") is not None

    def test_the_first_answer_that_held_an_item_counts_and_what_is_not_in_the_newest_is_lost(self, opened: Any) -> None:
        with opened().transaction() as session:
            for kind in ("run.plan", "round.open", "run.end"):
                item(session, "a", kind)
            item(session, "b", "run.plan")
            of_a, of_b = ([each.id for each in outbox.items(session, silo)] for silo in "ab")
            outbox.give(session, "b", of_b[0], 1)
            for number, place in enumerate((of_a[0], of_a[0], of_a[1]), start=4):
                outbox.give(session, "a", place, number)
                given = [each.delivered_sequence for each in session.scalars(select(db.OutboxItem).execution_options(
                    populate_existing=True).where(db.OutboxItem.silo == "a").order_by(db.OutboxItem.id))]  # fmt: skip
                assert given == {4: [4, 0, 0], 5: [4, 0, 0], 6: [outbox.LOST, 6, 0]}[number]
            outbox.give(session, "a", of_a[0], 7)  # given again, it has a number again
        with opened().transaction() as session:
            assert [each.id for each in outbox.take_in(session, "a", 7)] == [of_a[0]]
            assert [each.id for each in outbox.take_in(session, "b", 1)] == of_b, "another silo's is left alone"

    def test_what_is_known_of_an_outbox_is_what_is_in_it(self, opened: Any) -> None:
        """Whether it is empty is kept in memory; each way in which that could be wrong."""
        store = opened()

        def waits() -> bool:
            with store.transaction() as session:
                says = outbox.is_waiting(session, "a")
                assert says == (outbox.first_item(session, "a") is not None)
                return says

        assert not waits() and not waits()
        with store.transaction() as session:
            item(session, "a", "run.plan")
        assert waits()
        with pytest.raises(ZeroDivisionError), store.transaction() as session:
            outbox.withdraw(session, "a", "run-1")
            assert not outbox.is_waiting(session, "a")
            raise ZeroDivisionError
        assert waits(), "that it was taken out was undone"
        with store.transaction() as session:
            outbox.withdraw(session, "a", "run-1")
        assert not waits()
        with pytest.raises(ZeroDivisionError), store.transaction() as session:
            item(session, "a", "run.end")
            raise ZeroDivisionError
        assert not waits(), "that it was put in was undone"
        with store.transaction() as session:
            item(session, "b", "run.plan")
        assert not waits()

    def test_numbers_of_rows_grow_also_across_a_restart(self, opened: Any) -> None:
        with opened().transaction() as session:
            item(session, "a", "run.plan")
            [first] = session.scalars(select(db.OutboxItem.id))
        with opened().transaction() as session:
            item(session, "a", "run.end")
            assert max(session.scalars(select(db.OutboxItem.id))) > first

    def test_a_round_may_have_any_number_that_a_message_can_carry(self, opened: Any) -> None:
        with opened().transaction() as session:
            assert session.get(db.Round, ("run-1", LARGEST_ROUND)) is None
            assert not db.is_round(session, "run-1", LARGEST_ROUND)
            db.note_error(session, run="run-1", round_number=LARGEST_ROUND, silo="a", code="SCREEN")
            db.count_message(session, silo="a", run="run-1", round_number=LARGEST_ROUND, kind="lora.factors",
                             direction="in", payload_bytes=LARGEST)  # fmt: skip
        with opened().transaction() as session:
            assert session.scalars(select(db.Figure.round)).all() == [LARGEST_ROUND]

    # ---- what is read ----------------------------------------------------------------------------------

    def test_only_the_digest_of_a_global_adapter_names_one(self, opened: Any) -> None:
        with opened().transaction() as session:
            session.add(run_row(base_digest="0" * 64, adapter_digest="1" * 64))
            session.add(db.Round(run="run-1", number=1, state="committed", base_digest="0" * 64,
                                 adapter_digest="2" * 64, opened_at="2026-01-01T00:00:00Z"))  # fmt: skip
        with opened().transaction() as session:
            assert [db.may_fetch(session, "hospital_a", digit * 64) for digit in "0123"] == [True, True, True, False]
            assert not db.may_fetch(session, "hospital_a", "")
            assert db.is_round(session, "run-1", 1) and not db.is_round(session, "run-1", 2)

    def test_names_are_in_the_order_of_their_characters(self, opened: Any) -> None:
        names = ["a-1", "a_1", "a1", "_a", "B", "b", "ab", "é", "a b"]
        with opened().transaction() as session:
            for name in names:
                session.add(db.ShownCertificate(silo=name, pem=""))
        with opened().transaction() as session:
            column = db.ShownCertificate.silo
            assert session.scalars(select(column).order_by(column)).all() == sorted(names)
            assert session.scalar(select(func.max(column))) == max(names)

    def test_a_silos_codes_and_isolation_levels_are_kept_in_their_order_and_each_once(self, opened: Any) -> None:
        with opened().transaction() as session:
            for code in ("SCREEN", "DECLINED", "SCREEN"):
                db.note_error(session, run="run-1", round_number=1, silo="a", code=code)
            session.add(db.Figure(run="run-1", round=0, step=0, silo="b", name=db.PLAN_DECLINED, fields="{}"))
            for level in ("namespaces", "waived"):
                fields = db.as_json({"silo": "a", "rung": level})
                session.add(db.Figure(run="run-1", round=0, step=0, silo="a", name=db.ISOLATION, fields=fields))
                session.flush()
        with opened().transaction() as session:
            assert db.errors_of(session, "run-1") == {"a": ["SCREEN", "DECLINED"], "b": ["DECLINED"]}
            assert db.isolation_of(session, "run-1") == {"a": ["namespaces", "waived"]}
