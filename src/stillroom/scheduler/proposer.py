"""Adds proposed tokens to the entries of decoding sequences, and says which of them a step has accepted."""

from collections.abc import Sequence as Entries

from stillroom.core.batch import SampledToken, ScheduledSequence, StepResult
from stillroom.core.panics import NativePanicError
from stillroom.kvcache.manager import KVCacheManager
from stillroom.scheduler.prompt_lookup import NO_PROPOSAL, LookupAccounts, Proposal, find_continuation
from stillroom.scheduler.sequence import Sequence
from stillroom.scheduler.step_builder import schedule_proposal


class Proposer:
    def __init__(self, kv: KVCacheManager, max_tokens: int) -> None:
        """
        Args:
            max_tokens: most tokens proposed for a sequence in a step; 0: none.
        """
        self.accounts = LookupAccounts()
        self._kv = kv
        self._max_tokens = max_tokens

    def extended(
        self, entries: list[ScheduledSequence], sequences: Entries[Sequence], budget: int
    ) -> list[ScheduledSequence]:
        """Return the entries of a step with proposed tokens where that pays; as they are if the step has a prompt.

        Only free blocks hold proposed tokens: nothing is evicted or preempted for them.

        Args:
            sequences: of the entries, in the same order.
            budget: most tokens to propose.
        """
        if not self._max_tokens or not all(sequence.is_decoding for sequence in sequences):
            return entries
        for sequence in sequences:
            sequence.lookup.proposal = self._find(sequence)
        lengths = self.accounts.lengths([sequence.lookup for sequence in sequences], budget)
        return [
            self._extend(entry, sequence, length) if length else entry
            for entry, sequence, length in zip(entries, sequences, lengths, strict=True)
        ]

    def observe(self, entry: ScheduledSequence, sequence: Sequence, sampled: Entries[SampledToken]) -> None:
        """Record the tokens that a sequence gets from a step."""
        if self._max_tokens:
            self.accounts.observe(sequence.lookup, entry.num_proposed, [one.token_id for one in sampled])

    def release_rejected(self, sequence: Sequence) -> None:
        """Release the slots of rejected tokens, once the sequence has its tokens of the step."""
        if self._max_tokens:
            self._kv.trim(sequence.table, sequence.num_tokens)

    def observe_step(self, entries: Entries[ScheduledSequence], seconds: float) -> None:
        """Record the time of a step; of steps with prompts nothing is recorded."""
        if self._max_tokens and all(entry.num_scheduled_tokens == 1 + entry.num_proposed for entry in entries):
            num_rows = sum(entry.num_scheduled_tokens for entry in entries)
            self.accounts.observe_step(len(entries), num_rows, seconds)

    def _find(self, sequence: Sequence) -> Proposal:
        """Return what to propose, up to a stop token."""
        request = sequence.request
        if request.is_background or sequence.lease.recompute is not None:
            return NO_PROPOSAL
        most = min(self._max_tokens, request.sampling.max_tokens - sequence.num_generated - 1)
        found = find_continuation(sequence.tokens(0, sequence.num_tokens), most)
        stops = [index for index, one in enumerate(found.token_ids.tolist()) if one in request.stop_token_ids]
        return found._replace(token_ids=found.token_ids[: stops[0]]) if stops else found

    def _extend(self, entry: ScheduledSequence, sequence: Sequence, length: int) -> ScheduledSequence:
        self._kv.extend(sequence.table, sequence.num_tokens + length)
        length = min(length, sequence.table.num_slots - sequence.num_tokens)
        if length <= 0:
            return entry
        try:
            return schedule_proposal(sequence, sequence.lookup.proposal.token_ids[:length])
        except NativePanicError:
            return entry  # sampling ends the request if its constraint fails there too


def sampled_tokens(entry: ScheduledSequence, result: StepResult) -> list[SampledToken]:
    """Return the tokens of a sequence's first sample: one, and one more for each accepted token.

    A constraint that failed behind an accepted token ends them: the next step finds the error again.
    """
    request_id = entry.request_id
    tokens = [SampledToken(result.token_ids[request_id], result.logprobs.get(request_id))]
    if not entry.num_proposed:
        return tokens
    rest = zip(entry.proposed.tolist(), entry.samples[1:], result.following.get(request_id, ()), strict=False)
    for proposed, spec, following in rest:
        if proposed != tokens[-1].token_id or (spec.constraint is not None and spec.constraint.error is not None):
            break
        tokens.append(following)
    return tokens
