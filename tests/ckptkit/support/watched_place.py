"""A place of a simulation, and what must hold there after each change."""

from collections.abc import Callable, Set

from ckptkit.format.keys import step_folder
from ckptkit.format.root import Root
from ckptkit.loading.roots import root_key
from tests.ckptkit.support.small_steps import half_of
from threefold.storage.memory import MemoryStorage


class WatchedPlace:
    """The committed steps of a place, as they were after the last change; `must` raises if something does not hold."""

    def __init__(self, store: MemoryStorage, num_steps: int, must: Callable[[object, str], None]) -> None:
        self.store, self._num_steps, self._must = store, num_steps, must
        self.roots: dict[int, tuple[bytes, Root]] = {}
        self.history: dict[int, list[str]] = {}  # of each step the attempts that were committed
        self.gone: dict[int, bytes] = {}

    def check(self, folders: Set[str], *, may_lose_newest: bool) -> None:
        """Check that steps that changed are whole if listed, keep their roots, and go only where a newer one stays."""
        roots: dict[int, tuple[bytes, Root]] = {}
        for step in range(1, self._num_steps + 1):
            if step_folder(step) not in folders:
                if step in self.roots:
                    roots[step] = self.roots[step]
            elif self.store.info(root_key(step)) is not None:
                roots[step] = self._checked(step)
        for step in self.roots.keys() - roots.keys():
            self.gone[step] = self.roots[step][0]
            has_newer = any(newer > step for newer in roots)
            self._must(has_newer or may_lose_newest, f"step {step} was deleted, the newest one")
        for step in roots:
            self.gone.pop(step, None)
        self.roots = roots

    def _checked(self, step: int) -> tuple[bytes, Root]:
        """Return a step's root, looked at."""
        data = self.store.read(root_key(step))
        known = self.roots.get(step)
        root = known[1] if known and known[0] == data else Root.from_bytes(data, f"the root of step {step}")
        self._must(known is None or known[0] == data, f"the root of step {step} was replaced")
        self._must(not (fault := half_of(self.store, step, root)), f"a half step: {fault}")
        if known is None and self.gone.get(step) != data:
            self.history.setdefault(step, []).append(root.attempt)
        return data, root
