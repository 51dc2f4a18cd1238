"""One rank of several that restore together, for the tests; it does to itself what the test asks for.

    python -m tests.ckptkit.support.exchange_program URL STEP RANK SIZE JOB [--layout tp2-dp2]
        [--as-rank R] [--then die|freeze] [--limit FSIZE=65536|NOFILE=6]

Prints a JSON line: the bytes it needed and read, whether every piece is as a restore alone has it, or its error.
"""

import argparse
import json
import os
import resource
import signal

from ckptkit.loading.node_exchange import NodeExchange
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.restore import restore, restore_from
from ckptkit.model.layout import ParallelLayout
from tests.ckptkit.support.model_tables import gpt_tensors
from tests.ckptkit.support.saves import pieces_of
from threefold.errors import UserError
from threefold.storage import Buffer, open_storage

BIG = gpt_tensors(hidden=256, ffn=512, vocab=2001)


class Spoiled(NodeExchange):
    """Ends or stops its process in the middle of a read."""

    then = signal.SIGKILL

    def all_to_all(self, send: list[Buffer]) -> list[Buffer]:  # type: ignore[override]
        os.kill(os.getpid(), self.then)
        return super().all_to_all(send)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    for name in ("step", "rank", "size"):
        parser.add_argument(name, type=int)
    parser.add_argument("job")
    parser.add_argument("--layout", default="")
    parser.add_argument("--as-rank", type=int, default=0)
    parser.add_argument("--then", choices=["die", "freeze"])
    parser.add_argument("--deadline", type=float, default=30.0)
    parser.add_argument("--limit", default="")
    arguments = parser.parse_args()
    if arguments.limit:
        name, _, value = arguments.limit.partition("=")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), int(value)))
    pieces = []
    if arguments.layout:
        pieces = pieces_of(BIG, ParallelLayout.parse(arguments.layout), arguments.as_rank)
    told: dict[str, object] = {"rank": arguments.rank, "needed": sum(piece.data.nbytes for piece in pieces)}
    kind = Spoiled if arguments.then else NodeExchange
    Spoiled.then = signal.SIGSTOP if arguments.then == "freeze" else signal.SIGKILL
    try:
        with (
            kind(arguments.rank, arguments.size, arguments.job, deadline_s=max(arguments.deadline, 60.0)) as exchange,
            CheckpointReader(open_storage(arguments.url), arguments.step, exchange=exchange) as reader,
        ):
            exchange._deadline_s = arguments.deadline  # to meet takes as long as all need to start
            restore_from(reader, pieces, tensors=BIG)
            told["read"] = reader.bytes_read
        alone = pieces_of(BIG, ParallelLayout.parse(arguments.layout), arguments.as_rank) if arguments.layout else []
        restore(arguments.url, arguments.step, alone, tensors=BIG)
        told["same"] = all(a.data.tobytes() == b.data.tobytes() for a, b in zip(pieces, alone, strict=True))
    except UserError as error:
        told |= {"kind": type(error).__name__, "error": error.message}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
