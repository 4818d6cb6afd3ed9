"""Evolutionary search: a population of adapters on one base model.

Modules in reading order:

    evolve_run       a search from start to end: what a step does
    evolve_state     what a checkpoint of a search holds, and where a resumed search starts
    population       the shared base model and its members
    member_rollouts  rollouts and held-out accuracy of all members in one batch
    search_space     settings with bounds: first values and mutations
    selection        who survives: halving, tournament, population-based training
    evolve_summary   the table, the plots and the closing summary
    ray_tune         runs as trials of Ray Tune

To add a selection method, write a function in `selection` and enter it in its table.
"""
