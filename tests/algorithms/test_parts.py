"""How a step's batch is cut, what its attention pads, and that nothing of a step stays when it fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fedsilo.protocol.tasks import LoadAdapter, PrivateStep
from silo.trainer import grpo
from silo.trainer.agreement import Limits
from silo.trainer.decoder import Decoder, Padding, stream_of
from silo.trainer.grpo import Answer, Group, Learner, batch_of
from tests.algorithms.tiny import make_adapter, make_plan, make_session, payload_of, random_factors

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def group(prompt_tokens: int, lengths: list[int], seed: int = 0) -> Group:
    draws = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 23, (count,), generator=draws).tolist())

    answers = tuple(Answer(tokens(length), "", True, float(place % 2)) for place, length in enumerate(lengths))
    return Group(tokens(prompt_tokens), answers)


def parts_of(groups: list[Group], microbatch_tokens: int = 1 << 20) -> list[Any]:
    plan = make_plan()
    return Learner(make_adapter(), plan, microbatch_tokens=microbatch_tokens)._parts(batch_of(groups, plan))


def scores_of(stream: Any) -> int:
    """Scores of one head that attention really computes."""
    of_answers = sum(block.query_places.shape[0] * block.mask(torch.float32)[0, 0].numel() for block in stream.blocks)
    return int(of_answers) + stream.prefix_places.shape[0] * stream.prefix_places.shape[1] ** 2


def test_attention_of_a_part_stays_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [group(4 + place, [30 + place, 3, 20, 9, 17, 40], place) for place in range(6)]
    (whole,) = parts_of(groups)
    monkeypatch.setattr(grpo, "SCORES_MAX", 4_000)
    parts = parts_of(groups)
    assert scores_of(whole.stream) > 4_000 >= max(scores_of(part.stream) for part in parts)
    assert sum(len(part.stream.targets) for part in parts) == len(whole.stream.targets)
    # not finer than the bound asks for
    assert len(parts) <= 2 * scores_of(whole.stream) / 4_000
    monkeypatch.setattr(grpo, "SCORES_MAX", 100)  # what exceeds the bound alone is a part of its own
    assert len(parts_of(groups)) == sum(len(each.answers) for each in groups)


def test_padding_is_counted_as_attention_pads() -> None:
    groups = [group(5, [70, 3, 33]), group(1, [16, 17]), group(9, [64, 65, 2])]
    answers = [(place, one.ids) for place, each in enumerate(groups) for one in each.answers]
    stream = stream_of([each.prompt_ids for each in groups], answers, CPU)
    padding = Padding()
    for each in groups:
        for place, one in enumerate(each.answers):
            padding = padding.with_answer(len(each.prompt_ids) - 1, len(one.ids), more_prompts=int(place == 0))
    assert padding.scores == scores_of(stream)


def test_a_long_answer_does_not_pad_the_others() -> None:
    """Each group has one: one rectangle over all rows would be some twenty times of what is needed."""
    groups = [group(8, [512, *[20] * 15], place) for place in range(4)]
    (part,) = parts_of(groups)
    needed = sum(len(one.ids) * (7 + len(one.ids)) for each in groups for one in each.answers)
    rectangle = 64 * 512 * (7 + 512)
    assert rectangle > 10 * needed
    # a block pads an answer to less than twice its length, so its square to less than four times
    assert scores_of(part.stream) < 1.1 * needed
    ragged = [group(8, list(range(17 + place, 400, 23)), place) for place in range(3)]
    (part,) = parts_of(ragged)
    needed = sum(len(one.ids) * (7 + len(one.ids)) for each in ragged for one in each.answers)
    assert scores_of(part.stream) < 4 * needed


def test_a_part_holds_no_mask_between_passes() -> None:
    (part,) = parts_of([group(8, [200] * 8)])
    held = sum(each.numel() * each.element_size() for block in part.stream.blocks for each in vars(block).values())
    assert held < scores_of(part.stream)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_gives_the_same_factors_and_is_really_on(
    checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the silo's own session, whose material says so."""
    layers_computed: list[int] = []
    layer_of = Decoder._layer_of

    def counted(*given: Any) -> torch.Tensor:
        layers_computed.append(1)
        return layer_of(*given)

    monkeypatch.setattr(Decoder, "_layer_of", counted)
    plan = make_plan(optimiser__epochs=1)
    results = []
    for setting in (False, checkpointing):
        layers_computed.clear()
        # The proof of agreement looks through the layers besides, for which nothing is computed twice.
        session, shape = make_session(plan=plan, checkpointing=setting, agreement=Limits(share=0.0))
        session.carry_out(LoadAdapter(1, ""), payload_of(shape, random_factors(shape, 0, 0.3)))
        session.carry_out(PrivateStep(1, 1))
        assert session._run is not None
        results.append((session._run.adapter.delta(), len(layers_computed)))
    (plain, passes), (other, other_passes) = results
    assert other_passes == passes * (2 if checkpointing else 1) > 0
    assert all((other[name] == plain[name]).all() for name in plain)
    assert any((plain[name] != 0).any() for name in plain)


