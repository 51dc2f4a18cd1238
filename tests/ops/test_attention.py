"""Attention backends against plain softmax in float64, against each other, and who is chosen."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.errors import UserError
from trainer.ops.attention.choose import BACKENDS, REPEATING, backend_named, choose
from trainer.ops.attention.reference import Reference
from trainer.ops.attention.sdpa import CpuFlash, CudaFlash
from trainer.ops.attention.seam import Backend, Mask, attention
from trainer.ops.rope import rope

TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1.3e-3}
HEADS = [(4, 4), (4, 2), (3, 1)]
ROWS = Mask.of_rows(150)


@pytest.fixture(autouse=True)
def _one_thread() -> None:  # small work: on a busy machine, threads wait for each other
    torch.set_num_threads(1)


def documents(*lengths: int, device: str = "cpu", **options) -> Mask:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return Mask(bounds, bounds, max(lengths), max(lengths), **options)


def inputs(heads: tuple[int, int], dtype: torch.dtype, device: str = "cpu", tokens: int = 300) -> list[Tensor]:
    """q, k, v and the gradient of the result; q, k and v are views of one packed tensor, as `rope` makes them.

    Heads are of 16, on CUDA of 64, which all backends there take.
    """
    generator = torch.Generator().manual_seed(sum(heads))
    (num, num_kv), size = heads, 64 if device == "cuda" else 16
    packed = torch.randn(tokens, (num + 2 * num_kv) * size, generator=generator).to(device, dtype)
    dout = torch.randn(tokens, num, size, generator=generator).to(device, dtype)
    return [*(each.detach() for each in rope(packed, None, num, num_kv, in_place=True)), dout]


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """The definition: all scores of each document at once."""
    out, lse = torch.zeros_like(q), q.new_full((q.shape[1], len(q)), -math.inf)
    for queries, keys in mask.documents(len(q), len(k)):
        k_all, v_all = (each[keys].repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = torch.einsum("tnh,unh->ntu", q[queries], k_all) / math.sqrt(q.shape[-1])
        places = torch.arange(scores.shape[2] - scores.shape[1], scores.shape[2], device=q.device)
        distance = places.unsqueeze(1) - torch.arange(scores.shape[2], device=q.device)
        if mask.alibi is not None:
            scores = scores - mask.alibi.double().view(-1, 1, 1) * distance
        seen = (distance >= 0) & (distance < (mask.window or len(k)))
        scores = scores.masked_fill(~seen, -math.inf)
        lse[:, queries] = scores.logsumexp(-1)
        out[queries] = torch.einsum("ntu,unh->tnh", scores.softmax(-1).nan_to_num(), v_all)
    return out, lse


def results(tensors: list[Tensor], run) -> list[Tensor]:
    """The result and the gradients of q, k and v."""
    leaves = [each.detach().requires_grad_() for each in tensors[:3]]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want.cpu()).norm() / want.norm().clamp(min=1).cpu())  # what is zero, absolutely


def check(backend: Backend, tensors: list[Tensor], mask: Mask) -> None:
    dtype = tensors[0].dtype
    got = results(tensors, lambda q, k, v: attention(q, k, v, mask, backend))
    want = results([each.double() for each in tensors], lambda q, k, v: exact(q, k, v, mask)[0])
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert (a.dtype, a.shape) == (dtype, b.shape), name
        assert relative_error(a, b) < TOLERANCES[dtype], name
    _, lse = backend.forward(*tensors[:3], mask)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    _, want_lse = exact(*(each.double() for each in tensors[:3]), mask)
    assert torch.equal(lse.isinf(), want_lse.isinf())
    assert relative_error(lse.nan_to_num(neginf=0), want_lse.nan_to_num(neginf=0)) < min(TOLERANCES[dtype], 1e-3)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "documents"])
def test_equals_the_definition(
    backend: Backend, heads: tuple[int, int], dtype: torch.dtype, is_packed: bool, device: str
) -> None:
    tensors = inputs(heads, dtype, device)
    mask = documents(1, 130, 0, 169, device=device) if is_packed else ROWS
    if reason := backend.refusal(tensors[0], tensors[1], mask):
        pytest.skip(reason)
    check(backend, tensors, mask)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_window_and_alibi(backend: Backend, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" and backend.name != "reference" else torch.float64
    tensors = inputs((4, 2), dtype, device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    ran = 0
    for window in (None, 1, 40, 10_000):
        for alibi in (None, slopes):
            for mask in (
                documents(200, 100, device=device, window=window, alibi=alibi),
                Mask(None, None, 150, 150, window, alibi),
            ):
                if backend.refusal(tensors[0], tensors[1], mask) is None:
                    check(backend, tensors, mask)
                    ran += 1
    assert ran == 16 or backend.name != "reference"


def test_more_keys_than_queries_and_fewer(device: str) -> None:
    q, k, v, dout = inputs((4, 2), torch.float64, device)
    check(Reference(), [q[:60], k, v, dout[:60]], Mask(None, None, 20, 100))
    bounds_q, bounds_k = (
        torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 30, 200, 300], [0, 30, 30, 90])
    )
    check(Reference(), [q, k[:90], v[:90], dout], Mask(bounds_q, bounds_k, 170, 60))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_keys_that_no_query_sees_have_no_gradient(backend: Backend, size: int, device: str) -> None:
    """Documents that begin on another rank and end there, or whose first keys are outside of the window."""
    dtype = torch.bfloat16 if device == "cuda" and backend.name != "reference" else torch.float64
    bounds_q, bounds_k = (
        torch.tensor(bounds, dtype=torch.int32, device=device) for bounds in ([0, 30, 30, 300], [0, 40, 90, 390])
    )
    ran = 0
    for window, unseen in ((None, slice(40, 90)), (20, slice(90, 101))):
        mask = Mask(bounds_q, bounds_k, 270, 300, window)
        q, k, v, dout = (
            torch.randn(num, heads, size, device=device).to(dtype)
            for num, heads in ((300, 4), (390, 2), (390, 2), (300, 4))
        )
        if backend.refusal(q, k, mask) is not None:
            continue
        ran += 1
        for like in (k, v, k):  # what is handed out as new memory holds no zeros by chance
            torch.full_like(like, torch.nan)
        got = results([q, k, v, dout], lambda q, k, v, mask=mask: attention(q, k, v, mask, backend))
        want = results([each.double() for each in (q, k, v, dout)], lambda q, k, v, mask=mask: exact(q, k, v, mask)[0])
        for name, one, other in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            assert relative_error(one, other) < TOLERANCES[dtype], name
        assert not any(gradient[unseen].any() for gradient in got[2:])
    assert ran or backend.name != "reference"


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_on_the_cpu_it_is_scaled_dot_product_attention_bit_for_bit(heads: tuple[int, int], dtype: torch.dtype) -> None:
    tensors = inputs(heads, dtype)

    def today(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.view(2, 150, -1, 16).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1])
        return y.transpose(1, 2).flatten(0, 1)

    got = results(tensors, lambda q, k, v: attention(q, k, v, ROWS, CpuFlash()))
    assert all(torch.equal(a, b) for a, b in zip(got, results(tensors, today), strict=True))


@pytest.mark.parametrize("backend", map(backend_named, REPEATING), ids=lambda backend: backend.name)
def test_bits_repeat_in_deterministic_runs(backend: Backend, device: str) -> None:
    tensors = inputs((4, 2), torch.bfloat16, device)
    if reason := backend.refusal(tensors[0], tensors[1], ROWS):
        pytest.skip(reason)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [results(tensors, lambda q, k, v: attention(q, k, v, ROWS, backend)) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@pytest.mark.parametrize("name", REPEATING[1:-1])
def test_two_hundred_backwards_repeat_beside_load(name: str) -> None:
    q, k, v, dout = (torch.randn(4096, n, 128, device="cuda", dtype=torch.bfloat16) for n in (16, 8, 8, 16))
    backend, mask, other = backend_named(name), Mask.of_rows(2048), torch.randn(2048, 2048, device="cuda")
    if reason := backend.refusal(q, k, mask):
        pytest.skip(reason)
    torch.use_deterministic_algorithms(True)
    try:
        saved = (q, k, v, *backend.forward(q, k, v, mask))
        first, differ = backend.backward(dout, saved, mask), torch.zeros((), device="cuda")
        load = torch.cuda.Stream()
        for number in range(200):
            with torch.cuda.stream(load):
                for _ in range(number % 7):
                    other @ other
            for a, b in zip(backend.backward(dout, saved, mask), first, strict=True):
                differ += (a != b).sum()
    finally:
        torch.use_deterministic_algorithms(False)
    assert differ == 0


def test_the_reference_keeps_one_block_of_scores_in_memory() -> None:
    q, k, v, _ = inputs((4, 2), torch.float64, tokens=600)
    mask = Mask.of_rows(600)
    whole, blocks = exact(q, k, v, mask), Reference().forward(q, k, v, mask)
    for a, b in zip(blocks, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_a_document_does_not_depend_on_its_neighbours(device: str) -> None:
    q, k, v, _ = inputs((4, 2), torch.float32, device)
    backend = backend_named(choose(q, k, documents(100, 200, device=device), deterministic=True))
    before, _ = backend.forward(q, k, v, documents(100, 200, device=device))
    after, _ = backend.forward(q[100:], k[100:], v[100:], documents(200, device=device))
    assert torch.equal(before[100:], after)


def test_a_row_may_be_cut_by_its_lse() -> None:
    q, k, v, _ = inputs((4, 2), torch.float64, tokens=120)
    backend, mask = Reference(), Mask.of_rows(120)
    whole, _ = backend.forward(q, k, v, mask)
    # the last 60 queries, over the first 60 keys (all seen) and over their own
    own, own_lse = backend.forward(q[60:], k[60:], v[60:], Mask.of_rows(60))
    scores = torch.einsum("tnh,unh->ntu", q[60:], k[:60].repeat_interleave(2, 1)) / 4
    first = torch.einsum("ntu,unh->tnh", scores.softmax(-1), v[:60].repeat_interleave(2, 1))
    first_lse = scores.logsumexp(-1)
    share = (own_lse - torch.logaddexp(own_lse, first_lse)).exp().T.unsqueeze(-1)
    torch.testing.assert_close(own * share + first * (1 - share), whole[60:], rtol=1e-12, atol=1e-12)


def test_who_is_chosen(device: str) -> None:
    q, k, _, _ = inputs((4, 2), torch.bfloat16, device)
    if device == "cpu":
        assert choose(q, k, ROWS) == choose(q, k, ROWS, deterministic=True) == "sdpa-cpu"
        assert choose(q, k, documents(100, 200)) == "sdpa-cpu"
        assert choose(q, k, Mask(None, None, 150, 150, window=9)) == "reference"
    else:
        fused = [name for name in REPEATING if backend_named(name).refusal(q, k, ROWS) is None]
        assert choose(q, k, ROWS, deterministic=True) == fused[0] in ("flash-4", "sdpa-cudnn-flash")
        assert choose(q, k, ROWS) != "reference"
        assert choose(q.double(), k.double(), ROWS) == "reference"


class _Broken(Reference):
    name = "broken"

    def forward(self, q_TNH: Tensor, k_UKH: Tensor, v_UKH: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
        raise ValueError("no compiler")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_a_backend_that_fails_is_left_out_with_a_warning() -> None:
    backends = (_Broken(), CudaFlash(), Reference())
    q, k, _, _ = inputs((4, 2), torch.bfloat16, "cuda")
    with pytest.warns(UserWarning, match="broken fails here and is left out: no compiler"):
        assert choose(q, k, ROWS, backends=backends) == "sdpa-flash"


def test_names() -> None:
    assert [backend_named(backend.name) for backend in BACKENDS] == list(BACKENDS)
    with pytest.raises(UserError, match="no attention backend is named 'fast'") as caught:
        backend_named("fast")
    assert "sdpa-flash, " in str(caught.value)


def test_bad_arguments_are_named() -> None:
    q, k, v, _ = inputs((4, 2), torch.float32)
    backend = Reference()
    with pytest.raises(UserError, match=r"are not \[T, N, H\]"):
        attention(q, k, v[:, :1], ROWS, backend)
    with pytest.raises(UserError, match="2 key-value heads do not divide 3 query heads"):
        attention(q[:, :3], k, v, ROWS, backend)
    with pytest.raises(UserError, match="they must agree"):
        attention(q, k, v.double(), ROWS, backend)
    with pytest.raises(UserError, match="are not rows of 149 queries and 149 keys"):
        attention(q, k, v, Mask.of_rows(149), backend)
    with pytest.raises(UserError, match="bounds of both"):
        attention(q, k, v, Mask(torch.tensor([0, 300]), None, 300, 300), backend)
    with pytest.raises(UserError, match="a query sees at least one key"):
        attention(q, k, v, Mask(None, None, 150, 150, window=0), backend)
    with pytest.raises(UserError, match=r"sdpa-cpu cannot take q .*: it knows no window"):
        attention(q, k, v, Mask(None, None, 150, 150, window=3), CpuFlash())
