"""Sizes of the mesh axes, the pipeline's schedule, buckets."""

from dataclasses import dataclass
from typing import Literal

from threefold.needs import GIVEN
from threefold.options import option


def number_or_auto(text: str) -> int:
    """Return the number that a text is, 0 for "auto"; ValueError says what it must be."""
    if text != "auto" and not text.isdecimal():
        raise ValueError("a whole number of at least 0, or auto")
    return 0 if text == "auto" else int(text)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """`[parallel]`: sizes of the mesh axes; tp * cp * pp * dp is the number of processes."""

    tp: int = option(1, "tensor-parallel size", minimum=1, flags=["--tp", "--tensor-model-parallel-size"])
    pp: int = option(1, "pipeline stages", minimum=1, flags=["--pp", "--pipeline-model-parallel-size"])
    cp: int = option(
        1,
        "context-parallel size: ranks that each have a part of a row's tokens",
        minimum=1,
        flags=["--cp", "--context-parallel-size"],
    )
    cp_method: Literal["auto", "ulysses", "allgather"] = option(
        "auto",
        "how attention sees rows that cp cuts: ulysses trades tokens for heads, allgather gathers keys; auto "
        "takes ulysses where cp * tp divides the key-value heads",
        flags=["--cp-method"],
    )
    ep: int = option(
        1,
        "expert-parallel size: ranks of dp and cp that have some of the experts each, and gather each other's tokens",
        minimum=1,
        flags=["--ep", "--expert-model-parallel-size"],
        needs={"model.num_experts": GIVEN},
    )
    etp: Literal["tp", "1"] = option(
        "tp",
        "ranks that cut an expert by its width: those of tp, or none; then ep may borrow ranks of tp too",
        flags=["--etp"],
        needs={"ep": GIVEN},
    )
    moe_dispatch: Literal["allgather", "alltoall"] = option(
        "allgather",
        "how tokens come to ranks of ep: allgather brings all to all and waits for nothing; alltoall brings rows to "
        "their experts alone, and the host waits for their counts in each layer",
        flags=["--moe-dispatch"],
        needs={"ep": GIVEN},
    )
    moe_rows: float = option(
        1.5,
        "rows of experts that a rank of ep has memory for, over their mean; a step that needs more is repeated. With "
        "alltoall they are planned with, and bound nothing",
        minimum=1,
        keeps_bits=True,
        needs={"ep": GIVEN},
    )
    moe_overlap_parts: int = option(
        0,
        "parts of tokens that travel to experts each beside the products of the one before; 0 or auto takes what a "
        "resumed run recorded, else on GPUs the fastest of 1, 2 and 4",
        minimum=0,
        parse=number_or_auto,
        flags=["--moe-overlap-parts"],
        needs={"ep": GIVEN},
    )
    dp: int = option(0, "data-parallel size; 0 means all ranks that the others leave over", minimum=0, flags=["--dp"])
    sequence_parallel: Literal["auto", "on", "off"] = option(
        "auto", "cut tokens over tp between the cut linears; auto does if they divide", flags=["--sequence-parallel"],
        bare=("on", "off"),
    )  # fmt: skip
    tp_overlap_parts: int = option(
        0,
        "parts in which cut tokens are gathered and summed beside the products of cut linears; 1 overlaps none. 0 or "
        "auto takes what a resumed run recorded, else on GPUs the fastest of 1, 2 and 4 with 4096 rows a part or more",
        minimum=0,
        parse=number_or_auto,
        flags=["--tp-overlap-parts"],
    )
    schedule: Literal["1f1b", "gpipe", "zb-h1"] = option(
        "1f1b",
        "order of the pipeline's passes; zb-h1 waits less and keeps more, gpipe keeps the activations of all "
        "micro-batches",
        flags=["--schedule"],
        keeps_bits=True,
    )
    virtual_stages: int = option(
        1,
        "stages that each pipeline rank holds: more wait less, send more often and keep more",
        minimum=1,
        flags=["--vpp", "--num-virtual-stages-per-pipeline-rank"],
    )
    pipeline_layout: str = option(
        "even",
        'layers of each stage: even, cost (so that the slowest is fast, the head counted), or numbers as in "9,7"',
        flags=["--pipeline-layout"],
    )
    zero_stage: Literal[0, 1, 2, 3] = option(
        1,
        "what the ranks of dp cut: 1 the optimizer state, 2 gradients too, 3 parameters too; 0 repeats all of it",
        flags=["--zero-stage"],
    )
    reshard_after_forward: Literal["auto", "on", "off"] = option(
        "auto",
        "with zero_stage 3, gather parameters for the backward again; auto keeps them where pp is above 1",
        flags=["--reshard-after-forward"],
        bare=("on", "off"),
        keeps_bits=True,
        needs={"zero_stage": 3},
    )
    dp_shard: int = option(
        0,
        "neighbours of dp that cut gradients and parameters among them, with zero_stage 2 and 3; their groups repeat "
        "these, and all of dp cut the optimizer state; 0 or auto means all of dp",
        minimum=0,
        parse=number_or_auto,
        flags=["--dp-shard"],
        needs={"zero_stage": (2, 3)},
    )
    zero_whole_kib: int = option(
        1024,
        "buckets of less KiB have gradients and parameters whole on every rank, with zero_stage 2 and 3",
        minimum=0,
        needs={"zero_stage": (2, 3)},
    )
    overlap_grad_reduce: bool = option(
        True,
        "sum a bucket's gradients beside the rest of the backward",
        flags=["--overlap-grad-reduce"],
        keeps_bits=True,
    )
    grad_reduce: Literal["wide", "bf16", "int8"] = option(
        "wide",
        "dtype in which gradients travel to their owners, who add in the wide one; bf16 halves the traffic, rounds "
        "each rank's part and takes 4 bytes a parameter during the sums; int8 is half of that, with a scale for each "
        "128 elements, and rounds at random by place",
        flags=["--grad-reduce"],
        needs={"zero_stage": (1, 2, 3)},
    )
    overlap_param_gather: bool = option(
        True, "update and gather parameters beside the next forward", flags=["--overlap-param-gather"], keeps_bits=True
    )
    bucket_mib: int = option(64, "size of a gradient bucket in MiB", minimum=1)
    timeout_s: float = option(600.0, "how long a rank waits for the others before it ends", above=0, keeps_bits=True)
