"""Dropout of attention's weights: which ones, how many, and the gradients of what is left."""

from dataclasses import replace

import pytest
import torch

from threefold.errors import UserError
from trainer.ops.attention.choose import BACKENDS, backend_named
from trainer.ops.attention.reference import BLOCK
from trainer.ops.attention.seam import Mask, attention
from trainer.ops.attention.weights import FIRST_SITE, WeightDropout
from trainer.ops.dropout import dropout_reference

LENGTH, HEADS = 12, 4
DROP = WeightDropout(0.3, 5, 9, 2, LENGTH, (range(3 * LENGTH, 5 * LENGTH),), 3 * LENGTH, 0)


def mask_of(drop: WeightDropout, num_heads: int) -> torch.Tensor:
    """What all weights of sample 4 are multiplied by, [N, S, S]: element by element, of its place alone."""
    ones = torch.ones(1, drop.length, drop.length, dtype=torch.float64)
    place = {"seed": drop.seed, "step": drop.step, "layer": drop.layer, "first_sample": 4}
    sites = range(FIRST_SITE, FIRST_SITE + num_heads)
    return torch.cat([dropout_reference(ones, drop.p, site=site, **place) for site in sites])


def test_any_part_of_the_weights_has_the_mask_of_the_whole() -> None:
    whole = mask_of(DROP, HEADS)
    for head, query, key in ((0, 0, 0), (1, 3, 5), (3, 11, 7)):
        ones = torch.ones(HEADS - head, LENGTH - query, LENGTH - key, dtype=torch.float64)
        found = DROP.of_heads(head).drop(ones, LENGTH + query, LENGTH + key)  # the second row
        assert torch.equal(found, whole[head:, query:, key:])
    cut = replace(DROP, queries=(range(3 * LENGTH, 3 * LENGTH + 2), range(4 * LENGTH + 5, 4 * LENGTH + 9)))
    ones = torch.ones(HEADS, 4, LENGTH, dtype=torch.float64)
    assert torch.equal(cut.drop(ones, 2, LENGTH), whole[:, 5:9]), "queries of a run behind another"


def test_heads_layers_steps_samples_and_seeds_are_drawn_apart_and_the_mean_stays() -> None:
    long = replace(DROP, length=256, queries=(range(1024, 2048),), first_key=1024)
    ones = torch.ones(HEADS, 256, 256, dtype=torch.float64)
    first = long.drop(ones, 0, 0)
    others = [replace(long, **{name: 1}).drop(ones, 0, 0) for name in ("seed", "step", "layer")]
    others += [long.drop(ones, 256, 256), long.of_heads(HEADS).drop(ones, 0, 0), first.roll(1, 0)]
    assert {round(float(value), 12) for value in first.unique()} == {0.0, round(1 / 0.7, 12)}
    for other in (first, *others):
        assert float(other.mean()) == pytest.approx(1, abs=0.01)
        assert float((other == 0).double().mean((1, 2)).max()) == pytest.approx(0.3, abs=0.01)
    for other in others:
        both = ((first == 0) & (other == 0)).double().mean()
        assert float(both) == pytest.approx(0.09, abs=0.005)


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 40])
def test_gradients_are_those_of_plain_torch(num_kv_heads: int, window: int | None, device: str) -> None:
    length = BLOCK + 30
    generator = torch.Generator().manual_seed(2)
    q, k, v, dout = (
        torch.randn(length, heads, 8, generator=generator, dtype=torch.float64).to(device)
        for heads in (HEADS, num_kv_heads, num_kv_heads, HEADS)
    )
    drop = replace(DROP, length=length, queries=(range(4 * length, 5 * length),), first_key=4 * length)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, replace(Mask.of_rows(length), window=window, dropout=drop), backend_named("reference"))
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    q, k, v = plain[0], *(x.repeat_interleave(HEADS // num_kv_heads, 1) for x in plain[1:])
    places = torch.arange(length, device=device)
    back = places.unsqueeze(1) - places
    hidden = (back < 0) | (back >= (window or length))
    scores = torch.einsum("snh,tnh->nst", q, k) / 8**0.5
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) * mask_of(drop, HEADS).to(device)
    wanted = torch.einsum("nst,tnh->snh", weights, v)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, dout), torch.autograd.grad(wanted, plain, dout), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_other_backends_are_refused() -> None:
    q = torch.zeros(2 * LENGTH, 2, 8)
    assert [backend.name for backend in BACKENDS if backend.drops_weights] == ["reference"]
    for backend in BACKENDS:
        if not backend.drops_weights:
            with pytest.raises(UserError, match=f"{backend.name} drops no weights"):
                attention(q, q, q, replace(Mask.of_rows(LENGTH), dropout=DROP), backend)
