"""Faults between the forms of ops and what a run wants of them."""

from collections.abc import Iterator

from threefold.options import Fault
from trainer.config import Config
from trainer.config.resolve import layer_windows
from trainer.config.train import ALIBI, NO_WINDOW, NOT_REPEATING


def op_faults(config: Config) -> Iterator[Fault]:
    """Yield faults between the forms of ops and the precision."""
    ops = config.ops
    for op, form in (("norm", ops.norm), ("adamw", ops.adamw)):
        if form == "apex" and config.train.precision == "fp64":
            text = f"ops.{op} apex is for precisions bf16, fp16 and fp32: --ops.{op} csrc"
            yield {f"ops.{op}", "train.precision"}, text
    if (p := config.model.attention_dropout) and ops.attention not in ("auto", "reference"):
        text = f"ops.attention {ops.attention} drops no weights, and model.attention_dropout is {p:g}: --ops.attention "
        yield {"ops.attention", "model.attention_dropout"}, f"{text}reference, or --model.attention-dropout 0"
    if config.model.position == "alibi" and ops.attention not in ("auto", *ALIBI):
        text = f"ops.attention {ops.attention} has no ALiBi, and model.position is alibi: --ops.attention reference, "
        yield {"ops.attention", "model.position"}, f"{text}or on GPUs --ops.attention flash-2"
    if config.train.deterministic and ops.attention in NOT_REPEATING:
        text = f"ops.attention {ops.attention} does not repeat its bits, and train.deterministic asks for that: "
        yield {"ops.attention", "train.deterministic"}, f"{text}--ops.attention auto"
    if ops.attention in NO_WINDOW and any(layer_windows(config)):
        text = f"ops.attention {ops.attention} has no window, and model.window is {config.model.window}: "
        yield (
            {"ops.attention", "model.window"},
            f"{text}--ops.attention reference, or on GPUs --ops.attention sdpa-flash",
        )
    if ops.rope != "csrc" and config.model.position != "rope" and not config.model.qk_norm:
        text = f"ops.rope {ops.rope} is for rotary positions and norms of heads: --model.position rope"
        yield {"ops.rope", "model.position", "model.qk_norm"}, text
    if ops.adamw != "csrc" and config.optim.moments == "bf16":
        text = f"ops.adamw {ops.adamw} has no moments of another dtype than the masters': --optim.moments wide"
        yield {"ops.adamw", "optim.moments"}, text
