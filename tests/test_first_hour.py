"""Wrong inputs of somebody's first hour: each answer names what was wrong and where, and has a hint that leads on."""

import gzip
import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest

from datakit import Recipe, preprocess, train_tokenizer
from tests.ckptkit.support.hf_folders import write_folder
from tests.ckptkit.support.saves import SMALL, save_whole
from tests.datakit.conftest import write_jsonl
from tests.trainer.support.training import call

TEXTS = [f"line {number} of a small text, {number * number} words of it" for number in range(60)]
CONFIG = """
[model]
num_layers = 2
hidden_size = 16
num_heads = 4
[data]
stores = ["store/train"]
[train]
train_steps = 2
seq_length = 8
global_batch_size = 1
device = "cpu"
"""


@pytest.fixture(scope="module")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it is after an hour: a corpus, tokenizers, stores, runs and some other files."""
    folder = tmp_path_factory.mktemp("hour")
    (folder / "corpus").mkdir()
    write_jsonl(folder / "corpus" / "a.jsonl", TEXTS)
    for name, size in (("tok.json", 300), ("other.json", 310)):
        train_tokenizer([str(folder / "corpus")], str(folder / name), vocab_size=size)
    tokenizer = str(folder / "tok.json")
    preprocess([folder / "corpus"], folder / "store", Recipe(tokenizer, split=(0.5, 0.5)), num_workers=1)
    preprocess([folder / "corpus"], folder / "store2", Recipe(str(folder / "other.json")), num_workers=1)
    for step in (100, 200):
        assert save_whole(folder / "run", step, SMALL, scale=step).ok
    (folder / "run.toml").write_text(CONFIG)
    (folder / "conf.yaml").write_text("model:\n  num_layers: 2\n")
    preprocess([folder / "corpus"], folder / "part", Recipe(tokenizer, split=(1 - 1e-9, 1e-9)), num_workers=1)
    (folder / "u16.jsonl").write_text('{"text": "ä"}\n', encoding="utf-16")
    (folder / "latin.txt.gz").write_bytes(gzip.compress("a line\nä\n".encode("latin-1")))
    (folder / "table.csv").write_text("a,b\n1,2\n")
    write_folder(folder / "model", "llama")
    (folder / "model" / "tokenizer.json").unlink()
    return folder


@pytest.fixture
def run_folder(made_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, which is the current one."""
    folder = tmp_path / "here"
    shutil.copytree(made_run, folder)
    monkeypatch.chdir(folder)
    return folder


