"""A policy is a Hugging Face model in and out; what cannot work is refused in one sentence."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DogeConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
)

from groupwise import cli
from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import ConfigError
from groupwise.model.attention.compatibility import check_attention
from groupwise.model.attention.packed import PackedLayout
from groupwise.model.load import causal_model, load_policy
from groupwise.model.ops.equivalence import float32_excerpt
from groupwise.model.policy import Policy
from groupwise.model.resolve import TINY_FOLDER
from tests.support.small_models import VOCABULARY, policy_of, small_model, tiny_tokenizer, with_more_tokens

FULL = LoraConfig(r=0)
CPU = torch.device("cpu")


def model_config(name: object = "tiny", **settings: Any) -> ModelConfig:
    return ModelConfig(name=str(name), device="cpu", **{"dtype": "float32", **settings})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in model's folder, to break."""
    return Path(shutil.copytree(TINY_FOLDER, tmp_path / "model"))


def our_logits(policy: Policy, tokens: Tensor) -> Tensor:
    layout = PackedLayout.build([(len(tokens), ())], device=CPU)
    with torch.no_grad():
        return policy.logits(policy.hidden(tokens, torch.arange(len(tokens)), layout))


TOKENS = torch.arange(40, 70)


def test_a_plain_prompt_goes_through_the_chat_template() -> None:
    policy, tokenizer = policy_of(small_model()), tiny_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1"}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(policy.encode("1 + 1")) == text
    assert "1 + 1" in text


def test_a_last_message_of_the_assistant_is_continued_not_closed() -> None:
    policy, tokenizer = policy_of(small_model()), tiny_tokenizer()
    asked = [{"role": "user", "content": "1 + 1"}]
    prefilled = [*asked, {"role": "assistant", "content": "Let me see. "}]
    assert policy.encode(prefilled) == policy.encode(asked) + tuple(
        tokenizer("Let me see. ", add_special_tokens=False)["input_ids"]
    )
    assert policy.encode(prefilled)[-1] not in policy.end_tokens


def test_without_a_chat_template_the_text_itself_is_the_prompt() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    policy = Policy(small_model(), tokenizer)
    assert policy.decode(policy.encode("1 + 1")) == "1 + 1"
    both = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1"}]
    assert policy.decode(policy.encode(both)) == "Be brief.\n1 + 1"


@pytest.mark.parametrize("template", [True, False])
def test_a_token_that_only_the_tokenizer_has_is_one_sentence(template: bool) -> None:
    tokenizer = with_more_tokens()
    if not template:
        tokenizer.chat_template = None
    policy = Policy(small_model(), tokenizer)
    sentence = rf"the text contains token \d+ \('<more>'\), but the model has only {VOCABULARY} tokens"
    for asked in ("1 <more>", [{"role": "user", "content": "<more>"}]):
        with pytest.raises(ConfigError, match=sentence):
            policy.encode(asked)
    assert policy.encode("1 + 1")
    if template:
        with pytest.raises(ConfigError, match=sentence):
            policy.encode_results(["4", "<more>"], prefill="", ended=True)


def test_decoding_gives_back_the_text_without_the_end_token() -> None:
    policy, tokenizer = policy_of(small_model()), tiny_tokenizer()
    tokens = tokenizer("a  b .", add_special_tokens=False)["input_ids"]
    assert policy.decode([*tokens, tokenizer.eos_token_id]) == "a  b ."


@pytest.mark.parametrize(("named", "expected"), [([5, 9], {5, 9}), (7, {7}), (None, set())])
def test_every_end_token_that_the_files_name_ends_an_answer(named: Any, expected: set[int]) -> None:
    model = small_model()
    model.generation_config.eos_token_id = named
    assert Policy(model, tiny_tokenizer()).end_tokens == expected | {tiny_tokenizer().eos_token_id}


def test_trainable_parameters_are_all_of_them_or_the_adapters() -> None:
    full = policy_of(small_model(tie_word_embeddings=True))
    assert "model.embed_tokens.weight" in full.trainable()
    assert "lm_head.weight" not in full.trainable()  # tied: once
    adapted = load_policy(model_config(), LoraConfig(r=2))
    assert adapted.trainable()
    assert all("lora_" in name for name in adapted.trainable())
    assert all(p.dtype == torch.float32 for p in adapted.trainable().values())


