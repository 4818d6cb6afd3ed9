"""The end of a run.

Modules: `interrupt` (Ctrl-C, SIGTERM and full disks), `run_summary` (the closing figures).
"""
