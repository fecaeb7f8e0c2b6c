"""A run that starts from an adapter folder, in place of the adapter that its seed draws (T6, T20, T50)."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from torch import nn

from fedsilo.files.adapter_folder import CONFIG, WEIGHTS, import_adapter, name_in_folder
from fedsilo.protocol import codec
from fedsilo.protocol.errors import FedSiloError, NotFoundError, PeerError, UsageError
from fedsilo.protocol.factors import initial_factors, initial_frozen_sha256
from fedsilo.protocol.plan import digests_of, plan_from_canonical
from policies.model import Policy
from tests.policies.messages import SCHEMAS
from tests.policies.setting import PLAN, SCHEMA, policy_of, policy_text
from tests.policies.test_frozen import FROZEN, STRICT, TEXT
from tests.simulated.coordinator_parts import RUN_YAML, House, SimulatedSilo, played, started_again, until_quiet
from tests.simulated.test_coordinator_run import assert_written, expected_master
from tests.simulated.test_frozen_run import STRICT_YAML

A, B = (name for name, _ in SCHEMA.tensors)
NOTHING: Callable[[bytes | memoryview], None] = lambda piece: None  # noqa: E731


def allowing(words: str = "[any]", text: str | None = None) -> Policy:
    text = text or policy_text()
    assert text.count("learning_rate: [") == 1
    return policy_of(text.replace("learning_rate: [", f"start_adapter: {words}\n    learning_rate: ["))


def request(folder: Path, text: str = RUN_YAML, **further: str) -> str:
    return text + f"start_adapter: {folder}\n" + "".join(f"{key}: {value}\n" for key, value in further.items())


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A finished run; its adapter lies in `adapter_of`."""
    return played(tmp_path_factory.mktemp("earlier"))[0]


def adapter_of(house: House) -> Path:
    return house.folder / "runs" / "run-1" / "adapter"


@pytest.fixture
def folder(earlier: House, tmp_path: Path) -> Path:
    """A copy of that adapter, to bend."""
    copied = tmp_path / "adapter"
    shutil.copytree(adapter_of(earlier), copied)
    return copied


# ---- from one run to the next --------------------------------------------------------------------------------


def test_a_run_starts_from_another_ones_last_adapter_bit_for_bit(earlier: House, tmp_path: Path) -> None:
    before = earlier.run().adapter_digest
    house, silos = played(tmp_path, request(adapter_of(earlier)), policy=allowing())
    assert (house.run().state, house.run().base_digest) == ("finished", before)
    record = house.record()
    assert record["plan"]["start_adapter_sha256"] == record["rounds"][0]["base_sha256"] == before
    assert "start_adapter_sha256" not in earlier.record()["plan"]
    loaded = silos[0].adapters[before]
    assert codec.sha256_hex(loaded) == before
    given = [[silo.name for silo in silos]] * 2
    assert_written(house, expected_master(silos, loaded, given))
    plan = plan_from_canonical(house.run().plan)
    assert digests_of(plan)["start_adapter"] == before and "start_adapter" not in digests_of(PLAN)


def test_a_relative_path_starts_at_the_coordinators_folder_and_the_digest_may_be_pinned(
    folder: Path, earlier: House, tmp_path: Path
) -> None:
    digest = earlier.run().adapter_digest
    house = House(tmp_path, policy=allowing(f"['{digest}']"))
    house.submit(request(Path("adapter"), start_adapter_sha256=digest))
    assert house.submissions.waiting["run-1"].plan.start_adapter_sha256 == digest
    assert json.loads(house.run().request)["start_adapter_sha256"] == digest


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["waiting", "begun", "second round"])
def test_a_killed_coordinator_goes_on_from_the_adapter_that_it_imported(
    moment: str, folder: Path, tmp_path: Path
) -> None:
    whole, _ = played(tmp_path / "whole", request(folder), policy=allowing())
    house = House(tmp_path / "killed", policy=allowing())
    silos = [SimulatedSilo(house, silo.name) for silo in played(tmp_path / "names")[1]]
    house.submit(request(folder))
    shutil.rmtree(folder)  # from here on it is the coordinator's
    if moment == "waiting":
        house = started_again(house, silos)
    for silo in silos:
        silo.join()
    if moment == "begun":
        house = started_again(house, silos)
    while moment == "second round" and house.rows(_rounds) < 2:
        assert any(silo.live() for silo in silos)
    if moment == "second round":
        house = started_again(house, silos)
    until_quiet(silos)
    assert (house.run().state, house.run().adapter_digest) == ("finished", whole.run().adapter_digest)


