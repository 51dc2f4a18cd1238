"""A current folder as a stranger may have it: files with the names of modules, which note that they were executed."""

from pathlib import Path

NAMES = ["tokenize", "numpy", "json", "orjson", "xxhash", "tokenizers", "obstore", "queue", "signal", "hashlib"]


class Planted:
    """Modules in a folder, and which of them were executed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in NAMES:
            note = f"open({str(folder / name)!r} + '.executed', 'w').close()"
            (folder / f"{name}.py").write_text(f"{note}\nraise SystemExit('a module of the current folder')\n")

    @property
    def executed(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.executed"))
