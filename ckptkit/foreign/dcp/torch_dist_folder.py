"""A folder that megatron-core's dist_checkpointing wrote with its backend torch_dist: a save of DCP, files beside it.

`metadata.json` names the backends. What all ranks have alike is pickled: in the save as `common_state/shard_0_1`, since
megatron-core 0.19, or in the file `common.pt`. Both files are opaque bytes here, `files/metadata.json` and so on.
"""

import json
from dataclasses import replace
from functools import cached_property

from ckptkit.foreign.checks import checked, shown, size_of
from ckptkit.foreign.dcp.folder import DcpFolder
from ckptkit.foreign.dcp.metadata import FILE, DcpContents
from ckptkit.foreign.hf.contents import FILES
from ckptkit.foreign.stored_parts import Place
from threefold.errors import UserError
from threefold.storage import Storage

CONFIG, COMMON = "metadata.json", "common.pt"
COMMON_STATE = "common_state/shard_0_1"  # in the save, in place of COMMON
BACKENDS = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
MAX_FILE_BYTES = 256 << 20
HINT = "name a folder that megatron-core's dist_checkpointing wrote, iter_0000100 for instance"


class TorchDistFolder(DcpFolder):
    """One folder, with the methods of a Run that holds one step, 0; nothing is read before the first of them."""

    scheme = "torch_dist:"

    @cached_property
    def contents(self) -> DcpContents:
        """Return what `.metadata` says, and the files beside it; CheckFailed or UserError if it is not understood."""
        sizes = {CONFIG: size_of(self.storage, CONFIG, MAX_FILE_BYTES, hint=HINT)}
        _check_backends(self.storage)
        contents, keys = self.read_contents(), [info.key for info in self.storage.list()]
        if COMMON in keys or COMMON_STATE not in contents.blobs:
            sizes[COMMON] = size_of(self.storage, COMMON, MAX_FILE_BYTES, hint=HINT)
        others = [key for key in keys if key not in (CONFIG, COMMON, FILE) and not key.endswith(".distcp")]
        if others:
            text = f"{self.storage.url} holds {others[0]}, which is not read"
            raise UserError(text, hint="save it by torch_dist alone")
        beside = {FILES + name: Place(name, 0, size) for name, size in sizes.items()}
        return replace(contents, blobs={**contents.blobs, **beside})


def _check_backends(storage: Storage) -> None:
    where = f"{storage.url}/{CONFIG}"
    with checked(f"{where} is not what megatron-core writes"):
        config = json.loads(storage.read(CONFIG))
        named = {key: config.get(key, BACKENDS[key]) for key in BACKENDS}
    if named != BACKENDS or "sharded_backend" not in config:
        wrong = ", ".join(f"{key} {shown(value)}" for key, value in named.items() if value != BACKENDS[key])
        text = f"{where} says {wrong or 'no backend'}, which is not read"
        raise UserError(text, hint="save it with --dist-ckpt-format torch_dist")
