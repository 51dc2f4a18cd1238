"""ckptkit: asynchronous, verified, resharding checkpoints on POSIX, Lustre and object storage.

Programs import these names and no submodule:
- what a state is: Piece, Box, TensorInfo, Placement, ParallelLayout, Coords, stage_layers; its ZeRO buckets:
  bucket_offsets, padded_size, shard_interval, overlaps;
- to save: save, Checkpointer, CheckpointerOptions, SaveReport; where to: parse_tiers, Tiers, Tier, Node, nodes_of,
  node_name; what stays: Retention, prune, pin, unpin;
- what a run holds: Run, Root, committed_steps, latest_step, resolve;
- to load: restore, restore_newest, first_sound; step by step: CheckpointReader, restore_from;
- ranks that load together: Exchange, NodeExchange, Alone; how they agree: on_all, outcomes;
- checkpoints as files: copy_step, reshard, hash_checkpoint, verify_checkpoint;
- plans without a save, for experts: Partition, ChunkTable, plan_save, plan_files, Cover, Part, PartIndex.
"""

from threefold import __version__ as __version__
from threefold.lazy import lazy_names

TYPE_CHECKING = False

if TYPE_CHECKING:
    from ckptkit.check.hash import hash_checkpoint as hash_checkpoint
    from ckptkit.check.verify import verify_checkpoint as verify_checkpoint
    from ckptkit.format.part_index import PartIndex as PartIndex
    from ckptkit.format.root import Part as Part
    from ckptkit.format.root import Root as Root
    from ckptkit.handoff.report import SaveReport as SaveReport
    from ckptkit.loading.exchange import Alone as Alone
    from ckptkit.loading.exchange import Exchange as Exchange
    from ckptkit.loading.exchange import on_all as on_all
    from ckptkit.loading.exchange import outcomes as outcomes
    from ckptkit.loading.node_exchange import NodeExchange as NodeExchange
    from ckptkit.loading.reader import CheckpointReader as CheckpointReader
    from ckptkit.loading.restore import restore as restore
    from ckptkit.loading.restore import restore_from as restore_from
    from ckptkit.loading.roots import latest_step as latest_step
    from ckptkit.model.box import Box as Box
    from ckptkit.model.box import Piece as Piece
    from ckptkit.model.chunk_table import ChunkTable as ChunkTable
    from ckptkit.model.layout import Coords as Coords
    from ckptkit.model.layout import ParallelLayout as ParallelLayout
    from ckptkit.model.layout import stage_layers as stage_layers
    from ckptkit.model.placement import Placement as Placement
    from ckptkit.model.ranks import Partition as Partition
    from ckptkit.model.tensor import TensorInfo as TensorInfo
    from ckptkit.model.zero import bucket_offsets as bucket_offsets
    from ckptkit.model.zero import overlaps as overlaps
    from ckptkit.model.zero import padded_size as padded_size
    from ckptkit.model.zero import shard_interval as shard_interval
    from ckptkit.plan.cover import Cover as Cover
    from ckptkit.plan.save_plan import plan_files as plan_files
    from ckptkit.plan.save_plan import plan_save as plan_save
    from ckptkit.rewrite.copy import copy_step as copy_step
    from ckptkit.rewrite.reshard import reshard as reshard
    from ckptkit.runs.catalogue import committed_steps as committed_steps
    from ckptkit.runs.catalogue import resolve as resolve
    from ckptkit.runs.fallback import first_sound as first_sound
    from ckptkit.runs.fallback import restore_newest as restore_newest
    from ckptkit.runs.pins import pin as pin
    from ckptkit.runs.pins import unpin as unpin
    from ckptkit.runs.pruning import prune as prune
    from ckptkit.runs.retention import Retention as Retention
    from ckptkit.runs.run import Run as Run
    from ckptkit.saving.checkpointer import Checkpointer as Checkpointer
    from ckptkit.saving.options import CheckpointerOptions as CheckpointerOptions
    from ckptkit.saving.save import save as save
    from ckptkit.tiers.tier import Node as Node
    from ckptkit.tiers.tier import Tier as Tier
    from ckptkit.tiers.tier import Tiers as Tiers
    from ckptkit.tiers.tier import node_name as node_name
    from ckptkit.tiers.tier import nodes_of as nodes_of
    from ckptkit.tiers.tier import parse_tiers as parse_tiers
else:
    __all__, __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "Alone": "loading.exchange",
            "Box": "model.box",
            "CheckpointReader": "loading.reader",
            "Checkpointer": "saving.checkpointer",
            "CheckpointerOptions": "saving.options",
            "ChunkTable": "model.chunk_table",
            "Coords": "model.layout",
            "Cover": "plan.cover",
            "Exchange": "loading.exchange",
            "Node": "tiers.tier",
            "NodeExchange": "loading.node_exchange",
            "ParallelLayout": "model.layout",
            "Part": "format.root",
            "PartIndex": "format.part_index",
            "Partition": "model.ranks",
            "Piece": "model.box",
            "Placement": "model.placement",
            "Retention": "runs.retention",
            "Root": "format.root",
            "Run": "runs.run",
            "SaveReport": "handoff.report",
            "TensorInfo": "model.tensor",
            "Tier": "tiers.tier",
            "Tiers": "tiers.tier",
            "bucket_offsets": "model.zero",
            "committed_steps": "runs.catalogue",
            "copy_step": "rewrite.copy",
            "first_sound": "runs.fallback",
            "hash_checkpoint": "check.hash",
            "latest_step": "loading.roots",
            "node_name": "tiers.tier",
            "nodes_of": "tiers.tier",
            "on_all": "loading.exchange",
            "outcomes": "loading.exchange",
            "overlaps": "model.zero",
            "padded_size": "model.zero",
            "parse_tiers": "tiers.tier",
            "pin": "runs.pins",
            "plan_files": "plan.save_plan",
            "plan_save": "plan.save_plan",
            "prune": "runs.pruning",
            "reshard": "rewrite.reshard",
            "resolve": "runs.catalogue",
            "restore": "loading.restore",
            "restore_from": "loading.restore",
            "restore_newest": "runs.fallback",
            "save": "saving.save",
            "shard_interval": "model.zero",
            "stage_layers": "model.layout",
            "unpin": "runs.pins",
            "verify_checkpoint": "check.verify",
        },
    )
