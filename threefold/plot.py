"""Pictures that commands draw: whether one can be made here, and writing it whole or not at all."""

import os
from io import BytesIO
from pathlib import Path
from typing import Any

from threefold.errors import UserError, quoted
from threefold.packages import require


def require_plot(path: str | os.PathLike[str]) -> None:
    """Raise UserError if a plot cannot be made here."""
    require("matplotlib", "a plot")
    file = Path(path)
    if file.suffix != ".png":
        raise UserError(f"a plot is a .png file, not {file.name}", hint=f"--plot {quoted(file.with_suffix('.png'))}")
    if not file.parent.is_dir():
        raise UserError(f"the folder {file.parent} for the plot does not exist", hint=f"mkdir -p {quoted(file.parent)}")


def write_png(path: str | os.PathLike[str], figure: Any) -> None:
    """Write a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    stream, file = BytesIO(), Path(path)
    FigureCanvasAgg(figure)
    figure.savefig(stream, format="png")
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_bytes(stream.getvalue())
    temporary.replace(file)
