"""Decides what runs in the next step: decodes first, then pieces of prompts, under a token budget. Computes nothing.

Who is admitted next is a policy's sort key, by default first come, first served. A sequence gets the blocks of its
whole prompt when it is admitted and one more whenever it outgrows them; when none is free, the youngest running
sequence is preempted: it waits at the front of the queue and its tokens run again later. The oldest is never preempted,
so somebody always finishes. Design: docs/runtime.md
"""

from dataclasses import dataclass

from stillroom.core.batch import Batch, SampleSpec, ScheduledSequence, StepResult, TokenLogprobs
from stillroom.core.ids import RequestId
from stillroom.core.request import FinishReason, Request, uniform_at
from stillroom.errors import PromptTooLongError
from stillroom.kvcache.manager import KVCacheManager
from stillroom.scheduler.policy import Policy, first_come
from stillroom.scheduler.queue import WaitingQueue
from stillroom.scheduler.sequence import Sequence, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What a step and a request may be."""

    max_num_seqs: int
    """Sequences running at the same time."""
    max_num_batched_tokens: int
    """Tokens computed in one step; at least `max_num_seqs`, so that every decode fits."""
    max_model_len: int
    """Prompt plus answer, in tokens."""


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a step did to one request."""

    request_id: RequestId
    token_id: int | None
    """The new token; None if it was a stop token."""
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    """Of the new token, if the request wants them."""


