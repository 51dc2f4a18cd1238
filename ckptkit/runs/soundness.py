"""Soundness: whether a committed step has all that its root promises, as far as that shows without reading data.

Each file that the root names is there with its size, in one listing; each part index has the digest that the root
records; their chunks cover each tensor exactly once.
"""

from ckptkit.format.keys import writer_of
from ckptkit.loading.reader import CheckpointReader, reading_threads
from ckptkit.loading.roots import read_root
from ckptkit.plan.cover import Cover
from threefold.errors import StorageError, UserError
from threefold.storage import ObjectInfo, Storage


def what_is_wrong(storage: Storage, step: int, info: ObjectInfo) -> str:
    """Return what is wrong with a step whose root was found, empty where nothing is; StorageError if reading failed."""
    try:
        with CheckpointReader(storage, step, root=read_root(storage, step, info=info)) as reader:
            if faults := [f"{key} {fault}" for key, fault in reader.size_faults().items()]:
                return faults[0] + (f", and {len(faults) - 1} more files" if faults[1:] else "")
            _check_cover(reader)
    except StorageError:
        raise
    except UserError as error:  # damaged, or gone by now
        return " ".join(error.message.split())
    return ""


def _check_cover(reader: CheckpointReader) -> None:
    root = reader.root
    cover = Cover(list(root.tensors.values()), is_share=root.share is not None)
    with reading_threads(reader.num_threads, reader) as pool:
        for _ in pool.map(lambda part: cover.add(reader.read_index(part), f"{reader.url}/{part.index}"), root.parts):
            pass
    cover.check(reader.url, lambda: ((writer_of(part.index), reader.read_index(part)) for part in root.parts))
