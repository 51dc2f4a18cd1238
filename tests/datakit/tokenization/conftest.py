"""The engine takes batches from its first character on, so that small texts try both of its ways."""

from collections.abc import Iterator

import pytest

from datakit.tokenization import fast_encoder


@pytest.fixture(autouse=True, scope="module")
def _batches_from_the_start() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_encoder, "FIRST_CHARACTERS", 0)
        yield
