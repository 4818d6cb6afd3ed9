"""Seeing a run: the live page, the report, alarms and comparisons, all read from the run's own files."""
