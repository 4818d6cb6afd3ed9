"""Arguments for a model's chat template, and a model without one."""

from __future__ import annotations

from types import SimpleNamespace

from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.model.load import load_policy, load_tokenizer
from groupwise.model.policy import Policy
from groupwise.model.resolve import model_folder
from groupwise.model.tokenizer import render

TEMPLATE = "{{ messages[0].content }}{% if enable_thinking %} think{% else %} hurry{% endif %}"


def test_arguments_reach_the_chat_template():
    tokenizer = load_tokenizer(model_folder("tiny"), template_args={"enable_thinking": True})
    tokenizer.chat_template = TEMPLATE
    assert render(tokenizer, [{"role": "user", "content": "Hm?"}]) == "Hm? think"
    plain = load_tokenizer(model_folder("tiny"))
    plain.chat_template = TEMPLATE
    assert render(plain, [{"role": "user", "content": "Hm?"}]) == "Hm? hurry"


def test_the_setting_reaches_the_policy():
    policy = load_policy(
        ModelConfig(device="cpu", chat_template_args={"enable_thinking": True}), LoraConfig(r=0)
    )
    policy.tokenizer.chat_template = TEMPLATE
    assert policy.decode(policy.encode("7")).replace(" ", "").endswith("7think")


def test_a_model_without_a_chat_template_gets_a_notice():
    def notices(template):
        bare = SimpleNamespace(
            unpacked_bytes=0,
            general=None,
            text_part=None,
            tokenizer=SimpleNamespace(chat_template=template),
        )
        return list(Policy.notices(bare))

    assert notices("{{ messages }}") == []
    assert "the model has no chat template" in notices(None)[0]
