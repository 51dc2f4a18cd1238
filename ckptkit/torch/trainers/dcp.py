"""DcpWriter and DcpReader: torch.distributed.checkpoint (DCP) on our engine, by one changed line.

    dcp.save(state, storage_writer=DcpWriter("runs/a/step-000000100"))
    dcp.load(state, storage_reader=DcpReader("runs/a/step-000000100"))

What DCP plans is written as a step of a run: durable, checksummed, committed by one write, last. A tensor goes by its
name in DCP's flat state; what DCP pickles is a tensor of opaque bytes, which DCP alone unpickles. Each rank reads the
bytes that it wants, and no others. For torch 2.11 to 2.14.
"""

import io
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from shlex import quote
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ckptkit.format.address import open_address
from ckptkit.format.dcp_state import METADATA, DcpState, checked_path
from ckptkit.format.keys import Seat, check_step, step_folder
from ckptkit.format.root import Root
from ckptkit.format.tensor_rows import check_tensor
from ckptkit.io.torch_tensors import STORED
from ckptkit.loading.restore import restore_from
from ckptkit.loading.roots import root_info
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.tensor import Box, Piece, Placement, TensorInfo, tensor_table
from ckptkit.runs.run import Run
from ckptkit.saving.save import write_pieces
from ckptkit.torch.state.boxes import as_stored, flat_of
from ckptkit.torch.state.loading import TORCH_DTYPES
from ckptkit.writer.step import StepTarget, commit_parts, discard
from threefold.cli import log
from threefold.errors import UserError, listed
from threefold.storage import AlreadyExists, Storage

HIDES_REASONS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)  # then DCP says "metadata is None"
FILES_DEADLINE_S = 60.0  # all files are there when the first rank looks; a listing may lag behind
WHOLE_STATE = Placement("first")
_TOKEN = secrets.token_hex(8)


