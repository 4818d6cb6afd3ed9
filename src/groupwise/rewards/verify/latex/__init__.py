"""Reading and comparing mathematical answers, bounded in time and size.

Modules in reading order:

    latex_lexer   text → tokens
    expressions   tokens → expressions
    latex_parser  whole answers: lists, intervals, sets, matrices, words
    values        what an expression is worth
    equal         do two answers say the same?
"""
