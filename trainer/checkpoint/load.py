"""Restoring one step into an engine: with whom, which tensors it must hold, what is refused, what counts as damage."""

import dataclasses
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ckptkit import Alone, Exchange, HfFolder, NodeExchange, Piece, Root, Run, TensorInfo, on_all, restore_from
from threefold.errors import UserError, listed, quoted
from trainer.checkpoint.mapping import FILES, MASTER, READ_DTYPES, restored_pieces, tensor_table
from trainer.checkpoint.resets import refuse_reset, reset_of, voids_of
from trainer.config import Config
from trainer.engine import Engine
from trainer.job.ranks import Ranks
from trainer.loss_scale import recorded_in

# of the model's configuration
ROUTING = ("experts_per_token", "router_score", "router_norm_topk", "router_scale")
UNSEEN_IN_SHAPES = ("num_heads", "num_kv_heads", "head_size", "norm", "position", "activation", *ROUTING)


@contextmanager
def open_exchange(ranks: Ranks, config: Config) -> Iterator[Exchange | None]:
    """Open the exchange that `checkpoint.exchange` names, None if each rank reads for itself; all ranks call this."""
    kind, local_size = config.checkpoint.exchange, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    job = ranks.broadcast(secrets.token_hex(8))
    if kind == "job" and ranks.world_size > 1:
        yield ranks.exchange
    elif kind == "node" and local_size > 1:
        name = f"{job}-{os.environ.get('GROUP_RANK', '0')}"  # nodes of a test may be one host
        local_rank, deadline_s = int(os.environ["LOCAL_RANK"]), config.parallel.timeout_s
        with ranks.on_all(lambda: NodeExchange(local_rank, local_size, name, deadline_s=deadline_s)) as exchange:
            yield exchange
    else:
        yield None


def restore_step(engine: Engine, run: Run | HfFolder, step: int, exchange: Exchange | None = None) -> Root:
    """Read one step into the engine, together with the other ranks of an exchange, which all call this.

    An engine that only infers takes parameters of another dtype, converted; one that trains takes them so from a step
    without optimizer state, and refuses them from others. CheckFailed if the step is damaged, UserError with a report
    of each tensor if it is of another model, or if it is of another optimizer and `optim.allow_reset` is not set.
    """
    engine.store.join_masters()  # where no piece is, as in vocabulary padding, they stay as they are
    with run.open(step, exchange) as reader:
        root = reader.root
        on_all(exchange or Alone(), lambda: refuse_another_model(engine, root, reader.url))
        is_whole = engine.with_optimizer and has_optimizer(root)
        reset = reset_of(engine.table, root.tensors) if is_whole else None
        allowed = engine.config.optim.allow_reset
        on_all(exchange or Alone(), lambda: refuse_reset(reset, root, reader.url, allowed=allowed))
        pieces = restored_pieces(engine.store, root.tensors, with_moments=is_whole)
        pieces += [piece for piece in engine.balance.pieces() if piece.name in root.tensors]  # else zeros, as at first
        tensors = expected_tensors(engine, root, with_moments=is_whole)
        if is_whole:
            if reset is not None:
                engine.store.clear_moments()
                pieces = [piece for piece in pieces if piece.name not in set(reset.zeroed)]
                tensors = [info for info in tensors if info.name not in set(reset.zeroed)]
                tensors += [root.tensors[name] for name in reset.unread]
            restore_from(reader, pieces, tensors=tensors)
            engine.verdict.begin(voids_of(root, reset), recorded_in(root.metadata))
        else:
            tensors = [dataclasses.replace(info, dtype=stored_dtype(root, info)) for info in tensors]
            stored = in_dtypes(pieces, tensors)
            restore_from(reader, stored, tensors=tensors)
            for live, read in zip(pieces, stored, strict=True):
                if read is not live:
                    live.data.copy_(read.data)
            if engine.with_optimizer:  # which a damaged step may have filled
                engine.store.clear_moments()
        return root


