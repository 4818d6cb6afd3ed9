"""Between text and tokens: all of a policy that needs no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.files import write_atomically
from groupwise.model.resolve import first_line, unloadable
from groupwise.records import Message


class TokenizerCodec:
    """A tokenizer with its chat template."""

    def __init__(self, tokenizer: Any, *, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        """Tokens that the model tells apart, which may be more or fewer than the tokenizer has."""

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: a text has at least as many tokens as it has such segments."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        most: int | None = None,
    ) -> tuple[int, ...]:
        """Tokens of a prompt: through the chat template when there is one.

        A last message of role assistant is a beginning that the policy continues. `tools`: schemas of the
        functions that it may call. `most`: a text that must have more tokens is refused unread.
        """
        if self.tokenizer.chat_template is None:
            if tools:
                raise ConfigError("the model has no chat template: it cannot be given tools")
            text = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)
            return self.encode_text(text, most=most)
        messages: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        return self.encode_text(render(self.tokenizer, messages, tools=tools), special=False, most=most)

    def encode_results(self, results: Sequence[str], *, prefill: str, ended: bool) -> tuple[int, ...]:
        """Tokens from the end of a turn to the beginning of the next: what tools answered, and the glue.

        `ended`: the turn has its end token; one that was stopped gets it here, untrained.
        """
        return self.encode_all_results([results], prefill=prefill, ended=ended)[0]

    def encode_all_results(
        self, turns: Sequence[Sequence[str]], *, prefill: str, ended: bool
    ) -> list[tuple[int, ...]]:
        """The same for the results of several turns: the tokenizer works on them at the same time."""
        before = "" if ended else self.tokenizer.eos_token
        texts = [before + between_turns(self.tokenizer, results, prefill=prefill) for results in turns]
        found = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [self._known(ids) for ids in found]

    def encode_text(self, text: str, *, special: bool = True, most: int | None = None) -> tuple[int, ...]:
        """Tokens of a text as it is; `special`: with those that the tokenizer puts around any text.

        `most`: a text that must have more tokens is refused unread, for reading one takes minutes.
        """
        if most is not None and len(text) > most * self.longest:
            raise ConfigError(f"a prompt of {len(text)} characters cannot fit the context of {most} tokens")
        return self._known(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _known(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Refuse tokens without a row among the model's weights: looking one up ends the process on a GPU."""
        highest = max(ids, default=0)
        if highest >= self.vocabulary:
            raise ConfigError(
                f"the text holds {self.tokenizer.convert_ids_to_tokens(highest)!r}, token {highest} of the "
                f"tokenizer, and the model has only {self.vocabulary} tokens: do the two belong together?"
            )
        return tuple(ids)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def save_tokenizer(self, path: Path) -> None:
        """Write the tokenizer alone, as the `tokenizers` library reads it."""
        if (fast := getattr(self.tokenizer, "backend_tokenizer", None)) is not None:
            write_atomically(path, fast.to_str())


TOOLS_TEXT = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)
"""The Hermes form, for a template that knows nothing of tools."""
STAND_IN = "stand-in turn of the assistant"


def knows_tools(tokenizer: Any) -> bool:
    """Tell whether the template itself presents tools and their results."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template)
    return "tools" in text and "tool" in text.replace("tools", "")


def render(
    tokenizer: Any, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), more: bool = True
) -> str:
    """Return the conversation as text. `more`: the assistant's turn, begun or not, comes next."""
    prefilled = more and bool(messages) and messages[-1]["role"] == "assistant"
    shown: list[Message] = list(messages)
    extra: dict[str, Any] = {}
    if tools and knows_tools(tokenizer):
        extra["tools"] = list(tools)
    elif tools:
        shown = with_tools_text(shown, tools)
    if not knows_tools(tokenizer):
        shown = as_user_turns(shown)
    try:
        text: str = tokenizer.apply_chat_template(
            shown,
            tokenize=False,
            add_generation_prompt=more and not prefilled,
            continue_final_message=prefilled,
            **extra,
        )
    except Exception as error:  # a template may refuse a chat in any way it likes
        raise ConfigError(
            f"the model's chat template cannot write these messages: {error} ({type(error).__name__}); they "
            f"begin {list(messages)!r:.120}"
        ) from error
    return text


