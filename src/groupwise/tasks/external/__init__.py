"""Tasks, environments and tools from other packages, each in an extra of its own.

Modules in reading order:

    reasoning_gym_tasks  `gym:NAME`: the procedural datasets of reasoning-gym, with their scorers
    mcp_tools            the tools of an MCP server
    text_environments    TextArena, text environments of Gymnasium, OpenEnv servers
    verifiers_tasks      tasksets of verifiers, with their toolsets and environments

Packages are imported when they are used. An adapter of one package has at most 150
lines, not counting blank ones.
"""
