"""An engine that prepares documents, and its oracle.

The oracle takes each chunk's KV from a forward pass of `transformers` over the beginning of its document, turns the
keys to the chunk's place in the prompt, and continues from there.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, DocumentId
from stillroom.core.request import Request
from stillroom.core.reuse import Reason
from stillroom.models.decoder import Decoder
from tests.engine.engine_fixture import EngineFixture, question

DOCUMENTS = ((1, 2, 3, 4), (6, 5, 7))


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
