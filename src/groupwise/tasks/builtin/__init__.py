"""The built-in tasks.

Modules in reading order:

    countdown   write an equation that reaches a target; its puzzles and their solutions
    gsm8k       word problems: GSM8K, or generated ones
    boxed_math  problems with answers in \\boxed{}: MATH, or generated ones
    code_problems      write a Python function: MBPP, HumanEval, or generated problems
    search_qa   multi-hop questions over a generated world, with a search tool
    tldr        summaries after thinking, close to a reference and short
    medquad     medical questions over an index, with a search tool
"""
