"""Modules that commands import late: a process of `small_runs.PROCESSES` is forked with all of them loaded.

That saves half of the time of a small run.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

for name in (
    *("typer._adapters", "typer._click.decorators", "pydantic.type_adapter", "zoneinfo", "_strptime"),
    *("groupwise.training.sft_run", "groupwise.evolution.evolve_run", "groupwise.report.static_report"),
    *("transformers.models.llama.modeling_llama", "transformers.models.llama.tokenization_llama"),
    *("peft.utils.transformers_weight_conversion", "peft.tuners.lora.bnb", "torch.profiler._cupti_monitor"),
    *("pandas", "pyarrow.pandas_compat", "deepspeed", "matplotlib.figure"),
    *("matplotlib.backends.backend_agg", "mpl_toolkits.mplot3d"),
):
    with suppress(ImportError):
        import_module(name)
