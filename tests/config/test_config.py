"""Settings: from everywhere, strictly, and back."""

from __future__ import annotations

import math
import random
import string
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.config import FLAGS, Config, config_from_keywords, differences, dump_config, read_config
from groupwise.config.coerce import kind_of
from groupwise.config.loading import SECTIONS, TYPES, closest, documentation
from groupwise.config.runtime import METHODS, PARALLEL
from groupwise.config.schema import (
    ADVANTAGES,
    COMBINATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LORA_PRESETS,
    LOSSES,
    NORMALIZATIONS,
    SCHEDULES,
    OptimConfig,
    RolloutConfig,
)
from groupwise.errors import ConfigError


def written(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(overrides=overrides)
    return str(caught.value)


def test_without_any_source_the_defaults_hold():
    assert read_config() == Config()
    assert config_from_keywords() == Config()


def test_a_later_source_beats_an_earlier_one(tmp_path):
    path = written(tmp_path, "run: {max_steps: 1, seed: 1, save_every: 1}")
    config = read_config(path, flags={"max_steps": 2, "seed": 2}, overrides=["run.seed=3"])
    assert (config.run.save_every, config.run.max_steps, config.run.seed) == (1, 2, 3)


def test_the_last_of_two_equal_overrides_wins():
    assert read_config(overrides=["run.seed=3", "run.seed=4"]).run.seed == 4


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optim.learning_rate=1e-5", 1e-5),  # YAML 1.1 reads this as a string
        ("optim.learning_rate=.5E-2", 5e-3),
        ("optim.weight_decay=1", 1.0),  # a whole number is a number
        ("optim.beta1=0", 0.0),  # no momentum
        ("optim.beta2=0.9999", 0.9999),
        ("algo.max_gap=.inf", math.inf),
        ("run.max_steps=1_000", 1000),
        ("run.keep_best=false", False),
        ("run.name=2024", "2024"),  # in the shell a string needs no quotes
        ("run.name=a=b #1: [x", "a=b #1: [x"),
        ("run.name='null'", "null"),
        ("run.name=null", None),
        ("run.name=", ""),
        ("lora.targets=q_proj, v_proj", ("q_proj", "v_proj")),
        ('lora.targets=["a,b"]', ("a,b",)),
        ("rollout.stop=", ()),
        ("rollout.stop=</answer>", ("</answer>",)),
        ("track.trackers=[]", ()),
        ("track.trackers=null", None),
        ("task.options={largest: 20}", {"largest": 20}),
    ],
)
def test_an_override_becomes_the_type_its_setting_declares(override, value):
    section, key = override.partition("=")[0].split(".")
    read = getattr(getattr(read_config(overrides=[override]), section), key)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.max_steps=ten", "run.max_steps must be a whole number (int); got 'ten'"),
        ("run.max_steps=1.5", "run.max_steps must be a whole number (int); got 1.5"),
        ("run.max_steps=true", "run.max_steps must be a whole number (int); got True"),
        ("run.max_steps=010", "run.max_steps must be a whole number (int); got '010'"),
        ("run.max_steps=1:30", "run.max_steps must be a whole number (int); got '1:30'"),
        ("run.max_steps=null", "run.max_steps must be a whole number (int); got None"),
        ("run.max_steps=[1", "run.max_steps must be a whole number (int); got '[1'"),
        ("run.keep_best=1", "run.keep_best must be true or false; got 1"),
        ("optim.eps=small", "optim.eps must be a number (float); got 'small'"),
        ("optim.eps=.nan", "optim.eps must be a number (float); got nan"),
        ("model.device=foo", "model.device must be cpu, cuda, cuda:N or mps; got 'foo'"),
        ("lora.r=x", "lora.r must be a whole number (int) or null; got 'x'"),
        ("lora.targets=[1, 2]", "lora.targets must be a list of strings; got [1, 2]"),
        ("task.options=3", "task.options must be a mapping of plain values; got 3"),
        ("task.options.day=2026-01-01", "task.options.day must be a plain value; got '2026-01-01'"),
        ("rollout.group_size=1", "rollout.group_size must be at least 2; got 1"),
        ("rollout.stop=['']", "rollout.stop may not contain an empty string"),
        ("task.reward_seconds=.inf", "task.reward_seconds must be between 0.001 and 86400; got inf"),
        ("optim.beta1=1.5", "optim.beta1 must be at least 0 and less than 1; got 1.5"),
        ("optim.beta1=-0.1", "optim.beta1 must be at least 0 and less than 1; got -0.1"),
        ("optim.beta2=1", "optim.beta2 must be at least 0 and less than 1; got 1.0"),
        ("optim.eps=-1", "optim.eps must be at least 0; got -1.0"),
        ("optim.weight_decay=-1", "optim.weight_decay must be at least 0; got -1.0"),
        ("run.max_steps", "write settings as section.key=value; got 'run.max_steps'"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(override, message):
    assert refusal(override) == message


def test_a_huge_wrong_value_is_shortened():
    assert len(refusal(f"run.max_steps={'x' * 100_000}")) < 200
    assert len(refusal(f"run.max_steps={'9' * 100_000}")) < 200


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("train.learning_rate", "optim.learning_rate"),  # right key, no such section
        ("run.learning_rate", "optim.learning_rate"),  # right key, wrong section
        ("optim.learning_rat", "optim.learning_rate"),
        ("optm.epochs", "optim.epochs"),
        ("task.nme", "task.name"),  # three sections have a name
        ("max_steps", "run.max_steps"),
        ("train.batch_size", "rollout.prompts"),  # the flag's name is not the setting's
        ("algo.temprature", "rollout.temperature"),
        ("task.option.largest", "task.options"),
        ("zebra.quagga", None),
    ],
)
def test_an_unknown_setting_is_answered_with_the_closest_name(wrong, meant):
    assert closest(wrong) == meant
    hint = f"did you mean {meant}?" if meant else "`groupwise config` lists every setting"
    assert refusal(f"{wrong}=1") == f"unknown setting {wrong}; {hint}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optm: {epochs: 2}", "unknown setting optm; did you mean optim?"),
        ("optim: {epoch: 2}", "unknown setting optim.epoch; did you mean optim.epochs?"),
        ("optim: 2", "optim must be a mapping of settings; got 2"),
        ("- optim", "FILE must contain sections, such as `model:`; got ['optim']"),
        ("run: {name: 5}", "run.name must be a string or null; got 5"),  # a file has quotes for that
        ("rollout: {stop: a}", "rollout.stop must be a list of strings; got 'a'"),
        ("run:\n  seed: 1\n  seed: 2", "FILE is not valid YAML: line 3: duplicate key 'seed'"),
        ("run: &r {}\ntask: *r", "FILE is not valid YAML: line 2: aliases (*name) are not supported"),
        ("run:\n  seed: [1", "FILE is not valid YAML: line 2: expected ',' or ']', but got '<stream end>'"),
        (
            "run:\n\tseed: 1",
            "FILE is not valid YAML: line 2: found character '\\t' that cannot start any token",
        ),
        ("run:\n  name: \x01", "FILE is not valid YAML: line 2: unprintable character 1"),
        ("[" * 5000, "FILE is not valid YAML: the brackets are nested too deeply"),
    ],
)
def test_a_bad_file_is_explained_in_one_sentence(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert str(caught.value) == message.replace("FILE", str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "missing.yaml", tmp_path, binary):
        with pytest.raises(ConfigError, match=path.name):
            read_config(path)


def test_an_empty_file_and_an_empty_section_change_nothing(tmp_path):
    assert read_config(written(tmp_path, "")) == Config()
    assert read_config(written(tmp_path, "optim:\n  # epochs: 2\n")) == Config()


def test_a_file_may_give_full_names_and_scientific_numbers(tmp_path):
    config = read_config(written(tmp_path, "optim.learning_rate: 1e-5\nlora: {targets: [q_proj]}"))
    assert config.optim.learning_rate == 1e-5
    assert config.lora.targets == ("q_proj",)


def test_task_options_are_added_one_by_one(tmp_path):
    path = written(tmp_path, "task: {options: {largest: 20, numbers: 3}}")
    config = read_config(path, overrides=["task.options.largest=1e2", "task.options.mode=[a, {b: null}]"])
    assert config.task.options == {"largest": 100.0, "numbers": 3, "mode": ["a", {"b": None}]}


@pytest.mark.parametrize(
    ("flags", "setting", "value"),
    [
        ({"model": "gpt"}, "model.name", "gpt"),
        ({"max_examples": 5}, "task.max_examples", 5),
        ({"max_examples": 0}, "task.max_examples", None),
        ({"batch_size": 2}, "rollout.prompts", 2),
        ({"batch_size": 2, "gradient_accumulation_steps": 8}, "rollout.prompts", 16),
        ({"gradient_accumulation_steps": 8}, "rollout.prompts", 8 * RolloutConfig().prompts),
        ({"no_trackio": True}, "track.trackers", ()),
        ({"no_trackio": False}, "track.trackers", None),
        ({"track": ["wandb"]}, "track.trackers", ("wandb",)),
        ({"track": ["wandb"], "no_trackio": True}, "track.trackers", ("wandb",)),
        ({"skip_evaluation": True}, "evaluate.skip", True),
        ({"output_dir": Path("here")}, "run.output_dir", "here"),
    ],
)
def test_a_flag_sets_its_setting_from_the_shell_and_from_python_alike(flags, setting, value):
    section, key = setting.split(".")
    for config in (read_config(flags=flags), config_from_keywords(**flags)):
        assert getattr(getattr(config, section), key) == value


def test_accumulation_multiplies_the_prompts_of_the_file(tmp_path):
    path = written(tmp_path, "rollout: {prompts: 3}")
    assert read_config(path, flags={"gradient_accumulation_steps": 4}).rollout.prompts == 12


def test_every_flag_names_a_setting_that_exists():
    assert set(FLAGS.values()) <= set(TYPES)


def test_keywords_take_flags_and_whole_sections():
    config = config_from_keywords(model="gpt", seed=1, optim={"epochs": 2}, lora={"targets": ["q_proj"]})
    assert (config.model.name, config.run.seed, config.optim.epochs) == ("gpt", 1, 2)
    assert config.lora.targets == ("q_proj",)
    assert config_from_keywords(model={"name": "gpt"}).model.name == "gpt"  # a flag and a section


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_step": 1}, "unknown setting max_step; did you mean max_steps?"),
        ({"optm": {}}, "unknown setting optm; did you mean optim?"),
        ({"epochs": 2}, "unknown setting epochs; did you mean num_epochs?"),
        ({"optim": 3}, "optim must be a mapping of settings; got 3"),
        ({"optim": {"epoch": 3}}, "unknown setting optim.epoch; did you mean optim.epochs?"),
        ({"learning_rate": "1e-5"}, "optim.learning_rate must be a number (float) or null; got '1e-5'"),
        ({"batch_size": "2"}, "batch_size must be a whole number (int); got '2'"),
        ({"batch_size": -2, "gradient_accumulation_steps": -2}, "batch_size must be at least 1; got -2"),
        ({"task": {"options": {"f": print}}}, "task.options must be a mapping of plain values; got "),
    ],
)
def test_a_wrong_keyword_is_explained(keywords, message):
    with pytest.raises(ConfigError) as caught:
        config_from_keywords(**keywords)
    assert str(caught.value).startswith(message)


