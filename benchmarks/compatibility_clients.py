"""Rows of benchmarks/compatibility.py: other people's clients against `groupwise serve`.

Each row is a function of the context that the script prepared. It runs in the environment of its package,
which may not have groupwise, and raises an error unless the client returns what the server answers to a plain
HTTP request. It returns a sentence about what was compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Context = dict[str, Any]


def same(got: Any, expected: Any) -> None:
    if got != expected:
        raise AssertionError(f"got {got!r}, expected {expected!r}")


def openai_client(c: Context) -> Any:
    import openai

    return openai.OpenAI(base_url=c["base_url"], api_key=c["key"], max_retries=0)


def openai_chat(c: Context) -> str:
    client, asked = openai_client(c), c["chat"]["body"]
    same(client.chat.completions.create(**asked).choices[0].message.content, c["chat"]["text"])
    parts = client.chat.completions.create(**asked, stream=True)
    same("".join(part.choices[0].delta.content or "" for part in parts), c["chat"]["text"])
    same([model.id for model in client.models.list()], [c["model"]])
    return "answer, stream and list of models"


def openai_completions(c: Context) -> str:
    client, asked = openai_client(c), c["plain"]["body"]
    answer = client.completions.create(**asked, logprobs=1, echo=True)
    same([choice.text for choice in answer.choices], c["plain"]["texts"])
    for choice, expected in zip(answer.choices, c["plain"]["logprobs"], strict=True):
        pairs = list(zip(choice.logprobs.token_logprobs, expected, strict=True))
        same(pairs[0], (None, None))
        # Prompts that share a pass differ by rounding.
        same(max(abs(got - wanted) for got, wanted in pairs[1:]) < 1e-3, True)
    return f"{len(answer.choices)} prompts in one request, echo and log-probabilities"


def openai_responses(c: Context) -> str:
    client, asked = openai_client(c), c["responses"]["body"]
    response = client.responses.create(**asked)
    same((response.output_text, response.usage.output_tokens), (c["chat"]["text"], c["chat"]["tokens"]))
    events = list(client.responses.create(**asked, stream=True))
    same("".join(e.delta for e in events if e.type == "response.output_text.delta"), c["chat"]["text"])
    return "answer, token count and stream of events"


def openai_tools(c: Context) -> str:
    client, asked = openai_client(c), c["tools"]["body"]
    message = client.chat.completions.create(**asked).choices[0].message
    call = message.tool_calls[0]
    same([call.function.name, call.function.arguments], c["tools"]["call"])
    history = [*asked["messages"], message, {"role": "tool", "tool_call_id": call.id, "content": "12"}]
    again = client.chat.completions.create(**{**asked, "messages": history, "tool_choice": "none"})
    same(again.choices[0].finish_reason in ("stop", "length"), True)
    return "a required call, and the answer after its result"


def openai_errors(c: Context) -> str:
    import openai

    client, asked = openai_client(c), c["chat"]["body"]
    for status, change in ((404, {"model": "other"}), (400, {"temperature": -1})):
        try:
            client.chat.completions.create(**{**asked, **change})
        except openai.APIStatusError as error:
            same((error.status_code, bool(error.body["message"])), (status, True))
        else:
            raise AssertionError(f"no error {status}")
    try:
        client.with_options(api_key="wrong").models.list()
    except openai.AuthenticationError as error:
        same(error.code, "invalid_api_key")
    return "errors 400, 401 and 404 as its exceptions"


NODE = """
import OpenAI from "openai";
import { readFileSync } from "fs";
const c = JSON.parse(readFileSync(process.env.CONTEXT));
const client = new OpenAI({ baseURL: c.base_url, apiKey: c.key, maxRetries: 0 });
const out = {};
const chat = await client.chat.completions.create(c.chat.body);
out.chat = chat.choices[0].message.content;
out.stream = "";
for await (const part of await client.chat.completions.create({ ...c.chat.body, stream: true }))
  out.stream += part.choices[0]?.delta?.content ?? "";
const plain = await client.completions.create({ ...c.plain.body, echo: true });
out.plain = plain.choices.map((choice) => choice.text);
out.responses = (await client.responses.create(c.responses.body)).output_text;
out.events = "";
for await (const event of await client.responses.create({ ...c.responses.body, stream: true }))
  if (event.type === "response.output_text.delta") out.events += event.delta;
