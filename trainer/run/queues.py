"""The queues between the host and a GPU that a run takes: CUDA reads their number when it starts, so it is set before.

With one queue a transfer starts before a product that is enqueued behind it. With several it may start behind all that
is enqueued on other streams, but for what it waits for, and a product takes the whole GPU meanwhile.
"""

import os

import torch

from trainer.config import Config
from trainer.config.resolve import cuts_tokens
from trainer.job.ranks import Ranks

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
ONE, CUDAS_OWN = "1", "8"


def queues_of(config: Config) -> tuple[str, str]:
    """Return how many queues a run takes, and for what.

    Where tokens are cut over tp, a transfer before each product is waited for. Gathers and sums over dp are a unit
    ahead of their readers.
    """
    if cuts_tokens(config):
        return ONE, "transfers of cut tokens start before the products behind them"
    return CUDAS_OWN, "transfers start beside what is enqueued"


def ranks_of(config: Config) -> Ranks:
    """Return this process among those of a run; its GPU gets the queues that the run takes, unless the user set them.

    A process that uses its GPU already keeps those that it has.
    """
    if config.train.device != "cpu":
        os.environ.setdefault(VARIABLE, queues_of(config)[0])
    return Ranks(config.train.device, timeout_s=config.parallel.timeout_s)


def queues_text(config: Config, device: torch.device) -> str:
    """Return what a run says of its queues; nothing without a GPU."""
    if device.type != "cuda":
        return ""
    (number, why), found = queues_of(config), os.environ.get(VARIABLE)
    if found not in (None, number):
        return f"{found} between host and GPU, as {VARIABLE} says; a run of this kind takes {number}"
    return f"{number} between host and GPU ({VARIABLE}): {why}"
