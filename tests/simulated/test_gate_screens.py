"""Text screens through the real gate (threats T14 to T18, T21): each refusal beside the same message without a hit."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError
from policies import screens
from policies.replay import replayed
from silo.guard.commands import Halts
from silo.guard.messages import Allowed, Denied
from tests.policies import setting
from tests.simulated import screening as site
from tests.world import Bench, command

DAY_SECONDS = 86400.0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with closing(site.bench(tmp_path, site.policy())) as made:
        yield made


def texts_of(payload: bytes) -> list[str]:
    return [
        response.text for prompt in codec.decode(pb.PublicResponses, payload).prompts for response in prompt.responses
    ]


def reasons(denied: object) -> tuple[str, ...]:
    assert isinstance(denied, Denied)
    return denied.decision.reasons


def whole_log(bench: Bench) -> str:
    return json.dumps(list(bench.audit.records()))


@pytest.mark.parametrize(("second", "leaves"), [(20.0, True), (31.0, False)])
def test_screens_that_take_longer_than_they_may_deny_the_message(tmp_path: Path, second: float, leaves: bool) -> None:
    """Each look at the clock finds it `second` seconds later; there are three texts and one screen."""
    ticks = itertools.count(0.0, second / 2)
    slow = site.Screens(canaries=(site.CANARY,), monotonic=lambda: next(ticks))
    with closing(site.bench(tmp_path / "a", site.policy(["canary"]), screens=slow)) as bench:
        offered = bench.responses((1, ("12",)), (4, ()), (7, ("it is 12", "12")))
        assert isinstance(offered, Allowed) if leaves else "SCREEN_FAILED" in reasons(offered)


# ---- what a hit does -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", site.NAMES)
def test_T15_a_planted_text_is_withheld_by_the_screen_that_knows_it_and_leaves_without_that_screen(
    tmp_path: Path, name: str
) -> None:
    planted = site.PLANTED[name]
    others = [other for other in site.NAMES if other != name]
    with closing(site.bench(tmp_path / "with", site.policy([name]))) as bench:
        offered = bench.responses((1, ("12", planted)), (4, ()), (7, ("it is 12",)))
        assert isinstance(offered, Allowed)
        assert texts_of(offered.payload) == ["12", "it is 12"]
        record = bench.events("egress.decision")[0]
        assert record["facts"]["transform"] == {"responses_withheld": 1}
        assert record["facts"]["offered"]["responses_hit"] == 1
        assert all(code.startswith(f"{name}/") for code in record["facts"]["offered"]["screen_hits"])
        assert record["facts"]["final"]["screens"].keys() == {name}
        assert record["facts"]["final"]["responses_hit"] == 0
        hit = bench.events("screen.hit")[0]
        assert hit["detail"]["responses"] == 1
        assert planted[:10] not in whole_log(bench)
    with closing(site.bench(tmp_path / "without", site.policy(others))) as bench:
        offered = bench.responses((1, ("12", planted)), (4, ()), (7, ("it is 12",)))
        assert isinstance(offered, Allowed)
        assert texts_of(offered.payload) == ["12", planted, "it is 12"]
        assert bench.events("screen.hit") == []


def test_clean_answers_pass_all_screens(bench: Bench) -> None:
    offered = bench.responses((1, ("12", "ten and two make 12")), (4, ()), (7, ()))
    assert isinstance(offered, Allowed)
    final = bench.events("egress.decision")[0]["facts"]["final"]
    assert sorted(final["screens"]) == list(site.NAMES)
    assert (final["screen_hits"], final["screens_failed"], final["responses_hit"]) == ({}, [], 0)


def test_T18_the_wire_of_a_withheld_answer_is_that_of_one_graded_wrong(tmp_path: Path) -> None:
    """Envelope, signature, sequence and payload, byte for byte."""
    withheld, wrong = (site.bench(tmp_path / name, site.policy()) for name in ("withheld", "wrong"))
    wires = []
    # A wrong answer is one that the trainer never offers; its prompt keeps its number of samples.
    for bench, texts in ((withheld, ("12", site.PLANTED["overlap"])), (wrong, ("12",))):
        offered = bench.responses((1, texts), (4, ()), (7, ("12",)))
        assert isinstance(offered, Allowed)
        bench.gate.transmit(offered)
        wires.append([(envelope.SerializeToString(), payload) for envelope, payload in bench.channel.sent])
        bench.close()
    assert len(wires[0]) == 1
    assert wires[0] == wires[1]


@pytest.mark.parametrize("planted", [None, *site.NAMES])
def test_T18_the_screens_run_once_over_all_texts_hit_or_no_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str | None
) -> None:
    runs: list[tuple[tuple[str, ...], int]] = []
    real = screens.screen_texts

    def counted(definitions: Any, names: Any, material: Any, texts: Any, *more: Any) -> Any:
        runs.append((tuple(names), len(texts)))
        return real(definitions, names, material, texts, *more)

    monkeypatch.setattr(screens, "screen_texts", counted)
    with closing(site.bench(tmp_path, site.policy())) as bench:
        first = site.PLANTED[planted] if planted else "12"
        assert isinstance(bench.responses((1, (first, "12", "12")), (4, ("12",)), (7, ())), Allowed)
        assert bench.screens.runs == 1
    assert runs == [(site.NAMES, 4)]


def test_own_answers_keep_the_numbers_that_the_trainer_knows(tmp_path: Path) -> None:
    """The coordinator names an own answer by its place in what was sent; the trainer counts what it offered."""
    with closing(site.bench(tmp_path, site.policy(ruleset="pubswap-random"))) as bench:
        bench.gate.transmit(bench.responses((1, (site.PLANTED["canary"], "12", "9")), (4, ()), (7, ("12",))))
        donors = pb.PublicDonors(prompts=[pb.PromptDonors(prompt_index=1), pb.PromptDonors(prompt_index=7)])
        for position in (0, 1, 2):
            donors.prompts[0].donors.add(origin="hospital_a", position=position)
        donors.prompts[1].donors.add(origin="hospital_a", position=0)
        let_in = bench.poll("public.donors", donors, step=2)
        # The first of three was withheld: 0 and 1 of what was sent are 1 and 2 here, and 2 was never sent.
        assert [[donor.position for donor in prompt.donors] for prompt in let_in.prompts] == [[1, 2], [0]]


# ---- hold ------------------------------------------------------------------------------------------


def test_T15_a_hit_may_wait_for_as_many_persons_as_the_kind_asks_for(tmp_path: Path) -> None:
    with closing(site.bench(tmp_path, site.policy(on_hit="hold", persons=2))) as bench:
        assert isinstance(bench.responses((1, ("12",)), (4, ()), (7, ())), Allowed)  # no hit, nobody is asked
        bench.judge.view = replace(bench.judge.view, open_step=4)
        held = bench.responses((0, (site.PLANTED["canary"],)), (2, ()), (3, ()), step=4)
        release = bench.hold(held)
        assert held.decision.reasons == ("SCREEN_HIT",)
        assert "1 responses with hits (canary/" in bench.view(release)["findings"]
        assert bench.approve(release, "alice") is None
        with pytest.raises(ConflictError):  # nobody counts twice
            bench.approve(release, "alice")
        settled = bench.approve(release, "carol")
        assert settled is not None and settled.allowed is not None
        assert settled.allowed.payload == held.payload
        assert site.PLANTED["canary"] in texts_of(held.payload)[0]


def with_hits(bench: Bench, count: int) -> Any:
    return bench.responses((1, (site.PLANTED["canary"],) * count), (4, ()), (7, ()))


def test_T36_what_persons_approved_and_the_policy_denies_by_then_is_shown_as_denied(tmp_path: Path) -> None:
    """Two releases of one step are held and approved: the second one is over what the policy lets out in a step."""
    with closing(site.bench(tmp_path, site.policy(on_hit="hold"))) as bench:
        outcomes = []
        for release in [bench.hold(with_hits(bench, 1)) for _ in range(2)]:
            settled = bench.approve(release)
            assert settled is not None
            outcomes.append((settled.outcome, settled.release.state, bench.ledger.release(release.id).state))
        assert outcomes == [("allowed", "approved", "approved"), ("denied", "denied", "denied")]


@pytest.mark.parametrize("late_seconds", [0.0, -1.0])
def test_T36_a_hold_that_is_over_is_approved_by_nobody(tmp_path: Path, late_seconds: float) -> None:
    """Also before the loop has come round to end it."""
    with closing(site.bench(tmp_path, site.policy(on_hit="hold"))) as bench:
        release = bench.hold(with_hits(bench, 1))
        yes, code = bench.answer(release), "EXPIRED"
        bench.clock_now = release.expires_at + late_seconds
        if late_seconds < 0:
            _, settled = bench.releases.approve(yes)
            assert settled is not None and settled.allowed is not None
            yes, code = bench.answer(release, person="carol"), "NOT_HELD"
        with pytest.raises(ConflictError) as refused:  # once it has ended, nobody's answer is even written down
            bench.releases.approve(yes)
        assert refused.value.code == code
        assert len(bench.events("approval.grant")) == len(bench.ledger.approvals(release.id)) == (late_seconds < 0)


def test_T36_approval_is_of_these_bytes_and_no_others(tmp_path: Path) -> None:
    with closing(site.bench(tmp_path, site.policy(on_hit="hold"))) as bench:
        release = bench.hold(with_hits(bench, 1))
        with pytest.raises(ConflictError):
            bench.approve(release, digest="0" * 64)
        assert bench.channel.sent == []
        settled = bench.approve(release)
        assert settled is not None and settled.allowed is not None


# ---- what cannot be screened -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["overlap", "canary"])
def test_T15_a_screen_without_its_material_denies_the_message(tmp_path: Path, name: str) -> None:
    bare = site.screens(tmp_path / "none", canaries=(), index=False)
    message = ((1, ("12",)), (4, ()), (7, ()))
    with closing(site.bench(tmp_path / "bare", site.policy([name]), screens=bare)) as bench:
        assert reasons(bench.responses(*message)) == ("SCREEN_FAILED",)
        assert bench.events("egress.decision")[0]["facts"]["final"]["screens_failed"] == [name]
        assert [name in trouble for trouble in bench.judge.screen_troubles()] == [True]
    with closing(site.bench(tmp_path / "whole", site.policy([name]))) as bench:
        assert isinstance(bench.responses(*message), Allowed)
        assert bench.judge.screen_troubles() == []


def test_a_screen_that_raises_denies_the_message_and_withholds_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: Any) -> Any:
        raise RecursionError

    with monkeypatch.context() as patch:
        patch.setattr(screens, "screen_texts", broken)
        assert reasons(bench.responses((1, ("12",)), (4, ()), (7, ()))) == ("SCREEN_FAILED",)
    assert bench.events("egress.decision")[0]["facts"]["transform"] == {"responses_withheld": 0}
    assert isinstance(bench.responses((1, ("12",)), (4, ()), (7, ())), Allowed)


@pytest.mark.parametrize("spoil", ["link", "folder", "byte", "shorter", "key", "name"])
def test_T14_an_index_that_is_not_the_trainers_file_for_this_key_is_none(tmp_path: Path, spoil: str) -> None:
    scratch = tmp_path / "scratch"
    good = site.screens(scratch)
    assert good.troubles(site.policy(["overlap"])) == []
    (path,) = scratch.glob("overlap-*.index")
    content = path.read_bytes()
    match spoil:
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case "folder":
            path.unlink()
            path.mkdir()
        case "byte":
            path.write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
        case "shorter":
            path.write_bytes(content[:-1])
    screens = site.Screens(canaries=(), key=bytes(32) if spoil == "key" else site.index_key(site.SITE_SECRET))
    screens.take_index(scratch, {"file": f"../scratch/{path.name}" if spoil == "name" else path.name})
    assert len(screens.troubles(site.policy(["overlap"]))) == 1


# ---- hits a day ------------------------------------------------------------------------------------


def halted(bench: Bench, step: int = 2) -> Any:
    """A message without any hit."""
    bench.judge.view = replace(bench.judge.view, open_step=step)
    rows = (1, 4, 7) if step == 2 else (0, 2, 3)
    return bench.responses((rows[0], ("12",)), (rows[1], ()), (rows[2], ()), step=step)


def test_T18_more_hits_than_the_day_may_have_halt_the_kind_until_approvers_release_it(tmp_path: Path) -> None:
    bench = site.bench(tmp_path, site.policy(max_hits_per_day=2, release=2))
    assert isinstance(with_hits(bench, 2), Allowed)  # as many as the limit: still withheld and sent
    bench.judge.view = replace(bench.judge.view, open_step=4)
    over = bench.responses((0, (site.PLANTED["pii_basic"],)), (2, ()), (3, ()), step=4)
    assert reasons(over) == ("SCREEN_HALT",)
    assert [record["reasons"] for record in bench.events("halt")] == [["SCREEN_HALT"]]
    assert reasons(halted(bench, 4)) == ("SCREEN_HALT",)
    # Neither another day nor another process lifts it.
    bench.clock_now += DAY_SECONDS
    bench = bench.restart()
    assert reasons(halted(bench, 4)) == ("SCREEN_HALT",)

    (row,) = Halts(bench.judge, bench.ledger).rows()

    def release(person: str = "alice", roles: tuple[str, ...] = ("approver",), **changes: str) -> bool:
        arguments = {"kind": "public.responses", "digest": row.digest, **changes}
        order = command("approvals.release", arguments, person=person, roles=roles)
        return bool(Halts(bench.judge, bench.ledger).lift_halt(order)["released"])

    with pytest.raises(NotAllowedError):
        release("bob", ("operator", "site-admin"))
    with pytest.raises(ConflictError):
        release(digest="0" * 64)
    with pytest.raises(NotFoundError):
        release(kind="lora.factors")
    assert not release("alice")
    with pytest.raises(ConflictError):
        release("alice")
    assert reasons(halted(bench, 4)) == ("SCREEN_HALT",)
    bench = bench.restart()  # one signature is kept
    assert release("carol") and Halts(bench.judge, bench.ledger).rows() == []
    assert [record["detail"]["persons"] for record in bench.events("release")] == [["alice", "carol"]]
    bench = bench.restart()
    assert isinstance(halted(bench, 4), Allowed)
    bench.close()


def test_T18_a_release_is_signed_over_one_halt_under_one_policy(tmp_path: Path) -> None:
    bench = site.bench(tmp_path, site.policy(max_hits_per_day=0))
    assert reasons(with_hits(bench, 1)) == ("SCREEN_HALT",)
    (row,) = Halts(bench.judge, bench.ledger).rows()
    bench = bench.restart(site.policy(max_hits_per_day=1))
    halts = Halts(bench.judge, bench.ledger)
    arguments = {"kind": "public.responses", "digest": row.digest}
    with pytest.raises(ConflictError):
        halts.lift_halt(command("approvals.release", arguments))
    (again,) = halts.rows()
    assert halts.lift_halt(command("approvals.release", {**arguments, "digest": again.digest}))["released"]
    bench.close()


def test_T18_hits_of_a_message_that_is_denied_or_killed_count_all_the_same(tmp_path: Path) -> None:
    asked = site.policy(["canary", "overlap"], max_hits_per_day=1)
    bench = site.bench(tmp_path, asked)
    step = dataclasses.replace(bench.judge.view, steps={2: (1, 4, 7)})
    bench.judge.view = step
    assert isinstance(with_hits(bench, 1), Allowed)
    # The same step again is over its one message: refused before any screen has run, so nothing is counted.
    assert "PER_STEP" in reasons(with_hits(bench, 1))
    assert bench.judge.book.screen_halts == {}
    bench.close()


def test_T18_a_new_day_begins_with_no_hits(tmp_path: Path) -> None:
    bench = site.bench(tmp_path, site.policy(max_hits_per_day=1))
    assert isinstance(with_hits(bench, 1), Allowed)
    bench.clock_now += DAY_SECONDS
    bench.judge.view = replace(bench.judge.view, open_step=4)
    offered = bench.responses((0, (site.PLANTED["canary"],)), (2, ()), (3, ()), step=4)
    assert isinstance(offered, Allowed)
    bench.close()


# ---- what comes in ---------------------------------------------------------------------------------


def donated(bench: Bench, *donors: tuple[int, str, str]) -> list[str]:
    """The texts that are let in of these."""
    body = bench.poll("public.donors", setting.donors_message(*donors).body, step=2)
    return [donor.response.text for prompt in body.prompts for donor in prompt.donors]


def test_T21_donors_with_a_hit_are_dropped_and_counted_by_the_silo_they_are_from(tmp_path: Path) -> None:
    asked = site.policy([], max_hits_per_day=None, donor_screens=["charset", "pii_basic"])
    bad = [(1, "hospital_b", "12"), (1, "hospital_b", site.PLANTED["charset"]), (4, "hospital_c", "thirteen")]
    with closing(site.bench(tmp_path, asked)) as bench:
        assert donated(bench, *bad) == ["12"]
        facts = bench.events("ingress.decision")[-1]["facts"]
        assert facts["transform"]["donors_dropped"] == {"hospital_b": 1, "hospital_c": 1}
        assert (facts["transform"]["donors_hit"], facts["transform"]["donors_over_share"]) == (1, 0)
        assert facts["offered"]["responses_hit"] == 1
    with closing(site.bench(tmp_path / "without", site.policy([], max_hits_per_day=None))) as bench:
        assert donated(bench, *bad) == ["12", site.PLANTED["charset"]]


@pytest.mark.parametrize(("share", "kept"), [(None, 4), (0.5, 4), (0.25, 2), (0.13, 1), (0.0, 0)])
def test_T21_one_peer_gives_its_share_of_the_steps_answers_at_most(
    tmp_path: Path, share: float | None, kept: int
) -> None:
    """Two prompts of four samples: eight answers are trained on."""
    donors = [(index, "hospital_b", f"{word} 12") for index in (1, 4) for word in ("one", "two")]
    with closing(site.bench(tmp_path, site.policy([], max_hits_per_day=None, share=share))) as bench:
        assert donated(bench, *donors) == [text for _, _, text in donors][:kept]
        assert bench.events("ingress.decision")[-1]["facts"]["transform"]["donors_over_share"] == 4 - kept


# ---- replay ----------------------------------------------------------------------------------------


def test_screens_replay_from_facts_until_their_settings_change(bench: Bench) -> None:
    assert isinstance(with_hits(bench, 1), Allowed)
    (record,) = bench.events("egress.decision")
    assert not replayed(record, bench.policy).changed
    assert replayed(record, bench.policy).decision is not None
    other = setting.policy_of(site.policy_text().replace("max_edit_distance: 1", "max_edit_distance: 2"))
    answer = replayed(record, other)
    assert answer.decision is None
    assert "canary had other settings" in answer.why
    assert "archived text" in answer.why
    # Fewer screens need no text: what is left of them ran.
    assert replayed(record, site.policy(["charset"])).decision is not None


@pytest.mark.parametrize(("tightened", "leaves"), [(True, False), (False, True)])
def test_T15_T34_an_index_that_was_made_for_another_policy_does_not_pass_for_this_ones(
    tmp_path: Path, tightened: bool, leaves: bool
) -> None:
    """A reload takes the public set out of the background; the trainer's index still lets its passages through."""
    text = site.policy_text(["overlap"])
    tight = setting.policy_of(text.replace("background_set: public, ", ""))
    assert tight.file.text_screens.overlap.background_set is None  # type: ignore[union-attr]
    with closing(site.bench(tmp_path, site.policy(["overlap"]))) as bench:
        if tightened:
            bench.judge.policy = tight
        offered = bench.responses((1, ("it is 12",)), (4, ()), (7, ()))
        assert isinstance(offered, Allowed) is leaves
        assert bool(bench.judge.screen_troubles()) is tightened
        if tightened:
            assert "SCREEN_FAILED" in reasons(offered)
            assert "other settings" in bench.judge.screen_troubles()[0]
