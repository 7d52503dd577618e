"""Shortens the documents of a question to a share of their text, as prompt compression does (Cache-Craft Table 1).

The paper discards tokens by LLMLingua-2, a trained classifier, and by summaries (MapReduce). These are two rules that
need no other model: tokens that the model itself finds likely (Selective-Context, Li et al. 2023), and sentences with
few words of the question.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stillroom.answer_quality.questions import ChunkQuestion, new_chunk
from stillroom.backends.engine_building import load_configured
from stillroom.config.settings import RuntimeConfig
from stillroom_bench.instrument.bench_report import share_name
from stillroom_bench.quality.prompt_reader import PromptReader

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_WORD = re.compile(r"\w+")


def shortened_questions(
    runtime: RuntimeConfig, questions: Sequence[ChunkQuestion], kept: Sequence[float]
) -> dict[str, list[ChunkQuestion]]:
    """Return by name of the arm the questions with these shares, in (0, 1), of the text of their documents."""
    if not kept:
        return {}
    found: dict[str, list[ChunkQuestion]] = {}
    reader = PromptReader(load_configured(runtime))
    for share in kept:
        found[f"{share_name(share)} of the tokens"] = [surprising_tokens(reader, one, share) for one in questions]
        found[f"{share_name(share)} of the sentences"] = [matching_sentences(one, share) for one in questions]
    return found


def num_words(question: ChunkQuestion) -> int:
    """Return the number of words of the documents."""
    return sum(len(chunk.text.split()) for chunk in question.chunks)


def surprising_tokens(reader: PromptReader, question: ChunkQuestion, kept: float) -> ChunkQuestion:
    """Keep the tokens of each document that the model finds least likely behind the tokens before them."""
    system = reader.segments([], "")[0][0].token_ids
    texts = []
    for chunk in question.chunks:
        token_ids = reader.encode(chunk.text)
        surprisal_T = reader.surprisal([*system, *token_ids])[len(system) :]
        count = max(1, round(kept * len(token_ids)))
        places = np.sort(np.argsort(-surprisal_T, kind="stable")[:count])
        texts.append(reader.decode([token_ids[place] for place in places]))
    return _with_texts(question, texts)


def matching_sentences(question: ChunkQuestion, kept: float) -> ChunkQuestion:
    """Keep the sentences of all documents that have most different words of the question, of equal ones the first.

    Sentences are added while they fit into `kept` of all words; the best one is always kept.
    """
    wanted = set(_WORD.findall(question.question.lower()))
    found = [
        (place, number, sentence)
        for place, chunk in enumerate(question.chunks)
        for number, sentence in enumerate(_SENTENCE_END.split(chunk.text))
    ]
    ordered = sorted(found, key=lambda one: -len(wanted & set(_WORD.findall(one[2].lower()))))
    room = kept * num_words(question)
    chosen: list[tuple[int, int, str]] = []
    size = 0
    for one in ordered:
        if not chosen or size + len(one[2].split()) <= room:
            chosen.append(one)
            size += len(one[2].split())
    texts = [
        " ".join(sentence for at, _, sentence in sorted(chosen) if at == place) for place in range(len(question.chunks))
    ]
    return _with_texts(question, texts)


def _with_texts(question: ChunkQuestion, texts: Sequence[str]) -> ChunkQuestion:
    """Return the question over these texts; empty ones are left out, unless all are."""
    chunks = tuple(new_chunk(text, place) for place, text in enumerate(texts) if text.strip())
    return replace(question, chunks=chunks or question.chunks[:1])
