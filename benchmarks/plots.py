# SPDX-License-Identifier: Apache-2.0
"""What all pictures of the benchmarks share. matplotlib is imported where one is drawn, and needs no display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(file: Path, *panels: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, as `pyplot.subplots` makes them; at the end they are written to `file`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*panels, layout="constrained", **options)
    yield figure, axes
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
