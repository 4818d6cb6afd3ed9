"""What was right while SmolLM2 trained, step by step, from the results that the recipes leave.

python benchmarks/learning_curves.py docs/runs docs/images/smollm2-learns.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

PANELS = {
    "countdown": ("Countdown: share right", "right"),
    "words": ("Word problems: share right", "right"),
    "medquad": ("MedQuAD: MRR of the searches", "reward/mrr/mean"),
}


def smoothed(values: list[float], *, width: int = 3) -> list[float]:
    """The mean over each value and those beside it."""
    windows = [values[max(0, at - width // 2) : at + width // 2 + 1] for at in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def main() -> None:
    folder, image = map(Path, sys.argv[1:])
    figure, fields = pyplot.subplots(1, len(PANELS), figsize=(12, 3.4), layout="constrained")
    for field, (task, (title, name)) in zip(fields, PANELS.items(), strict=True):
        result: dict[str, Any] = json.loads((folder / task / "result.json").read_text(encoding="utf-8"))
        for seed in result["seeds"]:
            steps = [row for row in seed["curve"] if row.get(name) is not None]
            line = smoothed([row[name] for row in steps])
            field.plot([row["step"] for row in steps], line, label=f"seed {seed['seed']}")
        field.set(title=title, xlabel="step", ylim=(0, 1))
        field.grid(alpha=0.3)
        field.legend(loc="lower right")
    figure.savefig(image, dpi=110)


if __name__ == "__main__":
    main()
