"""Losses of a model: `trainer train` with its fused ops beside plain torch, on one GPU and the same tokens.

    python benchmarks/trainer/curves.py --output DIR [--model 1b] [--train-steps 200] [--also zero-1 zero-3 cp-2 ...]

"fused" is the default, "torch" the same run with each op in plain torch (`[ops]`). "script" is what a script would
have: `torch.nn.functional` under autocast to bf16, fp32 weights and residual stream, `torch.optim.AdamW` and
`clip_grad_norm_`. All start from the same weights, the script once more, as "moved", from weights 1/2000 larger: how
far two runs drift apart that differ in nothing else. `--also` trains the same in other ways, on two GPUs or with
parts of the forward made again, each beside "fused". The losses are in DIR/{fused,torch,script,moved}.jsonl, for
`tools/plot_metrics.py`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu import HERE, ROOT, Row, make_store, train
from torch import Tensor

from benchmarks.record import add_option
from threefold.cli import Parser, run
from threefold.scratch import fresh_folder
from trainer.config import Config, ModelConfig
from trainer.config.resolve import settled
from trainer.config.walk import config_from, read_toml
from trainer.data import StepReader, open_blend, open_loader
from trainer.mesh.mesh import mesh_of
from trainer.model.table import parameter_table
from trainer.store.lr import learning_rate
from trainer.store.parameter import initial_values

SHAPES = {"1b": 4, "350m": 16}  # samples a step, in one micro-batch
SHOWN = (1, 10, 50, 100, 150, 200)  # steps
ALSO: dict[str, tuple[dict[str, int], list[object]]] = {  # sizes of a layout, and flags
    **{f"zero-{stage}": ({"dp": 2}, ["--zero-stage", stage]) for stage in (1, 2, 3)},
    "cp-2": ({"cp": 2}, []),
    "norms": ({}, ["--recompute", "selective"]),
    "mlp": ({}, ["--recompute", "selective", "--recompute-modules", "norms,mlp"]),
    "attention": ({}, ["--recompute", "selective", "--recompute-modules", "attention"]),
    "full": ({}, ["--recompute", "full"]),
}
PLAIN = ("norm", "rope", "activation", "cross-entropy", "adamw")


def main() -> int:
    parser = Parser(prog="curves.py", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for all that the benchmark makes")
    parser.add_argument("--model", default="1b", help="1b or 350m, or the path of another, without .toml")
    parser.add_argument("--samples", type=int, help="samples a step, in one micro-batch; 16 of 350m, 4 of 1b")
    # At 3e-4, after 5 steps or 50, losses jump, and two runs of one script drift apart by 1e-2: that compares nothing.
    parser.add_argument("--lr", type=float, default=5e-5, help="learning rate, which falls to a tenth")
    parser.add_argument("--warmup-steps", type=int, default=50, help="steps in which it rises")
    parser.add_argument("--train-steps", type=int, default=200, help="steps of both")
    parser.add_argument("--also", nargs="+", choices=ALSO, default=[], help="what else is trained")
    add_option(parser)
    parser.set_defaults(handler=benchmark)
    return run(parser)


def benchmark(arguments: argparse.Namespace) -> int:
    """Train twice and compare."""
    output, steps = fresh_folder(arguments.output, "curves.py"), arguments.train_steps
    samples = arguments.samples or SHAPES.get(arguments.model, 1)
    optim = {"lr": arguments.lr, "min_lr": arguments.lr / 10, "warmup_steps": arguments.warmup_steps}
    store = make_store(output)
    row = Row(arguments.model, samples, samples)
    flags = ["--data.stores", store, "--train-steps", steps]
    flags += [word for key, value in optim.items() for word in (f"--optim.{key.replace('_', '-')}", value)]
    tables = read_toml(str(HERE / f"{arguments.model}.toml"))
    turns = tables["model"].get("position", "rope") == "rope"
    in_torch = [word for op in PLAIN if turns or op != "rope" for word in (f"--ops.{op}", "torch")]
    in_torch += ["--ops.attention", "sdpa-flash"] if tables["train"]["device"] == "cuda" else []
    losses = {}
    for name, ops in (("fused", []), ("torch", in_torch)):
        losses[name] = trained(output / f"{name}.jsonl", row, *flags, *ops)
    for name in arguments.also:
        sizes, more = ALSO[name]
        other = Row(arguments.model, samples // sizes.get("dp", 1), samples, **sizes)
        losses[name] = trained(output / f"{name}.jsonl", other, *flags, *more)
    sizes = {"train_steps": steps, "micro_batch_size": samples, "global_batch_size": samples}
    tables = {**tables, "train": tables["train"] | sizes, "data": {"stores": [str(store)]}}
    tables["optim"] = tables["optim"] | optim
    config = settled(config_from(tables, source=arguments.model))
    device = torch.device(config.train.device)
    for name, scale in (("script", 1.0), ("moved", 1.0005)):
        losses[name] = script_losses(config, device, scale)
        lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses[name], 1)]
        (output / f"{name}.jsonl").write_text("".join(lines))
    card = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{arguments.model}, {card}, torch {torch.__version__}")
    print("step" + "".join(f"{name:>9}" for name in losses))
    for step in (each for each in SHOWN if each <= steps):
        print(f"{step:>4}" + "".join(f"{each[step - 1]:>9.4f}" for each in losses.values()))
    pairs = [
        ("fused", "torch"),
        ("fused", "script"),
        ("moved", "script"),
        *((name, "fused") for name in arguments.also),
    ]
    for name, other in pairs:
        gaps = [loss - plain for loss, plain in zip(losses[name], losses[other], strict=True)]
        largest, typical = max(map(abs, gaps)), statistics.median(map(abs, gaps))
        print(f"{name} less {other}: largest {largest:.1e}, median {typical:.1e}, mean {statistics.mean(gaps):+.1e}")
        claim = f"largest difference of a loss, {arguments.model}, {name} from {other}"
        arguments.record.add(claim, largest, f"in {steps} steps")
    return 0


def trained(metrics: Path, row: Row, *flags: object) -> list[float]:
    """Return the loss of each step of the trainer."""
    return [line["loss"] for line in train(ROOT, metrics, row, *flags)[0]]


def script_losses(config: Config, device: torch.device, scale: float) -> list[float]:
    """Return the loss of each step in plain torch, from the trainer's first weights times `scale`."""
    model, optim = config.model, config.optim
    mesh = mesh_of(config, 0, device)
    weights, groups = {}, {True: [], False: []}
    for name, parameter in parameter_table(config).items():
        if parameter.placement.tied_to is None:
            place = (parameter.shape, mesh.layout, mesh.coords, config.train.seed, torch.float32, device)
            weights[name] = (initial_values(name, parameter, *place) * scale).requires_grad_()
            groups[parameter.decay > 0].append(weights[name])
    decays = [{"params": groups[True], "weight_decay": optim.weight_decay}]
    adam = torch.optim.AdamW(
        [*decays, {"params": groups[False], "weight_decay": 0.0}], betas=(optim.beta1, optim.beta2), eps=optim.eps
    )
    reader, losses = StepReader(open_loader(open_blend(config), config, 0, None), device), []
    for step in range(config.train.train_steps):
        batch = reader.to_device(reader.next_step())
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision == "bf16"):
            logits = script_logits(model, weights, batch.tokens[0])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch.labels[0].flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), optim.clip)
        for group in adam.param_groups:
            group["lr"] = learning_rate(optim, step)
        adam.step()
        losses.append(loss.item())
    return losses


