"""Looking at a long run: does the page open, does a group come at once, does the server stay small?

    python benchmarks/watching.py                     # 2,000 steps × 512 completions; about ten minutes
    python benchmarks/watching.py --quick             # does it run? The figures mean nothing

The run is synthetic but written by the writers that training uses: 32 groups of 16 answers a step, 60 tokens
of prompt and 200 of answer each, with every log-probability and entropy. `groupwise watch` serves it as a
process of its own; chromium opens each view (Playwright), in a fresh browser context each time, and groups
are asked for at random over HTTP. Memory is the server's peak (VmHWM) after all of that. What writing costs
is measured in a real run of the default settings: the processor time of everything that writes rollouts and
measures them, most of it on a thread of its own, against the processor time of its steps. It is computed on
one thread, so that neither others at work on the machine nor waiting threads count. Whether a figure is met
is printed, not asserted.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from machine import machine, markdown

from groupwise.algo.samples import to_samples
from groupwise.config import dump_config, read_config
from groupwise.model.resolve import TINY_FOLDER
from groupwise.records import Example, Group, Rollout
from groupwise.tracking.rollout_files import write_rollouts, write_updates
from groupwise.tracking.run_files import MetricsFile
from groupwise.tracking.run_folder import RunFolder
from groupwise.training.step_metrics import signs

GROUPS, MEMBERS, PROMPT, ANSWER = 32, 16, 60, 200
OPENS_SECONDS, GROUP_SECONDS, MEMORY_MB, WRITING_SHARE = 2.0, 0.3, 500.0, 0.01
VIEWS = {
    "curves": "figure canvas",
    "rewards": ".rewards:has(figure canvas):has(.strips li)",
    "groups": ".member",
    "tokens": ".token",
    "alarms": ".verdict",
}

Row = tuple[str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the synthetic run here, and use one that is there")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    words = parser.parse_args()
    print(machine(threads=1, torch=version("torch")), flush=True)
    steps, asked = (20, 20) if words.quick else (2000, 200)
    with tempfile.TemporaryDirectory() as temporary:
        folder = words.folder or Path(temporary) / "long"
        if not (folder / "training_stats.json").is_file():
            make_run(RunFolder(folder), steps)
        rows = looking(folder, steps=steps, asked=asked)
        rows += writing(Path(temporary), steps=1 if words.quick else 4)
    print(markdown(("figure", "measured", "asked for", "met"), rows))
    if words.json:
        words.json.write_text(json.dumps({name: measured for name, measured, *_ in rows}, indent=1))


# The run


def make_run(run: RunFolder, steps: int) -> None:
    """Write the synthetic run, and say how long that took."""
    run.path.mkdir(parents=True)
    run.config.write_text(dump_config(read_config(overrides=[f"run.max_steps={steps}"]).resolve()))
    shutil.copy(TINY_FOLDER / "tokenizer.json", run.tokenizer)
    started = time.perf_counter()
    template = template_groups()
    file = MetricsFile(run.metrics)
    for step in range(1, steps + 1):
        groups = groups_of(template, step, share=step / steps)
        write_rollouts(run.rollouts_at(step), step, groups)
        samples = to_samples(groups, mask_truncated=False, keep_zero=False)
        write_updates(run.updates_at(step), {(s.group, s.member): s.logprobs[PROMPT:] for s in samples})
        file.append(step, {**metrics(step, steps), **signs(groups)})
        if step % max(1, steps // 40) == 0:
            write_evaluation(run, step, share=step / steps)
    run.stats.write_text(json.dumps({"steps": steps}))
    size = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file())
    rollouts = steps * GROUPS * MEMBERS
    print(
        f"made {rollouts:,} rollouts, {size / 1e9:.2f} GB, in {time.perf_counter() - started:.0f} s",
        flush=True,
    )


def template_groups() -> list[Group]:
    noise = random.Random(0)
    return [
        Group(
            example=Example({"question": f"question {group}"}),
            rollouts=tuple(template_rollout(noise, group, member) for member in range(MEMBERS)),
        )
        for group in range(GROUPS)
    ]


def template_rollout(noise: random.Random, group: int, member: int) -> Rollout:
    words = " ".join(
        noise.choice(("so", "then", "12 + 7", "= 19", "check", "no", "again")) for _ in range(100)
    )
    return Rollout(
        prompt=[
            {"role": "user", "content": f"question {group}: " + "what is the sum of these numbers? " * 6}
        ],
        text=words,
        tokens=tuple(noise.randrange(10, 250) for _ in range(PROMPT + ANSWER)),
        trained=(False,) * PROMPT + (True,) * ANSWER,
        logprobs=(0.0,) * PROMPT + tuple(-noise.expovariate(4) for _ in range(ANSWER)),
        entropies=(0.0,) * PROMPT + tuple(noise.expovariate(3) for _ in range(ANSWER)),
        prompt_length=PROMPT,
        finish="end",
        member=member,
    )


def groups_of(template: Sequence[Group], step: int, *, share: float) -> list[Group]:
    """Return the step's groups: the template's tokens, with rewards and words of its own."""
    noise = random.Random(step)

    def own(rollout: Rollout) -> Rollout:
        right = float(noise.random() < 0.2 + 0.6 * share)
        return replace(
            rollout,
            text=f"step {step}: {rollout.text} {noise.random()}",
            rewards={"correct": right, "format": 1.0},
            reward=right + 1.0,
            advantage=right - 0.5,
        )

    return [replace(group, rollouts=tuple(map(own, group.rollouts))) for group in template]


def metrics(step: int, steps: int) -> dict[str, float]:
    """Return as many metrics as a real step has."""
    noise = random.Random(-step)
    named = {
        "reward/mean": 1.2 + 0.6 * step / steps,
        "reward/correct/mean": 0.2 + 0.6 * step / steps,
        "reward/format/mean": 1.0,
        "policy/entropy": 0.6 - 0.4 * step / steps,
        "policy/kl_old": 1e-4,
        "rollout/length": float(ANSWER),
        "advantage/zero_variance": 0.1,
        "speed/tokens_per_second": 9000.0,
        "time/rollout": 4.0,
        "time/reward": 0.1,
        "time/update": 5.0,
    }
    others = {f"other/{index}": 1.0 for index in range(28)}
    return {name: value * (1 + 0.1 * noise.gauss(0, 1)) for name, value in {**named, **others}.items()}


def write_evaluation(run: RunFolder, step: int, *, share: float) -> None:
    mean = 0.2 + 0.6 * share
    scores = {
        f"eval/{name}{end}": mean + shift
        for name in ("greedy", "avg@8", "pass@8")
        for end, shift in (("", 0.0), ("_low", -0.05), ("_high", 0.05))
    }
    record = {"step": step, **scores, "examples": [f"{index:016x}" for index in range(128)]}
    run.evaluations.mkdir(exist_ok=True)
    (run.evaluations / f"step-{step:06d}.json").write_text(json.dumps(record))


# Looking at it


def looking(folder: Path, *, steps: int, asked: int) -> list[Row]:
    with served(folder) as (address, process):
        rows = [timed("server ready", lambda: wait_for(address), None)]
        rows += browsing(address)
        rows += asking(address, folder.resolve().name, steps=steps, asked=asked)
        memory = peak_mb(process)
        rows.append(row("server memory, peak", f"{memory:.0f} MB", MEMORY_MB, memory, unit="MB"))
    return rows


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int]]:
    words = [sys.executable, "-u", "-m", "groupwise", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1], process.pid
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def wait_for(address: str) -> None:
    while True:
        try:
            httpx.get(address, trust_env=False).raise_for_status()
            return
        except httpx.ConnectError:
            time.sleep(0.02)


def browsing(address: str) -> list[Row]:
    """Open every view in a browser that has seen nothing."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("there is no chromium: the page is not opened", flush=True)
        return []
    from playwright.sync_api import sync_playwright

    rows: list[Row] = []
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, mark in VIEWS.items():
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            page = context.new_page()

            def open_view(page: Any = page, name: str = name, mark: str = mark) -> None:
                page.goto(f"{address}#{name}")
                page.wait_for_selector(mark)

            rows.append(timed(f"page opens at {name}", open_view, OPENS_SECONDS))
            if name == "groups":
                rows.append(next_groups(page))
            context.close()
        browser.close()
    return rows


