"""HostInputs: inputs of layers that are made again, in host memory between a layer's two passes.

Forward they leave beside the layers that follow. Backward the one of a layer comes back beside the backward of the
layer behind it. The last one of a stage stays: its backward is the first. The host waits for none of it.
Source: Rhu and others, "vDNN: Virtualized Deep Neural Networks", 2016.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from trainer.config import Config
from trainer.mesh.mesh import ProcessMesh
from trainer.store.host_memory import locked_zeros
from trainer.store.numa import cores_of, node_of
from trainer.store.window import CudaLanes, Lanes, Mark

MOST_LEAVING = 2  # inputs that the device keeps while they are copied; the arithmetic waits for those before
NUM_ON_DEVICE = MOST_LEAVING + 2  # those, the one that is read, and the one that comes


class HostInputs:
    """The inputs of a stage's layers in all passes that are live; owned by the training thread.

    `new_memory` makes host memory of so many elements.
    """

    def __init__(self, lanes: Lanes, new_memory: Callable[[int, torch.dtype], Tensor]) -> None:
        self.lanes, self._new_memory = lanes, new_memory
        self._free = defaultdict[tuple[int, torch.dtype], list[Tensor]](list)
        self._leaving = deque[tuple[Mark, Tensor]]()
        self._latest: LayerInput | None = None

    def begin_pass(self) -> None:
        """Begin a forward pass: its first layer has none before it."""
        self._latest = None

    def put(self, x_TD: Tensor, *, stays: bool) -> "LayerInput":
        """Take the input of the pass's next layer, to the host unless it stays."""
        self._latest = LayerInput(self, x_TD, self._latest, stays=stays)
        return self._latest

    def leave(self, flat: Tensor) -> tuple[Tensor, Mark]:
        """Begin to copy a tensor to the host; return its memory there, and the mark at which it is there."""
        kind = flat.numel(), flat.dtype
        memory = self._free[kind].pop() if self._free[kind] else self._new_memory(*kind)
        mark = self.lanes.copy("out", [(memory, flat)], self.lanes.mark())
        self._leaving.append((mark, flat))
        if len(self._leaving) > MOST_LEAVING:
            self.lanes.wait(self._leaving.popleft()[0])
        return memory, mark

    def come(self, flat: Tensor, memory: Tensor, left: Mark) -> Mark:
        """Begin to copy what left until a mark to a new tensor; return the mark at which it is there."""
        self.lanes.copy("in", [], self.lanes.mark())  # until now the new tensor's memory may be another's
        return self.lanes.copy("in", [(flat, memory)], left)

    def arrive(self, memory: Tensor, mark: Mark) -> None:
        """Let the arithmetic wait for what came; its memory on the host is free then."""
        self.lanes.wait(mark)
        self._free[memory.numel(), memory.dtype].append(memory)


class LayerInput:
    """The input of one layer in one micro-batch; it keeps that of the layer before it. Owned by the training thread."""

    def __init__(self, inputs: HostInputs, x_TD: Tensor, before: "LayerInput | None", *, stays: bool) -> None:
        self._inputs, self._before = inputs, before
        self._shape, self._device = x_TD.shape, x_TD.device
        self._x_TD = x_TD if stays else None
        self._left = None if stays else inputs.leave(x_TD.contiguous().view(-1))
        self._coming: Mark = None

    def begin(self) -> None:
        """Begin to bring it back."""
        if self._left is not None:
            memory, mark = self._left
            self._x_TD = torch.empty(self._shape, dtype=memory.dtype, device=self._device)
            self._coming = self._inputs.come(self._x_TD.view(-1), memory, mark)

    def read(self) -> Tensor:
        """Return it, begun before or not, and begin to bring that of the layer before it back."""
        if self._x_TD is None:
            self.begin()
        x_TD, self._x_TD = self._x_TD, None
        assert x_TD is not None, "it is read once"
        if self._left is not None:
            self._inputs.arrive(self._left[0], self._coming)
        if self._before is not None:
            self._before.begin()
            self._before = None
        return x_TD


def host_inputs(config: Config, mesh: ProcessMesh) -> HostInputs | None:
    """Return where a stage of a run on GPUs keeps inputs of layers, None if they stay."""
    if not (config.train.recompute_offload and mesh.device.type == "cuda"):
        return None
    cores = cores_of(node_of(mesh.device))
    return HostInputs(CudaLanes(mesh.device), partial(locked_zeros, cores=cores, option="train.recompute_offload"))
