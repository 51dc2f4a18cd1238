"""Holdings: what a process keeps open or mapped of a cache, each under a second name in a folder of the process.

A file that is mapped takes room on the disk after its name is gone. So it is linked into the process's folder before it
is mapped: by its count of links others see that it is held, leave it where it is, and count it. The folder is locked
while the process lives, and whoever finds it unlocked removes it.
"""

import fcntl
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from weakref import finalize


class Kind(Enum):
    """What is held: a block, a file of a shard, or a file that every process holds as long as it runs."""

    BLOCK, FILE, SHARED = range(3)


class Holdings:
    """Owned by the CacheFolder of one process; safe to use from several threads, and by finalizers."""

    def __init__(self, cache: Path) -> None:
        """Make the folder and lock it, while nobody looks for those that are not locked; OSError if that fails."""
        self.process, self.folder = os.getpid(), cache / f".process-{secrets.token_hex(8)}"
        self.folder.mkdir(mode=0o700)
        locked = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finalize(self, os.close, locked).atexit = False
        fcntl.flock(locked, fcntl.LOCK_EX)
        self.num_bytes = dict.fromkeys(Kind, 0)
        self._held = dict[str, tuple[int, int, Kind]]()  # how often, and its bytes
        self._lock = threading.Lock()
        self._over = deque[str]()

    @contextmanager
    def linking(self) -> Iterator[None]:
        """Let nothing be released while things are linked into the folder and counted by `add`."""
        with self._lock:
            yield
        self._unlink()

    def add(self, name: str, num_bytes: int, kind: Kind) -> None:
        """Count what was linked, or is held once more, while `linking`."""
        count, _, kind = self._held.get(name, (0, num_bytes, kind))
        self._held[name] = count + 1, num_bytes, kind
        if not count:
            self.num_bytes[kind] += num_bytes

    def release(self, name: str) -> None:
        """Hold something once less; another process, one that was forked, releases nothing."""
        if os.getpid() == self.process:
            self._over.append(name)
            self._unlink()

    def _unlink(self) -> None:
        """Remove what is over, unless a thread is linking, this one perhaps: then it does so next."""
        while self._over and self._lock.acquire(blocking=False):
            try:
                name = self._over.popleft()
                count, num_bytes, kind = self._held.pop(name)
                if count > 1:
                    self._held[name] = count - 1, num_bytes, kind
                    continue
                self.num_bytes[kind] -= num_bytes
                with suppress(OSError):  # somebody may have removed it
                    os.unlink(self.folder / name)
            except IndexError:  # another thread was faster
                pass
            finally:
                self._lock.release()
