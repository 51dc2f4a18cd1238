"""FSDP2 on GPUs: saved on all there are, loaded on as many, on half of them, on one, and by plain PyTorch on none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.ckptkit.support.torch_program import load_at, make, train

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")]
ROOT = Path(__file__).parents[3]


def losses_of(num_gpus: int, verb: str, url: str) -> list[float]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus)]
    program = ["-m", "tests.ckptkit.support.fsdp_program", verb, url]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return losses


@pytest.mark.timeout(900)
def test_a_save_of_all_gpus_goes_on_on_fewer(tmp_path: Path) -> None:
    url, num_gpus = str(tmp_path / "run"), torch.cuda.device_count()
    expected = train(*make("one"), range(7))[4:]
    ahead = losses_of(num_gpus, "save", url)
    np.testing.assert_allclose(ahead, expected, rtol=0, atol=1e-10)
    for size in sorted({num_gpus, num_gpus // 2, 1}, reverse=True):
        losses = losses_of(size, "load", url)
        assert size < num_gpus or losses == ahead  # of the same layout bit for bit
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-10)
    _, alone = load_at(0, "one", url)
    np.testing.assert_allclose(alone, expected, rtol=0, atol=1e-10)
