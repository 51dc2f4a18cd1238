"""What a rank reads: token stores blended into steps of micro-batches, as tensors on its device."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from datakit import Blend, Cursor, HostBatch, Loader, Recorded, open_tokenizer
from threefold.errors import UserError
from trainer.config import Config
from trainer.config.resolve import batch_sizes
from trainer.model.microbatch import Batch

Int64s = npt.NDArray[np.int64]


def open_blend(config: Config, recorded: Recorded | None = None) -> Blend:
    """Return the blend of `[data]`: what a run goes on with, or, with nothing recorded, a draft to check it by."""
    return config.data.open(config.train, table="data", recorded=recorded, is_draft=recorded is None)


def open_valid_blend(config: Config, report: Callable[[str], None] = lambda _: None) -> Blend:
    """Return the blend of `[data.valid]`; `report` takes a line on an order that only older runs have."""
    valid = config.data.valid
    if valid.order == "megatron":
        return config.data.open_valid(config.train, valid.order_samples or valid.num_samples)
    blend = valid.open(dataclasses.replace(config.train, seed=valid.seed or 0), table="data.valid")
    if blend.copies and not valid.copies_differ:
        report(
            "validation reads, as the run began, copies of a store in one order, so that their rows come twice: "
            f"{', '.join(blend.copies)}; --data.valid.orders-copies true reads what new runs do"
        )
    return blend


def with_vocabulary(config: Config) -> Config:
    """Return the configuration with its vocabulary's size; UserError if stores and tokenizer file do not agree."""
    faults: list[str] = []
    fingerprints: dict[str, str] = {}
    vocab_size = config.model.vocab_size
    trained_on = [path for path, weight in config.data.plan.final.items() if weight or os.path.exists(path)]
    for path in (*trained_on, *config.data.valid_stores):
        identity = config.data.tokenizer_of(path)
        fingerprints[path] = identity.fingerprint
        vocab_size = vocab_size or identity.vocab_size
        if identity.vocab_size > vocab_size:
            faults.append(f"{path} has a vocabulary of {identity.vocab_size}, more than model.vocab_size {vocab_size}")
    if config.data.tokenizer and not config.data.any_tokenizer:
        fingerprints[config.data.tokenizer] = open_tokenizer(config.data.tokenizer).fingerprint
    if len(set(fingerprints.values())) > 1:
        faults.append("not all are of one tokenizer:")
        faults += [f"  {fingerprint}  {path}" for path, fingerprint in fingerprints.items()]
    if faults:
        hint = f"datakit inspect {next(iter(fingerprints))} names a store's tokenizer"
        raise UserError("\n  ".join(["stores and tokenizer do not fit together:", *faults]), hint=hint)
    if not vocab_size:
        raise UserError("nothing names the vocabulary's size", hint="--data.stores DIR, or --model.vocab-size N")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def open_loader(
    blend: Blend,
    config: Config,
    dp_rank: int,
    cursor: Mapping[str, Any] | None,
    recorded: Recorded | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Loader:
    """Return the training stream of one data-parallel rank.

    UserError if the blend does not continue the cursor's; what is recorded shows where it differs. `report` takes a
    line on an order of samples that only older runs have.
    """
    start = None if cursor is None else Cursor.from_json(cursor)
    if start is not None and recorded is not None:
        blend = blend.following(start, report)
        blend.check(start, recorded.record)
    return Loader(
        blend,
        config.train.micro_batch_size,
        batch_sizes(config),
        dp_rank,
        config.parallel.dp,
        start,
        config.data.batch_options,
    )


def token_fault(host: HostBatch, samples: Int64s, blend: Blend, vocab_size: int) -> UserError | None:
    """Return an error that names the first token outside the vocabulary, None if there is none.

    `samples` are the global numbers of the batch's rows. On a device such a token fails in a kernel that names nothing,
    or, if the vocabulary is cut, is embedded as zeros.
    """
    # as unsigned numbers negative ones are large
    if all(int(ids.view(np.uint64).max()) < vocab_size for ids in (host.tokens, host.labels)):
        return None
    ids = np.concatenate([host.tokens, host.labels[..., -1:]], -1).reshape(samples.size, -1)
    row, place = np.argwhere((ids < 0) | (ids >= vocab_size))[0].tolist()
    sample = int(samples.flat[row])
    (source,), (start,) = blend.addresses([sample])
    store, seq_length = blend.stores[source], blend.sources.seq_lengths[source]
    token, path = store.token_at(start // seq_length, place, seq_length), store.place
    whole = f"--sample {start // seq_length} --seq-length {seq_length}"
    return UserError(
        f"{path} holds token {ids[row, place]} at address {token:,}, in sample {sample:,} of the stream, but "
        f"the vocabulary has {vocab_size:,} tokens",
        hint=f"datakit inspect {path} "
        + (whole if store.packing == "concat" else f"--document {store.document_at(token)}"),
    )


def harmless(shape: tuple[int, int, int], first_sample: int, *, has_bounds: bool) -> HostBatch:
    """Return a step of token 0 alone for one that cannot be read; with `has_bounds` each row is a document."""
    bounds = np.arange(0, math.prod(shape) + 1, shape[-1], dtype=np.int32) if has_bounds else None
    return HostBatch(np.zeros(HostBatch.num_bytes(shape), np.uint8), shape, first_sample, (), bounds)


def spoilt(batch: Batch) -> Batch:
    """Return a batch that is harmless to read in place of one that is not; its step's loss is NaN, on all ranks."""
    zeros, nans = torch.zeros_like(batch.tokens), torch.full_like(batch.loss_mask, torch.nan)
    return dataclasses.replace(batch, tokens=zeros, labels=zeros, loss_mask=nans)


def to_device(host: HostBatch, device: torch.device) -> Batch:
    """Return a batch of datakit as tensors on the device, views of one buffer; on a CPU that is the batch's own.

    Out of pinned memory the copy to a GPU is only enqueued: the batch may not change before it is done.
    """
    buffer, shape = torch.from_numpy(host.buffer).to(device, non_blocking=True), host.shape
    tokens, labels, positions, loss_mask = HostBatch.split(buffer, shape, torch.int64, torch.float32)
    if host.is_tokens_only:
        positions = torch.arange(shape[-1], device=device).expand(shape)
        loss_mask = torch.ones((), device=device).expand(shape)
    documents = None if host.cu_seqlens is None else _documents(host, device)
    return Batch(tokens, labels, positions, loss_mask, host.first_sample, documents)


def _documents(host: HostBatch, device: torch.device) -> tuple[tuple[torch.Tensor, int], ...]:
    """Return the bounds of documents of each micro-batch on the device, by one copy that is only enqueued."""
    count = host.shape[0]
    parts = [host.documents(number, count) for number in range(count)]
    bounds = torch.from_numpy(np.concatenate([part for part, _ in parts]))
    if device.type == "cuda":
        bounds = bounds.pin_memory()
    views = bounds.to(device, non_blocking=True).split([len(part) for part, _ in parts])
    return tuple((view, longest) for view, (_, longest) in zip(views, parts, strict=True))


class StepReader:
    """A rank's steps, in two buffers of host memory by turns, pinned for a GPU; owned by the thread that trains.

    While a step is trained, the Loader's thread makes the next one in the other buffer. That waits until the buffer's
    last copy to the GPU is done. On a CPU a step's tensors are views of its buffer, good until the next `to_device`.
    Where rows change their length, buffers of the new size take the place of the old ones.
    """

    def __init__(self, loader: Loader, device: torch.device) -> None:
        self._loader, self._device, self._turn = loader, device, 0
        self._has_bounds = False  # of documents, in the step before
        self._buffers: list[npt.NDArray[np.uint8]] = [np.empty(0, np.uint8)] * 2
        self._copied = [torch.cuda.Event() for _ in range(2)] if device.type == "cuda" else []

    def next_step(self) -> HostBatch:
        """Return the next step of the stream."""
        return self._loader.next_step(out=self._buffer(self._turn))

    def to_device(self, host: HostBatch) -> Batch:
        """Return the step that `next_step` returned as tensors on the device, and let the one after it be read."""
        batch = to_device(host, self._device)
        other = 1 - self._turn
        if self._copied:
            self._copied[self._turn].record(torch.cuda.current_stream(self._device))
            self._copied[other].synchronize()
        self._loader.prefetch(out=self._buffer(other))
        self._turn = other
        return batch

    def next_batch(
        self, fault_of: Callable[[HostBatch], UserError | None]
    ) -> tuple[HostBatch, Batch, Exception | None]:
        """Return the next step and its tensors, and what is wrong with it: then a spoilt step takes its place.

        So the ranks whose rows are sound are not left alone in the step, and all learn of the fault where it is judged.
        """
        try:
            host = self.next_step()
        except Exception as error:
            first = self._loader.cursor.num_samples
            host = harmless(self._loader.shape, first, has_bounds=self._has_bounds)
            return host, spoilt(to_device(host, self._device)), error
        self._has_bounds = host.cu_seqlens is not None
        fault: Exception | None = None
        try:
            fault = fault_of(host)
        except Exception as error:
            fault = error
        batch = self.to_device(host)
        return host, batch if fault is None else spoilt(batch), fault

    def _buffer(self, turn: int) -> npt.NDArray[np.uint8]:
        num_bytes = self._loader.num_bytes
        if len(self._buffers[turn]) != num_bytes:
            pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._buffers[turn] = pinned.numpy()
        return self._buffers[turn]
