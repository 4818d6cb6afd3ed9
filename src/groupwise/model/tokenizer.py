"""Tokenizer and chat template: encoding, decoding, tool definitions and results as text.

`first_difference` checks that a template renders a conversation turn by turn as it renders it at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.errors import ConfigError
from groupwise.files import write_atomically
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
        self,
        turns: Sequence[Sequence[str]],
        *,
        prefill: str,
        ended: bool,
        role: str = "tool",
        names: Sequence[Sequence[str]] | None = None,
    ) -> list[tuple[int, ...]]:
        """`encode_results` for several turns, tokenized in one batch.

        `role` writes between the turns: the tools, or the user (an environment). `names`: the tools.
        """
        before = "" if ended else closing_token(self.tokenizer)
        texts = [
            before + between_turns(self.tokenizer, results, prefill=prefill, role=role, names=called)
            for results, called in zip(turns, names or [()] * len(turns), strict=True)
        ]
        batch = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [self._checked(ids) for ids in batch]

    def encode_continuation(
        self, messages: Sequence[Message], start: int, *, ended: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...] | None:
        """Return the tokens from the assistant's turn before message `start` to its next turn.

        `ended`: that turn has its end token. None: the chat template does not show where the turn ends.
        """
        after = after_turn(self.tokenizer, messages, start, tools=tools)
        if after is None:
            return None
        return self.encode_text("".join(after[ended:]), special=False)

    def encode_text(self, text: str, *, special: bool = True, most: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a plain text; `special`: add the tokenizer's special tokens.

        `most`: reject a text that must have more tokens; encoding a huge text takes minutes.
        """
        if most is not None and len(text) > most * self.longest:
            raise ConfigError(
                f"a prompt of {len(text)} characters cannot fit the context of {most} tokens; shorten it, or "
                "use a model with a longer context"
            )
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

    @cached_property
    def tool_format(self) -> str:
        """The format of tool calls that the chat template writes; `rollout.tool_calls` lists them."""
        return tool_format_of(self.tokenizer)

    def decode_calls(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn with special tokens, which delimit calls in some formats."""
        if self.tool_format == "hermes":
            return self.decode(tokens)
        kept, special = list(tokens), set(self.tokenizer.all_special_ids)
        if kept and kept[-1] in special:  # the end of the turn
            kept.pop()
        text: str = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def save_tokenizer(self, path: Path) -> None:
        """Write the tokenizer in the format of the `tokenizers` library."""
        if (fast := getattr(self.tokenizer, "backend_tokenizer", None)) is not None:
            write_atomically(path, fast.to_str())


OPEN_CALL = "<tool_call>"
TOOLS_TEXT = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    "<tools>\n{tools}\n</tools>\n\n"
)
"""Tool definitions, for chat templates that do not write them."""
HERMES_CALL = (
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
"""How to call a tool, for chat templates without tool support."""
TEMPLATE_ARGS = "groupwise_chat_template_args"
"""Attribute of a tokenizer with the user's arguments for its chat template (`model.chat_template_args`)."""
STAND_IN = "stand-in turn of the assistant"
TOOL_FORMATS = {
    "gemma": ("<start_function_call>", "<|tool_call>"),
    "harmony": ("to=functions.", "<|start|>assistant to="),
    "deepseek": ("<｜tool▁calls▁begin｜>",),
    "mistral": ("[TOOL_CALLS]",),
    "qwen_xml": ("<function=",),
    "pythonic": ("<|python_start|>", "[func_name1("),
    "llama": ('"parameters": ',),
}
"""Text in a chat template by which its format of tool calls is known; Hermes otherwise."""
TURN_ENDS = (
    *("<|call|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|im_end|>", "<|end|>"),
    *("</s>", "<｜end▁of▁sentence｜>", "<start_function_response>", "<|tool_response>"),
)
"""Tokens other than the tokenizer's end token that end a turn of an assistant."""


def knows_tools(tokenizer: Any) -> bool:
    """Whether the chat template supports tools and tool results."""
    text = template_text(tokenizer)
    return "tools" in text and "tool" in text.replace("tools", "")


def writes_calls(tokenizer: Any) -> bool:
    """Whether the chat template has a format of tool calls of its own."""
    return knows_tools(tokenizer) or tool_format_of(tokenizer) != "hermes"


def template_text(tokenizer: Any) -> str:
    """Return the chat template, or all of them."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)


def tool_format_of(tokenizer: Any) -> str:
    """Return the format of tool calls that a chat template writes."""
    text = template_text(tokenizer)
    if "tool_call" not in text and not knows_tools(tokenizer):
        return "hermes"
    if OPEN_CALL in text and TOOL_FORMATS["qwen_xml"][0] not in text:
        return "hermes"
    marked = (name for name, marks in TOOL_FORMATS.items() if any(mark in text for mark in marks))
    return next(marked, "hermes")


def written_calls(tokenizer: Any, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the turn of an assistant that makes these calls, as the chat template writes it."""
    question: list[Message] = [{"role": "user", "content": "Hm?"}]
    whole = render(tokenizer, [*question, calling_turn(tokenizer, calls)], add_generation_prompt=False)
    opening = render(tokenizer, question)
    if not whole.startswith(opening):  # the generation prompt begins a turn that is not written like this one
        opening = render(tokenizer, question, add_generation_prompt=False)
    return whole.removeprefix(opening)


def calling_turn(tokenizer: Any, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return an assistant message with calls, as the chat template expects it.

    Mistral's templates require ids of nine characters; DeepSeek's require no content.
    """
    as_text, no_content = arguments_as_text(tokenizer), tool_format_of(tokenizer) == "deepseek"
    made = []
    for number, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": json.dumps(dict(arguments)) if as_text else arguments}
        made.append({"id": f"call{number:05d}", "type": "function", "function": function})
    return {"role": "assistant", "content": None if no_content else "", "tool_calls": made}


def arguments_as_text(tokenizer: Any) -> bool:
    """Whether the chat template requires the arguments of a call as JSON text, as some of DeepSeek's do."""
    dumps = re.search(r"arguments['\"]?\]?\s*\|\s*tojson", template_text(tokenizer))
    return tool_format_of(tokenizer) == "deepseek" and dumps is None


def with_results(
    tokenizer: Any, calls: Sequence[tuple[str, Mapping[str, Any]]], results: Sequence[str]
) -> list[Message]:
    """Return a question, a turn with calls, and their results."""
    turn = calling_turn(tokenizer, calls)
    return [
        {"role": "user", "content": "Hm?"},
        turn,
        *(
            {"role": "tool", "name": name, "tool_call_id": call["id"], "content": result}
            for (name, _), call, result in zip(calls, turn["tool_calls"], results, strict=True)
        ),
    ]


def closing_token(tokenizer: Any) -> str:
    """Return the token that the chat template writes at the end of a turn, else the tokenizer's end token."""
    eos: str = tokenizer.eos_token
    if tokenizer.chat_template is None:
        return eos
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": STAND_IN}]
    tail = render(tokenizer, messages, add_generation_prompt=False).partition(STAND_IN)[2]
    return turn_end(tokenizer, tail) or eos


def turn_end(tokenizer: Any, tail: str) -> str | None:
    """Return the token that ends a turn, given the text that follows the turn."""
    return next((end for end in (tokenizer.eos_token, *TURN_ENDS) if tail.startswith(end)), None)


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
        rendered = with_tools_text(rendered, tools, example_call(tokenizer))
    if not knows_tools(tokenizer) and tool_format_of(tokenizer) == "hermes":
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


def example_call(tokenizer: Any) -> str:
    """Return what a call looks like, for templates that write calls but no tool definitions."""
    if tool_format_of(tokenizer) == "hermes":
        return HERMES_CALL
    call = turn_text(tokenizer, written_calls(tokenizer, [("<function-name>", {"<argument>": "<value>"})]))
    return f"For each function call, write:\n{call.strip()}"


def with_tools_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], example: str
) -> list[Message]:
    """Append the tool definitions to the system message."""
    definitions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = TOOLS_TEXT.format(tools=definitions) + example
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


