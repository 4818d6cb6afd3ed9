"""Let a language model guess a number: echo '{"game": 1, "number": 8}' | python guess_agent.py

A program like any other that uses the `openai` client. It knows nothing of training: it talks to the server
at OPENAI_BASE_URL with the key OPENAI_API_KEY, and prints how the game ended.
"""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from openai import OpenAI

TRIES = 4


def play(game: Mapping[str, Any], client: OpenAI) -> str:
    messages: list[Any] = [
        {"role": "user", "content": f"Game {game['game']}: guess my number from 1 to 9."},
    ]
    for attempt in range(1, TRIES + 1):
        reply = client.chat.completions.create(model="any", messages=messages, max_tokens=6)
        answer = reply.choices[0].message
        found = re.search(r"[1-9]", answer.content or "")
        guess = int(found[0]) if found else 0
        if guess == game["number"]:
            return f"won after {attempt}"
        messages += [answer, {"role": "user", "content": hint(guess, game["number"])}]
    return "lost"


def hint(guess: int, number: int) -> str:
    if not guess:
        return "Write a digit."
    return "Higher." if guess < number else "Lower."


if __name__ == "__main__":
    print(play(json.load(sys.stdin), OpenAI()))