CHOICES = {
    "engine.quantization": ("fp8",),
    "engine.kv_cache_dtype": ("fp8",),
    "model.device": ("cpu", "cuda", "cuda:1"),
    "model.dtype": ("float32", "bfloat16"),
    "model.quantization": ("nf4", "int8"),
    "lora.preset": tuple(LORA_PRESETS),
    "algo.advantage": ADVANTAGES,
    "algo.combine": COMBINATIONS,
    "algo.normalize": NORMALIZATIONS,
    "algo.loss": LOSSES,
    "algo.kl": KL_ESTIMATORS,
    "algo.correction": CORRECTIONS,
    "optim.schedule": SCHEDULES,
    "optim.kind": ("adamw", "adamw8bit"),
    "run.kind": ("grpo", "sft", "evolve"),
    "run.parallel": PARALLEL,
    "run.callbacks": ("my_module:Stop", "stop.py:Stop"),
    "engine.kind": ("vllm",),
    "evolve.method": METHODS,
    "track.trackers": ("trackio", "wandb", "tensorboard"),
}
AWKWARD = (
    "",
    "1e-5",
    "null",
    "yes",
    "12:30",
    "- a",
    "a: b",
    "#",
    "'",
    '"',
    "a\n\n b ",
    "\t",
    "é → 漢 🙂",
    "\x00\x7f\u2028",
    "{",
)


