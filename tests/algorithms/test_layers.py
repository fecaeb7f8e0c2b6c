"""Single pieces of the decoder: what they round, in which order they add, and what they hold at their peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from silo.trainer import decoder
from silo.trainer.decoder import attention, gather_rows, repeats_heads, token_logp
from silo.trainer.grpo import Answer, Group, Learner
from tests.algorithms.tiny import make_adapter, make_plan

pytestmark = pytest.mark.torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_an_update_on_two_threads_gives_the_same_factors_every_time() -> None:
    draws = torch.Generator().manual_seed(0)
    groups = [
        Group(
            tuple(torch.randint(3, 23, (31,), generator=draws).tolist()),
            tuple(
                Answer(tuple(torch.randint(3, 23, (24,), generator=draws).tolist()), "", True, float(sample % 2))
                for sample in range(128)  # of one prompt, so that both threads add to the same keys
            ),
        )
        for _ in range(1)
    ]

    def updated() -> list[torch.Tensor]:
        adapter = make_adapter()
        Learner(adapter, make_plan(), microbatch_tokens=1 << 20).update(groups)
        gradients = [parameter.grad for parameter in adapter.parameters if parameter.grad is not None]
        # the last epoch's too: one AdamW step is nearly the sign of a gradient and hides the gradient's last digits
        return [*(parameter.detach().clone() for parameter in adapter.parameters), *gradients]

    with threads(2):
        first = updated()
        for _ in range(3):
            assert all(torch.equal(one, other) for one, other in zip(updated(), first, strict=True))


@pytest.mark.parametrize("parts", [[(0, 12)], [(0, 6), (6, 9), (9, 12)], [(6, 9)]])
def test_joined_factors_add_what_a_loop_over_rows_adds(parts: list[tuple[int, int]]) -> None:
    draws = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(*sides, generator=draws) for sides in ((5, 8), (12, 8), (12,)))
    factors = [
        decoder.Factors(start, stop, torch.randn(2, 8, generator=draws), torch.randn(stop - start, 2, generator=draws))
        for start, stop in parts
    ]
    expected = torch.stack([weight.double() @ row.double() + bias.double() for row in x])
    for each in factors:
        for place, row in enumerate(x.double()):
            expected[place, each.start : each.stop] += 1.5 * (each.b.double() @ (each.a.double() @ row))
    joined = decoder.join_factors(factors, weight, 1.5, torch.float32)
    found = decoder.joined_linear(x, weight, bias, joined)
    assert torch.allclose(found.double(), expected, atol=1e-5)  # float32 on sums of ten numbers of size one
    assert torch.allclose(found, decoder.low_rank_linear(x, weight, bias, factors, 1.5), atol=1e-5)


def test_factors_beside_the_weight_give_the_bits_of_a_copy_and_copy_no_weight() -> None:
    """Also where the right part is written over between a forward pass and its backward pass, as other factors do."""
    draws = torch.Generator().manual_seed(3)

    def drawn(*sides: int) -> torch.Tensor:
        return torch.randn(*sides, generator=draws)

    roomy = drawn(16, 24 + decoder.room_for(4)).bfloat16()
    weight, x = roomy[:, :24], drawn(5, 24).bfloat16()
    start = drawn(4, 24), drawn(16, 4), x
    found = []
    for beside in (None, roomy):
        a, b, entry = (each.clone().requires_grad_() for each in start)
        factors = [decoder.Factors(0, 16, a, b)]
        y = decoder.low_rank_linear(entry, weight, None, factors, 0.5, roomy=beside)
        if beside is not None:
            beside[:, 24:].data.zero_()
            others = [decoder.Factors(0, 16, torch.ones(4, 24), torch.ones(16, 4))]
            decoder.low_rank_linear(x, weight, None, others, 0.5, roomy=beside)
        y.float().square().sum().backward()  # type: ignore[no-untyped-call]
        assert a.grad is not None and b.grad is not None and entry.grad is not None
        found.append([y.detach(), a.grad.clone(), b.grad.clone(), entry.grad.clone()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    class Sizes(TorchFunctionMode):
        joined = 0

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if function is torch.cat:
                Sizes.joined = max(Sizes.joined, out.numel())
            return out

    with Sizes(), torch.no_grad():
        decoder.low_rank_linear(x, weight, None, factors, 0.5, roomy=roomy)
    assert Sizes.joined < weight.numel()


def test_gathered_rows_add_their_gradients_in_float32() -> None:
    x = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    places = torch.zeros(40, 10, dtype=torch.long)
    gather_rows(x, places).sum().backward()
    assert x.grad is not None
    # adding ones in bfloat16 stops at 256
    assert x.grad.tolist() == [[400.0, 400.0], [0.0, 0.0], [0.0, 0.0]]
    wide = torch.randn(5, 3, 4, dtype=torch.float64)
    chosen = torch.tensor([[4, 0, 0], [2, 2, 4]])
    assert torch.equal(gather_rows(wide, chosen), wide[chosen])


@pytest.mark.parametrize("band", [(0.5, 0.99), (0.99, 0.999), (0.999, 0.9999), (0.9999, 0.99999)])
def test_in_bf16_a_near_certain_token_keeps_its_gradient(band: tuple[float, float]) -> None:
    """Against float64 on the same bfloat16 numbers, by band of the target's probability."""
    draws = torch.Generator().manual_seed(7)
    words, width, wanted = 64, 32, 48
    head = torch.randn(words, width, generator=draws).bfloat16()
    targets = torch.randint(words, (wanted,), generator=draws)
    # towards the target until its probability lies in the band
    low, high = (torch.logit(torch.tensor(side, dtype=torch.float64)) for side in band)
    hidden = torch.randn(wanted, width, generator=draws) * 0.1
    for _ in range(60):
        logits = hidden.bfloat16().double() @ head.double().T
        chosen = logits.gather(1, targets[:, None])
        odds = chosen - logits.scatter(1, targets[:, None], -torch.inf).logsumexp(1, keepdim=True)
        hidden += (0.3 * ((low + high) / 2 - odds) / head.double().square().sum(1)[targets, None]).float() * head[
            targets
        ]
    hidden = hidden.bfloat16()
    exact = hidden.double().requires_grad_()
    logp = (exact @ head.double().T).log_softmax(-1)[torch.arange(wanted), targets]
    inside = (logp.detach().exp() > band[0]) & (logp.detach().exp() < band[1])
    assert int(inside.sum()) > wanted / 2
    logp.sum().backward()
    found = hidden.clone().requires_grad_()
    token_logp(found, head, targets, 1.0)[0].sum().backward()
    assert exact.grad is not None and found.grad is not None
    error = (found.grad.double() - exact.grad).norm(dim=1) / exact.grad.norm(dim=1)
    # logits come in bfloat16: of 16 to 32 they are off by up to 1/16, and 1 - p with them by as large a share
    assert float(error[inside].max()) < 0.2


