"""Finds the most similar passages by TF-IDF; they serve as distractors."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy import sparse

_WORD = re.compile(r"\w+")
_ROWS = 512
_MAX_SHARE = 0.05
"""Words in a larger share of passages are ignored: they carry no information and would make rows dense."""


def neighbours(texts: Sequence[str], count: int) -> list[list[int]]:
    """Return for each text the `count` others with the highest TF-IDF cosine; fewer if fewer share a word."""
    weights = _tf_idf(texts)
    found: list[list[int]] = []
    for start in range(0, len(texts), _ROWS):
        products = (weights[start : start + _ROWS] @ weights.T).tocsr()
        for row in range(products.shape[0]):
            begin, end = products.indptr[row], products.indptr[row + 1]
            columns, scores = products.indices[begin:end], products.data[begin:end]
            others = columns != start + row
            columns, scores = columns[others], scores[others]
            best = np.lexsort((columns, -scores))[:count]
            found.append([int(column) for column in columns[best]])
    return found


def _tf_idf(texts: Sequence[str]) -> sparse.csr_array:
    counts = [Counter(_WORD.findall(text.lower())) for text in texts]
    df = Counter(word for count in counts for word in count)
    limit = max(2, int(_MAX_SHARE * len(texts)))
    column_of = {word: place for place, word in enumerate(sorted(word for word, n in df.items() if 1 < n <= limit))}
    rows, columns, values = [], [], []
    for row, count in enumerate(counts):
        for word, number in count.items():
            if word in column_of:
                rows.append(row)
                columns.append(column_of[word])
                values.append((1 + np.log(number)) * np.log(len(texts) / df[word]))
    shape = (len(texts), max(1, len(column_of)))
    matrix = sparse.csr_array((np.asarray(values, dtype=np.float32), (rows, columns)), shape=shape)
    norms = np.sqrt((matrix**2).sum(axis=1))
    return sparse.csr_array(sparse.diags_array(1 / np.maximum(norms, 1e-9), dtype=np.float32) @ matrix)
