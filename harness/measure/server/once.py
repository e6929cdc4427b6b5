"""Answers of a running server that a command asks for once. Outside of ``asked_once`` nothing is kept."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

AnswerT = TypeVar("AnswerT")
_answers: list[dict[Any, Any]] = []


@contextmanager
def asked_once() -> Generator[None]:
    """One command, which talks to the same servers from its beginning to its end."""
    _answers.append({})
    try:
        yield
    finally:
        _answers.pop()


def once(key: object, ask: Callable[[], AnswerT]) -> AnswerT:
    """The answer of ``ask``, kept under ``key`` within ``asked_once``; outside of it the server is asked again."""
    if not _answers:
        return ask()
    kept = _answers[-1]
    if key not in kept:
        kept[key] = ask()
    return kept[key]
