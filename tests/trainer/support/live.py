"""The bytes of tensors that are alive in a thread: those that its operations made, the peak since the last look."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; what others carry for a rank is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._peak = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._peak = max(self._peak, self.now())
        return result

    def now(self) -> int:
        """The bytes that are alive."""
        self._live = {place: each for place, each in self._live.items() if not each[0].expired()}
        return sum(num_bytes for _, num_bytes in self._live.values())

    def peak(self) -> int:
        """The most at once since the last call."""
        most, self._peak = self._peak, self.now()
        return most
