"""`diff` and `inspect --stats` on the command line: what they print, exit codes, and one clear error for bad input."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from ckptkit.model.layout import ParallelLayout
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.model_tables import gpt_tensors, values
from tests.ckptkit.test_cli import Capture, assert_refused, call
from threefold.storage import open_storage

TENSORS = gpt_tensors(2, tied=True)
NAME, PLACE = "layers.1.mlp.up.weight", (3, 5)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """Two runs of one step each: in the second one, of another layout, one element of a tensor is another."""
    arrays = values(TENSORS)
    metadata = {"config": {"optim": {"lr": 3e-4}}, "url": "s3://key:secret@bucket/x"}
    write_checkpoint(open_storage(tmp_path / "a"), 3, ParallelLayout(tp=2), 2, TENSORS, arrays, metadata=metadata)
    changed = arrays[NAME].copy()
    changed[PLACE] += 0.5
    metadata = {"config": {"optim": {"lr": 1e-3}}, "url": "s3://key:geheim@bucket/y"}
    others = arrays | {NAME: changed}
    write_checkpoint(open_storage(tmp_path / "b"), 4, ParallelLayout(pp=2), 2, TENSORS, others, metadata=metadata)
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_a_difference_is_shown_and_the_exit_code_is_1(capsys: Capture, runs: tuple[str, str]) -> None:
    code, out, err = call(capsys, "diff", *runs)
    assert (code, err) == (1, "")
    assert "config.optim.lr: 0.0003 in A, 0.001 in B" in out
    assert "layout: tp2 in A, pp2 in B" in out
    assert "step: 3 in A, 4 in B" in out
    assert "secret" not in out
    assert "geheim" not in out
    [line] = [line for line in out.splitlines() if line.startswith(NAME)]
    assert line.split()[1:8] == ["F32", "1", "384", "0.5", "[3,", "5]", line.split()[7]]
    assert out.splitlines()[-1].endswith("compared tensors are equal, 1 differ")
    code, out, _ = call(capsys, "diff", *runs, "--json")
    document = json.loads(out)
    assert (code, document["equal"], document["num_differing"]) == (1, False, 1)
    assert document["recorded"]["step"] == [3, 4]
    [tensor] = document["tensors"]
    assert (tensor["name"], tensor["num_differing"], tensor["difference_norm"]) == (NAME, 1, 0.5)
    assert tensor["largest_absolute"] == {"value": 0.5, "index": list(PLACE)}


def test_equal_checkpoints_and_those_within_a_tolerance(capsys: Capture, runs: tuple[str, str], tmp_path: Path) -> None:
    left, right = runs
    assert call(capsys, "reshard", left, str(tmp_path / "c"), "--tp", "4")[0] == 0
    code, out, _ = call(capsys, "diff", left, str(tmp_path / "c"))
    assert code == 0
    assert out.splitlines()[-1].endswith(" compared tensors are equal, 0 differ")
    assert call(capsys, "diff", left, f"{right}/step-000000004", "--atol", "0.5")[0] == 0
    assert call(capsys, "diff", left, right, "--atol", "0.4")[0] == 1
    assert call(capsys, "diff", left, right, "--rtol", "0.01")[0] == 0
    assert call(capsys, "diff", left, right, "--only", "optim.*", "--only", "norm*")[0] == 0
    document = json.loads(call(capsys, "diff", left, right, "--json", "--tensors", "--only", "layers.1.*")[1])
    assert document["tensors"][0]["name"] == NAME
    assert len(document["tensors"]) == document["num_compared"] == 9


def test_a_value_that_json_lacks(capsys: Capture, tmp_path: Path) -> None:
    for name, value in (("a", np.nan), ("b", np.inf)):
        arrays = {key: np.full_like(array, value) for key, array in values(TENSORS).items()}
        write_checkpoint(open_storage(tmp_path / name), 1, ParallelLayout(), 2, TENSORS, arrays)
    code, out, _ = call(capsys, "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json")
    tensor = json.loads(out, parse_constant=pytest.fail)["tensors"][0]
    assert (code, tensor["largest_absolute"]["value"], tensor["right_norm"]) == (1, "nan", "inf")
    out = call(capsys, "inspect", str(tmp_path / "a"), "--stats", "--json")[1]
    assert json.loads(out, parse_constant=pytest.fail)["tensors"][0]["stats"]["mean"] is None


def test_what_cannot_be_compared(capsys: Capture, runs: tuple[str, str], tmp_path: Path) -> None:
    left, _ = runs
    assert_refused(call(capsys, "diff", left, str(tmp_path / "nowhere")), 3, "nowhere does not exist")
    assert_refused(call(capsys, "diff", left, f"{left}/step-000000009"), 2, "no committed step 9")
    assert_refused(call(capsys, "diff", left), 2, "are required")
    assert_refused(call(capsys, "diff", left, left, "--rtol", "-1"), 2, "'-1' is not a number >= 0")
    assert_refused(call(capsys, "diff", left, left, "--only", "nothing"), 2, "no tensor is named nothing", "--only")
    other = gpt_tensors(1, hidden=32)
    write_checkpoint(open_storage(tmp_path / "other"), 1, ParallelLayout(), 1, other, values(other))
    code, out, _ = call(capsys, "diff", left, str(tmp_path / "other"))
    assert code == 1
    assert "only in A:\n  layers.1.attn.k.weight" in out
    assert "  embed.weight: [37, 16] in A, [37, 32] in B" in out
    path = next((tmp_path / "b").rglob("part-00001.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    result = call(capsys, "diff", *runs)
    assert_refused(result, 1, "part-00001.safetensors has", f"hint: ckptkit ls {tmp_path / 'b'}")


def test_statistics(capsys: Capture, runs: tuple[str, str], tmp_path: Path) -> None:
    code, out, _ = call(capsys, "inspect", runs[0], "--stats", "--only", "layers.1.norm1.*")
    assert code == 0
    lines = out.splitlines()
    assert lines[-2].split()[:4] == ["tensor", "dtype", "shape", "elements"]
    first = float(values(TENSORS)["layers.1.norm1.weight"][0])
    row = lines[-1].split()
    assert row[:6] == ["layers.1.norm1.weight", "F32", "[16]", "16", "0", "0"]
    assert [float(each) for each in row[7:10]] == [first, first + 15, first + 7.5]
    document = json.loads(call(capsys, "inspect", runs[0], "--stats", "--json")[1])
    found = {row["name"]: row["stats"] for row in document["tensors"]}
    assert found["head.weight"] is None
    assert sum(found[NAME]["magnitudes"].values()) == found[NAME]["elements"] == 384
    assert "stats" not in json.loads(call(capsys, "inspect", runs[0], "--json")[1])["tensors"][0]


def test_the_page_of_statistics(
    capsys: Capture, runs: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jinja2", reason="needs jinja2: pip install -e '.[plot]'")
    page = tmp_path / "stats.html"
    code, _, err = call(capsys, "inspect", runs[0], "--html", str(page))
    assert (code, err) == (0, f"wrote {page}\n")
    assert page.read_text().count("<svg") == len(TENSORS) - 1
    assert_refused(call(capsys, "inspect", runs[0], "--html", str(tmp_path)), 2, "is a folder")
    assert_refused(call(capsys, "inspect", runs[0], "--html", str(tmp_path / "no" / "p")), 2, "hint: mkdir -p")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = call(capsys, "inspect", runs[0], "--html", str(tmp_path / "other.html"))
    assert_refused(result, 2, "needs the package jinja2", 'hint: pip install "matplotlib>=3.8" "jinja2>=3.1"')
    assert not (tmp_path / "other.html").exists()
