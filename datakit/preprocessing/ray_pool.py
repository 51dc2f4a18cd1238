"""RayPool: the workers of a run as actors on a Ray cluster, which take one work item at a time.

Input, tokenizer and output must have the same paths on all nodes (a shared file system), input and output else
behind URLs. The item of an actor that dies with its node is given to another; what is sealed stays sealed. No data
travels through Ray.
"""

import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

from datakit.preprocessing.task import Task
from datakit.preprocessing.worker import seal_item
from datakit.preprocessing.worker_pool import WORKER_ENVIRONMENT, raise_error
from datakit.text.inputs import WorkItem
from threefold.child_python import search_path
from threefold.closing import Closing
from threefold.errors import StorageError
from threefold.packages import needed_for

MAX_ITEM_LOSSES, MAX_FAILED_STARTS = 3, 3
PLACE_WITHIN_S, CONNECT_WITHIN_S = 120.0, 10.0


class RayPool(Closing):
    """Some actors; use it in a `with`, which ends them and leaves the cluster."""

    def __init__(self, num_workers: int, *, address: str | None) -> None:
        """Join the cluster at an address ("auto" finds the one of this machine), or start one here where it is None."""
        self._ray = _import_ray()
        variables = {"PYTHONPATH": os.pathsep.join(search_path()), "PYTHONSAFEPATH": "1"}
        options: dict[str, Any] = {"_node_ip_address": "127.0.0.1"} if (address or "").startswith("127.") else {}
        try:
            _check_answers(address)
            with chdir(os.sep):  # Ray lets its workers import from the folder that is current here
                self._ray.init(
                    address,
                    log_to_driver=False,
                    logging_level="error",
                    runtime_env={"env_vars": WORKER_ENVIRONMENT | variables},
                    **options,
                )
        except (OSError, ValueError, RuntimeError) as error:
            raise StorageError(f"no Ray cluster answers at {address}: {error}", hint="ray status") from error
        self._actor = self._ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(_Sealer)
        self._num_workers = max(min(num_workers, int(self._ray.cluster_resources().get("CPU", 0))), 1)
        self._num_failed_starts = 0
        self._starting: dict[Any, Any] = {}  # what ends when an actor found its place, and the actor

    def run(self, task: Task, items: Iterator[WorkItem]) -> Iterator[tuple[WorkItem, dict[str, Any]]]:
        """Hand out a task's items; give each one's message when it is sealed.

        Only actors that are in place get items, so that none waits for room on a cluster that shrank.
        """
        under_way: dict[Any, tuple[Any, WorkItem]] = {}
        idle: list[Any] = []
        lost: list[WorkItem] = []
        num_lost: Counter[int] = Counter()
        for _ in range(self._num_workers):
            self._start(task)
        while True:
            while idle and (item := lost.pop() if lost else next(items, None)) is not None:
                actor = idle.pop()
                under_way[actor.seal.remote(item)] = (actor, item)
            if not under_way and idle:
                return
            patience_s = None if under_way else PLACE_WITHIN_S
            ready, _ = self._ray.wait([*under_way, *self._starting], num_returns=1, timeout=patience_s)
            if not ready:
                raise StorageError(f"no actor found a place within {PLACE_WITHIN_S:g} s", hint="ray status")
            [done] = ready
            if done in self._starting:
                idle += self._placed(done, task)
                continue
            actor, item = under_way.pop(done)
            try:
                message = self._ray.get(done)
            except self._ray.exceptions.RayError as error:
                num_lost[item.number] += 1
                if num_lost[item.number] > MAX_ITEM_LOSSES:
                    raise StorageError(
                        f"work item {item.number} ({item.slices[0].file.path}) was lost {MAX_ITEM_LOSSES + 1} times on "
                        f"the Ray cluster: {str(error).splitlines()[0]}",
                        hint="perhaps for memory: ray status, ray memory; then rerun the same command to continue",
                    ) from error
                lost.append(item)
                self._replace(actor, task)
                continue
            raise_error(message)
            idle.append(actor)
            yield item, message

    def _start(self, task: Task) -> None:
        actor = self._actor.remote(task, os.getcwd())
        self._starting[actor.is_placed.remote()] = actor

    def _placed(self, answer: Any, task: Task) -> list[Any]:
        """Return the actor that has found its place; none, and start another one, if it died of that."""
        actor = self._starting.pop(answer)
        try:
            self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            self._num_failed_starts += 1
            if self._num_failed_starts > MAX_FAILED_STARTS:
                lines = [line for line in str(error).splitlines() if line and not line.startswith("hint:")]
                raise StorageError(
                    f"no worker can begin on the Ray cluster: {lines[-1]}",
                    hint="input, tokenizer, output and this program must be there on all nodes",
                ) from error
            self._replace(actor, task)
            return []
        self._num_failed_starts = 0
        return [actor]

    def _replace(self, actor: Any, task: Task) -> None:
        self._ray.kill(actor)
        self._start(task)

    def close(self) -> None:
        """End the actors and leave the cluster."""
        self._ray.shutdown()


class _Sealer:
    """An actor: seals items in a process of its own."""

    def __init__(self, task: Task, folder: str) -> None:
        os.chdir(folder)  # relative paths mean what they mean to the user
        self._sealer = task.sealer()

    def is_placed(self) -> bool:
        """Answers once the actor runs."""
        return True

    def seal(self, item: WorkItem) -> dict[str, Any]:
        """Seal one item; return the message on how that went."""
        return seal_item(self._sealer, item, lambda _: None)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if (Path.home() / ".ray" / "auth_token").exists():  # `ray start` then asks for it, but a driver does not offer it
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    with needed_for("--engine ray"):
        import ray
    return ray


def _check_answers(address: str | None) -> None:
    """OSError at once where nothing listens; Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=CONNECT_WITHIN_S).close()
