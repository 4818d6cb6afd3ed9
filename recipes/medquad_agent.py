"""How SmolLM2-135M learns to search on one GPU: generated traces, a warm start, then GRPO over MedQuAD.

    python recipes/medquad_agent.py --model FOLDER --data medquad.jsonl.gz --output results
    python recipes/medquad_agent.py --data medquad.jsonl.gz --quick --output /tmp/quick    # does it run?

Without `--index` the index is built first. The warm start imitates the traces of `medquad_traces.py`, as
`groupwise sft` does, with adapters that are then merged; each seed trains new ones with GRPO for `--seconds`.
Held-out questions, whose pages' topics occur in no training question, are asked of the model as it comes,
after the warm start, and after GRPO.

OUTPUT/medquad.json has everything in the tables, and the curve of each seed; OUTPUT/eval/NAME.txt has
conversations to read; OUTPUT/seed-N is a run folder without checkpoints.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from medquad_traces import KEPT, traces

from groupwise.commands.index import build_index
from groupwise.config import Config, read_config
from groupwise.config.schema import NO_TASK
from groupwise.engine.engine import Engine
from groupwise.evaluate.held_out import Evaluation, compare, evaluate, write_evaluation
from groupwise.model.load import load_policy
from groupwise.model.policy import Policy
from groupwise.records import Rollout
from groupwise.retrieval.fetch import FetchPolicy
from groupwise.retrieval.search_index import Index
from groupwise.rollout.collect import Tools
from groupwise.tasks import Task, load_task
from groupwise.tasks.sft_data import plan_warm_start
from groupwise.training.grpo_run import GRPORun
from groupwise.training.loop import train_step
from groupwise.training.resume import RunStart
from groupwise.training.sft_run import SFTRun

ENDLESS = 100_000
"""Steps: the clock ends the run."""
SHOWN_REWARDS = ("mrr", "recall", "f1", "rouge_l", "similarity", "format", "once", "close")
SAMPLE = 20
"""Traces that are kept to read."""


class Clock:
    """Says what each stage took."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()
        self.stages: dict[str, float] = {}

    def done(self, stage: str) -> None:
        now = time.monotonic()
        self.stages[stage] = round(now - self.last, 1)
        self.last = now
        print(f"[{now - self.began:5.0f} s] {stage}: {self.stages[stage]:g} s", flush=True)


def index_in(options: argparse.Namespace) -> Path:
    """Return the index to search, built now if none was given."""
    if options.index is not None:
        return Path(options.index)
    if options.data is None:
        raise SystemExit("give --index FOLDER, or --data medquad.jsonl.gz to build one")
    folder = Path(tempfile.mkdtemp()) / "index"
    report = build_index(
        folder,
        documents=None,
        data=options.data,
        fetch=False,
        pages=folder,
        skip_existing=True,
        policy=FetchPolicy(),
        store="files",
    )
    print(json.dumps(report), flush=True)
    return folder


def common(options: argparse.Namespace, *, model: str, output: Path, name: str) -> list[str]:
    """Settings of every run."""
    return [
        f"model.name={model}",
        f"lora.r={options.lora_r}",
        f"lora.alpha={max(1, options.lora_r)}",
        f"run.name={name}",
        f"run.output_dir={output}",
        f"run.save_every={ENDLESS}",
        f"track.rollouts_every={ENDLESS}",
        "track.trackers=[]",
        "track.report=false",
        "evaluate.skip=true",
    ]


def warm_start(options: argparse.Namespace, rows: Path, *, output: Path) -> dict[str, Any]:
    """Imitate traces until the time or the steps are over, and write the merged model to `output`/model."""
    words = [
        *common(options, model=options.model, output=output, name="run"),
        "run.kind=sft",
        f"task.name={NO_TASK}",
        "task.held_out=0",
        f"sft.data={rows}",
        f"sft.batch={options.warm_batch}",
        f"run.max_steps={options.warm_steps}",
        f"optim.learning_rate={options.warm_rate}",
        "optim.schedule=cosine",
        "optim.warmup_steps=10",
        "optim.beta2=0.98",
    ]
    plan = plan_warm_start(read_config(overrides=words))
    started = time.monotonic()
    with SFTRun(plan, start=RunStart.new(plan.config, task="warm")) as run:
        for step in run.steps():
            taken = run.take(step)
            run.track(step, taken, run.learn(step, taken))
            if time.monotonic() - started > options.warm_seconds:
                break
        curve = rows_of(run.folder.metrics)
    merged = run.policy.model.merge_and_unload() if run.policy.has_adapter else run.policy.model
    merged.save_pretrained(output / "model")
    run.policy.tokenizer.save_pretrained(output / "model")
    return {
        "steps": len(curve),
        "seconds": time.monotonic() - started,
        "curve": [{"step": row["step"], "loss": row["sft/loss"]} for row in curve],
    }


