"""ckptkit.torch on several ranks: FSDP2, HSDP, tensor parallelism and DDP, saved on one and loaded on any other."""

from pathlib import Path

import numpy as np
import pytest

from ckptkit import Run as AnyRun
from ckptkit import verify_checkpoint
from ckptkit.torch import Run
from tests.ckptkit.support.torch_program import load_at, make, save_at, train
from tests.trainer.support.ranks import run_ranks
from threefold.errors import UserError


def load_otherwise(rank: int, url: str) -> list[str]:
    with Run(url) as run:
        for step in (1, 2):
            run.save(step, {"x": step})
            run.wait()
        errors = []
        for options in ({"step": 1 + rank}, {"strict": rank == 0}, {"certify": rank == 0}):
            with pytest.raises(UserError) as refused:
                run.load({"x": 0, "y": 0}, **options)
            errors.append(str(refused.value).partition("\n")[0])
    return errors


def test_ranks_that_load_otherwise_are_one_error_on_all(tmp_path: Path) -> None:
    said = [f"ranks load with different values of {text}" for text in ("step: 1, 2", *(
        f"{name}: True, False" for name in ("strict", "certify")
    ))]  # fmt: skip
    assert run_ranks(2, load_otherwise, str(tmp_path)) == [said, said]


LAYOUTS = {2: ("ddp", "fsdp", "tp"), 4: ("ddp", "fsdp", "hsdp", "tp", "fsdp_tp")}


def uninterrupted(step: int) -> list[float]:
    return train(*make("one"), range(step + 3))[step:]


def from_fsdp_to_all(rank: int, url: str, layouts: tuple[str, ...]) -> list[list[float]]:
    ahead = save_at(rank, layouts[0], url, 4)
    return [ahead, *(load_at(rank, layout, url)[1] for layout in layouts)]


@pytest.mark.ci
@pytest.mark.slow
def test_two_ranks_of_fsdp_go_on_as_any_other_program(tmp_path: Path) -> None:
    expected = uninterrupted(4)
    for losses in run_ranks(2, from_fsdp_to_all, str(tmp_path / "run"), ("fsdp", "fsdp")):
        assert losses[0] == losses[1]  # of the same layout bit for bit
        for each in losses:
            np.testing.assert_allclose(each, expected, rtol=0, atol=1e-10)
    report, losses_alone = load_at(0, "one", str(tmp_path / "run"))
    np.testing.assert_allclose(losses_alone, expected, rtol=0, atol=1e-10)
    assert (report.step, report.metrics, report.ranks_without_rng) == (4, {"loss": 1.0}, ())
    run = AnyRun(str(tmp_path / "run"))
    with run.open(4) as reader:
        assert verify_checkpoint(reader).ok
    tensors = {name: info for name, info in run.root(4).tensors.items() if name.startswith("optimizer/")}
    assert set(tensors) == {
        f"optimizer/state/{layer}.{kind}/{state}"
        for layer in (0, 2, 3, 4) for kind in ("weight", "bias") for state in ("step", "exp_avg", "exp_avg_sq")
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("num_ranks", "layout"), [(n, layout) for n, names in LAYOUTS.items() for layout in names])
def test_every_layout_resumes_bit_for_bit_and_on_any_other(num_ranks: int, layout: str, tmp_path: Path) -> None:
    url, expected = str(tmp_path / "run"), uninterrupted(4)
    others = tuple(each for each in LAYOUTS[num_ranks] if each != layout)
    for losses in run_ranks(num_ranks, from_fsdp_to_all, url, (layout, layout, *others)):
        assert losses[0] == losses[1]
        for each in losses:
            np.testing.assert_allclose(each, expected, rtol=0, atol=1e-10)
    _, alone = load_at(0, "one", url)
    np.testing.assert_allclose(alone, expected, rtol=0, atol=1e-10)
    other_size = 6 - num_ranks
    for other in LAYOUTS[other_size]:
        found = run_ranks(other_size, load_at, other, url)
        for rank, (report, losses) in enumerate(found):
            np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-10)
            assert report.ranks_without_rng == tuple(range(num_ranks, other_size)), rank
    with AnyRun(url).open(4) as reader:
        assert verify_checkpoint(reader).ok
