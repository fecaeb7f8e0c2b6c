"""The real gate and every kind: under each shipped ruleset what it names leaves and comes in, and nothing else does;
each kind that carries a text of a model is screened, out and in (T14 to T18, T21), beside the same message without a
hit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import NotFoundError, UsageError
from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS, TEXT_KINDS_IN, TEXT_KINDS_OUT
from policies.kind import BASE_DIGEST, FieldClass
from policies.kinds import CATALOGUE, Egress, Ingress
from policies.message import Requests
from policies.model import Policy
from policies.render import RULESETS
from silo.guard.commands import Halts
from silo.guard.decisions import RunView
from silo.guard.messages import Allowed, Denied, Held, IngressDenied
from silo.guard.screens import Screens
from silo.sampling import Training
from tests.policies import setting
from tests.policies.messages import (
    FURTHER_KINDS,
    NAMED,
    OFFERED_KINDS,
    SCHEMAS,
    Case,
    a_method_that_sends_everything,
    answers,
    candidates,
    entries,
    good,
    policy_named,
    probed,
    ruleset_text,
)
from tests.simulated import screening as site
from tests.simulated.screening import screens
from tests.world import STEPS, Bench, command

# These have tests of their own with real screens, donors and transforms.
_ELSEWHERE = {"public.responses"}


@pytest.fixture(autouse=True, scope="module")
def _probe() -> Iterator[None]:
    with a_method_that_sends_everything():
        yield


def bench_of(folder: Path, ruleset: str) -> Bench:
    return Bench(
        folder / "state", policy_named(ruleset), schema=SCHEMAS.get(ruleset, setting.SCHEMA),
        screens=screens(folder / "scratch"),
    )  # fmt: skip


def view_of(case: Case) -> RunView:
    """What the silo knows of the run that the message is of, in the message's round."""
    known, number = probed(case).context, max(1, case.message.place.round)
    return RunView(
        known.plan, number, BASE_DIGEST, 0.0, STEPS, open_step=2, evaluated={number: BASE_DIGEST},
        training=Training(64, 1, 4), asked=known.asked, usable_records=10,
    )  # fmt: skip


def offered(bench: Bench, case: Case) -> Allowed | Denied | Held:
    bench.judge.view, message = view_of(case), case.message
    tensors = None if message.tensors is None else dict(message.tensors)
    place = bench.judge.view.place(message.kind, bench.judge.view.round, message.step)
    return bench.gate.offer(place, message.body, tensors=tensors)


def taken(bench: Bench, case: Case) -> Any:
    """The answer to a poll."""
    bench.judge.view, message = view_of(case), case.message
    payload: Any = message.body
    if isinstance(payload, pb.Factors) and message.tensors is not None:
        header = {name: getattr(payload, name) for name in ("base_digest", "schema_sha256", "rank", "scale", "dtype")}
        payload = codec.encode_factors(dict(message.tensors), **header)
    bench.channel.routing = {"run": message.run, "round": 1, "step": message.step}
    bench.channel.answer = (message.kind, payload)
    return bench.gate.send(bench.judge.view.place("control.poll"), pb.Poll())


@pytest.mark.parametrize("ruleset", [*RULESETS, "further"])
def test_the_gate_lets_out_what_its_ruleset_names(tmp_path: Path, ruleset: str) -> None:
    policy, made = policy_named(ruleset), {}
    bench = bench_of(tmp_path, ruleset)
    named = {kind for kind in OFFERED_KINDS if policy.file.egress.block(kind) is not None}
    for kind in sorted(set(OFFERED_KINDS) - _ELSEWHERE):
        made[kind] = offered(bench, good(kind, ruleset if kind in named else ""))
    for kind, outcome in made.items():
        if kind not in named:
            assert isinstance(outcome, Denied), kind
            assert "KIND_NOT_ALLOWED" in outcome.decision.reasons
        elif ruleset == "pubswap-strict" and kind == "lora.factor_b":
            assert isinstance(outcome, Held)
        else:
            assert isinstance(outcome, Allowed), (kind, outcome)
            bench.gate.transmit(outcome)
    allowed = [kind for kind, outcome in made.items() if isinstance(outcome, Allowed)]
    assert bench.channel.kinds() == allowed
    for envelope, payload in bench.channel.sent:
        if envelope.kind not in ("lora.factors", "lora.factor_a", "lora.factor_b", "lora.core_r"):
            # rebuilt from values: the bytes of the message that was offered
            assert len(payload) == good(envelope.kind, ruleset).message.payload_bytes
    bench.close()


