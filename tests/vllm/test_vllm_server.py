"""The vLLM engine against a real server: it samples what the adapter computes, whatever happens to the server."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsilo.protocol.errors import OperationError
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.agreement import ExactDecoder
from silo.trainer.decoder import stream_of
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import Question, Rollout, RolloutPlace
from silo.trainer.rollout.vllm_server import VllmEngine
from silo.unix_http import ask
from tests.algorithms.tiny import make_shape, random_factors
from tests.security.test_T10_rollout_servers import process_ids
from tests.vllm.conftest import Served
from tests.vllm.small import CONTEXT_TOKENS, VOCABULARY, make_model

STOP = 1
DEADLINE_SECONDS = 600.0  # two cores that others use as well: a start of the server has taken four minutes
# float32 on both sides; products are summed in another order, which moved no log-probability by more than 1e-5
LOGP_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def adapter() -> LoraAdapter:
    model = make_model()
    shape = make_shape(model)
    adapter = LoraAdapter(model, shape)
    adapter.load(random_factors(shape, 1, 0.3))
    return adapter


@pytest.fixture
def engine(served: Served, adapter: LoraAdapter) -> Iterator[VllmEngine]:
    engine = new_engine(served, adapter)
    yield engine
    engine.close()


def new_engine(served: Served, adapter: LoraAdapter) -> VllmEngine:
    place = RolloutPlace(served.socket, served.socket, served.servers.adapters, DEADLINE_SECONDS)
    engine = VllmEngine(adapter, place, stop_ids=[STOP], vocabulary=VOCABULARY)
    engine.use("private")
    return engine


def questions(count: int, samples: int, *, seed: int = 0, tokens: int = 8, greedy: bool = False) -> list[Question]:
    draws = np.random.default_rng(seed)
    return [
        Question(
            tuple(int(each) for each in draws.integers(3, VOCABULARY, tokens)),
            tuple(None if greedy else np.random.default_rng((seed, place, sample)) for sample in range(samples)),
        )
        for place in range(count)
    ]


def move(adapter: LoraAdapter, seed: int) -> None:
    adapter.load(random_factors(adapter.shape, seed, 0.3))


def off_by(
    adapter: LoraAdapter, asked: Sequence[Question], answers: Sequence[Sequence[Rollout]], **options: Any
) -> float:
    """Largest difference between the engine's log-probabilities and the trainer's."""
    rows = [(place, answer.ids) for place, row in enumerate(answers) for answer in row]
    stream = stream_of([question.prompt_ids for question in asked], rows, adapter.decoder.device)
    ours = ExactDecoder(adapter.decoder).logp(stream, options.pop("temperature", 0.7), **options).numpy()
    theirs = np.concatenate([answer.logp for row in answers for answer in row])
    return float(np.abs(ours - theirs).max())


def greedy_ids(engine: Any, asked: list[Question], tokens: int = 32) -> list[tuple[int, ...]]:
    return [row[0].ids for row in engine.generate(asked, temperature=1.0, max_new_tokens=tokens)]


def metric(served: Served, name: str) -> float:
    text = str(ask(served.socket, "/metrics", timeout_seconds=60).value)
    return sum(float(each) for each in re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE))


# ---- what is sampled ---------------------------------------------------------------------------------


def test_equal_draws_give_equal_answers_and_other_draws_others(engine: VllmEngine) -> None:
    first = engine.generate(questions(4, 4), temperature=0.7, max_new_tokens=20)
    again = engine.generate(questions(4, 4), temperature=0.7, max_new_tokens=20)
    other = engine.generate(questions(4, 4, seed=1), temperature=0.7, max_new_tokens=20)
    assert first == again
    assert first != other
    assert all(len({answer.ids for answer in row}) > 1 for row in first)  # the samples of a prompt are not copies
    for answer in (answer for row in first for answer in row):
        assert all(0 <= each < VOCABULARY for each in answer.ids)
        assert answer.finished == (answer.ids[-1] == STOP) and STOP not in answer.ids[:-1]
        assert answer.finished or len(answer.ids) == 20


def test_greedy_answers_are_the_embedded_engines(engine: VllmEngine, adapter: LoraAdapter) -> None:
    embedded = EmbeddedEngine(adapter.decoder, stop_ids=[STOP], name=adapter.name)
    asked = questions(12, 1, greedy=True)
    ours = greedy_ids(embedded, asked)
    assert greedy_ids(engine, asked) == ours
    assert any(ids[-1] == STOP for ids in ours) and any(ids[-1] != STOP for ids in ours)  # both ends were compared


def test_log_probabilities_are_the_trainers(engine: VllmEngine, adapter: LoraAdapter) -> None:
    asked = questions(4, 8)
    answers = engine.generate(asked, temperature=0.7, max_new_tokens=24)
    assert off_by(adapter, asked, answers) < LOGP_TOLERANCE
    assert off_by(adapter, asked, answers, temperature=1.0) > 0.1  # they are those after temperature


def test_a_long_prompt_over_three_blocks_of_the_cache(engine: VllmEngine, adapter: LoraAdapter) -> None:
    """vLLM caches a prompt by blocks of 128 tokens, where an adapter of before would show (rule 1)."""
    for seed in (11, 12):
        move(adapter, seed)
        asked = questions(2, 3, tokens=400, seed=5)
        answers = engine.generate(asked, temperature=0.7, max_new_tokens=24)
        assert off_by(adapter, asked, answers) < LOGP_TOLERANCE


def test_sixty_requests_at_once_each_get_their_own_answer(engine: VllmEngine, adapter: LoraAdapter) -> None:
    asked = questions(60, 2, seed=4)
    answers = engine.generate(asked, temperature=0.7, max_new_tokens=16)
    assert off_by(adapter, asked, answers) < LOGP_TOLERANCE
    turned = [*answers[1:], answers[0]]
    assert off_by(adapter, asked, turned) > 1.0  # and it would be seen if one had another's


def test_sampled_and_greedy_answers_to_one_prompt(engine: VllmEngine) -> None:
    asked = questions(3, 2)
    both = [Question(each.prompt_ids, (*each.draws, None)) for each in asked]
    answers = engine.generate(both, temperature=0.7, max_new_tokens=12)
    alone = engine.generate(questions(3, 1, greedy=True), temperature=0.7, max_new_tokens=12)
    assert [row[2].ids for row in answers] == [row[0].ids for row in alone]
    assert [row[:2] for row in answers] == engine.generate(questions(3, 2), temperature=0.7, max_new_tokens=12)
    assert all(row[0].logp and not row[2].logp for row in answers)  # a greedy answer was not drawn


# ---- which adapter -----------------------------------------------------------------------------------


def test_every_answer_names_the_adapter_and_follows_it(engine: VllmEngine, adapter: LoraAdapter) -> None:
    names = set()
    for seed in (21, 22, 23):
        move(adapter, seed)
        asked = questions(3, 4)
        answers = engine.generate(asked, temperature=0.7, max_new_tokens=16)
        assert {answer.adapter for row in answers for answer in row} == {adapter.name()}
        assert off_by(adapter, asked, answers) < LOGP_TOLERANCE
        names.add(adapter.name())
    move(adapter, 24)
    assert off_by(adapter, asked, answers) > 0.1  # those of before would be seen, in the figures and
    assert {answer.adapter for row in answers for answer in row} != {adapter.name()}  # by name
    assert len(names) == 3


def test_one_adapter_is_held_and_its_folder_kept(engine: VllmEngine, adapter: LoraAdapter, served: Served) -> None:
    for seed in (31, 32, 33):
        move(adapter, seed)
        engine.generate(questions(1, 1), temperature=1.0, max_new_tokens=2)
    held = [each["id"] for each in ask(served.socket, "/v1/models", timeout_seconds=60).fields["data"]]
    ours = [name for name in held if name != "base"]
    assert len(ours) == 1 and ours[0].endswith(adapter.name())
    assert [path.name for path in (served.servers.adapters / "private").iterdir()] == ours


def test_the_base_is_an_adapter_of_zeros(engine: VllmEngine, adapter: LoraAdapter) -> None:
    embedded = EmbeddedEngine(adapter.decoder, stop_ids=[STOP], name=adapter.name)
    asked = questions(6, 1, greedy=True)
    adapted = greedy_ids(engine, asked)
    with adapter.off():
        assert greedy_ids(engine, asked) == greedy_ids(embedded, asked) != adapted
        sampled = engine.generate(drawn := questions(3, 3), temperature=0.7, max_new_tokens=12)
    assert off_by(adapter, drawn, sampled, base_only=True) < LOGP_TOLERANCE
    assert {answer.adapter for row in sampled for answer in row} == {"base"}


def test_a_server_without_the_adapter_says_404_and_gets_it_again(
    engine: VllmEngine, adapter: LoraAdapter, served: Served
) -> None:
    engine.generate(questions(1, 1), temperature=1.0, max_new_tokens=2)
    name = engine._servers["private"]._loaded
    body = {"model": name, "prompt": [3, 4], "max_tokens": 1}
    assert ask(served.socket, "/v1/completions", body, timeout_seconds=60).status == 200
    assert ask(served.socket, "/v1/unload_lora_adapter", {"lora_name": name}, timeout_seconds=60).status == 200
    assert ask(served.socket, "/v1/completions", body, timeout_seconds=60).status == 404
    asked = questions(2, 2)
    answers = engine.generate(asked, temperature=0.7, max_new_tokens=8)
    assert off_by(adapter, asked, answers) < LOGP_TOLERANCE
    assert engine._servers["private"]._loaded != name


def test_what_a_trainer_that_was_killed_left_is_unloaded(served: Served, adapter: LoraAdapter) -> None:
    gone = new_engine(served, adapter)
    gone.generate(questions(1, 1), temperature=1.0, max_new_tokens=2)
    left = gone._servers["private"]._loaded
    following = new_engine(served, adapter)
    following.generate(questions(1, 1), temperature=1.0, max_new_tokens=2)
    held = [each["id"] for each in ask(served.socket, "/v1/models", timeout_seconds=60).fields["data"]]
    assert left not in held and following._servers["private"]._loaded in held
    following.close()


# ---- what is refused ---------------------------------------------------------------------------------


def test_what_vllm_would_cut_short_is_refused_and_what_just_fits_is_not(engine: VllmEngine) -> None:
    fits = questions(1, 1, tokens=CONTEXT_TOKENS - 4)
    assert len(engine.generate(fits, temperature=1.0, max_new_tokens=4)[0][0].ids) <= 4
    with pytest.raises(OperationError, match="exceed the rollout server's 512"):
        engine.generate(fits, temperature=1.0, max_new_tokens=5)


def test_ids_that_are_no_tokens_are_refused(engine: VllmEngine) -> None:
    draw = np.random.default_rng(0)
    with pytest.raises(OperationError, match="no token of the model"):
        engine.generate([Question((3, VOCABULARY), (draw,))], temperature=1.0, max_new_tokens=1)
    assert engine.generate([Question((3, VOCABULARY - 1), (draw,))], temperature=1.0, max_new_tokens=1)


def test_an_adapter_of_too_high_a_rank_is_refused_with_the_key(served: Served) -> None:
    model = make_model()
    shape = make_shape(model, rank=16)
    adapter = LoraAdapter(model, shape)
    adapter.load(random_factors(shape, 1, 0.3))
    engine = new_engine(served, adapter)
    with pytest.raises(OperationError, match="does not take the adapter") as refused:
        engine.generate(questions(1, 1), temperature=1.0, max_new_tokens=1)
    assert "rollout.max_lora_rank" in refused.value.hint


# ---- private and public ------------------------------------------------------------------------------


def hits(served: Served, engine: VllmEngine, asked: list[Question]) -> float:
    """Tokens of these prompts that the server took from its prefix cache."""
    before = metric(served, "vllm:prefix_cache_hits_total")
    engine.generate(asked, temperature=1.0, max_new_tokens=2)
    return metric(served, "vllm:prefix_cache_hits_total") - before


def test_T14_public_prompts_find_nothing_that_private_ones_left(engine: VllmEngine, adapter: LoraAdapter) -> None:
    served = Served(None, None, engine._servers["private"]._socket)
    move(adapter, 41)
    engine.use("private")
    asked = questions(2, 1, tokens=300, seed=6)
    assert hits(served, engine, asked) == 0
    assert hits(served, engine, asked) > 0  # the same prompts again are found: the figure tells
    engine.use("public")
    assert hits(served, engine, asked) == 0
    assert hits(served, engine, asked) > 0
    engine.use("public")  # nothing changed hands
    assert hits(served, engine, asked) > 0
    engine.use("private")
    assert hits(served, engine, asked) == 0


def test_T14_a_cache_that_cannot_be_emptied_stops_the_step(
    engine: VllmEngine, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that still runs holds blocks, and vLLM then refuses; one that has ended does not."""
    monkeypatch.setattr("silo.trainer.rollout.vllm_server.CONTROL_SECONDS", 1.0)
    engine.generate(questions(1, 1), temperature=1.0, max_new_tokens=2)
    body = {
        "model": engine._servers["private"]._loaded,
        "prompt": [3] * 200,
        "max_tokens": 300,
        "ignore_eos": True,
        "n": 8,
    }
    running = threading.Thread(target=lambda: ask(served.socket, "/v1/completions", body, timeout_seconds=600))
    running.start()
    wait_until(lambda: metric(served, "vllm:num_requests_running") > 0)
    with pytest.raises(OperationError, match="cannot be emptied"):
        engine.use("public")
    running.join()
    engine.use("public")


