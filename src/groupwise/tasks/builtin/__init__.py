"""The built-in tasks.

Modules: `countdown` (with `countdown_puzzles`, which generates and solves them), `gsm8k` (word problems, also
generated), `boxed_math` (answers in \\boxed{}), `search_qa` (questions over an invented world) and `medquad`
(medical questions over an index).
"""