class Scheduler:
    """Owns the waiting queue and the running set. Not thread-safe: the engine's loop is its only caller."""

    def __init__(self, kv: KVCacheManager, limits: SchedulerLimits, policy: Policy = first_come) -> None:
        assert limits.max_num_batched_tokens >= limits.max_num_seqs > 0
        self.kv = kv
        self.limits = limits
        self._waiting = WaitingQueue(policy)
        self._running: dict[RequestId, Sequence] = {}  # in order of admission
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def check(self, request: Request) -> None:
        """Whether the request could ever run. Reads only constants, so any thread may ask.

        Raises:
            PromptTooLongError: it exceeds the model's length or the whole KV pool; the message has the numbers.
        """
        num_prompt, num_output = request.prompt.num_tokens, request.sampling.max_tokens
        if num_prompt + num_output > self.limits.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens and max_tokens is {num_output}, together more than the model's "
                f"{self.limits.max_model_len}; retrieve fewer chunks (top_k) or lower max_tokens"
            )
        lengths = [len(segment.token_ids) for segment in request.prompt.segments]
        lengths[-1] += num_output
        if not self.kv.can_ever_hold(lengths):
            pool = self.kv.pool
            raise PromptTooLongError(
                f"{num_prompt} prompt tokens and max_tokens={num_output} do not fit into the KV pool of "
                f"{pool.num_blocks} blocks of {pool.block_size} tokens; raise runtime.kv_bytes or shorten the prompt"
            )

    def add(self, request: Request) -> None:
        """Queue a request; raises as `check`."""
        self.check(request)
        table = self.kv.new_table(request.prompt.num_tokens + request.sampling.max_tokens)
        self._num_arrivals += 1
        self._waiting.push(Sequence(request, table, self._num_arrivals))

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request and free its blocks; False if it is not here (any more)."""
        sequence = self._running.get(request_id) or self._waiting.remove(request_id)
        if sequence is None:
            return False
        self._finish(sequence, FinishReason.ABORTED)
        return True

    def schedule(self) -> Batch | None:
        """The next step, or None if there is nothing to run."""
        num_running_before = len(self._running)
        scheduled = self._decodes()
        has_preempted = len(self._running) < num_running_before
        budget = self.limits.max_num_batched_tokens - len(scheduled)
        for sequence in self._running.values():
            if budget > 0 and not sequence.is_decoding:
                scheduled.append(self._take(sequence, budget))
                budget -= scheduled[-1].num_scheduled_tokens
        # Blocks that a preemption has just freed are for those who keep running.
        while budget > 0 and not has_preempted and (admitted := self._try_admit()) is not None:
            scheduled.append(self._take(admitted, budget))
            budget -= scheduled[-1].num_scheduled_tokens
        return Batch(tuple(scheduled)) if scheduled else None

    def update(self, batch: Batch, result: StepResult) -> list[SequenceUpdate]:
        """Record that a step ran; returns what became of each sequence that sampled a token."""
        updates = []
        for entry in batch.sequences:
            sequence = self._running[entry.request_id]
            sequence.num_computed += entry.num_scheduled_tokens
            if entry.samples:
                updates.append(self._advance(sequence, result))
        return updates

    def check_integrity(self) -> None:
        """Every block in use belongs to exactly one running sequence, and each has the slots it needs."""
        self.kv.pool.check_integrity()
        held = [block_id for sequence in self._running.values() for block_id in sequence.table.block_ids]
        assert len(held) == len(set(held)) == self.kv.pool.num_used, "blocks held and blocks in use differ"
        assert all(not sequence.table.block_ids for sequence in self._waiting), "a waiting sequence holds blocks"
        for sequence in self._running.values():
            assert sequence.num_computed <= sequence.table.num_slots, sequence.request_id
            assert sequence.num_tokens - sequence.table.num_slots <= 1, sequence.request_id

    def _advance(self, sequence: Sequence, result: StepResult) -> SequenceUpdate:
        token_id = result.token_ids[sequence.request_id]
        reason: FinishReason | None = None
        if token_id in sequence.request.stop_token_ids:
            reason = FinishReason.STOP
        else:
            sequence.append(token_id)
            if sequence.num_generated == sequence.request.sampling.max_tokens:
                reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(sequence, reason)
        is_answer = reason is not FinishReason.STOP
        return SequenceUpdate(
            sequence.request_id,
            token_id if is_answer else None,
            reason,
            result.logprobs.get(sequence.request_id) if is_answer else None,
        )

    def _decodes(self) -> list[ScheduledSequence]:
        """One token of every decoding sequence, oldest first: whom a preemption hits has not been taken yet."""
        taken = []
        for sequence in list(self._running.values()):
            if sequence.status is Status.RUNNING and sequence.is_decoding and self._ensure_slot(sequence):
                taken.append(self._take(sequence, 1))
        return taken

    def _take(self, sequence: Sequence, budget: int) -> ScheduledSequence:
        """The next tokens of a sequence, as many as the budget allows."""
        start = sequence.num_computed
        end = min(start + budget, sequence.num_tokens)
        samples = (_sample_spec(sequence),) if end == sequence.num_tokens else ()
        return ScheduledSequence(
            sequence.request_id, sequence.tokens(start, end), start, sequence.table.slots[:end], samples
        )

    def _ensure_slot(self, sequence: Sequence) -> bool:
        """A slot for the sequence's next token, preempting younger sequences if need be; False if it was preempted."""
        while sequence.table.num_slots < sequence.num_tokens:
            if self.kv.try_append_token(sequence.table):
                break
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.kv.release(sequence.table)
        sequence.num_computed = 0
        sequence.status = Status.PREEMPTED
        del self._running[sequence.request_id]
        self._waiting.push(sequence)

    def _try_admit(self) -> Sequence | None:
        """The first waiting sequence, if there is a seat and blocks for all of its tokens."""
        sequence = self._waiting.first()
        if sequence is None or len(self._running) >= self.limits.max_num_seqs:
            return None
        if not self.kv.try_allocate(sequence.table, sequence.segment_lengths):
            return None
        self._waiting.remove(sequence.request_id)
        sequence.status = Status.RUNNING
        self._running[sequence.request_id] = sequence
        return sequence

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.kv.release(sequence.table)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self._running.pop(sequence.request_id, None)


def _sample_spec(sequence: Sequence) -> SampleSpec:
    request, params = sequence.request, sequence.request.sampling
    return SampleSpec(
        request_id=request.request_id,
        params=params,
        uniform=0.0 if params.is_greedy else uniform_at(params.seed, sequence.num_generated),
        token_ids=sequence.tokens(0, sequence.num_tokens),
        num_prompt_tokens=sequence.num_prompt_tokens,
        forbidden=request.stop_token_ids if sequence.num_generated < params.min_tokens else frozenset(),
    )
