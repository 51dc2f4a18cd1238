"""Streams of which a test can read the samples' numbers: sample n of a blend has a token of its own."""

from pathlib import Path
from typing import Any

import numpy as np

from datakit import Blend, write_store


class NumberedStream:
    """A blend of rows of one token, and the way back from a token to the number of the sample."""

    def __init__(self, folder: Path, num_samples: int = 600) -> None:
        store = write_store(folder, [np.arange(1, 2000)], vocab_size=2001)
        self.blend = Blend([(store, 1.0)], seq_length=1, seed=3)
        self._numbers = {int(token): n for n, token in enumerate(self.blend.batch(range(num_samples)).tokens[:, 0])}

    def samples(self, batch: dict[str, Any]) -> list[int]:
        """The numbers of the samples of a micro-batch."""
        return [self._numbers[int(token)] for token in batch.get("tokens", batch.get("input_ids")).flatten()]

    @staticmethod
    def expected(first: int, num: int, micro_batch_size: int, dp_rank: int = 0, dp_size: int = 1) -> list[list[int]]:
        """The samples of the first micro-batches from sample `first` on."""
        begins = (first + (number * dp_size + dp_rank) * micro_batch_size for number in range(num))
        return [list(range(begin, begin + micro_batch_size)) for begin in begins]
