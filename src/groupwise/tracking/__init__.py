"""Recording and display of a run: its files, log, terminal output and trackers.

Modules in reading order:

    run_folder     the paths in a run folder, its lock, and training.log
    run_files      metrics.jsonl and completions; the background writer
    rollout_files  rollouts and updates as Parquet
    terminal       the live panel, plain log lines and the final summary
    number_format  format numbers, durations and sparklines
    trackers       trackio, Weights & Biases, TensorBoard, MLflow

To add a tracker, write a class with the methods of `trackers.Tracker` and add it to `TRACKERS`.
"""
