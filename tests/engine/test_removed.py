"""A request is not answered from KV that has seen a removed document, or one that its filter excludes.

The bundled model with questions of its world: one chunk names a person, and another says where "she" was born. Only KV
that was computed after the first chunk tells which of two such chunks is about the person.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest

from stillroom.backends.conversation import NO_HISTORY, History
from stillroom.backends.engine_building import build_engine
from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.config.settings import ReuseConfig, RuntimeConfig, TokenSelector
from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.request import Request, SamplingParams
from stillroom.core.reuse import PromptReuse, Reason
from stillroom.kvcache.tree.cost_model import linear_profile
from stillroom.kvcache.tree.knowledge_tree import KnowledgeTree
from stillroom.kvstore.files import folder_of, read_header, record_paths
from stillroom.kvstore.record import Header
from stillroom.models.loader import LoadedModel, load_model
from stillroom.models.numerics import kv_fingerprint
from tests.fakes import ManualClock

MODEL = b"m" * 32
BORN = [
    ("Kala Broster", "Glanwick", "Bisent"),
    ("Lola Yevman", "Storholm", "Pisent"),
    ("Sivia Galdt", "Gilwick", "Perill"),
]
SELECTORS: list[TokenSelector] = ["question", "context", "random"]
HOW = [*((selector, 0.15) for selector in SELECTORS), ("question", 0.0)]


def chunk(number: int, text: str) -> Chunk:
    return Chunk(ChunkId(number), DocumentId(str(number)), 0, text)


FILLER = chunk(99, "The river of Corvia is the Esk . Little else is known .")
SHE = [
    chunk(i, f"She was born in {town} . She bought the ship {ship} . The birth of her is dated 1708 .")
    for i, (_, town, ship) in enumerate(BORN)
]
RIVALS = [
    chunk(i + 20, f"She was born in {town} . She bought the ship {ship} . The birth of her is dated 1832 .")
    for i, (town, ship) in enumerate([("Storholm", "Pisent"), ("Gilwick", "Stunatine"), ("Karstead", "Gisetine")])
]
NAMED = [
    chunk(i + 10, f"{name} studied law . {name} took a post at Ceckis Glass .") for i, (name, *_) in enumerate(BORN)
]
NAMES = {one.chunk_id for one in NAMED}


def question(person: int) -> str:
    return f"Where was {BORN[person][0]} born ?"


def pair(person: int) -> tuple[Chunk, Chunk]:
    """Return the chunk about the person, after a similar one that no other prompt has."""
    return RIVALS[person], SHE[person]


class ChunkFixture:
    """An engine with the bundled model that answers over given chunks."""

    def __init__(self, model: LoadedModel, folder: Path | None = None, **reuse: object) -> None:
        self._model = model
        self._prompts = PromptBuilder(model.tokenizer, format_for(model.tokenizer))
        self.engine, self.cache = build_engine(
            model.decoder,
            RuntimeConfig(kv_bytes=2**24, block_size=4, max_num_seqs=4),
            ManualClock(),
            reuse=ReuseConfig(**{"load": "always", "audit_share": 0.0, **reuse}),  # type: ignore[arg-type]
            fingerprint=MODEL,
            profile=linear_profile(1e-3, 1e-4, 1e-7),
            kv_folder=folder,
        )
        self._num_asked = 0
        self.reuse: PromptReuse | None = None

    @property
    def tree(self) -> KnowledgeTree:
        assert self.cache.tree is not None
        return self.cache.tree

    def request(self, text: str, *chunks: Chunk, history: History = NO_HISTORY) -> Request:
        self._num_asked += 1
        return Request(
            request_id=RequestId(f"r{self._num_asked}"),
            prompt=self._prompts.build(chunks, text, 2000, history),
            sampling=SamplingParams(max_tokens=4),
            stop_token_ids=self._model.stop_token_ids,
        )

    def ask(self, text: str, *chunks: Chunk, may_see: Callable[[Collection[ChunkId]], bool] | None = None) -> str:
        request = self.request(text, *chunks)
        self.engine.submit(request if may_see is None else replace(request, may_see=may_see))
        return self.finish()

    def finish(self) -> str:
        tokens: list[int] = []
        while self.engine.has_work:
            for event in self.engine.step():
                tokens += [] if event.token_id is None else [event.token_id]
                self.reuse = event.reuse or self.reuse
            self.engine.check_integrity()
        return self._model.tokenizer.decode(tokens)

    def forget(self, gone: set[ChunkId]) -> None:
        self.engine.scheduler.forget_chunks(lambda chunk_ids: chunk_ids - gone)

    def placed(self) -> dict[ChunkId | None, Tier | None]:
        """Return the placed chunks of the last prompt, and their sources."""
        assert self.reuse is not None
        return {one.chunk_id: one.source for one in self.reuse.segments if one.reason is Reason.ANYWHERE}

    def keep_she_behind_names(self) -> None:
        """Compute each chunk about "she" after a placed copy of the chunk that names her."""
        self.ask("What is the river of Corvia ?", FILLER, *NAMED)
        for person, (named, she) in enumerate(zip(NAMED, SHE, strict=True)):
            self.ask(question(person), named, she)
            assert set(self.placed()) == {named.chunk_id}
        assert self.tree.chunk_ids() == {FILLER.chunk_id, *NAMES, *(she.chunk_id for she in SHE)}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("bundled:microworld", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def unaware(model: LoadedModel) -> list[str]:
    """The answers over chunks that do not name their person, without reuse."""
    fixture = ChunkFixture(model, mode="off")
    return [fixture.ask(question(person), *pair(person)) for person in range(len(BORN))]


def seen_on_disk(folder: Path) -> set[ChunkId]:
    kv = kv_fingerprint(MODEL)
    headers = [read_header(path, kv) for path in record_paths(folder_of(folder, kv))]
    return {chunk_id for header in headers if isinstance(header, Header) for chunk_id in header.record.seen}


@pytest.mark.parametrize(("selector", "ratio"), HOW)
def test_removed_document_does_not_answer_through_kv_computed_after_it(
    model: LoadedModel, unaware: list[str], selector: TokenSelector, ratio: float
) -> None:
    fixture = ChunkFixture(model, mode="anywhere", token_selector=selector, recompute_ratio=ratio)
    fixture.keep_she_behind_names()
    fixture.forget(NAMES)
    assert fixture.tree.chunk_ids() == {FILLER.chunk_id}
    for person, expected in enumerate(unaware):
        assert fixture.ask(question(person), *pair(person)) == expected
    assert not fixture.tree.chunk_ids() & NAMES


@pytest.mark.parametrize(("selector", "ratio"), HOW)
def test_request_that_may_not_see_a_document_is_not_answered_from_it(
    model: LoadedModel, unaware: list[str], selector: TokenSelector, ratio: float
) -> None:
    fixture = ChunkFixture(model, mode="anywhere", token_selector=selector, recompute_ratio=ratio)
    fixture.keep_she_behind_names()
    for person, expected in enumerate(unaware):
        assert fixture.ask(question(person), *pair(person), may_see=NAMES.isdisjoint) == expected
        assert not fixture.placed()


@pytest.mark.parametrize(("selector", "ratio"), [("context", 0.15), ("question", 0.0)])
def test_without_a_filter_kv_computed_after_another_document_is_used(
    model: LoadedModel, unaware: list[str], selector: TokenSelector, ratio: float
) -> None:
    """The answers show it, so the tests above would detect such KV."""
    fixture = ChunkFixture(model, mode="anywhere", token_selector=selector, recompute_ratio=ratio)
    fixture.keep_she_behind_names()
    answers = []
    for person in range(len(BORN)):
        answers.append(fixture.ask(question(person), *pair(person)))
        assert set(fixture.placed()) == {SHE[person].chunk_id}
    assert sum(answer != other for answer, other in zip(answers, unaware, strict=True)) >= 2


def test_records_tell_another_process_what_their_kv_has_seen(
    model: LoadedModel, unaware: list[str], tmp_path: Path
) -> None:
    first = ChunkFixture(model, tmp_path, mode="anywhere", recompute_ratio=0.0)
    first.keep_she_behind_names()
    first.cache.close()
    assert seen_on_disk(tmp_path) >= NAMES
    second = ChunkFixture(model, tmp_path, mode="anywhere", recompute_ratio=0.0)
    assert second.ask(question(0), *pair(0), may_see=NAMES.isdisjoint) == unaware[0]
    assert not second.placed()
    second.ask(question(1), *pair(1))
    assert second.placed()[SHE[1].chunk_id] is Tier.DISK
    second.forget(NAMES)
    assert second.ask(question(2), *pair(2)) == unaware[2]
    second.cache.close()
    assert seen_on_disk(tmp_path) and not seen_on_disk(tmp_path) & NAMES


def test_running_request_keeps_no_kv_if_its_placed_copy_saw_a_removed_document(model: LoadedModel) -> None:
    """The document is in no prompt; it is removed between placing and the end of the prompt."""
    fixture = ChunkFixture(model, mode="anywhere", recompute_ratio=0.0)
    fixture.keep_she_behind_names()
    first, last = chunk(50, "The capital of Ardun is Belmar ."), chunk(51, "The river of Ardun is the Tolvane .")
    fixture.ask("What is the river of Corvia ?", FILLER, first)
    fixture.engine.submit(fixture.request(question(0), SHE[0], last))
    assert fixture.engine.scheduler.schedule() is not None  # the copy is placed, and nothing is computed yet
    fixture.forget(NAMES)
    fixture.engine.step()
    fixture.finish()
    assert set(fixture.placed()) == {SHE[0].chunk_id}
    assert fixture.tree.chunk_ids() == {FILLER.chunk_id, first.chunk_id}