def _rounds(session: Any) -> int:
    from coordinator import store as db

    return int(session.query(db.Round).count())


@pytest.mark.slow
def test_what_a_run_freezes_must_be_what_its_seed_draws(tmp_path: Path) -> None:
    house, _ = played(tmp_path / "one", STRICT_YAML, schema=FROZEN, policy=STRICT)
    strict = allowing(text=TEXT)
    again = House(tmp_path / "two", schema=FROZEN, policy=strict)
    other = STRICT_YAML.replace("seed: 7", "seed: 8")
    assert initial_frozen_sha256(FROZEN.tensors, 7, "A") != initial_frozen_sha256(FROZEN.tensors, 8, "A")
    with pytest.raises(UsageError, match=r"run\.yaml:\d+: .*not those that seed 8 draws") as refused:
        again.submit(request(adapter_of(house), other))
    assert "seed" in refused.value.hint
    again.submit(request(adapter_of(house), STRICT_YAML))
    assert again.submissions.waiting["run-1"].plan.start_adapter_sha256 == house.run().adapter_digest


# ---- what may be imported ------------------------------------------------------------------------------------


def test_the_payload_is_what_the_codec_makes_of_the_values(folder: Path, earlier: House) -> None:
    pieces: list[bytes] = []
    found = import_adapter(folder, SCHEMA, lambda piece: pieces.append(bytes(piece)))
    payload = b"".join(pieces)
    values = {name: load_file(folder / WEIGHTS)[name_in_folder(name)] for name in (A, B)}
    assert payload == codec.encode_factors(
        values, base_digest="", schema_sha256=SCHEMA.digest, rank=SCHEMA.rank, scale=SCHEMA.scale, dtype="float32"
    )
    assert found.sha256 == codec.sha256_hex(payload) == earlier.run().adapter_digest
    squares = sum(float(value) ** 2 for each in values.values() for value in each.flat)
    assert found.l2 == pytest.approx(math.sqrt(squares), rel=1e-12) and found.frozen_sha256 == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrower_weights_are_widened_exactly(dtype: torch.dtype, folder: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    narrow = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SCHEMA.tensors}
    narrow[A][0, 0] = -0.0
    save_torch({name_in_folder(name): each for name, each in narrow.items()}, folder / WEIGHTS)
    pieces: list[bytes] = []
    import_adapter(folder, SCHEMA, lambda piece: pieces.append(bytes(piece)))
    got = codec.decode_factors(b"".join(pieces)).tensors
    for name, each in narrow.items():
        assert np.array_equal(got[name], each.float().numpy())


@pytest.mark.slow  # peft takes long to load
def test_a_folder_that_peft_itself_wrote_is_read(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(6, 4, bias=False)

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"self_attn": Attention()})])})

    wrapped = get_peft_model(Base(), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=False))
    wrapped.save_pretrained(str(tmp_path))
    pieces: list[bytes] = []
    import_adapter(tmp_path, SCHEMA, lambda piece: pieces.append(bytes(piece)))
    got = codec.decode_factors(b"".join(pieces)).tensors
    state = wrapped.state_dict()
    for name in (A, B):
        theirs = state[f"base_model.model.{name}.default.weight"].numpy()
        assert np.array_equal(got[name], theirs) and theirs.any()


