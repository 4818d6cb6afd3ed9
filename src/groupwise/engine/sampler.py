"""Token sampling: draws, penalties, stop strings, token masks of grammars, log-probabilities of prompts.

The noise of a draw depends only on the sequence's seed and the token's position, not on the batch.

Axes: N sequences, V vocabulary, A alternatives, C chunks of the vocabulary, W tokens a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from groupwise.errors import InvariantError
from groupwise.invariants import check_finite
from groupwise.model.ops.logits import entropy, masked_logits, running_sum, scaled_logits
from groupwise.model.policy import Policy
from groupwise.model.token_grammar import GrammarState, TokenGrammar
from groupwise.records import Sampling

CHUNK = 64
MOST_ALTERNATIVES = 20
"""The largest number of top log-probabilities that a request may ask for."""
Alternatives = tuple[tuple[int, float], ...]
"""The most likely tokens at one position with their log-probabilities, most likely first."""


def uniforms(seeds_N: NDArray[np.uint64], positions_N: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a uniform number in [0, 1) for each (seed, position), from splitmix64 used as a counter RNG."""
    with np.errstate(over="ignore"):
        x = seeds_N + (positions_N + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    noise_N: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return noise_N


def draw(logits_NV: Tensor, sampling: Sampling, noise_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens_N, logprobs_N, entropies_N); `noise_N` holds one uniform float64 per row."""
    logprobs_NV = scaled_logits(logits_NV.to(noise_N.device), sampling).log_softmax(-1)
    entropies_N = entropy(logprobs_NV)
    check_finite("the entropy of the policy", float(entropies_N.sum()))
    tokens_N = logprobs_NV.argmax(-1) if sampling.greedy else pick(logprobs_NV.exp(), noise_N)
    chosen_N = logprobs_NV.gather(1, tokens_N[:, None]).squeeze(1)
    return tokens_N, chosen_N, entropies_N


def noise_on(device: torch.device, noise_N: NDArray[np.float64]) -> Tensor:
    """Return noise where tokens are drawn from a device's logits; `mps` has no float64, so on the CPU."""
    return torch.from_numpy(noise_N).to("cpu" if device.type == "mps" else device)


def likeliest(logprobs_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens_NA, logprobs_NA) of the most likely tokens, in descending order."""
    logprobs_NA, tokens_NA = logprobs_NV.topk(MOST_ALTERNATIVES, dim=-1)
    return tokens_NA, logprobs_NA


def pick(probs_NV: Tensor, noise_N: Tensor) -> Tensor:
    """Return the tokens_N at which the cumulative probability exceeds the noise.

    The search finds the chunk first, then the token in it. This keeps the cumulative sums short enough
    for float64; float32 rounding would starve the tail of a large vocabulary.
    """
    rows, vocabulary = probs_NV.shape
    chunks_NCW = torch.nn.functional.pad(probs_NV, (0, -vocabulary % CHUNK)).view(rows, -1, CHUNK)
    chunk_N, rest_N = _locate(chunks_NCW.sum(-1), noise_N)
    offset_N, _ = _locate(chunks_NCW[torch.arange(rows, device=chunk_N.device), chunk_N], rest_N)
    return chunk_N * CHUNK + offset_N


def _locate(weights_NK: Tensor, noise_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the weight each noise value falls on, and its relative offset in that weight.

    The offset is again uniform noise. Example: weights [1, 0, 3] and noise 0.5 aim at 2 of 4, which is
    1 into the last weight -> index 2, rest 1/3.
    """
    mass_NK = running_sum(weights_NK.double())
    total_N1 = mass_NK[:, -1:].contiguous()
    aim_N1 = noise_N[:, None] * total_N1
    index_N1 = torch.searchsorted(mass_NK, aim_N1, right=True)
    # Rounding of the product can reach the total itself: fall back to the last weight above 0.
    index_N1 = torch.minimum(index_N1, torch.searchsorted(mass_NK, total_N1))
    weight_N1 = weights_NK.double().gather(1, index_N1)
    rest_N1 = (aim_N1 - (mass_NK.gather(1, index_N1) - weight_N1)) / weight_N1
    return index_N1.squeeze(1), rest_N1.squeeze(1).clamp(0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Changes of the logits before temperature, as OpenAI's API and vLLM define them, in vLLM's order."""

    bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to the logit of each."""
    repetition: float = 1.0
    """Divides the logits above 0 of tokens in the prompt or completion, and multiplies those below 0."""
    frequency: float = 0.0
    """Subtracted from a token's logit for each of its occurrences in the completion."""
    presence: float = 0.0
    """Subtracted once from the logits of tokens in the completion."""

    def apply(self, logits_V: Tensor, prompt: Sequence[int], completion: NDArray[np.int64]) -> Tensor:
        """Return the changed logits of the next token."""
        logits_V = logits_V.float().clone()
        if self.bias:
            tokens, values = zip(*self.bias, strict=True)
            logits_V[list(tokens)] += torch.tensor(values, device=logits_V.device)
        if self.repetition != 1.0:
            seen = sorted({*prompt, *completion.tolist()})
            logits = logits_V[seen]
            logits_V[seen] = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        tokens_N, counts_N = (
            torch.from_numpy(x).to(logits_V.device) for x in np.unique(completion, return_counts=True)
        )
        logits_V[tokens_N] -= counts_N * self.frequency + self.presence
        return logits_V


class StopStrings:
    """Detects stop strings by decoding only the last tokens that could contain one."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def hits(self, sequences: Iterable[NDArray[np.int64]], strings: tuple[str, ...]) -> NDArray[np.bool_]:
        """Return whether the last token of each sequence completes a stop string."""
        # A token with text adds at least one byte. One extra token: the first may complete a character.
        reach = max(len(string.encode()) for string in strings) + 1
        texts = (self.policy.decode(self._with_text(tokens)[-reach:].tolist()) for tokens in sequences)
        return np.array([any(string in text for string in strings) for text in texts])

    def _with_text(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return tokens[self._has_text_V[tokens]]

    @cached_property
    def _has_text_V(self) -> NDArray[np.bool_]:
        """False for special tokens and for ids unknown to the tokenizer: they add no text."""
        tokenizer = self.policy.tokenizer
        has_text_V = np.zeros(self.policy.head_weight.shape[0], dtype=np.bool_)
        known = np.array(list(tokenizer.get_vocab().values()))
        has_text_V[known[known < len(has_text_V)]] = True
        has_text_V[[t for t, added in tokenizer.added_tokens_decoder.items() if added.special]] = False
        return has_text_V


class TokenMasks:
    """The tokens that the grammars of running sequences allow next: a packed mask for each slot.

    A slot without a grammar allows every token.
    """

    def __init__(self, slots: int, *, pinned: bool = False) -> None:
        self.constrained = np.zeros(slots, dtype=np.bool_)
        """Whether the slot's sequence has a grammar."""
        self.failed = np.zeros(slots, dtype=np.bool_)
        """Whether the sequence was cut off because its grammar needs too much work."""
        self._slots, self._pinned = slots, pinned
        self._states: dict[int, GrammarState] = {}

    @cached_property
    def _host(self) -> Tensor:
        """Allocated for the first grammar: [slots, words]."""
        words = next(iter(self._states.values())).grammar.computer.words
        return torch.full((self._slots, words), -1, dtype=torch.int32, pin_memory=self._pinned)

    @property
    def words_SW(self) -> Tensor:
        """The masks of all slots, on the host."""
        return self._host

    def start(self, slot: int, grammar: TokenGrammar | None) -> None:
        """Begin a sequence in a slot."""
        if (before := self._states.pop(slot, None)) is not None:
            before.grammar.leave(before)
            self._host[slot] = -1
        self.constrained[slot], self.failed[slot] = grammar is not None, False
        if grammar is not None:
            self._states[slot] = state = grammar.start()
            self._host.numpy()[slot] = state.place.mask_W

    def update(self, slots_N: NDArray[np.int64], tokens_N: NDArray[np.int64]) -> None:
        """Add the tokens that unfinished sequences have gained, and compute their next masks."""
        own_N = self.constrained[slots_N]
        if not own_N.any():
            return
        slots_N, tokens_N, masks_SW = slots_N[own_N], tokens_N[own_N], self._host.numpy()
        if not (allowed_N := masks_SW[slots_N, tokens_N // 32] >> (tokens_N % 32) & 1).all():
            token = int(tokens_N[int(np.argmin(allowed_N))])
            raise InvariantError(f"token {token} was sampled, which the grammar of its answer excludes")
        states = [self._states[slot] for slot in slots_N.tolist()]
        before = [state.place.mask_W for state in states]
        states[0].grammar.computer.advance(list(zip(states, tokens_N.tolist(), strict=True)))
        for slot, state, mask_W in zip(slots_N.tolist(), states, before, strict=True):
            if state.place.mask_W is not mask_W:  # inside of a long string it stays the same
                masks_SW[slot] = state.place.mask_W
            if state.failed:
                self.failed[slot] = True

    def apply(self, logits_RV: Tensor, slots_R: NDArray[np.int64]) -> Tensor:
        """Return the logits of the sequences in these slots, with -inf for tokens that are not allowed."""
        if not self.constrained[slots_R].any():
            return logits_RV
        return masked_logits(logits_RV, self._host[torch.from_numpy(slots_R)].to(logits_RV.device))


LOGITS_CHUNK = 64
"""Tokens whose logits are in memory at once."""


@dataclass(slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens at temperature 1, filled in during prefill."""

    alternatives: int
    positions: list[Alternatives] = field(default_factory=list)
    """For each prompt token after the first: the token itself, then the most likely tokens."""

    def add(self, policy: Policy, hidden_NM: Tensor, tokens: Sequence[int]) -> None:
        """Score each of `tokens` from the hidden state before it."""
        tokens_N1 = torch.tensor(tokens, dtype=torch.int64, device=hidden_NM.device)[:, None]
        for start in range(0, len(tokens), LOGITS_CHUNK):
            here = slice(start, start + LOGITS_CHUNK)
            own_N1, logprobs_NV = tokens_N1[here], policy.logits(hidden_NM[here]).float().log_softmax(-1)
            likely_NA, values_NA = (x[:, : self.alternatives] for x in likeliest(logprobs_NV))
            shown_NA = torch.cat([own_N1, likely_NA], dim=1)
            values_NA = torch.cat([logprobs_NV.gather(1, own_N1), values_NA], dim=1)
            for pair in zip(shown_NA.tolist(), values_NA.tolist(), strict=True):
                self.positions.append(tuple(zip(*pair, strict=True)))