class DcpWriter(StorageWriter):
    """Writes what DCP saves as the step that a URL names, `RUN/step-000000100`; `checkpoint_id` may name another.

    Every rank has one, for any number of saves. A step that is committed is never written again.
    """

    def __init__(self, url: str | os.PathLike[str] | None = None) -> None:
        self._url = None if url is None else os.fspath(url)
        self._seat, self._write_s = Seat("", 0, ""), 0.0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another step's URL, if there is one."""
        if checkpoint_id:
            self._url = os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a save whose ranks write checkpoints of their own."""
        if not kwargs.get("use_collectives", True):
            raise UserError(
                "a save without collectives makes a checkpoint a rank, which no run holds",
                hint="leave use_collectives out",
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Raise UserError, before anything is written, for what a step cannot hold."""
        self._opened()
        faults = [fault for item in plan.items if (fault := _fault(item))]
        if faults:
            raise UserError(f"a state is not one that a step holds:{listed(faults)}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its seat; remove what a try of this job at the same step left that failed."""
        storage, step = self._opened()
        if root_info(storage, step) is not None:
            text = f"step {step} of {storage.url} is committed already"
            hint = f"a committed step is never written again; choose another: ckptkit ls {quote(storage.url)}"
            raise AlreadyExists(text, hint=hint)
        # one a process: a planner that caches plans brings those of earlier saves back, with the attempt in them
        attempt = f"dcp-{_TOKEN}-{os.getpid()}"
        storage.delete(list(storage.list_keys(f"{step_folder(step)}/{attempt}/")))
        self._seat = Seat(storage.address, step, attempt, 0, len(plans))
        return [
            replace(plan, storage_data={"attempt": attempt, "writer": writer, "num_writers": len(plans)})
            for writer, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write this rank's items, durable when it returns."""
        started = time.monotonic()
        storage, step = self._opened()
        chunks = [_piece(item, planner) for item in plan.items]
        table = {info.name: info for info, _ in chunks}  # a tensor may have several
        target = StepTarget(storage, Seat(storage.address, step, **plan.storage_data))
        write_pieces(target, [piece for _, piece in chunks], list(table.values()), None, awaits_commit=False)
        results = [
            WriteResult(index=item.index, size_in_bytes=piece.data.nbytes, storage_data=None)
            for item, (_, piece) in zip(plan.items, chunks, strict=True)
        ]
        self._write_s = time.monotonic() - started
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the step: all ranks have written. If it cannot be, their files are removed."""
        storage, step = self._opened()
        target = StepTarget(storage, self._seat)
        try:
            tensors, state = _described(metadata, {r.index.fqn: r.size_in_bytes for some in results for r in some})
            layout = ParallelLayout(dp=self._seat.num_writers)
            draft = Root(step, self._seat.attempt, layout, 1, tensor_table(tensors), (), {METADATA: state.to_json()})
            draft.check()
        except BaseException as error:
            discard(storage, self._seat, str(error))
            raise
        commit_parts(target, draft, lambda: FILES_DEADLINE_S, write_s=self._write_s)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a URL names a step."""
        return open_address(os.fspath(checkpoint_id))[1] is not None

    def _opened(self) -> tuple[Storage, int]:
        """Return the run's storage, and the step."""
        if self._url is None:
            raise UserError("DcpWriter has no URL", hint='DcpWriter("runs/a/step-000000100")')
        storage, step = open_address(self._url)
        if step is None:
            raise UserError(
                f"{self._url} is a run, and a save is one step of it",
                hint=f'DcpWriter(f"{storage.url}/step-{{step:09d}}")',
            )
        return storage, check_step(step)


class DcpReader(StorageReader):
    """Reads a step for DCP: of a run's URL the newest. Every rank has one; any committed step will do.

    A step that DCP did not save is a flat state of its tensors, under their names. With `certify` tensors that a rank
    loads whole are compared with the certificate of the save; `num_certified` counts them.
    """

    def __init__(self, url: str | os.PathLike[str] | None = None, *, certify: bool = True) -> None:
        self._url, self._certify, self.num_certified = None if url is None else os.fspath(url), certify, 0
        self._run: tuple[Run, int] | None = None
        self._root: Root | None = None
        self._state = DcpState()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take another URL, if there is one."""
        if checkpoint_id:
            self._url, self._run = os.fspath(checkpoint_id), None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return what the step holds: each tensor as one chunk, so that a part of it is read by one item."""
        try:
            return self._metadata()
        except UserError as error:
            if HIDES_REASONS:
                log(f"error: {error}")
            raise

    def _metadata(self) -> Metadata:
        if self._url is None:
            raise UserError("DcpReader has no URL", hint='DcpReader("runs/a/step-000000100")')
        run = Run(self._url)
        step = run.resolve()
        self._run, root = (run, step), run.root(step)
        self._root = root
        self._state = DcpState.of(root.metadata, f"{run.url}/{step_folder(step)}") or DcpState()
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, info in root.tensors.items():
            if name in self._state.blobs:
                entries[name] = BytesStorageMetadata()
                continue
            is_bytes = name in self._state.dtypes
            dtype = getattr(torch, self._state.dtypes[name]) if is_bytes else TORCH_DTYPES[info.dtype]
            shape = torch.Size(info.shape[:-1] if is_bytes else info.shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, [chunk])
        paths = self._state.paths
        planner_data = None if paths is None else {name: paths.get(name, (name,)) for name in entries}
        return Metadata(entries, planner_data=planner_data)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Fill what the plan's items want, verified."""
        assert self._run is not None, "read_metadata was called"
        assert self._root is not None, "read_metadata was called"
        run, step = self._run
        pieces, places = [], []
        for item in plan.items:
            name = item.storage_index.fqn
            info, dtype = self._root.tensors[name], self._state.dtypes.get(name)
            if item.type == LoadItemType.BYTE_IO:
                blob = torch.empty(info.shape, dtype=torch.uint8, device="cpu")
                pieces.append(Piece.whole(name, Box((0,), info.shape), blob))
                places.append((item, blob, blob))
                continue
            live = planner.resolve_tensor(item).detach()
            piece, read = _place(item, live, info, dtype)
            pieces.append(piece)
            places.append((item, live, read))
        with run.open(step) as reader:
            self.num_certified = restore_from(reader, pieces, certify=self._certify)
        for item, live, read in places:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(read.numpy().tobytes()))
                continue
            if read is not live:
                live.copy_(read)
            planner.commit_tensor(item, live)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a URL names a step, or a run that has one."""
        return next(Run(os.fspath(checkpoint_id)).newest_first(), None) is not None


def _place(item: ReadItem, live: torch.Tensor, info: TensorInfo, dtype: str | None) -> tuple[Piece, torch.Tensor]:
    """Return the piece that an item wants, and the tensor that it fills: the live one, or one to be copied to it.

    `dtype` is that of a tensor which is stored as bytes.
    """
    offset, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if dtype is not None:
        size = info.shape[-1]
        data = torch.empty((*lengths, size), dtype=torch.uint8, device="cpu")
        read = data.view(getattr(torch, dtype)).squeeze(-1)
        return Piece.whole(info.name, Box((*offset, 0), (*lengths, size)), data.view(-1)), read
    read = live
    if STORED.get(_name(live.dtype)) != info.dtype or not live.is_contiguous():
        read = torch.empty(lengths, dtype=TORCH_DTYPES[info.dtype], device="cpu")
    return Piece.whole(info.name, Box(offset, lengths), read.view(-1)), read


def _piece(item: WriteItem, planner: SavePlanner) -> tuple[TensorInfo, Piece]:
    """Return the tensor that an item is of, and its memory: the live one, or a copy of what is not contiguous."""
    name, data = item.index.fqn, planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO), "what DCP pickles"
        blob = torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
        return TensorInfo(name, "U8", (len(blob),), WHOLE_STATE), Piece.whole(name, Box((0,), (len(blob),)), blob)
    assert isinstance(data, torch.Tensor) and item.tensor_data is not None, "a tensor"  # noqa: PT018
    live, chunk = data.detach(), item.tensor_data.chunk
    info, box = _info(name, live.dtype, item.tensor_data.size), Box(tuple(chunk.offsets), tuple(chunk.sizes))
    if _name(live.dtype) not in STORED:
        box = Box((*box.offset, 0), (*box.shape, live.element_size()))
    return info, Piece.whole(name, box, flat_of(as_stored(live)))


def _described(metadata: Metadata, sizes: Mapping[str, int]) -> tuple[list[TensorInfo], DcpState]:
    """Return DCP's metadata as a tensor table and what that leaves out; `sizes` are those of pickled values."""
    tensors, dtypes, blobs = list[TensorInfo](), dict[str, str](), set[str]()
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            blobs.add(name)
            tensors.append(TensorInfo(name, "U8", (sizes[name],), WHOLE_STATE))
            continue
        dtype = stored.properties.dtype
        tensors.append(_info(name, dtype, stored.size))
        if _name(dtype) not in STORED:
            dtypes[name] = _name(dtype)
    return tensors, DcpState(_paths(metadata.planner_data), frozenset(blobs), dtypes)


def _info(name: str, dtype: torch.dtype, size: torch.Size) -> TensorInfo:
    stored = STORED.get(_name(dtype))
    shape = tuple(size) if stored else (*size, dtype.itemsize)
    return TensorInfo(name, stored or "U8", shape, WHOLE_STATE)


def _fault(item: WriteItem) -> str:
    """Return why no step can hold an item, empty if one can."""
    name, data = item.index.fqn, item.tensor_data
    try:
        info = TensorInfo(name, "U8", (1,), WHOLE_STATE)
        if data is not None:
            if data.properties.layout != torch.strided:
                return f"{name} is a tensor of layout {data.properties.layout}"
            info = _info(name, data.properties.dtype, data.size)
        check_tensor(info)
    except ValueError as error:
        return str(error)
    return ""


def _paths(planner_data: Any) -> dict[str, Any] | None:
    """Return where values are in the nested state; UserError for what a planner of its own has there."""
    if planner_data is None:
        return None
    try:
        return {str(name): checked_path(path) for name, path in planner_data.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"the planner's data is not a path for each name, and nothing else is recorded: {error}",
            hint="save with DCP's DefaultSavePlanner, or one that keeps its planner_data",
        ) from None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
