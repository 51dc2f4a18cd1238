"""RunStream: of a run's file the keys of its stream are read, and every fault in them is one clear error."""

from pathlib import Path

import pytest

from datakit import BlendConfig, RunStream, StepConfig, TokenStore, write_store
from threefold.errors import UserError
from threefold.options import FlagText


def read(folder: Path, text: str, **flags: str) -> RunStream:
    (folder / "run.toml").write_text(text)
    given = {name.replace("__", "."): FlagText(value, "--flag") for name, value in flags.items()}
    return RunStream.read(str(folder / "run.toml"), given)


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return write_store(tmp_path / "a", [range(41)], vocab_size=50)


def test_other_tables_and_keys_are_the_trainers(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "[model]\nnonsense = 1\n[data]\nstores = ['a', 'b']\nweights = [1, 2]\ntokenizer = 3\nstroes = 1\n"
        "[data.valid]\nstores = 5\n[train]\nseed = 4\nprecision = 'none'\n",
        train__seq_length="16",
    )
    assert (config.data.stores, config.data.weights) == (("a", "b"), (1.0, 2.0))
    assert config.train == StepConfig(seq_length=16, seed=4)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("[data]\nstores = 'a'", ["data.stores: must be a list of text"]),
        ("data = 1", ["data: must be a table [data]"]),
        (
            "[data]\nweights = [0]\n[train]\nseq_length = 0",
            ["2 faults", "data.weights: must be above 0", "train.seq_length: must be at least 1, got 0"],
        ),
        ("[data]\nstores = ['a']\nweights = [1, 2]", ["data.weights has 2 entries for 1 data.stores"]),
        ("[data", ["cannot read", "as TOML"]),
    ],
)
def test_faulty_keys(tmp_path: Path, text: str, faults: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert all(fault in caught.value.message for fault in [*faults, "run.toml"])
    assert caught.value.hint


def test_stores_that_cannot_be_opened(tmp_path: Path, store: TokenStore) -> None:
    with pytest.raises(UserError, match="stores names no token store"):
        BlendConfig().open(StepConfig(), table="data.valid")
    with pytest.raises(UserError, match="has 2 entries for 1 data"):
        BlendConfig((str(store.path),), (1.0, 2.0)).open(StepConfig(), table="data")
    with pytest.raises(UserError, match="no configuration file"):
        RunStream.read(str(tmp_path / "none.toml"), {})


@pytest.mark.parametrize(("max_epochs", "last"), [(0, 9), (1, 4), (2, 7), (3, 9)])
def test_the_last_step_may_be_that_of_an_epoch(tmp_path: Path, store: TokenStore, max_epochs: int, last: int) -> None:
    text = f"[data]\nstores = ['{store.path}']\nmax_epochs = {max_epochs}\n"
    run = read(tmp_path, text + "[train]\nseq_length = 4\nglobal_batch_size = 3\ntrain_steps = 9\n")
    blend = run.open()
    assert blend.rows.tolist() == [10]
    assert run.num_steps(blend) == last
    assert [run.steps().samples(1), run.steps().samples(last)] == [range(3), range(3 * last - 3, 3 * last)]


def test_the_order_of_megatron_is_opened_by_its_keys(tmp_path: Path, store: TokenStore) -> None:
    text = (
        f"[data]\nstores = ['{store.path}']\norder = 'megatron'\n[train]\n"
        "seq_length = 8\ntrain_steps = 3\nglobal_batch_size = 2\n"
    )
    blend, late = (read(tmp_path, text, data__start_sample=at, data__train_samples="9").open() for at in ("0", "3"))
    assert late.batch(range(6)).tokens.tolist() == blend.batch(range(3, 9)).tokens.tolist()
    with pytest.raises(UserError, match="the run reads 17 samples of the order, and the order has 10") as caught:
        read(tmp_path, text, data__start_sample="3", data__train_samples="9", train__train_steps="7").open()
    assert caught.value.hint == "--data.train-samples 17, or --train-steps 3"


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ("start_sample = 4", 'data.start_sample needs data.order = "megatron"'),
        ("order = 'megatron'\nsplit = [0, 0]", "data.split 0,0 does not sum"),
        (
            "order = 'megatron'\npacking = 'pad'",
            'data.packing needs data.order = "permuted", which is "megatron": --data.order permuted',
        ),
        (
            "order = 'megatron'\n[[data.mixture]]\nfrom_sample = 4\nskip = [[5, 6]]",
            'data.mixture needs data.order = "permuted"',
        ),
    ],
)
def test_keys_that_the_order_of_megatron_refuses(tmp_path: Path, keys: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        read(tmp_path, f"[data]\nstores = ['a']\n{keys}\n")


def test_the_order_of_megatron_is_read_from_a_url(tmp_path: Path, store: TokenStore) -> None:
    rest = "order = 'megatron'\n[train]\nseq_length = 8\ntrain_steps = 3\nglobal_batch_size = 2\n"
    near = read(tmp_path, f"[data]\nstores = ['{store.path}']\n{rest}").open()
    text = f"[data]\nstores = ['file://{store.path}']\ncache = '{tmp_path}/cache'\n{rest}"
    run = read(tmp_path, text)
    far = run.open()
    assert far.batch(range(6)).tokens.tolist() == near.batch(range(6)).tokens.tolist()
    [cache] = far.caches
    assert cache.bytes_added > store.num_tokens * store.itemsize, "tokens, indices and a column came through it"
    column = f"{12 * store.num_documents:,} bytes of the cache {tmp_path}/cache"
    assert far.notes == [
        f"the places of all {store.num_documents} documents of file://{store.path}, for the order of Megatron: {column}"
    ]
    assert near.notes == []
    valid = read(tmp_path, text, data__split="50,50").data.open_valid(run.train, 3)
    [batch] = {tuple(valid.batch(range(3)).tokens.ravel().tolist())}
    assert set(batch) <= set(store.tokens(0, store.num_tokens).tolist())
    with pytest.raises(UserError, match=r"is read through a local folder, and data\.cache names none"):
        read(tmp_path, f"[data]\nstores = ['file://{store.path}']\n{rest}")


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ("stores = ['a']\ncache = 'c'", "data.cache needs a store behind a URL"),
        ("stores = ['a']\ncache_mib = 7", "data.cache_mib needs a store behind a URL"),
        (
            "stores = ['a']\n[[data.mixture]]\nfrom_sample = 4\nadd = {'s3://bucket/b' = 1.0}",
            "s3://bucket/b is read through a local folder, and data.cache names none",
        ),
    ],
)
def test_a_cache_goes_with_urls(tmp_path: Path, keys: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        read(tmp_path, f"[data]\n{keys}\n")
