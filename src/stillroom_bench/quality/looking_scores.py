"""Lets a model look at candidates: the question is read behind each candidate's prepared KV, apart from the others.

All candidates of a question are sequences of one step. The system message's KV is shared; a candidate's KV is copied
behind it, keys rotated, as the product places chunks. Scores of each candidate: how likely it makes the question, how
certain it makes the answer, and how much attention the question pays to it, by layer and head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.core.document import Chunk
from stillroom.core.ids import BlockId, ChunkId
from stillroom.errors import UsageError
from stillroom.kvstore.device import DeviceStore, KVShape
from stillroom.models.loader import LoadedModel
from stillroom.models.packed import PackedInput
from stillroom.ops.attention import AttentionSpan
from stillroom.ops.attention_mass import head_weights
from stillroom.ops.attention_observers import AttentionObserver
from stillroom.ops.rope import rerotation
from stillroom_bench.quality.context_questions import ContextQuestion

# C candidates, L layers, H query heads, n tokens of one chunk, Q tokens of the question, S slots, T packed tokens

Floats = NDArray[np.float64]

CONTENT_FREE = "N/A"
"""The question whose attention is subtracted (In-Context Re-ranking, arXiv 2410.02642)."""


@dataclass(frozen=True, slots=True)
class PreparedChunk:
    """KV of a chunk as it was computed, on the host."""

    kv_2LTGD: torch.Tensor
    first_position: int

    @property
    def num_tokens(self) -> int:
        return self.kv_2LTGD.shape[2]


@dataclass(frozen=True, slots=True)
class Look:
    """What the model computed for one question behind each candidate."""

    likelihood_C: Floats
    """Mean log probability of the question's tokens."""
    certainty_C: Floats
    """Log probability of the most likely first token of the answer."""
    attention: tuple[NDArray[np.float32], ...]
    """Of each candidate, [2, L, H, n]: attention on its tokens, as the mean over the question's tokens, and of the
    prompt's last token. Empty if it was not observed."""