def config(**changes: Any) -> Callable[[Path], None]:
    def bend(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return bend


def weights(bend: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = {name: each.copy() for name, each in load_file(folder / WEIGHTS).items()}
        bend(tensors)
        save_file(tensors, folder / WEIGHTS)

    return change


def _put(tensors: dict[str, Any], name: str, value: float) -> None:
    tensors[name_in_folder(name)].flat[1] = value


WRONG: tuple[tuple[str, Callable[[Path], object], str], ...] = (
    ("rank", config(r=4), "r is 4, the run's schema has 2"),
    ("rank as text", config(r="2"), "r is 2"),
    ("alpha", config(lora_alpha=8), "lora_alpha is 8, the run's schema has 4"),
    ("further modules", config(target_modules=["q_proj", "v_proj"]), "target_modules has v_proj beyond"),
    ("fewer modules", config(target_modules=[]), "target_modules has q_proj less than"),
    ("DoRA", config(use_dora=True), "use_dora is 'True'"),
    ("rsLoRA", config(use_rslora=True), "use_rslora"),
    ("bias", config(bias="all"), "bias is 'all'"),
    ("another kind", config(peft_type="IA3"), "peft_type is 'IA3'"),
    ("PiSSA", config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    ("modules saved", config(modules_to_save=["lm_head"]), "modules_to_save"),
    ("ranks apart", config(rank_pattern={"q_proj": 8}), "rank_pattern"),
    ("no JSON", lambda folder: (folder / CONFIG).write_text("{"), "no adapter's configuration"),
    ("no mapping", lambda folder: (folder / CONFIG).write_text("[]"), "no adapter's configuration"),
    ("NaN", weights(lambda tensors: _put(tensors, A, math.nan)), f"{A} holds a value that is not finite"),
    ("infinity", weights(lambda tensors: _put(tensors, B, -math.inf)), f"{B} holds a value that is not finite"),
    ("a tensor less", weights(lambda tensors: tensors.pop(name_in_folder(B))), "missing of the run's schema"),
    ("a tensor more", weights(lambda tensors: tensors.update(other=np.ones(1))), "'other' is no factor's name"),
    (
        "another shape",
        weights(lambda tensors: tensors.update({name_in_folder(A): np.ones((3, 6), np.float32)})),
        "is [3, 6], the run's schema has [2, 6]",
    ),
    (
        "another type",
        weights(lambda tensors: tensors.update({name_in_folder(A): np.ones((2, 6), np.float64)})),
        "is F64",
    ),
    (
        "cut short",
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-4]),
        "its header names",
    ),
    ("no file", lambda folder: (folder / WEIGHTS).unlink(), "is not there"),
    ("no folder", shutil.rmtree, "is not there"),
)


@pytest.mark.parametrize(("bend", "cause"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_T50_what_does_not_fit_the_schema_is_refused_with_place_and_mend(
    bend: Callable[[Path], object], cause: str, folder: Path, tmp_path: Path
) -> None:
    bend(folder)
    with pytest.raises((UsageError, NotFoundError)) as direct:
        import_adapter(folder, SCHEMA, NOTHING)
    assert cause in direct.value.message and direct.value.hint
    house = House(tmp_path / "house", policy=allowing())
    with pytest.raises(UsageError) as refused:
        house.submit(request(folder))
    line = len(request(folder).splitlines())
    assert refused.value.message.startswith(f"run.yaml:{line}: ") and cause in refused.value.message
    assert not house.submissions.waiting


@pytest.mark.parametrize(("ruleset", "word"), [("fed-sb", "core"), ("fedex", "shift"), ("flora", "shift")])
def test_a_schema_with_more_than_a_and_b_starts_from_no_folder(
    ruleset: str, word: str, folder: Path, tmp_path: Path
) -> None:
    schema = SCHEMAS[ruleset]
    with pytest.raises(UsageError, match=word) as direct:
        import_adapter(folder, schema, NOTHING)
    assert "start_adapter" in direct.value.hint
    policy = allowing(text=policy_text(ruleset, schema=schema))
    house = House(tmp_path / "house", schema=schema, policy=policy)
    text = RUN_YAML.replace("method: pubswap", "method: fedavg-grpo")
    with pytest.raises(UsageError, match=rf"run\.yaml:\d+: .*{word}"):
        house.submit(request(folder, text))
    house.submit(text)
    assert house.submissions.waiting, "without it the run is taken"


def test_where_a_is_trained_in_turn_only_a_run_of_one_round_is_gone_on_from(folder: Path, tmp_path: Path) -> None:
    """The folder's A as the seed draws it, and one value of it moved, as a second round moves it."""
    schema = SCHEMAS["rolora"]
    text = RUN_YAML.replace("method: pubswap", "method: fedavg-grpo")
    policy = allowing(text=policy_text("rolora", schema=schema))
    seed = int(next(line for line in text.splitlines() if line.startswith("seed: ")).split()[1])
    tensors = dict(initial_factors(schema.tensors, seed, "alternate"))
    for moved in (False, True):
        tensors[A] = tensors[A] + np.float32(moved)
        save_file({name_in_folder(name): values for name, values in tensors.items()}, folder / WEIGHTS)
        house = House(tmp_path / str(moved), schema=schema, policy=policy)
        if not moved:
            house.submit(request(folder, text))
            assert house.submissions.waiting
            continue
        with pytest.raises(UsageError) as refused:
            house.submit(request(folder, text))
        assert "first round" in refused.value.hint and "leave start_adapter out" in refused.value.hint


def test_a_request_names_a_folder_that_its_digest_is_of(folder: Path, tmp_path: Path) -> None:
    house = House(tmp_path / "house", policy=allowing())
    for text, cause in (
        (RUN_YAML + f"start_adapter_sha256: '{'ab' * 32}'\n", "in no folder"),
        (RUN_YAML + "start_adapter:\n", "in no folder"),
        (RUN_YAML + "start_adapter: 3\n", "is a path"),
        (request(folder, start_adapter_sha256=f"'{'ab' * 32}'"), "the adapter of that folder is"),
    ):
        with pytest.raises(UsageError, match=cause):
            house.submit(text)


# ---- who lets it in ------------------------------------------------------------------------------------------


def test_T20_a_charter_that_lists_no_adapter_refuses_the_run_when_it_is_submitted(
    folder: Path, earlier: House, tmp_path: Path
) -> None:
    for number, policy in enumerate((policy_of(policy_text()), allowing(f"['{'ab' * 32}']"))):
        house = House(tmp_path / str(number), policy=policy)
        with pytest.raises(UsageError, match=r"run\.yaml:\d+: start_adapter: .*the charter allows") as refused:
            house.submit(request(folder))
        assert earlier.run().adapter_digest in refused.value.message


@pytest.mark.parametrize(
    ("side", "kind", "key"), [("ingress", "global_adapter", "max_l2"), ("egress", "lora_factors", "max_total_l2")]
)
def test_an_adapter_longer_than_the_charter_lets_in_or_out_is_refused(
    side: str, kind: str, key: str, folder: Path, tmp_path: Path
) -> None:
    limit = 0.75
    policy = allowing()
    block = getattr(getattr(policy.file, side), kind).model_copy(update={key: limit})
    sided = getattr(policy.file, side).model_copy(update={kind: block})
    policy = replace(policy, file=policy.file.model_copy(update={side: sided}))
    weights(lambda tensors: [values.fill(0.0) for values in tensors.values()])(folder)
    for value, fits in ((0.7500001, False), (limit, True)):
        weights(lambda tensors, value=value: _put(tensors, A, value))(folder)  # type: ignore[misc]
        house = House(tmp_path / str(fits), policy=policy)
        if fits:
            house.submit(request(folder))
        else:
            with pytest.raises(UsageError, match=r"run\.yaml:\d+: its norm is 0\.75, and the charter allows 0\.75 "):
                house.submit(request(folder))


def test_the_plan_without_one_keeps_its_digest_and_an_empty_one_is_not_canonical() -> None:
    assert "start_adapter" not in PLAN.canonical()
    text = PLAN.canonical().replace('"swap_period"', '"start_adapter_sha256":"","swap_period"')
    with pytest.raises(PeerError, match="canonical"):
        plan_from_canonical(text)
    named = PLAN.model_copy(update={"start_adapter_sha256": "ab" * 32})
    assert plan_from_canonical(named.canonical()) == named and named.digest != PLAN.digest


def test_the_policy_that_says_nothing_keeps_its_digest() -> None:
    plain = policy_of(policy_text())
    assert allowing("[]").digest == plain.digest != allowing().digest
    with pytest.raises(FedSiloError):
        allowing("[every]")


def test_an_imported_adapter_is_not_the_drawn_one(folder: Path) -> None:
    drawn = initial_factors(SCHEMA.tensors, 7)
    assert load_file(folder / WEIGHTS)[name_in_folder(B)].any() and not drawn[B].any()
