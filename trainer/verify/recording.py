"""What a rank called of its groups, in order: a network that notes each call, and carries it by another network."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from trainer.mesh.group import Network, Transport
from trainer.mesh.mesh import ProcessMesh


class Call(NamedTuple):
    """One call of a group: `kind` is the method, `num_bytes` the size of the tensor on this rank."""

    kind: str
    group: str
    num_bytes: int


class Recording:
    """The calls of one rank; groups of one rank make none."""

    def __init__(self, network: Network, note: Callable[[Call], object] | None = None) -> None:
        """Hand each call to `note`, by default to keep it among `calls`."""
        self._network, self.world_size = network, network.world_size
        self.calls: list[Call] = []
        self._note = note or self.calls.append

    def connect(self, name: str, ranks: Sequence[int]) -> Transport | None:
        transport = self._network.connect(name, ranks)
        return None if transport is None else cast(Transport, Recorded(transport, name, self._note))

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how often each kind was called on each group."""
        return Counter((call.kind, call.group) for call in self.calls)


class Recorded:
    """A transport whose calls are noted."""

    def __init__(self, transport: Transport, group: str, note: Callable[[Call], object]) -> None:
        self._transport, self._group, self._note = transport, group, note

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        carry = getattr(self._transport, kind)

        def call(tensor: Tensor | Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
            tensors = [tensor] if isinstance(tensor, Tensor) else tensor
            self._note(Call(kind, self._group, sum(each.numel() * each.itemsize for each in tensors)))
            return carry(tensor, *arguments, **options)

        return call


def recording_of(mesh: ProcessMesh) -> Recording:
    """Return the recording of a mesh whose network is one."""
    return cast(Recording, mesh._network)
