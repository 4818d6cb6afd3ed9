"""Parse and compare mathematical answers with bounded time and memory.

Modules in reading order:

    latex_lexer   text → tokens
    expressions   tokens → expressions
    latex_parser  tokens → whole answers: lists, intervals, sets, matrices, words
    values        evaluate an expression
    equal         compare two answers
"""