# ---- the server's death ------------------------------------------------------------------------------


def wait_until(is_so: Any) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_server_killed_in_the_middle_of_a_step_is_started_again_and_the_step_completes(
    engine: VllmEngine, adapter: LoraAdapter, served: Served
) -> None:
    """Last of all, since it costs a start of the server."""
    move(adapter, 51)
    undisturbed = engine.generate(questions(8, 8), temperature=1.0, max_new_tokens=480)
    pids, restarts, pushed = process_ids(served.servers), served.servers.restarts, engine._servers["private"]._pushes
    found: list[Any] = []
    step = threading.Thread(
        target=lambda: found.append(engine.generate(questions(8, 8), temperature=1.0, max_new_tokens=480))
    )
    step.start()
    wait_until(lambda: metric(served, "vllm:num_requests_running") > 0)
    os.killpg(pids["private"], signal.SIGKILL)
    step.join(DEADLINE_SECONDS)
    assert found == [undisturbed]
    assert served.servers.restarts == restarts + 1
    assert process_ids(served.servers) != pids
    assert engine._servers["private"]._pushes > pushed  # the adapter went there again, under another name
    assert off_by(adapter, questions(8, 8), found[0], temperature=1.0) < LOGP_TOLERANCE


def test_T10_the_server_runs_without_network_and_says_nothing_home(served: Served) -> None:
    processes = [each for each in Path("/proc").iterdir() if each.name.isdecimal()]
    ours = [each for each in processes if str(served.socket).encode() in _read(each / "cmdline")]
    served_by = [
        each
        for each in ours
        if b"vllm.entrypoints" in _read(each / "cmdline") and b"isolation" not in _read(each / "cmdline")
    ]
    assert served_by
    for process in served_by:
        environment = _read(process / "environ").split(b"\0")
        for wanted in (b"VLLM_NO_USAGE_STATS=1", b"DO_NOT_TRACK=1", b"HF_HUB_OFFLINE=1"):
            assert wanted in environment
        if served.servers._level == "namespaces":
            assert (process / "ns" / "net").readlink() != Path("/proc/self/ns/net").readlink()
            interfaces = (process / "net" / "dev").read_text().splitlines()[2:]
            assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
