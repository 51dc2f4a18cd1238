"""Samples of a command line of Megatron-LM whose batch grows become the steps that it would take."""

import tomllib

import pytest

from tests.trainer.support.training import call

SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"


def num_iterations(start: int, increment: int, samples: int, final: int, train_samples: int) -> int:
    """Return the iterations of Megatron-LM: it walks through its ramp, and then divides."""
    consumed = iterations = 0
    while consumed <= samples and consumed <= train_samples:
        consumed += start + int(consumed / (samples / ((final - start) // increment))) * increment
        iterations += 1
    return iterations + max(train_samples - consumed, 0) // final


@pytest.mark.parametrize(("ramp", "final"), [((4, 2, 40), 8), ((2, 2, 101), 16), ((6, 3, 1000), 12)])
def test_samples_are_the_steps_of_megatron(
    ramp: tuple[int, int, int], final: int, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--global-batch-size {final} --rampup-batch-size {' '.join(map(str, ramp))} --lr-decay-samples 3000"
    assert call("train", "--from-megatron", f"{SMALL} {flags} --train-samples 4000 --lr 1e-3") == 0
    tables = tomllib.loads(capsys.readouterr().out)
    assert tuple(tables["train"]["rampup_batch_size"]) == ramp
    assert tables["train"]["train_steps"] == num_iterations(*ramp, final, 4000)
    assert tables["optim"]["decay_steps"] == num_iterations(*ramp, final, 3000)