const called = await client.chat.completions.create(c.tools.body);
const call = called.choices[0].message.tool_calls[0].function;
out.call = [call.name, call.arguments];
console.log(JSON.stringify(out));
"""


def node(c: Context) -> Any:
    """What OpenAI's client for Node returns; all in one process."""
    command = ["node", "--input-type=module", "-e", NODE]
    environment = {**os.environ, "CONTEXT": c["path"]}
    done = subprocess.run(
        command, cwd=c["node"], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    return json.loads(done.stdout)


def node_chat(c: Context) -> str:
    out = node(c)
    same((out["chat"], out["stream"], out["plain"]), (c["chat"]["text"],) * 2 + (c["plain"]["texts"],))
    return "chat, stream and completions of several prompts"


def node_responses(c: Context) -> str:
    out = node(c)
    same((out["responses"], out["events"], out["call"]), (c["chat"]["text"],) * 2 + (c["tools"]["call"],))
    return "responses, their events, and a required tool call"


def curl(c: Context) -> str:
    body = json.dumps({**c["chat"]["body"], "stream": True})
    key = f"Authorization: Bearer {c['key']}"
    command = ["curl", "-sSN", f"{c['base_url']}/chat/completions", "-H", key, "-d", body]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    same(text, c["chat"]["text"])
    return "server-sent events"


def prometheus(c: Context) -> str:
    import urllib.request

    from prometheus_client.parser import text_string_to_metric_families

    request = urllib.request.Request(
        f"{c['root_url']}/metrics", headers={"Authorization": f"Bearer {c['key']}"}
    )
    with urllib.request.urlopen(request) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    values = {sample.name: sample.value for family in families for sample in family.samples}
    same(values["groupwise_generated_tokens_total"] > 0, True)
    same(sum(family.type == "histogram" for family in families), 2)
    return f"{len(families)} metrics, two of them histograms"


def litellm(c: Context) -> str:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm as package

    asked = {
        **c["chat"]["body"],
        "model": f"openai/{c['model']}",
        "api_base": c["base_url"],
        "api_key": c["key"],
    }
    same(package.completion(**asked).choices[0].message.content, c["chat"]["text"])
    parts = package.completion(**asked, stream=True)
    same("".join(part.choices[0].delta.content or "" for part in parts), c["chat"]["text"])
    tools = {key: c["tools"]["body"][key] for key in ("tools", "tool_choice", "messages", "max_tokens")}
    call = package.completion(**{**asked, **tools}).choices[0].message.tool_calls[0].function
    same([call.name, call.arguments], c["tools"]["call"])
    return "answer, stream and a required tool call"


def langchain_model(c: Context, **settings: Any) -> Any:
    from langchain_openai import ChatOpenAI

    usual = {"base_url": c["base_url"], "api_key": c["key"], "model": c["model"], "temperature": 0}
    return ChatOpenAI(**{**usual, "max_tokens": c["chat"]["body"]["max_tokens"], **settings})


def langchain(c: Context) -> str:
    model, prompt = langchain_model(c), c["prompt"]
    same(model.invoke(prompt).content, c["chat"]["text"])
    same("".join(part.content for part in model.stream(prompt)), c["chat"]["text"])
    same([answer.content for answer in model.batch([prompt] * 3)], [c["chat"]["text"]] * 3)
    same(langchain_model(c, use_responses_api=True).invoke(prompt).text, c["chat"]["text"])
    return "invoke, stream, batch, and the Responses API"


def langchain_structured(c: Context) -> str:
    schema = {**c["schema"], "title": "Sum", "description": "A sum."}
    for method in ("json_schema", "function_calling"):
        model = langchain_model(c, max_tokens=200).with_structured_output(schema, method=method)
        answer = model.invoke(c["prompt"])
        same({key: type(value).__name__ for key, value in answer.items()}, c["types"])
    return "with_structured_output by JSON schema and by function call"


def pydantic_ai(c: Context) -> str:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=c["base_url"], api_key=c["key"])
    settings: Any = {"temperature": 0, "max_tokens": c["chat"]["body"]["max_tokens"]}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(kind(c["model"], provider=provider), model_settings=settings, retries=0)
        same(agent.run_sync(c["prompt"]).output, c["chat"]["text"])
    return "text from chats and from the Responses API"


def pydantic_ai_structured(c: Context) -> str:
    from pydantic import BaseModel, Field
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Sum(BaseModel, extra="forbid"):
        first: int = Field(ge=0, le=99)
        second: int = Field(ge=0, le=99)

    provider = OpenAIProvider(base_url=c["base_url"], api_key=c["key"])
    settings: Any = {"temperature": 0, "max_tokens": 200}
    for output in (NativeOutput(Sum), ToolOutput(Sum)):
        agent = Agent(
            OpenAIChatModel(c["model"], provider=provider), output_type=output, model_settings=settings
        )
        same(type(agent.run_sync(c["prompt"]).output).__name__, "Sum")
    return "a Pydantic model by JSON schema and by tool call"


