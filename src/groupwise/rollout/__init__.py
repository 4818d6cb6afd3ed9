"""Turn examples into groups of rollouts, of one turn or several. Independent of the engine.

Modules in reading order:

    collect        generate one group of rollouts per example
    multi_turn     multi-turn rollouts: some wait for tools while the engine continues the others;
                   the token stream of one rollout
    tool_rollouts  rollouts with tools or an environment: what a task gives them, and groups of them
    tools          turn a typed Python function into a tool
    tool_calls     parse tool calls in a completion
    tool_executor  call tools with a time limit, in this process or in a worker
    environment    environments that reply to each turn, in this process or in a worker
    agent_rollouts rollouts of programs that own their loop and call the policy as a server

Anything with a `generate` method (`collect.Generate`) can generate the completions.
"""