def script_logits(model: ModelConfig, weights: dict[str, Tensor], tokens_BS: Tensor) -> Tensor:
    """Return the logits of every token: GPT-2 or Llama by the model's configuration."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x: Tensor, name: str) -> Tensor:
        weight, shape = weights[f"{name}.weight"], (model.hidden_size,)
        if model.norm == "layernorm":
            return F.layer_norm(x, shape, weight, weights[f"{name}.bias"], model.norm_eps)
        return F.rms_norm(x, shape, weight, model.norm_eps)

    x_BSD = F.embedding(tokens_BS, weights["embed.weight"])
    if model.position == "learned":
        x_BSD = x_BSD + weights["pos.weight"][: tokens_BS.shape[1]]
    for layer in range(model.num_layers):
        prefix = f"layers.{layer}"
        x_BSD = x_BSD + attend(model, linear, norm(x_BSD, f"{prefix}.norm1"), f"{prefix}.attn")
        h_BSD = norm(x_BSD, f"{prefix}.norm2")
        if model.activation == "swiglu":
            inner = F.silu(linear(h_BSD, f"{prefix}.mlp.gate")) * linear(h_BSD, f"{prefix}.mlp.up")
        else:
            inner = F.gelu(linear(h_BSD, f"{prefix}.mlp.up"), approximate="tanh")
        x_BSD = x_BSD + linear(inner, f"{prefix}.mlp.down")
    head = "embed.weight" if model.tie_embeddings else "head.weight"
    return F.linear(norm(x_BSD, "norm"), weights[head])


def attend(model: ModelConfig, linear: Callable[[Tensor, str], Tensor], x_BSD: Tensor, prefix: str) -> Tensor:
    """Return the output of a layer's attention."""
    heads = (linear(x_BSD, f"{prefix}.{name}").unflatten(-1, (-1, model.head_size)).transpose(1, 2) for name in "qkv")
    q_BNSH, k_BNSH, v_BNSH = heads
    if model.position == "rope":
        q_BNSH, k_BNSH = (turned(each, model.rope_theta) for each in (q_BNSH, k_BNSH))
    gqa = model.num_heads != model.num_kv_heads
    y_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, is_causal=True, enable_gqa=gqa)
    return linear(y_BNSH.transpose(1, 2).flatten(2), f"{prefix}.out")


def turned(x_BNSH: Tensor, theta: float) -> Tensor:
    """Return heads turned by their positions, the pair (i, i + H / 2) by position * theta^(-2i / H)."""
    num_positions, size = x_BNSH.shape[2:]
    rates = theta ** (-torch.arange(0, size, 2, device=x_BNSH.device, dtype=torch.float64) / size)
    angles = torch.arange(num_positions, device=x_BNSH.device).unsqueeze(1) * rates
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = x_BNSH.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x_BNSH.dtype)


if __name__ == "__main__":
    sys.exit(main())