def random_text(chance: random.Random) -> str:
    return chance.choice(AWKWARD) + "".join(chance.choices(string.printable, k=chance.choice((0, 3, 120))))


def random_plain(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(5 if depth > 2 else 7)
    if kind == 5:
        return [random_plain(chance, depth + 1) for _ in range(chance.randrange(3))]
    if kind == 6:
        return {random_text(chance): random_plain(chance, depth + 1) for _ in range(chance.randrange(3))}
    return (
        None,
        chance.random() < 0.5,
        chance.randrange(-9, 10**20),
        chance.gauss(0, 1e-7),
        random_text(chance),
    )[kind]


def random_setting(chance: random.Random, name: str) -> Any:
    if name == "evolve.vary":
        return {random_text(chance): [chance.random(), chance.uniform(1, 2)] for _ in range(3)}
    if name == "task.weights":
        return {random_text(chance): chance.random() for _ in range(3)}
    if name == "task.test_sets":
        return {f"set-{number}": random_text(chance) for number in range(3)}
    kind, optional = kind_of(TYPES[name])
    if optional and chance.random() < 0.3:
        return None
    choices = CHOICES.get(name)
    texts = [chance.choice(choices) if choices else random_text(chance) for _ in range(chance.randrange(4))]
    return {
        bool: chance.random() < 0.5,
        int: chance.randrange(2, 10**6),
        float: 1.0 if chance.random() < 0.2 else chance.uniform(0.02, 0.98) ** chance.choice((1, 3, 0.1)),
        str: chance.choice(choices) if choices else random_text(chance),
        tuple: tuple(texts),
    }.get(kind, {random_text(chance): random_plain(chance) for _ in range(3)})


def random_config(chance: random.Random) -> Config:
    """A valid configuration with about a third of its settings drawn at random."""
    config = Config()
    for name in chance.sample(list(TYPES), len(TYPES)):  # some settings need another one first
        if chance.random() < 0.35:
            section, key = name.split(".")
            try:
                changed = replace(getattr(config, section), **{key: random_setting(chance, name)})
                config = replace(config, **{section: changed})
            except ConfigError:  # a bound this draw does not know: keep the default
                continue
    return config


def test_a_written_configuration_reads_back_equal(tmp_path):
    drawn = [random_config(random.Random(seed)) for seed in range(300)]
    for config in drawn:
        assert read_config(written(tmp_path, dump_config(config))) == config
    changed = {line.partition(":")[0] for config in drawn for line in differences(Config(), config)}
    assert changed == set(TYPES), "the draw must reach every setting"


def test_a_written_configuration_explains_its_settings():
    text = dump_config(Config())
    assert "# Completions per prompt; advantages are relative to this group.\n  group_size: 16\n" in text
    assert "# The optimizer (AdamW) and how samples are batched for it.\noptim:\n" in text
    described = documentation()["OptimConfig"]
    assert described["epochs"] == "Passes over the samples of each step."
    assert described.keys() - {""} <= {field.name for field in fields(OptimConfig)}


def test_differences_name_the_setting_and_both_values():
    before = read_config(overrides=["optim.learning_rate=0.0003"])
    after = read_config(overrides=["optim.learning_rate=0.001", "rollout.stop=a,b", "run.name=x"])
    assert differences(before, after) == [
        "rollout.stop: [] → [a, b]",
        "optim.learning_rate: 0.0003 → 0.001",
        "run.name: null → x",
    ]
    assert differences(before, before) == []


def test_every_section_of_the_configuration_is_read():
    assert list(SECTIONS) == [field.name for field in fields(Config)]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["algo.overlong_buffer=9", "rollout.max_tokens=8"],
            "algo.overlong_buffer must be at most rollout.max_tokens, which is 8; got 9",
        ),
        (
            ["optim.minibatches=5", "rollout.prompts=4"],
            "optim.minibatches must be at most rollout.prompts, which is 4; got 5",
        ),
    ],
)
def test_settings_of_two_sections_that_cannot_go_together_are_refused(overrides, sentence):
    with pytest.raises(ConfigError) as caught:
        read_config(overrides=overrides)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("advantage", ["turn", "gdpo"])
