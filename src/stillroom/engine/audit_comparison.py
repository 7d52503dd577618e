"""One audited answer: the prompts that run again for it, and what its answer from placed KV agrees with.

The reference *prompt* is a full prefill of the answer's own prompt. The reference *documents* is a full prefill of what
the placed copies have read: document by document, in the order in which the prompt names them, the chunks that the used
copies were computed behind and the chunks of the prompt, in the document's order; then the question.

While placing is suspended, the answer itself is the reference *prompt*, and what runs again is the same prompt with
placed KV, behind as much exact KV as the answer had.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile

from stillroom.core.document import Chunk
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import FinishReason, Request
from stillroom.core.reuse import PromptReuse, Reason
from stillroom.engine.events import TokenEvent

NUM_TOKENS = 8
"""Number of first tokens of an answer that are compared."""

DocumentPrompt = Callable[[SegmentedPrompt, Sequence[Chunk]], SegmentedPrompt]
"""Returns a prompt with these chunks, document by document in its own order, in place of its own."""
ReadChunks = Callable[[str, Sequence[ChunkId]], Mapping[ChunkId, Chunk]]
"""Returns the chunks of a tenant, given by its cache salt; removed chunks are absent."""


class Run(StrEnum):
    """The computations whose first tokens are compared."""

    PLACED = "placed"
    PROMPT = "prompt"
    DOCUMENTS = "documents"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an answer from placed KV agrees with."""

    agrees_with_prompt: bool
    agrees_with_documents: bool | None
    """None: it was not compared with its documents' prefill."""

    @property
    def agrees(self) -> bool:
        """Whether it agrees with either reference."""
        return self.agrees_with_prompt or bool(self.agrees_with_documents)


class Comparison:
    """The runs of one audited answer, one after the other."""

    def __init__(
        self, request: Request, tokens: list[int], reuse: PromptReuse, reason: FinishReason, *, with_documents: bool
    ) -> None:
        """
        Args:
            request: as it was submitted.
            tokens: the first tokens of its answer.
            with_documents: whether its documents' prefill is a reference.
        """
        # an answer that ended early must end there again, except where the client ended it
        num_tokens = len(tokens) if reason is FinishReason.ABORTED else min(NUM_TOKENS, request.sampling.max_tokens)
        min_tokens = min(request.sampling.min_tokens, num_tokens)
        sampling = replace(request.sampling, max_tokens=num_tokens, min_tokens=min_tokens, logprobs=None)
        name = RequestId(f"audit-{request.request_id}")
        self.request = replace(request, request_id=name, sampling=sampling, is_background=True)
        self._num_exact = len(list(takewhile(lambda segment: segment.reason is Reason.HIT, reuse.segments)))
        self._tokens = {Run.PLACED if reuse.has_placed else Run.PROMPT: tokens}
        others = (Run.PLACED, Run.PROMPT, *((Run.DOCUMENTS,) if with_documents else ()))
        self._todo = [run for run in others if run not in self._tokens]
        self._new: list[int] = []  # tokens of the present run
        self._new_reuse = reuse
        self.chunk_ids = self._seen()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to run."""
        return not self._todo

    @property
    def places(self) -> bool:
        """Whether the present run places KV. Precondition: not `is_complete`."""
        return self._todo[0] is Run.PLACED

    @property
    def outcome(self) -> Outcome:
        """What the answer agrees with. Precondition: `is_complete`."""
        placed, documents = self._tokens[Run.PLACED], self._tokens.get(Run.DOCUMENTS)
        return Outcome(self._tokens[Run.PROMPT] == placed, None if documents is None else documents == placed)

    def begin(self, read_chunks: ReadChunks, document_prompt: DocumentPrompt | None) -> Request | None:
        """Begin the next run, or begin it again; None if the prompt of the documents cannot be built any more."""
        self._new = []
        match self._todo[0]:
            case Run.PLACED:
                return replace(self.request, may_place=True, most_exact=self._num_exact)
            case Run.PROMPT:
                return replace(self.request, may_place=False)
        chunks = read_chunks(self.request.cache_salt, self.chunk_ids)
        if document_prompt is None or len(chunks) < len(self.chunk_ids):
            return None
        prompt = document_prompt(self.request.prompt, [chunks[chunk_id] for chunk_id in self.chunk_ids])
        return replace(self.request, may_place=False, prompt=prompt)

    def leave_out(self) -> bool:
        """Leave out the present run; returns False if the answer cannot be judged without it."""
        return self._todo.pop(0) is Run.DOCUMENTS

    def observe(self, event: TokenEvent) -> bool:
        """Record an event of the present run; returns whether the answer can still be judged."""
        if event.token_id is not None:
            self._new.append(event.token_id)
        if event.reuse is not None:
            self._new_reuse = event.reuse
        if event.finish_reason is None:
            return True
        run = self._todo.pop(0)
        self._tokens[run] = self._new
        if run is Run.PLACED:
            self.chunk_ids = self._seen()
        return event.finish_reason is not FinishReason.ABORTED and (run is not Run.PLACED or self._new_reuse.has_placed)

    def _seen(self) -> list[ChunkId]:
        """The chunks of the prompt, then those that its placed copies were computed behind; each once."""
        seen = list(self.request.prompt.chunk_ids)
        for segment in self._new_reuse.segments:
            if segment.variant is not None:
                seen += [chunk_id for chunk_id in segment.variant.behind if chunk_id is not None]
        return list(dict.fromkeys(seen))


def may_have_placed(reuse: PromptReuse) -> bool:
    """Whether a prompt that placed no KV has chunks behind its exact prefix, whose KV might have been placed."""
    return any(segment.chunk_id is not None and segment.reason is not Reason.HIT for segment in reuse.segments)
