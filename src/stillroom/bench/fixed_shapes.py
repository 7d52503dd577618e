"""What `runtime.fixed_shapes` gives and costs: `python -m stillroom.bench.fixed_shapes --help`.

Asks the same questions, one at a time, of an engine that reuses exact prefixes and of one that computes everything,
with and without fixed shapes. Says how many answers differ, by how much their first token's log probability does, and
the median time to first token of both.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from stillroom.config.settings import Dtype, ReuseConfig, RuntimeConfig
from stillroom.core.batch import TokenLogprobs
from stillroom.core.clock import SystemClock
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import Segment, SegmentedPrompt, SegmentKind
from stillroom.core.request import Request, SamplingParams
from stillroom.engine.engine import Engine
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_model
from stillroom.rag.generator import build_engine

_NUM_DOCUMENTS = 6
_SYSTEM = 10
_LENGTHS = (60, 250)
"""Tokens of a document."""
_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Reply:
    """What an engine answered."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    first_token_seconds: float


def questions(vocab_size: int, count: int, seed: int) -> list[Request]:
    """Prompts of random tokens: a system prompt, two of six documents, and a question of its own."""
    randomness = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(randomness.integers(4, vocab_size, randomness.integers(low, high)).tolist())

    system, documents = tokens(_SYSTEM, _SYSTEM + 1), [tokens(*_LENGTHS) for _ in range(_NUM_DOCUMENTS)]
    found = []
    for number in range(count):
        chunks = [
            Segment(SegmentKind.CHUNK, documents[one], ChunkId(int(one)))
            for one in randomness.choice(_NUM_DOCUMENTS, 2, replace=False)
        ]
        segments = (Segment(SegmentKind.SYSTEM, system), *chunks, Segment(SegmentKind.QUESTION, tokens(8, 40)))
        sampling = SamplingParams(max_tokens=_MAX_TOKENS, logprobs=5)
        found.append(Request(request_id=RequestId(f"q{number}"), prompt=SegmentedPrompt(segments), sampling=sampling))
    return found


def answer(engine: Engine, question: Request) -> Reply:
    """Ask, and wait for the whole answer."""
    began, first = engine.clock.monotonic(), 0.0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    engine.submit(question)
    while engine.has_work:
        for event in engine.step():
            if event.token_id is not None and event.logprobs is not None:
                first = first or event.at - began
                token_ids.append(event.token_id)
                logprobs.append(event.logprobs)
    return Reply(token_ids, logprobs, first)


def replies(decoder: Decoder, asked: Sequence[Request], *, reuses: bool, fixed_shapes: bool) -> list[Reply]:
    """Of a new engine, which is asked the first question twice to warm up."""
    config, reuse = RuntimeConfig(fixed_shapes=fixed_shapes), ReuseConfig(mode="exact" if reuses else "off")
    engine, cache = build_engine(decoder, config, SystemClock(), reuse=reuse, fingerprint=bytes(32))
    answer(engine, asked[0])
    found = [answer(engine, one) for one in asked]
    cache.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m stillroom.bench.fixed_shapes", description=main.__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    decoder = load_model(chosen.model, dtype=chosen.dtype).decoder
    asked = questions(decoder.spec.vocab_size, chosen.questions, chosen.seed)
    print(
        "| fixed shapes | answers that differ | bits that differ | first logprob, at most | first token, exact | off |"
    )
    print("|---|---|---|---|---|---|")
    for is_fixed in (False, True):
        kept, computed = (replies(decoder, asked, reuses=one, fixed_shapes=is_fixed) for one in (True, False))
        pairs = list(zip(kept, computed, strict=True))
        num_other = sum(one.token_ids != other.token_ids for one, other in pairs)
        num_bits = sum((one.token_ids, one.logprobs) != (other.token_ids, other.logprobs) for one, other in pairs)
        by = max(abs(one.logprobs[0].logprob - other.logprobs[0].logprob) for one, other in pairs)
        seconds = [statistics.median(reply.first_token_seconds for reply in side) for side in (kept, computed)]
        times = " | ".join(f"{1000 * each:.1f} ms" for each in seconds)
        name, total = "yes" if is_fixed else "no", len(pairs)
        print(f"| {name} | {num_other} of {total} | {num_bits} of {total} | {by:.3g} | {times} |", flush=True)


if __name__ == "__main__":
    main()