class Looker:
    """One model with memory for KV of its own."""

    def __init__(self, model: LoadedModel) -> None:
        spec = model.decoder.spec
        self._decoder = model.decoder
        self._tokenizer = model.tokenizer
        self._format = format_for(model.tokenizer)
        self._prompts = PromptBuilder(model.tokenizer, self._format)
        self._shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, model.decoder.dtype)
        self._store = self._new_store(1)
        system = self._prompts.build([], "", None).segments[0].token_ids
        self._run(system, [])
        self._num_system = len(system)
        self._system_2LTGD = self._store.gather(_blocks(0, len(system)), len(system))

    def prepare(self, question: ContextQuestion, *, in_document: bool) -> dict[ChunkId, PreparedChunk]:
        """Compute the KV of all candidates.

        Args:
            in_document: each behind the chunks before it in its document; else behind the system message only.

        Raises:
            UsageError: a document is longer than the model's longest sequence.
        """
        found: dict[ChunkId, PreparedChunk] = {}
        wanted = {question.chunk(place).chunk_id for place in question.retrieved}
        for number in sorted({document for document, _ in question.retrieved}):
            last = max(chunk for document, chunk in question.retrieved if document == number)
            chunks = question.documents[number][: last + 1]
            for run in [chunks] if in_document else [[chunk] for chunk in chunks if chunk.chunk_id in wanted]:
                found |= {name: kv for name, kv in self._computed(run).items() if name in wanted}
        return found

    def look(self, candidates: Sequence[PreparedChunk], question: str, *, observes: bool) -> Look:
        """Read the question behind each candidate, in one step.

        Args:
            observes: measure attention.
        """
        token_ids, text = self._question(question)
        packed, spans = self._placed(candidates, token_ids)
        observer = _CandidateAttention(spans, self._num_system, text) if observes else None
        logits_TV = self._decoder.logits(self._decoder.hidden_states(packed, self._store.layer, observer))
        logprobs_CQV = torch.log_softmax(logits_TV, dim=-1).view(len(candidates), len(token_ids), -1)
        next_CQ = logprobs_CQV[:, text.start - 1 : text.stop - 1].gather(
            2, torch.tensor(token_ids[text]).expand(len(candidates), -1)[..., None]
        )
        return Look(
            next_CQ.double().mean((1, 2)).numpy(),
            logprobs_CQV[:, -1].amax(-1).double().numpy(),
            observer.of_candidates() if observer is not None else (),
        )

    def prefill(self, chunks: Sequence[Chunk], question: str) -> None:
        """Compute a whole prompt up to the logits of its answer's first token, to be timed."""
        token_ids = self._prompts.build(chunks, question, None).token_ids
        self._decoder.logits(self._run(token_ids, [len(token_ids) - 1]))

    def _placed(
        self, candidates: Sequence[PreparedChunk], token_ids: list[int]
    ) -> tuple[PackedInput, list[AttentionSpan]]:
        """Copy the candidates' KV behind the system message, and pack the question once per candidate."""
        num_question, num_system = len(token_ids), self._num_system
        self._reserve(num_system + sum(one.num_tokens + num_question for one in candidates))
        self._store.scatter(_blocks(0, num_system), self._system_2LTGD)
        spans, positions, slots = [], [], []
        at = num_system
        for number, one in enumerate(candidates):
            end = at + one.num_tokens + num_question
            self._place(one, at)
            context = torch.cat((torch.arange(num_system), torch.arange(at, end)))
            rows = slice(number * num_question, (number + 1) * num_question)
            spans.append(AttentionSpan(rows.start, rows.stop, context, len(context)))
            positions.append(torch.arange(num_question) + num_system + one.num_tokens)
            slots.append(torch.arange(end - num_question, end))
            at = end
        return PackedInput(
            torch.tensor(token_ids * len(candidates)),
            torch.cat(positions),
            torch.cat(slots),
            spans,
            list(range(len(candidates) * num_question)),
        ), spans

    def _computed(self, chunks: Sequence[Chunk]) -> dict[ChunkId, PreparedChunk]:
        """Compute system message and chunks from position 0, and copy the KV of the chunks."""
        segments = self._prompts.build(chunks, "", None).segments[:-1]
        self._run([token for segment in segments for token in segment.token_ids], [])
        found, start = {}, 0
        for segment in segments:
            end = start + len(segment.token_ids)
            if segment.chunk_id is not None:
                kv_2LTGD = self._store.gather(_blocks(start, end), end - start)
                found[segment.chunk_id] = PreparedChunk(kv_2LTGD, start)
            start = end
        return found

    def _run(self, token_ids: Sequence[int], wanted: list[int]) -> torch.Tensor:
        """Compute tokens from position 0 in the first slots; return the hidden states of the wanted rows."""
        size, longest = len(token_ids), self._decoder.spec.max_positions
        if size > longest:
            raise UsageError(f"a document or prompt has {size} tokens, and the model reads {longest}; shorten it")
        self._reserve(size)
        places = torch.arange(size)
        span = AttentionSpan(0, size, slice(0, size), size)
        packed = PackedInput(torch.tensor(token_ids), places, places, [span], wanted)
        return self._decoder.hidden_states(packed, self._store.layer)

    def _place(self, chunk: PreparedChunk, first_slot: int) -> None:
        """Copy a chunk's KV to these slots, for a position directly behind the system message."""
        size = chunk.num_tokens
        turns = rerotation(size, self._decoder.inv_freq_LP, chunk.first_position, self._num_system)
        self._store.place(chunk.kv_2LTGD, [], _blocks(first_slot, first_slot + size), turns)

    def _question(self, question: str) -> tuple[list[int], slice]:
        """Return the tokens of the question's segment, and which of them are the question's own, not the template's.

        The first token is never counted: what predicts it stands in the KV before it.
        """
        token_ids = list(self._prompts.build([], question, None).segments[-1].token_ids)
        before = len(self._tokenizer.encode_template(self._format.question_start))
        after = len(self._tokenizer.encode_template(self._format.question_end))
        return token_ids, slice(max(before, 1), len(token_ids) - after)

    def _reserve(self, num_slots: int) -> None:
        if num_slots > self._store.scratch_slot:
            self._store = self._new_store(2 * num_slots)

    def _new_store(self, num_slots: int) -> DeviceStore:
        return DeviceStore(self._shape, num_slots, 1, self._decoder.device)


class _CandidateAttention(AttentionObserver):
    """Collects the attention of each span's question on its chunk, which stands behind the system message."""

    def __init__(self, spans: Sequence[AttentionSpan], num_system: int, text: slice) -> None:
        self._spans, self._num_system, self._text = spans, num_system, text
        self._layers: list[list[torch.Tensor]] = [[] for _ in spans]

    def observe(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        for span, layers in zip(self._spans, self._layers, strict=True):
            size = span.query_end - span.query_start
            places_Q = torch.arange(span.num_context_tokens - size, span.num_context_tokens)
            q_QHD, k_KGD = q_THD[span.query_start : span.query_end], k_SGD[span.context]
            weights_HQK = head_weights(q_QHD, k_KGD, scale, places_Q, window, softcap)
            on_chunk_HQn = weights_HQK[:, :, self._num_system : span.num_context_tokens - size]
            layers.append(torch.stack((on_chunk_HQn[:, self._text].mean(1), on_chunk_HQn[:, -1])))

    def of_candidates(self) -> tuple[NDArray[np.float32], ...]:
        return tuple(torch.stack(layers, dim=1).numpy() for layers in self._layers)


def _blocks(start: int, end: int) -> list[BlockId]:
    """Blocks of one slot each."""
    return [BlockId(slot) for slot in range(start, end)]
