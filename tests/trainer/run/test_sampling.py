"""Tokens are taken as often as their probabilities say, by numbers that depend on the prompt and the place alone."""

import math

import pytest
import torch

from trainer.run.sampling import Sampling, number_of

LOGITS = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.7, 0.1]]))


def test_without_a_temperature_the_first_of_the_likeliest_is_taken() -> None:
    assert Sampling().choose(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]]), [0.9, 0.9]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.7, 0.1]]),
        (Sampling(0.5), [[0.16, 0.09, 0.04, 0.01], [0.01, 0.01, 0.49, 0.01]]),  # squares
        (Sampling(1.0, top_k=2), [[0.4, 0.3, 0, 0], [0.1, 0.1, 0.7, 0.1]]),  # equals stay together
        (Sampling(1.0, top_k=9), [[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.7, 0.1]]),
        (Sampling(1.0, top_p=0.65), [[0.4, 0.3, 0, 0], [0, 0, 0.7, 0]]),
        (Sampling(1.0, top_p=1e-9), [[0.4, 0, 0, 0], [0, 0, 0.7, 0]]),
        (Sampling(1.0, min_p=0.45), [[0.4, 0.3, 0.2, 0], [0, 0, 0.7, 0]]),
        (Sampling(1.0, top_k=3, top_p=0.5, min_p=0.9), [[0.4, 0, 0, 0], [0, 0, 0.7, 0]]),
    ],
)
def test_which_tokens_stay(sampling: Sampling, expected: list[list[float]]) -> None:
    shares = torch.tensor(expected, dtype=torch.float64)
    found = sampling.probabilities(LOGITS)
    torch.testing.assert_close(found / found.sum(1, keepdim=True), shares / shares.sum(1, keepdim=True))


def test_tokens_are_as_frequent_as_they_are_likely() -> None:
    sampling, number = Sampling(1.0, top_p=0.9, seed=3), 4000
    key = sampling.key([1, 2])
    logits = LOGITS[:1].expand(number, -1)
    counts = sampling.choose(logits, [number_of(key, 0, place) for place in range(number)]).bincount(minlength=4)
    shares = sampling.probabilities(LOGITS[:1])[0]
    assert (counts / number).tolist() == pytest.approx((shares / shares.sum()).tolist(), abs=0.03)


def test_numbers_are_those_of_the_prompt_the_sample_the_place_and_the_seed() -> None:
    key = Sampling(1.0, seed=5).key([1, 23])
    numbers = [number_of(key, sample, place) for sample in range(4) for place in range(50)]
    assert len(set(numbers)) == 200
    assert all(0 <= number < 1 for number in numbers)
    assert math.fsum(numbers) / 200 == pytest.approx(0.5, abs=0.07)
    assert number_of(key, 1, 2) == number_of(Sampling(0.3, seed=5).key((1, 23)), 1, 2)
    keys = {key, Sampling(1.0, seed=6).key([1, 23]), Sampling(1.0, seed=5).key([12, 3]), Sampling(1.0, seed=5).key([])}
    assert len(keys) == 4


def test_a_number_at_an_end_takes_a_token_that_stays() -> None:
    sampling = Sampling(1.0, top_k=1)
    logits = torch.tensor([[0.0, 1.0, 0.0]]).expand(2, -1)
    assert sampling.choose(logits, [0.0, 1 - 2.0**-53]).tolist() == [1, 1]


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7, 20, 0.9, 0.05), Sampling(1.3, 0, 0.5), Sampling(2.0, 7), Sampling(0.9, min_p=0.2)]
)
def test_tokens_that_stay_are_those_of_transformers(sampling: Sampling) -> None:
    library = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    warpers = [library.TemperatureLogitsWarper(sampling.temperature)]
    warpers += [library.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [library.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [library.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    logits = scores = 3 * torch.randn(50, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for warper in warpers:
        scores = warper(torch.zeros(50, 1, dtype=torch.int64), scores)
    found = sampling.probabilities(logits)
    torch.testing.assert_close(found / found.sum(1, keepdim=True), scores.softmax(1))
