"""The models that come with the package, and what they were made for."""

TINY, TINY_SEARCH = "tiny", "tiny-search"
"""One for puzzles, and one that knows how to call a search tool."""
BUILT_IN = (TINY, TINY_SEARCH)
TINY_PUZZLES = {"numbers": 3, "largest": 50}
"""Countdown of the size that `tiny` was made for."""
