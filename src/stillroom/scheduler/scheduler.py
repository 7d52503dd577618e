"""Decides what runs in the next step: decodes first, then pieces of prompts, under a token budget.

`WaitingQueue` decides which request is admitted next. An admitted sequence gets the blocks of its whole prompt, and one
more block whenever it outgrows them. When no block is free, the youngest running sequence is preempted: it waits at the
front of the queue and its tokens run again later. The oldest is never preempted, so some request always finishes.

Samples of one prompt are a leader and its followers: the leader's prompt is computed, its last logits pick the first
token of each sample, and then the followers become sequences of their own that share blocks. Design: docs/runtime.md
"""

import logging
from collections.abc import Callable, Iterator
from itertools import chain, islice

from stillroom.core.batch import Batch, BlockCopy, SampledToken, ScheduledSequence, StepResult
from stillroom.core.ids import BlockId, ChunkId, RequestId
from stillroom.core.kv import owner_of
from stillroom.core.request import FinishReason, Request
from stillroom.errors import NonFiniteError
from stillroom.kvcache.lease import Lease
from stillroom.kvcache.manager import KVCacheManager
from stillroom.kvcache.tree.pieces import piece_ends
from stillroom.scheduler.limits import SchedulerLimits, check_request
from stillroom.scheduler.policy import AdmissionCandidate, Policy, first_come
from stillroom.scheduler.proposer import Proposer, sampled_tokens
from stillroom.scheduler.queue import WaitingQueue
from stillroom.scheduler.sequence import Sequence, Status
from stillroom.scheduler.sequence_update import SequenceUpdate, append_sampled_token
from stillroom.scheduler.step_builder import schedule_next_token, schedule_tokens

logger = logging.getLogger(__name__)

_RUNNING = Status.RUNNING  # looking it up in its class for every sequence takes as long as calling a function
_POLL_SECONDS = 0.002
"""Time between two looks whether KV that the next request waits for has come from the shared tier."""


