"""The tables of C prototypes: each equals what the kit's header exports, so neither changes without the other."""

import ctypes
import re
from pathlib import Path

import pytest

import ckptkit.io.blocks
import datakit.format.native
import threefold
from threefold.errors import UserError
from threefold.native import DOUBLE, HEADERS, INT, INT64, POINTER, TEXT, UINT64, Prototypes, bind, load_library

CSRC = Path(threefold.__file__).parents[1] / "csrc"
TYPES = {"void": None, "int": INT, "int64_t": INT64, "uint64_t": UINT64, "double": DOUBLE, "const char*": TEXT}
PROTOTYPE = re.compile(r"^[A-Z]+_API\s+([\w\s]+?[\s*]+)(\w+)\(([^)]*)\)", re.MULTILINE)


def prototypes_of(header: str) -> dict[str, tuple[object, ...]]:
    """What a header exports, in the types of the tables."""
    text = re.sub(r"//.*", "", header)
    found = {}
    for result, name, arguments in PROTOTYPE.findall(text):
        listed = [] if arguments.strip() in ("", "void") else arguments.split(",")
        types = [argument[: re.search(r"\w+\s*$", argument).start()] for argument in listed]  # type: ignore[union-attr]
        found[name] = (type_of(result), *map(type_of, types))
    return found


def type_of(text: str) -> object:
    name = " ".join(text.replace("*", " * ").split()).replace(" *", "*")
    return TYPES[name] if name in TYPES or "*" not in name else POINTER


def test_a_header_is_parsed() -> None:
    header = """
    #define XX_API extern "C"
    // XX_API int xx_old(int);
XX_API void xx_run(const struct xx_mask* mask, int64_t num_rows,  // (rows)
                   const char* name);
XX_API const char* xx_text(void);
"""
    assert prototypes_of(header) == {"xx_run": (None, POINTER, INT64, TEXT), "xx_text": (TEXT,)}
    with pytest.raises(KeyError, match="float"):
        prototypes_of("XX_API int xx_new(float value);")


def test_the_tables_are_those_of_the_headers() -> None:
    ops = pytest.importorskip("trainer.ops.native")
    tables: dict[str, Prototypes] = {
        "ckptkit/ckptkit.h": ckptkit.io.blocks.PROTOTYPES,
        "datakit/datakit.h": datakit.format.native.PROTOTYPES,
        "ops/ops.h": ops.PROTOTYPES | ops.CUDA_PROTOTYPES,
    }
    for header, table in tables.items():
        text = (CSRC / header).read_text()
        exported = prototypes_of(text)
        assert len(exported) == len(re.findall(r"^[A-Z]+_API", text, re.MULTILINE)), "each is parsed"
        assert table == exported, header


@pytest.mark.parametrize("name", ["STORE", "READ", "EPOCHS"])
def test_structs_are_those_of_the_header(name: str) -> None:
    struct = getattr(datakit.format.native, name)
    header = (CSRC / "datakit/datakit.h").read_text()
    [body] = re.findall(rf"^struct dk_{name.lower()} {{(.*?)^}};", header, re.DOTALL | re.MULTILINE)
    fields = re.findall(r"^ +(int64_t|[\w ]+\*) (\w+);", body, re.MULTILINE)
    assert struct.names == tuple(field for _, field in fields)
    assert all(struct[field].itemsize == 8 for field in struct.names)


def test_nothing_is_exported_beside_the_headers() -> None:
    files = [path for path in CSRC.rglob("*.*") if re.search(r'visibility\("default"\)|_API\b', path.read_text())]
    assert sorted(str(path.relative_to(CSRC)) for path in files) == [
        "abi.cpp", "ckptkit/ckptkit.h", "datakit/datakit.h", "ops/ops.h",
    ]  # fmt: skip


def test_functions_get_their_types() -> None:
    library = bind(load_library("datakit"), {"threefold_header": (INT64, DOUBLE)})
    assert library.threefold_header.restype is ctypes.c_int64
    assert library.threefold_header.argtypes == [ctypes.c_double]
    with pytest.raises(AttributeError, match="dk_missing"):
        bind(library, {"dk_missing": (None,)})


def test_a_library_that_is_not_built_is_named() -> None:
    with pytest.raises(UserError, match="threefold: its native library is not built") as caught:
        load_library("threefold")
    assert "make native" in str(caught.value.hint)


@pytest.mark.parametrize("kit", sorted(HEADERS))
def test_a_library_of_another_header_is_refused(kit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pull that changed C++, before the next build."""
    load_library(kit)
    monkeypatch.setattr("threefold.native._digest", lambda header: "0" * 64)
    with pytest.raises(UserError, match=rf"{kit}: .*_native.so was built of another .*csrc/{HEADERS[kit]}") as caught:
        load_library(kit)
    assert "make native" in str(caught.value.hint)