def between_turns(
    tokenizer: Any,
    results: Sequence[str],
    *,
    prefill: str = "",
    role: str = "tool",
    names: Sequence[str] = (),
) -> str:
    """Return the text between a turn's end token and the next turn: tool results and template text.

    Without a chat template, each text stands on lines of its own.
    """
    if tokenizer.chat_template is None:
        return "".join(f"\n{result}\n" for result in results) + prefill
    if names and role == "tool":
        return after_calls(tokenizer, results, names) + prefill
    name = {"name": "tool"} if role == "tool" else {}
    messages: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": STAND_IN},
        *({"role": role, **name, "content": result} for result in results),
    ]
    tail = render(tokenizer, messages).partition(STAND_IN)[2]
    end = turn_end(tokenizer, tail)
    if end is None:
        raise ConfigError(
            f"the chat template ends an assistant turn with {tail[:20]!r}, not with the end token "
            f"{tokenizer.eos_token!r}; this template cannot be used for tools and environments"
        )
    return tail.removeprefix(end) + prefill


def after_calls(tokenizer: Any, results: Sequence[str], names: Sequence[str]) -> str:
    """Return the text after the end token of a turn that called tools, up to the next turn.

    Templates of these formats render results only after the calls that they belong to.
    """
    messages = with_results(tokenizer, [(name or "tool", {"value": STAND_IN}) for name in names], results)
    try:
        tail = render(tokenizer, messages).rpartition(STAND_IN)[2]
    except ConfigError:
        if len(names) == 1:
            raise
        return between_turns(tokenizer, results)  # a template of one call a turn
    ends = [end for end in (tokenizer.eos_token, *TURN_ENDS) if end in tail]
    if not ends:
        raise ConfigError(
            "the chat template does not end a turn that calls tools; it cannot be used for tools"
        )
    return tail.partition(min(ends, key=tail.index))[2]


