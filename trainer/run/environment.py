"""What a run on GPUs sets of the variables that CUDA and torch read when they start, unless the user did.

Queues between the host and a GPU: with one a transfer starts before a product that is enqueued behind it. With several
it may start behind all that is enqueued on other streams, but for what it waits for, and a product takes the whole GPU
meanwhile.

torch's allocator takes memory in segments that grow. Of fixed size they have holes where tensors of other sizes come
and go, as rows of documents do: up to 8% of what a run takes, which no plan can know.
"""

import os

import torch

from trainer.config import Config
from trainer.config.resolve import cuts_tokens
from trainer.job.ranks import Ranks

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
ONE, CUDAS_OWN = "1", "8"
ALLOCATOR, GROWING = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"


def queues_of(config: Config) -> tuple[str, str]:
    """Return how many queues a run takes, and for what.

    Where tokens are cut over tp, a transfer before each product is waited for. Gathers and sums over dp are a unit
    ahead of their readers.
    """
    if cuts_tokens(config):
        return ONE, "transfers of cut tokens start before the products behind them"
    return CUDAS_OWN, "transfers start beside what is enqueued"


def make_deterministic() -> None:
    """Let this process use deterministic kernels alone, and fail where there is none; before CUDA starts.

    Source: torch's notes on reproducibility; cuBLAS reads its workspace's size when it starts.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is not read


def ranks_of(config: Config) -> Ranks:
    """Return this process among those of a run, whose variables are set.

    A process that uses its GPU already keeps what CUDA and torch have read.
    """
    if config.train.device != "cpu":
        os.environ.setdefault(VARIABLE, queues_of(config)[0])
        if "PYTORCH_ALLOC_CONF" not in os.environ:  # its other name
            os.environ.setdefault(ALLOCATOR, GROWING)
    return Ranks(config.train.device, timeout_s=config.parallel.timeout_s)


def queues_text(config: Config, device: torch.device) -> str:
    """Return what a run says of its queues; nothing without a GPU."""
    if device.type != "cuda":
        return ""
    (number, why), found = queues_of(config), os.environ.get(VARIABLE)
    if found not in (None, number):
        return f"{found} between host and GPU, as {VARIABLE} says; a run of this kind takes {number}"
    return f"{number} between host and GPU ({VARIABLE}): {why}"
