"""How a folder of torch.distributed.checkpoint is asked for, which counts behind a network."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit.foreign.dcp.folder import DcpFolder
from threefold.storage.local import LocalStorage


def test_the_heads_of_files_are_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a network a folder of many files is not opened request by request."""
    dcp.save({f"w{number}": torch.ones(2) for number in range(4)}, checkpoint_id=tmp_path / "save", no_dist=True)
    for number in range(1, 4):
        shutil.copy(tmp_path / "save" / "__0_0.distcp", tmp_path / "save" / f"__{number}_0.distcp")
    folder = DcpFolder(f"dcp:{tmp_path / 'save'}")
    for number, tensor in enumerate(folder.contents.tensors.values()):
        tensor.chunks[:] = [replace(each, place=replace(each.place, file=f"__{number}_0.distcp"))
                            for each in tensor.chunks]  # fmt: skip
    together, read = threading.Barrier(4), LocalStorage.read_ranges

    def read_ranges(storage: Any, key: str, ranges: Any) -> Any:
        if ranges == [(0, 9)]:
            together.wait(timeout=20)
        return read(storage, key, ranges)

    monkeypatch.setattr(LocalStorage, "read_ranges", read_ranges)
    with folder.open(0) as reader:
        assert len(reader.root.tensors) == 4