@pytest.mark.parametrize("ruleset", sorted({*RULESETS} - {"deny_all"}))  # that one does not even poll
@pytest.mark.parametrize("kind", sorted(FURTHER_KINDS & INBOUND_KINDS.keys()))
def test_the_entrance_lets_in_what_its_ruleset_names(tmp_path: Path, ruleset: str, kind: str) -> None:
    with closing(bench_of(tmp_path, ruleset)) as bench:
        if NAMED[ruleset].file.ingress.block(kind) is None:
            with pytest.raises(IngressDenied, match="KIND_NOT_ALLOWED"):
                taken(bench, good(kind, direction="ingress"))
        else:
            case = good(kind, ruleset, "ingress")
            answer = taken(bench, case)
            assert (answer.kind, answer.body) == (kind, case.message.body)


def test_a_question_that_was_let_in_is_what_may_be_answered(tmp_path: Path) -> None:
    """The silo's side of `asked`, from one real message to the next: first nothing, then what the coordinator asked."""
    bench = bench_of(tmp_path, "fedgrpo")
    score, asks = good("competence.score", "fedgrpo"), good("competence.ask", "fedgrpo")
    refused = offered(bench, score.but(asked=Requests()))
    assert isinstance(refused, Denied) and "NOT_ASKED" in refused.decision.reasons
    bench.judge.view = bench.judge.view.asking(asks.message.body, 1)
    assert isinstance(offered(bench, score.but(asked=bench.judge.view.asked)), Allowed)
    # and it outlasts a restart of the guard, as the rest of the view does
    view = bench.judge.view
    assert view.plan is not None
    assert RunView.from_json(view.plan, view.to_json()).asked == view.asked
    bench.close()


OUT = ("competence.answers", "knowledge.package")


def carries_text(message: Any) -> bool:
    """By the descriptors and the catalogue of field classes, not by what the screens go through."""
    return any(
        carries_text(field.message_type)
        if field.message_type is not None
        else CATALOGUE[message.name][field.name] is FieldClass.TEXT
        for field in message.fields
    )


def policy_of(kind: str, names: tuple[str, ...], hits: int = 10) -> Policy:
    """A policy that lets the kind out and screens it so."""
    keys = f"    screens: [{', '.join(names)}]\n    max_hits_per_day: {hits}\n" if names else ""
    if kind == "competence.answers":
        head, found, tail = ruleset_text("further").partition("  competence.answers:\n    set: public\n")
        return setting.policy_of(f"{head}{found}{keys}{tail}\n{site.DEFINITIONS}")
    text = ruleset_text("knexa")
    start = text.index("    screens: [pii_basic")
    end = text.index("    approvals:", start)
    return setting.policy_of(text[:start] + keys + text[end:])


def text_bench(folder: Path, policy: Policy, *, screens: Screens | None = None) -> Bench:
    folder.mkdir(parents=True)
    return Bench(folder / "state", policy, screens=screens or site.screens(folder / "scratch"))


def offered_text(bench: Bench, kind: str, text: str) -> Allowed | Denied:
    rows = answers((0, text)) if kind == "competence.answers" else entries((0, text))
    outcome = offered(bench, good(kind, "knexa" if kind == "knowledge.package" else "").but(**rows))
    assert isinstance(outcome, Allowed | Denied)
    return outcome


