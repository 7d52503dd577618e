"""`stillroom bench follow-ups`: which documents the second question of a conversation finds.

Conversations of two questions are made from a data set. A follow-up asks about a document of the first question, and
"it" stands for what both questions name. A change of subject is a question about another document, as it is. Each
second question is searched alone, together with the first, and both, merged in turns or by score. Nothing is fitted.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from stillroom.answer_quality.beir import read_judged_queries
from stillroom.backends.conversation import Exchange, merge, search_with_previous
from stillroom.config.settings import StillroomConfig
from stillroom.core.document import ScoredChunk
from stillroom.core.ids import ChunkId
from stillroom.errors import UsageError
from stillroom.retrieval.index.words import STOP_WORDS
from stillroom.retrieval.knowledge_base import KnowledgeBase
from stillroom_bench.instrument.bench_report import BenchResult
from stillroom_bench.instrument.environment import record_environment
from stillroom_bench.instrument.harness import Samples
from stillroom_bench.loads.beir_knowledge_base import open_knowledge_base
from stillroom_bench.quality.ir_metrics import Qrels, evaluate
from stillroom_bench.quality.quality_options import FollowUpOptions

TOP_K = 10
ALONE, TOGETHER, IN_TURNS, BY_SCORE = "alone", "with the question before", "both, in turns", "both, by score"
FOLLOW_UPS, CHANGES = "follow-ups", "changes of subject"
_METRICS = ("ndcg_at_10", "recall_at_5", "mrr_at_10")
_WORD = re.compile(r"\w+")

Found = Sequence[ScoredChunk]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Two questions, and the id of the query whose judgements hold for the second."""

    first: str
    second: str
    query: str


def follow_up(first: str, second: str) -> str | None:
    """Replace each run of words of the second question that the first has too by "it"; stop words end a run.

    None if nothing is replaced, or no other word is left than stop words.
    """
    known = {word.lower() for word in _WORD.findall(first)} - STOP_WORDS
    parts: list[str] = []
    end, num_left, is_run = 0, 0, False
    for found in _WORD.finditer(second):
        word = found[0].lower()
        is_known = word in known
        num_left += word not in known and word not in STOP_WORDS
        if is_known and is_run:  # the gap belongs to the run
            parts.append("")
        elif is_known:
            parts.append(second[end : found.start()] + "it")
        else:
            parts.append(second[end : found.end()])
        end, is_run = found.end(), is_known
    text = "".join(parts) + second[end:]
    return text if text != second and num_left else None


def conversations(queries: dict[str, str], qrels: Qrels, num: int, seed: int) -> dict[str, list[Conversation]]:
    """Make up to `num` follow-ups, one per relevant document, and as many changes of subject."""
    rng = np.random.default_rng(seed)
    by_document: dict[str, list[str]] = {}
    for query in queries:
        for document, grade in qrels[query].items():
            if grade > 0:
                by_document.setdefault(document, []).append(query)
    made: dict[str, list[Conversation]] = {FOLLOW_UPS: [], CHANGES: []}
    names = list(queries)
    for document in rng.permutation(sorted(by_document)):
        asked = list(rng.permutation(by_document[document]))
        texts = [(query, follow_up(queries[asked[0]], queries[query])) for query in asked[1:]]
        query, text = next(((query, text) for query, text in texts if text is not None), ("", None))
        if text is None:
            continue
        first = queries[asked[0]]
        made[FOLLOW_UPS].append(Conversation(first, text, query))
        others = (names[at] for at in rng.permutation(len(names)))
        other = next(one for one in others if not qrels[one].keys() & qrels[asked[0]].keys())
        made[CHANGES].append(Conversation(first, queries[other], other))
        if len(made[FOLLOW_UPS]) >= num:
            break
    return made


def in_turns(found: Found, others: Found, top_k: int) -> list[ScoredChunk]:
    """Alternate two results, the question's own first."""
    kept: dict[ChunkId, ScoredChunk] = {}
    for pair in zip_longest(found, others):
        for scored in pair:
            if scored is not None:
                kept.setdefault(scored.chunk.chunk_id, scored)
    return list(kept.values())[:top_k]


def run_follow_ups(
    options: FollowUpOptions, work_dir: Path, config: StillroomConfig, on_step: Callable[[str], None] = lambda _: None
) -> BenchResult:
    """Measure all ways of searching on all sets.

    Raises:
        UsageError: a folder is not a data set, or has too few documents with several questions.
        DocumentError: a line of a data set cannot be read.
    """
    samples = Samples()
    notes = [f"searches: {config.search.mode}, fusion {config.search.fusion}, {TOP_K} chunks of each search and in all"]
    for path in options.datasets:
        on_step(f"{path.name}: indexing (cached in {work_dir}) and searching")
        queries, qrels = read_judged_queries(path, options.split)
        made = conversations(queries, qrels, options.num_conversations, options.seed)
        if len(made[FOLLOW_UPS]) < 20:
            raise UsageError(
                f"{path} gives {len(made[FOLLOW_UPS])} follow-ups; choose a data set with several questions a document"
            )
        with open_knowledge_base(path, work_dir, config) as kb:
            for kind, cases in made.items():
                runs = _runs(kb, cases)
                judged = {str(at): qrels[case.query] for at, case in enumerate(cases)}
                for arm, run in runs.items():
                    values = evaluate(judged, run)
                    samples.values[f"{path.name}, {kind}/{arm}"] = {name: values[name].tolist() for name in _METRICS}
        notes.append(f"{path.name}: {len(made[FOLLOW_UPS])} follow-ups, such as {made[FOLLOW_UPS][0].second!r} after ")
        notes[-1] += repr(made[FOLLOW_UPS][0].first)
    return BenchResult(
        "stillroom bench follow-ups",
        record_environment(),
        {"datasets": [path.name for path in options.datasets], "split": options.split, "seed": options.seed},
        samples,
        baseline=IN_TURNS,
        notes=notes,
        sample_of="question",
    )


def _runs(kb: KnowledgeBase, cases: Sequence[Conversation]) -> dict[str, dict[str, list[str]]]:
    """Return the documents of each case by arm, best first."""
    runs: dict[str, dict[str, list[str]]] = {}
    for at, case in enumerate(cases):
        own = kb.search(case.second, top_k=TOP_K).results
        together = search_with_previous(
            [Exchange(case.first, "")], case.second, lambda text: kb.search(text, top_k=TOP_K).results
        )
        arms: dict[str, Found] = {
            ALONE: own,
            TOGETHER: together,
            IN_TURNS: in_turns(own, together, TOP_K),
            BY_SCORE: merge(own, together, TOP_K),
        }
        for arm, found in arms.items():
            documents = dict.fromkeys(scored.chunk.record_id or "" for scored in found)
            runs.setdefault(arm, {})[str(at)] = list(documents)
    return runs