def next_groups(page: Any) -> Row:
    """Go from group to group by key, and take the slowest of the first twenty."""
    times = []
    for group in range(1, 21):
        started = time.perf_counter()
        page.keyboard.press("j")
        page.wait_for_selector(f".group h2:text-matches('group {group}$')")
        times.append(time.perf_counter() - started)
    return row("next group in the page, slowest of 20", seconds(max(times)), GROUP_SECONDS, max(times))


def asking(address: str, run: str, *, steps: int, asked: int) -> list[Row]:
    """Ask for groups, tokens, distributions and words over HTTP."""
    noise = random.Random(1)
    places = [(noise.randint(1, steps), noise.randrange(GROUPS)) for _ in range(asked)]
    with httpx.Client(base_url=f"{address}api/runs/{run}/", trust_env=False, timeout=60) as client:

        def times(paths: Sequence[str]) -> list[float]:
            found = []
            for path in paths:
                started = time.perf_counter()
                client.get(path).raise_for_status()
                found.append(time.perf_counter() - started)
            return found

        groups = times([f"steps/{step}/groups/{group}" for step, group in places])
        lists = times([f"steps/{step}" for step, _ in places])
        tokens = times([f"steps/{step}/groups/{group}/members/3" for step, group in places])
        rows = [
            spread(f"any group, {asked} at random", groups, GROUP_SECONDS),
            spread("a step's list of groups", lists, GROUP_SECONDS),
            spread("an answer by token", tokens, GROUP_SECONDS),
        ]
        for name, path in (
            ("all curves", "curves"),
            ("alarms", "alarms"),
            ("reward distribution", "distribution"),
            ("search, first answer", "search?text=no+such+words"),
        ):
            (taken,) = times([path])
            rows.append(row(name, seconds(taken), None, taken))
        rows.append(row("search through all steps", *whole_search(client), None))
    return rows


