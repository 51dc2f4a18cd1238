"""ckptkit: asynchronous, verified, resharding checkpoints on POSIX, Lustre and object storage."""

from threefold import __version__ as __version__
from threefold.lazy import lazy_names

TYPE_CHECKING = False

if TYPE_CHECKING:
    from ckptkit.check.hash import hash_checkpoint as hash_checkpoint
    from ckptkit.check.verify import verify_checkpoint as verify_checkpoint
    from ckptkit.format.root import Root as Root
    from ckptkit.handoff.report import SaveReport as SaveReport
    from ckptkit.loading.exchange import Exchange as Exchange
    from ckptkit.loading.node_exchange import NodeExchange as NodeExchange
    from ckptkit.loading.reader import CheckpointReader as CheckpointReader
    from ckptkit.loading.restore import restore as restore
    from ckptkit.loading.roots import latest_step as latest_step
    from ckptkit.model.box import Box as Box
    from ckptkit.model.box import Piece as Piece
    from ckptkit.model.layout import Coords as Coords
    from ckptkit.model.layout import ParallelLayout as ParallelLayout
    from ckptkit.model.placement import Placement as Placement
    from ckptkit.model.tensor import TensorInfo as TensorInfo
    from ckptkit.rewrite.copy import copy_step as copy_step
    from ckptkit.rewrite.reshard import reshard as reshard
    from ckptkit.runs.catalogue import committed_steps as committed_steps
    from ckptkit.runs.catalogue import resolve as resolve
    from ckptkit.runs.fallback import restore_newest as restore_newest
    from ckptkit.runs.pins import pin as pin
    from ckptkit.runs.pins import unpin as unpin
    from ckptkit.runs.pruning import prune as prune
    from ckptkit.runs.retention import Retention as Retention
    from ckptkit.saving.checkpointer import Checkpointer as Checkpointer
    from ckptkit.saving.options import CheckpointerOptions as CheckpointerOptions
    from ckptkit.saving.save import save as save
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Box": "model.box",
            "CheckpointReader": "loading.reader",
            "Checkpointer": "saving.checkpointer",
            "CheckpointerOptions": "saving.options",
            "Coords": "model.layout",
            "Exchange": "loading.exchange",
            "NodeExchange": "loading.node_exchange",
            "ParallelLayout": "model.layout",
            "Piece": "model.box",
            "Placement": "model.placement",
            "Retention": "runs.retention",
            "Root": "format.root",
            "SaveReport": "handoff.report",
            "TensorInfo": "model.tensor",
            "committed_steps": "runs.catalogue",
            "copy_step": "rewrite.copy",
            "hash_checkpoint": "check.hash",
            "latest_step": "loading.roots",
            "pin": "runs.pins",
            "prune": "runs.pruning",
            "reshard": "rewrite.reshard",
            "resolve": "runs.catalogue",
            "restore": "loading.restore",
            "restore_newest": "runs.fallback",
            "save": "saving.save",
            "unpin": "runs.pins",
            "verify_checkpoint": "check.verify",
        },
    )
