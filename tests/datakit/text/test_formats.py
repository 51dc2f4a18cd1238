"""Formats: what names say, in any case, and how others are counted."""

import pytest

from datakit.text.formats import COMPRESSIONS, format_of, other_kind


@pytest.mark.parametrize("suffix", ["", *COMPRESSIONS])
def test_every_kind_of_lines_is_read_with_every_compression_in_any_case(suffix: str) -> None:
    for name, kind in [("a.jsonl", "jsonl"), ("a.ndjson", "jsonl"), ("c4-train.00000.json", "jsonl"), ("a.txt", "txt")]:
        assert format_of(name + suffix) == format_of((name + suffix).upper()) == (kind, suffix.lstrip("."))


def test_tables_are_not_read_compressed_as_a_whole() -> None:
    assert format_of("a.PARQUET") == ("parquet", "")
    assert format_of("a.parquet.gz") is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x/README.md", ".md"),
        ("a.csv.GZ", ".csv.gz"),
        ("a.jsonl.lz4", ".lz4"),
        ("part-0", "no suffix"),
        ("a.gz", ".gz"),
    ],
)
def test_what_is_not_read_is_counted_by_the_end_of_its_name(name: str, kind: str) -> None:
    assert format_of(name) is None
    assert other_kind(name) == kind
