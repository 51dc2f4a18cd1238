"""BlockLayout: a writer's data files as one sequence of blocks, and which bytes of which piece go where in each.

Pure: made once for a template of saves, in numpy. A block holds bytes of one file only and is whole granules long,
but for a file's last one.
"""

from dataclasses import dataclass

import numpy as np

from ckptkit.model.chunk_table import Ints, cut
from ckptkit.plan.save_plan import SavePlan

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Segments, sorted by block: `size` bytes from byte `offset` of source `source` go to byte `at` of block `block`.

    Sources are the pieces by number; behind them, source num_pieces + f is the header of file f. Blocks are counted
    over all files: those of file f are first_blocks[f] ... first_blocks[f + 1] - 1.
    """

    source: Ints
    offset: Ints
    block: Ints
    at: Ints
    size: Ints
    first_blocks: tuple[int, ...]
    block_bytes: int

    @property
    def num_blocks(self) -> int:
        return self.first_blocks[-1]

    def between(self, first: int, stop: int) -> slice:
        """Return the segments of blocks [first, stop)."""
        return slice(*np.searchsorted(self.block, (first, stop)).tolist())

    @classmethod
    def of(cls, plan: SavePlan, num_pieces: int, block_bytes: int = BLOCK_BYTES) -> "BlockLayout":
        """Lay out a plan's files."""
        cuts, first_blocks = [], [0]
        for number, (file, rows) in enumerate(zip(plan.files, plan.rows, strict=True)):
            sources = np.concatenate([[num_pieces + number], rows]).astype(np.int64)
            sizes = np.concatenate([[len(file.header)], file.chunks.size_bytes]).astype(np.int64)
            index, offset, block, at, size = cut(sizes, block_bytes)
            cuts.append((sources[index], offset, block + first_blocks[-1], at, size))
            first_blocks.append(first_blocks[-1] + -(-file.size_bytes // block_bytes))
        source, offset, block, at, size = (np.concatenate(column) for column in zip(*cuts, strict=True))
        return cls(source, offset, block, at, size, tuple(first_blocks), block_bytes)
