"""A text game: guess the number. `groupwise train guess.py --model …`, or `python guess.py`."""

import re

import groupwise as gw


class Guess:
    def reset(self, example: gw.Example) -> str:
        self.number = example["number"]
        return f"Game {example['game']}: guess my number from 1 to 9."

    def reply(self, text: str) -> str | gw.Reply:
        guess = int((re.search(r"[1-9]", text) or "0")[0])
        if guess == self.number:
            return gw.Reply("Right.", reward=1.0, done=True)
        return "Higher." if guess < self.number else "Lower."


games = [{"game": n, "number": n * 7 % 9 + 1} for n in range(200)]
task = gw.Task(name="guess", examples=games, environment=Guess)
if __name__ == "__main__":
    turns = {"max_tokens": 6, "stop": list("123456789"), "temperature": 1.0, "prompts": 12, "refill": 0}
    tools = {"max_turns": 4, "max_tokens": 120}
    gw.train(task, max_steps=40, learning_rate=3e-4, tools=tools, rollout=turns)
