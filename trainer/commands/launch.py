"""`trainer launch`: start a verb, or any program, on all ranks of a node, as torchrun does."""

from dataclasses import dataclass

from threefold.options import argument


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `trainer launch`."""

    arguments: tuple[str, ...] = argument(
        "COMMAND",
        "torchrun's flags, then VERB, SCRIPT or -m MODULE with its own arguments: "
        "--nproc-per-node 8 train run.toml --tp 2",
        (),
        takes_rest=True,
    )


def run(options: Options) -> int:
    """Start a command on all ranks of this node by torch's elastic launcher, of which every flag can be given; torchrun
    --help lists them. What fails is a line with its rank and host, signals go to the ranks, and the exit code is that
    of the first rank that failed. On one node: trainer launch --nproc-per-node 8 train run.toml --tp 2; on each of two:
    trainer launch --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 train run.toml ..."""
    from trainer.commands import VERBS
    from trainer.job.launcher import launch

    return launch(options.arguments, [verb for verb in VERBS if verb != "launch"])
