"""What the flags of torch's launcher take: those whose value it reads itself, checked before anything is started."""

import argparse
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

BACKENDS = ("c10d", "static", "etcd", "etcd-v2")


def wrong_flag(options: argparse.Namespace) -> str | None:
    """Return a sentence on the first flag with a value that torch would refuse, which says what the flag takes."""
    for name, (takes, reads) in FLAGS.items():
        value, is_chosen = getattr(options, name, None), options.standalone and name.startswith("rdzv_")
        try:
            is_right = value is None or is_chosen or reads(value) is not False
        except (AssertionError, KeyError, RuntimeError, ValueError):
            is_right = False
        if not is_right:
            return f"--{name.replace('_', '-')} {value}: it takes {takes}"
    needs_port = options.rdzv_backend == "static" and options.rdzv_endpoint and not options.standalone
    if needs_port and parse_rendezvous_endpoint(options.rdzv_endpoint, -1)[1] < 0:
        return f"--rdzv-endpoint {options.rdzv_endpoint}: it takes HOST:PORT, of a static rendezvous"
    return None


def has_ranks(text: str) -> bool:
    return run.determine_local_world_size(text) > 0


def has_nodes(text: str) -> bool:
    least, most = run.parse_min_max_nnodes(text)
    return 0 < least <= most


def has_host(text: str) -> bool:
    """Return whether a text names a host; an address with colons is in brackets."""
    host, _ = parse_rendezvous_endpoint(text, 0)
    return ":" not in host or text.strip().startswith("[")


def is_backend(text: str) -> bool:
    return text in BACKENDS or text in entry_points(group="torchrun.handlers").names


def is_logs_specs(text: str) -> bool:
    return text in entry_points(group="torchrun.logs_specs").names


def are_settings(text: str) -> bool:
    """Return whether a text is empty or names settings; torch reads some as whole numbers above 0."""
    pairs = [[part.strip() for part in pair.partition("=")] for pair in text.split(",")] if text.strip() else []
    numbers = [value for name, _, value in pairs if name.endswith("timeout") or name.startswith("keep_alive_")]
    return all(name and value for name, _, value in pairs) and all(int(number) > 0 for number in numbers)


def are_numbers(text: str) -> bool:
    return not text or min(map(int, text.split(","))) >= 0


def is_not_negative(number: float) -> bool:
    return number >= 0


Reading = Callable[[Any], object]  # fails, or returns False, for what torch would refuse
FLAGS: dict[str, tuple[str, Reading]] = {
    "nproc_per_node": ("a number above 0; or auto, cpu, gpu or xpu, where this node has it", has_ranks),
    "nnodes": ("a number above 0, or MIN:MAX", has_nodes),
    "rdzv_backend": (", ".join(BACKENDS), is_backend),
    "rdzv_endpoint": ("HOST, HOST:PORT or [ADDRESS]:PORT", has_host),
    "rdzv_id": ("a name", bool),
    "rdzv_conf": ("NAME=VALUE,... with whole numbers above 0 for timeouts", are_settings),
    "max_restarts": ("0 or more", is_not_negative),
    "node_rank": ("0 or more", is_not_negative),
    "monitor_interval": ("seconds, 0 or more", is_not_negative),
    "shutdown_timeout": ("seconds, 0 or more", is_not_negative),
    "master_port": ("a number below 65536, 0 or more", range(1 << 16).__contains__),
    "local_ranks_filter": ("numbers of ranks, such as 0,1", are_numbers),
    "redirects": ("0 to 3, or such a number by rank, as 0:1,1:3", Std.from_str),
    "tee": ("0 to 3, or such a number by rank, as 0:1,1:3", Std.from_str),
    "event_log_handler": ("null or console", get_logging_handler),
    "logs_specs": ("a name that a package installs", is_logs_specs),
}
