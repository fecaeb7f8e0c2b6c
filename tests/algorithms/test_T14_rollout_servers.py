"""The rollout client against servers that fail or lie, which a real one does not do when asked; `tests/vllm` has one.

The server here keeps vLLM's rules (`scripted_server`); each test says what it does wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedsilo.protocol.errors import OperationError
from silo.trainer.adapters.lora import LoraAdapter
from silo.trainer.rollout.embedded import EmbeddedEngine
from silo.trainer.rollout.engine import PromptSource, Question
from silo.trainer.rollout.vllm_server import VllmEngine
from tests.algorithms import tiny
from tests.algorithms.scripted_server import STOP, VOCABULARY, Reply, Scripted, engine_of, generate, place_of, questions

# ---- what is asked -----------------------------------------------------------------------------------


def test_one_request_a_prompt_with_ids_and_a_seed_of_its_own(server: Scripted, adapter: LoraAdapter) -> None:
    answers = generate(engine_of(server, adapter))
    bodies = sorted(server.bodies("/v1/completions"), key=lambda body: body["prompt"])
    assert [body["prompt"] for body in bodies] == [[3, 4], [3, 5]]
    assert [body["n"] for body in bodies] == [3, 3]
    assert len({body["seed"] for body in bodies}) == 2 and all(0 <= body["seed"] < 2**53 for body in bodies)
    for body in bodies:
        assert body["return_token_ids"] is True and body["logprobs"] == 0 and body["temperature"] == 0.5
        assert body["stop_token_ids"] == [STOP] and body["add_special_tokens"] is False
        # each word with its probability at this temperature, whatever the folder's generation_config.json says
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
        assert body["max_tokens"] == 4 and body["ignore_eos"] is True and body["skip_special_tokens"] is False
    assert [[answer.ids for answer in row] for row in answers] == [[(5, STOP)] * 3] * 2
    assert answers[0][0].logp == (-1.0, -2.0) and answers[0][0].finished


def test_prompt_and_answer_fit_the_servers_context_to_the_token(server: Scripted, adapter: LoraAdapter) -> None:
    """vLLM would cut what is longer short, and say that its length ended it."""
    engine = engine_of(server, adapter)

    def asked(tokens: int) -> list[Question]:
        return [Question((3,) * tokens, (np.random.default_rng(0),))]

    generate(engine, asked(64 - 4))  # of the 64 that the server says, and 4 new ones
    with pytest.raises(OperationError, match="a prompt of 61 tokens and 4 new ones exceed the rollout server's 64"):
        generate(engine, asked(64 - 4 + 1))
    assert len(server.bodies("/v1/completions")) == 1


def test_the_base_model_is_never_asked_for(server: Scripted, adapter: LoraAdapter) -> None:
    engine = engine_of(server, adapter)
    generate(engine)
    with adapter.off():
        generate(engine)
    names = {body["model"] for body in server.bodies("/v1/completions")}
    assert len(names) == 2 and "base" not in names and all(name.startswith("push-") for name in names)


def test_an_adapter_is_pushed_when_it_changed_and_never_over_another(server: Scripted, adapter: LoraAdapter) -> None:
    engine = engine_of(server, adapter)
    generate(engine)
    generate(engine)
    assert len(server.bodies("/v1/load_lora_adapter")) == 1
    held = {name: parameter.detach().clone().numpy() for name, parameter in adapter.factors.items()}
    with adapter.replaced_by(tiny.random_factors(adapter.shape, 9, 0.3)):
        generate(engine)
    generate(engine)  # the first one again: under a name and in a folder that are new all the same
    loads = server.bodies("/v1/load_lora_adapter")
    assert len({body["lora_name"] for body in loads}) == len({body["lora_path"] for body in loads}) == len(loads) == 3
    assert not any(body.get("load_inplace") for body in loads)
    order = [path.rpartition("/")[2] for path, _ in server.asked if "lora_adapter" in path]
    # never without an adapter: the next one is loaded before the last one goes
    assert order == ["load_lora_adapter", *["load_lora_adapter", "unload_lora_adapter"] * 2]
    assert [path.name for path in (server.socket.parent / "adapters" / "private").iterdir()] == list(server.loaded)
    folder = Path(next(iter(server.loaded.values())))
    stored = load_file(folder / "adapter_model.safetensors")
    assert {name: values.tolist() for name, values in stored.items()} == {
        f"base_model.model.{name}.weight": values.tolist() for name, values in held.items()
    }
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    assert (config.r, config.lora_alpha) == (adapter.shape.rank, adapter.shape.alpha)


# ---- what is not believed ----------------------------------------------------------------------------


def lie(**changes: Any) -> Callable[[str, Any, Reply], Reply]:
    def change(path: str, body: Any, reply: Reply) -> Reply:
        if path != "/v1/completions" or reply[0] != 200:
            return reply
        choices = [{**choice, **changes} for choice in reply[1]["choices"]]
        return 200, {**reply[1], "choices": choices}

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lie(prompt_token_ids=[3, 9]), "to another prompt"),
        (lie(token_ids=[5, VOCABULARY]), "no token of the model"),
        (lie(token_ids=[-1, STOP]), "no token of the model"),
        (lie(token_ids=[], logprobs={"token_logprobs": []}), "empty"),
        (lie(logprobs={"token_logprobs": [-1.0]}), "1 log-probabilities for 2 tokens"),
        (lie(token_ids=[STOP, STOP]), "does not end where it says"),
        (lie(finish_reason="length"), "does not end where it says"),
        (lie(token_ids=[5, 6], finish_reason="abort"), "it ended by 'abort'"),
        (lie(index=0), "not as many answers"),
        (lie(logprobs=None), "not usable"),
    ],
)
def test_T14_an_answer_to_something_else_is_refused(
    server: Scripted, adapter: LoraAdapter, change: Callable[[str, Any, Reply], Reply], complaint: str
) -> None:
    engine = engine_of(server, adapter)
    generate(engine)  # the good case
    server.changes = change
    with pytest.raises(OperationError, match=complaint):
        generate(engine)


def test_an_answer_with_another_adapter_is_a_stale_rollout(server: Scripted, adapter: LoraAdapter) -> None:
    engine = engine_of(server, adapter)
    server.changes = lambda path, body, reply: (
        (200, {**reply[1], "model": "push-000000-" + "0" * 64}) if path == "/v1/completions" else reply
    )
    with pytest.raises(OperationError) as refused:
        generate(engine)
    assert refused.value.code == "STALE_ROLLOUT"


# ---- a server that fails -----------------------------------------------------------------------------


def failing(times: int, reply: Reply, server: Scripted, *, forget: bool = False) -> Callable[[str, Any, Reply], Reply]:
    """The first `times` completions get `reply`; a server that died has forgotten its adapters."""
    left = [times]

    def change(path: str, body: Any, right: Reply) -> Reply:
        if path != "/v1/completions" or not left[0]:
            return right
        left[0] -= 1
        if forget:
            server.loaded.clear()
        return reply

    return change


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("reply", [(0, None), (500, "engine dead"), (503, "unwell")])
def test_what_was_not_answered_is_asked_again_with_the_same_seed(
    server: Scripted, adapter: LoraAdapter, reply: Reply, forget: bool
) -> None:
    engine = engine_of(server, adapter)
    server.changes = failing(1, reply, server, forget=forget)
    asked = questions(4)
    assert [len(row) for row in generate(engine, asked)] == [3] * 4
    bodies = server.bodies("/v1/completions")
    seeds = {
        tuple(body["prompt"]): {each["seed"] for each in bodies if each["prompt"] == body["prompt"]} for body in bodies
    }
    assert all(len(each) == 1 for each in seeds.values()) and len(bodies) > 4
    assert len(server.bodies("/v1/load_lora_adapter")) == 1 + forget
    after = [path for path, _ in server.asked].index("/v1/completions")
    assert ("/health", None) in server.asked[after:]


def test_a_server_that_fails_each_time_ends_the_step(server: Scripted, adapter: LoraAdapter) -> None:
    engine = engine_of(server, adapter)
    server.changes = failing(1000, (500, {"error": {"message": "broken"}}), server)
    with pytest.raises(OperationError, match="again and again: status 500: broken") as refused:
        generate(engine, questions(1))
    assert refused.value.code == "ROLLOUT_FAILED"
    assert len(server.bodies("/v1/completions")) == 4


def test_a_refused_request_is_not_asked_again(server: Scripted, adapter: LoraAdapter) -> None:
    engine = engine_of(server, adapter)
    server.changes = failing(1, (400, {"error": {"message": "bad"}}), server)
    with pytest.raises(OperationError, match=r"refuses a request \(400\): bad"):
        generate(engine, questions(1))
    assert len(server.bodies("/v1/completions")) == 1


def test_a_server_that_stays_away_is_named(server: Scripted, adapter: LoraAdapter) -> None:
    server.changes = lambda path, body, reply: (503, "") if path == "/health" else reply
    with pytest.raises(OperationError, match="does not answer") as refused:
        engine_of(server, adapter, timeout_seconds=0.1)
    assert refused.value.code == "ROLLOUT_GONE"


# ---- private and public ------------------------------------------------------------------------------


def test_T14_two_servers_each_see_their_own_prompts_only(
    server: Scripted, adapter: LoraAdapter, tmp_path: Path
) -> None:
    public = Scripted(tmp_path / "public.sock")
    try:
        engine = engine_of(server, adapter, public)
        generate(engine, [Question((3, 4), (np.random.default_rng(0),))])
        engine.use("public")
        generate(engine, [Question((3, 5), (np.random.default_rng(1),))])
        engine.use("private")
        generate(engine, [Question((3, 6), (np.random.default_rng(2),))])
        assert [body["prompt"] for body in server.bodies("/v1/completions")] == [[3, 4], [3, 6]]
        assert [body["prompt"] for body in public.bodies("/v1/completions")] == [[3, 5]]
        assert len(server.bodies("/v1/load_lora_adapter")) == len(public.bodies("/v1/load_lora_adapter")) == 1
        assert not server.bodies("/reset_prefix_cache")
    finally:
        public.close()


def test_T14_one_server_for_both_is_emptied_in_between(server: Scripted, adapter: LoraAdapter) -> None:
    engine = engine_of(server, adapter)
    for rows in ("private", "private", "public", "public", "private"):
        engine.use(rows)
        generate(engine, questions(1))
    marks = [path for path, _ in server.asked if path in ("/reset_prefix_cache", "/v1/completions")]
    sample, empty = "/v1/completions", "/reset_prefix_cache"
    # the first time too: nobody knows whom it answered before
    assert marks == [empty, sample, sample, empty, sample, sample, empty, sample]


@pytest.mark.parametrize("first", ["private", "public"])
def test_T14_a_server_for_both_that_outlived_a_trainer_is_emptied(
    server: Scripted, adapter: LoraAdapter, first: PromptSource
) -> None:
    """The trainer dies behind the rows of one kind; the one after it begins with the other."""
    engine = engine_of(server, adapter)
    engine.use("private" if first == "public" else "public")
    generate(engine, questions(1))
    before = len(server.asked)
    following = VllmEngine(adapter, place_of(server), stop_ids=[STOP], vocabulary=VOCABULARY)
    following.use(first)
    generate(following, questions(1))
    marks = [path for path, _ in server.asked[before:] if path in ("/reset_prefix_cache", "/v1/completions")]
    assert marks == ["/reset_prefix_cache", "/v1/completions"]


@pytest.mark.parametrize("reply", [(404, "not found"), (200, {"success": False}), (500, "")])
def test_T14_nothing_public_is_asked_where_the_cache_cannot_be_emptied(
    server: Scripted, adapter: LoraAdapter, reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("silo.trainer.rollout.vllm_server.CONTROL_SECONDS", 0.3)
    engine = engine_of(server, adapter)
    generate(engine)
    server.changes = lambda path, body, right: reply if path == "/reset_prefix_cache" else right
    with pytest.raises(OperationError, match="cannot be emptied"):
        engine.use("public")
    with pytest.raises(OperationError, match="cannot be emptied"):  # and not the second time either
        engine.use("public")
    count = len(server.bodies("/v1/completions"))
    with pytest.raises(OperationError, match="whose prompts"):
        generate(engine)
    assert len(server.bodies("/v1/completions")) == count
    server.changes = lambda path, body, right: right
    engine.use("public")
    generate(engine)


def test_nothing_is_sampled_before_it_is_said_whose_prompts_come(server: Scripted, adapter: LoraAdapter) -> None:
    engine = VllmEngine(adapter, place_of(server), stop_ids=[STOP], vocabulary=VOCABULARY)
    with pytest.raises(OperationError, match="whose prompts"):
        generate(engine)
    assert not server.bodies("/v1/completions")


def test_T14_the_session_asks_for_private_and_public_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call holds prompts of one kind, and every generator belongs to one call: in the embedded engine too."""
    from fedsilo.protocol._generated import federation_pb2 as pb
    from fedsilo.protocol.tasks import Evaluate, GeneratePublic, LoadAdapter, PrivateStep, PublicStep

    session, shape = tiny.make_session(
        private=[tiny.Row(f"p{place}", f"a{place}?", "0") for place in range(9)],
        public=[tiny.Row(f"q{place}", f"b{place}?", "0") for place in range(10)],
        held_out=[tiny.Row(f"h{place}", f"b{place}?", "0") for place in range(8)],
    )
    calls: list[tuple[str, set[int], list[str]]] = []
    said = ["nobody"]
    monkeypatch.setattr(EmbeddedEngine, "use", lambda self, rows: said.append(rows))
    right = EmbeddedEngine.generate

    def watched(self: EmbeddedEngine, asked: Any, **options: Any) -> Any:
        first = {question.prompt_ids[0] for question in asked}
        states = [str(draw.bit_generator.state) for each in asked for draw in each.draws if draw is not None]
        calls.append((said[-1], first, states))
        return right(self, asked, **options)

    monkeypatch.setattr(EmbeddedEngine, "generate", watched)
    payload, digest = tiny.start_payload(shape)
    session.carry_out(LoadAdapter(1, digest), payload)
    session.carry_out(PrivateStep(1, 1, ()))
    session.carry_out(GeneratePublic(1, 2, (0, 1, 2), "correct"))
    session.carry_out(PublicStep(1, 2, "none", pb.PublicDonors()))
    session.carry_out(PrivateStep(1, 3, ()))
    session.carry_out(Evaluate(1, digest), payload)
    codec = tiny.make_codec()
    kinds = {codec.prompt_ids("a")[0]: "private", codec.prompt_ids("b")[0]: "public"}
    assert {rows for rows, _, _ in calls} == {"private", "public"}
    for rows, first, _ in calls:
        assert {kinds[each] for each in first} == {rows}
    private = {state for rows, _, states in calls if rows == "private" for state in states}
    public = {state for rows, _, states in calls if rows == "public" for state in states}
    assert private and public and not private & public
