"""Comparing an answer with the truth.

Modules in reading order:

    arithmetic          exact arithmetic on untrusted text
    math_answer         the verdict on a boxed answer
    vocabulary          words that may stand beside a value without changing it
    math_verify_pool    comparisons by math-verify, in a process that can be killed
    math_verify_worker  that process
    latex/              our own bounded reader of mathematical answers
"""
