"""Retrieval: documents, a hybrid dense and sparse index over them, and search.

Modules in reading order:

    documents      read documents and questions; split documents into chunks
    fetch          fetch web pages politely
    embed          embeddings: texts → vectors
    ranking        the BM25 index, top-k selection, fusion of dense and sparse rankings, the query adapter
    index_storage  the files of an index: manifest, chunks, vectors, questions
    search_index   Index: build, add, delete, search; retrieval metrics

    To add an embedding, implement `embed.Embedding` and return it from `embed.embedding_named`. To add a
    store, implement `index_storage.Store` and add it to `index_storage.STORES`.
"""