class Scheduler:
    """Owns the waiting queue and the running set. Not thread-safe: the engine's loop is its only caller."""

    def __init__(
        self, kv: KVCacheManager, limits: SchedulerLimits, policy: Policy = first_come, window: int = 32
    ) -> None:
        """
        Args:
            window: how many later requests may be admitted before a waiting one.
        """
        assert limits.max_num_batched_tokens >= limits.max_num_seqs > 0
        self.kv = kv
        self.limits = limits
        self._waiting = WaitingQueue(policy, self._candidate, window)
        if self._waiting.depends_on_cache:
            kv.watch_changes()
        self._running: dict[RequestId, Sequence] = {}  # in order of admission
        self._num_arrivals = 0
        self.proposer = Proposer(kv, 0 if limits.fixed_tail_tokens else limits.max_proposed_tokens)
        self._was_prefill = False  # kind of the last step with fixed shapes
        self.delayed_until: float | None = None
        """Set by `schedule`: time until which the batch waits for more requests; None if it does not wait."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tenants(self) -> list[str]:
        """The tenant of each waiting request. Thread-safe."""
        return [sequence.request.cache_salt for sequence in self._waiting.snapshot()]

    @property
    def num_running(self) -> int:
        """Running requests, preparing ones left out: they end when a question comes. Thread-safe."""
        return sum(not sequence.request.prepares for sequence in list(self._running.values()))

    @property
    def num_prefilling(self) -> int:
        """Running requests without a token yet, preparing ones left out. Thread-safe."""
        running = list(self._running.values())
        return sum(not (sequence.num_new or sequence.request.prepares) for sequence in running)

    def pending_prefills(self, most: int) -> Iterator[tuple[int, int]]:
        """Yield the tokens that have their KV and those to compute: of each running prompt, and of each waiting
        request, of which at most the first `most` are looked at."""
        for sequence in self._running.values():
            if not (sequence.is_decoding or sequence.request.prepares or sequence.request.is_background):
                yield sequence.num_computed, sequence.num_to_compute
        for sequence in islice(self._waiting, most):
            candidate = self._candidate(sequence)
            yield candidate.num_cached, candidate.num_to_compute

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def request_ids(self) -> list[RequestId]:
        """Ids of all requests, running or waiting, with their samples."""
        return [sequence.request_id for sequence in self._all_sequences()]

    def check(self, request: Request, num_samples: int = 1) -> None:
        """Refuse a request that can never run; see `check_request`. Thread-safe."""
        check_request(request, num_samples, self.limits, self.kv)

    def add(self, request: Request, *samples: Request, now: float = 0.0) -> None:
        """Queue a request with further samples of the same prompt; raises as `check_request`."""
        self.check(request, 1 + len(samples))
        assert not (samples and request.generated), "samples fork before the first token"
        leader, *followers = (self._new_sequence(one, now) for one in (request, *samples))
        leader.followers = followers
        self._enqueue(leader)

    def has_to_prepare(self, request: Request) -> bool:
        """As `KVCacheManager.has_to_prepare`. Raises also as `check_request`."""
        self.check(request)
        return self.kv.has_to_prepare(self._new_sequence(request, 0.0).lease)

    def abort(self, request_id: RequestId) -> bool:
        """End a request and free its blocks; False if it is unknown or has ended."""
        sequence = self._running.get(request_id) or self._waiting.remove(request_id)
        sequence = sequence or self._remove_follower(request_id)
        if sequence is None:
            return False
        if sequence.followers:
            self._promote_follower(sequence)
        self._finish(sequence)
        return True

    def restart(self, request_id: RequestId) -> bool:
        """Preempt a running request; False if it does not run. The request keeps its tokens and its kept KV."""
        sequence = self._running.get(request_id)
        if sequence is not None:
            self._preempt(sequence)
        return sequence is not None

    def forget_chunks(self, existing: Callable[[set[ChunkId]], set[ChunkId]], salt: str = "") -> int:
        """Drop kept KV of removed chunks, and keep none of them of requests in progress; returns the dropped nodes.

        Args:
            existing: returns which of some chunks still exist.
            salt: cache salt of the requests that used the chunks.
        """
        return self.kv.forget_chunks(existing, self._leases(), owner_of(salt))

    def forget_owner(self, salt: str) -> int:
        """Drop all kept KV of a tenant, and keep none of its requests in progress; returns the dropped nodes."""
        return self.kv.forget_owner(owner_of(salt), self._leases())

    def lose_device(self) -> list[RequestId]:
        """Preempt every request after the device's KV was lost (RAGCache 6).

        Requests keep the tokens generated so far. KV with a copy on host or disk is loaded at the next admission; the
        rest is computed again.

        Returns:
            The requests that cannot resume: their tokens were computed from placed KV, which no later placement
            reproduces.
        """
        running = self._running.values()
        inexact = [one.request_id for one in running if one.num_generated and one.lease.placements]
        for sequence in list(reversed(self._running.values())):
            self._preempt(sequence)
        self.kv.lose_device()
        for sequence in self._waiting:  # an admission that failed ended its protection
            self.kv.protect(sequence.lease)
        return inexact

    def schedule(self, now: float = 0.0) -> Batch | None:
        """Return the next step; None if nothing can run now (see `delayed_until`)."""
        self.delayed_until = self._batch_delay_end(now)
        if self.delayed_until is not None:
            return None
        batch = self._schedule_fixed_shapes(now) if self.limits.fixed_tail_tokens else self._schedule_together(now)
        if batch is not None:
            self.delayed_until = None
        return batch

    def _schedule_together(self, now: float) -> Batch | None:
        """Return one token of every decoding sequence and parts of prompts, within the token budget."""
        num_running_before = len(self._running)
        copies: list[BlockCopy] = []
        scheduled = self._schedule_decodes(copies)
        has_preempted = len(self._running) < num_running_before
        budget = self.limits.max_num_batched_tokens - len(scheduled)
        for sequence in self._running.values():
            if budget > 0 and not sequence.is_decoding:
                scheduled.append(schedule_tokens(sequence, self._at_most(sequence, budget)))
                budget -= scheduled[-1].num_scheduled_tokens
        # Blocks that a preemption has just freed belong to the sequences that keep running.
        while budget > 0 and not has_preempted and (admitted := self._try_admit(now)) is not None:
            scheduled.append(schedule_tokens(admitted, self._at_most(admitted, budget)))
            budget -= scheduled[-1].num_scheduled_tokens
        scheduled = self.proposer.extended(scheduled, [self._running[one.request_id] for one in scheduled], budget)
        return Batch(tuple(scheduled), tuple(copies)) if scheduled else None

    def _schedule_fixed_shapes(self, now: float) -> Batch | None:
        """Return all decodes or one piece of one prompt, alternating where there are both."""
        for is_prefill in (not self._was_prefill, self._was_prefill):
            copies: list[BlockCopy] = []
            scheduled = self._schedule_prefill(now) if is_prefill else self._schedule_decodes(copies)
            if scheduled:
                self._was_prefill = is_prefill
                return Batch(tuple(scheduled), tuple(copies))
        return None

    def _schedule_prefill(self, now: float) -> list[ScheduledSequence]:
        sequence = next((one for one in self._running.values() if not one.is_decoding), None) or self._try_admit(now)
        budget = self.limits.max_num_batched_tokens
        return [] if sequence is None else [schedule_tokens(sequence, self._at_most(sequence, budget))]

    def _at_most(self, sequence: Sequence, budget: int) -> int:
        """The part of a step's tokens that a sequence may take."""
        request = sequence.request
        return min(budget, self.limits.preparing_tokens) if request.prepares or request.is_background else budget

    def update(self, batch: Batch, result: StepResult, began: float = 0.0, ended: float = 0.0) -> list[SequenceUpdate]:
        """Record that a step ran; returns an update for each sampled token.

        Work that may need the device comes first. If it raises, no sequence has got a token.

        Args:
            began: time when computing the step began.
            ended: time when it ended.
        """
        self.proposer.observe_step(batch.sequences, ended - began)
        recorded = [(entry, self._record(entry, result, began)) for entry in batch.sequences]
        updates = []
        for entry, error in recorded:
            sequence = self._running[entry.request_id]
            if error is not None:
                updates += self._abort_non_finite(sequence, error)
            elif entry.samples:
                followers = self._fork(sequence)
                updates += self._advance(sequence, entry, sampled_tokens(entry, result))
                for one in followers:
                    sampled = SampledToken(result.token_ids[one.request_id], result.logprobs.get(one.request_id))
                    updates += self._advance(one, entry, [sampled])
        return updates

    def check_integrity(self) -> None:
        """Assert that reference counts of blocks match their holders (running sequences and the knowledge tree), that
        each sequence has the slots it needs, and that no sequence will write to a shared block."""
        pool = self.kv.pool
        self._waiting.reorder(self.kv.take_changes())
        self._waiting.check_integrity()
        self.kv.check_integrity(sequence.lease for sequence in self._running.values())
        idle = (one for one in self._all_sequences() if self._running.get(one.request_id) is not one)
        assert all(not sequence.table.block_ids for sequence in idle), "a waiting sequence holds blocks"
        assert self._num_reserved_seqs <= self.limits.max_num_seqs
        for sequence in self._running.values():
            assert sequence.num_computed <= sequence.table.num_slots, sequence.request_id
            unwritten = set((sequence.table.slots[sequence.num_computed :] // pool.block_size).tolist())
            assert all(pool.ref_count(BlockId(block_id)) == 1 for block_id in unwritten), sequence.request_id
            assert not (sequence.followers and sequence.num_generated), sequence.request_id
            assert sequence.num_tokens - sequence.table.num_slots <= 1, sequence.request_id

    def _record(self, entry: ScheduledSequence, result: StepResult, began: float) -> NonFiniteError | None:
        """Record what a step computed of a sequence; returns an error if that is NaN or infinite."""
        sequence = self._running[entry.request_id]
        sequence.began_at = began if sequence.began_at is None else sequence.began_at
        if entry.request_id in result.non_finite:
            return NonFiniteError()
        if entry.request_id in result.masses:
            self.kv.take_masses(sequence.lease, entry.all_positions, result.masses[entry.request_id])
        try:
            if sequence.lease.recompute is None:
                sequence.num_computed += len(entry.token_ids) - entry.num_proposed
                if entry.num_proposed:
                    sequence.num_computed += len(sampled_tokens(entry, result)) - 1
            elif not self._advance_repair(sequence, entry, result):
                return None
            self.kv.commit(sequence.lease, sequence.num_computed)
        except NonFiniteError as error:
            return error
        return None

    def _abort_non_finite(self, sequence: Sequence, error: NonFiniteError) -> list[SequenceUpdate]:
        """End a request and the samples that would fork from it, and drop the kept KV that it used."""
        num_dropped = self.kv.drop_suspect(sequence.lease)
        logger.error("%s: %s (%d pieces of kept KV)", sequence.request_id, error, num_dropped)
        group, sequence.followers = [sequence, *sequence.followers], []
        for one in group:
            self._finish(one)
        return [SequenceUpdate(one.request_id, None, FinishReason.ABORTED, error=error) for one in group]

    def _advance(
        self, sequence: Sequence, entry: ScheduledSequence, sampled: list[SampledToken]
    ) -> list[SequenceUpdate]:
        """Append the tokens of a step; returns an update for each. Only the last one can end the sequence."""
        self.proposer.observe(entry, sequence, sampled)
        updates = [append_sampled_token(sequence, one) for one in sampled]
        if updates[-1].finish_reason is not None:
            self._finish(sequence)
        else:
            self.proposer.release_rejected(sequence)
        return updates

    @property
    def _num_reserved_seqs(self) -> int:
        """Running sequences, and the followers that will fork from them."""
        return len(self._running) + sum([len(sequence.followers) for sequence in self._running.values()])

    def _new_sequence(self, request: Request, now: float) -> Sequence:
        self._num_arrivals += 1
        num_tokens = request.prompt.num_tokens + request.sampling.max_tokens
        lease = self.kv.new_lease(
            request.prompt,
            num_tokens,
            request.cache_salt,
            may_place=request.may_place and not request.generated,
            most_exact=request.most_exact,
            may_see=request.may_see,
            before=request.before,
            prepares=request.prepares,
        )
        if request.is_background:
            lease.num_keepable = 0
        tail_tokens = self.limits.fixed_tail_tokens
        cuts = piece_ends(request.prompt, tail_tokens) if tail_tokens else []
        return Sequence(request, lease, self._num_arrivals, now, cuts)

    def _fork(self, leader: Sequence) -> list[Sequence]:
        """Start the followers of a sequence whose prompt has just run; returns them."""
        followers, leader.followers = leader.followers, []
        for follower in followers:
            self._copy_progress(follower, leader)
            self._running[follower.request_id] = follower
        return followers

    def _copy_progress(self, follower: Sequence, leader: Sequence) -> None:
        self.kv.fork(leader.lease, follower.lease)
        follower.num_computed = leader.num_computed
        follower.to_compute = leader.to_compute
        follower.status = leader.status
        follower.admitted_at, follower.began_at = leader.admitted_at, leader.began_at

    def _remove_follower(self, request_id: RequestId) -> Sequence | None:
        """Remove and return a follower that has not forked; None if there is none of that id."""
        for leader in chain(self._waiting, self._running.values()):
            left = next((one for one in leader.followers if one.request_id == request_id), None)
            if left is not None:
                leader.followers.remove(left)
                return left
        return None

    def _promote_follower(self, leader: Sequence) -> None:
        """Make the first follower the leader, in the same place and with the KV computed so far."""
        heir = leader.followers[0]
        heir.followers, leader.followers = leader.followers[1:], []
        if leader.status is not Status.RUNNING:
            self._enqueue(heir)
            return
        self._copy_progress(heir, leader)
        running = ((heir if one is leader else one) for one in self._running.values())
        self._running = {one.request_id: one for one in running}

    def _all_sequences(self) -> Iterator[Sequence]:
        """Running and waiting sequences, each with its followers."""
        for leader in chain(self._running.values(), self._waiting):
            yield from (leader, *leader.followers)

    def _leases(self) -> list[Lease]:
        return [sequence.lease for sequence in self._all_sequences()]

    def _batch_delay_end(self, now: float) -> float | None:
        """Return until when to wait for more requests (llmds's micro-batches); None to run now.

        The wait ends `batch_delay_s` after the oldest request arrived, or when the waiting requests fill the step's
        tokens or sequences.
        """
        if self._running or not self._waiting:
            return None
        until = self._waiting.oldest.arrived_at + self.limits.batch_delay_s
        if until <= now:
            return None
        num_tokens = num_seqs = 0
        for sequence in self._waiting:
            num_tokens += self._candidate(sequence).num_to_compute
            num_seqs += 1 + len(sequence.followers)
            if num_tokens >= self.limits.max_num_batched_tokens or num_seqs >= self.limits.max_num_seqs:
                return None
        return until

    def _schedule_decodes(self, copies: list[BlockCopy]) -> list[ScheduledSequence]:
        """Schedule one token of every decoding sequence, oldest first, so that a preempted sequence has no entry."""
        entries = []
        for sequence in list(self._running.values()):
            if sequence.status is _RUNNING and sequence.is_decoding and self._ensure_slot(sequence, copies):
                entries.append(schedule_next_token(sequence))
        return entries

    def _advance_repair(self, sequence: Sequence, entry: ScheduledSequence, result: StepResult) -> bool:
        """Record a step of selective recompute; True if it was the last one."""
        if entry.is_query_pass:
            self.kv.take_attention(sequence.lease, result.attention[entry.request_id])
            return False
        if entry.is_deviation_pass:
            self.kv.take_deviations(sequence.lease, result.deviations[entry.request_id], sequence.num_tokens)
            return False
        assert sequence.to_compute is not None
        sequence.to_compute = sequence.to_compute[entry.num_scheduled_tokens :]
        if len(sequence.to_compute):
            return False
        sequence.to_compute = None
        sequence.num_computed = sequence.num_tokens
        self.kv.end_recompute(sequence.lease)
        return True

    def _ensure_slot(self, sequence: Sequence, copies: list[BlockCopy]) -> bool:
        """Get a slot for the next token, preempting younger sequences if need be; False if it was itself preempted."""
        table = sequence.lease.table
        while table.num_slots < sequence.num_tokens:
            appended = self.kv.try_append_token(table)
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
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        self._waiting.push(sequence)
        self.kv.protect(sequence.lease)

    def _try_admit(self, now: float) -> Sequence | None:
        """Admit the first waiting sequence if it fits into `max_num_seqs` and has blocks for all its tokens."""
        self._waiting.reorder(self.kv.take_changes())
        sequence = self._waiting.first()
        if sequence is None or self._num_reserved_seqs + 1 + len(sequence.followers) > self.limits.max_num_seqs:
            return None
        if self.kv.is_waiting_for_tier(sequence.lease):
            self.delayed_until = now + _POLL_SECONDS
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

    def _candidate(self, sequence: Sequence) -> AdmissionCandidate:
        num_cached = self.kv.num_reusable(sequence.lease, sequence.num_tokens)
        return AdmissionCandidate(sequence.arrival, num_cached, max(sequence.num_tokens - num_cached, 1))

    def _finish(self, sequence: Sequence) -> None:
        self.kv.release(sequence.lease)
        sequence.status = Status.FINISHED
        self._running.pop(sequence.request_id, None)
