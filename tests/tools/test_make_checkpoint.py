"""The synthetic checkpoint, and the whole life of one: made, resharded to other layouts and back, hashed, damaged."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ckptkit.check.hash import read_slabs
from ckptkit.check.verify import verify_checkpoint
from ckptkit.loading.reader import CheckpointReader
from ckptkit.model.tensor import Box
from ckptkit.runs.run import resolve
from tests.support.measured import ckptkit
from tools.make_checkpoint import chunk_values, element_values, gpt_tensors, hidden_for, main

LAYOUT = "tp8-dp2-pp4"
MAX_RSS_BYTES = 1 << 30
LEGS = (("--tp", "4", "--pp", "8"), (), ("--tp", "8", "--pp", "4", "--dp", "2"))


def test_values_depend_on_name_and_index_alone() -> None:
    info = gpt_tensors(1, 32)[3]
    whole = chunk_values(info, Box((0, 0), info.shape), 0, info.numel).reshape(info.shape)
    assert np.array_equal(whole.reshape(-1), element_values(info.name, np.arange(info.numel, dtype=np.uint64)))
    part = chunk_values(info, Box((3, 5), (7, 11)), 8, 60)
    assert np.array_equal(part, whole[3:10, 5:16].reshape(-1)[8:60])
    assert len(np.unique(whole)) > 0.99 * whole.size
    assert not np.array_equal(whole.reshape(-1), element_values("other", np.arange(info.numel, dtype=np.uint64)))


def test_the_size_asked_for_is_reached_and_tp8_divides() -> None:
    for gib in (1.0, 4.0):
        tensors = gpt_tensors(30, hidden_for(gib, 30))
        assert gib <= sum(info.size_bytes for info in tensors) / 2**30 <= 1.15 * gib
        for info in tensors:
            assert info.placement.round_to or all(info.shape[cut.dim] % 8 == 0 for cut in info.placement.cuts)


@pytest.mark.ci
@pytest.mark.slow
def test_a_checkpoint_lives_through_every_layout_local_and_s3(tmp_path: Path, s3_url: str) -> None:
    assert main([str(tmp_path / "made"), "--gib", "0.001", "--layers", "2", "--layout", "tp2-dp2"]) == 0
    urls = [str(tmp_path / "made"), f"{s3_url}/a", f"{s3_url}/b", str(tmp_path / "back")]
    layouts = (("--tp", "4", "--pp", "2"), (), ("--tp", "2", "--dp", "2"))
    for (source, target), axes in zip(pairwise(urls), layouts, strict=True):
        report, _ = ckptkit("reshard", source, target, *axes)
        assert report["bytes_read"] <= 1.05 * report["bytes_needed"]
    hashes = [ckptkit("hash", url)[0] for url in urls]
    assert all(found["tensors"] == hashes[0]["tensors"] for found in hashes)
    assert all(found["all"] == hashes[0]["all"] for found in hashes)
    with CheckpointReader(*resolve(urls[-1])) as reader:
        assert verify_checkpoint(reader).ok
        for slab, data in read_slabs(reader):
            positions = np.arange(slab.start, slab.stop, dtype=np.uint64)
            assert np.frombuffer(data, np.float32).tobytes() == element_values(slab.info.name, positions).tobytes()
    made, back = (data_files(Path(url)) for url in (urls[0], urls[-1]))
    assert made == back


def data_files(run: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(run.rglob("*.safetensors"))]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("gib", "place"), [pytest.param(1.0, "local", marks=pytest.mark.ci), (4.0, "local"), (1.0, "s3"), (4.0, "s3")]
)
def test_reshard_at_size_has_flat_memory(
    gib: float, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    made = str(tmp_path / "made")
    assert main([made, "--gib", str(gib)]) == 0
    base = str(tmp_path) if place == "local" else request.getfixturevalue("s3_url")
    expected = ckptkit("hash", made)[0]["all"]
    source = made
    for number, axes in enumerate(LEGS):
        target = f"{base}/{number}"
        report, rss_bytes = ckptkit("reshard", source, target, *axes)
        print(f"{gib:g} GiB {place} {report['source_layout']} -> {report['target_layout']}: "
              f"{report['seconds']:.1f} s, {rss_bytes >> 20} MiB")  # fmt: skip
        assert rss_bytes < MAX_RSS_BYTES
        assert report["bytes_read"] <= 1.05 * report["bytes_needed"]
        found, rss_bytes = ckptkit("hash", target)
        assert found["all"] == expected
        assert rss_bytes < MAX_RSS_BYTES
        source = target
    assert report["target_layout"] == LAYOUT
    result, rss_bytes = ckptkit("verify", source)
    assert result["ok"]
    assert rss_bytes < MAX_RSS_BYTES
