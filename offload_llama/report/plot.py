"""The frontier as a figure; the one place that draws, and only when asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offload_llama.errors import ConfigError, DeviceError
from offload_llama.report.frontier import Point
from offload_llama.report.question import Question, tokens_word

GIB = 2**30
SUFFIXES = (".png", ".svg", ".pdf")


def check_path(name: str) -> Path:
    """Return where a figure goes.

    Raises:
        ConfigError: it cannot be written there, or not in that format.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {name}: write one of {', '.join(SUFFIXES)}, like out.png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {name}: there is no folder {path.parent}; make it first")
    return path


def draw(question: Question, points: Sequence[Point], path: Path) -> None:
    """Write the figure: ms/token over bytes on the card, one line for each context.

    Filled marks fit the card, hollow ones do not.

    Raises:
        DeviceError: matplotlib is not installed.
        ConfigError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DeviceError(
            'a plot needs matplotlib, which is not installed: pip install "offload-llama[plot]"'
        ) from error
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = max(point.ctx for point in points)
    for ctx in dict.fromkeys(point.ctx for point in points):
        line = [point for point in points if point.ctx == ctx]
        x = [point.device_bytes / GIB for point in line]
        y = [1e3 * point.decode_s for point in line]
        [drawn] = axes.plot(x, y, linewidth=1.5)
        color = drawn.get_color()
        for point, across, up in zip(line, x, y, strict=True):
            face = color if point.fits else "white"
            axes.plot([across], [up], "o", markersize=5, color=color, markerfacecolor=face)
        # The lines are furthest apart where no layer is on the card.
        axes.annotate(
            tokens_word(ctx) + (" tokens" if ctx == longest else ""),
            (x[0], y[0]),
            xytext=(4, 6),
            textcoords="offset points",
            color=color,
        )
    available = question.budget.available_bytes / GIB
    axes.axvline(available, color="0.4", linewidth=1, linestyle="--")
    axes.annotate(
        f"{available:.3g} GiB",
        (available, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -12),
        textcoords="offset points",
        color="0.3",
    )
    axes.margins(x=0.08)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GiB on the card (hollow: does not fit)")
    axes.set_ylabel("ms per token, predicted")
    setup = question.setup
    axes.set_title(
        f"{question.shape.label}, {setup.weights} weights, batch {setup.batch}, "
        f"{question.profile.name}: "
        "from all layers offloaded (left) to none",
        fontsize=10,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written ({error.strerror})") from error
