"""ckptkit: asynchronous, verified, resharding checkpoints on POSIX, Lustre and object storage."""

from threefold import __version__ as __version__
from threefold.lazy import lazy_names

TYPE_CHECKING = False

if TYPE_CHECKING:
    from ckptkit.chunk import Box as Box
    from ckptkit.chunk import Piece as Piece
    from ckptkit.format.root import Root as Root
    from ckptkit.layout import Coords as Coords
    from ckptkit.layout import ParallelLayout as ParallelLayout
    from ckptkit.loading.exchange import Exchange as Exchange
    from ckptkit.loading.fallback import restore_newest as restore_newest
    from ckptkit.loading.node_exchange import NodeExchange as NodeExchange
    from ckptkit.loading.reader import CheckpointReader as CheckpointReader
    from ckptkit.loading.restore import restore as restore
    from ckptkit.passes.copying import copy_step as copy_step
    from ckptkit.passes.hashing import hash_checkpoint as hash_checkpoint
    from ckptkit.passes.reshard import reshard as reshard
    from ckptkit.passes.verify import verify_checkpoint as verify_checkpoint
    from ckptkit.placement import Placement as Placement
    from ckptkit.runs.catalogue import committed_steps as committed_steps
    from ckptkit.runs.catalogue import latest_step as latest_step
    from ckptkit.runs.catalogue import resolve as resolve
    from ckptkit.runs.pins import pin as pin
    from ckptkit.runs.pins import unpin as unpin
    from ckptkit.runs.pruning import prune as prune
    from ckptkit.runs.retention import Retention as Retention
    from ckptkit.saving.checkpointer import Checkpointer as Checkpointer
    from ckptkit.saving.checkpointer_options import CheckpointerOptions as CheckpointerOptions
    from ckptkit.saving.save import save as save
    from ckptkit.saving.save_report import SaveReport as SaveReport
    from ckptkit.tensor import TensorInfo as TensorInfo
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Box": "chunk",
            "CheckpointReader": "loading.reader",
            "Checkpointer": "saving.checkpointer",
            "CheckpointerOptions": "saving.checkpointer_options",
            "Coords": "layout",
            "Exchange": "loading.exchange",
            "NodeExchange": "loading.node_exchange",
            "ParallelLayout": "layout",
            "Piece": "chunk",
            "Placement": "placement",
            "Retention": "runs.retention",
            "Root": "format.root",
            "SaveReport": "saving.save_report",
            "TensorInfo": "tensor",
            "committed_steps": "runs.catalogue",
            "copy_step": "passes.copying",
            "hash_checkpoint": "passes.hashing",
            "latest_step": "runs.catalogue",
            "pin": "runs.pins",
            "prune": "runs.pruning",
            "reshard": "passes.reshard",
            "resolve": "runs.catalogue",
            "restore": "loading.restore",
            "restore_newest": "loading.fallback",
            "save": "saving.save",
            "unpin": "runs.pins",
            "verify_checkpoint": "passes.verify",
        },
    )
