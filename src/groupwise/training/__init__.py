"""Training runs.

Modules in reading order:

    loop              the seven stages of a step
    grpo_run          what each stage does in a GRPO run; prefetching of the next batch
    collector         sample prompts, rollout, score, advantage; which groups are refilled
    prompt_selection  exclude overlong prompts; choose prompts by how often their kind succeeds
    base_run          what every run has: folder, policy, engine, teacher, evaluation, checkpoints
    resume            where a run starts: new, or after its last checkpoint
    evaluator         held-out accuracy before, during and after
    recorder          metrics and files, terminal, trackers
    step_metrics      the metrics of a step
    sft_run           supervised warm start; worked answers in the steps of other runs
    callbacks         the user's hooks at the stages of a run
    run_end           interruptions, full disks, the closing figures
    resources/        will it fit, how long will it take
"""

from groupwise.training.loop import train

__all__ = ["train"]
