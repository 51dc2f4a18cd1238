"""The NUMA node that a GPU is next to: copies between it and memory of another node cross the processors' link.

Linux takes a page of memory from the node of the core that touches it first. So a thread that is to have memory near a
GPU goes to that node's cores while it touches the pages.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

DEVICES, NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")


def node_of(device: torch.device, devices: Path = DEVICES) -> int | None:
    """Return the node that a GPU is next to, or None if the system does not say."""
    known: Any = torch.cuda.get_device_properties(device)
    if not hasattr(known, "pci_bus_id"):  # an older torch
        return None
    return node_at(f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0", devices)


def node_at(address: str, devices: Path = DEVICES) -> int | None:
    """Return the node of a PCI address, such as 0000:1b:00.0."""
    try:
        node = int((devices / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cores_of(node: int | None, nodes: Path = NODES) -> set[int]:
    """Return the cores of a node, none if the system does not say: "0-3,8" are 0, 1, 2, 3 and 8."""
    try:
        ranges = (nodes / f"node{node}" / "cpulist").read_text().strip().split(",")
    except OSError:
        return set()
    ends = [[int(end) for end in text.split("-")] for text in ranges if text]
    return {core for first, *last in ends for core in range(first, (last or [first])[0] + 1)}


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[bool]:
    """Let this thread run on some cores alone, and then where it did before; yield whether the system allows it."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # none of them is this container's, or there are none
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setaffinity(0, before)
