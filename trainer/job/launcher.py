"""Launcher: torch's elastic launcher in our voice. It starts the ranks of a node, and one line says what ended them.

torch reads its flags, meets the other nodes, starts the ranks and watches them. Its log and its tracebacks become a
line for each fault, signals are passed on, and the exit code is that of the rank which failed first.
"""

import argparse
import logging
import os
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from threefold.cli import Stopped
from threefold.debug import VARIABLE, is_debugging
from threefold.errors import UserError
from trainer.job.environment import forget_prepared, hush_torch
from trainer.job.failure import END_FILE
from trainer.job.flight import pages_of_node
from trainer.job.launch_faults import FailedLaunch, report_ranks
from trainer.job.passed_signals import PassedSignals

SAFE_PATH = "PYTHONSAFEPATH"  # python -m puts the current folder first on its path without it
SAMPLE = "trainer launch --nproc-per-node 2 train CONFIG.toml"


def launch(arguments: Sequence[str], verbs: Collection[str]) -> int:
    """Start a command on the ranks of this node, wait for them, and return the exit code of the node.

    `arguments` are torchrun's flags and then a command: one of our `verbs`, a script, or `-m` and a module.
    """
    with _quiet(), pages_of_node(), tempfile.TemporaryDirectory(prefix="trainer-launch-") as folder:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from trainer.job import meeting

        forget_prepared()
        options = parse(arguments, verbs)
        options.signals_to_handle = ""  # PassedSignals hears them
        os.environ[END_FILE] = str(Path(folder) / "code")
        place, started_s = meeting.Meeting.of(options), time.monotonic()
        with PassedSignals() as signals, _apart_from_this_folder(options):
            try:
                place.check()
                run.run(options)
            except ChildFailedError as error:
                return report_ranks(error)
            except SignalException as error:
                raise Stopped(error.sigval) from error
            except meeting.FAULTS as error:
                raise place.fault(error, time.monotonic() - started_s) from error
            except UserError:
                raise
            except (AssertionError, OSError, RuntimeError, ValueError) as error:
                said = str(error).partition("\n")[0] or type(error).__name__
                raise FailedLaunch(
                    f"the launcher on {socket.gethostname()}: {said}",
                    hint=f"torchrun --help explains its flags; {VARIABLE}=1 before the command prints a traceback",
                ) from error
        with suppress(OSError, ValueError):  # no run of ours left a code
            return int((Path(folder) / "code").read_text())
        if signals.ended_by:
            raise Stopped(signals.ended_by)
        return 0


def parse(arguments: Sequence[str], verbs: Collection[str]) -> argparse.Namespace:
    """Return torchrun's flags and the command after them; UserError if torchrun would refuse them."""
    from torch.distributed.run import get_args_parser

    from trainer.job.launch_flags import wrong_flag

    def refuse(message: str) -> None:
        raise UserError(message, hint=SAMPLE)

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[assignment, method-assign]
    options = parser.parse_args(list(arguments))
    if (wrong := wrong_flag(options)) is not None:
        refuse(wrong)
    if options.module and options.no_python:
        refuse("--module and --no-python: a command is one of them")
    if options.module or options.no_python or options.run_path:
        return options
    verb = options.training_script
    if verb in verbs:
        options.module, options.training_script = True, "trainer"
        options.training_script_args = [verb, *options.training_script_args]
    elif not os.path.exists(verb):
        raise UserError(
            f"{verb} is neither a verb ({', '.join(verbs)}) nor a script that is there",
            hint=f"{SAMPLE}, or ... SCRIPT.py, or ... -m MODULE",
        )
    return options


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave torch's log out, which is all that is logged here, unless debugging."""
    before = logging.root.manager.disable
    if not is_debugging():
        logging.disable(logging.CRITICAL)
        hush_torch()
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _apart_from_this_folder(options: argparse.Namespace) -> Iterator[None]:
    """Keep modules of the current folder from ranks of our own verbs, unless the launcher itself comes from there."""
    is_ours = options.module and options.training_script == "trainer"
    is_apart = is_ours and SAFE_PATH not in os.environ and os.path.abspath(sys.path[0]) != os.getcwd()
    if is_apart:
        os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if is_apart:
            del os.environ[SAFE_PATH]