def instructor(c: Context) -> str:
    import instructor as package
    from pydantic import BaseModel, Field

    class Sum(BaseModel, extra="forbid"):
        first: int = Field(ge=0, le=99)
        second: int = Field(ge=0, le=99)

    for mode in (package.Mode.TOOLS, package.Mode.JSON_SCHEMA):
        client = package.from_openai(openai_client(c), mode=mode)
        asked = {**c["chat"]["body"], "max_tokens": 200}
        answer = client.chat.completions.create(**asked, response_model=Sum, max_retries=0)
        same(type(answer.first).__name__, "int")
    return "a Pydantic model in the modes TOOLS and JSON_SCHEMA"


def llama_index(c: Context) -> str:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=c["model"],
        api_base=c["base_url"],
        api_key=c["key"],
        is_chat_model=True,
        temperature=0,
        max_tokens=c["chat"]["body"]["max_tokens"],
    )
    messages = [ChatMessage(role="user", content=c["prompt"])]
    same(model.chat(messages).message.content, c["chat"]["text"])
    same("".join(part.delta or "" for part in model.stream_chat(messages)), c["chat"]["text"])
    return "answer and stream"


def inspect(c: Context, *, responses: bool = False) -> str:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import exact

    samples = [Sample(input=prompt, target=text) for prompt, text in c["samples"]]
    model: Any = get_model(
        f"openai-api/groupwise/{c['model']}",
        base_url=c["base_url"],
        api_key=c["key"],
        responses_api=responses,
        config=GenerateConfig(temperature=0.0, max_tokens=c["chat"]["body"]["max_tokens"]),
    )
    with tempfile.TemporaryDirectory() as logs:
        task = Task(dataset=samples, scorer=exact())
        (log,) = eval(task, model=model, log_dir=logs, display="none")
        same((log.status, log.error), ("success", None))
        answers = [sample.output.completion for sample in log.samples or []]
    same(answers, [text for _, text in c["samples"]])
    return f"{len(answers)} answers of an evaluation"


def inspect_responses(c: Context) -> str:
    return inspect(c, responses=True)


def lm_eval_scores(c: Context, task: str, model: str, arguments: str, *options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", arguments]
        command += [
            "--tasks",
            task,
            "--include_path",
            c["lm_eval_tasks"],
            "--output_path",
            str(out),
            *options,
        ]
        environment = {**os.environ, "OPENAI_API_KEY": c["key"], "HF_HUB_OFFLINE": "1", "HF_HOME": folder}
        environment |= {"HF_DATASETS_OFFLINE": "1", "LOGLEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-1500:])
        (written,) = Path(folder).rglob("out*.json")
        scores: dict[str, Any] = json.loads(written.read_text())["results"][task]
    return {name: round(value, 4) for name, value in scores.items() if isinstance(value, float)}


def lm_eval_completions(c: Context) -> str:
    served = f"model={c['model']},tokenizer={c['folder']},base_url={c['base_url']}/completions"
    server = lm_eval_scores(c, "sums_choice", "local-completions", served, "--batch_size", "4")
    local = lm_eval_scores(
        c, "sums_choice", "hf", f"pretrained={c['folder']},dtype=float32", "--device", "cpu"
    )
    same(server, local)
    return f"scores of its hf backend at batch size 4: {local}"


def lm_eval_chat(c: Context) -> str:
    served = f"model={c['model']},base_url={c['base_url']}/chat/completions,num_concurrent=4"
    options = ("--apply_chat_template",)
    server = lm_eval_scores(c, "sums_text", "local-chat-completions", served, *options)
    hf = f"pretrained={c['folder']},dtype=float32"
    local = lm_eval_scores(c, "sums_text", "hf", hf, "--device", "cpu", *options)
    same(server, local)
    return f"scores of its hf backend: {local}"


def many_at_once(c: Context) -> str:
    """Sixteen clients of an event loop share one batch."""
    import httpx

    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(timeout=120) as client:
            url, headers = f"{c['base_url']}/chat/completions", {"Authorization": f"Bearer {c['key']}"}
            posts = [client.post(url, json=c["chat"]["body"], headers=headers) for _ in range(16)]
            return [r.json()["choices"][0]["message"]["content"] for r in await asyncio.gather(*posts)]

    same(asyncio.run(all_of_them()), [c["chat"]["text"]] * 16)
    return "16 requests at once"
