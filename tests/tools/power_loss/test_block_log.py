"""What a log of a disk's writes and flushes says that a loss of power may leave."""

import random
from pathlib import Path

import pytest

from tools.power_loss.block_log import FLUSH, SAID, WRITE, BlockLog, LogEntry, head, pieces, read_log
from tools.power_loss.mounted import lay, obstacle

FIRST, SECOND = LogEntry(WRITE, 0, b"a" * 4096), LogEntry(WRITE, 4096, b"b" * 8192)
SAYS = LogEntry(SAID, 1 << 20, b"ACKNOWLEDGED whole 1\nnothing\nACKNOWLEDGED whole 2\n")
FLUSHED = LogEntry(FLUSH, 0, b"")


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = [FIRST, FLUSHED, SAYS, SECOND]
    path = tmp_path / "log"
    path.write_bytes(b"".join(head(entry.kind, entry.offset, len(entry.data)) + entry.data for entry in entries))
    assert read_log(path) == entries


def test_what_was_said_is_promised_from_there_on() -> None:
    log = BlockLog([FIRST, SAYS, SECOND], 1, 3)
    assert log.promises(1) == ()
    assert log.promises(2) == ("whole 1", "whole 2")
    assert BlockLog([FIRST, SAYS, SECOND], 2, 3).promises(3) == (), "said before the program began"


def test_a_flush_covers_what_was_written_before_it() -> None:
    log = BlockLog([FIRST, FLUSHED, SECOND, FLUSHED], 0, 4)
    assert [log.sure(place) for place in range(5)] == [0, 0, 1, 1, 3]
    assert list(log.survivors(log.sure(4), 4, random.Random(1))) == []
    assert list(log.writes(0, 4)) == [FIRST, SECOND]


def test_what_no_flush_covers_is_lost_by_blocks_and_by_sectors() -> None:
    log, seen = BlockLog([FIRST, FLUSHED, SECOND], 0, 3), set[tuple[tuple[int, int], ...]]()
    for seed in range(300):
        kept = list(log.survivors(log.sure(3), 3, random.Random(seed)))
        assert all(data == b"b" * len(data) and 4096 <= offset < 12288 for offset, data in kept)
        seen.add(tuple((offset, len(data)) for offset, data in kept))
    assert {(), ((4096, 4096),), ((8192, 4096),), ((4096, 4096), (8192, 4096))} <= seen
    assert any(size == 512 for kept in seen for _, size in kept)


def test_a_write_is_cut_where_the_disk_has_its_blocks() -> None:
    assert list(pieces(4090, b"0123456789", 4096)) == [(4090, b"012345"), (4096, b"6789")]


def test_writes_are_done_in_their_order(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(12288))
    again = LogEntry(WRITE, 4096, b"c" * 4096)
    lay(BlockLog([FIRST, FLUSHED, SECOND, SAYS, again], 0, 5), 1, 5, image)
    assert image.read_bytes() == bytes(4096) + b"c" * 4096 + b"b" * 4096


def test_without_root_nothing_is_mounted_and_the_reason_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert obstacle("ext4") == "only root may mount"
