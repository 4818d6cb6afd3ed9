"""Training runs.

Modules in reading order:

    loop            the seven stages of a step
    grpo_run        what each stage does in a GRPO run
    collector       prompts → rollouts → rewards → advantages; refilled groups; curriculum; prefetching
    base_run        what every run has: folder, policy, engine, evaluation, checkpoints
    resume          where a run starts: new, or after its last checkpoint
    evaluator       held-out accuracy before, during and after
    recorder        metrics and files, terminal, trackers
    step_metrics    the metrics of a step
    run_summary     the closing figures
    sft_run         supervised warm start
    callbacks       the user's hooks at the stages of a run
    interrupt       Ctrl-C, SIGTERM and full disks
    resources/      will it fit, how long will it take, who else uses the cores
"""

from groupwise.training.loop import train

__all__ = ["train"]
