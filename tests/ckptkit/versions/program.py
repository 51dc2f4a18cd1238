"""What a program of any release does to a run: a process that reads an act, a line of JSON, and answers with another.

    python -S -P program.py TREE PACKAGES CHANGE    # the packages of a commit, those that it needs, a change

Only names are used that every release of this format has. With the change "root" or "index" it is a program of the
future: it reads what this code reads and one version more of both, and writes that version of one of them. The other
changes are faults.
"""

import hashlib
import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

SHAPES = {"embed.weight": (5, 4), "layers.0.weight": (4, 8)}
NUM_LAYERS = 1


def raise_versions(writes: str) -> None:
    """Let this code read version 3 of roots and indexes, and write it of one of them."""
    from ckptkit.format import part_index, root

    root.READ_VERSIONS = (*root.READ_VERSIONS, 3)
    root.VERSION = 3 if writes == "root" else root.VERSION
    older, newer = part_index.VERSIONS
    part_index.VERSIONS = (older, 3, newer) if writes == "index" else (older, newer, 3)  # the second is written


def falls_back_from_newer() -> None:
    """Let an index of a newer version be called damaged."""
    from ckptkit.format import part_index
    from threefold.errors import CheckFailed

    part_index.UserError = CheckFailed


def prunes_what_it_cannot_read() -> None:
    """Let a root that cannot be read be one that a policy knows all about."""
    from ckptkit.runs.record import StepRecord

    StepRecord.is_readable = True


def sweeps_what_it_cannot_read() -> None:
    """Let the files of a root that cannot be read be those of no root."""
    from ckptkit.runs.debris import Debris

    Debris._may_hold_orphans = lambda self, listed: bool(listed.num_files)
    Debris._names_still = lambda self, step, record: True


def sets_aside_what_it_cannot_read() -> None:
    """Let a rollback put a root that cannot be read in quarantine."""
    from ckptkit.loading import roots
    from ckptkit.runs import rollback

    def attempt(storage: Any, step: int) -> str:
        try:
            return roots.read_root(storage, step).attempt
        except ValueError:
            return ""

    rollback._attempt_named = attempt


FAULTS = (
    falls_back_from_newer,
    prunes_what_it_cannot_read,
    sweeps_what_it_cannot_read,
    sets_aside_what_it_cannot_read,
)


def values(name: str, value: int) -> Any:
    """Return the elements of a tensor of a state that is known by a number."""
    import numpy as np

    count = SHAPES[name][0] * SHAPES[name][1]
    return (np.arange(count) + 100 * value + len(name)).astype(np.float32)


def digest(arrays: dict[str, Any]) -> str:
    """Return a digest of a state."""
    return hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()


def digest_of(value: int) -> str:
    """Return the digest of a state that is known by a number."""
    return digest({name: values(name, value) for name in SHAPES})


def save(url: str, step: int, value: int, dp: int) -> str:
    """Save a step by several writers, one after the other."""
    import ckptkit

    tensors = _tensors()
    for rank in reversed(range(dp)):
        pieces = []
        for info in tensors:
            data = values(info.name, value)
            start, stop = len(data) * rank // dp, len(data) * (rank + 1) // dp
            box = ckptkit.Box((0, 0), info.shape)
            pieces.append(ckptkit.Piece(info.name, box, start, stop, data[start:stop].copy()))
        ckptkit.save(
            url,
            step,
            pieces,
            tensors=tensors,
            layout=ckptkit.ParallelLayout(dp=dp),
            num_layers=NUM_LAYERS,
            metadata={"value": value},
            rank=rank,
            world_size=dp,
            attempt=f"a{value}",
            awaits_commit=False,
        )
    return ""


def load(url: str, step: int | None) -> str:
    """Restore a step, or the newest; return which it is, and the digest of its values."""
    import numpy as np

    import ckptkit

    tensors = _tensors()
    arrays = {info.name: np.zeros(info.shape[0] * info.shape[1], np.float32) for info in tensors}
    boxes = {info.name: ckptkit.Box((0, 0), info.shape) for info in tensors}
    pieces = [ckptkit.Piece(name, boxes[name], 0, len(array), array) for name, array in arrays.items()]
    if step is None:
        root = ckptkit.restore_newest(url, pieces, tensors=tensors)
    else:
        root = ckptkit.restore(url, step, pieces, tensors=tensors)
    return f"{root.step} {digest(arrays)}"


def command(*words: str) -> str:
    """Run a verb of ckptkit and return what it printed; Refused with that if it did not end well."""
    from ckptkit.cli import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as end:
            code = end.code
    if code:
        raise Refused(f"exit code {code}: {err.getvalue()}{out.getvalue()}")
    return out.getvalue()


class Refused(Exception):
    """A verb that did not end well, and all that it printed."""


def _tensors() -> list[Any]:
    import ckptkit

    return [
        ckptkit.TensorInfo(name, "F32", shape, ckptkit.Placement("first" if name.startswith("embed") else 0))
        for name, shape in SHAPES.items()
    ]


ACTS = {"save": save, "load": load, "command": command}


def answer(act: str, arguments: list[Any]) -> dict[str, Any]:
    """Return what an act returned, or the kinds and the text of its error."""
    try:
        with redirect_stderr(io.StringIO()):
            return {"kinds": [], "text": ACTS[act](*arguments)}
    except Exception as error:
        return {"kinds": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}


def serve(tree: str, packages: str, change: str) -> None:
    """Answer acts until there are none."""
    sys.path[:0] = [tree]
    sys.path.append(packages)
    if change in ("root", "index"):
        raise_versions(change)
    elif change:
        {fault.__name__: fault for fault in FAULTS}[change]()
    lines = sys.stdout
    for line in sys.stdin:
        act, *arguments = json.loads(line)
        with redirect_stdout(sys.stderr):
            reply = json.dumps(answer(act, arguments))
        print(reply, file=lines, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