# ---- nobody is forgotten ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "side", "screened"), [(OUTBOUND_KINDS, Egress, TEXT_KINDS_OUT), (INBOUND_KINDS, Ingress, TEXT_KINDS_IN)]
)
def test_T15_every_kind_with_a_free_text_has_a_key_for_screens(kinds: Any, side: Any, screened: Any) -> None:
    with_text = {kind for kind, message in kinds.items() if carries_text(message.DESCRIPTOR)}
    assert with_text == set(screened)
    blocks = {field.alias: field.annotation for field in side.model_fields.values() if field.alias in with_text}
    for kind, annotation in blocks.items():
        (block,) = [each for each in annotation.__args__ if each is not type(None)]
        assert "screens" in block.model_fields, kind
        assert ("max_hits_per_day" in block.model_fields) is (side is Egress), kind
    assert blocks.keys() == with_text


def test_T15_a_shipped_ruleset_screens_packages_as_the_strict_one_screens_answers() -> None:
    strict, shown = policy_named("pubswap-strict").file, []
    for name in RULESETS:
        file = policy_named(name).file
        block, inbound = file.egress.knowledge_package, file.ingress.knowledge_package
        if block is None:
            assert file.egress.competence_answers is None
            continue
        shown.append(name)
        answered, donors = strict.egress.public_responses, strict.ingress.public_donors
        assert answered is not None and donors is not None and inbound is not None
        assert (block.screens, block.max_hits_per_day) == (answered.screens, answered.max_hits_per_day)
        assert (inbound.screens, file.text_screens) == (donors.screens, strict.text_screens)
    assert len(shown) == 4


# ---- out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OUT)
@pytest.mark.parametrize("name", site.NAMES)
def test_T15_a_planted_text_is_refused_by_the_screen_that_knows_it_and_leaves_without_that_screen(
    tmp_path: Path, kind: str, name: str
) -> None:
    others = tuple(other for other in site.NAMES if other != name)
    with closing(text_bench(tmp_path / "with", policy_of(kind, (name,)))) as bench:
        denied = offered_text(bench, kind, site.PLANTED[name])
        assert isinstance(denied, Denied) and denied.decision.reasons == ("SCREEN_HIT",)
        (hit,) = bench.events("screen.hit")
        assert hit["kind"] == kind and hit["detail"]["responses"] == 1
        assert all(code.startswith(f"{name}/") for code in hit["detail"]["hits"])
        assert site.PLANTED[name][:10] not in json.dumps(list(bench.audit.records()))
        assert isinstance(offered_text(bench, kind, "it is 12"), Allowed)  # the same kind without a hit
        (_, allowed) = bench.events("egress.decision")
        assert list(allowed["facts"]["final"]["screens"]) == [name] and len(bench.events("screen.hit")) == 1
    with closing(text_bench(tmp_path / "without", policy_of(kind, others))) as bench:
        assert isinstance(offered_text(bench, kind, site.PLANTED[name]), Allowed)
        assert bench.events("screen.hit") == []


@pytest.mark.parametrize("kind", OUT)
def test_T14_a_kind_whose_screen_has_no_material_is_denied_and_said_beforehand(tmp_path: Path, kind: str) -> None:
    policy = policy_of(kind, ("canary", "charset"))
    with closing(text_bench(tmp_path / "none", policy, screens=Screens())) as bench:
        (trouble,) = bench.judge.screen_troubles()
        assert kind in trouble and "data.canaries" in trouble
        denied = offered_text(bench, kind, "it is 12")
        assert isinstance(denied, Denied) and "SCREEN_FAILED" in denied.decision.reasons
    with closing(text_bench(tmp_path / "there", policy)) as bench:
        assert bench.judge.screen_troubles() == []
        assert isinstance(offered_text(bench, kind, "it is 12"), Allowed)


