"""A run whose mixture changes on the way reads what `blame` lists, on any number of ranks, and refuses another past."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckptkit.cli import main as main_of_ckptkit
from datakit import Recorded, RunStream, blame
from tests.trainer.support.training import CONFIG, Job, call, curve, lines, write_stores
from trainer.engine import Engine
from trainer.model.microbatch import Batch
from trainer.run.generate import Generation
from trainer.verdict import PendingStats

CHANGE = """
[[data.mixture]]
from_sample = 40
add = {{ "{folder}/more/train" = 2.0 }}
skip = [[48, 60]]
[[data.mixture]]
from_step = 5
remove = ["{folder}/train"]
mask_documents = "{folder}/bad.txt"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two stores, and a list of documents of them."""
    (tmp_path / "more").mkdir()
    write_stores(tmp_path)
    write_stores(tmp_path / "more", seed=1)
    (tmp_path / "bad.txt").write_text("".join(f"{tmp_path}/more/train:{number}\n" for number in range(0, 300, 7)))
    return tmp_path


def config(folder: Path, change: str = "") -> Path:
    path = folder / "job.toml"
    path.write_text((CONFIG + change).format(folder=folder))
    return path


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """What the engine is given, step by step."""
    seen: list[Batch] = []
    start_step = Engine.start_step

    def watched(engine: Engine, step: int, batch: Batch, **options: object) -> PendingStats:
        columns = [getattr(batch, name).clone() for name in ("tokens", "labels", "positions", "loss_mask")]
        seen.append(Batch(*columns, batch.first_sample))
        return start_step(engine, step, batch, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "start_step", watched)
    return seen


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_goes_on_with_another_mixture(
    folder: Path, batches: list[Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    run = folder / "run"
    assert call("train", config(folder), "--train-steps", 2, "--save", run) == 0
    edited = ("--data.stores", f"{folder}/train,{folder}/more/train", "--data.weights", "1,2")
    assert call("train", config(folder), "--train-steps", 4, "--save", run, *edited) == 2
    message = capsys.readouterr().err
    assert f"segment 0: the share of {folder}/train was 1, is 0.333333" in message
    assert "hint: keep what was, and append [[data.mixture]] with from_sample = 32 and the change" in message
    assert call("train", config(folder, CHANGE), "--train-steps", 4, "--save", run) == 0
    (folder / "train").rename(folder / "gone")
    assert call("train", config(folder, CHANGE), "--train-steps", 6, "--save", run) == 0
    root = run / "step-000000006" / "root.json"
    segments = json.loads(root.read_text())["metadata"]["stream"]["segments"]
    assert [each["from_sample"] for each in segments] == [0, 40, 64]
    (folder / "gone").rename(folder / "train")
    stream = RunStream.read(str(folder / "job.toml"))
    blend = stream.open(Recorded.read(str(root)))
    assert [batch.first_sample for batch in batches] == [16 * step for step in range(6)]
    masked = 0.0
    for step, batch in enumerate(batches, 1):
        samples = stream.steps().samples(step)
        expected = blend.batch(samples, stream.data.batch_options)
        assert (batch.tokens.numpy().reshape(-1, 32) == expected.tokens).all()
        assert (batch.loss_mask.numpy().reshape(-1, 32) == expected.loss_mask).all()
        masked += float(((expected.loss_mask == 0) & (expected.tokens != 60)).sum())
        passages = blame(blend, samples).rows()
        read = [blend.stores[source].document(document)[start:stop] for _, source, document, start, stop in passages]
        assert (np.concatenate(read).reshape(16, 33)[:, :32] == expected.tokens).all()
    assert masked > 0
    assert {source for _, source, *_ in passages} == {1}


LONGER = """
[[data.mixture]]
from_step = 3
seq_length = 64
add = {{ "{folder}/more/train" = 2.0 }}
[[data.mixture]]
from_step = 6
seq_length = 48
"""


@pytest.mark.ci
@pytest.mark.slow
def test_rows_of_a_run_change_their_length(
    folder: Path, batches: list[Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    """A new length is announced before the first step that has it: on resuming exactly there, and in mid-run."""
    run, metrics = folder / "run", folder / "m.jsonl"
    flags = ("--metrics", metrics, "--data.document-mask", "true", "--model.position", "rope", "--log.interval", 1)
    assert call("train", config(folder), "--train-steps", 2, "--save", run, *flags) == 0
    assert call("train", config(folder, LONGER), "--train-steps", 4, "--save", run, *flags) == 0
    told = [line.strip() for line in capsys.readouterr().err.splitlines()]
    place = told.index("step 3: rows of 64 tokens, was 32; new epochs of all stores")
    assert told[place + 1].startswith("step 3/4 ")
    assert call("train", config(folder, LONGER), "--train-steps", 7, "--save", run, *flags) == 0
    stream = RunStream.read(str(folder / "job.toml"))
    blend = stream.open()
    for step, batch in enumerate(batches, 1):
        wanted = blend.batch(stream.steps().samples(step), stream.data.batch_options)
        assert (batch.tokens.numpy().reshape(wanted.shape) == wanted.tokens).all()
        assert (batch.loss_mask.numpy().reshape(wanted.shape) == wanted.loss_mask).all()
    lengths = [batch.tokens.shape[-1] for batch in batches]
    assert lengths == [32, 32, 64, 64, 64, 48, 48]
    assert list(curve(metrics, "tokens").values()) == [16 * sum(lengths[:step]) for step in range(1, 8)]
    assert [(line["step"], line["seq_length"]) for line in lines(metrics, "seq_length")] == [(3, 64), (6, 48)]
    written = [json.loads(line) for line in metrics.read_text().splitlines()]
    order = [(line["step"], line.get("event")) for line in written if line.get("event") in (None, "seq_length")]
    assert order == [*((step, None) for step in (1, 2)), (3, "seq_length"), *((step, None) for step in (3, 4, 5)),
                     (6, "seq_length"), (6, None), (7, None)]  # fmt: skip
    edited = config(folder, LONGER.replace("seq_length = 64", "seq_length = 96"))
    assert call("train", edited, "--train-steps", 8, "--save", run, *flags) == 2
    assert "segment 1 had a new seq_length of 64, now it has 96" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.ci
def test_what_uses_a_checkpoint_goes_by_the_longest_rows_that_were_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint from before the change it is the first length, though longer rows were planned."""
    run, windows = folder / "run", list[int]()
    flags = ("--model.position", "rope", "--model.dropout", 0, "--checkpoint.save-interval", 2)
    assert call("train", config(folder, LONGER), "--train-steps", 7, "--save", run, *flags) == 0
    words = {f"w{number}": number for number in range(60)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model, "added_tokens": []}
    (folder / "tok.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr(Generation, "_batch", lambda self, *_: windows.append(self.window) or iter(()))
    for step, length in ((2, 32), (4, 64), (7, 64)):
        place = run / f"step-{step:09d}"
        command = ("generate", place, "--prompt", "w1", "--data.tokenizer", folder / "tok.json")
        assert call(*command) == call(*command, "--train.seq-length", 16) == 0
        assert windows[-2:] == [length, 16]
        assert main_of_ckptkit(["export", str(place), str(folder / f"hf{step}"), "--to", "hf"]) == 0
        assert json.loads((folder / f"hf{step}/config.json").read_text())["max_position_embeddings"] == length


def test_learned_positions_are_as_many_as_the_longest_row_has(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model.position", "learned", "--train-steps", 3)
    assert call("train", config(folder, LONGER), *flags) == 2
    message = capsys.readouterr().err
    assert "data.mixture has a seq_length of 64, and there are 32 learned positions" in message
    assert call("train", config(folder, LONGER), *flags, "--model.num-positions", 64) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(4, ("--tp", 2, "--pp", 2)), (4, ("--pp", 2, "--vpp", 1, "--schedule", "zb-h1")), (2, ())],
)
def test_with_other_ranks_rows_of_several_lengths_have_the_loss_of_one_process(
    folder: Path, num_ranks: int, layout: tuple
) -> None:
    flags = (config(folder, LONGER), "--train.precision", "fp64", "--optim.decay-steps", 7, "--train.eval-interval", 3)
    Job(1, *flags, "--train-steps", 7, metrics=folder / "one.jsonl").run()
    words = (*flags, "--save", folder / "run")
    Job(num_ranks, *words, *layout, "--train-steps", 4, metrics=folder / "many.jsonl").run()
    Job(1, *words, "--train-steps", 5, metrics=folder / "many.jsonl").run()
    Job(num_ranks, *words, *layout, "--train-steps", 7, metrics=folder / "many.jsonl").run()
    for key in ("loss", "grad_norm", "tokens"):
        assert curve(folder / "many.jsonl", key) == pytest.approx(curve(folder / "one.jsonl", key), rel=1e-9)


