"""Build the documentation site from all pages and the docstrings of public names; `make docs` calls it.

    python tools/make_site.py       # into build/site

Nothing is fetched. A link to a page or a heading that does not exist ends the build with exit code 1.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "pages"
FRONT = "README.md"  # the site's first page
KITS = ("datakit", "ckptkit", "trainer", "threefold")
PUBLIC = re.compile(r"^from ([\w.]+) import (\w+) as \2$", re.MULTILINE)


def main() -> int:
    gather_pages(PAGES)
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(build, cwd=ROOT, check=False).returncode


def gather_pages(folder: Path) -> None:
    """Write all pages into a folder: those of the root, those of docs/, and one of each kit's public names."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder / "docs")
    for page in ROOT.glob("*.md"):
        (folder / page.name).write_text(page.read_text())
    (folder / FRONT).rename(folder / "index.md")
    for page in folder.rglob("*.md"):
        page.write_text(re.sub(rf"\]\(((?:\.\./)*){FRONT}", r"](\1index.md", page.read_text()))
    (folder / "docs" / "api").mkdir()
    for kit in KITS:
        (folder / "docs" / "api" / f"{kit}.md").write_text(reference(kit))


def reference(kit: str) -> str:
    """Return the page of a kit's public names, each to be filled in from its docstring."""
    names = PUBLIC.findall((ROOT / kit / "__init__.pyi").read_text())
    entries = [f"## `{name}`\n\n::: {module}.{name}\n" for module, name in sorted(names, key=lambda found: found[1])]
    return "\n".join([f"# {kit}: public names\n", *entries])


if __name__ == "__main__":
    sys.exit(main())
