"""The order of megatron-core's datasets: golden vectors of the peer, random access, and what a stream promises."""

import hashlib
import json
import os
import pickle
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datakit import Cursor, Loader, MegatronBlend, MegatronOrder, StreamRecord, TokenStore, blame, where, write_store
from threefold.errors import UserError

GOLDEN = Path(__file__).with_name("megatron_golden.json")
CASES = json.loads(GOLDEN.read_text())
PEER = os.environ.get("THREEFOLD_MEGATRON_PYTHON")
ORDER = MegatronOrder(900)


def make_stores(folder: Path, case: dict[str, Any], **options: Any) -> list[TokenStore]:
    """Write the stores of a case: tokens are 0, 1, 2, ..."""
    stores = []
    for number, (lengths, repeats) in enumerate(case["documents"]):
        ends = np.cumsum(lengths * repeats)
        documents = np.split(np.arange(ends[-1]), ends[:-1])
        stores.append(write_store(folder / str(number), documents, vocab_size=1 << 20, **options))
    return stores


def blend_of(stores: list[TokenStore], case: dict[str, Any], number: int, part: Any) -> MegatronBlend:
    order = MegatronOrder(case["num_samples"][number], tuple(case["split"]), case["surplus"], part=part)
    return MegatronBlend(
        stores, case["weights"] or (), seq_length=case["seq_length"], seed=case["seed"], order=order
    )  # fmt: skip


def assert_equals_peer(folder: Path, case: dict[str, Any], **options: Any) -> None:
    stores = make_stores(folder, case, **options)
    for number, part in enumerate(("train", "valid", "test")):
        if part not in case["parts"]:
            continue
        blend, expected = blend_of(stores, case, number, part), case["parts"][part]
        samples = np.arange(blend.mixture.max_samples)
        batch, (sources, _) = blend.batch(samples), blend.locate(samples)
        table = np.column_stack([sources, batch.tokens, batch.labels[:, -1]])
        assert table[: len(expected["first"]), :2].tolist() == expected["first"], part
        assert len(table) == expected["size"], part
        assert hashlib.md5(table.tobytes()).hexdigest() == expected["md5"], part


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_each_sample_is_that_of_megatron_core(tmp_path: Path, case: dict[str, Any]) -> None:
    assert_equals_peer(tmp_path, case, shard_documents=29)


