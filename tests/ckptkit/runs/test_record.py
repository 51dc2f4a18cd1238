"""Records of committed steps: their metrics, and steps that change or go while they are read."""

from pathlib import Path

import pytest

from ckptkit.format.root import Part, Root
from ckptkit.model.layout import ParallelLayout
from ckptkit.runs.catalogue import listed_steps
from ckptkit.runs.record import Records, StepRecord
from tests.ckptkit.support.steps import checked_records, write_steps
from threefold.storage import open_storage
from threefold.storage.local import LocalStorage


def test_metrics_are_the_finite_numbers_by_their_dotted_names() -> None:
    metadata = {"loss": 2, "bad": float("nan"), "no": True, "none": None, "config": {"optim": {"lr": 0.5}, "name": "x"}}
    assert StepRecord(1, metadata=metadata | {"huge": 10**400}).metrics() == {"loss": 2, "config.optim.lr": 0.5}


@pytest.mark.parametrize("method", ["read", "list"])
def test_a_step_that_goes_while_it_is_read_is_none_or_not_good(tmp_path: Path, method: str) -> None:
    storage = LocalStorage(tmp_path)
    write_steps(storage, 1, 2)
    usual = getattr(storage, method)

    def vanished(key: str) -> object:
        if key.startswith("step-000000001"):
            for path in (tmp_path / "step-000000001").rglob("*.*"):
                path.unlink()
        return usual(key)

    setattr(storage, method, vanished)
    assert [record.step for record in checked_records(storage) if record.is_good] == [2]


def test_a_root_saved_anew_is_read_anew(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    write_steps(storage, 1, 2)
    records = Records(storage)

    def read() -> list[StepRecord]:
        return records.of(listed_steps(storage))

    assert [record.problem for record in read()] == ["", ""]
    parts = (Part("b/part-00000.safetensors", 1, "b/part-00000.index", 1, 1),)
    root = Root(1, "b", ParallelLayout(), 1, {}, parts, {})
    storage.write("step-000000001/root.json", root.to_bytes())
    assert [record.attempt for record in read()] == ["b", "a1"]
    storage.delete(["step-000000001/root.json"])
    assert [record.step for record in read()] == [2]
