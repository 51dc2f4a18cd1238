"""What a run recorded of its stream: what is not such a record is one error."""

from pathlib import Path

import pytest

from datakit.order.stream_record import Recorded, StreamRecord
from threefold.errors import UserError

ENDLESS = {"path": "a", "fingerprint": "b", "rows": float("inf")}


def test_a_schedule_with_an_endless_number_is_none() -> None:
    with pytest.raises(UserError, match="is not a stream record"):
        StreamRecord.from_json({"version": 1, "sources": [ENDLESS], "segments": []})


@pytest.mark.parametrize("content", ['{"num_samples": Infinity, "stream": {}}', "[" * 100_000], ids=["endless", "deep"])
def test_a_file_of_endless_values_has_no_record(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=r"x.json has no stream record"):
        Recorded.read(str(tmp_path / "x.json"))
