"""Unarchiving: a local token store of an archive or a store, in a folder or at a URL, every byte checked.

Files are fetched in threads, each in bounded ranges; memory is a few blocks a thread. A file gets its name once it is
whole, durable and of the manifest's checksum; killed, or ended by a fault, the same call continues with the next one.
"""

import os
from dataclasses import asdict
from pathlib import Path

from datakit.archives.archive_record import digest_of
from datakit.archives.file_threads import FileThreads, Report
from datakit.archives.store_source import SourceFile, StoreSource
from datakit.files.durable import blocks_of, durable_file, replace_durably
from datakit.store.assembly import Assembly, assembling, remove_work
from datakit.store.manifest import FILE_NAME, is_plain_folder
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, StorageError


def unarchive(
    source: str, output: str | os.PathLike[str], *, num_workers: int = 1, report: Report = lambda text: None
) -> TokenStore:
    """Make a local store of an archive or a plain store; UserError where the output holds anything else.

    CheckFailed names a file that is damaged at the source; those fetched before are kept for the next call.
    """
    threads = FileThreads(num_workers)
    opened, folder = StoreSource.open(source), Path(output)
    manifest = folder / FILE_NAME
    is_store = manifest.is_file() and is_plain_folder(os.fspath(output))  # not an archive, whose files have other names
    if is_store and b"".join(blocks_of(manifest)) == opened.manifest_bytes:
        remove_work(folder)
        return TokenStore.open(folder)
    made_of = {"manifest": asdict(digest_of(opened.manifest_bytes))}
    with assembling(folder, made_of, copy=True, keep_after=(StorageError, CheckFailed)) as assembly:

        def fetch(file: SourceFile) -> None:
            if not assembly.has(file.name, file.digest):
                _fetch(opened, file, assembly, threads)

        threads.map(fetch, opened.files, report)
        assembly.sync()
        replace_durably(manifest, opened.manifest_bytes)
    return TokenStore.open(folder)


def _fetch(source: StoreSource, file: SourceFile, assembly: Assembly, threads: FileThreads) -> None:
    target = assembly.work / file.name
    with durable_file(target) as stream:
        for block in threads.until_ended(source.blocks(file)):
            stream.write(block)
    assembly.adopt(target)
