"""What a pass takes beside what is kept, at its peak: the layer or the head whose pass runs, and what is made again.

In bytes, of the tensors of one op and of those that wait for the next one. A forward pass is at its peak before a
layer's last linear, a backward pass there or in attention: of a layer that is made again all is there once more.
Kernels of attention on GPUs sum gradients in the wide dtype. Source: Dao, "FlashAttention-2", 2023.
"""

from itertools import accumulate

from trainer.config import Config
from trainer.config.eight_bits import keeps_weights
from trainer.config.resolve import cuts_tokens, gathers_keys, schedule_of
from trainer.engine import DTYPES
from trainer.model.recompute import Recompute
from trainer.ops.dtypes import wide_dtype
from trainer.ops.soft_cap import BLOCK
from trainer.pipeline.actions import peak_received
from trainer.pipeline.schedules import rank_actions
from trainer.run.activations import Sizes, stage_layers_of


def temporary_bytes(config: Config, pp: int) -> int:
    """Return what a rank takes at most beside what `activation_bytes` counts.

    Layers above the one whose pass runs, and the head, keep nothing then.
    """
    parallel, sizes = config.parallel, Sizes.of(config)
    layers = max(stage_layers_of(config, pp), key=len)
    *above, all_layers = [0, *accumulate(each.layer(again) for each, again in reversed(layers))]
    head = sizes.head_of(config) if pp == parallel.pp - 1 else 0
    at_layers = [
        layer_bytes(config, each, again) - kept for (each, again), kept in zip(layers, above[::-1], strict=True)
    ]
    at_ends = [head_bytes(config, sizes)] * (head > 0) + [embedding_bytes(config, sizes) - all_layers - head] * (
        pp == 0
    )
    return max(max(at_layers) - head, *at_ends, 0) + num_transfers(config, pp) * sizes.stream


def num_transfers(config: Config, pp: int) -> int:
    """Return how many tensors of a rank are on their way at once: one that is sent, and those that come."""
    parallel, number = config.parallel, config.train.gradient_accumulation_steps
    row = rank_actions(schedule_of(config), parallel.pp, number, parallel.virtual_stages, pp)
    return 1 + peak_received(row) if parallel.pp > 1 else 0


def embedding_bytes(config: Config, sizes: Sizes) -> int:
    """Return what the embedding's backward takes: its matrix's gradient as a whole, and that of its rows, both wide."""
    dtype = DTYPES[config.train.precision]
    widened = wide_dtype(dtype).itemsize // dtype.itemsize
    numel = config.model.vocab_size // config.parallel.tp * config.model.hidden_size
    return numel * wide_dtype(dtype).itemsize + sizes.whole_stream * widened + sizes.stream


def head_bytes(config: Config, sizes: Sizes) -> int:
    """Return what the head takes beside what it keeps: its input's gradient, the branch before it, logits in parts."""
    most, dtype = int(config.train.max_logits_gib * 2**30), DTYPES[config.train.precision]
    in_parts = most if 0 < most < sizes.logits else 0
    capped = min((in_parts or sizes.logits) // dtype.itemsize, BLOCK) if config.model.logit_softcap else 0
    return sizes.whole_stream + sizes.stream + in_parts + capped * wide_dtype(dtype).itemsize


def layer_bytes(config: Config, sizes: Sizes, again: Recompute) -> int:
    """Return what the passes of a layer take at most beside what it keeps, and what those below it keep."""
    stream, whole, norm = sizes.stream, sizes.whole_stream, sizes.stream + sizes.numbers
    travels = whole if cuts_tokens(config) else 0  # a tensor of all tokens, before or after the ranks cut it
    makes_mlp, makes_attention = (again.is_full or name in again.modules for name in ("mlp", "attention"))
    made_mlp = norm * bool(again.is_full or again.modules) + sizes.packed * makes_mlp
    made_attention = (sizes.qkv + sizes.moved + sizes.result * (not again.keeps_attention)) * makes_attention
    # the stream and the branches before it, down's input and result
    forward = 2 * stream + sizes.product + whole + travels * stream // whole + made_mlp
    made_layer = made_mlp + (made_attention + norm + stream if again.is_full else 0)
    narrow = stream + sizes.product + travels + made_layer
    widen = stream + whole + 2 * travels + made_layer
    if sizes.rows:  # rows of experts, and gradients of what their nonlinearity reads: csrc has those in its place
        own = config.ops.experts != "csrc"
        forward += sizes.rows
        narrow += sizes.rows + sizes.packed * own + sizes.product
        widen += sizes.rows + sizes.packed
    if config.fp8.recipe != "off":  # what is multiplied, as it is and for gradients of weights transposed
        itemsize = DTYPES[config.train.precision].itemsize
        is_narrow = config.fp8.wgrad == "fp8"
        forward += sizes.product // itemsize
        narrow += (1 + is_narrow) * whole // itemsize + is_narrow * sizes.product // itemsize
        widen += ((1 + is_narrow) * sizes.packed + is_narrow * whole) // itemsize
        parts = 2 if config.model.activation == "swiglu" else 1
        down = config.model.ffn_hidden_size // config.parallel.tp * config.model.hidden_size
        if not keeps_weights(config):  # the weight that is multiplied, as it is or transposed
            forward, narrow, widen = forward + down, narrow + down, widen + parts * down
        if is_narrow and config.train.gradient_accumulation_steps > 1:  # a product that is added behind it
            widen += parts * down * 4
    # attention's backward, while a layer that is made again as a whole has gate and up still
    freed = 0 if again.is_full else norm + sizes.packed * (not makes_mlp)
    kernel = sizes.queries + sizes.heads + sizes.sums_of(config)  # the gradients of its result, q, k and v
    if gathers_keys(config):  # keys and values of all ranks, in the order of ranks and of rows; as wide gradients too
        dtype = DTYPES[config.train.precision]
        widened = 2 + 2 * wide_dtype(dtype).itemsize // dtype.itemsize
        kernel += widened * config.parallel.cp * (sizes.heads - sizes.queries)
    attention = 2 * stream + (sizes.packed + stream) * again.is_full + norm + made_attention + kernel - freed
    return max(forward, narrow, widen, attention)
