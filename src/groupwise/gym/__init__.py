"""Training loops of your own, in the style of Gymnasium.

Modules in reading order:

    env    PromptEnv: asks a task's prompts in batches and scores groups of answers
    agent  Agent: a policy that acts and learns, on the engine and learner of `groupwise.train`
"""
