"""Probes: the trainer's own ops on tensors of this device, pass by pass, at the places that a calibration has.

A probe is a generator: it makes ready what its passes overwrite up to its first yield, and does one pass before each
further one. After its first run it waits for nothing and copies nothing from the host: that waits for the device, and
then short passes take as long as the host does. Factors of products are views of a few buffers that all share, so that
many fit, and nothing stays in a cache from one probe to the next.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from trainer.config import Fp8Config, OptimConfig
from trainer.linear.fp8 import CastCounts, Fp8Gemm, Recipe
from trainer.linear.weight import Weight, add_bias_gradient
from trainer.ops.activation import ACTIVATIONS, Activation
from trainer.ops.adamw import Interval, IntervalTable
from trainer.ops.attention.choose import backend_named, choose
from trainer.ops.attention.seam import Backend, Mask
from trainer.ops.cross_entropy import VocabularyPart, row_sums, write_gradient
from trainer.ops.norm import add_norm
from trainer.ops.rope import rope_of_handles, rope_turns
from trainer.store.host_memory import locked_zeros
from trainer.store.numa import cores_of, node_of
from trainer.store.window import CudaLanes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LINEAR = ("forward", "dgrad", "wgrad")
STREAMED_BYTES = 128 << 20  # each way, as a piece of a window
BOTH = ("forward", "backward")
Kernel = Callable[["Buffers", torch.dtype], Iterator[None]]
RECIPES = ("tensorwise", "rowwise", "blockwise")
SIDES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 4))  # rows and columns of weights, in hidden sizes


@dataclass(frozen=True)
class Scale:
    """At which places a device is measured: hidden sizes, tokens of products in bf16 and in other dtypes, the rows of a
    head, lengths and sizes of heads of attention, and bytes of other kernels."""

    hidden: tuple[int, ...]
    tokens: tuple[int, ...]
    few_tokens: int
    vocab: int
    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    width: int  # of all heads together
    kernel_bytes: tuple[int, ...]


OF_GPU = Scale(
    hidden=(8192, 4096, 2048, 1024),
    tokens=(32768, 4096),
    few_tokens=8192,
    vocab=32768,
    lengths=(16384, 4096, 1024),
    heads=(64, 96, 128),
    width=1536,
    kernel_bytes=(1 << 24, 1 << 28),
)
OF_CPU = Scale(
    hidden=(256, 128),
    tokens=(128, 64),
    few_tokens=128,
    vocab=512,
    lengths=(128, 64),
    heads=(16, 32),
    width=128,
    kernel_bytes=(1 << 16, 1 << 18),
)


@dataclass(frozen=True)
class Probe:
    """A part in a dtype at a place, the work of each of its passes, and how to do them."""

    part: str
    dtype: str
    place: tuple[float, ...]
    work: dict[str, float]
    run: Callable[[], Iterator[None]]


class Buffers:
    """Flat tensors of a device by their use, full of random numbers, each as large as the largest part that was asked
    for."""

    def __init__(self, device: torch.device, capacity: float) -> None:
        self.device, self.capacity = device, capacity
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}
        self._tables: dict[tuple[torch.dtype, int], IntervalTable] = {}

    def take(self, use: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Return a part of one in a shape."""
        size, key = math.prod(shape), (use, dtype)
        if key not in self._flat or len(self._flat[key]) < size:
            self._flat.pop(key, None)
            self._flat[key] = torch.randn(size, device=self.device, dtype=dtype)
        return self._flat[key][:size].view(shape)

    def table(self, dtype: torch.dtype, number: int) -> IntervalTable:
        """Return a part of a parameter as the optimizer walks it; the same one each time."""
        if (dtype, number) not in self._tables:
            gradient, average, squared, master = (
                self.take(use, torch.float32, number) for use in ("gradient", "exp_avg", "exp_avg_sq", "master")
            )
            published = self.take("weight", dtype, number) if dtype != torch.float32 else None
            part = Interval(gradient, average, squared.abs_(), master, published, decays=True, row=0)
            self._tables[dtype, number] = IntervalTable([part])
        return self._tables[dtype, number]

    def holds(self, num_bytes: float) -> bool:
        """Return whether a probe may take so much."""
        return num_bytes <= self.capacity / 6


