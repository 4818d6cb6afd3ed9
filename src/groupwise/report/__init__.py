"""Inspect runs from their files: the live page, the static report, alarms and comparisons.

Modules in reading order:

    run_reader     find the runs in a folder, and read one run: its metrics and evaluations over steps
    rollout_view   rollouts down to the token, and search
    alarms         rules that detect silent failures in the metrics
    watch_server   the live page (`groupwise watch`) and its access control
    static_report  report.html and the plots
    model_card     the card of a trained model or adapter
    compare_runs   compare two runs, list runs, and prune them
    page/          the page's HTML, CSS and JavaScript

To add an alarm, write a rule and add it to `alarms.ALARM_RULES`.
"""
