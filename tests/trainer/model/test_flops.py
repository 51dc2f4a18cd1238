"""Operations a token behind MFU."""

from dataclasses import replace

import numpy as np
import pytest

from datakit import HostBatch
from trainer.config import Config
from trainer.config.walk import config_from
from trainer.model.flops import (
    BatchFlops,
    count_parameters,
    layers_and_head_flops,
    token_flops,
)
from trainer.model.table import parameter_table


def resolved(seq_length: int, **model: object) -> Config:
    tables = {"model": model, "train": {"seq_length": seq_length}}
    return config_from(tables, source="")


def test_a_known_model() -> None:
    # 2048 wide, 16 layers, 8 of 16 heads are kv, vocabulary 32768: 1141 M parameters, 67 M of them looked up
    config = resolved(
        4096, num_layers=16, hidden_size=2048, num_heads=16, num_kv_heads=8, ffn_hidden_size=8192, vocab_size=32768
    )
    count = count_parameters(config, parameter_table(config))
    assert count.total == 1_140_918_272
    assert count.looked_up == 32768 * 2048
    flops = token_flops(config, parameter_table(config), config.train.seq_length)
    assert flops.standard == 6 * (count.total - count.looked_up) + 12 * 16 * 2048 * 4096
    assert flops.with_embeddings - flops.standard == 6 * count.looked_up
    assert flops.standard - flops.causal == 6 * 16 * 2048 * 4096


def test_gpt2_small() -> None:
    config = resolved(
        1024, num_layers=12, hidden_size=768, num_heads=12, vocab_size=50257, norm="layernorm", position="learned",
        activation="gelu", bias=True, tie_embeddings=True,
    )  # fmt: skip
    count = count_parameters(config, parameter_table(config))
    assert count.total == 124_439_808  # the published size
    assert count.looked_up == 1024 * 768  # the tied table is the head, too


def by_hand(config: Config, lengths: list[int], window: int | None) -> float:
    """Return the operations a token of one layer's attention: each pair twice, a token with itself once."""
    seen = [min(place + 1, window or place + 1) for length in lengths for place in range(length)]
    return 12 * config.model.hidden_size * (2 * sum(seen) - len(seen)) / len(seen)


SMALL = {"num_layers": 5, "hidden_size": 16, "num_heads": 2, "vocab_size": 32}


@pytest.mark.parametrize("window", [4, 16, 64])
def test_a_layer_with_a_window_costs_less(window: int) -> None:
    config = resolved(32, **SMALL, window=window, window_every=2)
    cut, full = by_hand(config, [32], window), by_hand(config, [32], None)
    layers, _ = layers_and_head_flops(config, parameter_table(config))
    assert [layer - min(layers) for layer in layers] == [0, full - cut, 0, full - cut, 0]
    assert token_flops(config, parameter_table(config), 32).attention == 3 * cut + 2 * full
    assert full == 12 * 16 * 32


def test_each_document_counts_its_own_attention() -> None:
    config = resolved(32, **SMALL, window=4, window_every=2)
    lengths = [1, 7, 24, 2, 30]
    bounds = np.cumsum([0, *lengths]).astype(np.int32)
    shape = (1, 2, 32)
    host = HostBatch.over(np.zeros(HostBatch.num_bytes(shape), np.uint8), shape)
    table = parameter_table(config)
    flops = BatchFlops(config, table)
    expected = 3 * by_hand(config, lengths, 4) + 2 * by_hand(config, lengths, None)
    assert flops.of(replace(host, cu_seqlens=bounds)).attention == pytest.approx(expected)
    assert flops.of(host) == flops.of_rows(32) == token_flops(config, table, 32)
    rows = np.array([0, 32, 64], np.int32)
    assert flops.of(replace(host, cu_seqlens=rows)).attention == pytest.approx(token_flops(config, table, 32).attention)