def probes(device: torch.device, capacity: float, scale: Scale) -> Iterator[Probe]:
    """Yield all probes, long ones first: then the host is ahead of the device when short ones come."""
    buffers = Buffers(device, capacity)
    main = "bf16" if device.type == "cuda" else "fp32"
    for dtype in DTYPES:
        hidden = scale.hidden if dtype == main else scale.hidden[-2:]
        for tokens in scale.tokens if dtype == main else (scale.few_tokens,):
            yield from products(buffers, dtype, (tokens, hidden, scale.vocab))
    for recipe in RECIPES:
        yield from products(buffers, "bf16", (scale.few_tokens, scale.hidden, 0), recipe)
    for dtype, size, ratio in product(DTYPES, scale.heads, (1, 4)):
        for length in scale.lengths if dtype == main else scale.lengths[-1:]:
            yield attention(buffers, dtype, (scale.lengths[0], length), (scale.width // size, ratio, size))
    for num_bytes in scale.kernel_bytes:
        yield from kernels(buffers, DTYPES[main], num_bytes, scale.hidden[-1])
    if device.type == "cuda":
        yield stream(device, STREAMED_BYTES)


def products(
    buffers: Buffers, dtype: str, sizes: tuple[int, tuple[int, ...], int], recipe: str = ""
) -> Iterator[Probe]:
    """Yield those of linears for tokens, of hidden sizes and with a head's rows, in a dtype or in eight bits."""
    tokens, hidden_sizes, vocab = sizes
    sides = [(rows * hidden, columns * hidden) for hidden in hidden_sizes for rows, columns in SIDES]
    sides += [(vocab, hidden) for hidden in hidden_sizes if vocab]
    for rows, columns in dict.fromkeys(sides):
        size = DTYPES[dtype].itemsize
        if buffers.holds(2 * size * tokens * (rows + columns) + (size + 4) * rows * columns):
            run = partial(linear, buffers, DTYPES[dtype], (tokens, rows, columns), recipe)
            work = dict.fromkeys(LINEAR, 2.0 * tokens * rows * columns)
            yield Probe("product", f"fp8-{recipe}" if recipe else dtype, (tokens, rows, columns), work, run)


def linear(buffers: Buffers, dtype: torch.dtype, sides: tuple[int, int, int], recipe: str) -> Iterator[None]:
    """Make the three products of a linear."""
    tokens, rows, columns = sides
    x, dy = buffers.take("x", dtype, tokens, columns), buffers.take("dy", dtype, tokens, rows)
    values = buffers.take("weight", dtype, rows, columns)
    weight = Weight("probe", values, buffers.take("gradient", torch.float32, rows, columns), contributes=True)
    if recipe:
        fp8 = Fp8Config(recipe=recipe, wgrad="fp8")  # type: ignore[arg-type]
        counts = CastCounts(fp8, 1, buffers.device)
        weight.gemm = Fp8Gemm(weight, Recipe(fp8, counts), keeps_columns=True)
        weight.gemm.forward(weight.gemm.take(x[:128]))  # so that the weight is cast, as once an update
    weight.add_gradient(lambda out, first: None)  # so that products add to what is there
    gemm = weight.gemm
    yield
    taken = gemm.take(x, keeps=True)
    gemm.forward(taken)
    kept = gemm.keep(taken)
    yield
    shared = gemm.share(dy)
    gemm.dgrad(shared)
    yield
    gemm.wgrad(shared, gemm.retake(*kept))
    yield


def attention(buffers: Buffers, dtype: str, rows: tuple[int, int], heads: tuple[int, int, int]) -> Probe:
    """Return the probe of attention over `rows`, tokens and the length of a row, and `heads`: number, ratio, size."""
    tokens, length = rows
    number, ratio, size = heads
    mask = Mask.of_rows(length)
    chosen: list[Backend] = []

    def run() -> Iterator[None]:
        q, dout = (buffers.take(use, DTYPES[dtype], tokens, number, size) for use in ("x", "dy"))
        k, v = (buffers.take(use, DTYPES[dtype], tokens, number // ratio, size) for use in ("k", "v"))
        if not chosen:  # as a run does
            chosen.append(backend_named(choose(q, k, mask)))
        yield
        out, lse = chosen[0].forward(q, k, v, mask)
        yield
        chosen[0].backward(dout, (q, k, v, out, lse), mask)
        yield

    forward = 2.0 * tokens * (length + 1) * number * size
    return Probe("attention", dtype, (length, size, ratio), dict(zip(BOTH, (forward, 2.5 * forward), strict=True)), run)


def kernels(buffers: Buffers, dtype: torch.dtype, num_bytes: int, width: int) -> Iterator[Probe]:
    """Yield those of kernels that move so many bytes in their forward pass, in rows of a width."""
    size, once, twice = dtype.itemsize, (1.0, 1.0), (1.0, 2.0)
    forms: list[tuple[str, tuple[float, ...], Kernel]] = [
        ("rmsnorm", once, partial(norms, rows=num_bytes // (4 * size * width), width=width)),
        ("layernorm", once, partial(norms, rows=num_bytes // (4 * size * width), width=width, has_bias=True)),
        ("rope", once, partial(turns, rows=num_bytes // (2 * size * width), width=width)),
        ("cross_entropy", twice, partial(loss, rows=num_bytes // (4 * size * width), width=4 * width)),
        ("copy", once, partial(copies, number=num_bytes // (2 * size))),
        ("update", (1.0,), partial(updates, number=num_bytes // (30 if size == 2 else 28))),
        ("norms", (1.0,), partial(squares, number=num_bytes // 4)),
        ("bias", (1.0,), partial(biases, rows=num_bytes // (size * width), width=width)),
    ]
    for name, activation in ACTIVATIONS.items():
        rows = num_bytes // ((activation.num_parts + 1) * size * width)
        forms.append((name, twice, partial(activations, activation=activation, rows=rows, width=width)))
    for name, times, run in forms:
        ways = ("backward",) if name == "bias" else BOTH
        work = {way: num_bytes * factor for way, factor in zip(ways, times, strict=False)}
        yield Probe(name, "any", (num_bytes,), work, partial(run, buffers, dtype))


def stream(device: torch.device, num_bytes: int) -> Probe:
    """Return the probe of state that comes from the host, while as much goes there."""
    lanes = CudaLanes(device)
    near = cores_of(node_of(device))
    hosts = [locked_zeros(num_bytes, torch.uint8, cores=near, option="trainer bench gpu") for _ in range(2)]
    here = torch.zeros(2, num_bytes, dtype=torch.uint8, device=device)

    def run() -> Iterator[None]:
        yield
        ways = ("in", [(here[0], hosts[0])]), ("out", [(hosts[1], here[1])])
        begin = lanes.mark()
        for end in [lanes.copy(lane, copies, begin) for lane, copies in ways]:
            lanes.wait(end)
        yield

    return Probe("stream", "any", (num_bytes,), {"forward": float(num_bytes)}, run)


def norms(buffers: Buffers, dtype: torch.dtype, *, rows: int, width: int, has_bias: bool = False) -> Iterator[None]:
    """Add and normalise, and back."""
    x, residual = (buffers.take(use, dtype, rows, width).detach().requires_grad_() for use in ("x", "k"))
    gradients = [buffers.take(use, dtype, rows, width) for use in ("dy", "v")]
    weight = torch.ones_like(x[0])
    bias = torch.zeros_like(weight) if has_bias else None
    yield
    outputs = add_norm(x, residual, weight, bias, 1e-5)
    yield
    torch.autograd.grad(outputs, (x, residual), gradients)
    yield


def turns(buffers: Buffers, dtype: torch.dtype, *, rows: int, width: int) -> Iterator[None]:
    """Turn queries and keys in place, and back; half of the heads are queries."""
    size = min(128, width // 4)
    number = width // (4 * size)
    packed = buffers.take("x", dtype, rows, width).detach().requires_grad_() * 1
    angles = rope_turns(torch.arange(rows, device=buffers.device), size, 1e4, dtype)
    counts = (2 * number, number)
    gradients = [buffers.take("dy", dtype, rows, heads, size) for heads in (*counts, number)]
    yield
    outputs = rope_of_handles(packed, angles, counts, None, 0.0, "csrc")
    yield
    torch.autograd.grad(outputs, packed, gradients)
    yield


def activations(
    buffers: Buffers, dtype: torch.dtype, *, activation: Activation, rows: int, width: int
) -> Iterator[None]:
    """Make the product, and back over both tensors."""
    x = buffers.take("x", dtype, rows, activation.num_parts * width).clone()
    dy = buffers.take("dy", dtype, rows, width).clone()
    yield
    activation.forward(x)
    yield
    activation.backward(dy, x)
    yield


def loss(buffers: Buffers, dtype: torch.dtype, *, rows: int, width: int) -> Iterator[None]:
    """Sum over the logits, and write their gradient over them."""
    logits = buffers.take("dy", dtype, rows, width).clone()
    labels, part = torch.zeros(rows, dtype=torch.int64, device=buffers.device), VocabularyPart(0, width)
    yield
    sums = row_sums(logits, labels, part)
    yield
    write_gradient(logits, labels, part, sums)
    yield


def copies(buffers: Buffers, dtype: torch.dtype, *, number: int) -> Iterator[None]:
    """Copy there, and back."""
    here, there = buffers.take("x", dtype, number), buffers.take("v", dtype, number)
    yield
    there.copy_(here)
    yield
    here.copy_(there)
    yield


def biases(buffers: Buffers, dtype: torch.dtype, *, rows: int, width: int) -> Iterator[None]:
    """Add up the gradient of a bias."""
    dy = buffers.take("dy", dtype, rows, width)
    out = torch.zeros(width, dtype=torch.float32, device=buffers.device)
    yield
    add_bias_gradient(out, dy, first=False)
    yield


def updates(buffers: Buffers, dtype: torch.dtype, *, number: int) -> Iterator[None]:
    """Take one step of AdamW with masters in fp32."""
    factor, is_bad = torch.ones((), device=buffers.device), torch.zeros((), device=buffers.device)
    table = buffers.table(dtype, number)
    yield
    table.adamw(OptimConfig(), 1e-9, 1000, factor=factor, is_bad=is_bad)
    yield


def squares(buffers: Buffers, dtype: torch.dtype, *, number: int) -> Iterator[None]:
    """Sum the squares of a gradient."""
    table, out = buffers.table(dtype, number), torch.zeros(1, dtype=torch.float64, device=buffers.device)
    yield
    table.write_squared_norms(out)
    yield
