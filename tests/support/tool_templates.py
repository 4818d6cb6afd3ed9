"""Tokenizers whose chat templates write tool calls in each format that models use."""

from __future__ import annotations

import copy

from tests.support.small_models import tiny_tokenizer

ROLES = (
    "{%- for m in messages -%}{%- if m.role == 'tool' -%}"
    "<|im_start|>tool {{ m.name }}\n{{ m.content }}<|im_end|>\n"
    "{%- elif m.tool_calls -%}<|im_start|>assistant\nCALLS<|im_end|>\n"
    "{%- else -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endif -%}{%- endfor -%}"
    "{%- if tools -%}{{ tools | length }} tools{%- endif -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)
EACH = "{%- for c in m.tool_calls -%}ONE{%- endfor -%}"
ARGUMENTS = "{{ c.function.arguments | tojson }}"
NAME = "{{ c.function.name }}"
WRITERS = {
    "hermes": EACH.replace(
        "ONE", f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>'
    ),
    "qwen_xml": EACH.replace(
        "ONE",
        f"<tool_call>\n<function={NAME}>\n"
        "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
        "{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    ),
    "llama": EACH.replace(
        "ONE", f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}{{{{ "" if loop.last else "; " }}}}'
    ),
    "mistral": "[TOOL_CALLS]["
    + EACH.replace(
        "ONE", f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}{{{{ "" if loop.last else ", " }}}}'
    )
    + "]",
    "deepseek": "<｜tool▁calls▁begin｜>"
    + EACH.replace(
        "ONE", f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{{{{ c.function.arguments }}}}<｜tool▁call▁end｜>"
    )
    + "<｜tool▁calls▁end｜>",
    "harmony": EACH.replace("ONE", f"<|channel|>commentary to=functions.{NAME} json<|message|>{ARGUMENTS}"),
    "gemma": EACH.replace(
        "ONE",
        f"<start_function_call>call:{NAME}{{{{ '{{' }}}}{{% for k, v in c.function.arguments.items() %}}"
        "{{ k }}:{% if v is string %}<escape>{{ v }}<escape>{% else %}{{ v }}{% endif %}"
        "{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}<end_function_call>",
    ),
}
"""Minimal chat templates, each of which writes calls in one format."""


def tokenizer_of(style: str):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = ROLES.replace("CALLS", WRITERS[style]).replace(
        "<|im_end|>", tokenizer.eos_token
    )
    return tokenizer
