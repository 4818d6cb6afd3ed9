"""Two processes against one: the same gradient, and the same learning.

    python benchmarks/scale_processes.py --output out gradients
    python benchmarks/scale_processes.py --output out curves --seeds 0 1 2

`gradients`: the relative difference of the gradient of two gloo processes from that of one, for every loss,
on-policy and off, in float32, for each way to share the update. `curves`: the default run of Countdown,
with one process and with two (torchrun), each seed both ways: held-out accuracy before and after.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

from machine import markdown

ROOT = Path(__file__).parents[1]


def gradients(output: Path) -> None:
    """The tests hold these below 1e-5; here are the numbers."""
    sys.path.insert(0, str(ROOT))
    from groupwise.config.runtime import PARALLEL
    from groupwise.config.schema import LOSSES
    from tests.support.process_groups import in_processes
    from tests.support.sharded_updates import OFF_POLICY, relative_difference
    from tests.support.sharded_updates import gradients as gradients_of
    from tests.support.zero_updates import STAGES, gradients_alone, zero_gradients

    layouts = [layout for layout in PARALLEL if layout not in STAGES or find_spec("deepspeed")]
    # DeepSpeed gives the whole gradient to the first process.
    zero = {layout: in_processes(2, zero_gradients, layout)[0] for layout in layouts if layout in STAGES}

    def worst(loss: str, layout: str) -> float:
        if layout in zero:
            alone, several = gradients_alone()[loss], [zero[layout][loss]]
        else:
            settings = (*OFF_POLICY, f"run.parallel={layout}")
            alone, several = gradients_of(loss, settings), in_processes(2, gradients_of, loss, settings)
        return max(
            relative_difference(expected, ours)
            for each in several
            for ours, expected in zip(each["gradients"], alone["gradients"], strict=True)
        )

    found = {loss: {layout: worst(loss, layout) for layout in layouts} for loss in LOSSES}
    rows = [(loss, *(f"{found[loss][layout]:.1e}" for layout in layouts)) for loss in LOSSES]
    print(markdown(("loss", *layouts), rows))
    (output / "gradients.json").write_text(json.dumps(found, indent=1))


def curves(output: Path, seeds: list[int], steps: int | None) -> None:
    found: dict[str, dict[str, float]] = {}
    for seed in seeds:
        for count in (1, 2):
            name = f"seed-{seed}-processes-{count}"
            launch = [sys.executable, "-m"]
            if count > 1:
                launch += ["torch.distributed.run", f"--nproc-per-node={count}", "-m"]
            words = ["groupwise", "train", "--seed", str(seed), "--no-trackio", "model.device=cpu"]
            words += [f"run.output_dir={output}", f"run.name={name}"]
            words += [] if steps is None else [f"run.max_steps={steps}"]
            subprocess.run([*launch, *words], check=True)
            folder = output / name
            stats = json.loads((folder / "training_stats.json").read_text())
            metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            found[name] = {
                "seed": seed,
                "processes": count,
                "before": stats["before"]["eval/avg@8"],
                "after": stats["after"]["eval/avg@8"],
                "after, greedy": stats["after"]["eval/greedy"],
                "mean reward of the run": fmean(row["reward/mean"] for row in metrics),
                "s/step": fmean(row["time/step"] for row in metrics[1:]),
            }
    header = tuple(next(iter(found.values())))
    print(markdown(header, [tuple(f"{row[key]:.3g}" for key in header) for row in found.values()]))
    for key in ("after", "after, greedy"):
        sides = [[row[key] for row in found.values() if row["processes"] == count] for count in (1, 2)]
        differences = [two - one for one, two in zip(*sides, strict=True)]
        print(f"{key}: two processes minus one, by seed: {', '.join(f'{d:+.3f}' for d in differences)}")
    (output / "curves.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("gradients", "curves"))
    parser.add_argument("--output", type=Path, default=Path("out"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="fewer than the default run's, to see that it works")
    given = parser.parse_args()
    output: Path = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    if given.part == "gradients":
        gradients(output)
    else:
        curves(output, given.seeds, given.steps)


if __name__ == "__main__":
    main()
