"""`groupwise serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated

import typer

from groupwise.config.coerce import between, one_of
from groupwise.config.schema import rank_known_to_vllm
from groupwise.errors import ConfigError
from groupwise.serve.http_server import is_loopback

KEY = "GROUPWISE_API_KEY"

AllowedHost = Annotated[
    list[str] | None,
    typer.Option(show_default=False, help="A reverse proxy's name, for requests without an API key."),
]


def serve(
    target: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run, checkpoint, adapter or model: folder or name.")
    ] = "tiny",
    words: Annotated[list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; other machines need an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 8000,
    api_key: Annotated[str | None, typer.Option(envvar=KEY, help="Clients must give it.")] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_sequences: Annotated[int, typer.Option(help="Answers written at once.")] = 64,
    max_context: Annotated[int, typer.Option(help="Tokens of prompt and answer together.")] = 2048,
    allowed_host: AllowedHost = None,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more are answered 429.")] = 128,
) -> None:
    """Serve a model like OpenAI: chat and completions, streamed, all requests in one batch."""
    between("--port", port, 0, 65535)
    between("--max-sequences", max_sequences, 1)
    between("--max-context", max_context, 2)
    between("--queue", queue, 0)
    if not is_loopback(host) and not api_key:
        raise ConfigError(f"{host} can be reached from other machines: set --api-key, or {KEY}")
    from groupwise.serve.load_target import find_named

    named = find_named(target, words or [])
    from groupwise.model.load import load_for_generation
    from groupwise.model.resolve import model_folder
    from groupwise.serve.frontend import StartupConfig, check_address, leave_a_core, open_front, start_front
    from groupwise.serve.ipc import EngineEndpoint

    check_address(host, port)
    front = start_front()  # it imports while the model loads
    policy = load_for_generation(named.config.model, rank=named.target.rank, trained=named.target.trained)
    leave_a_core(policy)
    side = EngineEndpoint(policy, front, slots=max_sequences, context=max_context, waiting=queue)
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
    )
    port = open_front(front, opening)
    shown = f"[{host}]" if ":" in host else host
    print(f"{model} at http://{shown}:{port}/v1, {side.engine.context} tokens of context", flush=True)
    print(f"the same with vLLM: {named.vllm_command}", flush=True)
    side.run()


NAME = "policy"
"""What the trainer calls the model without adapters."""


def serve_rollouts(
    model: Annotated[str, typer.Argument(help="tiny, a Hugging Face name, or a folder: as in training.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on: keep it inside your network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    lora_r: Annotated[int, typer.Option(help="Rank of the adapters; 0: every weight is trained.")] = 16,
    max_context: Annotated[int, typer.Option(help="Tokens of prompt and answer together.")] = 4096,
    max_sequences: Annotated[int, typer.Option(help="Answers written at once.")] = 256,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16: as in training.")] = "bfloat16",
    gpus: Annotated[int, typer.Option(help="GPUs that share the model (tensor parallel).")] = 1,
    python: Annotated[str, typer.Option(help="The Python that has vLLM.")] = "",
    start: Annotated[bool, typer.Option("--start", help="Start it instead of printing the command.")] = False,
    more: Annotated[list[str] | None, typer.Argument(help="Anything else, given to vLLM as it is.")] = None,
) -> None:
    """Print, or start, the vLLM server for engine.kind=vllm, whose weights follow the training."""
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
        *(more or ()),
    ]
    if not start:
        print(" ".join([*(f"{key}={value}" for key, value in ENVIRONMENT.items()), shlex.join(command)]))
        return
    os.execvpe(command[0], command, {**os.environ, **ENVIRONMENT})


ENVIRONMENT = {
    # Adapters are loaded while the server runs; whole weights and caches are changed by its workers.
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",
}


def server_command(python: str, model: str, *, lora_r: int, settings: dict[str, object]) -> Sequence[str]:
    """Return the words that start a server fit for training."""
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    words += ["--served-model-name", NAME]
    # Of the distribution that was drawn from: temperature and cuts included.
    words += ["--logprobs-mode", "processed_logprobs"]
    for name, value in settings.items():
        words += [name, str(value)]
    if lora_r:
        rank = str(rank_known_to_vllm(lora_r))
        # Two at once, as the new adapter comes before the old one goes.
        words += ["--enable-lora", "--max-lora-rank", rank, "--max-loras", "2", "--max-cpu-loras", "4"]
    return words