WRONG = {  # the command, the code it ends with, and what its answer says
    # a tokenizer that is not a file
    "datakit preprocess corpus --output x --tokenizer gpt2": (2, "'gpt2'", "Hub", "hf download gpt2 tokenizer.json"),
    "datakit preprocess corpus --output x --tokenizer meta-llama/Llama-3.2-1B": (2, "--local-dir Llama-3.2-1B"),
    "datakit preprocess corpus --output x --tokenizer hf://gpt2": (2, "'hf://gpt2'", "hf download gpt2"),
    "datakit preprocess corpus --output x --tokenizer s3://bucket/tok.json": (2, "s3://bucket/tok.json", "copy it"),
    "datakit preprocess corpus --output x --tokenizer s3//bucket/tok.json": (2, "hint: s3://bucket/tok.json"),
    "datakit preprocess corpus --output x --tokenizer model": (2, "the folder model holds no tokenizer.json"),
    "datakit preprocess corpus --output x --tokenizer corpus/a.jsonl": (2, "a.jsonl is neither", "train-tokenizer"),
    "datakit preprocess corpus --output x --tokenizer nowhere.json": (2, "no such tokenizer: nowhere.json"),
    "datakit blame run.toml --step 1 --tokenizer gpt2": (2, "'gpt2'", "hf download gpt2"),
    "trainer train run.toml --data.tokenizer gpt2 --dry-run": (2, "'gpt2'", "hf download gpt2"),
    "datakit preprocess corpus --output x --tokenizer tok.json --eod-token '</s>'": (2, "'</s>'", "<|endoftext|>"),
    "datakit inspect store/train --document 0 --tokenizer other.json": (2, "other.json", "store/train was made with"),
    # a URL without its colon
    "datakit train-tokenizer s3//bucket/corpus --vocab-size 300 --output t.json": (2, "hint: s3://bucket/corpus"),
    "datakit preprocess s3//bucket/corpus --output x --tokenizer tok.json": (2, "s3//bucket", "hint: s3://bucket/corpus"),
    "datakit preprocess corpus --output s3//bucket/store --tokenizer tok.json": (2, "hint: s3://bucket/store"),
    "datakit inspect s3//bucket/store": (2, "hint: s3://bucket/store"),
    "ckptkit inspect s3//bucket/run": (2, "'s3//bucket/run'", "hint: s3://bucket/run"),
    "ckptkit copy run s3:/bucket/run": (2, "'s3:/bucket/run'", "hint: s3://bucket/run"),
    "trainer train run.toml --save s3//bucket/run": (2, "hint: s3://bucket/run"),
    "trainer train run.toml --data.stores s3//bucket/store --dry-run": (2, "hint: s3://bucket/store"),
    # another program's name of a choice
    "trainer train run.toml --train.precision bfloat16 --dry-run": (2, "train.precision", "bfloat16", "mean bf16?"),
    "trainer train run.toml --train.precision torch.float32 --dry-run": (2, "train.precision", "mean fp32?"),
    "trainer train run.toml --train.device gpu --dry-run": (2, "train.device", "mean cuda?"),
    "ckptkit export run x --to hf --dtype bfloat16": (2, "--dtype", "bfloat16", "mean bf16?"),
    # a store where a checkpoint is meant, and the other way round
    "ckptkit inspect store/train": (2, "store/train is a token store", "hint: datakit inspect"),
    "ckptkit ls store": (2, "is of token stores", "hint: datakit inspect", "store/train"),
    "ckptkit pin store2": (2, "store2 is a token store", "hint: datakit inspect"),
    "ckptkit prune store2 --keep-last 1": (2, "store2 is a token store", "hint: datakit inspect"),
    "ckptkit copy run store/train": (2, "store/train is a token store", "train-run"),
    "trainer generate store/train --prompt a": (2, "store/train is a token store", "hint: datakit inspect"),
    "trainer train run.toml --load store/train --save y": (2, "store/train holds no", "is a token store"),
    "trainer train run.toml --save store/train": (2, "store/train is a token store"),
    "datakit inspect run": (2, "run is not a token store but a run of checkpoints", "hint: ckptkit inspect run"),
    "datakit verify run/step-000000100": (2, "a step of a run", "hint: ckptkit inspect run/step-000000100"),
    "datakit unarchive run --output x": (2, "not a token store or archive but", "hint: ckptkit inspect"),
    "datakit merge store/train run --output x": (2, "run is not a token store but", "hint: ckptkit inspect run"),
    "datakit preprocess run --output x --tokenizer tok.json": (2, "run is not text but a run", "ckptkit inspect run"),
    "datakit preprocess store/train --output x --tokenizer tok.json": (2, "is not text but a token store"),
    "datakit convert store/train --output x --tokenizer tok.json": (2, "is a token store already", "--to megatron"),
    "trainer train run.toml --data.stores corpus --dry-run": (2, "corpus is not a token store but", "a.jsonl",
                                                              "hint: datakit preprocess corpus"),
    "trainer train run.toml --data.stores store/train/shard-000000-000 --dry-run": (
        2, "is not a token store but a dataset of Megatron-LM", "hint: datakit convert store/train/shard-000000-000"),
    "datakit inspect store/train/shard-000000-000.bin": (2, "hint: datakit convert store/train/shard-000000-000 --out"),
    "datakit stats corpus/a.jsonl": (2, "but text", "hint: datakit preprocess corpus/a.jsonl"),
    "ckptkit inspect model": (2, "of another program, by its config.json", "ckptkit inspect hf:"),
    # a step that is not there, or written otherwise
    "ckptkit inspect run/step-000000150": (2, "holds no committed step 150: there is 100, 200", "hint: ckptkit ls"),
    "ckptkit rollback run/step-000000300": (2, "there is 100, 200", "hint: ckptkit ls"),
    "trainer eval run/step-000000150": (2, "there is 100, 200"),
    "trainer train run.toml --load run/step-000000150 --save y": (2, "run/step-000000150", "there is 100, 200"),
    "ckptkit inspect run/step-100": (3, "the folder of step 100 is step-000000100", "hint: ", "run/step-000000100"),
    "ckptkit hash run/100": (3, "the folder of step 100 is step-000000100", "run/step-000000100"),
    "ckptkit verify run/step-000000100/root.json": (2, "it is below one", "run/step-000000100"),
    "ckptkit inspect hf:gpt2": (1, "gpt2/config.json is missing", "hf download gpt2 --local-dir gpt2"),
    # what is not there, or not readable
    "datakit preprocess nowhere --output x --tokenizer tok.json": (2, "no such input: nowhere"),
    "datakit preprocess table.csv --output x --tokenizer tok.json": (2, "table.csv is not text", "*.jsonl"),
    "datakit preprocess corpus --output x --tokenizer tok.json --text-key body": (2, "line 1: no key 'body'", "text"),
    "datakit train-tokenizer corpus --vocab-size 100 --output t.json": (2, "a vocabulary of 100", "--vocab-size"),
    "datakit merge store/train store2 --output x": (2, "store2: its tokenizer's fingerprint", "hint: "),
    "datakit inspect store": (2, "store is split", "hint: store/train"),
    "ckptkit verify nowhere": (3, "nowhere does not exist"),
    "datakit preprocess u16.jsonl --output x --tokenizer tok.json": (2, "u16.jsonl, line 1", "byte 0",
                                                                    "iconv -f UTF-16 -t UTF-8 > FIXED.jsonl"),
    "datakit preprocess latin.txt.gz --output x --tokenizer tok.json": (2, "line 2", "byte 7",
                                                                      "cat latin.txt.gz | iconv -f LATIN1 "),
    "datakit preprocess corpus --output x --tokenizer tok.json --workers 0": (2, "0 workers: at least 1", "--workers"),
    "trainer train run.toml --data.valid.stores part/valid --train.eval-interval 1 --dry-run": (
        2, "part/valid holds 0 tokens", "--split 0.9,0.1"),
    "trainer train --from-megatron '--num-layers two'": (2, "model.num_layers", "'two'", "trainer train --help says"),
    "datakit preprocess corpus --output corpus --tokenizer tok.json": (2, "corpus is named as input and as output"),
    "trainer train store/train": (2, "store/train is a folder", "--data.stores store/train"),
    "trainer train run": (2, "run is a folder", "--load run"),
    "trainer train conf.yaml": (2, "cannot read conf.yaml as TOML", "hint: "),
    "trainer train nowhere.toml": (2, "no configuration file nowhere.toml", "examples/"),
    "trainer train run.toml --tp 2": (2, "needs 2 processes, started are 1", "trainer launch"),
}  # fmt: skip


