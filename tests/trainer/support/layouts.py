"""Random runs: a tiny model with any options on any layout that fits it."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

from hypothesis import strategies as st

from ckptkit.model.layout import ParallelLayout
from tests.support.checks import require
from trainer.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from trainer.config.check import cross_faults
from trainer.config.resolve import resolve
from trainer.run.activations import CHOICES

LAYOUTS = [
    ParallelLayout(tp=tp, cp=cp, pp=pp, dp=dp)
    for tp, cp, pp, dp in product((1, 2, 3, 4), (1, 2, 4), (1, 2, 3, 4), (1, 2, 3, 4, 5, 8))
]


OPTIONS = {
    **dict.fromkeys(("bias", "qk_norm", "tie_embeddings"), (False, True)),
    "norm": ("rmsnorm", "layernorm"),
    "position": ("rope", "learned", "alibi", "none"),
    "activation": ("swiglu", "gelu"),
    "dropout": (0.0, 0.2),
    "attention_dropout": (0.0, 0.2),
    "logit_softcap": (0.0, 1.5),
    "window": (0, 1, 2, 3),
}


def layouts(max_ranks: int) -> st.SearchStrategy[ParallelLayout]:
    """Layouts of two ranks and more."""
    return st.sampled_from([layout for layout in LAYOUTS if 1 < layout.world_size <= max_ranks])


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def numbers_of_kv_heads(layout: ParallelLayout) -> list[int]:
    """Fewer than tp are held by several ranks, fewer than tp * cp are handed to several."""
    most = layout.tp * layout.cp
    fewer = [n for n in range(1, most) if most % n == 0 and 0 in (layout.tp % n, n % layout.tp)]
    return [*fewer, most, 2 * most]


@st.composite
def mixtures(draw: st.DrawFn, layout: ParallelLayout, num_layers: int) -> dict[str, Any]:
    """What makes a model one with experts, some of which may have no token."""
    num_sharing = draw(st.sampled_from(divisors(layout.cp * layout.dp * layout.tp)))
    num_experts = num_sharing * draw(st.integers(1, max(9 // num_sharing, 1)))
    return {
        "num_experts": num_experts,
        "experts_per_token": draw(st.integers(1, num_experts)),
        "expert_ffn_hidden_size": layout.tp * draw(st.integers(1, 3)),
        "num_shared_experts": draw(st.integers(0, 2)),
        "first_dense_layers": draw(st.integers(0, num_layers - 1)),
        "router_score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "router_norm_topk": draw(st.booleans()),
        **draw(st.sampled_from([{}, {"moe_balance": "bias", "moe_bias_rate": 0.05}])),
    }


@st.composite
def expert_layouts(draw: st.DrawFn, layout: ParallelLayout, num_experts: int, *, cuts_tokens: bool) -> dict[str, Any]:
    """Ranks of ep, borrowed from dp and cp, or with etp 1 from tp too; steps that need more rows are repeated."""
    etp = draw(st.sampled_from(["tp", "1"])) if cuts_tokens and layout.tp > 1 else "tp"
    num_ranks = layout.cp * layout.dp * (layout.tp if etp == "1" else 1)
    sizes = divisors(math.gcd(num_experts, num_ranks))[1:]
    if etp == "1":  # all ranks of tp are among those of ep
        sizes = [size for size in sizes if size % layout.tp == 0]
    if not sizes or draw(st.sampled_from([False, False, True])):
        return {}
    moe_rows, moe_dispatch = draw(st.sampled_from([1.0, 1.5, 16.0])), draw(st.sampled_from(["allgather", "alltoall"]))
    parts = draw(st.integers(1, 3))
    ranks = {"ep": draw(st.sampled_from(sizes)), "etp": etp}
    return ranks | {"moe_rows": moe_rows, "moe_dispatch": moe_dispatch, "moe_overlap_parts": parts}


@st.composite
def configs(draw: st.DrawFn, layouts: st.SearchStrategy[ParallelLayout]) -> Config:
    """A run of float64 on a CPU that has no fault."""
    layout = draw(layouts)
    num_sharing = layout.tp * layout.cp
    kv_heads = draw(st.sampled_from(numbers_of_kv_heads(layout)))
    num_heads = math.lcm(kv_heads, num_sharing) * draw(st.integers(1, 2))
    micro_batch, num_microbatches = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    virtual = draw(st.sampled_from([1, 1, 2, 3])) if layout.pp > 1 else 1
    options: dict[str, Any] = {name: draw(st.sampled_from(values)) for name, values in OPTIONS.items()}
    has_experts = draw(st.sampled_from([False, False, True]))
    if has_experts:
        options |= {"activation": "swiglu", "bias": False}
    # a norm of two numbers is nearly their sign: rounding alone then moves losses by more than parity allows
    head_sizes = [4] if options["qk_norm"] or num_heads == 1 else [2, 4]
    model = ModelConfig(
        num_layers=layout.pp * virtual + draw(st.integers(0, 1)),
        hidden_size=num_heads * draw(st.sampled_from(head_sizes)),
        num_heads=num_heads, num_kv_heads=kv_heads, ffn_hidden_size=layout.tp * draw(st.integers(1, 5)),
        vocab_size=draw(st.integers(layout.tp, 23)), round_vocab_to=draw(st.sampled_from([1, 4])), init_std=0.3,
        window_every=draw(st.sampled_from([0, 2, 3])) if options["window"] else 0, **options,
    )  # fmt: skip
    if has_experts:
        model = replace(model, **draw(mixtures(layout, model.num_layers)))
    sequence_parallel, zero_stage = draw(st.sampled_from(["auto", "off"])), draw(st.sampled_from([0, 1, 2, 3]))
    cp_method = draw(st.sampled_from(["auto", "ulysses", "allgather"])) if layout.cp > 1 else "auto"
    gathers = cp_method == "allgather" or (cp_method == "auto" and kv_heads % num_sharing > 0)
    num_parts = layout.cp * (2 if gathers else 1)
    seq_length = draw(st.integers(2, 6)) if layout.cp == 1 else num_parts * draw(st.integers(1, 12 // num_parts or 1))
    cuts_tokens = sequence_parallel == "auto" and micro_batch * seq_length % num_sharing == 0
    of_experts = draw(expert_layouts(layout, model.num_experts, cuts_tokens=cuts_tokens)) if has_experts else {}
    num_stages = layout.pp * virtual
    extra = draw(st.integers(0, num_stages - 1))  # the stage of a layer that the stages do not divide
    by_hand = [1 + (stage == extra) * (model.num_layers - num_stages) for stage in range(num_stages)]
    config = Config(
        model=model,
        # a bucket of 0 MiB holds one parameter
        parallel=ParallelConfig(
            tp=layout.tp, cp=layout.cp, cp_method=cp_method, pp=layout.pp, dp=layout.dp,
            sequence_parallel=sequence_parallel, tp_overlap_parts=draw(st.integers(1, 3)) if cuts_tokens else 0,
            schedule=draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])), virtual_stages=virtual,
            pipeline_layout=draw(st.sampled_from(["even", "cost", ",".join(map(str, by_hand))])),
            zero_stage=zero_stage, bucket_mib=draw(st.sampled_from([0, 1])),
            zero_whole_kib=draw(st.sampled_from([0, 1])) if zero_stage > 1 else 1024,
            dp_shard=draw(st.sampled_from([0, *divisors(layout.dp)])) if zero_stage > 1 else 0,
            reshard_after_forward=draw(st.sampled_from(["auto", "on", "off"])) if zero_stage == 3 else "auto",
            **of_experts,
        ),
        # with an eps of 1e-8 gradients that are 0 but for rounding would move weights by 1e-9
        optim=OptimConfig(lr=5e-3, min_lr=1e-3, clip=draw(st.sampled_from([0.0, 0.05])), warmup_steps=1, eps=1e-5),
        train=TrainConfig(
            train_steps=5, seq_length=seq_length, micro_batch_size=micro_batch,
            global_batch_size=micro_batch * num_microbatches * layout.dp, precision="fp64", device="cpu",
            seed=draw(st.integers(0, 99)), **draw(st.sampled_from(list(CHOICES.values()))),
            max_logits_gib=draw(st.sampled_from([1.0, 1e-7])), z_loss=draw(st.sampled_from([0.0, 0.01])),
        ),
        data=DataConfig(document_mask=draw(st.booleans())),
    )  # fmt: skip
    faults = cross_faults(config, layout.world_size)
    require(not faults, str(faults))
    return resolve(config, layout.world_size)
