"""Reshard: rewrite a checkpoint for another layout, from the root's tensor table and placements alone.

One pass over all tensors in storage order reads each element once. The next slab is read while the last one is written.
Several processes may share the files: each writes its own, and whoever finds all of them there commits. The name of the
attempt follows from source and layout, so that a call that was killed is repeated with the same keys and the same
bytes: what is there whole stays. Memory: two slabs, one granule of each open file, the writers' buffers, and some 400
bytes for each chunk of source and target.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from ckptkit.check.verify import check_files
from ckptkit.format.keys import ROOT_KEY, step_folder
from ckptkit.format.part_copy import is_whole
from ckptkit.format.root import Root, attempt_of_head
from ckptkit.io.data_files import refuse_full
from ckptkit.io.double_buffer import ahead
from ckptkit.io.striping import Striper
from ckptkit.loading.chunk_source import RewriteSource, usual_threads
from ckptkit.loading.roots import at_once, committed_attempt, read_root, root_info, root_key
from ckptkit.model.layout import ParallelLayout
from ckptkit.model.ranks import Partition
from ckptkit.model.slab import SLAB_BYTES, Slab, slab_batches
from ckptkit.plan.certificate import joined
from ckptkit.rewrite.shard import Shard, shares
from ckptkit.rewrite.target_files import FileWriter, Loader, TargetFile, sealed_part, target_files
from ckptkit.runs.temporaries import remove_unless_written, temporaries
from ckptkit.writer.commit import NotCommitted, commit_root
from threefold.claim import folder_held
from threefold.cli import log
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import AlreadyExists, Storage
from threefold.storage.folders import local_root
from threefold.storage.local import keep_file, sync_name
from threefold.storage.stale_uploads import abort_stale_uploads

MAX_RANKS = 1 << 17  # each has a file
UPLOAD_MEMORY_BYTES = 256 << 20  # for all uploads at once, where the target is an object store
CLOCKS_DIFFER_S = 3600.0  # a server's from ours, at most
WHOLE = Shard()


@dataclass(frozen=True)
class ReshardReport:
    """What a reshard did, or would do, in its shard; bytes_read are read from data files, bytes_kept were there.

    `shards` are the files and bytes of each shard. The step is committed once `num_missing`, the files that other
    shards have still to write, is 0; `was_there` says that it was before. `certified`: all that was written is equal to
    what was saved, by the source's certificate. Of the source of a mapping `num_certified` tensors were read whole and
    are equal to what was saved.
    """

    url: str
    step: int
    source_layout: str
    target_layout: str
    num_files: int
    bytes_needed: int
    bytes_read: int
    bytes_written: int
    seconds: float
    dry_run: bool = False
    bytes_kept: int = 0
    shard: str = str(WHOLE)
    shards: tuple[tuple[int, int], ...] = ()
    num_missing: int = 0
    was_there: bool = False
    certified: bool = False
    num_certified: int = 0


def reshard(
    source: RewriteSource,
    storage: Storage,
    layout: ParallelLayout,
    *,
    step: int | None = None,
    shard: Shard = WHOLE,
    slab_bytes: int = SLAB_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
    dry_run: bool = False,
) -> ReshardReport:
    """Write `source` into `storage` as the ranks of `layout` would have saved it, and commit it.

    With a `shard` write its files alone, and commit if all others are there. UserError where the layout does not divide
    or another step is there, or another process makes the same one on a local disk; what the same call made is kept, be
    it a file or the step. On a failure nothing is committed. Without a shard and on a local disk what was written is
    removed then, unless it is not known whether the root was put. `progress` is called with the bytes done and the
    total. With `dry_run` all is checked and planned, but no data read and nothing written.
    """
    started = time.monotonic()
    root, step = source.root, source.root.step if step is None else step
    new_root = replace(root, step=step, layout=layout, attempt=source.attempt_for(layout), share=None)
    _check(replace(new_root, share=root.share), source.url)
    with contextlib.ExitStack() as stack:
        if not dry_run and root_info(storage, step) is None:
            folder = f"{step_folder(step)}/{new_root.attempt}"
            stack.enter_context(folder_held(storage, folder, is_shared=shard.count > 1))
        return _reshard(source, storage, new_root, shard, slab_bytes, progress, started=started, dry_run=dry_run)


def _reshard(
    source: RewriteSource, storage: Storage, new_root: Root, shard: Shard, slab_bytes: int,
    progress: Callable[[int, int], None], *, started: float, dry_run: bool,
) -> ReshardReport:  # fmt: skip
    """Do or plan what `reshard` was called for, its claim held."""
    step, layout = new_root.step, new_root.layout
    url, layouts = f"{storage.url}/{step_folder(step)}", (str(source.root.layout), str(layout))
    if (committed := _made_before(storage, new_root)) is not None:
        if not dry_run:
            _remove_hidden(storage, new_root)
        return ReshardReport(
            url, step, *layouts, len(committed.parts), 0, 0, 0, time.monotonic() - started, dry_run, shard=str(shard),
            was_there=True,
        )  # fmt: skip
    partition = Partition(list(new_root.tensors.values()), new_root.num_layers, layout)
    rewriting = _Rewriting(source, storage, new_root, target_files(partition, layout, new_root.attempt), shard)
    check_files(source)
    rewriting.find_kept(dry_run=dry_run)
    needed = read = sum(target.file.data_bytes for target in rewriting.left)
    missing = rewriting.num_missing
    if not dry_run:
        names = {name for target in rewriting.left for name in target.file.chunks.names}
        tensors = [info for info in partition.tensors if info.name in names]
        missing = rewriting.run(slab_batches(tensors, slab_bytes), lambda done: progress(done, needed))
        read = source.bytes_read
    written, kept = (sum(target.file.size_bytes for target in some) for some in (rewriting.left, rewriting.kept))
    return ReshardReport(
        url, step, *layouts, len(rewriting.own), needed, read, written, time.monotonic() - started, dry_run, kept,
        str(shard), rewriting.shards, missing, certified=rewriting.is_certified,
        num_certified=rewriting.num_certified,
    )  # fmt: skip


def _check(new_root: Root, url: str) -> None:
    """Raise UserError if a source, with another step and layout, cannot be made into a checkpoint."""
    replace(new_root, tensors={}).check()  # the tensors were checked as they were read
    new_root.check_whole(url)
    num_ranks = new_root.layout.world_size
    if num_ranks > MAX_RANKS:
        text = f"{new_root.layout} has {num_ranks:,} ranks, which is more files than the {MAX_RANKS:,} that are written"
        raise UserError(text, hint="a run reads any layout: fewer ranks do")


def _made_before(storage: Storage, new_root: Root) -> Root | None:
    """Return what an earlier call made of the same source, None if the step is not there; else UserError."""
    if root_info(storage, new_root.step) is None:
        return None
    committed = read_root(storage, new_root.step)
    if committed != replace(new_root, parts=committed.parts, certificate=new_root.certificate or committed.certificate):
        raise UserError(
            f"{storage.url} already holds step {new_root.step}",
            hint="choose another place, or remove that step first",
        )
    sync_name(storage, root_key(new_root.step))
    return committed


def _remove_hidden(
    storage: Storage, new_root: Root, keys: Collection[str] | None = None, *, is_alone: bool = False
) -> None:  # fmt: skip
    """Remove hidden files of an earlier try: of some keys, or once the step is committed of all and of its root.

    Unless this process alone may write, what another is writing stays. On S3 unfinished uploads, once the step is
    committed.
    """
    if keys is None:
        try:
            abort_stale_uploads(storage, f"{step_folder(new_root.step)}/{new_root.attempt}/", -CLOCKS_DIFFER_S)
        except UserError as error:
            log(f"warning: {error}")
    for temporary in temporaries(storage, new_root.step):
        is_ours = temporary.key.startswith(f"{new_root.attempt}/") if keys is None else temporary.key in keys
        with contextlib.suppress(StorageError):  # another process removed it
            if keys is None and temporary.key == ROOT_KEY:
                is_ours = attempt_of_head(storage.read(temporary.hidden_key)) in (new_root.attempt, None)
            if is_ours and is_alone:
                storage.delete([temporary.hidden_key])
            elif is_ours:
                remove_unless_written(storage, temporary)


class _Rewriting:
    """One shard's files of a reshard: those that are there, `kept`, and those that are `left` to write."""

    def __init__(
        self, source: RewriteSource, storage: Storage, new_root: Root, targets: Sequence[TargetFile], shard: Shard
    ) -> None:
        self._source, self._storage, self._new_root, self._targets = source, storage, new_root, targets
        self._folder = step_folder(new_root.step)
        # whether no other process may name the files
        self._is_alone = shard.count == 1 and local_root(storage) is not None
        self._is_committing = False
        owners = shares([target.file.size_bytes for target in targets], shard.count)
        groups: list[list[TargetFile]] = [[] for _ in range(shard.count)]
        for target, owner in zip(targets, owners, strict=True):
            groups[owner].append(target)
        self.own, self.kept, self.left = groups[shard.number], list[TargetFile](), list[TargetFile]()
        self.shards = tuple((len(group), sum(target.file.size_bytes for target in group)) for group in groups)
        self.num_missing = 0  # the files that other shards have to write
        self.is_certified, self.num_certified = False, 0

    def find_kept(self, *, dry_run: bool) -> None:
        """Find what is there of the own files; refuse a disk that cannot hold what is not. A dry run goes by sizes."""
        sizes, own = self._sizes(), {key for target in self.own for key in target.keys}
        if dry_run:
            is_kept = [self._is_there(target, sizes) for target in self.own]
        else:
            _remove_hidden(self._storage, self._new_root, own, is_alone=self._is_alone)
            with ThreadPoolExecutor(usual_threads()) as pool:
                is_kept = list(pool.map(lambda target: self._is_right(target, sizes), self.own))
        for target, is_there in zip(self.own, is_kept, strict=True):
            (self.kept if is_there else self.left).append(target)
        mine = {target.keys for target in self.own}
        missing = [each for each in self._targets if each.keys not in mine and not self._is_there(each, sizes)]
        self.num_missing = len(missing)
        left, others = (sum(target.file.size_bytes for target in some) for some in (self.left, missing))
        hidden = temporaries(self._storage, self._new_root.step) if missing else []
        begun = sum(each.size_bytes for each in hidden if each.key.startswith(f"{self._new_root.attempt}/"))
        refuse_full(self._storage, left + max(others - begun, 0))  # what others write has its room already

    def run(self, batches: Iterator[list[Slab]], progress: Callable[[int], None]) -> int:
        """Write what is left and commit if all files are there; return how many are not.

        On a failure remove what was written, but where other processes may share the files: those of shards, and of the
        same call on an object store. A step that one of them committed meanwhile is as good.
        """
        writer = FileWriter(self._storage, self._folder, usual_threads())
        try:
            if self.left:
                self._write(writer, batches, progress)
            return self._commit()
        except BaseException as error:
            writer.abort(self.left)
            if isinstance(error, StorageError) and not self._is_alone and self._is_committed_elsewhere():
                return 0
            may_be_named = self._is_committing and not isinstance(error, AlreadyExists | NotCommitted)
            if (self._is_alone or isinstance(error, CheckFailed)) and not may_be_named:
                with contextlib.suppress(StorageError):  # the first failure is the one to report
                    self._remove()
            raise

    def _write(self, writer: FileWriter, batches: Iterator[list[Slab]], progress: Callable[[int], None]) -> None:
        largest = max(target.file.size_bytes for target in self._targets)
        striper = Striper(warn=lambda text: log(f"warning: {text}"))
        striper.prepare(self._storage, f"{self._folder}/{self._targets[0].keys[0]}", largest, len(self._targets))
        loader = Loader(self._source, self.left)
        done = 0
        with ThreadPoolExecutor(1) as pool:  # whose thread ends before files are removed
            for areas in ahead(loader.load, batches, pool):
                done += writer.append(areas)
                progress(done)
        writer.finish(self.left)
        self.num_certified = self._source.check_read()

    def _commit(self) -> int:
        """Put the root if the files of all shards are there as planned; return how many are not."""
        sizes = self._sizes()
        if gone := [target for target in self.own if not self._is_there(target, sizes)]:
            raise StorageError(
                f"{self._storage.url}/{self._folder}/{gone[0].keys[0]} was removed while others were written",
                hint="let no two processes write the same files; run it again",
            )
        at_once(lambda target: target.part or sealed_part(self._storage, self._folder, target, sizes), self._targets)
        parts = [target.part for target in self._targets if target.part is not None]
        if len(parts) == len(self._targets):
            sums = ((target.file.chunks.tensors, target.sums) for target in self._targets)
            certificate, self.is_certified = joined(self._source.root, sums, f"what was made of {self._source.url}")
            sync_name(self._storage, f"{self._folder}/{self._targets[0].keys[0]}")  # other shards put some of them
            self._is_committing = True
            commit_root(self._storage, replace(self._new_root, parts=tuple(parts), certificate=certificate))
            _remove_hidden(self._storage, self._new_root, is_alone=self._is_alone)
        return len(self._targets) - len(parts)

    def _sizes(self) -> dict[str, int]:
        prefix = f"{self._folder}/{self._new_root.attempt}/"
        return {info.key: info.size_bytes for info in self._storage.list(prefix)}

    def _is_there(self, target: TargetFile, sizes: dict[str, int]) -> bool:
        data_key, index_key = (f"{self._folder}/{key}" for key in target.keys)
        return sizes.get(data_key) == target.file.size_bytes and index_key in sizes

    def _is_right(self, target: TargetFile, sizes: dict[str, int]) -> bool:
        """Return whether a file is there whole; it is durable then."""
        index = sealed_part(self._storage, self._folder, target, sizes)
        if index is None:
            return False
        for key in target.keys:
            keep_file(self._storage, f"{self._folder}/{key}")
        if not is_whole(self._storage, f"{self._folder}/{target.keys[0]}", index):
            target.part = None
        return target.part is not None

    def _is_committed_elsewhere(self) -> bool:
        """Return whether the same call, of another process, has committed the step meanwhile; it is durable then."""
        with contextlib.suppress(UserError):
            if committed_attempt(self._storage, self._new_root.step, self._new_root.attempt) == self._new_root.attempt:
                sync_name(self._storage, root_key(self._new_root.step))
                return True
        return False

    def _remove(self) -> None:
        if (
            committed_attempt(self._storage, self._new_root.step, self._new_root.attempt) != self._new_root.attempt
        ):  # by the same call, elsewhere
            mine = {f"{self._folder}/{key}" for target in self.left for key in target.keys}
            self._storage.delete([key for key in self._sizes() if key in mine])
