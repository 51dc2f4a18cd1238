"""Steps on a device, out of two buffers by turns; a token that the vocabulary does not hold is named before."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from datakit import BatchOptions, Blend, Cursor, HostBatch, Loader, Recorded, write_store
from tests.trainer.support.training import call, last_step
from trainer.config import Config
from trainer.config.parallel import ParallelConfig
from trainer.data import StepReader, open_loader, to_device, token_fault
from trainer.model.microbatch import Batch

BAD = 70  # of a vocabulary of 61


def spoilt_store(path: Path) -> Path:
    """A store whose manifest promises fewer tokens than it holds."""
    documents = [np.arange(60)] * 120
    documents[110] = np.array([*range(20), BAD, *range(20)])
    manifest = write_store(path, documents, vocab_size=BAD + 1).manifest
    replace(manifest, tokenizer=replace(manifest.tokenizer, vocab_size=61)).write(path)
    return path


@pytest.mark.parametrize("what", ["tokens", "labels"])
@pytest.mark.parametrize("bad", [61, -1])
def test_the_first_bad_token_is_found_wherever_it_is(tmp_path: Path, what: str, bad: int) -> None:
    store = write_store(tmp_path / "store", [np.arange(60)] * 20, vocab_size=61)
    blend, samples = Blend([(store, 1.0)], seq_length=8), np.arange(4, 8).reshape(2, 2)
    host = blend.batch(samples.ravel()).reshaped(2, 2, 8, first_sample=4, epochs=())
    assert token_fault(host, samples, blend, 61) is None
    getattr(host, what)[1, 0, 7] = bad
    fault = token_fault(host, samples, blend, 61)
    assert fault is not None
    start = int(blend.addresses([6])[1][0])
    place = start + 7 + (what == "labels")
    assert f"{store.path} holds token {bad} at address {place:,}, in sample 6 of the stream" in fault.message
    assert fault.hint == f"datakit inspect {store.path} --sample {start // 8} --seq-length 8"


def test_a_run_ends_before_the_step_that_would_read_it(
    job_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = spoilt_store(tmp_path / "store")
    flags = [
        "--data.stores",
        store,
        "--train-steps",
        100,
        "--save",
        tmp_path / "run",
        "--metrics",
        tmp_path / "m.jsonl",
    ]
    assert call("train", job_config, *flags) == 2
    message = capsys.readouterr().err
    assert f"error: {store} holds token {BAD} at address 6,620, in sample " in message
    assert "the vocabulary has 61 tokens\nhint: datakit inspect" in message
    assert last_step(tmp_path / "m.jsonl") < 100
    flags = ["--data.valid.stores", store, "--data.valid.num-samples", 500, "--train.eval-interval", 1]
    assert call("train", job_config, *flags, "--train-steps", 1) == 2
    assert f"error: {store} holds token {BAD} at address 6,620" in capsys.readouterr().err


@pytest.fixture
def stream(tmp_path: Path) -> Blend:
    documents = [np.random.default_rng(number).integers(0, 61, 60) for number in range(40)]
    return Blend([(write_store(tmp_path / "stream", documents, vocab_size=61, eod_id=0), 1.0)], seq_length=8)


def assert_same(batch: Batch, host: HostBatch) -> None:
    for name in ("tokens", "labels", "positions", "loss_mask"):
        found, expected = getattr(batch, name), torch.from_numpy(getattr(host, name).copy())
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.cpu(), expected)
    assert batch.first_sample == host.first_sample


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_on_a_cpu_the_tensors_of_each_step_are_views_of_two_buffers(
    stream: Blend, num_microbatches: int, masks: bool
) -> None:
    shape, options = (2, num_microbatches), BatchOptions(mask_eod_loss=masks)
    with Loader(stream, *shape, options=options) as loader, Loader(stream, *shape, options=options) as plain:
        reader, addresses = StepReader(loader, torch.device("cpu")), []
        for _ in range(100):
            batch, host = reader.to_device(reader.next_step()), plain.next_step()
            assert_same(batch, host)
            assert loader.cursor.num_samples == host.first_sample + loader.global_batch_size
            addresses.append(batch.tokens.data_ptr())
            assert batch.labels.data_ptr() == addresses[-1] + (8 * batch.tokens.numel() if masks else 8)
            if masks:
                assert batch.loss_mask.data_ptr() == addresses[-1] + 24 * batch.tokens.numel()
        assert addresses == 50 * addresses[:2]
        assert addresses[0] != addresses[1]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("orders_copies", [False, True])
def test_an_older_run_reads_copies_of_a_store_as_it_began_and_reports_it(stream: Blend, orders_copies: bool) -> None:
    pair = [(stream.stores[0], 1.0)] * 2
    blend = Blend(pair, seq_length=8, orders_copies=orders_copies)
    cursor, lines = Cursor.start(blend, 8), list[str]()
    layout = ParallelConfig(dp=1)
    config = Config(train=replace(Config().train, gradient_accumulation_steps=2), parallel=layout)
    recorded = Recorded(blend.record, 1, 8)
    with open_loader(Blend(pair, seq_length=8), config, 0, cursor.to_json(), recorded, lines.append) as loader:
        assert loader.blend.digest() == blend.digest()
        assert loader.blend.record.orders_copies == orders_copies
    assert len(lines) == (not orders_copies)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_no_step_is_overwritten_before_it_was_copied(stream: Blend) -> None:
    """The GPU is kept busy, so that copies are enqueued long before they are made."""
    device, batches = torch.device("cuda", 0), []
    with Loader(stream, 64, 8) as loader, Loader(stream, 64, 8) as plain:
        reader = StepReader(loader, device)
        for _ in range(100):
            torch.cuda._sleep(5_000_000)
            host = reader.next_step()
            assert torch.from_numpy(host.buffer).is_pinned()
            batches.append(reader.to_device(host))
        for batch in batches:
            assert_same(batch, plain.next_step())
    host = stream.batch(range(4)).reshaped(2, 2, 8, first_sample=0)  # memory that is not pinned
    assert_same(to_device(host, device), host)


def test_on_a_cpu_a_batch_is_not_copied(stream: Blend) -> None:
    host = stream.batch(range(6)).reshaped(3, 2, 8, first_sample=0)
    batch = to_device(host, torch.device("cpu"))
    assert_same(batch, host)
    assert batch.tokens.data_ptr() == host.buffer.ctypes.data
