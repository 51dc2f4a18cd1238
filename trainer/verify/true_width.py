"""True width: one layer of each kind of a run, as wide as it is, with its own ops and precision on one device.

What the layout cuts is whole, and rows are short: what is looked at is what a device computes of so many columns.
"""

from dataclasses import replace
from functools import cached_property
from itertools import count

import torch
from torch import Tensor

from threefold.errors import UserError
from trainer.config import Config, DataConfig, ParallelConfig
from trainer.config.check import cross_faults
from trainer.config.resolve import has_experts, layer_windows, resolve, resolved_model
from trainer.engine import Engine
from trainer.mesh.mesh import mesh_of
from trainer.model.microbatch import Batch
from trainer.run.environment import make_deterministic
from trainer.verify import plain_model
from trainer.verify.shrink import Shrunk, changes_of, without_loss_scale

ROW, MICRO_BATCHES, DOCUMENTS, OPEN_VOCABULARY = 1024, 2, 4, 32768
SCALE = 4096.0  # of losses in fp16
State = dict[str, Tensor]


def true_width(config: Config, device: torch.device, *, row: int = ROW) -> Shrunk:
    """Return a resolved run on one device, with a layer of each kind and rows of so many tokens, and its changes."""
    before = resolved_model(config.model)
    model = replace(
        before,
        vocab_size=before.vocab_size or OPEN_VOCABULARY,
        first_dense_layers=min(before.first_dense_layers, 1),
        moe_every=min(before.moe_every, 2),
        window_every=min(before.window_every, 2),
    )
    kinds = kinds_of(replace(config, model=model))
    number = next(number for number in count(1) if set(kinds[:number]) == set(kinds))
    seq_length = min(config.train.seq_length, row)
    train = replace(
        config.train,
        seq_length=seq_length,
        micro_batch_size=1,
        global_batch_size=MICRO_BATCHES,
        gradient_accumulation_steps=0,
        rampup_batch_size=(),
        recompute_num_layers=0,
        cuda_graphs=False,
        eval_interval=0,
        device="cuda" if device.type == "cuda" else "cpu",
        **(without_loss_scale() | {"loss_scale": SCALE} if config.train.precision == "fp16" else {}),
    )
    data = DataConfig(stores=config.data.stores, document_mask=config.data.document_mask)
    optim = replace(config.optim, offload=False)
    wide = replace(
        config,
        model=replace(model, num_layers=number),
        parallel=ParallelConfig(dp=1),
        train=train,
        data=data,
        optim=optim,
    )
    if faults := cross_faults(wide, 1):
        raise UserError(f"no layer runs at true width: {faults[0][1]}", hint="trainer verify CONFIG.toml")
    wide = resolve(wide, 1)
    return Shrunk(wide, tuple(changes_of(config, wide)))


def kinds_of(config: Config) -> list[tuple[bool, int | None]]:
    """Return of each layer whether it has experts, and its window."""
    windows = layer_windows(config)
    return [(has_experts(config.model, layer), windows[layer]) for layer in range(config.model.num_layers)]


class Wide:
    """A run at true width on a device: its engines, each made at the first use, and the same in float64."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        if config.train.deterministic and device.type == "cuda":
            make_deterministic()

    @cached_property
    def engine(self) -> Engine:
        """Return an engine with drawn state."""
        return self.new_engine()

    def new_engine(self) -> Engine:
        """Return another, of the same state."""
        engine = Engine(self.config, mesh_of(self.config, 0, self.device))
        engine.initialise()
        by_timing = self.device.type == "cuda" and not self.config.train.deterministic
        engine.choose_ops({}, by_timing=by_timing)
        return engine

    @cached_property
    def batch(self) -> Batch:
        """Return drawn tokens, of which each but every ninth counts, in documents where these are masked."""
        train, vocab_size = self.config.train, self.config.model.vocab_size
        shape = train.gradient_accumulation_steps, train.micro_batch_size, train.seq_length
        draw = torch.Generator().manual_seed(train.seed)
        tokens = torch.randint(vocab_size, (*shape[:2], shape[2] + 1), generator=draw, device="cpu").to(self.device)
        positions = torch.arange(shape[2], device=self.device).expand(shape).contiguous()
        mask = (torch.arange(shape[0] * shape[1] * shape[2], device=self.device) % 9 > 0).float().view(shape)
        documents = ((self.bounds, self.longest),) * shape[0] if self.config.data.document_mask else None
        return Batch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), positions, mask, 0, documents)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest document."""
        return -(-self.config.train.seq_length // DOCUMENTS)

    @property
    def bounds(self) -> Tensor:
        """Return the bounds of the documents of a micro-batch, of a row."""
        length = self.config.train.seq_length
        return torch.tensor([*range(0, length, self.longest), length], dtype=torch.int32, device=self.device)

    def step(self, engine: Engine) -> tuple[float, State]:
        """Take a step of an engine, and return its loss and the gradients before the update."""
        gradients, scale = State(), float(engine.verdict.scale)

        def copy() -> None:
            gradients.update({name: value / scale for name, value in parts_of(engine, "gradients").items()})

        pending = engine.start_step(0, self.batch, before_update=copy)
        return pending.read().loss, gradients

    @cached_property
    def reference(self) -> tuple[float, State]:
        """Return the loss and the gradients in float64, of the very weights that the engine has."""
        weights = parts_of(self.engine, "parameters")
        state = {name: value.double().requires_grad_() for name, value in weights.items()}
        with torch.device(self.device):
            spread = plain_model.Spread(self.config.model)
            batch = replace(self.batch, loss_mask=self.batch.loss_mask.double())
            loss = plain_model.differentiate(self.config, state, batch, 0, spread)
        return loss, {name: value.grad for name, value in state.items() if value.grad is not None}


def parts_of(engine: Engine, which: str) -> State:
    """Return copies of the parameters of an engine, or of their gradients, in their true shapes."""
    parts: State = {}
    for bucket in engine.store.buckets:
        for name, shape, offset in bucket.plan.parameters():
            flat = getattr(bucket, which)[offset : offset + torch.Size(shape).numel()]
            true = tuple(slice(size) for size in engine.table[name].shape)
            parts[name] = flat.view(shape)[true].clone()
    return parts