def settings(options: argparse.Namespace, *, model: str, index: Path, seed: int) -> Config:
    words = [
        *common(options, model=model, output=options.output, name=f"seed-{seed}"),
        "task.name=medquad",
        f"task.options.index={index}",
        f"task.options.results={options.results}",
        f"task.options.shown={options.shown}",
        f"task.held_out={options.held_out}",
        f"rollout.prompts={options.prompts}",
        f"rollout.group_size={options.group_size}",
        f"rollout.max_tokens={options.max_tokens}",
        "rollout.temperature=1.0",
        "rollout.refill=0",
        "tools.max_turns=3",
        "tools.max_calls=3",
        f"tools.max_tokens={options.conversation}",
        "algo.advantage=gdpo",  # each reward on its own: differences of F1 are small beside those of MRR
        "algo.max_gap=0.2",  # the rounding of bfloat16 is corrected for
        f"optim.learning_rate={options.learning_rate}",
        f"optim.minibatches={min(2, options.prompts)}",
        "optim.warmup_steps=4",
        f"run.seed={seed}",
        f"run.max_steps={ENDLESS}",
    ]
    return read_config(overrides=[*words, *options.set]).resolve()


def measure(
    policy: Policy, engine: Engine, task: Task, config: Config, options: argparse.Namespace
) -> Evaluation:
    """Ask the held-out questions, with the same noise every time: before and after are paired."""
    return evaluate(
        task,
        task.split(config.task, 0).held_out,
        codec=policy,
        engine=engine,
        sampling=config.rollout.sampling,
        samples=options.samples,
        seed=0,
        seconds=config.task.reward_seconds,
        tools=Tools.of(task.tools, config.tools),
    )


def measure_alone(
    name: str, task: Task, config: Config, options: argparse.Namespace
) -> tuple[Evaluation, dict[str, Any]]:
    """Load a model to measure it."""
    policy = load_policy(config.model, config.lora)
    engine = Engine(policy, config.engine)
    result = measure(policy, engine, task, config, options)
    write_evaluation(options.output / "eval", name, result, about={"name": name})
    del policy, engine
    free_memory()
    return result, told(result)


def reinforce(
    task: Task, config: Config, options: argparse.Namespace, *, before: Evaluation
) -> dict[str, Any]:
    """Train one seed until its time is over, and measure it."""
    seed = config.run.seed
    with GRPORun(config, task=task, start=RunStart.new(config, task=task.name)) as run:
        started = time.monotonic()
        for step in run.steps():
            train_step(run, step)
            if step >= options.steps or time.monotonic() - started > options.seconds:
                break
        seconds = time.monotonic() - started
        after = measure(run.policy, run.engine, task, config, options)
        curve = rows_of(run.folder.metrics)
    changes = {name: asdict(change) for name, change in compare(before, after).items()}
    write_evaluation(options.output / "eval", f"seed-{seed}", after, about={"seed": seed, "change": changes})
    return {
        "seed": seed,
        "steps": len(curve),
        "seconds": seconds,
        "after": told(after),
        "change": changes,
        "step_seconds": statistics.median(row["time/step"] for row in curve),
        "tool_share": statistics.median(row.get("time/tools", 0.0) / row["time/step"] for row in curve),
        "reward_share": statistics.median(row["time/reward"] / row["time/step"] for row in curve),
        "gap": max((row["policy/gap"] for row in curve if "policy/gap" in row), default=None),
        "curve": [shortened(row) for row in curve],
    }


def shortened(row: dict[str, float]) -> dict[str, float]:
    """What is worth keeping of a step."""
    kept = ("step", "time/", "rollout/", "policy/entropy", "policy/gap", "policy/grad_norm")
    return {
        name: value
        for name, value in row.items()
        if name.startswith(kept) or (name.startswith("reward/") and name.endswith("mean"))
    }


def told(result: Evaluation) -> dict[str, Any]:
    """The means and 95 % intervals of every reward, sampled; and what went wrong in greedy conversations."""
    means = {name: asdict(interval) for name, interval in result.reward_intervals().items()}
    return {
        **means,
        "tokens": result.length,
        "failed": result.failed,
        "greedy": dict(Counter(verdict(group.rollouts[0]) for group in result.answers)),
    }


def verdict(rollout: Rollout) -> str:
    """Say in a few words what became of a conversation."""
    rewards = rollout.rewards
    if rollout.error is not None:
        return "failed"
    if not rollout.calls:
        return "no search"
    if all(call.error is not None for call in rollout.calls):
        return "no search that worked"
    if not rewards["f1"]:
        return "no answer"
    if not rewards["recall"]:
        return "page not found"
    return "found, answer close" if rewards["close"] else "found, answer not close"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(policies: Sequence[tuple[str, dict[str, Any]]]) -> str:
    names = [name for name in SHOWN_REWARDS if any(name in one for _, one in policies)]
    lines = ["| policy | " + " | ".join([*names, "tokens"]) + " |", "|---|" + "---:|" * (len(names) + 1)]
    for title, one in policies:
        cells = [shown(one.get(name)) for name in names]
        lines.append("| " + " | ".join([title, *cells, f"{one['tokens']:.0f}"]) + " |")
    return "\n".join(lines)


