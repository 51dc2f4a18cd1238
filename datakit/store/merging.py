"""Merge: one store of the shards of several, in the order given, without tokenizing again.

Costs a hard link a file, whatever its size, or with `copy` one read and one write; to a URL one upload. Shards keep
their bytes, so documents keep their sources and lines; they get new names that sort in the new order.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from datakit.files.durable import FileDigest
from datakit.format.manifest import FILE_NAME, Manifest
from datakit.format.output import ASSEMBLY_NOTE, Output
from datakit.format.tokenizer_copy import damaged
from datakit.store.claim import claim
from datakit.store.token_store import TokenStore, open_made
from threefold.errors import UserError, listed, quoted


def merge(
    stores: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str], *, copy: bool = False
) -> TokenStore:
    """Make the store of all shards of these stores in a folder or URL; raise UserError if dtypes or tokenizers differ.

    The same call continues after a kill, and returns the store if that is complete. `copy` is for a folder.
    """
    opened, place = [TokenStore.open(path) for path in stores], Output(os.fspath(output), ASSEMBLY_NOTE)
    manifest = plan_merge([(str(store.path), store.manifest) for store in opened])
    sources = [files for store in opened for entry in store.manifest.shards for files in store.files(entry)]
    if place.manifest() == manifest:
        place.settle()
        return open_made(place.place, manifest)
    with claim(place, manifest.as_json()):
        for (source, digest), name in zip(sources, manifest.files(), strict=True):
            place.place_file(source, name, digest, copy=copy)
        for name, digest in manifest.tokenizer_files.items():
            place.place_file(sound_copy(opened, name, digest), name, digest, copy=copy)
        place.commit({FILE_NAME: manifest.encode()})
    return open_made(place.place, manifest)


def sound_copy(stores: Sequence[TokenStore], name: str, digest: FileDigest) -> Path:
    """Return where the first store with a sound copy has a file of its tokenizer; CheckFailed if none has one."""
    keepers = [store for store in stores if store.manifest.tokenizer_files.get(name) == digest]
    for store in keepers:
        content = store.shards.read_small(name)
        if content is not None and FileDigest.of(content) == digest:
            return store.path / name
    place = keepers[0].place
    way_out = f"cp FILE {quoted(f'{place}/{name}')} puts it back, if FILE is the tokenizer that made the store"
    raise damaged(place, name, "is missing or damaged", way_out)


def plan_merge(stores: Sequence[tuple[str, Manifest]]) -> Manifest:
    """Return the manifest of the merged store of these, each with its name; raise UserError if they do not fit."""
    assert stores, "a merge of no stores"
    (first_name, first), *others = stores
    faults = [f"{name}: {'; '.join(found)}" for name, manifest in others if (found := _differences(manifest, first))]
    if faults:
        raise UserError(
            f"{len(faults)} of {len(stores)} stores do not fit {first_name}:{listed(faults, most=len(faults))}",
            hint="datakit preprocess INPUT... --output STORE --tokenizer tok.json, one for all",
        )
    shards = [shard for _, manifest in stores for shard in manifest.shards]
    return Manifest(
        first.dtype,
        first.tokenizer,
        tuple(replace(shard, name=f"shard-{number:06}-000") for number, shard in enumerate(shards)),
        _merged_settings([manifest for _, manifest in stores]),
        dict(sorted(sum((Counter(manifest.skipped) for _, manifest in stores), Counter[str]()).items())),
        next((manifest.tokenizer_files for _, manifest in stores if manifest.tokenizer_files), {}),
    )


def _differences(manifest: Manifest, first: Manifest) -> list[str]:
    """Sentences on what must be the same for a merge but differs."""
    pairs = zip(_identity(manifest).items(), _identity(first).values(), strict=True)
    return [f"its {name} is {own!r}, not {asked!r}" for (name, own), asked in pairs if own != asked]


def _identity(manifest: Manifest) -> dict[str, Any]:
    tokenizer = {f"tokenizer's {name}": value for name, value in asdict(manifest.tokenizer).items()}
    return {"dtype": manifest.dtype} | tokenizer


def _merged_settings(manifests: list[Manifest]) -> dict[str, Any]:
    """Return the settings of all stores, and under `merged` each store's fingerprint, counts and other settings."""
    first = manifests[0].settings
    common = {
        name: value
        for name, value in first.items()
        if name != "merged"
        and all(name in manifest.settings and manifest.settings[name] == value for manifest in manifests)
    }
    return common | {
        "merged": [
            {
                "fingerprint": manifest.fingerprint,
                "num_shards": len(manifest.shards),
                "settings": {name: value for name, value in manifest.settings.items() if name not in common},
            }
            for manifest in manifests
        ]
    }
