"""Several processes, one run. Start with `processes`."""
