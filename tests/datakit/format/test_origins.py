"""Origins: round trips, and refusal of damaged files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datakit.format.origins import Origin, Origins, OriginsWriter
from threefold.errors import CheckFailed

ROWS = st.lists(
    st.tuples(st.sampled_from(["a.jsonl", "b/ü.txt"]), st.integers(0, 2**40), st.integers(0, 2**31), st.binary())
)


def add(writer: OriginsWriter, path: str, offset_bytes: int, line: int, tokens: bytes) -> None:
    writer.extend(path, [offset_bytes], [line], tokens, [len(tokens)])


@given(rows=ROWS, first_line=st.integers(0, 10**12))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int, int, bytes]], first_line: int
) -> None:
    writer = OriginsWriter()
    for row in rows:
        add(writer, *row)
    path = tmp_path_factory.mktemp("o") / "a.origin"
    path.write_bytes(writer.encode())
    origins = Origins(path, first_line)
    assert origins.num_documents == len(rows)
    for number, (source, offset, line, tokens) in enumerate(rows):
        assert origins[number] == Origin(source, offset, first_line + line + 1)
        assert origins.holds(number, tokens)
        assert not origins.holds(number, tokens + b"x")


@pytest.mark.parametrize(
    ("at", "value"), [(0, b"X"), (8, b"\x02"), (16, b"\xff" * 8), (24, b"\xff" * 8), (24, b"\x09")]
)
def test_a_damaged_header_is_refused(tmp_path: Path, at: int, value: bytes) -> None:
    writer = OriginsWriter()
    add(writer, "a", 1, 2, b"xy")
    content = bytearray(writer.encode())
    content[at : at + len(value)] = value
    path = tmp_path / "a.origin"
    for damaged in (bytes(content), bytes(content[:20]), b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckFailed, match=r"a\.origin"):
            Origins(path)


def test_a_damaged_table_or_source_is_refused(tmp_path: Path) -> None:
    writer = OriginsWriter()
    add(writer, "a", 1, 2, b"xy")
    content, path = writer.encode(), tmp_path / "a.origin"
    for old, new in ((b'["a"]', b'["a" '), (b'["a"]', b"[ 1 ]"), (b'["a"]', b"[   ]")):
        path.write_bytes(content.replace(old, new))
        with pytest.raises(CheckFailed, match=r"a\.origin"):
            Origins(path)[0]


def test_documents_outside_are_an_index_error(tmp_path: Path) -> None:
    path = tmp_path / "a.origin"
    path.write_bytes(OriginsWriter().encode())
    with pytest.raises(IndexError):
        Origins(path)[0]


def test_a_source_s_password_is_not_stored(tmp_path: Path) -> None:
    writer = OriginsWriter()
    for source in ("sftp://me:hunter2@host/a.jsonl", "https://host/b.jsonl?sig=hunter2&x=1"):
        add(writer, source, 0, 0, b"")
    (tmp_path / "a.origin").write_bytes(writer.encode())
    assert b"hunter2" not in writer.encode()
    sources = [Origins(tmp_path / "a.origin")[number].path for number in range(2)]
    assert sources == ["sftp://***@host/a.jsonl", "https://host/b.jsonl?sig=***&x=1"]