@pytest.mark.parametrize("masked", [True, False])
def test_heads_are_repeated_where_a_mask_would_cost_the_fused_kernel(
    masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's choice carried out on this device: the same values and gradients."""
    assert repeats_heads(torch.device("cuda")) and not repeats_heads(torch.device("cpu"))
    draws = torch.Generator().manual_seed(1)
    sides = ((2, 6, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8))
    inputs = [torch.randn(shape, generator=draws).requires_grad_() for shape in sides]
    mask = torch.zeros(1, 1, 5, 5).masked_fill_(torch.ones(5, 5).triu(1).bool(), -torch.inf) if masked else None
    asked: list[tuple[int, bool]] = []

    class Listening(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.nn.functional.scaled_dot_product_attention:
                asked.append((args[1].shape[1], kwargs["enable_gqa"]))
            return function(*args, **(kwargs or {}))

    results = []
    for repeats in (False, True):
        monkeypatch.setattr(decoder, "repeats_heads", lambda device, repeats=repeats: repeats)
        with Listening():
            found = attention(*inputs, mask=mask, causal=not masked)
        results.append((found, *torch.autograd.grad(found.square().sum(), inputs)))
    assert asked == [(2, True), (6, False) if masked else (2, True)]
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)  # float32, other orders of addition; numbers of about 1


@pytest.mark.parametrize(
    ("dtype", "with_entropy", "numbers"),
    [
        (torch.float32, False, 1.0),
        (torch.float32, True, 2.0),
        (torch.bfloat16, False, 1.5),
        (torch.bfloat16, True, 2.5),
    ],
)
def test_the_head_holds_what_its_docstring_says(
    dtype: torch.dtype, with_entropy: bool, numbers: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peak beyond what was there before, in buffers of float32, by torch's own count of every allocation."""
    tokens, words, width = 512, 2_048, 8
    monkeypatch.setattr(decoder, "LOGITS_MAX", 64 * words)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    head, targets = torch.randn(words, width, dtype=dtype), torch.randint(words, (tokens,))
    token_logp(hidden, head, targets, 0.7, with_entropy=with_entropy)  # what the libraries allocate once
    with torch.profiler.profile(profile_memory=True) as profiler:
        token_logp(hidden, head, targets, 0.7, with_entropy=with_entropy)
    held = peak = 0
    for event in sorted(
        (each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"),
        key=lambda each: each.start_ns(),
    ):
        held += event.nbytes()
        peak = max(peak, held)
    # [N] and [N, D] results and sums of rows come on top
    assert 0.9 * numbers < peak / (64 * words * 4) < numbers + 0.3


def test_added_to_bf16_weights_a_small_step_survives_in_the_mean_only() -> None:
    """What `low_rank_linear` says of the alternative, on a layer of 256 x 704 with factors of rank 32 in training."""
    draws = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(704, 256, generator=draws)).bfloat16().float()
    a = (torch.rand(32, 256, generator=draws) * 2 - 1) / 256**0.5
    b = 2e-3 * torch.randn(704, 32, generator=draws)
    step = 1e-5 * torch.randn(704, 32, generator=draws).sign()  # AdamW's first, at lr 1e-5
    wanted = 2.0 * step @ a
    got = (weight + 2.0 * (b + step) @ a).bfloat16().float() - (weight + 2.0 * b @ a).bfloat16().float()
    assert float((got != 0).float().mean()) < 0.2
    # 180,000 entries with noise of four times the step: the mean is known to 1 %
    assert float((got * wanted).sum() / wanted.square().sum()) == pytest.approx(1.0, abs=0.05)
    assert float((got - wanted).norm() / wanted.norm()) > 3
