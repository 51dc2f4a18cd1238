"""Build the documentation site from all pages and the docstrings of public names; `make docs` calls it.

    python -m tools.make_site       # into build/site

Nothing is fetched. A link to a page or a heading that does not exist, a page that the contents miss, or Markdown that
stays raw ends the build with exit code 1.
"""

import subprocess
import sys

from tools.site.check import faults_of_site
from tools.site.pages import ROOT, gather_pages

PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"


def main() -> int:
    try:
        gather_pages(PAGES)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    code = subprocess.run(build, cwd=ROOT, check=False).returncode
    faults = faults_of_site(SITE) if not code else []
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    return code or bool(faults)


if __name__ == "__main__":
    sys.exit(main())
