"""One example for each public class of ckptkit, which the reference page shows beside it; run in an empty folder."""

# %%
import numpy as np

# %% Box
from ckptkit import Box

lower = Box(offset=(4, 0), shape=(4, 3))  # rows 4 to 7 of a matrix
assert lower.numel == 12

# %% Piece
from ckptkit import Piece

values = np.arange(24, dtype=np.float32)  # contiguous, one-dimensional: a view of a matrix of 8 rows
pieces = [Piece.whole("embed.weight", Box((0, 0), (8, 3)), values)]

# %% Placement
from ckptkit import Cut, Placement

placement = Placement("first", cuts=(Cut(0, "tp"),))  # rows are cut over tp, on the stage of the embedding

# %% Cut
heads = Cut(0, "tp", max_parts=2)  # two key/value heads that are never divided: tp 4 repeats them
assert heads.num_parts(4) == 2

# %% TensorInfo
from ckptkit import TensorInfo

tensors = [TensorInfo("embed.weight", "F32", (8, 3), placement)]

# %% ParallelLayout
from ckptkit import ParallelLayout

layout = ParallelLayout.parse("tp4-dp2")
print(layout.world_size, layout.coords(5))

# %% Coords
from ckptkit import Coords

assert layout.rank(Coords(tp=1, dp=1)) == 5

# %% Checkpointer
from ckptkit import Checkpointer, CheckpointerOptions, Retention

options = CheckpointerOptions(retention=Retention(keep_last=2))
with Checkpointer("run", attempt="a1", options=options) as checkpointer:
    stall_s = checkpointer.save(
        100, pieces, tensors=tensors, layout=ParallelLayout(), num_layers=1, metadata={"val_loss": 2.1}
    )
    [report] = checkpointer.wait()  # training goes on meanwhile, and asks poll()

# %% CheckpointerOptions
from ckptkit import CheckpointerOptions, Retention

options = CheckpointerOptions(when_busy="skip", window_bytes=1 << 30, retention=Retention(keep_last=5))

# %% Retention
from ckptkit import Retention

retention = Retention(keep_last=5, keep_every=1000, keep_best=3, metric="val_loss")

# %% SaveReport
from ckptkit import SaveReport

report: SaveReport
assert report.ok, report.error
print(f"step {report.step}: {report.data_bytes:,} bytes, the loop waited {report.stall_s:.3f} s")

# %% Run
from ckptkit import Run

run = Run("run")  # or s3://bucket/run
print(run.newest(), run.root(100).metadata)
there = np.zeros(24, np.float32)
run.restore(100, [Piece.whole("embed.weight", Box((0, 0), (8, 3)), there)])
assert (there == values).all()

# %% Candidate
from ckptkit import Candidate, first_sound

steps = [Candidate("run", step) for step in run.newest_first()]
candidate, root, damaged = first_sound(steps, lambda each: run.root(each.step), strict=False, report=print)
print(candidate.step, damaged)

# %% Root
from ckptkit import Root

root: Root = run.root(100)
for name, info in root.tensors.items():
    print(name, info.dtype, info.shape)

# %% Part
for part in root.parts:
    print(part.data, part.data_bytes)

# %% CheckpointReader
from ckptkit import CheckpointReader, restore_from

with run.open(100) as reader:
    assert isinstance(reader, CheckpointReader)
    restore_from(reader, [Piece.whole("embed.weight", Box((4, 0), (4, 3)), there[12:])])  # the lower half alone
    print(reader.bytes_read, "bytes read")

# %% PartIndex
from ckptkit import PartIndex

with run.open(100) as reader:
    index: PartIndex = reader.files.read_index(reader.root.parts[0])
    print(index.offsets, index.chunks.names)  # where in the file each chunk begins

# %% ChunkTable
from ckptkit import ChunkTable

chunks = ChunkTable.of_pieces(pieces, tensors)
print(chunks.box(0), chunks.size_bytes)

# %% Exchange
from ckptkit import Alone, Exchange, restore

exchange: Exchange = Alone()  # or a NodeExchange, or anything with these four members
restore("run", 100, pieces, exchange=exchange)

# %% Alone
from ckptkit import Alone, on_all

assert on_all(Alone(), lambda: 7) == 7

# %% NodeExchange
from ckptkit import NodeExchange, restore

with NodeExchange(rank=0, size=1, job="job-17") as exchange:  # each process of the machine, with its own rank
    restore("run", 100, pieces, exchange=exchange)  # each byte is read once a machine

# %% Partition
from ckptkit import Partition

partition = Partition(tensors, num_layers=1, layout=ParallelLayout.parse("tp2"))

# %% Cover
from ckptkit import Cover

cover = Cover(tensors)

# %% Tolerance
from ckptkit import Tolerance, diff_checkpoints

with run.open(100) as left, run.open(100) as right:
    diff = diff_checkpoints(left, right, tolerance=Tolerance(relative=1e-6))

# %% Shard
from ckptkit import Shard, open_source, reshard
from threefold import open_storage

with run.open(100) as reader:  # the command `ckptkit reshard --shard 0/1`, from Python
    done = reshard(reader, open_storage("run-tp2"), ParallelLayout.parse("tp2"), shard=Shard.parse("0/1", {}))

# %% HfFolder
from ckptkit import HfFolder, open_source

folder = open_source("hf:llama")  # a folder of config.json and safetensors files
assert isinstance(folder, HfFolder)
print(len(folder.root(0).tensors), "tensors")

# %% Tiers
from ckptkit import parse_tiers

tiers = parse_tiers(["/nvme/run", "s3://bucket/run,every=1000,keep_last=3"])
print(tiers.first.url, [tier.url for tier in tiers.slower])

# %% Tier
from ckptkit import Tier

options = CheckpointerOptions(tiers=(Tier("s3://bucket/run", every=1000),))  # beside the URL that is saved to

# %% Node
from ckptkit import Node, nodes_of

nodes: list[Node] = nodes_of(["a", "a", "b", "b"], [0, 0, 2, 2])  # the machines of four ranks

# %% NodePlaces
from ckptkit import NodePlaces, nodes_here

[node] = nodes_here(Alone())  # of each rank of the job
places = NodePlaces(["run"], node, rank=0)  # this node's own disk, then the replica if it has one
print([step for _, step in places.committed()])
