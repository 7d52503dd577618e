"""Documents prepared before a question: its answer is that of KV computed in the documents' own context.

The oracle takes each chunk's KV from a forward pass of `transformers` over the beginning of its document, turns the
keys to the chunk's place in the prompt, and continues from there.
"""

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId, RequestId
from stillroom.core.kv import Tier
from stillroom.core.request import Request, SamplingParams
from stillroom.core.reuse import Reason
from stillroom.engine.async_engine import AsyncEngine
from stillroom.errors import EngineClosedError, EngineError, PromptTooLongError
from stillroom.models.decoder import Decoder
from stillroom.models.loader import load_own_decoder
from stillroom.telemetry import catalogue
from tests.devices import TEST_DEVICE
from tests.engine.engine_fixture import EngineFixture, Oracle, question
from tests.fakes import random_checkpoint


class Documents:
    """A corpus: documents as lists of chunks."""

    def __init__(self, *documents: Sequence[int]) -> None:
        self.documents = [list(document) for document in documents]
        self.num_changes = 0

    def existing_chunks(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        return {ChunkId(chunk) for document in self.documents for chunk in document} & set(chunk_ids)

    def removed_since(self, num_changes: int) -> tuple[ChunkId, ...]:
        return ()

    def chunks_before(self, chunk_ids: Collection[ChunkId], limit: int) -> dict[ChunkId, tuple[ChunkId, ...]]:
        return {
            ChunkId(chunk): tuple(map(ChunkId, document[:place]))
            for document in self.documents
            for place, chunk in enumerate(document)
            if chunk in chunk_ids
        }

    def chunks(self, chunk_ids: Sequence[ChunkId]) -> dict[ChunkId, Chunk]:
        return {
            ChunkId(chunk): Chunk(ChunkId(chunk), DocumentId(str(number)), place, "")
            for number, document in enumerate(self.documents)
            for place, chunk in enumerate(document)
            if chunk in chunk_ids
        }

    def insert(self, document: int, place: int, chunk: int) -> None:
        self.documents[document].insert(place, chunk)
        self.num_changes += 1

    def remove(self, document: int, chunk: int) -> None:
        self.documents[document].remove(chunk)
        self.num_changes += 1


class PreparedFixture(EngineFixture):
    """An engine that follows a corpus and prepares its documents."""

    def __init__(self, decoder: Decoder, corpus: Documents, folder: Path | None = None, **changes: Any) -> None:
        sizes: dict[str, Any] = {
            "blocks": 80,
            "host_tokens": 400,
            "disk_records": 60,
            "load": "always",
            "mode": "prepared",
        } | changes
        super().__init__(decoder, folder, **sizes)
        self.corpus = corpus
        self.engine.follow("", corpus)
        self.ended: list[tuple[Exception | None, bool]] = []

    def offer(self, *chunks: int, new: Sequence[int] | None = None) -> None:
        one = preparing(f"prepare-{len(self.ended)}-{chunks}", *chunks, new=new)
        self.engine.prepare(one, lambda error, *, is_computed: self.ended.append((error, is_computed)))

    def prepare(self, *chunks: int, new: Sequence[int] | None = None) -> bool:
        """Prepare a window; return whether anything was computed."""
        self.offer(*chunks, new=new)
        self.idle()
        error, is_computed = self.ended[-1]
        assert error is None
        return is_computed

    def idle(self) -> None:
        """Let the engine do all of its idle work."""
        self.clock.advance(60.0)
        while self.engine.do_idle_work() or self.engine.has_work:
            self.finish()

    def answer_prepared(self, one: Request) -> list[int]:
        """Prepare every document, and answer."""
        for document in self.corpus.documents:
            self.prepare(*document)
        return self.run(one)[0]

    def reasons(self, one: Request) -> list[Reason]:
        """Why the KV of each chunk of a prompt was reused or computed."""
        _, reuse = self.run(one)
        return [segment.reason for segment in reuse.segments if segment.chunk_id is not None]


def preparing(name: str, *chunks: int, new: Sequence[int] | None = None) -> Request:
    one = question(name, *chunks, max_tokens=1)
    return replace(one, prepares=frozenset(map(ChunkId, chunks if new is None else new)))


class DocumentOracle:
    """Answers from chunks whose KV was computed behind the chunks before them in their document."""

    def __init__(self, folder: Path, documents: Documents) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._documents = documents

    @torch.no_grad()
    def answer(self, one: Request) -> list[int]:
        system, *chunks, asked = one.prompt.segments
        parts, position = [self._kv(list(system.token_ids), 0)], len(system.token_ids)
        for chunk in chunks:
            assert chunk.chunk_id is not None
            before = self._documents.chunks_before([chunk.chunk_id], 99)[chunk.chunk_id]
            context = question("context", *before).prompt.token_ids[:-3] if before else system.token_ids
            kv = self._kv([*context, *chunk.token_ids], len(context))
            parts.append([(self._turned(k, position - len(context)), v) for k, v in kv])
            position += len(chunk.token_ids)
        cache = DynamicCache()
        for layer in range(len(parts[0])):
            k, v = (torch.cat([part[layer][which] for part in parts], dim=2) for which in (0, 1))
            cache.update(k, v, layer)
        return self._continued(cache, list(asked.token_ids), one.sampling.max_tokens)

    def _continued(self, cache: DynamicCache, ids: list[int], num_tokens: int) -> list[int]:
        found: list[int] = []
        while len(found) < num_tokens:
            out = self._forward(ids, cache)
            ids = [int(out.logits[0, -1].argmax())]
            found += ids
        return found

    def _forward(self, ids: list[int], cache: DynamicCache) -> Any:
        """Pass the cache by place: transformers 5.24 renamed `past_key_values` to `cache`."""
        return self._model(torch.tensor([ids]), None, None, cache)

    def _kv(self, ids: list[int], start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V [1, G, T, D] of each layer from this position on."""
        cache = DynamicCache()
        self._forward(ids, cache)
        return [(layer.keys[:, :, start:], layer.values[:, :, start:]) for layer in cache.layers]

    def _turned(self, k: torch.Tensor, by: int) -> torch.Tensor:
        inv_freq = self._model.model.rotary_emb.inv_freq
        angle = torch.cat([inv_freq, inv_freq]) * by
        half = k.shape[-1] // 2
        return k * angle.cos() + torch.cat([-k[..., half:], k[..., :half]], dim=-1) * angle.sin()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prepared")
    random_checkpoint(path, "Llama", num_hidden_layers=2)
    return path


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return load_own_decoder(folder, device=TEST_DEVICE, dtype="float32")


DOCUMENTS = ((1, 2, 3, 4), (6, 5, 7))


@pytest.mark.parametrize("chunks", [(3, 1, 2), (4, 7), (7, 2, 5, 3), (2,), (4, 3, 2, 1), (5, 6)])
def test_answers_are_those_of_kv_in_its_documents_context(
    decoder: Decoder, folder: Path, chunks: tuple[int, ...]
) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    assert fixture.prepare(1, 2, 3, 4) and fixture.prepare(6, 5, 7)
    one = question("r", *chunks)
    tokens, reuse = fixture.run(one)
    assert tokens == DocumentOracle(folder, fixture.corpus).answer(one)
    assert {segment.reason for segment in reuse.segments if segment.chunk_id} == {Reason.PREPARED}
    assert reuse.num_recomputed_tokens == 0 and reuse.has_placed


def test_document_in_its_own_order_answers_as_a_full_prefill(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.prepare(1, 2, 3, 4)
    one = question("r", 1, 2, 3, 4)
    assert fixture.run(one)[0] == Oracle(decoder).answer(one)


def test_chunks_without_prepared_kv_are_computed_beside_prepared_ones(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.prepare(1, 2, new=[1, 2])
    assert fixture.reasons(question("r", 3, 2, 7, 1)) == [
        Reason.NEVER_SEEN,
        Reason.PREPARED,
        Reason.NEVER_SEEN,
        Reason.PREPARED,
    ]
    kept = {node.chunk_id for node in fixture.tree if not node.document_path}
    assert kept == {None, 3, 7}, "3 began the prompt, 7 stands behind a prepared chunk"


def test_prompt_that_returns_computes_its_question_only_and_answers_the_same(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.prepare(1, 2, new=[1, 2])
    tokens, _ = fixture.run(question("r", 2, 7, 3, 1))
    computed = fixture.num_computed
    again, reuse = fixture.run(question("s", 2, 7, 3, 1))
    assert again == tokens and fixture.num_computed - computed == 3 + len(tokens) - 1
    chunks = [Reason.PREPARED, Reason.ANYWHERE, Reason.ANYWHERE, Reason.PREPARED]
    assert [segment.reason for segment in reuse.segments[1:5]] == chunks
    assert [one.variant.behind for one in reuse.segments[2:4] if one.variant is not None] == [(2,), (2, 7)]


def test_exact_prefix_is_used_before_prepared_kv(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.run(question("first", 2, 7))
    fixture.prepare(1, 2, 3)
    tokens, reuse = fixture.run(question("r", 2, 7))
    assert [one.reason for one in reuse.segments[1:3]] == [Reason.HIT, Reason.HIT]
    assert tokens == Oracle(decoder).answer(question("r", 2, 7))


def test_question_interrupts_preparing_which_goes_on_later(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.offer(1, 2, 3, 4)
    fixture.clock.advance(60.0)
    while fixture.tree.stats.prepared == 0:
        fixture.engine.do_idle_work()
        fixture.step()
    computed = fixture.num_computed
    assert fixture.engine.scheduler.num_running == 0, "preparing is not counted as load"
    one = question("r", 7)
    assert fixture.run(one)[0] == Oracle(decoder).answer(one)
    assert not fixture.ended
    assert not fixture.engine.do_idle_work() or not fixture.engine.has_work, "the engine was busy just now"
    fixture.idle()
    assert fixture.ended == [(None, True)] and fixture.num_computed > computed
    assert not fixture.prepare(1, 2, 3, 4), "all of it is kept"
    assert fixture.reasons(question("s", 4, 3)) == [Reason.PREPARED] * 2


def test_prepared_kv_survives_the_process(decoder: Decoder, tmp_path: Path) -> None:
    first = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    first.prepare(1, 2, 3, 4)
    first.idle()
    first.cache.close()
    second = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    assert not second.prepare(1, 2, 3, 4) and second.num_computed == 0
    tokens, reuse = second.run(question("r", 4, 2))
    assert [(one.reason, one.source) for one in reuse.segments[1:3]] == [(Reason.PREPARED, Tier.DISK)] * 2
    assert tokens == first.run(question("r", 4, 2))[0]


def test_prepared_kv_that_was_used_stays_used_after_a_restart(decoder: Decoder, tmp_path: Path) -> None:
    first = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    first.prepare(1, 2, 3, 4)
    first.idle()
    first.run(question("r", 4, 2))
    readings = first.cache.readings()
    assert readings[catalogue.KV_IN_DOCUMENT] == {"device": 4, "host": 0, "disk": 4}
    unused = {node.key: node.disk_bytes for node in first.tree if not node.is_used}
    assert first.tree.num_unused_bytes(Tier.DISK) == sum(unused.values()) > 0
    assert first.cache.tiers is not None and first.cache.tiers.disk is not None
    first.cache.tiers.disk.close()  # as a kill does: nothing else is written

    second = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    assert {node.key for node in second.tree if not node.is_used} == set(unused)
    assert {node.chunk_id for node in second.tree if node.document_path and node.is_used} == {2, 4}
    assert second.tree.num_unused_bytes(Tier.DISK) == sum(unused.values())


def test_damaged_prepared_record_is_computed_and_named(decoder: Decoder, tmp_path: Path) -> None:
    first = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    first.prepare(1, 2, 3, 4)
    first.idle()
    (damaged,) = [node.key for node in first.tree if node.chunk_id == 3]
    first.cache.close()
    (path,) = tmp_path.rglob(f"{damaged.hex()}.kv")
    content = bytearray(path.read_bytes())
    content[-30] ^= 1
    path.write_bytes(content)

    second = PreparedFixture(decoder, Documents(*DOCUMENTS), tmp_path)
    assert second.reasons(question("a", 4, 3, 2)) == [Reason.PREPARED, Reason.RECORD_FAILED, Reason.PREPARED]
    assert second.reasons(question("b", 3, 7)) == [Reason.RECORD_FAILED, Reason.NEVER_SEEN], "it is computed here too"
    second.prepare(1, 2, 3, 4)
    assert second.reasons(question("c", 2, 3)) == [Reason.PREPARED] * 2
    second.tree.clear()
    assert second.reasons(question("d", 2, 3)) == [Reason.NEVER_SEEN] * 2, "evicted since"


def test_changed_document_loses_its_prepared_kv(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.prepare(1, 2, 3, 4)
    fixture.corpus.insert(0, 2, 8)
    assert fixture.reasons(question("a", 2, 3, 4)) == [Reason.PREPARED, Reason.ORDER_DIFFERS, Reason.ORDER_DIFFERS]
    fixture.corpus.remove(0, 1)
    fixture.engine.catch_up()
    assert fixture.reasons(question("b", 5, 2)) == [Reason.NEVER_SEEN] * 2
    assert all(1 not in node.seen for node in fixture.tree)


def test_other_modes_prepare_the_beginnings_of_prompts(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS), mode="exact")
    assert fixture.prepare(2) and fixture.prepare(7) and not fixture.prepare(2)
    one = question("r", 2, 3)
    tokens, reuse = fixture.run(one)
    assert tokens == Oracle(decoder).answer(one) and not reuse.has_placed
    assert [segment.reason for segment in reuse.segments[:3]] == [Reason.HIT, Reason.HIT, Reason.NEVER_SEEN]


def test_window_that_does_not_fit_ends_with_an_error(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS), blocks=4)
    fixture.offer(1, 2, 3, 4)
    fixture.idle()
    ((error, _),) = fixture.ended
    assert isinstance(error, PromptTooLongError)
    assert fixture.run(question("r", 1, max_tokens=2))[0]


def test_end_of_the_engine_ends_waiting_windows(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    errors: list[Exception | None] = []
    ended = threading.Event()

    def on_end(error: Exception | None, *, is_computed: bool) -> None:
        errors.append(error)
        ended.set()

    running = AsyncEngine(fixture.engine)
    running.prepare(preparing("p", 1, 2), on_end)  # the clock stands still, so that it waits
    running.close()
    assert ended.wait(10) and isinstance(errors[0], EngineClosedError)
    with pytest.raises(EngineClosedError):
        running.prepare(preparing("q", 1), on_end)


def test_cancelled_window_ends_and_its_complete_chunks_stay(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.offer(1, 2, 3, 4)
    fixture.clock.advance(60.0)
    while fixture.tree.stats.prepared < 2:
        fixture.engine.do_idle_work()
        fixture.step()
    fixture.engine.cancel_preparing(RequestId("prepare-0-(1, 2, 3, 4)"))
    ((error, _),) = fixture.ended
    assert isinstance(error, EngineError) and not fixture.engine.has_work
    assert fixture.reasons(question("r", 2, 1)) == [Reason.PREPARED] * 2
    assert fixture.engine.scheduler.kv.pool.num_used == sum(len(node.block_ids or ()) for node in fixture.tree)


def test_sampled_answers_use_prepared_kv_too(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.prepare(1, 2, 3, 4)
    group = [
        replace(question(f"s{n}", 3, 2), sampling=SamplingParams(max_tokens=4, temperature=1.0, seed=n)) for n in (1, 2)
    ]
    fixture.submit(*group)
    fixture.finish()
    reused = [[one.reason for one in fixture.reuse[request.request_id].segments[1:3]] for request in group]
    assert reused == [[Reason.PREPARED] * 2] * 2


def test_command_stops_a_preparing_step_between_two_layers(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(len(asked))
        return len(asked) == 2

    fixture.engine.should_stop = should_stop
    fixture.offer(1, 2, 3, 4)
    fixture.idle()
    assert fixture.ended == [(None, True)] and len(asked) > 2, "the step that was stopped ran again"
    one = question("r", 4, 2)
    assert fixture.run(one)[0] == PreparedFixture(decoder, Documents(*DOCUMENTS)).answer_prepared(one)


def test_questions_are_never_stopped(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.engine.should_stop = lambda: True
    assert fixture.run(question("r", 1, 2))[0] == Oracle(decoder).answer(question("r", 1, 2))


def test_question_that_is_searched_for_interrupts_preparing(decoder: Decoder) -> None:
    fixture = PreparedFixture(decoder, Documents(*DOCUMENTS))
    fixture.offer(1, 2, 3, 4)
    fixture.clock.advance(60.0)
    fixture.engine.do_idle_work()
    assert fixture.engine.scheduler.request_ids == ["prepare-0-(1, 2, 3, 4)"]
    fixture.engine.expect_question()
    assert fixture.engine.scheduler.request_ids == [] and not fixture.ended
    fixture.engine.do_idle_work()
    assert fixture.engine.scheduler.request_ids == [], "the engine was needed just now"
    fixture.idle()
    assert fixture.ended == [(None, True)]
