"""Gradient checkpointing is chosen where activations would not fit, said, and kept by a resumed run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.config import Config, read_config
from groupwise.training import train
from groupwise.training.resources.model_shape import LinearShape, ModelShape
from groupwise.training.resources.run_estimate import DeviceSpec, choose_recomputing, preflight
from tests.support.small_runs import deterministic_metrics, small_config, task_file

SHAPE = ModelShape(
    parameters=1000,
    linears=(LinearShape(name="q_proj", inputs=10, outputs=10),),
    layers=50,
    width=10,
    inner=30,
    heads=2,
    key_heads=1,
    head_size=5,
    vocabulary=50,
)
GPU = DeviceSpec(kind="cuda", total=10**9, program=0)


def config(*words: str) -> Config:
    fixed = ("rollout.prompts=2", "rollout.group_size=4", "rollout.max_tokens=16", "lora.r=0")
    return read_config(overrides=["model.name=x/y", *fixed, *words]).resolve()


def needed(*words: str) -> float:
    return preflight(config(*words), SHAPE, GPU, prompt_tokens=256).updating


def test_it_is_on_only_where_kept_activations_do_not_fit():
    kept, again = (needed(f"model.gradient_checkpointing={on}") for on in ("false", "true"))
    # 50 layers keep 4·10 + 2·10 + 2·5 + 2·30 = 130 numbers of a token each, or 10; two ends 10 each.
    tokens = 2 * (256 + 4 * 16)
    # Besides, at the most: the logits, 50 of each token and three vectors, and the output layer's gradient …
    logits = tokens * (50 * 6 + 3 * 10 * 2) + 50 * 10 * 6
    # … or what passes in a layer, with all that it keeps where that is computed again.
    layer = 2 * tokens * (130 + 3 * 10 + 30)
    assert kept - again == pytest.approx(2 * tokens * (50 * 130 - 50 * 10) + logits - layer, rel=1e-6)
    for free, on in ((kept / 0.94, False), (kept / 0.96, True)):
        chosen, sentence = choose_recomputing(config(), SHAPE, GPU, free=int(free))
        assert chosen.model.gradient_checkpointing is on
        assert f"gradient checkpointing is {'on' if on else 'off'}: without it" in sentence


def test_what_is_computed_again_has_its_inner_width_for_some_tokens_at_a_time():
    words = ("model.gradient_checkpointing=true", "rollout.max_tokens=1000", "optim.micro_batch_tokens=7000")
    whole, tiled = (
        preflight(config(*words), replace(SHAPE, tiled=on, inner=3000), GPU, prompt_tokens=600).updating
        for on in (False, True)
    )
    # A pass has two prompts and five answers, in two tiles; one of them has two factors and a gradient.
    assert whole - tiled == 2 * (2 * 600 + 5 * 1000) / 2 * 3 * 3000


@pytest.mark.parametrize("given", ["true", "false"])
def test_what_the_settings_say_is_kept(given):
    chosen, sentence = choose_recomputing(
        config(f"model.gradient_checkpointing={given}"), SHAPE, GPU, free=1 if given == "false" else 10**12
    )
    assert chosen.model.gradient_checkpointing is (given == "true")
    assert "as the settings say" in sentence


def test_a_run_says_what_was_chosen_and_keeps_it_when_resumed(tmp_path, monkeypatch):
    task_file(tmp_path)
    settings = small_config(tmp_path, "run.max_steps=2", "evaluate.skip=true")
    runs: dict[bool, Path] = {}
    for on, free in ((True, 1), (False, 10**12)):
        monkeypatch.setattr("groupwise.training.base_run.free_memory", lambda device, free=free: free)
        named = replace(settings, run=replace(settings.run, name=f"run-{on}"))
        runs[on] = train(named)
        stored = read_config(runs[on] / "config.yaml")
        assert stored.model.gradient_checkpointing is on
        said = (runs[on] / "training.log").read_text()
        assert f"gradient checkpointing is {'on' if on else 'off'}: without it" in said
        # There is plenty of memory now, or next to none, but the run goes on as it began.
        monkeypatch.setattr(
            "groupwise.training.base_run.free_memory", lambda device, free=free: 10**12 // free
        )
        longer = replace(named, run=replace(named.run, max_steps=3))
        train(longer, resume=runs[on])
        assert read_config(runs[on] / "config.yaml").model.gradient_checkpointing is on
    first, second = (deterministic_metrics(runs[on])[0] for on in (True, False))
    assert first["policy/grad_norm"] == pytest.approx(second["policy/grad_norm"], rel=1e-4)