def whole_search(client: httpx.Client) -> tuple[str, None]:
    """Look for words that are nowhere, as the page does: on and on from where each answer stopped."""
    started, last = time.perf_counter(), ""
    while True:
        answer = client.get(f"search?text=no+such+words{last}").json()
        if answer["go_on"] is None:
            return seconds(time.perf_counter() - started), None
        last = f"&last={answer['go_on']}"


def peak_mb(process: int) -> float:
    for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc does not tell the peak of memory here")


# Writing


def writing(folder: Path, *, steps: int) -> list[Row]:
    """Train with the default settings and count the time in the writers."""
    import torch

    from groupwise.training import recorder, step_metrics, train

    torch.set_num_threads(1)
    spent: list[tuple[str, float]] = []
    moments: list[float] = []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*values: Any, **named: Any) -> Any:
            started = time.thread_time()
            if call.__name__ == "signs":  # once a step, at the same place in it
                moments.append(time.process_time())
            try:
                return call(*values, **named)
            finally:
                spent.append((call.__name__, time.thread_time() - started))

        return timed_call

    for module, name in (
        (recorder, "write_rollouts"),
        (recorder, "write_updates"),
        (recorder, "write_completions"),
        (recorder, "alarms"),
        (step_metrics, "signs"),
    ):
        setattr(module, name, counted(getattr(module, name)))
    settings = [f"run.max_steps={steps + 1}", "evaluate.skip=true", "track.trackers=[]", "track.report=false"]
    train(read_config(overrides=[*settings, f"run.output_dir={folder}", "run.name=written"]))
    # The first step also loads what all others use.
    calls = {name: [taken for called, taken in spent if called == name][1:] for name, _ in spent}
    for name, taken in calls.items():
        print(f"{name}: {1000 * median(taken):.1f} ms a step")
    each = (moments[-1] - moments[0]) / (len(moments) - 1)
    share = sum(map(median, calls.values())) / each
    words = f"{100 * share:.2f} % of {each:.1f} s"
    return [row("writing, processor time of a default step", words, WRITING_SHARE, share, unit="%")]


# Rows of the table


def seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def timed(name: str, call: Callable[[], None], limit: float | None) -> Row:
    started = time.perf_counter()
    call()
    taken = time.perf_counter() - started
    return row(name, seconds(taken), limit, taken)


def spread(name: str, times: Sequence[float], limit: float) -> Row:
    return row(name, f"{seconds(median(times))}, slowest {seconds(max(times))}", limit, max(times))


def row(name: str, words: str, limit: float | None, value: float | None, *, unit: str = "s") -> Row:
    if limit is None or value is None:
        return name, words, "", ""
    told = {"s": seconds(limit), "MB": f"{limit:.0f} MB", "%": f"{100 * limit:g} %"}[unit]
    return name, words, f"< {told}", "yes" if value < limit else "no"


if __name__ == "__main__":
    main()
