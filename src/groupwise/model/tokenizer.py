"""Tokenizer and chat template: encoding, decoding, tool definitions and results as text.

`first_difference` checks that a template renders a conversation turn by turn as it renders it at once.
"""

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
        """Rows of the model's embedding, which may be more or fewer than the tokenizer's tokens."""

    @cached_property
    def longest(self) -> int:
        """Characters in the longest token; gives a lower bound on a text's number of tokens."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode(
        self,
        prompt: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        most: int | None = None,
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt, rendered by the chat template if there is one.

        The policy continues a last message of role assistant. `tools`: schemas of the functions it may call.
        `most`: reject a text that must have more tokens without encoding it.
        """
        if self.tokenizer.chat_template is None:
            if tools:
                raise ConfigError("the model has no chat template, which tools require; use another model")
            text = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)
            return self.encode_text(text, most=most)
        messages: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        return self.encode_text(render(self.tokenizer, messages, tools=tools), special=False, most=most)

    def encode_results(self, results: Sequence[str], *, prefill: str, ended: bool) -> tuple[int, ...]:
        """Return the tokens from the end of a turn to the start of the next: tool results and template text.

        `ended`: the turn has its end token. A turn without one gets it here, untrained.
        """
        return self.encode_all_results([results], prefill=prefill, ended=ended)[0]

    def encode_all_results(
        self, turns: Sequence[Sequence[str]], *, prefill: str, ended: bool, role: str = "tool"
    ) -> list[tuple[int, ...]]:
        """`encode_results` for several turns, tokenized in one batch.

        `role`: who speaks between the turns, the tools or the user (an environment).
        """
        before = "" if ended else self.tokenizer.eos_token
        texts = [
            before + between_turns(self.tokenizer, results, prefill=prefill, role=role) for results in turns
        ]
        batch = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [self._checked(ids) for ids in batch]

    def encode_text(self, text: str, *, special: bool = True, most: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a plain text; `special`: add the tokenizer's special tokens.

        `most`: reject a text that must have more tokens; encoding a huge text takes minutes.
        """
        if most is not None and len(text) > most * self.longest:
            raise ConfigError(f"a prompt of {len(text)} characters cannot fit the context of {most} tokens")
        return self._checked(self.tokenizer(text, add_special_tokens=special)["input_ids"])

    def _checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Raise ConfigError for tokens outside of the model's embedding, which would crash a GPU process."""
        highest = max(ids, default=0)
        if highest >= self.vocabulary:
            raise ConfigError(
                f"the text contains token {highest} ({self.tokenizer.convert_ids_to_tokens(highest)!r}), but "
                f"the model has only {self.vocabulary} tokens; use the model's own tokenizer"
            )
        return tuple(ids)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def save_tokenizer(self, path: Path) -> None:
        """Write the tokenizer in the format of the `tokenizers` library."""
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
"""Tool definitions in Hermes format, for chat templates without tool support."""
TEMPLATE_ARGS = "groupwise_chat_template_args"
"""Attribute of a tokenizer with the user's arguments for its chat template (`model.chat_template_args`)."""
STAND_IN = "stand-in turn of the assistant"


def knows_tools(tokenizer: Any) -> bool:
    """Whether the chat template supports tools and tool results."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template)
    return "tools" in text and "tool" in text.replace("tools", "")


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """Return the conversation as text. `add_generation_prompt`: the assistant continues it."""
    prefilled = add_generation_prompt and bool(messages) and messages[-1]["role"] == "assistant"
    rendered: list[Message] = list(messages)
    extra: dict[str, Any] = dict(getattr(tokenizer, TEMPLATE_ARGS, {}))
    if tools and knows_tools(tokenizer):
        extra["tools"] = list(tools)
    elif tools:
        rendered = with_tools_text(rendered, tools)
    if not knows_tools(tokenizer):
        rendered = as_user_turns(rendered)
    try:
        text: str = tokenizer.apply_chat_template(
            rendered,
            tokenize=False,
            add_generation_prompt=add_generation_prompt and not prefilled,
            continue_final_message=prefilled,
            **extra,
        )
    except Exception as error:  # a template may raise anything
        raise ConfigError(
            f"the model's chat template cannot render these messages: {error} ({type(error).__name__}); the "
            f"messages begin with {list(messages)!r:.120}"
        ) from error
    return text


def with_tools_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Append the tool definitions to the system message."""
    text = TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        system = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [system, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def as_user_turns(messages: Sequence[Message]) -> list[Message]:
    """Merge adjacent tool results into one user message."""
    merged: list[Message] = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            merged.append(message)
            continue
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if number and messages[number - 1]["role"] == "tool":
            merged[-1] = {"role": "user", "content": f"{merged[-1]['content']}\n{text}"}
        else:
            merged.append({"role": "user", "content": text})
    return merged


def between_turns(tokenizer: Any, results: Sequence[str], *, prefill: str = "", role: str = "tool") -> str:
    """Return the text between a turn's end token and the next turn: tool results and template text.

    Without a chat template, each text stands on lines of its own.
    """
    if tokenizer.chat_template is None:
        return "".join(f"\n{result}\n" for result in results) + prefill
    name = {"name": "tool"} if role == "tool" else {}
    messages: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": STAND_IN},
        *({"role": role, **name, "content": result} for result in results),
    ]
    tail = render(tokenizer, messages).partition(STAND_IN)[2]
    end: str = tokenizer.eos_token
    if not tail.startswith(end):
        raise ConfigError(
            f"the chat template ends an assistant turn with {tail[:20]!r}, not with the end token {end!r}; "
            "this template cannot be used for tools and environments"
        )
    return tail.removeprefix(end) + prefill


def first_difference(tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """Return where rendering turn by turn first differs from rendering the whole conversation, or None.

    The test conversation has reasoning, two tool calls in one turn, and a second turn with a call.
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
    whole = render(tokenizer, messages, tools=tools, add_generation_prompt=False)
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
    """Return whether a model's chat template supports conversations with tools turn by turn, and why."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except unloadable() as error:
        raise ConfigError(f"cannot load the tokenizer in {folder}: {first_line(error)}") from error
    if tokenizer.chat_template is None:
        return False, "the model has no chat template; tools and conversations are not supported"
    style = "the template's own format" if knows_tools(tokenizer) else "Hermes format, as user turns"
    try:
        difference = first_difference(tokenizer)
    except ConfigError as error:
        return False, str(error)
    if difference is None:
        return True, f"turn-by-turn and full rendering give the same tokens; tools are rendered in {style}"
    return False, (
        f"turn-by-turn and full rendering differ {difference}; training keeps the sampled tokens, but a "
        "server that renders the full conversation gives the model different tokens"
    )
