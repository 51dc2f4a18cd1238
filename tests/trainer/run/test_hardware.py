"""A rank whose products, memory or transfers are slow is named before a run starts."""

import pytest

from threefold.errors import UserError
from trainer.config import Config, HealthConfig
from trainer.job.ranks import Ranks
from trainer.run import hardware
from trainer.run.hardware import below_card, check_hardware, slow_texts


def test_a_rank_is_compared_with_the_median_of_the_others() -> None:
    rates = [
        {"products": 100e12, "memory": 1e12},
        {"products": 99e12, "memory": 0.5e12},
        {"products": 101e12, "memory": 1e12},
    ]
    assert slow_texts(rates, 0.2) == ["rank 1 is slow in memory: 500 GB/s, the others have 1,000 GB/s"]
    assert slow_texts(rates[:1], 0.2) == []


def test_what_was_not_timed_on_a_rank_is_left_out() -> None:
    assert slow_texts([{"transfers": 0.0}, {"transfers": 2e9}, {"transfers": 2e9}], 0.2) == []


def test_a_rank_is_compared_with_the_data_sheet_of_its_card() -> None:
    rates = [{"products": 400e12, "memory": 4.0e12}, {"products": 700e12, "memory": 2.0e12}]
    texts = below_card(rates, ["NVIDIA H200"] * 2)
    assert texts == [
        "rank 0 has 400 TFLOP/s in products, 40% of the 989 TFLOP/s that the data sheet of NVIDIA H200 says",
        "rank 1 has 2,000 GB/s in memory, 42% of the 4,800 GB/s that the data sheet of NVIDIA H200 says",
    ]
    assert below_card(rates, ["", "a card"]) == []


@pytest.mark.parametrize("what", ["off", "warn", "refuse"])
def test_a_slow_rank_is_a_warning_or_ends_the_run(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {rank: {"products": 1e12, "memory": 5e9 / (1 + rank)} for rank in range(2)}
    monkeypatch.setattr(hardware, "rates_of", lambda ranks: rates[0])
    config = Config(health=HealthConfig(check_hardware=what))  # type: ignore[arg-type]
    with Ranks("cpu", timeout_s=10) as ranks:
        monkeypatch.setattr(ranks, "gather", lambda value: list(rates.values()) if value else ["", ""])
        if what == "refuse":
            with pytest.raises(UserError, match=r"rank 1 is slow in memory: 2\.5 GB/s, the others have 5 GB/s"):
                check_hardware(config, ranks)
        else:
            check_hardware(config, ranks)
    assert ("warning: rank 1 is slow in memory" in capsys.readouterr().err) == (what != "off")


def test_products_and_memory_of_a_process_alone_are_timed() -> None:
    with Ranks("cpu", timeout_s=10) as ranks:
        rates = hardware.rates_of(ranks)
    assert sorted(rates) == ["memory", "products"]
    assert min(rates.values()) > 0
