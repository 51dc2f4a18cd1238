"""One training step of a model: tokens/s of each GPU, and where the time of its kernels goes.

    python benchmarks/trainer/step.py [--model 1b] [--micro-batch-size 8] [--global-batch-size 8] [--steps 12]
    torchrun --standalone --nproc-per-node 4 benchmarks/trainer/step.py --tp 2 --pp 2 --trace step.json.gz

Every flag of `trainer train` that says what a step is may be added. Tokens are random, the state is drawn, nothing is
read or saved. Of a model with experts `--routes` says where tokens go, in place of their scores: to all experts evenly,
with 1.45 times the mean to those of the first rank of ep, or each token to the same ones. The step is the median after
four; then one step is profiled, and the first rank's kernels are added by kind; `--trace` keeps its timeline for a
browser's trace viewer. Memory is that of the fullest rank. For a peer, run it on the same GPU before and after.
"""

import argparse
import gc
import statistics
from functools import partial
from pathlib import Path

import torch

from benchmarks.record import add_option
from threefold.cli import Parser, run
from threefold.errors import UserError
from threefold.flags import Settings, add_settings, settings_of
from trainer.commands.shared import world_size
from trainer.config import Config
from trainer.config.walk import load_config
from trainer.engine import Engine
from trainer.job.ranks import Ranks
from trainer.mesh.mesh import ProcessMesh, mesh_of
from trainer.model import router
from trainer.model.microbatch import Batch
from trainer.observe.kernels import table
from trainer.run.environment import make_deterministic, ranks_of
from trainer.run.stage_times import step_times

HERE = Path(__file__).parent
WARMUP_STEPS = 4


def main() -> int:
    parser = Parser(prog="step.py", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="1b", help="a model of this folder, or a configuration file")
    parser.add_argument("--steps", type=int, default=12, help="steps timed, the first four left out")
    parser.add_argument("--routes", choices=("even", "uneven", "same"), help="where tokens go, not to the best experts")
    parser.add_argument("--trace", metavar="FILE", help="write the profile of the first rank there")
    add_option(parser)
    add_settings(parser, Config, is_shown=False)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Time steps, then profile one."""
    if arguments.steps <= WARMUP_STEPS + 1:  # a step is timed from the end of the one before
        raise UserError(f"of {arguments.steps} steps none is timed", hint=f"--steps {WARMUP_STEPS + 2}, or more")
    config = configured(arguments.model, settings_of(arguments), world_size())
    if arguments.routes == "same":
        router.best = same
    elif arguments.routes:
        ep, share = config.parallel.ep, 1.45 if arguments.routes == "uneven" else 1.0
        router.best = partial(fixed, share=share / ep, num_first=config.model.num_experts // ep)
    if config.train.deterministic:
        make_deterministic()
    with ranks_of(config) as ranks:
        engine, batch = engine_and_batch(config, ranks)
        median = statistics.median(step_times(engine, batch, arguments.steps)[WARMUP_STEPS:])
        on_gpu = ranks.device.type == "cuda"
        kind = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[kind]) as profile:
            engine.train_step(arguments.steps + 1, batch)
        sizes = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if on_gpu else (0, 0)
        peak, reserved = ranks.maximum(list(sizes))
        if ranks.rank == 0:
            name = torch.cuda.get_device_name() if on_gpu else "CPU"
            layout, shape = engine.mesh.layout, batch.tokens.shape
            num_ranks = layout.tp * layout.cp * layout.pp
            print(f"{name}, {layout}, attention {engine.choices.names['attention']}: ", end="")
            print(f"{shape[0]} micro-batches of {shape[1]} x {shape[2]} tokens:")
            print(f"{1e3 * median:.1f} ms, {shape.numel() / median / num_ranks:,.0f} tok/s, ", end="")
            print(f"{peak / 2**30:.2f} GiB, {reserved / 2**30:.2f} reserved")
            claim = f"a step of {arguments.model}, {shape[0]} x {shape[1]} x {shape[2]}, {layout}"
            arguments.record.add(claim, 1e3 * median, "ms")
            print("\n".join(table(profile)))
            if arguments.trace:
                profile.export_chrome_trace(arguments.trace)
    return 0


def configured(model: str, flags: Settings, num_ranks: int = 1) -> Config:
    """Return the configuration of a model of this folder, or of a file, with the flags that win over it."""
    own = HERE / f"{model}.toml"
    return load_config(str(own if own.exists() else model), flags, world_size=num_ranks)


def engine_and_batch(config: Config, ranks: Ranks | None = None) -> tuple[Engine, Batch]:
    """Return a model with drawn state, on one GPU or this rank's, and random tokens for a step."""
    device = torch.device("cuda", 0) if ranks is None else ranks.device
    engine = Engine(config, mesh_of(config, 0 if ranks is None else ranks.rank, device))
    if ranks is not None:
        ranks.before_end.append(engine.close)
    engine.initialise()
    engine.choose_ops({}, by_timing=device.type == "cuda" and not config.train.deterministic)
    gc.freeze()  # a run leaves what its imports made out of its collections of garbage
    return engine, random_batch(config, engine.mesh)


def random_batch(config: Config, mesh: ProcessMesh) -> Batch:
    """Return random tokens for a step, the same on ranks that share samples: or sums of embeddings would lack rows."""
    shape = config.train.gradient_accumulation_steps, config.train.micro_batch_size, config.train.seq_length
    chance = torch.Generator(mesh.device).manual_seed(mesh.dp.index)
    rows = torch.randint(config.model.vocab_size, (*shape[:2], shape[2] + 1), generator=chance, device=mesh.device)
    positions = torch.arange(shape[2], device=mesh.device).expand(shape).contiguous()
    mask = torch.ones(shape, device=mesh.device)
    return Batch(rows[..., :-1].contiguous(), rows[..., 1:].contiguous(), positions, mask, 0)


def fixed(scores_TE: torch.Tensor, k: int, *, share: float, num_first: int) -> torch.Tensor:
    """Return experts of tokens: a share of all rows goes to the first ones evenly, the rest to the others evenly."""
    num_tokens, num_experts = scores_TE.shape
    rows_R = torch.arange(num_tokens * k, device=scores_TE.device)
    before_R = (rows_R.double() * share).long()
    is_first_R = ((rows_R + 1).double() * share).long() > before_R
    others_R = num_first + (rows_R - before_R) % max(num_experts - num_first, 1)
    return torch.where(is_first_R, before_R % num_first, others_R).view(num_tokens, k)


def same(scores_TE: torch.Tensor, k: int) -> torch.Tensor:
    """Return the first experts for each token."""
    return torch.arange(k, device=scores_TE.device).expand(len(scores_TE), k).contiguous()


if __name__ == "__main__":
    raise SystemExit(main())
