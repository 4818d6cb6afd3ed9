"""From examples to groups of rollouts, through anything that generates. It knows no engine.

Modules in reading order:

    collect        one group of rollouts per example
    multi_turn     rollouts with tools: while some wait, the engine continues the others
    trajectory     the token stream of one rollout: appended, never rewritten
    tools          a typed Python function as a tool
    tool_calls     parse tool calls out of a completion
    tool_executor  call a tool with limits, in this process or in a worker
"""
