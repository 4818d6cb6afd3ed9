"""Looking at a run, from its files alone.

Modules in reading order:

    run_index      the runs in a folder
    history        metrics and evaluations over steps
    rollout_view   rollouts down to the token, and search in them
    alarms         rules that find silent failures in the metrics
    watch_server   the live page and its access rules
    static_report  report.html and the plots
    compare_runs   two runs side by side; the list of runs and pruning

To add an alarm, write a rule and enter it in `alarms.ALARM_RULES`.
"""
