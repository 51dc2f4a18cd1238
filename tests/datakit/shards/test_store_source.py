"""StoreSource: every byte of a store or an archive, wherever it lies; any damage is told and names its file."""

import dataclasses
import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datakit.files.durable import FileDigest
from datakit.format.archive_record import ArchiveRecord
from datakit.format.manifest import Manifest, content_checksum, is_plain_folder
from datakit.reports.verification import verify
from datakit.shards import store_source as module
from datakit.shards.store_source import StoreSource
from tests.datakit.conftest import files_of
from tests.datakit.support.archived import FRAME_BYTES, make_store
from threefold.errors import CheckFailed, StorageError, UserError
from threefold.storage import open_storage
from tools.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.usefixtures("short_pauses")


def upload(folder: Path, place: str) -> str:
    storage = open_storage(place)
    for name, content in files_of(folder).items():
        storage.write(name, content)
    return place


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def place_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place of each kind of storage, still empty."""
    if request.param == "s3":
        yield request.getfixturevalue("s3_url")
    else:
        name = uuid.uuid4().hex
        yield {"folder": str(tmp_path / name), "file": f"file://{tmp_path / name}", "memory": f"memory://{name}"}[
            request.param
        ]


@pytest.mark.parametrize("kind", ["store", "archive"])
def test_every_byte_comes_from_every_kind_of_place(archived: Path, place_of: str, kind: str) -> None:
    source = StoreSource.open(upload(archived / kind, place_of))
    sound = files_of(archived / "store")
    assert source.manifest_bytes == sound.pop("manifest.json")
    assert {file.name: b"".join(source.blocks(file)) for file in source.files} == sound
    assert (source.record is not None) == (kind == "archive")
    assert not verify(place_of)
    if source.record:
        file = source.files[0]
        assert source.open_packed(file).read(500, 1300) == sound[file.name][500:1300]


def test_what_is_no_store(archived: Path, place_of: str) -> None:
    with pytest.raises(UserError, match="is not a token store or archive"):
        StoreSource.open(place_of)
    upload(archived / "store", f"{place_of}/valid")
    with pytest.raises(UserError, match="is split") as caught:
        StoreSource.open(place_of)
    assert not verify(str(caught.value.hint))
    upload(archived / "archive", place_of)
    open_storage(place_of).delete(["manifest.json"])
    with pytest.raises(CheckFailed, match=r"manifest\.json is missing"):
        StoreSource.open(place_of)


def test_what_token_store_may_open(archived: Path, tmp_path: Path) -> None:
    assert is_plain_folder(str(archived / "store"))
    assert is_plain_folder(str(tmp_path))
    assert not is_plain_folder(str(archived / "archive"))
    assert not is_plain_folder(f"file://{archived / 'store'}")


@pytest.mark.parametrize("kind", ["store", "archive"])
def test_missing_and_shortened_files_are_told(archived: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(archived / kind, tmp_path / "x")
    suffix = ".zst" if kind == "archive" else ""
    (tmp_path / "x" / f"shard-000000-000.bin{suffix}").unlink()
    file = tmp_path / "x" / f"shard-000001-000.idx{suffix}"
    file.write_bytes(file.read_bytes()[:-1])
    faults = verify(f"file://{tmp_path / 'x'}")
    assert [fault.file for fault in faults] == [str(tmp_path / "x" / f"shard-000000-000.bin{suffix}"), str(file)]
    assert faults[0].message == "is missing"
    assert faults[1].message.startswith(f"has {file.stat().st_size} bytes, ")


@pytest.mark.parametrize("change", ["double", "other", "less"])
def test_records_that_do_not_fit_are_told(archived: Path, tmp_path: Path, change: str) -> None:
    """Every checksum holds, and yet it is no archive."""
    shutil.copytree(archived / "archive", tmp_path / "x")
    source = StoreSource.open(str(tmp_path / "x"))
    record, manifest = source.record, source.manifest
    assert record
    match change:
        case "double":
            manifest = dataclasses.replace(manifest, shards=manifest.shards[:1] * 2)
            message = r"manifest\.json names a shard twice"
        case "other":
            shard = dataclasses.replace(manifest.shards[0], name="other")
            manifest = dataclasses.replace(manifest, shards=(shard, *manifest.shards[1:]))
            message = r"archive\.json does not name the files"
        case _:
            record = dataclasses.replace(record, files=dict(list(record.files.items())[1:]))
            message = r"archive\.json does not name the files"
    record = dataclasses.replace(record, manifest=FileDigest.of(manifest.encode()))
    manifest.write(tmp_path / "x")
    (tmp_path / "x" / "archive.json").write_bytes(record.encode())
    with pytest.raises(CheckFailed, match=message):
        StoreSource.open(str(tmp_path / "x"))


def test_records_too_large_are_not_read(archived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("archive.json", "MAX_RECORD_BYTES"), ("manifest.json", "MAX_BYTES")):
        with monkeypatch.context() as patch:
            patch.setattr(module, limit, 100)
            with pytest.raises(CheckFailed, match=rf"{name} has \d+ bytes, more than the 100"):
                StoreSource.open(str(archived / "archive"))


def test_content_that_is_not_the_manifests_is_told(archived: Path, tmp_path: Path) -> None:
    """A sound compressed file of other content, recorded as such: only the manifest tells."""
    other = make_store(tmp_path / "s").path
    manifest = Manifest.read(other)
    wrong = dataclasses.replace(manifest.shards[1].bin, xxh3_64="0" * 16)
    shard = dataclasses.replace(manifest.shards[1], bin=wrong)
    changed = dataclasses.replace(manifest, shards=(manifest.shards[0], shard, *manifest.shards[2:]))
    shutil.copytree(archived / "archive", tmp_path / "x")
    record = StoreSource.open(str(tmp_path / "x")).record
    assert record
    changed.write(tmp_path / "x")
    record = dataclasses.replace(record, manifest=FileDigest.of(changed.encode()))
    (tmp_path / "x" / "archive.json").write_bytes(record.encode())
    [fault] = verify(tmp_path / "x")
    assert (
        str(fault) == f"{tmp_path / 'x' / 'shard-000001-000.bin.zst'}: is damaged: its content's checksum does not hold"
    )


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["503", "reset", "cut"])
def test_passing_faults_of_s3_are_survived(
    archived: Path, s3_proxy: FaultProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    source = StoreSource.open(upload(archived / "archive", s3_url))
    [file] = [file for file in source.files if file.name == "shard-000001-000.bin"]
    sound = (archived / "store" / file.name).read_bytes()
    for times in (1, 3, 5):  # more than the client itself repeats
        s3_proxy.num_faults = 0
        s3_proxy.fault = Fault(kind, method="GET", times=times, after_bytes=100)
        assert b"".join(source.blocks(file)) == sound
        assert s3_proxy.num_faults == times


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["503", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("reset", "stall"))])
def test_lasting_faults_of_s3_are_one_error_and_no_hang(
    archived: Path, s3_proxy: FaultProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    monkeypatch.setenv("THREEFOLD_STORAGE_TIMEOUT_S", "1")
    source = StoreSource.open(upload(archived / "store", s3_url))
    s3_proxy.fault = Fault(kind, after_bytes=10)
    with pytest.raises(StorageError, match=s3_url):
        list(source.blocks(source.files[0]))


def test_a_bit_that_flips_on_the_way_is_caught(archived: Path, s3_proxy: FaultProxy, s3_url: str) -> None:
    source = StoreSource.open(upload(archived / "archive", s3_url))
    [file] = [file for file in source.files if file.name == "shard-000001-000.bin"]
    s3_proxy.fault = Fault("flip", method="GET", skip=1, times=1, after_bytes=200)
    assert b"".join(source.blocks(file)) == (archived / "store" / file.name).read_bytes()
    assert s3_proxy.num_faults == 1
    s3_proxy.fault = Fault("flip", method="GET", skip=1, after_bytes=200)
    with pytest.raises(CheckFailed, match=r"shard-000001-000\.bin\.zst: frame \d+ is damaged"):
        list(source.blocks(file))


def test_damaged_frames_are_named(archived: Path, tmp_path: Path) -> None:
    shutil.copytree(archived / "archive", tmp_path / "x")
    file = tmp_path / "x" / "shard-000001-000.bin.zst"
    sound = file.read_bytes()
    source = StoreSource.open(str(tmp_path / "x"))
    [entry] = [entry for entry in source.files if entry.name == "shard-000001-000.bin"]
    starts = [0]
    for _, packed in source.open_packed(entry).packed_frames():
        starts.append(starts[-1] + len(packed))
    assert len(starts) > 10
    for frames in ([0], [2], [1, 3, len(starts) - 2], list(range(len(starts) - 1))):
        damaged = bytearray(sound)
        for frame in frames:
            damaged[starts[frame + 1] - 1] ^= 1  # the frame's checksum by zstd
        file.write_bytes(damaged)
        [fault] = verify(tmp_path / "x")
        assert fault.file == str(file)
        if len(frames) == 1:
            assert fault.message.startswith(f"frame {frames[0]} is damaged")
        else:
            named = ", ".join(map(str, frames[:10])) + ", ..." * (len(frames) > 10)
            assert fault.message == f"{len(frames)} frames are damaged: {named}"


def outcome(folder: Path) -> tuple[bool, str]:
    """Whether all checks of an archive pass, and what was said where they do not."""
    try:
        faults = verify(folder)
    except (CheckFailed, UserError, StorageError) as error:
        return False, error.message
    return not faults, " ".join(map(str, faults))


NAMES = [
    "archive.json", "manifest.json",
    *(f"shard-00000{number}-000.{kind}.zst" for number in (0, 1) for kind in ("bin", "idx", "origin")),
]  # fmt: skip
damages = st.one_of(
    st.tuples(st.just("flip"), st.integers(0, 2**16), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.integers(0, 2**16), st.just(0)),
    st.tuples(st.just("grow"), st.integers(1, 100), st.just(0)),
    st.tuples(st.just("replace"), st.binary(max_size=400), st.just(0)),
    st.tuples(st.just("exchange"), st.sampled_from(NAMES), st.just(0)),
)


def damage(folder: Path, name: str, what: tuple[str, object, int]) -> None:
    """Change one file so that its bytes are others."""
    content = bytearray((folder / name).read_bytes())
    match what:
        case ("flip", int(at), bit):
            content[-1 - at % len(content)] ^= 1 << bit
        case ("cut", int(at), _):
            del content[at % len(content) :]
        case ("grow", int(more), _):
            content += bytes(more)
        case ("replace", bytes(other), _):
            content[:] = other
        case ("exchange", str(other), _):
            content[:] = (folder / other).read_bytes()
    (folder / name).write_bytes(content)


def check_one_damage(folder: Path, name: str, what: tuple[str, object, int]) -> None:
    """A damaged archive is never taken for a sound one, and what is said names the file."""
    target = folder / "fuzzed"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder / "archive", target)
    before = (target / name).read_bytes()
    damage(target, name, what)
    if (target / name).read_bytes() == before:
        return
    is_sound, said = outcome(target)
    if is_sound:  # white space after archive.json's last brace alone is no matter
        assert name == "archive.json"
        assert (target / name).read_bytes().split() == before.split()
    else:
        assert f"{target / name}" in said


@given(name=st.sampled_from(NAMES), what=damages)
def test_no_damage_passes_or_crashes(archived: Path, name: str, what: tuple[str, object, int]) -> None:
    check_one_damage(archived, name, what)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places_in(value: object) -> list[tuple[str | int, ...]]:
    """The ways to every value in a JSON document."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(), *((key, *rest) for key, inner in parts for rest in places_in(inner))]


