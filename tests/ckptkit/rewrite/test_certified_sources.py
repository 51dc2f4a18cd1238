"""What is read to be written with other values, names or rows is compared with the certificate of the save first."""

from pathlib import Path

import pytest

from ckptkit.foreign.hf.export import ROUNDED_AT_ONCE
from ckptkit.format.keys import step_folder
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import read_root
from ckptkit.model.layout import ParallelLayout
from ckptkit.rewrite.reshard import reshard
from ckptkit.rewrite.shard import Shard
from tests.ckptkit.foreign.hf.test_round_trip import call, files_of
from tests.ckptkit.mapping.test_mapper import STEP, make_source, mapped
from tests.ckptkit.support.forged import forge
from tests.ckptkit.support.hf_folders import write_folder
from threefold.errors import CheckFailed
from threefold.storage import Storage, open_storage

RULES = """
[[rename]]
tensors = "{kind*}embed.weight"
to = "{kind*}words.weight"
[[split]]
tensors = "{kind*}attn.q.weight"
to = ["{kind*}attn.one", "{kind*}attn.other"]
groups = 2
[layers]
order = [0, 0, 2, 3]
"""


@pytest.mark.parametrize("dtype", [(), ("--dtype", "bf16")])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_an_export_compares_all_that_it_reads(
    tmp_path: Path, model_type: str, dtype: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = write_folder(tmp_path / "source", model_type, vocab_size=40_000)  # rounded in several turns
    assert max(tensor.numel() for tensor in expected.values()) > ROUNDED_AT_ONCE
    assert call("import", tmp_path / "source", tmp_path / "run") == 0
    assert call("export", tmp_path / "run", tmp_path / "out", *dtype) == 0
    run = open_storage(tmp_path / "run")
    stored = [info for info in read_root(run, 0).tensors.values() if info.placement.tied_to is None]
    num_parameters = sum(not info.name.startswith("files/") for info in stored)
    assert f", {num_parameters} tensors equal to what was saved\n" in capsys.readouterr().out
    forge(run, 0, with_sums=False, tensor=next(i.name for i in stored if not i.name.startswith("files/")))
    assert call("export", tmp_path / "run", tmp_path / "forged", *dtype) == 1
    assert "is not equal to what was saved, by the certificate of the save" in capsys.readouterr().err
    assert not files_of(tmp_path / "forged")


def saved(folder: Path) -> Storage:
    """A step with a certificate."""
    storage = open_storage(folder / "saved")
    with CheckpointReader(make_source(folder / "made"), STEP) as reader:
        reshard(reader, storage, ParallelLayout(tp=2, dp=2))
    return storage


def test_a_mapping_compares_the_tensors_that_it_reads_whole(tmp_path: Path) -> None:
    source, target = saved(tmp_path), open_storage(tmp_path / "target")
    report = mapped(source, target, RULES, tmp_path, ParallelLayout(tp=4, pp=2))
    stored = [info for info in read_root(source, STEP).tensors.values() if info.placement.tied_to is None]
    kept = [info for info in stored if "layers.1." not in info.name]
    assert report.num_certified == len(kept) < len(stored)
    forge(source, STEP, with_sums=False, tensor="layers.0.attn.q.weight")
    for shard in (Shard(), Shard(1, 2)):  # which has the only file
        other = open_storage(tmp_path / f"forged-{shard.count}")
        with pytest.raises(CheckFailed, match=r"what was read of .* by the certificate:\s+layers\.0\.attn\.q\.weight"):
            mapped(source, other, RULES, tmp_path, ParallelLayout(), shard)
        assert not list(other.list_keys(f"{step_folder(STEP)}/"))
