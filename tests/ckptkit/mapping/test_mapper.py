"""Mapping files: names, rows and layers of a step changed by rules, or refused in one error."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.check.slabs import fill
from ckptkit.check.verify import verify_checkpoint
from ckptkit.cli import main
from ckptkit.foreign.hf.folder import HfFolder
from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.loading.reader import CheckpointReader
from ckptkit.loading.roots import read_root
from ckptkit.mapping.mapper import Mapper
from ckptkit.mapping.rules import NamePattern
from ckptkit.mapping.source import MappedSource
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Placement, TensorInfo
from ckptkit.rewrite.reshard import ReshardReport, reshard
from ckptkit.rewrite.shard import Shard
from tests.ckptkit.support.checkpoints import write_checkpoint
from tests.ckptkit.support.hf_folders import write_folder
from tests.ckptkit.support.model_tables import NUMPY, gpt_tensors, values
from threefold.errors import UserError
from threefold.storage import Storage, open_storage

LAYERS, STEP = 4, 7
METADATA = {"tokens": 5, "config": {"model": {"num_layers": LAYERS, "vocab_size": 37}}}
LAYOUTS = st.sampled_from([ParallelLayout(), ParallelLayout(tp=2, dp=2), ParallelLayout(tp=4, pp=2)])
NO_CHANGE = [
    "",
    "[[rename]]\ntensors = '{all*}'\nto = '{all*}'\n",
    "[[rename]]\ntensors = '{kind*}layers.{n}.{rest*}'\nto = '{kind*}layers.{n}.{rest*}'\n",
    f"[layers]\norder = {list(range(LAYERS))}\n",
    "[[grow]]\ntensors = '{kind*}embed.weight'\nrows = 37\nfill = 'mean'\n",
]


def make_source(folder: Path, layout: ParallelLayout | None = None, *, tied: bool = False) -> Storage:
    storage, tensors = open_storage(folder), gpt_tensors(LAYERS, tied=tied)
    write_checkpoint(
        storage, STEP, layout or ParallelLayout(tp=2, pp=2), LAYERS, tensors, values(tensors), metadata=METADATA
    )
    return storage


def mapped(
    source: Storage, target: Storage, rules: str, folder: Path, layout: ParallelLayout | None = None,
    shard: Shard | None = None,
) -> ReshardReport:  # fmt: skip
    path = folder / "map.toml"
    path.write_text(rules)
    with CheckpointReader(source, STEP) as inner, MappedSource(inner, Mapper(str(path), inner)) as read:
        return reshard(read, target, layout or ParallelLayout(tp=2, dp=2), shard=shard or Shard())


def arrays(storage: Storage) -> dict[str, np.ndarray]:
    """What a step holds, by name."""
    with CheckpointReader(storage, STEP) as reader:
        assert verify_checkpoint(reader).ok
        found = {}
        for name, info in reader.root.tensors.items():
            if info.placement.tied_to is None:
                [data] = fill(reader, [(info, 0, info.numel)], np.empty(info.size_bytes, np.uint8))
                found[name] = data.view(NUMPY[info.dtype]).reshape(info.shape)
        return found


def data_files(storage: Storage) -> list[bytes]:
    return [storage.read(f"{step_folder(STEP)}/{part.data}") for part in read_root(storage, STEP).parts]


@pytest.fixture(scope="module")
def tied_source(tmp_path_factory: pytest.TempPathFactory) -> Storage:
    return make_source(tmp_path_factory.mktemp("tied"), tied=True)


def test_each_rule_that_changes_nothing_makes_the_same_bytes(tied_source: Storage, tmp_path: Path) -> None:
    plain = open_storage(tmp_path / "plain")
    with CheckpointReader(tied_source, STEP) as reader:
        reshard(reader, plain, ParallelLayout(tp=2, dp=2))
    for number, rules in enumerate(NO_CHANGE):
        mapped(tied_source, target := open_storage(tmp_path / str(number)), rules, tmp_path)
        assert data_files(target) == data_files(plain)


@given(rules=st.sampled_from(NO_CHANGE), first=LAYOUTS, second=LAYOUTS, tied=st.booleans())
@pytest.mark.ci
@pytest.mark.slow
def test_a_mapping_that_changes_nothing_makes_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, rules: str, first: ParallelLayout, second: ParallelLayout, tied: bool
) -> None:
    base = tmp_path_factory.mktemp("map")
    source = make_source(base / "source", first, tied=tied)
    signed = replace(read_root(source, STEP), certificate={"by": "somebody"})
    source.write(f"{step_folder(STEP)}/{ROOT_KEY}", signed.to_bytes())
    plain, target = open_storage(base / "plain"), open_storage(base / "target")
    mapped(source, target, rules, base, second)
    with CheckpointReader(source, STEP) as reader:
        reshard(reader, plain, second)
    assert data_files(target) == data_files(plain)
    one, other = read_root(target, STEP), read_root(plain, STEP)
    assert replace(one, attempt="", parts=()) == replace(other, attempt="", parts=())
    assert one.attempt != other.attempt


def test_all_rules_at_once(tied_source: Storage, tmp_path: Path) -> None:
    source, target = tied_source, open_storage(tmp_path / "target")
    rules = """
        [[drop]]
        tensors = "optim.exp_avg_sq/{rest*}"
        [layers]
        order = [0, 3, 3]
        [[rename]]
        tensors = "{kind*}layers.{n}.mlp.{name}.weight"
        to = "{kind*}layers.{n}.ffn.{name}_proj.weight"
        [[grow]]
        tensors = "embed.weight"
        rows = 40
        fill = "mean"
        [[grow]]
        tensors = "optim.exp_avg/embed.weight"
        rows = 40
        fill = "zeros"
        [metadata.config.model]
        num_layers = 3
    """
    for number in range(2):
        mapped(source, target, rules, tmp_path, ParallelLayout(tp=2, pp=2), Shard(number, 2))
    root, before, after = read_root(target, STEP), arrays(source), arrays(target)
    assert root.num_layers == 3
    assert root.certificate is not None  # its own
    assert set(root.certificate["tensors"]) == {n for n, info in root.tensors.items() if not info.placement.tied_to}
    assert root.metadata["config"]["model"] == {"num_layers": 3, "vocab_size": 37}
    assert root.tensors["head.weight"].shape == (40, 16)
    assert root.tensors["head.weight"].placement.tied_to == "embed.weight"
    assert not [name for name in after if "exp_avg_sq" in name or "layers.3." in name]
    for layer, old in enumerate((0, 3, 3)):
        for kind in ("", "optim.exp_avg/"):
            up, norm = f"{kind}layers.{layer}.ffn.up_proj.weight", f"{kind}layers.{layer}.norm1.weight"
            assert (after[up] == before[f"{kind}layers.{old}.mlp.up.weight"]).all()
            assert (after[norm] == before[f"{kind}layers.{old}.norm1.weight"]).all()
            assert root.tensors[up].placement.stage == layer
    embed, grown = before["embed.weight"], after["embed.weight"]
    assert (grown[:37] == embed).all()
    assert (grown[37:] == embed.astype(np.float64).mean(axis=0).astype(np.float32)).all()
    assert (after["optim.exp_avg/embed.weight"][37:] == 0).all()
    assert (after["optim.exp_avg/embed.weight"][:37] == before["optim.exp_avg/embed.weight"]).all()


QKV = [f"{{kind*}}layers.{{n}}.attn.{part}.weight" for part in "qkv"]
WHOLE = "{kind*}layers.{n}.attn.qkv.weight"


@pytest.mark.parametrize("groups", [1, 4])
def test_parts_become_a_whole_and_parts_again(tied_source: Storage, tmp_path: Path, groups: int) -> None:
    whole, parts, plain = (open_storage(tmp_path / name) for name in ("whole", "parts", "plain"))
    fuse = f"[[fuse]]\ntensors = {QKV}\nto = '{WHOLE}'\ngroups = {groups}\n"
    split = f"[[split]]\ntensors = '{WHOLE}'\nto = {QKV}\nrows = [16, 8, 8]\ngroups = {groups}\n"
    for number in range(2):
        mapped(tied_source, whole, fuse, tmp_path, ParallelLayout(tp=4, pp=2), Shard(number, 2))
    before, after = arrays(tied_source), arrays(whole)
    for kind in ("", "optim.exp_avg/"):
        q, k, v = (before[f"{kind}layers.3.attn.{part}.weight"].reshape(groups, -1, 16) for part in "qkv")
        assert (after[f"{kind}layers.3.attn.qkv.weight"] == np.concatenate([q, k, v], 1).reshape(-1, 16)).all()
    assert len(after) == len(before) - 2 * LAYERS * 3
    mapped(whole, parts, split, tmp_path)
    with CheckpointReader(tied_source, STEP) as reader:
        reshard(reader, plain, ParallelLayout(tp=2, dp=2))
    assert data_files(parts) == data_files(plain)
    with pytest.raises(UserError, match=r"split '.*' matches no tensor"):  # that comes before the fuse
        mapped(tied_source, open_storage(tmp_path / "none"), f"{fuse}\n{split}", tmp_path)


@pytest.mark.ci
@pytest.mark.slow
@given(
    first=LAYOUTS, second=LAYOUTS, sizes=st.lists(st.integers(1, 36), min_size=1, max_size=4, unique=True).map(sorted),
    order=st.randoms(),
)  # fmt: skip
def test_rows_go_where_a_mapping_says(
    tmp_path_factory: pytest.TempPathFactory, first: ParallelLayout, second: ParallelLayout, sizes: list[int],
    order: random.Random,
) -> None:  # fmt: skip
    base = tmp_path_factory.mktemp("rows")
    source, ends = make_source(base / "source", first), [0, *sizes, 37]
    names = [f"part.{number}" for number in range(len(ends) - 1)]
    rows = [stop - start for start, stop in pairwise(ends)]
    shuffled = order.sample(names, len(names))
    rules = f"[[split]]\ntensors = 'embed.weight'\nto = {names}\nrows = {rows}\n"
    rules += f"[[fuse]]\ntensors = {shuffled}\nto = 'embed.weight'\n"
    rules += "[[grow]]\ntensors = 'embed.weight'\nrows = 39\nfill = 'mean'\n"
    mapped(source, target := open_storage(base / "target"), rules, base, second)
    old, new = arrays(source)["embed.weight"], arrays(target)["embed.weight"]
    parts = [old[ends[names.index(name)] : ends[names.index(name) + 1]] for name in shuffled]
    mean = old.astype(np.float64).mean(axis=0).astype(np.float32)
    assert (new == np.concatenate([*parts, mean[None], mean[None]])).all()


def test_the_fill_and_what_goes_where_are_part_of_the_attempt(tmp_path: Path) -> None:
    """Two mappings whose tables are equal are two checkpoints."""
    source, attempts = make_source(tmp_path / "source"), []
    swap = "[[rename]]\ntensors = 'layers.0.norm{a}.weight'\nto = 'layers.0.norm{a}.weight'\n"
    exchanged = "\n".join(
        f"[[rename]]\ntensors = 'layers.0.norm{a}.weight'\nto = 'layers.0.norm{b}.weight'" for a, b in ("12", "21")
    )
    grow = "[[grow]]\ntensors = 'embed.weight'\nrows = 38\nfill = '{}'\n"
    for number, rules in enumerate((swap, exchanged, grow.format("zeros"), grow.format("mean"))):
        target = open_storage(tmp_path / str(number))
        mapped(source, target, rules, tmp_path)
        assert mapped(source, target, rules, tmp_path).was_there
        attempts.append(read_root(target, STEP).attempt)
    assert len(set(attempts)) == 4
    before, after = arrays(source), arrays(open_storage(tmp_path / "1"))
    assert (after["layers.0.norm1.weight"] == before["layers.0.norm2.weight"]).all()
    with pytest.raises(UserError, match="already holds step 7"):
        mapped(source, open_storage(tmp_path / "2"), grow.format("mean"), tmp_path)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("[[drop]]\ntensors = 'layers.9.{rest*}'", "drop 'layers.9.{rest*}' matches no tensor"),
        ("[layers]\norder = [0, 9]", "layers.order has 9, a layer without tensors"),
        ("[layers]\norder = [0]\ntensors = 'layers.{layer}.attn.{rest*}'", "is of layer 0, its name does not say so"),
        ("[layers]\norder = [0]\ntensors = 'layers.{n}.{rest*}'", "layers.tensors: must have {layer}"),
        ("[[rename]]\ntensors = '{a}.weight'\nto = 'x'", "x would be made of embed.weight and of norm.weight"),
        ("[[rename]]\ntensors = 'norm.weight'\nto = 'head.weight'", "head.weight would be made of norm.weight and of"),
        ("[[rename]]\ntensors = 'norm.weight'\nto = '{n}'", "rename.to: '{n}' has {n}, which 'norm.weight' has not"),
        ("[[drop]]\ntensors = 'embed.weight'", "head.weight has no source: it is tied to embed.weight"),
        (
            "[[grow]]\ntensors = 'embed.weight'\nrows = 8\nfill = 'zeros'",
            "embed.weight F32 [37, 16] cannot have 8 rows",
        ),
        ("[[grow]]\ntensors = 'embed.weight'\nrows = 8\nfill = 'ones'", "grow[0].fill: must be one of zeros, mean"),
        ("[[grow]]\ntensors = 'embed.weight'\nrows = 99", "grow[0].fill: must be given"),
        ("[[drop]]\ntensors = 'a{B}'", "drop[0].tensors: must be a name, with words like {n} or {rest*} in it"),
        ("[[remove]]\ntensors = 'x'", "remove: unknown key"),
        ("[[drop]]\ntensors = 3", "drop[0].tensors: must be text, got 3"),
        (
            "[[split]]\ntensors = 'embed.weight'\nto = ['a', 'b']\nrows = [30, 8]",
            "has not the rows [30, 8] for 2 parts",
        ),
        ("[[split]]\ntensors = 'embed.weight'\nto = ['a', 'b']", "cannot be cut into 2 parts of 1 equal groups"),
        ("[[split]]\ntensors = 'norm.weight'\nto = ['a', 'b']\ngroups = 3", "into 2 parts of 3 equal groups"),
        ("[[split]]\ntensors = 'head.weight'\nto = ['a']", "head.weight F32 [37, 16] is tied to embed.weight"),
        ("[[split]]\ntensors = 'embed.weight'\nto = ['a', 'b']\nrows = [30, 7]", "tied to embed.weight, which is gone"),
        ("[[split]]\ntensors = 'embed.weight'\nto = ['{n}']", "split.to: '{n}' has {n}, which 'embed.weight' has not"),
        ("[[fuse]]\ntensors = ['embed.weight', 'no']\nto = 'x'", "fuse 'no' matches no tensor"),
        ("[[fuse]]\ntensors = ['norm.weight', 'layers.{n}.norm1.weight']\nto = 'x'", "each part is wanted once"),
        (
            "[[fuse]]\ntensors = ['layers.1.norm{n}.weight', 'layers.{n}.norm2.weight']\nto = 'x.{n}'",
            "a part of it is one of another",
        ),
        ("[[fuse]]\ntensors = ['norm.weight', 'embed.weight']\nto = 'x'", "dtypes, columns or stages differ"),
        ("[[fuse]]\ntensors = ['norm.weight', 'head.weight']\nto = 'x'", "one is tied or has no rows"),
        ("[[fuse]]\ntensors = ['norm.weight']\nto = 'x'\ngroups = 3", "the rows of one are not 3 equal groups"),
        ("[[fuse]]\ntensors = ['norm.weight']\nto = 'x.{n}'", "fuse.to: 'x.{n}' has {n}, which 'norm.weight' has not"),
        ("[metadata.config.model]\nnum_layer = 3", "metadata.config.model.num_layer is not in the metadata"),
        ("metadata = 3", "metadata: must be a table [metadata]"),
    ],
)
def test_what_does_not_fit_is_one_error_and_nothing_is_written(
    tied_source: Storage, tmp_path: Path, rules: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        mapped(tied_source, open_storage(tmp_path / "target"), rules, tmp_path)
    assert message in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "target").exists()


def test_two_rules_for_one_name_and_all_faults_at_once(tied_source: Storage, tmp_path: Path) -> None:
    rules = "\n".join(
        f"[[rename]]\ntensors = '{text}'\nto = 'x.{{n}}'" for text in ("{n}.weight", "norm.{n}", "no.{n}")
    )
    with pytest.raises(UserError) as caught:
        mapped(tied_source, open_storage(tmp_path / "target"), rules, tmp_path)
    for said in ("2 faults", "norm.weight is matched by rename '{n}.weight' and by rename 'norm.{n}'", "no tensor"):
        assert said in caught.value.message


def test_the_command_reports_what_a_mapping_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_source(tmp_path / "source")
    path = tmp_path / "map.toml"
    path.write_text("[[rename]]\ntensors = 'norm.weight'\nto = 'last.weight'\n[[drop]]\ntensors = 'optim.{rest*}'\n")
    words = ["reshard", str(tmp_path / "source"), str(tmp_path / "target"), "--map", str(path)]
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "new last.weight, made of norm.weight\n" in shown
    assert "dropped optim.exp_avg/embed.weight\n" in shown
    assert "drop 'optim.{rest*}': 78 tensors\n" in shown
    assert "tensors: 1 new, 0 changed, 78 dropped, 38 as they were\n" in shown
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["map"]["new"] == {"last.weight": "norm.weight"}
    assert "last.weight" in read_root(open_storage(tmp_path / "target"), STEP).tensors


def test_a_hugging_face_folder_is_mapped_as_a_run_is(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", "gpt2")
    path = tmp_path / "map.toml"
    path.write_text("[layers]\norder = [1, 0]\n[[grow]]\ntensors = 'embed.weight'\nrows = 999\nfill = 'mean'\n")
    with HfFolder(f"hf:{tmp_path}/model").open(STEP) as inner:
        target, infos = open_storage(tmp_path / "target"), inner.root.tensors
        with MappedSource(inner, Mapper(str(path), inner)) as read:
            reshard(read, target, ParallelLayout())
        name = "layers.{}.attn.q.weight"
        [data] = fill(inner, [(infos[name.format(1)], 0, infos[name.format(1)].numel)], np.empty(1 << 20, np.uint8))
        assert arrays(target)[name.format(0)].tobytes() == data.tobytes()
        assert len(arrays(target)["embed.weight"]) == 999


def test_patterns() -> None:
    pattern = NamePattern.parse("{kind*}layers.{n}.{n}.w+")
    assert pattern.words_of("optim/layers.3.3.w+") == {"kind": "optim/", "n": "3"}
    assert pattern.words_of("layers.3.4.w+") is None
    assert pattern.words_of("layers.3.3.ww") is None
    assert pattern.filled({"kind": "", "n": "5"}) == "layers.5.5.w+"


def test_layers_of_tensors_whose_stage_is_not_a_layer(tmp_path: Path) -> None:
    """As of programs whose state has no stages."""
    infos = [TensorInfo(f"model.layers.{n}.w", "F32", (3, 2), Placement("first")) for n in range(3)]
    source, target = open_storage(tmp_path / "source"), open_storage(tmp_path / "target")
    write_checkpoint(source, STEP, ParallelLayout(), 0, infos, values(infos))
    mapped(source, target, "[layers]\norder = [2, 2]", tmp_path)
    before, after = arrays(source), arrays(target)
    assert list(after) == ["model.layers.0.w", "model.layers.1.w"]
    assert all((each == before["model.layers.2.w"]).all() for each in after.values())