def shown(interval: dict[str, float] | None) -> str:
    if interval is None:
        return "–"
    return "{:.3f} [{:.3f}, {:.3f}]".format(interval["mean"], interval["low"], interval["high"])


def study(options: argparse.Namespace) -> None:
    about = f"torch {torch.__version__}, " + (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} threads"
    )
    print(about, flush=True)
    options.output.mkdir(parents=True)
    clock, result = Clock(), {"machine": about, "options": vars(options)}

    def keep(**more: Any) -> None:
        result.update(more, stages=clock.stages)
        (options.output / "medquad.json").write_text(json.dumps(result, indent=1, default=str))

    folder = index_in(options)
    config = settings(options, model=options.model, index=folder, seed=0)
    task = load_task(config.task)
    clock.done("index")
    _, as_it_comes = measure_alone("as-it-comes", task, config, options)
    clock.done("as it comes")
    keep(as_it_comes=as_it_comes)
    with tempfile.TemporaryDirectory() as temporary:
        rows, model = Path(temporary) / "traces.jsonl", Path(temporary) / "model"
        made = traces(
            task, Index.open(folder), results=options.results, shown=options.shown, kept=options.kept
        )
        lines = [json.dumps(next(made)) + "\n" for _ in range(options.warm_batch * options.warm_steps)]
        rows.write_text("".join(lines))
        (options.output / "traces.jsonl").write_text("".join(lines[:SAMPLE]))
        clock.done(f"{len(lines)} traces")
        warm = warm_start(options, rows, output=Path(temporary))
        free_memory()
        clock.done("warm start")
        config = settings(options, model=str(model), index=folder, seed=0)
        before, told_before = measure_alone("before", task, config, options)
        clock.done("before")
        keep(warm=warm, before=told_before)
        seeds: list[dict[str, Any]] = []
        for seed in options.seeds:
            config = settings(options, model=str(model), index=folder, seed=seed)
            seeds.append(reinforce(task, config, options, before=before))
            free_memory()
            clock.done(f"seed {seed}")
            keep(seeds=seeds)
    report(as_it_comes, told_before, warm, seeds)


def report(
    as_it_comes: dict[str, Any], before: dict[str, Any], warm: dict[str, Any], seeds: list[dict[str, Any]]
) -> None:
    policies = [("as it comes", as_it_comes), ("after the warm start", before)]
    policies += [(f"seed {one['seed']} after GRPO", one["after"]) for one in seeds]
    print(f"\n{table(policies)}\n\ngreedy conversations:")
    for title, one in policies:
        print(f"  {title}: " + ", ".join(f"{name} {count}" for name, count in one["greedy"].items()))
    print(f"warm start: {warm['steps']} steps, {warm['seconds']:.0f} s")
    for one in seeds:
        print(
            f"seed {one['seed']}: {one['steps']} steps, {one['step_seconds']:.2f} s each; tools "
            f"{one['tool_share']:.1%} and rewards {one['reward_share']:.1%} of a step; gap {one['gap']}"
        )
        for name in ("mrr", "f1"):
            change = one["change"].get(f"reward/{name}")
            if change:
                print(f"  {name} {change['mean']:+.3f}, p = {change['p_value']:.1e}")
            values = [row[f"reward/{name}/mean"] for row in one["curve"] if f"reward/{name}/mean" in row]
            tenth = max(1, len(values) // 10)
            means = [statistics.fmean(values[at : at + tenth]) for at in range(0, len(values), tenth)]
            print(f"  {name} while training: {' '.join(f'{mean:.2f}' for mean in means)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a folder in Hugging Face layout, or a name")
    parser.add_argument("--index", help="a folder that `groupwise index build` made")
    parser.add_argument("--data", help="MedQuAD's rows, to build the index from")
    parser.add_argument("--output", type=Path, required=True, help="a new folder for the results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--seconds", type=float, default=100.0, help="of GRPO for each seed")
    parser.add_argument("--steps", type=int, default=200, help="of GRPO, at most")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=192, help="of a turn")
    parser.add_argument("--conversation", type=int, default=1800, help="tokens behind the prompt in all")
    parser.add_argument("--results", type=int, default=3, help="chunks that a search returns")
    parser.add_argument("--shown", type=int, default=700, help="characters of each")
    parser.add_argument("--lora-r", type=int, default=64, help="rank of the adapters")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--kept", type=float, default=KEPT, help="share of a question's words in a search")
    parser.add_argument("--warm-seconds", type=float, default=80.0)
    parser.add_argument("--warm-steps", type=int, default=160)
    parser.add_argument("--warm-batch", type=int, default=32)
    parser.add_argument("--warm-rate", type=float, default=1e-3)
    parser.add_argument("--held-out", type=int, default=256, help="questions")
    parser.add_argument("--samples", type=int, default=4, help="conversations about each held-out question")
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="any other setting")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.group_size, options.held_out, options.samples = 2, 4, 4, 2
        options.warm_steps, options.warm_batch, options.steps = 2, 4, 2
    study(options)


if __name__ == "__main__":
    main()
