"""Reads word lists that are written as text."""


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())
