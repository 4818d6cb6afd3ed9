"""Train the policy that `guess_agent.py` talks to: `python train_agent.py`."""

from guess_agent import play
from openai import OpenAI

import groupwise as gw


def run_agent(example: gw.Example, base_url: str, api_key: str) -> str:
    return play(example, OpenAI(base_url=base_url, api_key=api_key))


def won(rollout: gw.Rollout, example: gw.Example) -> float:
    return float(rollout.text.startswith("won"))


games = [{"game": n, "number": n * 7 % 9 + 1} for n in range(200)]
task = gw.Task(name="guess_agent", examples=games, agent=run_agent, rewards=[won])
if __name__ == "__main__":
    rollout = {"max_tokens": 6, "temperature": 1.5, "prompts": 8, "group_size": 16, "refill": 0}
    gw.train(task, max_steps=40, learning_rate=3e-4, rollout=rollout)
