"""What a run writes and shows.

Modules in reading order:

    run_folder     the paths of a run, and its lock
    run_files      metrics.jsonl, rollouts and updates as Parquet, completions; writing in the background
    run_log        training.log
    terminal       the live panel, plain lines and the closing summary
    number_format  numbers, durations and sparklines for readers
    trackers       trackio, Weights & Biases, TensorBoard

To add a tracker, write a class with the methods of `trackers.Tracker` and enter it in its table.
"""
