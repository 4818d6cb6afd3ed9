"""Evolutionary search: a population of adapters on one base model.

Modules in reading order:

    evolve_run    the search loop: one step of a population
    evolve_state  the state of a search, its checkpoints, how a search starts or resumes,
                  and the final table, plots and summary
    population    the shared base model and its members; their rollouts and accuracy in one batch
    search_space  settings with bounds: initial values and mutations
    selection     selection methods: halving, tournament, population-based training
    ray_tune      training runs as Ray Tune trials

A member is one adapter with its own settings. A slot (`place` in files) is a position in the population: a
new member may take over the slot of another.

To add a selection method, write a function in `selection` and add it to `SELECTIONS`.
"""
