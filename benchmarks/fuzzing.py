r"""Completions that no one would write: mutated golds, LaTeX in pieces, raw bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

PIECES = (
    *(
        r"\frac",
        r"\sqrt",
        r"\left(",
        r"\right)",
        r"\begin{pmatrix}",
        r"\end{pmatrix}",
        r"\text{",
        r"\boxed{",
        r"\pi",
    ),
    *(
        r"\infty",
        r"\cup",
        r"\pm",
        r"\sin",
        r"\log",
        r"\circ",
        r"\%",
        r"\$",
        r"\\",
        r"\{",
        r"\}",
        r"\binom",
        r"\!",
    ),
    *(
        r"\sum_{k=1}^{9}",
        r"\int",
        r"\lfloor",
        r"\rfloor",
        r"\cdot",
        r"\times",
        r"\mathrm{",
        r"\phantom",
        r"\in",
    ),
    *(
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        "|",
        "^",
        "^^",
        "_",
        "**",
        "+",
        "-",
        "*",
        "/",
        "//",
        "=",
        "<",
        ">",
        "!",
        "%",
    ),
    *(
        "x",
        "y",
        "e",
        "i",
        "sin",
        "cm",
        "and",
        "or",
        "0",
        "1",
        "2",
        "9",
        "10",
        "999999999",
        "1e9",
        ".5",
        "3.14",
    ),
    *(
        ",",
        ";",
        ":",
        " ",
        "\n",
        "\t",
        "$",
        "&",
        "#",
        "'",
        '"',
        "\\",
        "\0",
        "é",
        "π",
        "√",
        "²",
        "−",
        "∞",
        "\u202e",
    ),
)
TOWERS = (
    r"9^{9^{9^{9}}}",
    "9**9**9",
    r"\sqrt{9**9**9}",
    r"(10^{100})!",
    r"\binom{10^9}{5}",
    r"\sum_{k=1}^{10^9} k^{-3}",
    r"\lfloor 9^{9^9} \rfloor",
    r"\int_0^{\infty} e^{-x^{99}} dx",
    "(" * 3000,
    "{" * 3000 + "}" * 3000,
    r"\boxed{" * 2000,
    r"\frac{" * 500,
    "1+" * 5000 + "1",
    "x^" * 400 + "2",
    "9" * 100_000,
    r"\left" * 1000,
    "-" * 900,
)


def fuzzed(golds: Sequence[str], count: int, *, seed: int) -> Iterator[str]:
    """Yield completions, most of them with something in a box."""
    rng = random.Random(seed)
    yield from (rf"\boxed{{{tower}}}" for tower in TOWERS)
    yield from TOWERS
    makers = (mutated, pieced, raw_bytes)
    for number in range(count - 2 * len(TOWERS)):
        inside = makers[number % len(makers)](rng, golds)
        yield rf"so \boxed{{{inside}}}." if rng.random() < 0.9 else inside


def mutated(rng: random.Random, golds: Sequence[str]) -> str:
    """Change a gold answer in a few places: cut, repeat, swap, insert."""
    text = list(rng.choice(golds))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(text) + 1)
        match rng.randrange(4):
            case 0:
                text[at : at + rng.randint(1, 3)] = []
            case 1:
                text[at:at] = text[at : at + 5] * rng.randint(1, 20)
            case 2:
                text[at:at] = list(rng.choice(PIECES))
            case 3:
                text[at:at] = list(rng.choice(golds))
    return "".join(text)


def pieced(rng: random.Random, golds: Sequence[str]) -> str:
    return "".join(rng.choice(PIECES) for _ in range(int(rng.expovariate(1 / 12)) + 1))


def raw_bytes(rng: random.Random, golds: Sequence[str]) -> str:
    return rng.randbytes(rng.randint(0, 80)).decode("utf-8", errors="replace")
