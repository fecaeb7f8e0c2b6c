"""A run with A frozen, at the coordinator and at a silo's gate: one side leaves, the other never changes (T6, T7)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from safetensors.numpy import load_file

from coordinator.aggregate import AggregateRefusedError, aggregate, initial_adapter, read_factors
from coordinator.blobs import Blobs, BytesPayload
from fedsilo.protocol import codec
from fedsilo.protocol import method as events
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import frozen_sha256, initial_factors, initial_frozen_sha256
from fedsilo.protocol.methods import METHODS
from silo.guard.adapters import AdapterStore
from silo.guard.decisions import RunView
from silo.guard.messages import Allowed, Denied, Held, IngressDenied
from silo.sampling import Training
from tests.policies import setting
from tests.policies.test_frozen import FROZEN, START, STRICT, STRICT_PLAN, TEXT, A, B
from tests.simulated.coordinator_parts import RUN_YAML, SILOS, SimulatedSilo, federation, until_quiet
from tests.simulated.paper_federation import PaperFederation, plan_of
from tests.simulated.test_coordinator_run import expected_master
from tests.world import Bench, command

# 22 private steps of 3 prompts
STRICT_YAML = RUN_YAML.replace("local_steps: 4", "local_steps: 44")
Arrays = dict[str, np.ndarray[Any, Any]]


def finished(tmp_path: Path, text: str = STRICT_YAML) -> tuple[Any, list[SimulatedSilo]]:
    house, silos = federation(tmp_path, schema=FROZEN, policy=STRICT)
    house.submit(text)
    for silo in silos:
        assert isinstance(silo.join(), pb.Ack)
    until_quiet(silos)
    return house, silos


# ---- the coordinator ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_a_frozen_ends_with_an_adapter_whose_a_is_the_seeds(tmp_path: Path) -> None:
    house, silos = finished(tmp_path)
    run, record = house.run(), house.record()
    assert (run.state, run.reason) == ("finished", "")
    assert [row["state"] for row in record["rounds"]] == ["committed", "committed"]
    kinds = {upload["kind"] for row in record["rounds"] for upload in row["uploads"]}
    assert kinds == {"lora.factor_b", "public.responses", "metrics.eval"}
    lora = record["plan"]["lora"]
    assert (lora["freeze"], lora["frozen_sha256"]) == ("A", initial_frozen_sha256(FROZEN.tensors, 7, "A"))
    adapter = load_file(tmp_path / "runs" / "run-1" / "adapter" / "adapter_model.safetensors")
    drawn = initial_factors(FROZEN.tensors, 7)
    assert adapter[f"base_model.model.{A}.weight"].tobytes() == drawn[A].tobytes()
    master = expected_master_of_b(silos, drawn[B])
    assert adapter[f"base_model.model.{B}.weight"].tobytes() == master.tobytes() and master.any()


def expected_master_of_b(silos: list[SimulatedSilo], start: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    payload = codec.encode_factors(
        {B: start}, base_digest="", schema_sha256=FROZEN.digest, rank=2, scale=2.0, dtype="float32"
    )
    return np.asarray(expected_master(silos, payload, [list(SILOS)] * 2)[B])


@pytest.mark.slow
def test_T06_the_coordinator_refuses_an_upload_with_a_and_the_run_goes_on_with_the_others(tmp_path: Path) -> None:
    house, silos = federation(tmp_path, schema=FROZEN, policy=STRICT)
    house.submit(STRICT_YAML)
    hostile = silos[0]
    honest = SimulatedSilo.delta_payload

    def with_a(number: int, **changes: Any) -> bytes:
        return honest(hostile, number, tensors={**hostile.delta(number), A: START[A] * 0})

    hostile.delta_payload = with_a  # type: ignore[method-assign]
    for silo in silos:
        silo.join()
    until_quiet(silos)
    for _ in range(2):
        house.advance(1001)  # each round waits for the silo until its deadline
        until_quiet(silos)
    rounds = house.record()["rounds"]
    assert all(row["participants"] == list(SILOS[1:]) for row in rounds)
    denied = [each["reasons"] for each in house.audit.records() if each.get("decision") == "deny"]
    assert denied == [["TOO_LARGE"]] * 2  # with A it is longer than any update, which is seen before a byte is read


def test_what_a_run_freezes_is_the_federations_and_not_the_submitters(tmp_path: Path) -> None:
    house, _ = federation(tmp_path, schema=FROZEN, policy=STRICT)
    for wrong in ('{"freeze": "none"}', f'{{"frozen_sha256": "{"ab" * 32}"}}'):
        with pytest.raises(UsageError, match=r"run\.yaml:\d+: lora is .*this federation has"):
            house.submit(f"{STRICT_YAML}lora: {wrong}\n")
    with pytest.raises(UsageError, match="seed"):
        house.submit(STRICT_YAML.replace("seed: 7", "seed: -1"))
    house.submit(f'{STRICT_YAML}lora: {{"freeze": "A"}}\n')


# ---- aggregation -------------------------------------------------------------------------------------


def payload(tensors: Arrays, base: str, dtype: str = "float32") -> BytesPayload:
    return BytesPayload(
        codec.encode_factors(tensors, base_digest=base, schema_sha256=FROZEN.digest, rank=2, scale=2.0, dtype=dtype)
    )


def drawn(seed: int, *names: str) -> Arrays:
    draw = np.random.default_rng(seed)
    return {name: draw.normal(0, 0.1, dict(FROZEN.tensors)[name]).astype(np.float32) for name in names}


@pytest.mark.parametrize("tile_elements", [1, 5, 1 << 20])
def test_the_mean_of_the_products_is_the_product_of_the_means_with_a_frozen_and_else_not(
    tmp_path: Path, tile_elements: int
) -> None:
    """FFA-LoRA: exact to 1e-6. With both factors trained the same sum is off by the covariance."""
    master = payload(drawn(0, A, B), "")
    base = codec.decode_factors(master.data).tensors

    def error(freeze: str, *names: str) -> float:
        deltas = [drawn(seed, *names) for seed in (1, 2, 3)]
        uploads = [payload(delta, master.digest) for delta in deltas]
        made = aggregate(Blobs(tmp_path), master, uploads, setting.MEAN, fixed=freeze, tile_elements=tile_elements)
        after = dict(read_factors(made).tensors())
        if freeze == "A":
            assert after[A].tobytes() == base[A].tobytes()
        products = [
            (base[B] + delta[B]).astype(np.float64) @ (base[A] + delta.get(A, 0)).astype(np.float64) for delta in deltas
        ]
        mean = sum(products) / len(products)
        return float(np.linalg.norm(after[B].astype(np.float64) @ after[A] - mean) / np.linalg.norm(mean))

    assert error("A", B) < 1e-6
    assert error("none", A, B) > 1e-2


def test_uploads_hold_exactly_what_the_run_trains(tmp_path: Path) -> None:
    master = payload(drawn(0, A, B), "")
    for names, freeze in (((A, B), "A"), ((A,), "A"), ((B,), "none")):
        with pytest.raises(AggregateRefusedError, match="other tensors"):
            aggregate(Blobs(tmp_path), master, [payload(drawn(1, *names), master.digest)], setting.MEAN, fixed=freeze)


def test_bfloat16_updates_of_b_are_added_to_a_float32_master(tmp_path: Path) -> None:
    master = payload(drawn(0, A, B), "")
    upload = payload(drawn(1, B), master.digest, "bfloat16")
    made = dict(read_factors(aggregate(Blobs(tmp_path), master, [upload], setting.MEAN, fixed="A")).tensors())
    delta = codec.decode_factors(upload.data).tensors[B]
    base = codec.decode_factors(master.data).tensors
    assert made[B].tobytes() == (base[B] + delta).tobytes() and made[A].tobytes() == base[A].tobytes()


# ---- the method --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(name for name, method in METHODS.items() if method.stays == "none"))
def test_every_method_runs_with_a_frozen_and_a_kept_back_update_is_known_by_its_kind(name: str) -> None:
    lora = {"rank": 4, "alpha": 8.0, "schema_sha256": "0" * 64, "freeze": "A", "frozen_sha256": "ab" * 32}

    def deny(silo: str, kind: str, round_number: int, step: int) -> str:
        return "denied" if (silo, kind) == ("a", "lora.factor_b") else "sent"

    played = PaperFederation(plan_of(method=name, lora=lora), METHODS[name], lambda ready: 0, deny=deny)
    played.run()
    assert isinstance(played.outcome, events.FinishRun) and played.outcome.outcome == "finished"
    offered = {kind for offers in played.offered.values() for kind, _, _ in offers}
    assert offered == METHODS[name].kinds_under(played.plan) and "lora.factors" not in offered
    assert all(commit.results[0].silos == ("b", "c") for commit in played.commits)


# ---- a silo's gate -----------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path / "a", STRICT, schema=FROZEN)
    made.judge.view = RunView(STRICT_PLAN, 1, setting.BASE_DIGEST, 1.0, training=Training(64, 2, 44))
    yield made
    made.close()


def offered(bench: Bench, tensors: Arrays, kind: str = "lora.factor_b") -> Any:
    header = pb.Factors(base_digest=setting.BASE_DIGEST)
    return bench.gate.offer(bench.judge.view.place(kind, 1), header, tensors=tensors)


def test_T36_an_update_of_b_leaves_after_two_people_said_yes_and_holds_b_alone(bench: Bench) -> None:
    held = offered(bench, drawn(1, B))
    assert isinstance(held, Held)
    release = bench.releases.hold(held, deadline_seconds=None)
    given = {
        "release": release.id,
        "digest": release.digest,
        "policy_digest": release.policy_digest,
        **bench.shown(release),
    }
    assert bench.releases.approve(command("approvals.approve", given))[1] is None
    _, settled = bench.releases.approve(command("approvals.approve", given, person="bob"))
    assert settled is not None and settled.allowed is not None
    sent = codec.decode_factors(settled.allowed.payload)
    assert list(sent.tensors) == [B] and sent.header.dtype == "bfloat16"
    assert len(settled.allowed.payload) == FROZEN.update_bytes


def test_T06_an_update_with_a_is_denied_at_the_silo(bench: Bench) -> None:
    denied = offered(bench, drawn(1, A, B))
    assert isinstance(denied, Denied) and "TENSOR_SET" in denied.decision.reasons
    whole = offered(bench, drawn(1, A, B), kind="lora.factors")
    assert isinstance(whole, Denied) and "KIND_NOT_ALLOWED" in whole.decision.reasons
    assert isinstance(offered(bench, drawn(1, B)), Held)


def test_T07_a_round_of_one_record_is_denied_and_the_record_says_so(bench: Bench) -> None:
    bench.judge.view = replace(bench.judge.view, training=Training(1, 1, 44))
    denied = offered(bench, drawn(1, B))
    assert isinstance(denied, Denied) and denied.decision.reasons == ("MIN_RECORDS",)
    (record,) = bench.events("egress.decision")
    facts = record["facts"]["final"]
    assert (facts["records"], facts["epochs"], facts["steps"]) == (1, 1, 44)
    bench.judge.view = replace(bench.judge.view, training=Training(64, 2, 44))
    assert isinstance(offered(bench, drawn(1, B)), Held)


def test_T07_what_a_round_was_trained_on_survives_a_restart_and_ends_with_the_round() -> None:
    view = RunView(STRICT_PLAN, 1, setting.BASE_DIGEST, training=Training(64, 2, 44))
    again = RunView.from_json(STRICT_PLAN, json.loads(json.dumps(view.to_json())))
    assert again.training == Training(64, 2, 44)
    assert again.opened(2, pb.RoundOpen(base_digest="cd" * 32)).training is None


def test_T05_the_low_bits_of_what_leaves_are_not_those_that_the_trainer_chose(bench: Bench) -> None:
    """The gate hands the transform bits of the operating system; the same offer never leaves twice alike."""
    values = drawn(1, B)
    sent = []
    for _ in range(2):
        held = offered(bench, values)
        assert isinstance(held, Held)
        sent.append(codec.decode_factors(held.payload).tensors[B])
    record = bench.events("egress.decision")[-1]
    assert record["facts"]["transform"]["randomised_low_bits"] == 2
    assert sent[0].tobytes() != sent[1].tobytes()  # 16 random bits each: alike once in 65,536
    kept = (sent[0].view(np.uint32) >> 18) ^ (sent[1].view(np.uint32) >> 18)
    assert not kept.any()


def adapter_answer(tensors: Arrays) -> bytes:
    return codec.encode_factors(
        tensors, base_digest="", schema_sha256=FROZEN.digest, rank=2, scale=2.0, dtype="float32"
    )


def test_T06_a_global_adapter_with_another_a_is_not_let_in(bench: Bench) -> None:
    def fetch(tensors: Arrays) -> Any:
        bench.channel.answer = ("global.adapter", adapter_answer(tensors))
        body: Message = pb.Fetch(digest="ab" * 32)
        return bench.gate.send(bench.judge.view.place("control.fetch"), body)

    changed = {name: values.copy() for name, values in START.items()}
    changed[A].flat[0] += np.float32(1e-3)
    with pytest.raises(IngressDenied, match="FROZEN"):
        fetch(changed)
    assert fetch({**START, B: drawn(1, B)[B]}).facts["frozen_as_planned"] is True


def test_T06_an_adapter_kept_under_another_plan_is_fetched_again(tmp_path: Path) -> None:
    """What is in the store came in under a plan; for one that freezes other factors it must pass the gate anew."""
    store = AdapterStore(tmp_path / "adapters")
    whole = initial_adapter(FROZEN, 1)
    digest, ours = codec.sha256_hex(whole), STRICT_PLAN.lora.frozen_sha256
    store.keep(digest, whole, 1.5, ours)
    again = AdapterStore(tmp_path / "adapters")
    assert again.find(digest, frozen_sha256=ours) == whole and again.l2(digest) == 1.5
    assert again.find(digest, frozen_sha256="cd" * 32) is None and again.find(digest, frozen_sha256="") is None
    assert again.find(digest) == whole


def test_a_site_of_the_strict_ruleset_lets_no_second_update_of_a_round_out(bench: Bench) -> None:
    unasked = setting.policy_of(TEXT.replace("first_rounds: 3", "first_rounds: 0"))
    free = Bench(bench.folder.parent / "b", unasked, schema=FROZEN)
    free.judge.view = bench.judge.view
    assert isinstance(offered(free, drawn(1, B)), Allowed)
    second = offered(free, drawn(2, B))
    assert isinstance(second, Denied) and second.decision.reasons == ("PER_ROUND",)
    free.close()


def test_the_frozen_digest_of_the_initial_adapter_is_the_plans() -> None:
    tensors = read_factors(BytesPayload(initial_adapter(FROZEN, 7))).tensors()
    assert frozen_sha256(tensors, "A") == initial_frozen_sha256(FROZEN.tensors, 7, "A")