def _out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("as the allocator says it")


@pytest.mark.parametrize("fault", [MemoryError, _out_of_memory, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["second epoch's backward", "inside the optimiser's step"])
def test_whatever_fails_an_update_leaves_factors_and_optimiser_as_they_were(
    fault: Callable[[], BaseException], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [group(5, [4, 7, 3]), group(2, [9, 1], 1)]
    adapter, twin = make_adapter(), make_adapter()
    plan = make_plan(optimiser__epochs=2, optimiser__state="keep")
    learner, other = Learner(adapter, plan, microbatch_tokens=1000), Learner(twin, plan, microbatch_tokens=1000)
    for one in (learner, other):
        one.update(groups)
    before = [parameter.detach().clone() for parameter in adapter.parameters]
    calls: list[int] = []

    def failing(real: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        def called(*given: Any, **options: Any) -> Any:
            calls.append(1)
            if after:
                real(*given, **options)
            if after or len(calls) == 2:
                raise fault()
            return real(*given, **options)

        return called

    with monkeypatch.context() as patched:
        if where.startswith("second"):
            patched.setattr(grpo, "policy_gain", failing(grpo.policy_gain, after=False))
        else:  # after some of it was applied
            patched.setattr(learner._optimiser, "step", failing(learner._optimiser.step, after=True))
        with pytest.raises(type(fault())):
            learner.update(groups)
    assert calls
    assert all(torch.equal(parameter, value) for parameter, value in zip(adapter.parameters, before, strict=True))
    assert all(parameter.grad is None for parameter in adapter.parameters)
    for one in (learner, other):
        one.update(groups)
    assert all(torch.equal(one, same) for one, same in zip(adapter.parameters, twin.parameters, strict=True))


def test_a_step_reads_its_figures_once() -> None:
    """However many parts: beside them only each epoch's gradient norm, which decides whether it is applied."""
    groups = [group(5, [4, 7, 3], place) for place in range(6)]
    reads: list[str] = []

    class Listening(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(function, "__name__", "")
            if name in ("__float__", "__int__", "__bool__", "item", "tolist") and args[0].dtype.is_floating_point:
                reads.append(name)
            return function(*args, **(kwargs or {}))

    found = []
    for budget in (1000, 10):
        plan = make_plan(optimiser__epochs=2, objective__kl_coefficient=0.1, objective__entropy_coefficient=0.1)
        learner = Learner(make_adapter(), plan, microbatch_tokens=budget)
        parts = learner._parts(batch_of(groups, plan))
        learner._parts = lambda given, parts=parts: parts  # type: ignore[method-assign]
        with Listening():
            learner.update(groups)
        found.append((len(parts), sum(name != "__bool__" for name in reads)))
        reads.clear()
    assert found[0][0] < found[1][0]
    assert found[0][1] == found[1][1] == 3
