"""blame, where and blend: what a run reads, out of its configuration and its stores, for people and as JSON."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datakit import BatchSizes, Blend, Cursor, Loader, Recipe, RunStream, TokenStore, blame, preprocess
from tests.datakit.conftest import Cli, write_jsonl

Capture = pytest.CaptureFixture[str]
TRAIN = "[train]\ntrain_steps = 30\nseq_length = 32\nglobal_batch_size = 6\nseed = 5\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, texts: list[str], tokenizer_path: str) -> Path:
    """Two stores, `a` and `b`, and a run on both."""
    place = tmp_path_factory.mktemp("run")
    for name, part in (("a", texts), ("b", texts[:60])):
        write_jsonl(place / f"{name}.jsonl", part)
        preprocess([str(place / f"{name}.jsonl")], place / name, Recipe(tokenizer_path, append_eod=True))
    data = f"[data]\nstores = ['{place / 'a'}', '{place / 'b'}']\nweights = [1, 2]\ntokenizer = '{tokenizer_path}'\n"
    (place / "run.toml").write_text("[model]\nnum_layers = 2\n" + data + TRAIN)
    return place


@pytest.fixture
def blend(folder: Path) -> Blend:
    return Blend([(TokenStore.open(folder / "a"), 1), (TokenStore.open(folder / "b"), 2)], seq_length=32, seed=5)


def asked(cli: Cli, capsys: Capture, *words: object) -> Any:
    assert cli(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_blame_lists_what_a_loader_reads(folder: Path, blend: Blend, cli: Cli, capsys: Capture) -> None:
    with Loader(blend, micro_batch_size=3, num_microbatches=2) as loader:
        steps = [loader.next_step() for _ in range(4)]
    report = asked(cli, capsys, "blame", folder / "run.toml", "--step", 4)
    assert (report["step"], report["seq_length"]) == (4, 32)
    assert [sample["sample"] for sample in report["samples"]] == list(range(18, 24))
    tokens = []
    for sample in report["samples"]:
        store = TokenStore.open(sample["store"])
        first = sample["documents"][0]
        assert sample["row"] * 32 == store.first_token(first["document"]) + first["start"]
        for read in sample["documents"]:
            assert read["path"] == str(folder / f"{store.path.name}.jsonl")
            assert read["line"] == read["document"] + 1
            assert isinstance(read["text"], str)  # by the stores' own copies of the tokenizer
            tokens.append(store.document(read["document"])[read["start"] : read["stop"]])
    rows = np.concatenate(tokens).reshape(6, 33)
    assert (rows[:, :32] == steps[3].tokens.reshape(6, 32)).all()
    [only] = asked(cli, capsys, "blame", folder / "run.toml", "--sample", 20)["samples"]
    assert only == report["samples"][2]


def test_texts_are_shown(folder: Path, texts: list[str], tokenizer_path: str, cli: Cli, capsys: Capture) -> None:
    words = ("blame", folder / "run.toml", "--step", 1, "--tokenizer", tokenizer_path)
    reads = [read for sample in asked(cli, capsys, *words)["samples"] for read in sample["documents"]]
    assert any(read["text"] for read in reads)
    for read in reads:
        whole = texts[read["document"]] + "<|endoftext|>"
        assert whole.startswith(read["text"]) if read["start"] == 0 else len(read["text"]) <= 100
    assert cli(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1: samples 0 to 5"
    assert re.fullmatch(r"sample 0: row \d+ of .*/[ab], epoch 0", lines[1])
    assert re.fullmatch(r"  document \d+, tokens \d+ to \d+: .*/[ab]\.jsonl, line \d+, byte [\d,]+", lines[2])
    assert len(lines) == 1 + 6 + 2 * len(reads)


def test_where_is_the_inverse_of_blame(folder: Path, blend: Blend, cli: Cli, capsys: Capture) -> None:
    store = folder / "b"
    report = asked(cli, capsys, "where", folder / "run.toml", "--document", f"{store}:17")
    assert (report["store"], report["document"], report["line"], report["last_step"]) == (str(store), 17, 18, 30)
    assert len({read["epoch"] for read in report["reads"]}) > 1
    read = []
    for step in range(1, 31):
        for sample in asked(cli, capsys, "blame", folder / "run.toml", "--step", step)["samples"]:
            for each in sample["documents"]:
                if (sample["store"], each["document"]) == (str(store), 17):
                    part = {name: each[name] for name in ("start", "stop")}
                    read.append({"step": step, "sample": sample["sample"], "epoch": sample["epoch"], **part})
    assert report["reads"] == read
    assert cli("where", folder / "run.toml", "--document", f"{store}/../b:17") == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("document 17 of ")
    assert columns.split() == ["step", "sample", "epoch", "tokens"]
    assert len(rows) == len(read)
    assert cli("where", folder / "run.toml", "--document", f"{store}:0") == 0  # an empty text, and its end
    assert cli("where", folder / "run.toml", "--train-steps", 1, "--document", f"{folder / 'a'}:250") == 0
    assert "no step up to 1, the last one, reads it" in capsys.readouterr().out


def test_a_store_named_twice_is_found_twice(folder: Path, cli: Cli, capsys: Capture) -> None:
    flags = ("--data.stores", f"{folder / 'b'},{folder / 'b'}")
    found = asked(cli, capsys, "where", folder / "run.toml", *flags, "--document", f"{folder / 'b'}:17")["reads"]
    store = TokenStore.open(folder / "b")
    passages = blame(Blend([(store, 1), (store, 2)], seq_length=32, seed=5), np.arange(180))
    rows = [row for row in passages.rows() if row[2] == 17]
    assert {source for _, source, *_ in rows} == {0, 1}
    assert [read["sample"] for read in found] == [sample for sample, *_ in rows]


def test_a_store_behind_a_url_is_named_by_it(folder: Path, cli: Cli, capsys: Capture, tmp_path: Path) -> None:
    """In the order of Megatron too, which needs the places of all documents."""
    near = (folder / "run.toml", "--data.stores", folder / "b", "--data.weights", "", "--data.order", "megatron")
    url = f"file://{folder / 'b'}"
    far = (*near, "--data.stores", url, "--data.cache", tmp_path / "cache")
    reads = [
        asked(cli, capsys, "where", *words, "--document", f"{place}:17")
        for words, place in ((near, folder / "b"), (far, url))
    ]
    assert reads[0]["reads"] == reads[1]["reads"] != []
    assert [found["store"] for found in reads] == [str(folder / "b"), url]
    assert cli("blend", *far) == 0
    assert f"the places of all 60 documents of {url}, for the order of Megatron: 720 bytes" in capsys.readouterr().out


def test_flags_win_over_the_file(folder: Path, cli: Cli, capsys: Capture) -> None:
    words = ("blame", folder / "run.toml", "--step", 2, "--seq-length", 16, "--global-batch-size", 4, "--seed", 9)
    found = asked(cli, capsys, *words, "--data.stores", folder / "b", "--data.weights", "")
    assert {sample["store"] for sample in found["samples"]} == {str(folder / "b")}
    assert [sample["sample"] for sample in found["samples"]] == [4, 5, 6, 7]


def test_blend_counts_what_is_read(folder: Path, blend: Blend, cli: Cli, capsys: Capture) -> None:
    report = asked(cli, capsys, "blend", folder / "run.toml")
    sources, _ = blend.locate(np.arange(180))
    assert (report["last_step"], report["num_samples"], report["tokens_read"]) == (30, 180, 180 * 32)
    for source, share in enumerate(report["stores"]):
        count, rows = int((sources == source).sum()), int(blend.rows[source])
        assert share["store"] == str(blend.stores[source].path)
        assert share["weight"] == pytest.approx((source + 1) / 3)
        assert (share["num_samples"], share["num_rows"], share["tokens_read"]) == (count, rows, count * 32)
        assert share["epochs"] == pytest.approx(count / rows)
        assert share["repeated_samples"] == max(0, count - rows)
    assert report["stores"][1]["repeated_samples"] > 0
    assert cli("blend", folder / "run.toml", "--data.max-epochs", 1) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    last = int(head.split()[0])
    assert 1 < last < 30
    assert max(blend.epochs(6 * last)) == 1 > max(blend.epochs(6 * last - 6))
    assert [row.split()[-1] for row in rows] == [str(folder / "a"), str(folder / "b")]


def test_steps_follow_what_a_checkpoint_recorded_of_another_batch_size(
    folder: Path, blend: Blend, cli: Cli, capsys: Capture, tmp_path: Path
) -> None:
    """Six steps of 8 samples, and from there on of 6."""
    stream = {"metadata": {"cursor": {"num_samples": 48}, "stream": blend.record.to_json()}}
    for step in (6, 8):  # with 8 no batch size has changed
        (tmp_path / f"{step}.json").write_text(json.dumps(stream | {"step": step}))
    run, recorded, even = folder / "run.toml", ("--recorded", tmp_path / "6.json"), ("--recorded", tmp_path / "8.json")
    for flags, step, first in ((recorded, 7, 48), (recorded, 30, 186), (even, 7, 36), (even, 30, 174), ((), 7, 36)):
        found = asked(cli, capsys, "blame", run, *flags, "--step", step)["samples"]
        assert [sample["sample"] for sample in found] == list(range(first, first + 6))
    assert cli("blame", run, *recorded, "--step", 6) == 2
    message = capsys.readouterr().err
    assert "steps up to 6 had another batch size: 48 samples were read by then, 8 a step" in message
    assert "hint: --global-batch-size 8 if it was that from the start, or --recorded of a checkpoint from" in message
    words = ("where", run, *recorded, "--document", f"{folder / 'b'}:17")
    reads = asked(cli, capsys, *words)["reads"]
    assert [read["step"] for read in reads] == [
        None if read["sample"] < 48 else 7 + (read["sample"] - 48) // 6 for read in reads
    ]
    assert {read["step"] is None for read in reads} == {True, False}
    assert cli(*words) == 0
    assert "1 to 6" in capsys.readouterr().out
    assert asked(cli, capsys, "blend", run, *recorded)["num_samples"] == 48 + 24 * 6
    assert cli("blend", run, *recorded) == 0
    assert capsys.readouterr().out.startswith("30 steps, from step 7 on of 6 samples of 32 tokens: ")


def test_what_copies_repeat_is_counted_and_an_older_run_keeps_its_order(
    folder: Path, cli: Cli, capsys: Capture, tmp_path: Path
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(f"[data]\nstores = ['{folder / 'a'}', '{folder / 'a'}']\n" + TRAIN)
    store = TokenStore.open(folder / "a")
    records: dict[str, Any] = {}
    for name, orders_copies in (("older", False), ("newer", True)):
        blend = Blend([(store, 1), (store, 1)], seq_length=32, seed=5, orders_copies=orders_copies)
        _, starts = blend.addresses(np.arange(180))
        records[name] = 180 - len(set(starts.tolist()))
        with Loader(blend, 3, 2, cursor=Cursor.start(blend, 30)) as loader:
            (tmp_path / name).write_text(json.dumps(loader.state_dict()))
    assert records["older"] > records["newer"] > 0
    for words, name in (((), "newer"), (("newer",), "newer"), (("older",), "older")):
        recorded = [flag for word in words for flag in ("--recorded", tmp_path / word)]
        assert cli("blend", run, *recorded, "--json") == 0
        out, err = capsys.readouterr()
        assert sum(share["repeated_samples"] for share in json.loads(out)["stores"]) == records[name]
        assert ("the run goes on as it began, copies of a store in one order" in err) == (name == "older")


def test_a_length_of_rows_that_changes_is_announced_and_found(folder: Path, cli: Cli, capsys: Capture) -> None:
    flags = ("--data.mixture", "from_step=16,seq_length=64")
    assert cli("blend", folder / "run.toml", *flags) == 0
    head, announced, _, *rows = capsys.readouterr().out.splitlines()
    assert head == f"30 steps of 6 samples of 32, then 64 tokens: {90 * 96:,} tokens"
    assert announced == "from sample 90, in step 16: rows of 64 tokens, each store from its beginning"
    assert [row.split()[-4:] for row in rows] == [
        [str(folder / name) + ",", "rows", "of", length] for length in ("32", "64") for name in "ab"
    ]
    found = asked(cli, capsys, "blame", folder / "run.toml", *flags, "--step", 16)
    sample = found["samples"][0]
    [read, *_] = sample["documents"]
    assert (found["seq_length"], sample["sample"], sample["epoch"]) == (64, 90, 0)
    store = TokenStore.open(sample["store"])
    assert sample["row"] * 64 == store.first_token(read["document"]) + read["start"]
    document = f"{sample['store']}:{read['document']}"
    reads = asked(cli, capsys, "where", folder / "run.toml", *flags, "--document", document)["reads"]
    assert (16, 90) in [(each["step"], each["sample"]) for each in reads]
    assert cli("blend", folder / "run.toml", "--data.mixture", "from_sample=91,seq_length=64") == 2
    assert "rows have 64 tokens from sample 91 on, in the middle of the step" in capsys.readouterr().err


def test_a_blend_is_drawn(
    folder: Path, tmp_path: Path, cli: Cli, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("blend", folder / "run.toml", "--plot", tmp_path / "b.png") == 0
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    for path, fault in ((tmp_path / "none" / "b.png", "does not exist"), (tmp_path / "b.pdf", "is a .png file")):
        assert cli("blend", folder / "run.toml", "--plot", path) == 2
        assert fault in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("threefold.packages.find_spec", lambda name: None)
    assert cli("blend", folder / "run.toml", "--plot", tmp_path / "c.png") == 2
    assert "matplotlib>=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["blame", "run.toml"], "nothing says which samples"),
        (["blame", "run.toml", "--step", 0], ">= 1"),
        (["blame", "run.toml", "--step", 31], "no step 31: the run of run.toml ends after step 30, 180 samples"),
        (["blame", "run.toml", "--sample", 180], "there is no sample 180"),
        (["blame", "run.toml", "--step", 3, "--sample", 1], "not allowed with"),
        (["blame", "none.toml", "--step", 1], "no configuration file none.toml"),
        (["blame", "empty.toml", "--step", 1], "data.stores names no token store"),
        (["where", "empty.toml", "--document", "a:1"], "data.stores names no token store"),
        (["blend", "empty.toml"], "data.stores names no token store"),
        (["blend", "run.toml", "--data.stores", "nowhere", "--data.weights", ""], "nowhere"),
        (["blend", "run.toml", "--data.weights", "1"], "data.weights has 1 entries for 2 data.stores"),
        (["blend", "run.toml", "--seq-length", "x"], "train.seq_length: must be a whole number"),
        (["where", "run.toml"], "--document"),
        (["where", "run.toml", "--document", "17"], "'17' is not a store and a number"),
        (["where", "run.toml", "--document", "a:x"], "'a:x' is not a store and a number"),
        (["where", "run.toml", "--document", "c:1"], "the run does not read the store c"),
        (["where", "run.toml", "--document", "a:300"], "has 300 documents, counted from 0, and none of number 300"),
    ],
)
def test_bad_input_is_one_error(
    folder: Path, cli: Cli, capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[object], fault: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "empty.toml").write_text(TRAIN)
    assert cli(*words) == 2
    message = capsys.readouterr().err
    assert message.count("error: ") == 1
    assert message.count("hint: ") == 1
    assert fault in message


def test_another_tokenizer_is_refused(folder: Path, rank_path: Path, cli: Cli, capsys: Capture) -> None:
    assert cli("blame", folder / "run.toml", "--step", 1, "--tokenizer", rank_path) == 2
    assert "was made with" in capsys.readouterr().err


def test_verbs_know_the_steps_of_a_batch_that_grows(folder: Path, blend: Blend, cli: Cli, capsys: Capture) -> None:
    """Of 2 samples up to sample 10, 4 up to sample 20, then 6; sample 10 is the first of step 6."""
    ramp = ("--rampup-batch-size", 2, 2, 20)
    report = asked(cli, capsys, "blame", folder / "run.toml", "--step", 6, *ramp)
    assert [sample["sample"] for sample in report["samples"]] == [10, 11, 12, 13]
    place = f"{report['samples'][0]['store']}:{report['samples'][0]['documents'][0]['document']}"
    found = asked(cli, capsys, "where", folder / "run.toml", "--document", place, *ramp)["reads"]
    assert (6, 10) in {(read["step"], read["sample"]) for read in found}
    last = BatchSizes(6, (2, 2, 20)).samples_after(0, 30)
    assert asked(cli, capsys, "blend", folder / "run.toml", *ramp)["num_samples"] == last
    assert cli("blend", folder / "run.toml", *ramp) == 0
    assert "30 steps of 2 to 6 samples" in capsys.readouterr().out
    assert cli("blend", folder / "run.toml", "--rampup-batch-size", 2, 3, 20) == 2
    assert "INCR 3 lead from START 2 past 6: 1, 2, 4 do not" in capsys.readouterr().err
    assert cli("blend", folder / "run.toml", "--rampup-batch-size", 2, 2) == 2
    assert "--rampup-batch-size START INCR SAMPLES: each needs a value" in capsys.readouterr().err


def test_a_mixture_begins_at_the_sample_of_its_step(folder: Path) -> None:
    text = (folder / "run.toml").read_text() + "rampup_batch_size = [2, 2, 20]\n"
    later = f"[[data.mixture]]\nfrom_step = 6\nweights = {{ '{folder / 'a'}' = 0.5 }}\n"
    (folder / "ramp.toml").write_text(text + later)
    assert [segment.from_sample for segment in RunStream.read(str(folder / "ramp.toml")).open().segments] == [0, 10]