@pytest.mark.slow
def test_a_store_that_is_still_read_may_not_be_gone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "run"
    assert call("train", config(folder), "--train-steps", 2, "--save", run) == 0
    shutil.rmtree(folder / "train")
    later = '[[data.mixture]]\nfrom_step = 4\nadd = {{ "{folder}/more/train" = 1.0 }}\nremove = ["{folder}/train"]\n'
    assert call("train", config(folder, later), "--save", run) == 2
    message = capsys.readouterr().err
    assert f"error: the token store {folder}/train is gone, and read from sample 32 on" in message
    assert "hint: bring it back, or append [[data.mixture]], from_sample = 32" in message


@pytest.mark.slow
def test_with_other_ranks_the_loss_is_that_of_one_process(folder: Path, tmp_path: Path) -> None:
    flags = (config(folder, CHANGE), "--train.precision", "fp64", "--optim.decay-steps", 7)
    Job(1, *flags, "--train-steps", 7, metrics=folder / "one.jsonl").run()
    words = (*flags, "--save", tmp_path / "run")
    Job(2, *words, "--train-steps", 3, metrics=folder / "many.jsonl").run()
    Job(4, *words, "--tp", 2, "--train-steps", 5, metrics=folder / "many.jsonl").run()
    Job(1, *words, "--train-steps", 7, metrics=folder / "many.jsonl").run()
    one, many = curve(folder / "one.jsonl"), curve(folder / "many.jsonl")
    assert list(many) == list(one) == list(range(1, 8))
    assert many == pytest.approx(one, rel=1e-10)


def test_the_order_of_megatron_over_a_url_trains_as_from_a_folder(
    folder: Path, batches: list[Batch], capsys: pytest.CaptureFixture[str]
) -> None:
    """The validation part too, whose documents training never reads."""
    order = (
        "--data.order", "megatron", "--data.split", "80,20", "--data.valid.stores", "", "--data.valid.order",
        "megatron", "--train.eval-interval", 2, "--train-steps", 2, "--train.global-batch-size", 4,
    )  # fmt: skip
    far = ("--data.stores", f"file://{folder}/train", "--data.cache", folder / "cache")
    assert call("train", config(folder), *order, "--metrics", folder / "near.jsonl") == 0
    assert call("train", config(folder), *order, *far, "--metrics", folder / "far.jsonl") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"the places of all 300 documents of file://{folder}/train, for the order of Megatron: 3,600 bytes" in said
    assert [batch.tokens.tolist() for batch in batches[:2]] == [batch.tokens.tolist() for batch in batches[2:]]
    assert len(curve(folder / "far.jsonl")) == 2
    assert curve(folder / "far.jsonl") == curve(folder / "near.jsonl")
