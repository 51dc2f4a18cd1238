"""How long the passes of a stage take: its products by their sides, attention, other kernels by bytes, and the host.

What a layer multiplies is read off the rank's own table of parameters, and what its kernels move off the sizes of its
activations. Where a rank has several experts each has its share of the rows. Transfers of tokens are exposed but for
what is multiplied beside them.
"""

import math
from dataclasses import dataclass

import numpy as np

from ckptkit import Coords
from trainer.config import Config
from trainer.config.eight_bits import eight_bit_names
from trainer.config.resolve import cuts_tokens, has_experts, layer_windows, layout_of, longest_row
from trainer.engine import DTYPES
from trainer.model.flops import layer_attention
from trainer.model.recompute import Recompute
from trainer.model.stages import stage_ranges
from trainer.model.table import local_runs, parameter_table
from trainer.ops.dtypes import wide_dtype
from trainer.parallel.cross_entropy import tokens_at_once
from trainer.plan.rates import EIGHT_BITS, Rates, Way
from trainer.plan.token_calls import TokenCalls
from trainer.run.activations import Sizes
from trainer.store.plan import ParameterRun

NORM_STREAMS = 4  # that a norm with its sum reads and writes in each pass
ENDS_KERNELS = 8  # that each pass of embedding or head starts, about
# of the ops of a layer, of which each takes the host about as long: q|k|v, rotation and attention; gate|up and the
# nonlinearity; beside these are two norms and two linears
PARTS, NUM_OPS = {"attention": 3, "mlp": 2}, 9


@dataclass(slots=True)
class Pass:
    """Seconds of one pass of a micro-batch through a stage; `weights` are those of its products for weights."""

    products: float = 0.0
    attention: float = 0.0
    other: float = 0.0
    transfers: float = 0.0
    host: float = 0.0
    weights: float = 0.0

    @property
    def computed(self) -> float:
        """Return the seconds of the device."""
        return self.products + self.attention + self.other + self.transfers

    @property
    def total(self) -> float:
        """Return the seconds of the pass, in which the host may be what is slow."""
        return max(self.computed, self.host)


@dataclass(frozen=True, slots=True)
class LinearTimes:
    """Seconds of the products of a layer: forward, for gradients of inputs, and of weights; those made again. The
    `operations` are those of one of the three."""

    forward: float
    dgrad: float
    wgrad: float
    again: float
    operations: float

    @property
    def backward_rate(self) -> float:
        """Return the operations a second of a product for gradients."""
        return 2 * self.operations / (self.dgrad + self.wgrad)

    @property
    def forward_rate(self) -> float:
        """Return the operations a second of a product of the forward."""
        return self.operations / self.forward


def stage_passes(config: Config, rates: Rates, calls: TokenCalls) -> dict[tuple[str, int], Pass]:
    """Return the times of the passes of each stage; `calls` are those of a layer and of the ends for tokens."""
    table, layout, model, train = parameter_table(config), layout_of(config), config.model, config.train
    windows, sizes = layer_windows(config), {kind: Sizes.of(config, experts=kind) for kind in (False, True)}
    times = StageTimes(config, rates, [local_runs(config, table, layout, Coords(pp=pp)) for pp in range(layout.pp)])
    sends = 2 * rates.call_host_s() * (layout.pp > 1)
    passes: dict[tuple[str, int], Pass] = {}
    for stage, numbers in enumerate(stage_ranges(config, table, layout.num_stages)):
        forward, backward = (Pass(host=rates.launch_s(4) + sends) for _ in "FB")
        for place, layer in enumerate(numbers):
            again = Recompute.of_layer(train, place)
            products = times.products(stage % layout.pp, f"layers.{layer}.", again)
            attention, kernels = times.attention(windows[layer]), times.kernels(sizes[has_experts(model, layer)], again)
            forward.products += products.forward
            forward.attention += attention["forward"]
            forward.other += kernels["forward"]
            forward.transfers += calls.exposed_s("layer", "F", products.forward_rate)
            forward.host += rates.layer_host_s("F") + calls.host_s("layer", "F")
            backward.products += products.dgrad + products.wgrad + products.again
            backward.weights += products.wgrad
            backward.attention += attention["backward"] + makes_attention(again) * attention["forward"]
            backward.other += kernels["backward"]
            backward.transfers += calls.exposed_s("layer", "B", products.backward_rate)
            backward.host += rates.layer_host_s("B") + calls.host_s("layer", "B")
            backward.host += again_host_s(rates, again)
        if stage == 0:
            times.add_embedding(sizes[False], forward, backward)
        if stage == layout.num_stages - 1:
            times.add_head(sizes[False], forward, backward)
            for way, own in (("F", forward), ("B", backward)):
                own.transfers += calls.exposed_s("ends", way, rates.flops)
                own.host += calls.host_s("ends", way)
        passes["F", stage], passes["B", stage] = forward, backward
    return passes


