"""An agent and an environment in the style of Gymnasium, for custom training loops.

Modules in reading order:

    env    PromptEnv: returns a task's prompts in batches and scores groups of answers
    agent  Agent: a policy that acts and learns, with the engine and learner of `groupwise.train`
"""