@pytest.mark.slow
@pytest.mark.skipif(not PEER, reason="THREEFOLD_MEGATRON_PYTHON names no interpreter that has megatron-core 0.19.2")
def test_random_cases_are_those_of_the_real_peer(tmp_path: Path) -> None:
    random.seed(5)
    cases = [random_case(number) for number in range(40)]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(cases))
    command = [str(PEER), "-W", "ignore", "tools/megatron_golden.py", str(path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    for case in json.loads(path.read_text()):
        assert_equals_peer(tmp_path / case["name"], case, shard_documents=random.choice([7, 1000]))


def random_case(number: int) -> dict[str, Any]:
    """Return a case of one to six stores whose parts hold a row each, for up to some epochs."""
    count = random.choice([1, 1, 2, 3, 6])
    documents = [[[random.randrange(1, 90) for _ in range(40)], random.randrange(3, 9)] for _ in range(count)]
    length = random.choice([1, 7, 16, 50])
    most = min(sum(lengths) * times for lengths, times in documents) // length
    weighted = random.random() < 0.7
    size = random.randrange(1, 3 * most) if weighted or count == 1 else most
    return {
        "name": f"case {number}",
        "documents": documents,
        "weights": [random.choice([1.0, 0.1, 30, 7]) for _ in range(count)] if weighted else None,
        "split": random.choice([[1, 0, 0], [0.7, 0.2, 0.1], [80, 20, 0]]),
        "seq_length": length + 1,
        "seed": random.randrange(1 << 32),
        "num_samples": [size, 5, 5],
        "surplus": 0.1 if count > 1 else random.choice([0.0, 0.005]),
    }


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[TokenStore]:
    return make_stores(tmp_path_factory.mktemp("stores"), CASES[6], shard_documents=50)


def make(stores: list[TokenStore], order: MegatronOrder = ORDER, **changed: Any) -> MegatronBlend:
    asked: dict[str, Any] = {"weights": [1, 2], "seq_length": 16, "seed": 1} | changed
    return MegatronBlend(stores, asked.pop("weights"), order=order, **asked)


def test_the_order_is_entered_in_mid_run(stores: list[TokenStore]) -> None:
    whole, late = make(stores), make(stores, replace(ORDER, start_sample=321))
    samples = np.arange(late.mixture.max_samples)
    assert late.mixture.max_samples == whole.mixture.max_samples - 321
    assert np.array_equal(late.batch(samples).tokens, whole.batch(samples + 321).tokens)
    counts = np.bincount(whole.locate(np.arange(321, 521))[0], minlength=2)
    assert late.counts(200).tolist() == counts.tolist()
    assert late.samples_of(1, np.arange(1 << 10), 50).tolist() == [n for n in range(50) if late.locate([n])[0][0] == 1]


def test_a_resume_on_other_ranks_goes_on_with_the_same_samples(stores: list[TokenStore]) -> None:
    blend = make(stores)
    with Loader(blend, 2, 3) as loader:
        expected = [loader.next_step().tokens for _ in range(4)]
        cursor = json.loads(json.dumps(loader.cursor_at(12).to_json()))
    again = pickle.loads(pickle.dumps(blend))
    for rank in range(3):
        with Loader(again, 2, 1, rank, 3, cursor=Cursor.from_json(cursor)) as loader:
            assert np.array_equal(loader.next_step().tokens[0], expected[2][rank])


def test_blame_lists_documents_in_their_order_and_where_inverts_it(stores: list[TokenStore]) -> None:
    blend = make(stores, weights=[1, 5])
    passages = blame(blend, np.arange(60)).rows()
    for sample, batch in enumerate(blend.batch(np.arange(60)).tokens.tolist()):
        read = [
            token
            for number, source, document, start, stop in passages
            if number == sample
            for token in range(*(blend.stores[source].first_token(document) + each for each in (start, stop)))
        ]
        assert read[:-1] == batch
    found = [row for s in (0, 1) for d in range(stores[s].num_documents) for row in where(blend, s, d, 60).rows()]
    assert sorted(found) == sorted(passages)


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        (lambda stores: make(stores, MegatronOrder(901)), "num_samples of the order was 900, is 901"),
        (lambda stores: make(stores, replace(ORDER, start_sample=1)), "start_sample of the order was 0, is 1"),
        (lambda stores: make(stores, weights=[2, 1]), "the share of"),
    ],
)
def test_another_order_is_refused_with_the_difference(stores: list[TokenStore], changed: Any, shown: str) -> None:
    blend = make(stores)
    recorded = StreamRecord.from_json(json.loads(json.dumps(blend.record.to_json())))
    assert recorded == blend.record
    with pytest.raises(UserError, match=shown) as caught:
        changed(stores).check(Cursor.start(blend, 8), recorded)
    assert "one for a whole run" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda stores: MegatronOrder(10, (0, 0, 0)), "split 0,0,0 does not sum to a number above 0"),
        (lambda stores: MegatronOrder(10, (0.9, -0.1)), "split 0.9,-0.1 does not sum"),
        (lambda stores: MegatronOrder(10, (1, 1, 1, 1)), "has 4 shares"),
        (lambda stores: MegatronOrder(10, (1, 1), part="test"), "no share for the documents of test"),
        (lambda stores: MegatronOrder(10, start_sample=10), "an order of 10 samples has no sample 10"),
        (lambda stores: MegatronOrder(10, surplus=-1.0), "a surplus of -1.0"),
        (lambda stores: make(stores, seq_length=100_000), "too few for one row of 100000"),
        (lambda stores: make(stores, weights=[1]), "1 weights for 2 stores"),
        (lambda stores: make(stores, weights=[1, 0]), "each must be above 0"),
        (lambda stores: make(stores, seed=1 << 32), "seed 4294967296"),
        (lambda stores: make(stores, MegatronOrder(9000, surplus=0), weights=()).batch([8999]), "whole numbers from 0"),
        (lambda stores: make(stores).epochs(901 + 5), "the order ends after"),
    ],
)
def test_bad_input_is_one_clear_error(stores: list[TokenStore], call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(stores)


def test_a_store_that_is_asked_for_more_than_it_has_is_named(stores: list[TokenStore]) -> None:
    order = MegatronOrder(2 * stores[0].num_tokens // 16, surplus=0.0)
    rows = [(store.num_tokens - 1) // 16 for store in stores]
    blend = make(stores, replace(order, num_samples=sum(rows)), weights=())
    assert blend.counts(sum(rows)).tolist() == rows
    blend = make(stores, MegatronOrder(9), weights=[1, 1])
    blend.mixture._num_rows = [1, 1]  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="asks store 0 for 5 samples, and its epochs make 1"):
        blend.batch([0])
