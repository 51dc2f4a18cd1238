"""format="transformers": labels that a model shifts by itself, masked where no loss counts, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datakit import BatchOptions, Blend, PackedStore, pack, write_store
from tests.datakit.support.data_loaders import first_batches
from threefold.errors import UserError

torch = pytest.importorskip("torch", reason='needs torch: pip install -e ".[train]"')
from torch.utils.data import DataLoader  # noqa: E402

from datakit.torch import MapDataset, StreamDataset  # noqa: E402

L, VOCAB = 12, 64
OPTIONS = [BatchOptions(), BatchOptions(mask_eod_loss=True, reset_positions=True)]


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Blend:
    documents = [[*np.random.default_rng(size).integers(1, VOCAB, size), 0] for size in range(3, 40)]
    store = write_store(tmp_path_factory.mktemp("stores") / "a", documents, vocab_size=VOCAB, eod_id=0)
    return Blend([(store, 1.0)], seq_length=L, seed=1)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_labels_are_the_tokens_that_count_under_their_own_place(
    blend: Blend, options: BatchOptions, num_workers: int
) -> None:
    ours = first_batches(StreamDataset(blend, 3, 1, 2, options=options), 4)
    dataset = StreamDataset(blend, 3, 1, 2, options=options, format="transformers")
    found = first_batches(DataLoader(dataset, batch_size=None, num_workers=num_workers), 4)
    by_number = MapDataset(blend, 3, 4, 1, 2, options=options, format="transformers")
    masked = 0
    for batch, numbered, expected in zip(found, by_number, ours, strict=True):
        assert batch.keys() == {"input_ids", "labels", "position_ids"}
        assert all(isinstance(batch[name], torch.Tensor) and batch[name].equal(numbered[name]) for name in batch)
        assert batch["input_ids"].equal(expected["tokens"])
        assert batch["position_ids"].equal(expected["positions"])
        for row, label in enumerate(batch["labels"].tolist()):
            assert label[0] == -100
            for i in range(1, L):
                counts = expected["loss_mask"][row, i - 1] > 0
                assert label[i] == (expected["labels"][row, i - 1] if counts else -100)
                masked += not counts
    assert bool(masked) == options.mask_eod_loss


def test_padding_has_no_loss(tmp_path: Path) -> None:
    write_store(tmp_path / "a", [range(1, n) for n in (5, 9, 7, 3, 8)], vocab_size=VOCAB, eod_id=0)
    pack(tmp_path / "a", seq_length=L, packing="pad")
    store = PackedStore.of(tmp_path / "a", packing="pad", seq_length=L)
    packed = Blend([(store, 1.0)], seq_length=L, seed=1)
    [ours] = first_batches(StreamDataset(packed, 4), 1)
    [batch] = first_batches(StreamDataset(packed, 4, format="transformers"), 1)
    assert (ours["loss_mask"] == 0).any()
    assert (batch["labels"][:, 1:] == -100).equal(ours["loss_mask"][:, :-1] == 0)


@pytest.mark.parametrize("name", ["hf", None, 3])
def test_another_format_is_refused(blend: Blend, name: Any) -> None:
    for kind, arguments in ((StreamDataset, (2,)), (MapDataset, (2, 9))):
        with pytest.raises(UserError, match=r"format is one of datakit, transformers, not .*\nhint: format="):
            kind(blend, *arguments, format=name)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_loss_is_that_of_the_models_own_and_ours(blend: Blend, options: BatchOptions) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval().double()
    [batch] = first_batches(StreamDataset(blend, 4, options=options, format="transformers"), 1)
    [batch_of_ids] = first_batches(StreamDataset(blend, 4, options=options), 1)
    with torch.no_grad():
        output = model(**batch)
        logits = model(input_ids=batch_of_ids["tokens"], position_ids=batch_of_ids["positions"]).logits[:, :-1]
        labels = batch_of_ids["labels"][:, :-1].flatten()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none")
        mask = batch_of_ids["loss_mask"][:, :-1].flatten()
        assert output.loss.item() == pytest.approx(((losses * mask).sum() / mask.sum()).item(), rel=1e-6)
        if options == BatchOptions():
            plain = model(input_ids=batch_of_ids["tokens"], labels=batch_of_ids["tokens"])
            assert output.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
        renamed = model(
            input_ids=batch_of_ids["tokens"], position_ids=batch_of_ids["positions"], labels=batch_of_ids["labels"]
        )
        assert abs(renamed.loss.item() - output.loss.item()) > 1e-3, "it is compared with the token after the next"