def test_a_new_run_refuses_another_combination_for_advantages_that_weigh_rewards_themselves(advantage):
    algo = read_config(overrides=[f"algo.advantage={advantage}", "algo.combine=std"]).algo
    with pytest.raises(ConfigError) as caught:
        algo.check_combination()
    sentence = f"algo.advantage={advantage} requires algo.combine=sum, because it weighs rewards itself"
    assert str(caught.value) == sentence
    read_config(overrides=[f"algo.advantage={advantage}"]).algo.check_combination()


def test_clips_of_the_usual_size_are_noticed_with_gspo_only():
    assert list(read_config(overrides=["algo.loss=dapo"]).notices()) == []
    assert list(read_config(overrides=["algo.loss=gspo", "algo.clip_low=3e-4"]).notices()) == []
    (notice,) = read_config(overrides=["algo.loss=gspo"]).notices()
    assert "algo.clip_low=3e-4 and algo.clip_high=4e-4" in notice


def test_keywords_count_over_a_file(tmp_path):
    path = written(tmp_path, "run: {max_steps: 3, seed: 2}")
    config = config_from_keywords(path, max_steps=5, optim={"epochs": 2})
    assert (config.run.max_steps, config.run.seed, config.optim.epochs) == (5, 2, 2)


def test_the_built_in_model_gets_the_settings_that_were_made_for_it():
    tiny = Config().resolve()
    assert (tiny.lora.r, tiny.optim.learning_rate, tiny.optim.minibatches) == (0, 1e-4, 2)
    assert tiny.task.options == {"numbers": 3, "largest": 50}
    other = read_config(overrides=["model.name=some/model"]).resolve()
    assert (other.lora.r, other.optim.learning_rate, other.optim.minibatches) == (16, 5e-5, 1)
    assert other.task.options == {}
    assert (tiny.rollout.temperature, other.rollout.temperature) == (0.8, 1.0)


def test_what_the_user_sets_is_not_chosen_for_them():
    given = ["lora.r=4", "optim.learning_rate=1e-3", "optim.minibatches=3", "task.options.largest=9"]
    config = read_config(overrides=given)
    assert config.resolve() == config
    assert read_config(overrides=["rollout.prompts=1"]).resolve().optim.minibatches == 1


@pytest.mark.parametrize("setting", ["engine.quantization", "engine.kv_cache_dtype"])
@pytest.mark.parametrize(
    ("other", "refused"),
    [
        ("engine.kind=vllm", "FP8 requires groupwise's own engine; set engine.kind=own, or leave out {}=fp8"),
        ("algo.correction=none", "FP8 samples from a rounded policy; set algo.correction"),
    ],
)
def test_fp8_is_refused_where_nothing_computes_or_corrects_it(setting, other, refused):
    with pytest.raises(ConfigError, match=refused.format(setting)):
        read_config(overrides=[f"{setting}=fp8", other])
