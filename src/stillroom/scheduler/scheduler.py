"""Decides what runs in the next step: decodes first, then pieces of prompts, under a token budget. Computes nothing.

Who is admitted next is the queue's decision, by a policy's sort key. A sequence gets the blocks of its
whole prompt when it is admitted and one more whenever it outgrows them; when none is free, the youngest running
sequence is preempted: it waits at the front of the queue and its tokens run again later. The oldest is never preempted,
so somebody always finishes.

Samples of one prompt come as a leader and its followers: the leader's prompt is computed, its last logits pick a first
token for each of them, and from then on they are sequences of their own that share blocks. Design: docs/runtime.md
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from stillroom.core.batch import Batch, BlockCopy, ScheduledSequence, StepResult, TokenLogprobs
from stillroom.core.ids import BlockId, ChunkId, RequestId
from stillroom.core.kv import owner_of
from stillroom.core.request import Admission, FinishReason, Request
from stillroom.core.reuse import PromptReuse
from stillroom.errors import NonFiniteError, PromptTooLongError, UsageError
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.pieces import piece_ends
from stillroom.scheduler.policy import AdmissionCandidate, Policy, first_come
from stillroom.scheduler.queue import WaitingQueue
from stillroom.scheduler.sequence import Sequence, Status
from stillroom.scheduler.step_builder import take

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What a step and a request may be."""

    max_num_seqs: int
    """Sequences running at the same time."""
    max_num_batched_tokens: int
    """Tokens computed in one step; at least `max_num_seqs`, so that every decode fits."""
    max_model_len: int
    """Prompt plus answer, in tokens."""
    batch_delay_s: float = 0.0
    """How long the oldest that waits does so for company, while nothing runs."""
    fixed_tail_tokens: int = 0
    """If not 0, shapes are fixed: each piece of a prompt is computed in a step of its own, whether the pieces before it
    were kept or computed. The last segment is cut into pieces of so many tokens."""


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a step did to one request."""

    request_id: RequestId
    token_id: int | None
    """The new token; None if it was a stop token."""
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
    """Of the new token, if the request wants them."""
    reuse: PromptReuse | None = None
    """With the first token: how much of its prompt was kept."""
    admission: Admission | None = None
    """With the first token: when its turn came."""
    error: UsageError | NonFiniteError | None = None
    """Why it was aborted."""


class Scheduler:
    """Owns the waiting queue and the running set. Not thread-safe: the engine's loop is its only caller."""

    def __init__(
        self, kv: KVCacheManager, limits: SchedulerLimits, policy: Policy = first_come, window: int = 32
    ) -> None:
        """
        Args:
            window: how many later requests may be admitted before one that waits.
        """
        assert limits.max_num_batched_tokens >= limits.max_num_seqs > 0
        self.kv = kv
        self.limits = limits
        self._waiting = WaitingQueue(policy, self._outlook, window)
        if self._waiting.depends_on_cache:
            kv.watch_changes()
        self._running: dict[RequestId, Sequence] = {}  # in order of admission
        self._num_arrivals = 0
        self._was_prefill = False  # the last step, where shapes are fixed
        self.holds_until: float | None = None
        """By the last decision: nothing runs before then, unless others come; None if nobody waits for company."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def who_waits(self) -> list[str]:
        """The tenant of each that waits. Any thread may ask."""
        return [sequence.request.cache_salt for sequence in self._waiting.snapshot()]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_prefilling(self) -> int:
        """Of those that run. Any thread may ask."""
        return sum(not sequence.num_generated for sequence in list(self._running.values()))

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def request_ids(self) -> list[RequestId]:
        """Of all requests here, running or waiting, with their samples."""
        leaders = chain(self._running.values(), self._waiting)
        return [one.request_id for leader in leaders for one in (leader, *leader.followers)]

    def check(self, request: Request, num_samples: int = 1) -> None:
        """Whether the request could ever run. Reads only constants, so any thread may ask.

        Raises:
            PromptTooLongError: it exceeds the model's length or the whole KV pool; the message has the numbers.
            UsageError: so many samples cannot run at the same time.
        """
        if num_samples > self.limits.max_num_seqs:
            raise UsageError(
                f"n={num_samples} exceeds the {self.limits.max_num_seqs} sequences that run at the same time; "
                "lower n or raise runtime.max_num_seqs"
            )
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

    def add(self, request: Request, *samples: Request, now: float = 0.0) -> None:
        """Queue a request, with further samples of the same prompt; raises as `check`."""
        self.check(request, 1 + len(samples))
        leader, *followers = (self._new_sequence(one, now) for one in (request, *samples))
        leader.followers = followers
        self._wait(leader)

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request and free its blocks; False if it is not here (any more)."""
        sequence = self._running.get(request_id) or self._waiting.remove(request_id) or self._leave(request_id)
        if sequence is None:
            return False
        if sequence.followers:
            self._hand_over(sequence)
        self._finish(sequence, FinishReason.ABORTED)
        return True

    def restart(self, request_id: RequestId) -> bool:
        """Take a running request's blocks away and let it wait for its turn again; False if it does not run.

        It keeps its tokens, and its kept KV is used again."""
        sequence = self._running.get(request_id)
        if sequence is None:
            return False
        self._preempt(sequence)
        return True

    def forget_chunks(self, existing: Callable[[set[ChunkId]], set[ChunkId]], salt: str = "") -> int:
        """Keep nothing of chunks that are no more, not of requests under way either; returns how many nodes went.

        Args:
            existing: those of some chunks that are still there.
            salt: of the requests in which they stood.
        """
        return self.kv.forget_chunks(existing, self._leases(), owner_of(salt))

    def forget_owner(self, salt: str) -> int:
        """Keep nothing of a tenant, not of requests under way either; returns how many nodes went."""
        return self.kv.forget_owner(owner_of(salt), self._leases())

    def lose_device(self) -> list[RequestId]:
        """The device's KV is gone (RAGCache 6): every request waits again, with the tokens generated so far.

        What has a copy on host or disk is loaded when its turn comes, the rest is computed again.

        Returns:
            The requests whose answers would not go on as they began: they have tokens that were computed from placed
            KV, which no later placement makes again.
        """
        running = self._running.values()
        inexact = [one.request_id for one in running if one.num_generated and one.lease.placements]
        for sequence in list(reversed(self._running.values())):
            self._preempt(sequence)
        self.kv.lose_device()
        for sequence in self._waiting:  # one whose admission failed is not expected any more
            self.kv.protect(sequence.lease)
        return inexact

    def schedule(self, now: float = 0.0) -> Batch | None:
        """The next step, or None if there is nothing to run, or not yet (`holds_until`)."""
        self.holds_until = self._hold(now)
        if self.holds_until is not None:
            return None
        if self.limits.fixed_tail_tokens:
            return self._schedule_apart(now)
        num_running_before = len(self._running)
        copies: list[BlockCopy] = []
        scheduled = self._decodes(copies)
        has_preempted = len(self._running) < num_running_before
        budget = self.limits.max_num_batched_tokens - len(scheduled)
        for sequence in self._running.values():
            if budget > 0 and not sequence.is_decoding:
                scheduled.append(take(sequence, budget))
                budget -= scheduled[-1].num_scheduled_tokens
        # Blocks that a preemption has just freed are for those who keep running.
        while budget > 0 and not has_preempted and (admitted := self._try_admit(now)) is not None:
            scheduled.append(take(admitted, budget))
            budget -= scheduled[-1].num_scheduled_tokens
        return Batch(tuple(scheduled), tuple(copies)) if scheduled else None

    def _schedule_apart(self, now: float) -> Batch | None:
        """With fixed shapes: all decodes, or a piece of one prompt; in turns where there are both."""
        for is_prefill in (not self._was_prefill, self._was_prefill):
            batch = self._one_prefill(now) if is_prefill else self._all_decodes()
            if batch is not None:
                self._was_prefill = is_prefill
                return batch
        return None

    def _one_prefill(self, now: float) -> Batch | None:
        sequence = next((one for one in self._running.values() if not one.is_decoding), None) or self._try_admit(now)
        return None if sequence is None else Batch((take(sequence, self.limits.max_num_batched_tokens),))

    def _all_decodes(self) -> Batch | None:
        copies: list[BlockCopy] = []
        scheduled = self._decodes(copies)
        return Batch(tuple(scheduled), tuple(copies)) if scheduled else None

    def update(self, batch: Batch, result: StepResult, began: float = 0.0) -> list[SequenceUpdate]:
        """Record that a step ran; returns what became of each sequence that sampled a token.

        What may need the device comes first. If that raises, no sequence has got a token.

        Args:
            began: when its computing began.
        """
        recorded = [(entry, self._record(entry, result, began)) for entry in batch.sequences]
        updates = []
        for entry, error in recorded:
            sequence = self._running[entry.request_id]
            if error is not None:
                updates += self._refuse(sequence, error)
            elif entry.samples:
                updates += [self._advance(branch, result) for branch in [sequence, *self._fork(sequence)]]
        return updates

    def check_integrity(self) -> None:
        """Blocks are held by running sequences and the knowledge tree only and as often as they are counted, each
        sequence has the slots it needs, and nobody will write where others read."""
        pool = self.kv.pool
        self._waiting.reorder(self.kv.take_changes())
        self._waiting.check_integrity()
        self.kv.check_integrity(sequence.lease for sequence in self._running.values())
        leaders = chain(self._waiting, self._running.values())
        idle = [*self._waiting, *(follower for leader in leaders for follower in leader.followers)]
        assert all(not sequence.table.block_ids for sequence in idle), "a waiting sequence holds blocks"
        assert self._num_seats_taken <= self.limits.max_num_seqs
        for sequence in self._running.values():
            assert sequence.num_computed <= sequence.table.num_slots, sequence.request_id
            unwritten = set((sequence.table.slots[sequence.num_computed :] // pool.block_size).tolist())
            assert all(pool.ref_count(BlockId(block_id)) == 1 for block_id in unwritten), sequence.request_id
            assert not (sequence.followers and sequence.num_generated), sequence.request_id
            assert sequence.num_tokens - sequence.table.num_slots <= 1, sequence.request_id

    def _record(self, entry: ScheduledSequence, result: StepResult, began: float) -> NonFiniteError | None:
        """Take note of what a step computed of a sequence; returns an error if it is NaN or an infinity."""
        sequence = self._running[entry.request_id]
        sequence.began_at = began if sequence.began_at is None else sequence.began_at
        if entry.request_id in result.non_finite:
            return NonFiniteError()
        if entry.request_id in result.masses:
            self.kv.weigh(sequence.lease, entry.all_positions, result.masses[entry.request_id])
        try:
            if sequence.lease.repair is None:
                sequence.num_computed += entry.num_scheduled_tokens
            elif not self._advance_repair(sequence, entry, result):
                return None
            self.kv.commit(sequence.lease, sequence.num_computed)
        except NonFiniteError as error:
            return error
        return None

    def _refuse(self, sequence: Sequence, error: NonFiniteError) -> list[SequenceUpdate]:
        """End a request and the samples that would fork from it, and drop the kept KV that it has used."""
        num_dropped = self.kv.drop_suspect(sequence.lease)
        logger.error("%s: %s (%d pieces of kept KV)", sequence.request_id, error, num_dropped)
        group, sequence.followers = [sequence, *sequence.followers], []
        for one in group:
            self._finish(one, FinishReason.ABORTED)
        return [SequenceUpdate(one.request_id, None, FinishReason.ABORTED, error=error) for one in group]

    def _advance(self, sequence: Sequence, result: StepResult) -> SequenceUpdate:
        token_id = result.token_ids[sequence.request_id]
        is_answer = token_id not in sequence.request.stop_token_ids
        if is_answer:
            sequence.append(token_id)
        if (error := sequence.error) is not None:
            self._finish(sequence, FinishReason.ABORTED)
            return SequenceUpdate(sequence.request_id, None, FinishReason.ABORTED, error=error)
        reason: FinishReason | None = None
        if not is_answer or sequence.is_complete:
            reason = FinishReason.STOP
        elif sequence.num_generated == sequence.request.sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(sequence, reason)
        is_first = sequence.num_generated <= 1
        return SequenceUpdate(
            sequence.request_id,
            token_id if is_answer else None,
            reason,
            result.logprobs.get(sequence.request_id) if is_answer else None,
            sequence.lease.reuse if is_first else None,
            sequence.admission if is_first else None,
        )

    @property
    def _num_seats_taken(self) -> int:
        """Followers have the seats that they will sit on when they fork."""
        return sum(1 + len(sequence.followers) for sequence in self._running.values())

    def _new_sequence(self, request: Request, now: float) -> Sequence:
        self._num_arrivals += 1
        num_tokens = request.prompt.num_tokens + request.sampling.max_tokens
        lease = self.kv.new_lease(
            request.prompt, num_tokens, request.cache_salt, may_place=request.may_place, may_see=request.may_see
        )
        tail_tokens = self.limits.fixed_tail_tokens
        cuts = piece_ends(request.prompt, tail_tokens) if tail_tokens else []
        return Sequence(request, lease, self._num_arrivals, now, cuts)

    def _fork(self, leader: Sequence) -> list[Sequence]:
        """The followers of a sequence whose prompt has just run, now running themselves."""
        followers, leader.followers = leader.followers, []
        for follower in followers:
            self._take_over(follower, leader)
            self._running[follower.request_id] = follower
        return followers

    def _take_over(self, follower: Sequence, leader: Sequence) -> None:
        self.kv.fork(leader.lease, follower.lease)
        follower.num_computed = leader.num_computed
        follower.to_compute = leader.to_compute
        follower.status = leader.status
        follower.admitted_at, follower.began_at = leader.admitted_at, leader.began_at

    def _leave(self, request_id: RequestId) -> Sequence | None:
        """Take a follower out of its group; None if there is none of that name."""
        for leader in chain(self._waiting, self._running.values()):
            left = next((one for one in leader.followers if one.request_id == request_id), None)
            if left is not None:
                leader.followers.remove(left)
                return left
        return None

    def _hand_over(self, leader: Sequence) -> None:
        """The first follower leads from now on, in the same place and with what has been computed."""
        heir = leader.followers[0]
        heir.followers, leader.followers = leader.followers[1:], []
        if leader.status is not Status.RUNNING:
            self._wait(heir)
            return
        self._take_over(heir, leader)
        running = ((heir if one is leader else one) for one in self._running.values())
        self._running = {one.request_id: one for one in running}

    def _leases(self) -> list[Lease]:
        """Of all sequences, waiting or running."""
        leaders = chain(self._waiting, self._running.values())
        return [one.lease for leader in leaders for one in (leader, *leader.followers)]

    def _hold(self, now: float) -> float | None:
        """Until when those who wait do so for company (llmds's micro-batches): until their tokens fill a step or they
        the seats, but not for long. None if there is nothing to wait for."""
        if self._running or not self._waiting:
            return None
        until = self._waiting.oldest.arrived_at + self.limits.batch_delay_s
        if until <= now:
            return None
        num_tokens = num_seats = 0
        for sequence in self._waiting:
            num_tokens += self._outlook(sequence).num_to_compute
            num_seats += 1 + len(sequence.followers)
            if num_tokens >= self.limits.max_num_batched_tokens or num_seats >= self.limits.max_num_seqs:
                return None
        return until

    def _decodes(self, copies: list[BlockCopy]) -> list[ScheduledSequence]:
        """One token of every decoding sequence, oldest first: whom a preemption hits has not been taken yet."""
        taken = []
        for sequence in list(self._running.values()):
            if sequence.status is Status.RUNNING and sequence.is_decoding and self._ensure_slot(sequence, copies):
                taken.append(take(sequence, 1))
        return taken

    def _advance_repair(self, sequence: Sequence, entry: ScheduledSequence, result: StepResult) -> bool:
        """Record a step of a repair; True if that was its last one."""
        if entry.is_look:
            self.kv.see(sequence.lease, result.attention[entry.request_id])
            return False
        if entry.is_probe:
            self.kv.probe(sequence.lease, result.deviations[entry.request_id], sequence.num_tokens)
            return False
        assert sequence.to_compute is not None
        sequence.to_compute = sequence.to_compute[entry.num_scheduled_tokens :]
        if len(sequence.to_compute):
            return False
        sequence.to_compute = None
        sequence.num_computed = sequence.num_tokens
        self.kv.end_repair(sequence.lease)
        return True

    def _ensure_slot(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        """A slot for the sequence's next token, preempting younger sequences if need be; False if it was preempted."""
        while sequence.table.num_slots < sequence.num_tokens:
            appended = self.kv.try_append_token(sequence.table)
            if appended is not None:
                copies += [] if appended.copy is None else [appended.copy]
                break
            victim = next(reversed(self._running.values()))
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.kv.release(sequence.lease)
        sequence.num_computed = 0
        sequence.to_compute = None
        sequence.status = Status.PREEMPTED
        del self._running[sequence.request_id]
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)
        self.kv.protect(sequence.lease)

    def _try_admit(self, now: float) -> Sequence | None:
        """The first waiting sequence, if there is a seat and blocks for all of its tokens."""
        self._waiting.reorder(self.kv.take_changes())
        sequence = self._waiting.first()
        if sequence is None or self._num_seats_taken + 1 + len(sequence.followers) > self.limits.max_num_seqs:
            return None
        num_cached = self.kv.try_admit(sequence.lease, sequence.segment_lengths)
        if num_cached is None:
            return None
        sequence.num_computed = num_cached
        sequence.admitted_at = now if sequence.admitted_at is None else sequence.admitted_at
        self._waiting.admit(sequence)
        sequence.status = Status.RUNNING
        self._running[sequence.request_id] = sequence
        return sequence

    def _outlook(self, sequence: Sequence) -> AdmissionCandidate:
        num_cached = self.kv.num_reusable(sequence.lease, sequence.num_tokens)
        return AdmissionCandidate(sequence.arrival, num_cached, max(sequence.num_tokens - num_cached, 1))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.kv.release(sequence.lease)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self._running.pop(sequence.request_id, None)
