"""The picture that a link to the site is shown with, from the recording's two runs.

`make recording` writes it, too.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.pages import DOCS
from tests.pages.svg import COLORS, FAINT, INK, PAPER

_EVALUATED = re.compile(r"step (\d+)  evaluated .* loss ([\d.]+)")
_KILLED = re.compile(r"was killed by SIGKILL after step (\d+)")
_SUM = re.compile(r"([0-9a-f]{64})  runs/(\w+)/")


def draw() -> None:
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("agg")
    said = [line["text"] for line in json.loads((DOCS / "img" / "kill.json").read_text())]
    calm, killed = _curves(said)
    sums = {name: digest for text in said for digest, name in _SUM.findall(text)}
    if len(set(sums.values())) != 1:
        raise SystemExit("the recording's two runs have not the same weights")
    figure = plt.figure(figsize=(12, 6.3), dpi=100, facecolor=PAPER)
    _write(figure, 0.85, "Drivetrain", size=58, weight="bold", color=COLORS[0])
    _write(figure, 0.74, "One training script, any number of ranks,", size=27)
    _write(figure, 0.665, "the same numbers.", size=27)
    axes = figure.add_axes((0.06, 0.2, 0.88, 0.4), facecolor=PAPER)
    axes.plot(*zip(*calm, strict=True), color="#8fd0c3", linewidth=9, label="validation loss")
    axes.plot(*zip(*killed, strict=True), "o-", color=COLORS[0], label="with a rank killed")
    step = next(int(found[1]) for text in said if (found := _KILLED.search(text)))
    axes.axvline(step, color=COLORS[1], linewidth=3)
    axes.text(step + 5, 0.85, f"kill -9 after step {step}", color=COLORS[1], fontsize=20)
    axes.legend(frameon=False, fontsize=17, labelcolor=INK)
    axes.set_axis_off()
    digest = sums["killed"]
    _write(figure, 0.08, f"SHA-256 of both runs' weights: {digest[:16]}…", size=20, color=FAINT)
    figure.savefig(DOCS / "img" / "card.png", metadata={"Software": None})


def _curves(said: list[str]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Validation loss by step of both runs; steps that were run again have the same again."""
    runs: list[dict[int, float]] = []
    for text in said:
        if text.startswith("drivetrain train"):
            runs.append({})
        elif found := _EVALUATED.match(text):
            runs[-1][int(found[1])] = float(found[2])
    calm, killed = (sorted(run.items()) for run in runs)
    return calm, killed


def _write(figure: Any, y: float, text: str, size: int, **style: Any) -> None:
    figure.text(0.06, y, text, fontsize=size, **{"color": INK, **style})


if __name__ == "__main__":
    draw()
