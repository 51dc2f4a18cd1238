"""The `trainer` command: train, eval, generate. torch is imported by the verbs, never for --help."""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from threefold.cli import Parser, print_json, print_line, run
from threefold.errors import UserError
from trainer.config_file import add_flags, flag_overrides, load_config
from trainer.failure import JobParser, is_launched, leave, let_first_speak, recorded

T = TypeVar("T")


def build_parser() -> Parser:
    """The parser of all verbs."""
    parser = JobParser(prog="trainer", description="A compact tensor x pipeline x data parallel GPT trainer.")
    verbs = parser.add_subparsers(metavar="{train,eval,generate}")

    train = verbs.add_parser(
        "train",
        help="train, or resume, a run",
        usage="trainer train [-h] CONFIG.toml [flags]",
        description="Train a run; the same command resumes from the newest committed step under --save. "
        "With several processes: torchrun --nproc-per-node 4 -m trainer train CONFIG.toml --tp 2 --pp 2 ...",
    )
    train.add_argument("config", metavar="CONFIG.toml", help="configuration; every key is also a flag, below")
    add_flags(train)
    train.set_defaults(handler=train_verb)

    evaluate = verbs.add_parser(
        "eval",
        help="loss and perplexity of a checkpoint on [data.valid]",
        usage="trainer eval [-h] CKPT [CONFIG.toml] [--json] [flags]",
        description="Evaluate a checkpoint of any layout on the fixed samples of [data.valid].",
    )
    add_checkpoint(evaluate)
    evaluate.add_argument("--json", action="store_true", help="print one JSON document")
    add_flags(evaluate)
    evaluate.set_defaults(handler=eval_verb)

    generate = verbs.add_parser(
        "generate",
        help="continue a prompt with a checkpoint",
        usage="trainer generate [-h] CKPT [CONFIG.toml] --prompt S [--tokens N] [--temperature X] [--seed N] [flags]",
        description="Continue a prompt with a checkpoint of any layout, in one process.",
    )
    add_checkpoint(generate)
    generate.add_argument("--prompt", required=True, help="text to continue")
    generate.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens to add")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 always takes the likeliest")
    add_flags(generate)
    generate.set_defaults(handler=generate_verb)
    return parser


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The two positional arguments of the verbs that read a checkpoint."""
    parser.add_argument("checkpoint", metavar="CKPT", help="run URL (its newest committed step) or step URL")
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="default: the run's own, from the checkpoint")


@recorded
def train_verb(arguments: argparse.Namespace) -> int:
    """Train or resume; every rank of a torchrun job comes here."""
    config = before_ranks(lambda: load_config(arguments.config, flag_overrides(arguments), world_size=world_size()))
    from trainer.train import train

    return train(config)


@recorded
def eval_verb(arguments: argparse.Namespace) -> int:
    """Evaluate, and print the result on the first rank."""
    from trainer.evaluate import evaluate_checkpoint
    from trainer.trained import open_checkpoint

    result = evaluate_checkpoint(
        before_ranks(
            lambda: open_checkpoint(
                arguments.checkpoint, arguments.config, flag_overrides(arguments), world_size=world_size()
            )
        )
    )
    if os.environ.get("RANK", "0") != "0":
        return 0
    if arguments.json:
        print_json(result)
    else:
        for name, value in result.items():
            print_line(f"{name}: {value}")
    return 0


@recorded
def generate_verb(arguments: argparse.Namespace) -> int:
    """Generate, and print the prompt with its continuation."""
    from trainer.generate import generate_text
    from trainer.trained import open_checkpoint

    checkpoint = open_checkpoint(arguments.checkpoint, arguments.config, flag_overrides(arguments), world_size=1)
    print(generate_text(checkpoint, arguments.prompt, num_tokens=arguments.tokens, temperature=arguments.temperature))
    return 0


def world_size() -> int:
    """The number of processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def before_ranks(action: Callable[[], T]) -> T:
    """Run what every rank does before ranks can talk; an error that all meet is reported once a node."""
    try:
        return action()
    except UserError:
        let_first_speak()
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """The console entry point."""
    try:
        code = run(build_parser(), argv)
    except SystemExit as ended:  # what ranks agreed on, or a usage fault
        if not (isinstance(ended.code, int) and is_launched()):
            raise
        code = ended.code
    if code and is_launched():
        leave(code)
    return code