def files_of(folder: Path) -> list[Path]:
    """What a folder holds, but for an output that was begun and goes on with other flags."""
    return sorted(path for path in folder.rglob("*") if "x" not in path.relative_to(folder).parts)


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_input_is_named_and_led_on(run_folder: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, *needles = WRONG[command]
    before = files_of(run_folder)
    kit, *words = shlex.split(command)
    try:
        found = importlib.import_module(f"{kit}.cli").main(words)
    except SystemExit as end:
        found = end.code
    printed = capsys.readouterr().err
    assert found == code, printed
    assert len(re.findall("^error: ", printed, re.MULTILINE)) == 1, printed
    assert len(re.findall("^hint: .", printed, re.MULTILINE)) == 1, printed
    assert "Traceback" not in printed
    for needle in needles:
        assert needle in printed
    assert files_of(run_folder) == before


def test_there_are_enough_of_them() -> None:
    assert len(WRONG) >= 42


def test_another_model_is_named_by_its_settings(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("train", "run.toml", "--save", "trained") == 0
    capsys.readouterr()
    assert call("train", "run.toml", "--save", "trained", "--model.hidden-size", 32) == 2
    said = capsys.readouterr().err
    assert "is of another model: model.hidden_size 16 -> 32" in said
    assert re.search(r"^  embed.weight: F32 \[300, 16\], wanted F32 \[300, 32\]$", said, re.MULTILINE)


def test_a_folder_that_exists_may_have_any_name(run_folder: Path) -> None:
    (run_folder / "s3").mkdir()
    shutil.copytree(run_folder / "run", run_folder / "s3" / "run")
    assert importlib.import_module("ckptkit.cli").main(["ls", "s3//run"]) == 0


def test_a_model_folder_stands_for_its_tokenizer(run_folder: Path) -> None:
    shutil.copy(run_folder / "tok.json", run_folder / "model" / "tokenizer.json")
    datakit = importlib.import_module("datakit.cli").main
    assert datakit(["preprocess", "corpus", "--output", "x", "--tokenizer", "model"]) == 0
