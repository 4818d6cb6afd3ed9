"""The least that a step of `against_trl` can take on this CPU: its matrix products and nothing else.

    python benchmarks/products.py

Each linear layer of the built-in model, times the tokens of the case `tiny-full` at fixed lengths (512
answers of 128 tokens): one product a token to generate, in steps of 512 rows, and three to train (forward
and backward to input and weight), in passes of 4,096. No attention, no norms, no output layer, no
optimizer: whoever computes the same function in float32 needs at least this long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from cases import CASES, TINY_FOLDER
from machine import machine, markdown

PASS = 4096


def fastest(call: Callable[[], object], *, repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def linears() -> list[tuple[int, int]]:
    """Inputs and outputs of a layer's products, those of one input taken together."""
    config = json.loads((TINY_FOLDER / "config.json").read_text(encoding="utf-8"))
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads = config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    one = [(width, heads * size), (config["num_attention_heads"] * size, width), (width, 2 * inner)]
    return [*one, (inner, width)] * config["num_hidden_layers"]


def seconds_a_token(rows: int, *, backward: bool) -> float:
    taken = 0.0
    for inputs, outputs in linears():
        x_RN, grad_RP, weight_PN = (
            torch.randn(shape) for shape in ((rows, inputs), (rows, outputs), (outputs, inputs))
        )
        taken += fastest(lambda x=x_RN, w=weight_PN: x @ w.T)
        if backward:
            taken += fastest(lambda g=grad_RP, w=weight_PN: g @ w)
            taken += fastest(lambda g=grad_RP, x=x_RN: g.T @ x)
    return taken / rows


@torch.no_grad()
def main() -> None:
    case = CASES["tiny-full"]
    answers = case.prompts * case.group_size
    tokens = answers * case.max_tokens
    print(machine(threads=torch.get_num_threads(), torch=torch.__version__))
    generating = tokens * seconds_a_token(answers, backward=False)
    updating = tokens * seconds_a_token(PASS, backward=True)
    rows = [[f"{tokens:,}", f"{generating:.2f}", f"{updating:.2f}", f"{generating + updating:.2f}"]]
    print(markdown(("tokens", "generating, s", "updating, s", "both, s"), rows))


if __name__ == "__main__":
    main()