@given(data=st.data(), name=st.sampled_from(["archive.json", "manifest.json"]), value=json_values)
def test_records_with_sound_checksums_and_any_content_are_read_or_refused(
    archived: Path, data: st.DataObject, name: str, value: object
) -> None:
    target = archived / "forged"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(archived / "archive", target)
    record = json.loads((target / "archive.json").read_bytes())
    manifest = json.loads((target / "manifest.json").read_bytes())
    changed = record if name == "archive.json" else manifest
    *way, last = data.draw(st.sampled_from(places_in(changed)[1:]))
    inner = changed
    for part in way:
        inner = inner[part]
    inner[last] = value
    for content, file in ((manifest, "manifest.json"), (record, "archive.json")):
        if name == "manifest.json":  # the archive's record goes with it
            record["manifest"] = asdict(FileDigest.of((target / "manifest.json").read_bytes()))
        content["checksum"] = content_checksum(json.loads(json.dumps(content)))
        (target / file).write_text(json.dumps(content))
    is_sound, said = outcome(target)
    assert is_sound or str(target) in said


def test_deep_nesting_is_damage(archived: Path, tmp_path: Path) -> None:
    for depth in (300, 3000):
        for name in ("archive.json", "manifest.json"):
            content = json.loads((archived / "archive" / name).read_bytes()) | {"settings": "DEEP"}
            data = json.dumps(content).replace('"DEEP"', "[" * depth + "]" * depth)
            with pytest.raises(CheckFailed, match="damaged"):
                (ArchiveRecord if name == "archive.json" else Manifest).parse("x", data.encode())


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=5000)
@given(name=st.sampled_from(NAMES), what=damages)
def test_no_damage_passes_or_crashes_in_many_tries(archived: Path, name: str, what: tuple[str, object, int]) -> None:
    check_one_damage(archived, name, what)


def test_frames_are_small_here(archived: Path) -> None:
    record = StoreSource.open(str(archived / "archive")).record
    assert record
    assert record.frame_bytes == FRAME_BYTES
