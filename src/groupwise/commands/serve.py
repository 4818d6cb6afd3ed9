"""`groupwise serve`, an OpenAI-compatible server, and `serve-rollouts`, vLLM servers for training."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated

import typer

from groupwise.commands.options import Overrides, Target
from groupwise.config.coerce import between, one_of
from groupwise.config.schema import rank_known_to_vllm
from groupwise.errors import ConfigError

KEY = "GROUPWISE_API_KEY"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+")

AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        show_default=False, help="Host name to accept without an API key, for reverse proxies; repeatable."
    ),
]


CORS = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        show_default=False,
        help="Origin whose web pages may use the server, such as https://app.example; *: any; repeatable.",
    ),
]


def serve(
    target: Target = "tiny",
    arguments: Overrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; addresses other than loopback require an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar=KEY, help="API key that clients must send.")] = None,
    name: Annotated[str | None, typer.Option(help="Model name in the API.")] = None,
    max_sequences: Annotated[int, typer.Option(help="Maximum concurrent sequences.")] = 64,
    max_context: Annotated[int, typer.Option(help="Maximum tokens of prompt and completion.")] = 2048,
    allowed_host: AllowedHost = None,
    cors: CORS = None,
    queue: Annotated[int, typer.Option(help="Maximum queued answers; requests beyond get status 429.")] = 128,
) -> None:
    """Serve a model over an OpenAI-compatible API: chat and completions, streaming, continuous batching."""
    between("--port", port, 0, 65535)
    between("--max-sequences", max_sequences, 1)
    between("--max-context", max_context, 2)
    between("--queue", queue, 0)
    for origin in cors or ():
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ConfigError(f"--cors must be an origin such as https://app.example, or *; got {origin!r}")
    from groupwise.serve.http_server import is_loopback

    if not is_loopback(host) and not api_key:
        raise ConfigError(f"{host} is reachable from other machines; set --api-key or {KEY}")
    from groupwise.evaluate.target import find_named

    named = find_named(target, arguments or [])
    from groupwise.model.load import load_for_generation
    from groupwise.model.resolve import model_folder
    from groupwise.serve.ipc import EngineEndpoint
    from groupwise.serve.openai_server import (
        StartupConfig,
        check_address,
        leave_a_core,
        open_front,
        start_front,
    )

    check_address(host, port)
    front = start_front()  # its imports run while the model loads
    print(f"loading {named.config.model.name} …", flush=True)
    policy = load_for_generation(named.config.model, rank=named.target.rank, trained=named.target.trained)
    leave_a_core(policy)
    side = EngineEndpoint(
        policy,
        front,
        slots=max_sequences,
        context=max_context,
        waiting=queue,
        speculative=named.config.engine.speculative,
    )
    model = name or os.path.basename(target.rstrip("/"))
    opening = StartupConfig(
        host=host,
        port=port,
        tokenizer=model_folder(named.config.model.name),
        vocabulary=policy.vocabulary,
        model=model,
        context=side.engine.context,
        slots=max_sequences,
        api_key=api_key,
        allowed_hosts=tuple(allowed_host or ()),
        cors=tuple(cors or ()),
        template_args=named.config.model.chat_template_args,
    )
    port = open_front(front, opening)
    shown = f"[{host}]" if ":" in host else host
    print(f"{model} at http://{shown}:{port}/v1, {side.engine.context} tokens of context", flush=True)
    print(f"equivalent vLLM command: {named.vllm_command}", flush=True)
    side.run()


NAME = "policy"
"""The served name of the base model, as the trainer requests it."""


def serve_rollouts(
    model: Annotated[
        str,
        typer.Argument(help="Model to serve, as in training: tiny, a Hugging Face model ID, or a folder."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; do not expose it outside your network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    lora_r: Annotated[int, typer.Option(help="LoRA rank, as in training; 0: full fine-tuning.")] = 16,
    max_context: Annotated[int, typer.Option(help="Maximum tokens of prompt and completion.")] = 4096,
    max_sequences: Annotated[int, typer.Option(help="Maximum concurrent sequences.")] = 256,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, as in training.")] = "bfloat16",
    gpus: Annotated[int, typer.Option(help="Number of GPUs for tensor parallelism.")] = 1,
    python: Annotated[
        str, typer.Option(help="Python interpreter of the environment that has vLLM installed.")
    ] = "",
    start: Annotated[
        bool, typer.Option("--start", help="Start the server instead of printing the command.")
    ] = False,
    vllm_args: Annotated[
        list[str] | None, typer.Argument(help="Additional arguments, passed to vLLM unchanged.")
    ] = None,
) -> None:
    """Print the command of a vLLM server that generates for a run (engine.kind=vllm), or start it."""
    between("--port", port, 1, 65535)
    between("--lora-r", lora_r, 0)
    between("--gpus", gpus, 1)
    one_of("--dtype", dtype, ("float32", "bfloat16"))
    from groupwise.model.resolve import name_for_others

    command = [
        *server_command(
            python or (sys.executable if find_spec("vllm") else "python"),
            name_for_others(model),
            lora_r=lora_r,
            settings={
                "--host": host,
                "--port": port,
                "--dtype": dtype,
                "--max-model-len": max_context,
                "--max-num-seqs": max_sequences,
                "--tensor-parallel-size": gpus,
            },
        ),
        *(vllm_args or ()),
    ]
    if not start:
        print(" ".join([*(f"{key}={value}" for key, value in ENVIRONMENT.items()), shlex.join(command)]))
        return
    os.execvpe(command[0], command, {**os.environ, **ENVIRONMENT})


ENVIRONMENT = {
    # Allow loading adapters at runtime, and the endpoints that update weights and reset caches.
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",
}


def server_command(python: str, model: str, *, lora_r: int, settings: dict[str, object]) -> Sequence[str]:
    """Return the command line of a vLLM server for training."""
    arguments = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    arguments += ["--served-model-name", NAME]
    # Log-probs of the sampling distribution: after temperature and truncation.
    arguments += ["--logprobs-mode", "processed_logprobs"]
    for name, value in settings.items():
        arguments += [name, str(value)]
    if lora_r:
        rank = str(rank_known_to_vllm(lora_r))
        # Two adapters, because the new one is loaded before the old one is unloaded.
        arguments += ["--enable-lora", "--max-lora-rank", rank, "--max-loras", "2", "--max-cpu-loras", "4"]
    return arguments