@pytest.mark.parametrize("kind", OUT)
def test_T18_too_many_hits_a_day_halt_the_kind_until_persons_release_it(tmp_path: Path, kind: str) -> None:
    with closing(text_bench(tmp_path / "a", policy_of(kind, ("charset",), hits=1))) as bench:
        for _ in range(2):
            assert isinstance(offered_text(bench, kind, site.PLANTED["charset"]), Denied)
        halted = offered_text(bench, kind, "it is 12")
        assert isinstance(halted, Denied) and halted.decision.reasons == ("SCREEN_HALT",)
        halts = Halts(bench.judge, bench.ledger)
        (row,) = halts.rows()
        assert row.kind == kind
        with pytest.raises(NotFoundError):
            halts.lift_halt(command("approvals.release", {"kind": "public.responses", "digest": row.digest}))
        assert halts.lift_halt(command("approvals.release", {"kind": kind, "digest": row.digest}))["released"]
        assert isinstance(offered_text(bench, kind, "it is 12"), Allowed)


def test_T35_screens_of_a_kind_need_a_days_limit_and_a_definition() -> None:
    text = ruleset_text("knexa")
    assert policy_named("knexa").file.egress.knowledge_package is not None
    for old, new, said in (
        ("    max_hits_per_day: 5", "    # none", "screens need max_hits_per_day"),
        (
            "  charset:\n    allow: [latin, greek, digits, punctuation, math]\n    max_run_nonword: 40",
            "  # none",
            "charset",
        ),
    ):
        assert text.count(old) == 1
        with pytest.raises(UsageError, match=said):
            setting.policy_of(text.replace(old, new))


def test_the_trainer_makes_the_index_for_packages_too() -> None:
    screens = Screens(key=b"k" * 32, public_sha256=setting.HASH["public"])
    assert screens.index_wanted(policy_of("knowledge.package", ("overlap",)).file) is not None
    assert screens.index_wanted(policy_of("knowledge.package", ("canary",)).file) is None


# ---- in --------------------------------------------------------------------------------------------


def taken_text(bench: Bench, kind: str, ruleset: str, text: str) -> str:
    rows = entries((0, text)) if kind == "knowledge.package" else candidates((4, (text,)))
    return str(taken(bench, good(kind, ruleset, "ingress").but(**rows)).kind)


@pytest.mark.parametrize(("kind", "ruleset"), [("knowledge.package", "knexa"), ("reward.ask", "fedgrpo")])
def test_T21_what_comes_in_with_control_characters_is_refused_where_the_policy_screens_it(
    tmp_path: Path, kind: str, ruleset: str
) -> None:
    asks = {"reward.ask": "    max_bytes_per_candidate:", "knowledge.package": "    screens: [charset]"}[kind]
    text = ruleset_text(ruleset)
    assert text.count(asks) == 1
    if kind == "reward.ask":
        screened = text.replace(asks, f"    screens: [charset]\n{asks}") + f"\n{site.DEFINITIONS}"
        plain = text
    else:
        screened, plain = text, text.replace(asks, "    screens: []")
    with closing(text_bench(tmp_path / "screened", setting.policy_of(screened))) as bench:
        with pytest.raises(IngressDenied, match="SCREEN_HIT"):
            taken_text(bench, kind, ruleset, site.PLANTED["charset"])
        assert taken_text(bench, kind, ruleset, "it is 12") == kind
    with closing(text_bench(tmp_path / "plain", setting.policy_of(plain))) as bench:
        assert taken_text(bench, kind, ruleset, site.PLANTED["charset"]) == kind


@pytest.mark.parametrize("name", ["overlap", "canary"])
def test_T18_what_is_refused_on_arrival_is_not_compared_with_private_data(name: str) -> None:
    """A sender that sees its message refused would learn that the text is one of this site's."""
    text = ruleset_text("knexa")
    assert setting.policy_of(text).file.ingress.knowledge_package is not None
    with pytest.raises(UsageError, match="'pii_basic' or 'charset'"):
        setting.policy_of(text.replace("    screens: [charset]", f"    screens: [{name}]"))


def test_a_good_package_of_every_ruleset_that_has_one_passes_its_screens(tmp_path: Path) -> None:
    for number, ruleset in enumerate(("knexa", "fedid-central")):
        with closing(text_bench(tmp_path / str(number), policy_named(ruleset))) as bench:
            assert isinstance(offered(bench, good("knowledge.package", ruleset)), Allowed)
