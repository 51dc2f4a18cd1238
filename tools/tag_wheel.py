"""Name a cross-built wheel for the platform that it may claim, after a look at the C library that its libraries need.

    python tools/tag_wheel.py build/wheel/threefold-*.whl manylinux_2_28_aarch64 dist

auditwheel does this for wheels of the machine that it runs on, and for no others.
"""

import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile  # type: ignore[import-not-found]
from elftools.elf.gnuversions import GNUVerNeedSection  # type: ignore[import-not-found]

ALLOWED = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
}


def main(wheel: str, platform: str, folder: str) -> int:
    newest = tuple(map(int, re.findall(r"\d+", platform)[:2]))
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so") and (faults := faults_of(archive.read(name), newest)):
                sys.exit(f"error: {name} is not of {platform}: {', '.join(faults)}")
    Path(folder).mkdir(exist_ok=True)
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform, wheel]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    path = Path(wheel).with_name(made)
    print(path.replace(Path(folder) / made))
    return 0


def faults_of(data: bytes, newest: tuple[int, ...]) -> list[str]:
    """Return what a library needs beyond a C library of version `newest`."""
    faults = []
    for section in ELFFile(io.BytesIO(data)).iter_sections():
        if section.header.sh_type == "SHT_DYNAMIC":
            needed = {tag.needed for tag in section.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
            faults += [f"needs {name}" for name in sorted(needed - ALLOWED)]
        if isinstance(section, GNUVerNeedSection):
            names = {each.name for _, versions in section.iter_versions() for each in versions}
            glibc = {
                name: tuple(map(int, name[6:].split("."))) for name in names if re.fullmatch(r"GLIBC_[\d.]+", name)
            }
            faults += [f"needs {name}" for name, version in glibc.items() if version > newest]
    return faults


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
