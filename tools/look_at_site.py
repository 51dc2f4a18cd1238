"""Open every page of the built site in a browser, on a wide and on a narrow screen, and say what is wrong with it.

    build/docs-venv/bin/python -m tools.look_at_site                           # faults, a line each; exit code 1 if any
    build/docs-venv/bin/python -m tools.look_at_site --pictures /tmp/pictures  # and a picture of each page and width
    build/docs-venv/bin/python -m tools.look_at_site --find "out of memory"    # typed into the search: where it leads

The browser is the machine's own chromium; the pages come from a server on loopback.
"""

import argparse
import functools
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Error, Page, sync_playwright

SITE = Path(__file__).parents[1] / "build" / "site"
WIDTHS = (1280, 390)
PATIENCE_MS = 300_000  # a long page takes half a minute on a busy machine
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LOOK = """() => {
  const article = document.querySelector('article') || document.body;
  const prose = article.cloneNode(true);
  prose.querySelectorAll('pre, code').forEach(each => each.remove());
  const html = prose.innerHTML, text = article.innerText;
  return {
    raw: ['<p>- ', '<p>* ', '<p>::: '].filter(mark => html.includes(mark))
      .concat(/\\|\\s*:?---/.test(prose.textContent) ? ['|---'] : []),
    links: [...document.querySelectorAll('a[href]')].map(link => link.href),
    pictures: [...article.querySelectorAll('img')].filter(it => it.complete && !it.naturalWidth).map(it => it.src),
    ids: [...document.querySelectorAll('[id], a[name]')].map(each => each.id || each.name),
    words: text.split(/\\s+/).length,
    title: document.title,
  };
}"""
SIDEWAYS = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  const beyond = [...document.querySelectorAll('article *')].filter(it => it.getBoundingClientRect().right > width + 1);
  const widest = beyond.slice(0, 3).map(it => it.tagName + ' ' + it.className + ': ' + it.innerText.slice(0, 60));
  return ['scrolls sideways by ' + (document.documentElement.scrollWidth - width) + ' pixels', ...widest];
}"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder without a line for each request."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Yield the address on loopback at which a folder is served."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield the machine's chromium, without a window; exit if there is none."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit("error: chromium is missing on this machine\nhint: apt-get install chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield opened
        finally:
            opened.close()


def look(page: Page, address: str, pictures: Path | None) -> tuple[list[str], dict[str, Any]]:
    """Return the faults of one page, and what is on it."""
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    answer = page.goto(address)
    if answer is None or not answer.ok:
        return [f"does not open: {answer.status if answer else 'no answer'}"], {"links": [], "ids": []}
    seen: dict[str, Any] = page.evaluate(LOOK)
    faults = [f"has {mark!r}: Markdown that stayed raw" for mark in seen["raw"]]
    faults += [f"shows no picture {source}" for source in seen["pictures"]]
    faults += [f"is empty: {seen['words']} words"] if seen["words"] < 20 and "404" not in address else []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        if pictures and width != WIDTHS[0]:
            page.reload()  # what fades after a change of width is in no picture
        faults += [f"at {width} pixels {fault}" for fault in page.evaluate(SIDEWAYS)]
        if pictures:
            name = "-".join(address.split("/")[3:]).removesuffix(".html")
            page.screenshot(path=pictures / f"{name}-{width}.png", full_page=True)
    return faults, seen


def dead_links(seen: dict[str, dict[str, Any]], origin: str) -> Iterator[str]:
    """Yield the links within the site that lead to no page, or to no place on it."""
    for address, page in seen.items():
        if address.endswith("/404.html"):
            continue  # its links begin at the address that the site is published at
        for link in page["links"]:
            target, _, place = link.partition("#")
            if not target.startswith(origin):
                continue
            target = target + "index.html" if target.endswith("/") else target
            if target not in seen:
                yield f"{address}: {link} leads to no page"
            elif place and place not in seen[target]["ids"]:
                yield f"{address}: {link} leads to no place on that page"


def find(page: Page, origin: str, words: str) -> list[dict[str, str]]:
    """Type words into the search of the front page, and return the titles, texts and addresses of what it finds."""
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    page.goto(f"{origin}/index.html")
    page.keyboard.press("/")
    field = page.get_by_role("textbox").or_(page.get_by_role("searchbox")).or_(page.get_by_role("combobox")).first
    field.wait_for()
    field.press_sequentially(words)
    hits = page.locator("a[href*='?h='], a[href*='.html']").filter(has=page.locator("mark"))
    try:
        hits.first.wait_for(timeout=PATIENCE_MS / 10)
    except Error:
        return []
    return [{"address": hit.evaluate("each => each.href"), "text": hit.inner_text()} for hit in hits.all()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", metavar="FOLDER", nargs="?", type=Path, default=SITE, help="the built site")
    parser.add_argument("--pictures", metavar="FOLDER", type=Path, help="where to put a picture of each page and width")
    parser.add_argument("--find", metavar="WORDS", help="type these words into the search, and do no more")
    parser.add_argument("--only", metavar="TEXT", default="", help="only pages whose address has this text")
    arguments = parser.parse_args()
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    with served(arguments.site) as origin, browser() as opened:
        page = opened.new_page()
        page.set_default_timeout(PATIENCE_MS)
        if arguments.find:
            print(json.dumps(find(page, origin, arguments.find), indent=2))
            return 0
        seen, faults = {}, []
        for file in sorted(arguments.site.rglob("*.html")):
            address = f"{origin}/{file.relative_to(arguments.site).as_posix()}"
            if arguments.only in address:
                of_page, seen[address] = look(page, address, arguments.pictures)
                faults += [f"{address} {fault}" for fault in of_page]
        faults += [] if arguments.only else dead_links(seen, origin)
    for fault in faults:
        print(fault.replace(f"{origin}/", ""))
    print(f"{len(seen)} pages at {' and '.join(map(str, WIDTHS))} pixels: {len(faults)} faults", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
