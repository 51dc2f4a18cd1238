"""Split masters: fp32 numbers as bf16 weights and low bits, and back."""

import torch

from trainer.ops import split


def test_split_numbers_are_whole_again_but_for_those_halfway() -> None:
    highs = torch.tensor([0, 1, 0x7F, 0x3F80, 0x3F81, 0x4049, 0x7F7F], dtype=torch.int32)
    bits = torch.cat([highs, highs + 0x8000])[:, None] * 0x10000 + torch.arange(0x10000, dtype=torch.int32)
    numbers = bits.flatten().view(torch.float32)
    weights, low = torch.empty_like(numbers, dtype=torch.bfloat16), torch.empty_like(numbers, dtype=torch.int16)

    split.split_into(weights, low, numbers)
    again = split.joined(weights, low)

    is_halfway = bits.flatten() & 0xFFFF == 0x8000
    assert torch.equal(weights, numbers.bfloat16())
    assert torch.equal(again.bfloat16(), weights)
    assert torch.equal(again.view(torch.int32)[~is_halfway], numbers.view(torch.int32)[~is_halfway])
    moved = again.view(torch.int32)[is_halfway] - numbers.view(torch.int32)[is_halfway]
    assert sorted(moved.unique().tolist()) == [-1, 1]
    split.split_into(weights, low, again)
    assert torch.equal(split.joined(weights, low), again), "nothing moves twice"