def is_made_again(name: str, again: Recompute) -> bool:
    """Return whether the backward makes the product of a weight again: a region ends before its last linear."""
    module, last = ("attention", ".attn.out.") if ".attn." in name else ("mlp", ".down.")
    if again.is_full:
        return ".down." not in name
    return module in again.modules and last not in name


def again_host_s(rates: Rates, again: Recompute) -> float:
    """Return what the host takes for what a layer's backward makes again: norms, and shares of the forward's ops.

    Of all but norms and the last linear that is 6 of 9.
    """
    if not (again.is_full or again.modules):
        return 0.0
    made = sum(number for name, number in PARTS.items() if again.is_full or name in again.modules) + again.is_full
    return rates.again_host_s() + made / NUM_OPS * rates.layer_host_s("F")


def makes_attention(again: Recompute) -> bool:
    """Return whether the backward makes the result of attention again."""
    return (again.is_full and not again.keeps_attention) or "attention" in again.modules


class StageTimes:
    """The times of the parts of a run's stages; each kind of layer is asked for once."""

    def __init__(self, config: Config, rates: Rates, runs: list[list[ParameterRun]]) -> None:
        layout = layout_of(config)
        self.config, self.rates, self.runs = config, rates, runs
        self.dtype, self.eight_bits = config.train.precision, eight_bit_names(config)
        self.tokens = config.train.micro_batch_size * longest_row(config) // layout.cp
        self.own_tokens = self.tokens // layout.tp if cuts_tokens(config) else self.tokens
        self.itemsize = DTYPES[self.dtype].itemsize
        self.wide = wide_dtype(DTYPES[self.dtype]).itemsize
        self._known: dict[object, LinearTimes] = {}

    def products(self, pp: int, prefix: str, again: Recompute) -> LinearTimes:
        """Return those of a layer of a rank."""
        matrices = tuple(
            (run.shape, run.names[0] in self.eight_bits, is_made_again(run.names[0], again))
            for run in self.runs[pp]
            if run.names[0].startswith(prefix) and run.names[0].endswith("weight") and len(run.shape) > 1
        )
        if matrices not in self._known:
            parts = [(self.product(shape, is_narrow=is_narrow), is_again) for shape, is_narrow, is_again in matrices]
            forward, dgrad, wgrad = (sum(times[number] for times, _ in parts) for number in range(3))
            again_s = sum(times[0] for times, is_again in parts if is_again)
            operations = 2.0 * sum(self.work(shape)[0] * math.prod(shape) for shape, _, _ in matrices)
            self._known[matrices] = LinearTimes(forward, dgrad, wgrad, again_s, operations)
        return self._known[matrices]

    def product(self, shape: tuple[int, ...], *, is_narrow: bool) -> tuple[float, float, float]:
        """Return those of one matrix, or of one for each expert of this rank: forward, dgrad and wgrad."""
        tokens, number = self.work(shape)
        sides = tokens, shape[-2], shape[-1]
        narrow = f"{EIGHT_BITS}{self.config.fp8.recipe}" if is_narrow else self.dtype
        of_weights = narrow if self.config.fp8.wgrad == "fp8" else self.dtype

        def seconds(way: Way, dtype: str) -> float:
            return number * self.rates.product_s(way, dtype, sides)

        return seconds("forward", narrow), seconds("dgrad", narrow), seconds("wgrad", of_weights)

    def work(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many tokens go through each matrix of a parameter, and how many matrices it is."""
        if len(shape) == 2:
            return self.tokens, 1
        own = self.own_tokens if self.config.parallel.etp == "1" else self.tokens
        return max(own * self.config.model.experts_per_token // shape[0], 1), shape[0]

    def attention(self, window: int | None) -> dict[Way, float]:
        """Return the seconds of both passes of a layer's attention, of which a causal mask leaves half."""
        model, layout, length = self.config.model, layout_of(self.config), longest_row(self.config)
        tokens = self.config.train.micro_batch_size * length / (layout.tp * layout.cp)
        operations = layer_attention(self.config, np.array([length]), window) * tokens / 6
        shape = length, model.head_size, model.num_heads / model.num_kv_heads
        return {
            "forward": self.rates.attention_s("forward", self.dtype, shape, operations),
            "backward": self.rates.attention_s("backward", self.dtype, shape, 2.5 * operations),
        }

    def kernels(self, sizes: Sizes, again: Recompute) -> dict[Way, float]:
        """Return the seconds of both passes of the kernels of a layer beside products and attention.

        The nonlinearity is made again in any case, in its own backward.
        """
        model = self.config.model
        norm, is_again = NORM_STREAMS * sizes.stream, again.is_full or bool(again.modules)
        turned = 2 * sizes.heads if model.position == "rope" or model.qk_norm else 0
        made, biases = sizes.packed + sizes.product, (sizes.heads, sizes.whole_stream, sizes.whole_stream, sizes.packed)
        seconds = self.both(
            (model.norm, norm, norm),
            (model.norm, norm, norm),
            ("rope", turned, turned),
            (model.activation, made, 2 * made),
            ("copy", 3 * sizes.rows, 6 * sizes.rows),
            *(("bias", 0, size * model.bias) for size in biases),
        )
        turns_again = again.is_full or "attention" in again.modules
        repeated = self.both((model.norm, norm, 0), (model.norm, norm, 0), ("rope", turned * turns_again, 0))
        seconds["backward"] += is_again * repeated["forward"]
        return seconds

    def add_embedding(self, sizes: Sizes, forward: Pass, backward: Pass) -> None:
        """Add the look-up of rows, and their gradients' way into that of the whole matrix, which is wide."""
        model, widened = self.config.model, self.wide // self.itemsize
        matrix = model.vocab_size // self.config.parallel.tp * model.hidden_size * self.wide
        times = self.both(("copy", 2 * sizes.whole_stream, (1 + 3 * widened) * sizes.whole_stream + 3 * matrix))
        for own, way in ((forward, times["forward"]), (backward, times["backward"])):
            own.other += way
            own.host += self.rates.launch_s(ENDS_KERNELS)

    def add_head(self, sizes: Sizes, forward: Pass, backward: Pass) -> None:
        """Add the last norm, the products of the head and the loss; if logits come in parts, all but the norm's
        backward is in the forward."""
        name = "embed.weight" if self.config.model.tie_embeddings else "head.weight"
        matrix = next(run for run in self.runs[-1] if run.names[0] == name)
        most = self.config.train.max_logits_gib * 2**30
        at_once = tokens_at_once(self.tokens, matrix.shape[0] * self.itemsize, most)
        number = self.tokens / at_once
        ways: tuple[Way, ...] = ("forward", "dgrad", "wgrad")
        ahead, dgrad, wgrad = (
            number * self.rates.product_s(way, self.dtype, (at_once, matrix.shape[0], matrix.shape[1])) for way in ways
        )
        norm = self.both((self.config.model.norm, NORM_STREAMS * sizes.stream, NORM_STREAMS * sizes.stream))
        loss = self.both(("cross_entropy", sizes.logits, 2 * sizes.logits))
        late = forward if number > 1 else backward
        forward.products += ahead
        late.products += dgrad + wgrad
        late.weights += wgrad
        forward.other += norm["forward"] + loss["forward"]
        backward.other += norm["backward"]
        late.other += loss["backward"]
        for own in (forward, backward):
            own.host += self.rates.launch_s(ENDS_KERNELS)

    def both(self, *parts: tuple[str, int, int]) -> dict[Way, float]:
        """Return the seconds of both passes of kernels by the bytes of each."""
        return {
            "forward": sum(self.rates.kernel_s(part, "forward", size) for part, size, _ in parts),
            "backward": sum(self.rates.kernel_s(part, "backward", size) for part, _, size in parts),
        }
