"""The subcommands of `groupwise`. `groupwise.cli` registers them.

Modules in reading order:

    options  arguments and options that several commands share
    sft      groupwise sft
    eval     groupwise eval
    evolve   groupwise evolve
    chat     groupwise chat
    serve    groupwise serve, groupwise serve-rollouts
    weights  groupwise merge, quantize, convert
    index    groupwise index
    runs     groupwise runs, report, compare, watch
    doctor   groupwise doctor

To add a command, write a function with typer annotations here and register it in `cli`. Import heavy modules
inside the function: `--help` and errors in settings must be printed before torch loads.
"""