def with_tools_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Present the tools at the end of the system message."""
    text = TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        system = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [system, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def as_user_turns(messages: Sequence[Message]) -> list[Message]:
    """Put neighbouring tool results into one message of the user's."""
    shown: list[Message] = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            shown.append(message)
            continue
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if number and messages[number - 1]["role"] == "tool":
            shown[-1] = {"role": "user", "content": f"{shown[-1]['content']}\n{text}"}
        else:
            shown.append({"role": "user", "content": text})
    return shown


def between_turns(tokenizer: Any, results: Sequence[str], *, prefill: str = "") -> str:
    """Return what follows a turn's end token, up to where the next turn begins: the results, and the glue."""
    messages: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": STAND_IN},
        *({"role": "tool", "name": "tool", "content": result} for result in results),
    ]
    tail = render(tokenizer, messages).partition(STAND_IN)[2]
    end: str = tokenizer.eos_token
    if not tail.startswith(end):
        raise ConfigError(
            f"the chat template ends a turn of the assistant with {tail[:20]!r} and not with the end token "
            f"{end!r}: tools cannot be used with it"
        )
    return tail.removeprefix(end) + prefill


def first_difference(tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """Return where the stream that grows turn by turn leaves the template's rendering of the whole, or None.

    The conversation has thinking, two calls in a turn, and a second turn of calls.
    """
    opening: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hm?"}]
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
    turns = [f"<think>\nOne.\n</think>\n\n{call}\n{call}", f"<think>\nTwo.\n</think>\n\n{call}", "It is so."]
    results = [["first", "second"], ["third"]]
    grown = render(tokenizer, opening, tools=tools)
    tokens = list(tokenizer(grown, add_special_tokens=False)["input_ids"])
    messages = list(opening)
    for number, turn in enumerate(turns):
        written = turn + tokenizer.eos_token
        messages.append({"role": "assistant", "content": turn})
        if number < len(results):
            written += between_turns(tokenizer, results[number])
            messages += [{"role": "tool", "name": "search", "content": text} for text in results[number]]
        grown += written
        tokens += tokenizer(written, add_special_tokens=False)["input_ids"]
    whole = render(tokenizer, messages, tools=tools, more=False)
    if not whole.startswith(grown):
        at = next((i for i, (a, b) in enumerate(zip(grown, whole, strict=False)) if a != b), len(whole))
        around = slice(max(0, at - 20), at + 40)
        return f"at character {at}: turn by turn {grown[around]!r}, at once {whole[around]!r}"
    at_once = list(tokenizer(whole[: len(grown)], add_special_tokens=False)["input_ids"])
    if at_once != tokens:
        at = next((i for i, (a, b) in enumerate(zip(tokens, at_once, strict=False)) if a != b), len(at_once))
        return f"at token {at}: turn by turn {tokens[at : at + 5]}, at once {at_once[at : at + 5]}"
    return None


def template_verdict(folder: Path) -> tuple[bool, str]:
    """Tell whether the chat template in a model's folder lets a conversation with tools grow by tokens."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except unloadable() as error:
        raise ConfigError(f"cannot load the tokenizer in {folder}: {first_line(error)}") from error
    if tokenizer.chat_template is None:
        return False, "there is no chat template: tools and conversations are out of reach"
    manner = "its own form" if knows_tools(tokenizer) else "the Hermes form, as user turns"
    try:
        difference = first_difference(tokenizer)
    except ConfigError as error:
        return False, str(error)
    if difference is None:
        return True, f"turn by turn and at once give the same tokens; tools are shown in {manner}"
    return False, (
        f"turn by turn differs from at once {difference}; training keeps the tokens that were sampled, "
        "but a server that renders each conversation anew shows the model another one"
    )
