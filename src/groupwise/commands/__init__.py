"""Commands of `groupwise` that are large enough for a module of their own; `cli` puts them together."""