def has_optimizer(root: Root) -> bool:
    """Return whether a step holds optimizer state: an imported model has parameters alone."""
    return any(name.startswith("optim.") for name in root.tensors)


def expected_tensors(engine: Engine, root: Root, *, with_moments: bool) -> list[TensorInfo]:
    """Return what a checkpoint of the engine's model holds, parameters under the names that the root has them under.

    Files of an imported model are expected as they are.
    """
    prefix = MASTER if MASTER + "embed.weight" in root.tensors else ""
    infos = [info for name, info in root.tensors.items() if name.startswith(FILES)]
    infos += [info for info in engine.balance.tensors if info.name in root.tensors]
    for info in tensor_table(engine.table, engine.dtype, engine.moments):
        name = info.name.removeprefix(MASTER)
        if name in engine.table:
            infos.append(dataclasses.replace(info, name=prefix + name))
        elif with_moments:
            infos.append(info)
    return infos


def stored_dtype(root: Root, info: TensorInfo) -> str:
    """Return the dtype that a step has a tensor in, if parameters can be converted from it.

    Else the one that is wanted.
    """
    found = root.tensors.get(info.name)
    return found.dtype if found is not None and found.dtype in READ_DTYPES.values() else info.dtype


def in_dtypes(pieces: Sequence[Piece], tensors: Sequence[TensorInfo]) -> list[Piece]:
    """Return the pieces in their tensors' dtypes: those of another one with memory of their own."""
    dtypes = {name: dtype for dtype, name in READ_DTYPES.items()}
    wanted = {info.name: dtypes[info.dtype] for info in tensors if info.dtype in dtypes}
    return [
        piece
        if piece.data.dtype == wanted[piece.name]
        else dataclasses.replace(piece, data=torch.empty_like(piece.data, dtype=wanted[piece.name]))
        for piece in pieces
    ]


def refuse_another_model(engine: Engine, root: Root, where: str) -> None:
    """Raise UserError if a step was saved by a model of other parameters, or one that uses the same in another way.

    It begins with the settings that differ, as `model.hidden_size 512 -> 768`, where parameters of other shapes follow
    from these.
    """
    trained, model = root.metadata.get("config", {}).get("model", {}), engine.config.model
    changed = {
        name: f"model.{name} {value} -> {getattr(model, name)}"
        for name, value in trained.items()
        if getattr(model, name, value) != value
    }
    faults = [
        f"model.{name}: it was trained with {trained[name]}, configured is {getattr(model, name)}"
        for name in UNSEEN_IN_SHAPES
        if name in changed
    ]
    biases = {info.name for info in engine.balance.tensors}
    for name, info in root.tensors.items():
        row = engine.table.get(name.removeprefix(MASTER))
        is_parameter = not name.removeprefix(MASTER).startswith(("optim.", FILES)) and name not in biases
        if is_parameter and (row is None or (row.placement.tied_to and not info.placement.tied_to)):
            faults.append(f"{name}: {info.dtype} {list(info.shape)}, which the configured model does not have")
    misfits = list(shape_misfits(engine, root)) if changed else []
    if faults or misfits:
        settings = f" {', '.join(changed.values())}" if misfits else ""
        hint = f"train it as it is, or another with --save NEW; ckptkit inspect {quoted(where)} shows it"
        if "num_experts" in changed:
            hint += f"; ckptkit reshard {quoted(where)} NEW --map FILE adds experts by its rules [[grow]]"
        raise UserError(f"{where} is of another model:{settings}{listed([*faults, *misfits])}", hint=hint)


def shape_misfits(engine: Engine, root: Root) -> Iterator[str]:
    """Yield a sentence for each parameter of the configured model that a step has not, or has in another shape."""
    for name, row in engine.table.items():
        info = root.tensors.get(MASTER + name) or root.tensors.get(name)
        if info is None:
            yield f"{name}: missing in the checkpoint, wanted {list(row.shape)}"
        elif info.shape != tuple(row.shape):
            yield f"{name}: {info.dtype} {list(info.shape)}, wanted {info.dtype} {list(row.shape)}"
