"""Searches that come at the same time, answered in one batch: many cost little more than one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Together(Generic[T]):
    """A function of one query, for many threads, made of a function of many queries.

    Whoever comes while a batch is at work waits for the next one. The first to get its turn answers for all
    who wait by then; no thread of its own is needed.
    """

    def __init__(self, answer_all: Callable[[list[str]], Sequence[T]]) -> None:
        self._answer_all = answer_all
        self._waiting: deque[tuple[str, Future[T]]] = deque()
        self._turn = threading.Lock()

    def __call__(self, query: str) -> T:
        mine: Future[T] = Future()
        self._waiting.append((query, mine))
        with self._turn:
            if not mine.done():
                self._answer([self._waiting.popleft() for _ in range(len(self._waiting))])
        return mine.result()

    def _answer(self, asked: Sequence[tuple[str, Future[T]]]) -> None:
        try:
            answers = self._answer_all([query for query, _ in asked])
        except BaseException as error:
            for _, answer in asked:
                answer.set_exception(error)
            return
        for (_, answer), value in zip(asked, answers, strict=True):
            answer.set_result(value)
