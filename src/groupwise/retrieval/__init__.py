"""Documents, an index over them, and search.

Modules in reading order:

    documents      pages, questions and chunks
    fetch          fetch pages politely
    embed          texts → vectors
    bm25           the sparse index
    ranking        top-k and the fusion of dense and sparse results
    query_adapter  learn from training questions how to query this corpus
    index_storage  what an index keeps on disk
    search_index   Index: add, delete, search
"""
