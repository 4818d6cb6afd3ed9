"""Training continues an adapter that PEFT or TRL saved: `--model ADAPTER_FOLDER`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from groupwise.config import read_config
from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import ConfigError
from groupwise.evaluate.contamination import lineage_of_target
from groupwise.evaluate.target import find_target
from groupwise.evolution.evolve_run import check_supported
from groupwise.model.load import load_policy
from groupwise.model.resolve import TINY_FOLDER
from groupwise.tasks import load_task
from groupwise.training import train
from tests.support.adapted_models import adapted, logprobs
from tests.support.small_runs import small_config, task_file

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as TRL leaves it: saved by PEFT, with its base model named."""
    folder = tmp_path_factory.mktemp("trl") / "adapter"
    model: peft.PeftModel = adapted(targets=("q_proj", "v_proj"), rslora=True).model
    model.save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(TINY_FOLDER)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_the_settings_of_the_adapter_replace_those_of_lora(adapter):
    config = read_config(overrides=[f"model.name={adapter}"]).resolve()
    assert config.model.name == str(TINY_FOLDER)
    assert config.lora == LoraConfig(
        r=4, alpha=32, targets=("q_proj", "v_proj"), rslora=True, init=str(adapter)
    )
    assert config.resolve() == config
    (notice,) = config.notices()
    assert notice == f"continues the adapter in {adapter} (rank 4) on {TINY_FOLDER}"
    penalized = read_config(overrides=[f"model.name={adapter}", "algo.beta=0.1"]).resolve()
    assert "without the adapter" in list(penalized.notices())[-1]


def test_the_policy_starts_where_the_adapter_ended(adapter):
    config = read_config(overrides=[f"model.name={adapter}", "model.device=cpu"]).resolve()
    prompt, answer = (5, 6, 7), (8, 9, 10, 11)
    one = logprobs(load_policy(config.model, config.lora), prompt, answer)
    other = logprobs(adapted(adapter), prompt, answer)
    base = logprobs(load_policy(ModelConfig(device="cpu"), LoraConfig(r=0)), prompt, answer)
    assert torch.equal(one, other)
    assert not torch.allclose(one, base, atol=1e-3)


def test_a_run_trains_the_adapter_on_and_resumes_without_its_folder(adapter, tmp_path):
    task_file(tmp_path)
    copy = shutil.copytree(adapter, tmp_path / "adapter")
    config = small_config(tmp_path, f"model.name={copy}", "run.max_steps=2", "evaluate.skip=true")
    run = train(config)
    before = load_file(copy / WEIGHTS)
    after = load_file(run / "checkpoints" / "step-000002" / WEIGHTS)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    close = [torch.allclose(before[name], after[name], atol=1e-2) for name in before]
    assert all(close), "two small steps from the adapter, and not from a new one"
    target = find_target(str(run))
    assert target.rank == 4
    assert [record.settings.lora.init for record in lineage_of_target(target)] == [str(copy)]
    shutil.rmtree(copy)
    again = read_config(run / "config.yaml", overrides=["run.max_steps=3"])
    train(again, resume=run)
    assert (run / "checkpoints" / "step-000003" / WEIGHTS).is_file()


def test_another_rank_is_refused(adapter):
    with pytest.raises(ConfigError, match=r"has rank 4: remove lora\.r=8, or merge the adapter first"):
        read_config(overrides=[f"model.name={adapter}", "lora.r=8"]).resolve()


def test_an_adapter_without_a_base_model_needs_one_by_name(adapter, tmp_path):
    copy = shutil.copytree(adapter, tmp_path / "adapter")
    settings = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    with pytest.raises(ConfigError, match=r"names no base model: add --model BASE lora\.init="):
        read_config(overrides=[f"model.name={copy}"]).resolve()
    config = read_config(overrides=["model.name=tiny", f"lora.init={copy}"]).resolve()
    assert (config.model.name, config.lora.r) == ("tiny", 4)
    (copy / "adapter_config.json").write_text(json.dumps({"peft_type": "PROMPT_TUNING"}))
    with pytest.raises(ConfigError, match="does not describe a LoRA adapter"):
        read_config(overrides=[f"model.name={copy}"]).resolve()


def test_a_population_refuses_an_adapter(adapter):
    config = read_config(overrides=[f"model.name={adapter}"]).resolve()
    with pytest.raises(ConfigError, match="a population starts with new adapters: merge the adapter first"):
        check_supported(config, load_task(config.task))
