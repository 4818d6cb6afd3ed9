"""Models with their own attention or recurrent states: runs, servers and refusals around the general path."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from groupwise.cli import main
from groupwise.config.schema import EngineConfig, LoraConfig, ModelConfig
from groupwise.engine.engine import Engine
from groupwise.engine.sampler import Penalties
from groupwise.engine.scheduler import BlockPool
from groupwise.engine.serving.serving_engine import ServingEngine, StreamChunk
from groupwise.engine.serving.serving_scheduler import CPUSteps, Job, ServingScheduler
from groupwise.errors import ConfigError
from groupwise.learner.micro_batch import own_logprobs, pack
from groupwise.model import resolve
from groupwise.model.attention.ulysses import UlyssesContext
from groupwise.model.load import load_policy
from groupwise.model.ops.checkpointing import recompute_layers
from groupwise.model.policy import Policy
from groupwise.model.resolve import FAMILIES, check_config, known_path, model_folder, text_part_notice
from groupwise.parallel.processes import divide
from groupwise.records import Request, Sampling
from tests.support.generation import converse, requests, same_answers
from tests.support.small_models import policy_of, tiny_tokenizer
from tests.support.small_runs import KILL, SMALL, SignalAt, run_artifacts, run_command, task_file
from tests.support.tiny_families import ragged_samples, tiny_config, tiny_model


def saved(family: str, folder: Path) -> Path:
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def loaded(folder: Path, **lora: Any) -> Policy:
    settings = LoraConfig(**({"r": 0} | lora))
    return load_policy(ModelConfig(name=str(folder), device="cpu", dtype="float32"), settings)


def test_a_run_killed_and_resumed_gives_the_same_bits(tmp_path: Path) -> None:
    model, task = saved("lfm2", tmp_path / "model"), task_file(tmp_path)

    def words(name: str) -> list[str]:
        place = (f"run.output_dir={tmp_path}", f"run.name={name}", f"model.name={model}")
        return ["train", str(task), *SMALL, *place, "lora.r=4", "algo.beta=0.1", "optim.learning_rate=1e-3"]

    whole = run_command(*words("whole"))
    assert whole.code == 0, whole.err
    assert "slower general path, without shared prompts: the model has layers of kind conv" in whole.out
    assert run_command(*words("killed"), signals=[SignalAt("rollouts/", KILL, nth=4)]).code == -KILL
    assert run_command("train", "--resume", str(tmp_path / "killed")).code == 0
    found, expected = run_artifacts(tmp_path / "killed"), run_artifacts(tmp_path / "whole")
    assert [name for name in expected if found.get(name) != expected[name]] == []


def test_penalties_hold_on_the_general_path() -> None:
    policy = policy_of(tiny_model("qwen3_next"))
    assert policy.general is not None
    scheduler = ServingScheduler(slots=2, pool=BlockPool(8, block_size=16), context=64)
    bias = ((60, 100.0), (61, 90.0), (62, 80.0))
    job = Job(
        prompt=(20, 21, 22),
        seeds=(5,),
        sampling=Sampling(max_tokens=6, temperature=0.0),
        penalties=Penalties(bias=bias, frequency=50.0),
    )
    scheduler.enter(job)
    with torch.no_grad():
        steps = CPUSteps(policy, scheduler, policy.end_tokens)
        (completion,) = [ended for _ in range(6) for _, ended in steps.advance()]
    # Each is 50 less likely after it was written, which leaves the next one.
    assert completion.tokens == (60, 61, 62, 60, 61, 62)


def test_a_server_streams_the_offline_answer_with_the_prompt_scored() -> None:
    policy = policy_of(tiny_model("qwen3_next"))
    news: Queue[StreamChunk[Job]] = Queue()
    engine = ServingEngine(
        policy,
        slots=4,
        context=64,
        waiting=4,
        deliver=lambda chunks: [news.put(chunk) for chunk in chunks] and None,
        failed=lambda error: None,
    )
    job = Job(
        prompt=(20, 21, 22, 23),
        seeds=(5,),
        sampling=Sampling(max_tokens=9),
        alternatives=1,
        scores_prompt=True,
    )
    engine.start()
    engine.submit(job)
    parts = [news.get(timeout=30)]
    while parts[-1].finish is None:
        parts.append(news.get(timeout=30))
    engine.close()
    ((offline,),) = Engine(policy, EngineConfig()).generate(
        [Request(prompt=job.prompt, seeds=job.seeds)], job.sampling
    )
    assert tuple(token for part in parts for token in part.tokens) == offline.tokens
    assert len(parts[0].prompt) == len(job.prompt) - 1


def test_a_recomputed_layer_gives_the_same_gradient() -> None:
    gradients = []
    for recomputed in (False, True):
        policy = policy_of(tiny_model("granitemoehybrid"))
        if recomputed:
            recompute_layers(policy)
            policy.model.train()
        batch = pack(ragged_samples(), device=policy.device)
        own_logprobs(policy, batch, Sampling(), entropy_gradient=False)[0].sum().backward()
        gradients.append([p.grad for p in policy.model.parameters() if p.grad is not None])
    for plain, again in zip(*gradients, strict=True):
        assert torch.allclose(plain, again, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["mistral3", "qwen3_vl"])
def test_a_vision_language_model_is_trained_on_text_and_saved_whole(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path / "model")
    policy = loaded(folder)
    frozen = {name: p.clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    assert any("vis" in name for name in frozen)
    assert not any("vis" in name for name in policy.trainable())
    batch = pack(ragged_samples(), device=policy.device)
    own_logprobs(policy, batch, Sampling(), entropy_gradient=False)[0].sum().backward()
    assert all(p.grad is not None for p in policy.trainable().values())
    policy.save(tmp_path / "again")
    again = dict(loaded(tmp_path / "again").model.named_parameters())
    assert all(torch.equal(again[name], p) for name, p in frozen.items())
    adapted = loaded(folder, r=4)
    assert not any("vis" in name for name in adapted.trainable())


@pytest.mark.parametrize(
    ("family", "rest"),
    [("mistral3", "frozen and saved unchanged"), ("qwen3_5", "left out, also of checkpoints")],
)
def test_what_becomes_of_a_vision_language_model_is_said(family: str, rest: str) -> None:
    sentence = text_part_notice(tiny_config(family))
    assert sentence is not None
    assert sentence.startswith("vision-language models are not supported: the text part is trained")
    assert sentence.endswith(f"the other parts are {rest}")
    assert text_part_notice(tiny_config("llama")) is None


def test_a_run_and_doctor_say_it_and_do_not_count_the_vision_part_as_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved("mistral3", tmp_path / "model")
    policy, adapted = loaded(folder), loaded(folder, r=4)
    sentence = text_part_notice(tiny_config("mistral3"))
    assert sentence in policy.notices()
    for rank, trained in ((0, policy.trained_numbers), (4, adapted.trained_numbers)):
        assert main(["doctor", "--model", str(folder), "--json", "model.device=cpu", f"lora.r={rank}"]) == 0
        ahead = json.loads(capsys.readouterr().out)["preflight"]
        assert (ahead["notice"], ahead["trained"]) == (sentence, trained)
        assert ahead["parameters"] == sum(p.numel() for p in policy.model.parameters())
        assert ahead["parts_gb"]["gradients"] == pytest.approx(4e-9 * trained)
    assert main(["doctor", "--model", str(folder), "model.device=cpu"]) == 0
    assert sentence in capsys.readouterr().out


def test_sharding_says_that_it_needs_the_fast_path() -> None:
    policy = policy_of(tiny_model("gptj"))
    with pytest.raises(ConfigError, match=r"run.parallel=fsdp requires the fast path.*run.parallel=ddp"):
        divide(policy, "fsdp")
    with pytest.raises(ConfigError, match=r"run.parallel=context requires the fast path"):
        UlyssesContext(rank=0, count=2).check(policy)


@pytest.mark.parametrize(
    ("family", "settings", "sentence"),
    [
        ("t5", {}, "is not supported: it is an encoder-decoder model"),
        ("bert", {}, "is not supported: it is an encoder"),
        ("clip", {}, "is not supported: it is of the type clip, which has no causal language model"),
        ("blt", {}, "is not supported: it is a model of bytes"),
        ("moshi", {}, "is not supported: it is a speech model"),
        ("paligemma", {}, "is not supported: it is a model whose logits depend on later tokens"),
        ("phi4_multimodal", {}, "is not supported: it is a model whose text decoder cannot be separated"),
        ("gemma3n", {}, "needs the package timm: pip install timm"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is quantized with gptq"),
        ("llama", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "is quantized with awq"),
        ("llama", {"num_hidden_layers": 1001}, "describes a model of 1001 layers"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_from_its_config(
    family: str,
    settings: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing_timm = {"timm": None}
    monkeypatch.setattr(resolve, "find_spec", lambda name: missing_timm.get(name, find_spec(name)))
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    wanted: list[list[str]] = []

    def download(name: str, **options: Any) -> str:
        if options.get("local_files_only"):
            raise OSError("not in the cache")
        wanted.append(options["allow_patterns"])
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match=sentence):
        model_folder("owner/name")
    assert wanted == [["config.json"]]  # nothing but the config was downloaded
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").touch()
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("family", ["mamba", "gemma4_text", "qwen3_5"])
def test_doctor_estimates_models_without_attention_or_with_uneven_layers(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(family, tmp_path)
    assert main(["doctor", "--model", str(folder), "--json", "--memory-gb", "9", "model.device=cpu"]) == 0
    ahead = json.loads(capsys.readouterr().out)["preflight"]
    assert ahead["path"] == known_path(check_config(folder, name=family))
    assert ahead["path"] == ("fast" if family == "gemma4_text" else "general")


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "mamba2", "jamba"]
)
def test_the_table_says_the_path_that_a_family_takes(family: str) -> None:
    path = "fast" if policy_of(tiny_model(family)).general is None else "general"
    assert json.loads(FAMILIES.read_text())[family] == path
    assert tiny_config(family).model_type == family


def test_the_documentation_has_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for path in ("fast", "general"):
        own = [f"`{family}`" for family, of in json.loads(FAMILIES.read_text()).items() if of == path]
        assert f"| {path} ({len(own)}) | {', '.join(own)} |" in text


def test_the_next_turn_of_a_conversation_is_computed_again() -> None:
    policy = policy_of(tiny_model("lfm2"))
    one, other = (
        converse(
            Engine(policy, EngineConfig(block_size=4)), requests((5, 9), (2, 1)), turns=3, reuse_cache=reuse
        )
        for reuse in (True, False)
    )
    same_answers(one, other)


def test_a_device_of_another_maker_is_a_name_that_must_exist_here() -> None:
    settings = ModelConfig(name="tiny", device="mps")
    if not torch.backends.mps.is_available():
        with pytest.raises(ConfigError, match=r"model.device=mps does not exist"):
            load_policy(settings, LoraConfig(r=0))
