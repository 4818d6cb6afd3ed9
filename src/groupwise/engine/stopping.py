"""Stop strings: whether the text of a token sequence has just come to hold one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from groupwise.model.policy import Policy


class StopStrings:
    """Looks at as few last tokens as could hold a stop string, however it is split over them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def hits(self, sequences: Iterable[NDArray[np.int64]], strings: tuple[str, ...]) -> NDArray[np.bool_]:
        """Whether each sequence's text holds a stop string, given that it did not before the last token."""
        # A token that writes adds at least one byte; one more token for what the first may complete.
        reach = max(len(string.encode()) for string in strings) + 1
        texts = (self.policy.decode(self._writing(tokens)[-reach:].tolist()) for tokens in sequences)
        return np.array([any(string in text for string in strings) for text in texts])

    def _writing(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return tokens[self._writes_V[tokens]]

    @cached_property
    def _writes_V(self) -> NDArray[np.bool_]:
        """False for special tokens and for ids that the tokenizer does not have: they add no text."""
        tokenizer = self.policy.tokenizer
        writes_V = np.zeros(self.policy.head_weight.shape[0], dtype=np.bool_)
        known = np.array(list(tokenizer.get_vocab().values()))
        writes_V[known[known < len(writes_V)]] = True
        writes_V[[t for t, added in tokenizer.added_tokens_decoder.items() if added.special]] = False
        return writes_V
