"""Unarchiving: a local token store of an archive or a store, in a folder or at a URL, every byte checked.

Files are fetched in threads, each in bounded ranges; memory is a few blocks a thread. A file gets its name once it is
whole, durable and of the manifest's checksum; killed, or ended by a fault, the same call continues with the next one.
"""

import os
from dataclasses import asdict
from pathlib import Path

from datakit.files.durable import FileDigest, durable_file, url_behind
from datakit.format.manifest import FILE_NAME, is_plain_folder
from datakit.format.output import ASSEMBLY_NOTE, Output
from datakit.shards.store_source import SourceFile, StoreSource
from datakit.store.claim import claim
from datakit.store.file_threads import FileThreads, Report
from datakit.store.token_store import TokenStore
from threefold.errors import CheckFailed, StorageError, UserError, quoted


def unarchive(
    source: str, output: str | os.PathLike[str], *, num_workers: int = 1, report: Report = lambda text: None
) -> TokenStore:
    """Make a local store of an archive or a plain store; UserError if the output holds anything else.

    CheckFailed names a file that is damaged at the source; those fetched before are kept for the next call.
    """
    threads = FileThreads(num_workers)
    opened, folder = StoreSource.open(source), Path(output)
    if url := url_behind(folder):
        raise UserError(
            f"{url} is not a local folder, and only there can this be made",
            hint=f"choose a folder as --output; for a store, then datakit archive FOLDER --output {quoted(url)}",
        )
    place = Output(os.fspath(output), ASSEMBLY_NOTE)
    # an archive has such a manifest too, and files of other names
    if is_plain_folder(os.fspath(output)) and place.read(FILE_NAME) == opened.manifest_bytes:
        place.settle()
        return TokenStore.open(folder)

    def write(source: StoreSource, file: SourceFile, target: Path) -> None:
        with durable_file(target) as stream:
            stream.writelines(threads.until_ended(source.blocks(file)))

    def fetch(file: SourceFile) -> None:
        if not place.has(file.name, file.digest):
            target = place.scratch / file.name
            opened.checked(file, lambda source: write(source, file, target))
            place.adopt("", [target])

    made_of = {"manifest": asdict(FileDigest.of(opened.manifest_bytes))}
    with claim(place, made_of, keeps=(StorageError, CheckFailed)):
        threads.map(fetch, opened.files, report)
        for name, digest in opened.manifest.tokenizer_files.items():
            if not place.has(name, digest):
                place.write(name, opened.copied(name, digest))
        place.commit({FILE_NAME: opened.manifest_bytes})
    return TokenStore.open(folder)