def test_adapters_of_a_half_precision_model_keep_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    policy = load_policy(model_config(dtype="bfloat16"), LoraConfig(r=2))
    assert policy.head_weight.dtype == torch.bfloat16
    assert {p.dtype for p in policy.trainable().values()} == {torch.float32}


def test_a_saved_model_loads_with_transformers_alone(tmp_path: Path) -> None:
    policy = load_policy(model_config(), FULL)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter += 0.01
    policy.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = loaded(TOKENS[None]).logits[0]
    torch.testing.assert_close(our_logits(policy, TOKENS), expected, rtol=1e-4, atol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    again = load_policy(model_config(), FULL, trained=tmp_path)
    assert torch.equal(our_logits(again, TOKENS), our_logits(policy, TOKENS))


def test_a_saved_adapter_loads_with_peft_alone(tmp_path: Path) -> None:
    policy = load_policy(model_config(), LoraConfig(r=2))
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter += 0.1
    policy.save(tmp_path)
    assert not list(tmp_path.glob("model*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)
    with torch.no_grad():
        plain = base(TOKENS[None]).logits[0]
        adapted = peft.PeftModel.from_pretrained(base, tmp_path)(TOKENS[None]).logits[0]
    ours = our_logits(policy, TOKENS)
    assert (ours - plain).abs().max() > 1e-3
    torch.testing.assert_close(ours, adapted, rtol=1e-4, atol=1e-4)
    with policy.reference() as reference:
        torch.testing.assert_close(our_logits(reference, TOKENS), plain, rtol=1e-4, atol=1e-4)
    again = load_policy(model_config(), LoraConfig(r=2), trained=tmp_path)
    assert torch.equal(our_logits(again, TOKENS), ours)
    assert again.trainable().keys() == policy.trainable().keys()


def test_the_reference_of_a_full_policy_stays_the_model_that_was_named(tmp_path: Path) -> None:
    first = load_policy(model_config(), FULL)
    before = our_logits(first, TOKENS)
    with torch.no_grad():
        first.head_weight.add_(0.05)
    first.save(tmp_path)
    resumed = load_policy(model_config(), FULL, trained=tmp_path, reference=True)
    assert not torch.equal(our_logits(resumed, TOKENS), before)
    with resumed.reference() as reference:
        assert torch.equal(our_logits(reference, TOKENS), before)
        assert not reference.trainable()


def test_weights_lie_alike_in_memory_whatever_file_they_come_from(tmp_path: Path) -> None:
    model = small_model()
    model.config.save_pretrained(tmp_path)
    for size in range(1, 65, 8):  # of the header, which the weights follow
        metadata = {"format": "pt", "more": "x" * size}
        save_file(model.state_dict(), tmp_path / "model.safetensors", metadata=metadata)
        loaded = causal_model(tmp_path, torch.float32, torch.device("cpu"))
        assert {parameter.data_ptr() % 64 for parameter in loaded.parameters()} == {0}


def test_nothing_is_printed_while_loading_and_saving(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    load_policy(model_config(), FULL).save(tmp_path)
    load_policy(model_config(), FULL, trained=tmp_path, reference=True)
    load_policy(model_config(), LoraConfig(r=2)).save(tmp_path / "adapter")
    assert capfd.readouterr() == ("", "")


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_half_precision_does_not_refuse_a_model(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = PackedLayout.attend

    def rounded(layout: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
        exact = attend(layout, q, k, v, **options)
        return exact if q.dtype == torch.float32 else exact * 1.5

    monkeypatch.setattr(PackedLayout, "attend", rounded)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval().to(dtype)
    check_attention(model, name="sound")
    assert model.config._attn_implementation == "groupwise"


def test_another_function_leaves_the_fast_path_in_half_precision_as_well() -> None:
    torch.manual_seed(0)
    config = DogeConfig(**{**SHAPE, "initializer_range": 0.02})  # its scores have a learned bias
    general = check_attention(AutoModelForCausalLM.from_config(config).bfloat16(), name="odd")
    assert general is not None
    assert "attention with a mask or bias of its own" in general.reason


def test_the_float32_excerpt_has_a_layer_of_each_kind_and_leaves_the_model_alone() -> None:
    torch.manual_seed(0)
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
    config = Gemma3TextConfig(**{**SHAPE, "num_hidden_layers": 6}, layer_types=kinds, sliding_window=4096)
    model = AutoModelForCausalLM.from_config(config).eval().bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    excerpt = float32_excerpt(model, tokens=12)
    rows = before["lm_head.weight"][[4, 9, 13, 18, 22, 27, 32, 36, 41, 45, 50, 54]].float()
    assert len(excerpt.model.layers) == excerpt.config.num_hidden_layers == 4
    assert {parameter.dtype for parameter in excerpt.parameters()} == {torch.float32}
    assert excerpt(torch.arange(12)[None]).logits.shape == (1, 12, 12)
    assert torch.equal(excerpt.get_input_embeddings().weight, rows)
    assert len(model.model.layers) == model.config.num_hidden_layers == 6
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_sliding_windows_of_any_length_do_not_bound_the_context() -> None:
    torch.manual_seed(0)
    config = MistralConfig(**SHAPE, sliding_window=48, max_position_embeddings=4096)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    policy = policy_of(model)
    assert policy.general is None
    assert policy.context_length == 4096
    assert {call.window for call in policy.attention} == {48}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden size (64) is not a multiple of the number of attention heads (6)"),
        ({"hidden_size": "x"}, "'hidden_size' expected int, got str"),
        ({"num_key_value_heads": 0}, "division or modulo by zero"),
        ({"vocab_size": -5}, "cannot load the model in"),
        ({"quantization_config": 5}, "config.json is damaged"),
        (None, "config.json is damaged"),
    ],
)
def test_an_impossible_config_is_one_sentence(
    folder: Path, change: dict[str, Any] | None, message: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change if change else []))
    with pytest.raises(ConfigError, match=re.escape(message)):
        causal_model(folder, torch.float32, CPU)
    with pytest.raises(ConfigError):
        load_policy(model_config(folder), FULL)


@pytest.mark.parametrize(
    ("removed", "missing"),
    [
        (("config.json",), "config.json"),
        (("model.safetensors",), "weights"),
        (("tokenizer.json",), "a tokenizer"),
        (("config.json", "model.safetensors"), r"config.json and weights"),
    ],
)
def test_an_incomplete_folder_is_refused_by_what_it_lacks(
    folder: Path, removed: tuple[str, ...], missing: str
) -> None:
    for name in removed:
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=f"lacks {missing}"):
        load_policy(model_config(folder), FULL)


def test_pickled_weights_are_left_to_those_who_trust_them(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=rf"bin is pickled and may run code.* groupwise convert {folder}"):
        load_policy(model_config(folder), FULL)


def pickle_weights(folder: Path, **more: object) -> dict[str, torch.Tensor]:
    weights = load_file(folder / "model.safetensors")
    torch.save({**weights, **more}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return weights


def test_pickled_weights_are_converted_number_for_number(folder: Path, tmp_path: Path) -> None:
    weights = pickle_weights(folder)
    output = tmp_path / "safe"
    assert cli.main(["convert", str(folder), "--output-path", str(output)]) == 0
    written = load_file(output / "model.safetensors")
    assert written.keys() == weights.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == written[name].dtype
        assert torch.equal(tensor, written[name])
    load_policy(model_config(output), FULL)


class Command:
    """What a pickle may hold that is no tensor: here, a file that is made when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_run_code_is_not_converted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pickle_weights(folder, more=Command(tmp_path / "ran"))
    assert cli.main(["convert", str(folder), "--output-path", str(tmp_path / "safe")]) != 0
    assert "contain more than tensors" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "safe").exists()


def test_only_pickled_weights_are_converted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(folder), "--output-path", str(tmp_path / "safe")]
    assert cli.main(words) != 0
    assert "already has safetensors weights; use it without converting" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert cli.main(words) != 0
    assert "has no pickled weights" in capsys.readouterr().err


def test_damaged_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot load the model in"):
        load_policy(model_config(folder), FULL)


def test_weights_that_lack_a_tensor_are_refused_not_made_up(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lack 9 of the model's tensors, such as model\.layers"):
        load_policy(model_config(folder), FULL)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "~/nowhere/at/all"])
def test_a_folder_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        load_policy(model_config(name), FULL)


@pytest.mark.parametrize("name", ["no-such-owner/no-such-model", "tinny"])
def test_a_hub_name_without_network_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is neither a folder nor in the Hugging Face cache"):
        load_policy(model_config(name), FULL)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("lm_head",), "output layer"),
        (("q_proj", "embed_tokens"), "embeddings"),
        (("no_such_module",), "no_such_module"),
    ],
)
def test_adapter_targets_that_cannot_work_are_refused(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy(model_config(), LoraConfig(r=2, targets=targets))
