"""`groupwise serve`: an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from groupwise.config.checks import between
from groupwise.errors import ConfigError
from groupwise.serve.http import is_loopback

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
    from groupwise.serve.opened import find_named

    named = find_named(target, words or [])
    from groupwise.model.load import load_for_generation
    from groupwise.model.source import model_folder
    from groupwise.serve.cores import leave_a_core
    from groupwise.serve.front import Opening, check_address, open_front, start_front
    from groupwise.serve.link import EngineSide

    check_address(host, port)
    front = start_front()  # it imports while the model loads
    policy = load_for_generation(named.config.model, rank=named.target.rank, trained=named.target.trained)
    leave_a_core(policy)
    side = EngineSide(policy, front, slots=max_sequences, context=max_context, waiting=queue)
    model = name or os.path.basename(target.rstrip("/"))
    opening = Opening(
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
