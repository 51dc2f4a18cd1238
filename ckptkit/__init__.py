"""ckptkit: asynchronous, verified, resharding checkpoints on POSIX, Lustre and object storage.

Programs import these names and no submodule:
- what a state is: Piece, Box, TensorInfo, Placement, Cut, ParallelLayout, Coords; its stages: stage_layers, stage_rank,
  rank_stages; its ZeRO buckets: bucket_offsets, padded_size, shard_interval, overlaps;
- to save: save, Checkpointer, CheckpointerOptions, SaveReport; where to: parse_tiers, Tiers, Tier, Node, nodes_of,
  nodes_here, node_name, NodePlaces; what stays: Retention, prune, pin, unpin;
- what a run holds: Run, Root, committed_steps, latest_step, resolve;
- Hugging Face folders: HfFolder, and open_source for what an address means;
- to load: restore, restore_newest, Candidate, identified, first_sound, set_aside; CheckpointReader, restore_from;
- ranks that load together: Exchange, NodeExchange, Alone; how they agree: on_all, outcomes;
- checkpoints as files: copy_step, reshard, Shard, hash_checkpoint, verify_checkpoint, diff_checkpoints, Tolerance,
  tensor_statistics;
- plans without a save, for experts: Partition, ChunkTable, plan_save, plan_files, Cover, Part, PartIndex.

ckptkit.torch, which is imported by its own name, saves and loads the state of any PyTorch program.
"""

from threefold import __version__ as __version__
from threefold.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
