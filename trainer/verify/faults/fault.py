"""Fault: what may go wrong in a trainer, by name, on the small run that shows it.

A fault that depends on the layout is planted in the one process too, which stays right or is wrong otherwise. One that
does not is compared with plain torch. A patch names a module's or a class's attribute: when code moves, its import here
moves too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ckptkit import ParallelLayout
from trainer.config import Config, DataConfig, Fp8Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from trainer.config.optim import GroupConfig
from trainer.config.resolve import resolve
from trainer.verify.faults.planting import Plant

TP, PP, DP, CP = ParallelLayout(tp=2), ParallelLayout(pp=2), ParallelLayout(dp=2), ParallelLayout(cp=2)
# names of checks
SAMPLES, COLLECTIVES, PLAIN = "samples of each step", "order of collectives", "one process, plain torch"
LOSSES, WEIGHTS = "losses, norms, evaluation", "weights and moments"
RESUME, ANOTHER_LAYOUT, RESHARD = "resume, the same layout", "resume, one process", "save and reshard"
WAITS, PRECISION, EIGHT_BITS = "no wait of the host", "precision of the run", "products in eight bits"
SCHEDULES, INITIAL, GRAPHS = "schedule, recompute, overlap", "initial values", "passes as one graph"
STREAMED = "optimizer state streamed"
ROUNDED = "gradients rounded to travel"

MODEL = ModelConfig(  # with every option that a fault needs; two ranks hold 7 and 6 rows of the vocabulary
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=12,
    vocab_size=13,
    round_vocab_to=1,
    norm="layernorm",
    position="learned",
    activation="swiglu",
    bias=True,
    qk_norm=True,
    tie_embeddings=True,
    dropout=0.2,
    init_std=0.3,
)
EXPERTS: dict[str, Any] = {  # of a model that faults are planted in: some have no token in a micro-batch
    "bias": False,
    "num_experts": 8,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 4,
    "num_shared_experts": 1,
}


@dataclass(frozen=True)
class Fault:
    """What is wrong, where it shows, how to plant it, and which check must fail.

    Without a layout one process shows it, beside plain torch unless another check is named. `peer` is a public thread
    on a fault of that kind. `trips` is what an assertion of the trainer says that sees it before the check does; it is
    not there under `python -O`.
    """

    name: str
    text: str
    layout: ParallelLayout | None
    plant: Plant
    zero_stage: int = 1
    model: Mapping[str, Any] = field(default_factory=dict)
    cuts_tokens: bool = False
    schedule: Literal["gpipe", "1f1b", "zb-h1"] = "1f1b"
    dp_shard: int = 0
    num_parts: int = 0  # in which cut tokens are transferred; 0: as a run chooses
    micro_batch_size: int = 1
    documents: bool = False  # attention stays in them
    trips: str = ""
    groups: tuple[GroupConfig, ...] = ()
    cp_method: Literal["ulysses", "allgather"] = "ulysses"
    moe_dispatch: Literal["allgather", "alltoall"] = "allgather"
    moe_overlap_parts: int = 1
    moe_rows: float = 2.0
    train: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    optim: Mapping[str, Any] = field(default_factory=dict)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    precision: Literal["fp64", "bf16"] = "fp64"  # of the run; the small one is of fp64
    grad_reduce: Literal["wide", "int8"] = "wide"  # of the run too
    check: str = ""
    peer: str = ""

    @property
    def seen_by(self) -> str:
        """Return the name of the check that must fail."""
        return self.check or (PLAIN if self.layout is None else LOSSES)


def config_of(fault: Fault) -> Config:
    """Return the small run in which a fault shows."""
    layout, plain = fault.layout or ParallelLayout(), ParallelConfig()
    has_experts = layout.ep > 1
    parallel = ParallelConfig(
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        etp="1" if layout.etp else "tp",
        virtual_stages=layout.virtual,
        cp_method=fault.cp_method,
        moe_rows=fault.moe_rows if has_experts else plain.moe_rows,
        moe_dispatch=fault.moe_dispatch,
        moe_overlap_parts=fault.moe_overlap_parts if has_experts else plain.moe_overlap_parts,
        schedule=fault.schedule,
        tp_overlap_parts=fault.num_parts,
        zero_stage=fault.zero_stage,  # type: ignore[arg-type]
        zero_whole_kib=0 if fault.zero_stage > 1 else plain.zero_whole_kib,
        dp_shard=fault.dp_shard,
        sequence_parallel="on" if fault.cuts_tokens else "off",
    )
    train = TrainConfig(
        train_steps=5,
        seq_length=8 if layout.cp > 1 else 6,
        micro_batch_size=fault.micro_batch_size,
        global_batch_size=max(4, 2 * layout.dp),
        precision="fp64",
        device="cpu",
    )
    config = Config(
        model=replace(MODEL, **fault.model),
        parallel=parallel,
        data=DataConfig(document_mask=fault.documents, **fault.data),
        optim=replace(OptimConfig(lr=5e-3, min_lr=1e-3, clip=0.05, groups=fault.groups), **fault.optim),
        train=replace(train, **fault.train),
    )
    return resolve(config, layout.world_size)
