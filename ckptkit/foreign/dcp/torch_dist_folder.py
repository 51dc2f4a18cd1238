"""A folder that megatron-core's dist_checkpointing wrote with its backend torch_dist: a save of DCP, files beside it.

`metadata.json` names the backends. What all ranks have alike is pickled: in the save as `common_state/shard_0_1`, since
megatron-core 0.19, or in the file `common.pt`. Both files are opaque bytes here, `files/metadata.json` and so on.
"""

import json
from dataclasses import replace
from functools import cached_property

from ckptkit.foreign.dcp.folder import DcpFolder
from ckptkit.foreign.dcp.metadata import FILE, DcpContents
from ckptkit.foreign.hf.contents import FILES
from ckptkit.foreign.shown import said, shown
from ckptkit.foreign.stored_parts import Place
from threefold.errors import CheckFailed, UserError
from threefold.storage import Storage

CONFIG, COMMON = "metadata.json", "common.pt"
COMMON_STATE = "common_state/shard_0_1"  # in the save, in place of COMMON
BACKENDS = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
MAX_FILE_BYTES = 256 << 20


class TorchDistFolder(DcpFolder):
    """One folder, with the methods of a Run that holds one step, 0; nothing is read before the first of them."""

    scheme = "torch_dist:"

    @cached_property
    def contents(self) -> DcpContents:
        """Return what `.metadata` says, and the files beside it; CheckFailed or UserError if it is not understood."""
        sizes = {CONFIG: _size(self.storage, CONFIG)}
        _check_backends(self.storage)
        found, keys = self.read_contents(), [info.key for info in self.storage.list()]
        if COMMON in keys or COMMON_STATE not in found.blobs:
            sizes[COMMON] = _size(self.storage, COMMON)
        others = [key for key in keys if key not in (CONFIG, COMMON, FILE) and not key.endswith(".distcp")]
        if others:
            text = f"{self.storage.url} holds {others[0]}, which is not read"
            raise UserError(text, hint="save it by torch_dist alone")
        return replace(found, blobs={**found.blobs, **{FILES + n: Place(n, 0, size) for n, size in sizes.items()}})


def _size(storage: Storage, name: str) -> int:
    info = storage.info(name)
    if info is None:
        hint = "name a folder that megatron-core's dist_checkpointing wrote, iter_0000100 for instance"
        raise CheckFailed(f"{storage.url}/{name} is missing", hint=hint)
    if info.size_bytes > MAX_FILE_BYTES:
        raise CheckFailed(f"{storage.url}/{name} has {info.size_bytes:,} bytes, more than such a file may have")
    return info.size_bytes


def _check_backends(storage: Storage) -> None:
    where = f"{storage.url}/{CONFIG}"
    try:
        found = json.loads(storage.read(CONFIG))
        named = {key: found.get(key, BACKENDS[key]) for key in BACKENDS}
    except (AttributeError, ValueError, RecursionError) as error:
        raise CheckFailed(f"{where} is not what megatron-core writes: {said(error)}") from None
    if named != BACKENDS or "sharded_backend" not in found:
        wrong = ", ".join(f"{key} {shown(value)}" for key, value in named.items() if value != BACKENDS[key])
        text = f"{where} says {wrong or 'no backend'}, which is not read"
        raise UserError(text, hint="save it with --dist-ckpt-format torch_dist")