def after_turn(
    tokenizer: Any, messages: Sequence[Message], start: int, *, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, str] | None:
    """Return the end token of the assistant's turn before message `start`, and the text after it, or None."""
    if tokenizer.chat_template is None:
        return "", "".join(f"\n{message['content']}\n" for message in messages[start:])
    turn: dict[str, Any] = {"role": "assistant", "content": STAND_IN}
    if calls := messages[start - 1].get("tool_calls"):
        *others, last = calls
        value: Any = {"value": STAND_IN}
        value = json.dumps(value) if arguments_as_text(tokenizer) else value
        marked = {**last, "function": {**last["function"], "arguments": value}}
        turn = {**messages[start - 1], "tool_calls": [*others, marked]}
    text = render(tokenizer, [*messages[: start - 1], turn, *messages[start:]], tools=tools)
    if text.count(STAND_IN) != 1:
        return None
    tail = text.partition(STAND_IN)[2]
    ends = [end for end in (tokenizer.eos_token, *TURN_ENDS) if end in tail]
    end = min(ends, key=tail.index, default=None)
    if end is None or (not calls and not tail.startswith(end)):
        return None
    return end, tail.partition(end)[2]


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
        written = turn + closing_token(tokenizer)
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


ReadCalls = Callable[[str, str], Sequence[Any]]
"""Parses the calls in a turn's text; the second argument is the format."""


def unread_calls(tokenizer: Any, read: ReadCalls) -> str | None:
    """Return why calls that the template writes are not understood; None if they are, or it writes none."""
    try:
        return trial_calls(tokenizer, read)[2] if writes_calls(tokenizer) else None
    except ConfigError:
        return None  # the first rollout with tools says what the template refuses


def trial_calls(tokenizer: Any, read: ReadCalls) -> tuple[list[tuple[str, dict[str, Any]]], str, str | None]:
    """Return calls, the turn in which the template writes them, and why it is not understood."""
    calls: list[tuple[str, dict[str, Any]]] = [("search", {"query": "a b", "limit": 3}), ("add", {"x": 1})]
    try:
        turn = written_calls(tokenizer, calls)
    except ConfigError:  # a template of one call a turn
        calls = calls[:1]
        turn = written_calls(tokenizer, calls)
    style = tool_format_of(tokenizer)
    parsed = [(call.name, dict(call.arguments)) for call in read(turn_text(tokenizer, turn), style)]
    calls = calls[:1] if parsed == calls[:1] else calls  # a template that writes the first call only
    expected = calls
    if style == "qwen_xml":  # every argument is text
        expected = [(name, {key: str(value) for key, value in rest.items()}) for name, rest in calls]
    if parsed == expected:
        return calls, turn, None
    shown = f"writes a call as {turn[:200]!r}" if calls[0][0] in turn else "does not write calls"
    return calls, turn, f"the chat template {shown}; only calls in {style} format are read"


def calls_difference(tokenizer: Any, read: ReadCalls) -> str | None:
    """Return why calls that the template writes are not understood or continued turn by turn, or None."""
    calls, turn, reason = trial_calls(tokenizer, read)
    if reason is not None or tool_format_of(tokenizer) == "hermes":
        return reason
    names, results = [name for name, _ in calls], ["first", "second"][: len(calls)]
    messages = with_results(tokenizer, calls, results)
    turn = turn.rstrip("\n")  # what follows the end token belongs to the text between the turns
    grown = render(tokenizer, messages[:1]) + turn + after_calls(tokenizer, results, names)
    whole = render(tokenizer, messages)
    at = next((i for i, (a, b) in enumerate(zip(grown, whole, strict=False)) if a != b), None)
    if at is None and len(grown) == len(whole):
        after = after_calls(tokenizer, results, names)
        texts = (grown.removesuffix(after), after, whole)
        before, between, at_once = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        return None if [*before, *between] == list(at_once) else "in the tokens between two turns"
    at = min(len(grown), len(whole)) if at is None else at
    around = slice(max(0, at - 20), at + 40)
    return f"after calls, at character {at}: turn by turn {grown[around]!r}, at once {whole[around]!r}"


def turn_text(tokenizer: Any, turn: str) -> str:
    """Return a rendered turn without its end token."""
    for end in (tokenizer.eos_token, *TURN_ENDS):
        turn = turn.rstrip("\n").removesuffix(end)
    return turn
