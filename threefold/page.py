"""Page: one HTML file that needs nothing else, made of a kit's template, which escapes all that it is given.

A template is beside the file that fills it. It takes its frame and its tables from `page.html.j2`, beside this file.
"""

import os
from importlib.resources import files
from pathlib import Path

from threefold.errors import UserError, quoted
from threefold.storage import open_storage

FRAME = "page.html.j2"


def render_page(package: str | None, template: str, **values: object) -> str:
    """Return the HTML of a template of a package; its values must be all that it names."""
    from jinja2 import DictLoader, Environment, StrictUndefined

    places = {FRAME: __package__, template: package}
    texts = {name: files(place or "").joinpath(name).read_text() for name, place in places.items()}
    return (
        Environment(loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
        .get_template(template)
        .render(values)
    )


def write_page(page: str, path: str | os.PathLike[str]) -> None:
    """Write a page to a local file, whole or not at all."""
    file = check_page_path(path)
    open_storage(file.parent).write(file.name, page.encode())


def check_page_path(path: str | os.PathLike[str]) -> Path:
    """Return where a page will be; UserError if no page can be there."""
    file = Path(path).absolute()
    if file.is_dir():
        raise UserError(f"{path} is a folder, not a file for the page", hint=quoted(Path(path) / "page.html"))
    if not file.parent.is_dir():
        raise UserError(f"the folder {file.parent} of the page does not exist", hint=f"mkdir -p {quoted(file.parent)}")
    return file
