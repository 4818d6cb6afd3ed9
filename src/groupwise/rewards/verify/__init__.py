"""Compare an answer with the ground truth.

Modules in reading order:

    math_answer          judge a boxed answer, and whether it is fully worked out
    vocabulary           words that may accompany a value without changing it
    math_verify_process  compare by math-verify, in a process that can be killed
    latex/               a parser for mathematical answers with bounded time and memory
"""
