"""Executes batches so that a failing sequence ends alone.

After a failure the sequences of the batch run one by one. That is sound because a sequence writes KV to slots of its
own only, and the same KV each time. Two things cannot be repeated: a probe compares KV with what it writes there, and
the source of a block copy may have been written to since. Sequences with either start again from their tokens.

A device can be lost without saying for which sequence. So while requests are under suspicion, every step runs its
sequences one by one, until each has got a token or has ended.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from stillroom.core.batch import Batch, ScheduledSequence, StepResult
from stillroom.core.ids import BlockId, RequestId
from stillroom.runner.device_errors import is_device_loss

logger = logging.getLogger(__name__)

MAX_FAILURES = 2
"""Failures of a request, without a token between them, that end it."""


class Suspects:
    """Requests that were running when something failed, and have made no progress since."""

    def __init__(self) -> None:
        self._failures: Counter[RequestId] = Counter()

    def are_in(self, batch: Batch) -> bool:
        return any(entry.request_id in self._failures for entry in batch.sequences)

    def blame(self, request_ids: Iterable[RequestId]) -> list[RequestId]:
        """Note a failure of each; returns those that have failed too often."""
        request_ids = list(request_ids)
        self._failures.update(request_ids)
        return [one for one in request_ids if self._failures[one] >= MAX_FAILURES]

    def clear(self, request_id: RequestId) -> None:
        """The request has got a token, or has ended."""
        self._failures.pop(request_id, None)


@dataclass(slots=True)
class BatchOutcome:
    """What became of a batch."""

    batch: Batch
    """The sequences that ran."""
    result: StepResult
    failed: dict[RequestId, BaseException] = field(default_factory=dict)
    """Requests that failed when they ran alone."""
    interrupted: dict[RequestId, BaseException] = field(default_factory=dict)
    """Requests that must start again from their tokens, with the error that they were interrupted by."""


class Isolation:
    """Executes the batches of one engine."""

    def __init__(self, execute: Callable[[Batch], StepResult], block_size: int) -> None:
        """
        Args:
            execute: of the runner.
        """
        self._execute_batch = execute
        self._block_size = block_size
        self._executing: set[RequestId] = set()

    def take_executing(self) -> list[RequestId]:
        """Return the requests that ran when the device was lost, once; none if it was lost between two steps."""
        executing, self._executing = sorted(self._executing), set()
        return executing

    def execute(self, batch: Batch, *, one_by_one: bool = False) -> BatchOutcome:
        """Run a batch; where that fails, each sequence alone.

        Args:
            one_by_one: run each alone from the beginning.

        Raises:
            BaseException: the device is lost, as `is_device_loss` says.
        """
        if one_by_one:
            return self._execute_apart(batch, self._copy(batch))
        try:
            return BatchOutcome(batch, self._run(batch))
        except BaseException as error:
            _raise_unless_isolable(error)
            logger.exception("a step failed; its sequences run one by one")
            return self._execute_apart(batch, error)

    def _copy(self, batch: Batch) -> BaseException | None:
        """Make the copies of a batch that has not run; returns the error if that fails."""
        try:
            if batch.copies:
                self._run(Batch((), batch.copies))
        except BaseException as error:
            _raise_unless_isolable(error)
            return error
        return None

    def _execute_apart(self, batch: Batch, error: BaseException | None) -> BatchOutcome:
        """
        Args:
            error: which the batch, or its copies, failed with before; None if nothing of it has run but its copies.
        """
        targets = {copy.target for copy in batch.copies} if error is not None else set()
        outcome = BatchOutcome(batch, StepResult({}))
        entries, results = [], []
        for entry in batch.sequences:
            if error is not None and (entry.is_deviation_pass or self._reads(entry, targets)):
                outcome.interrupted[entry.request_id] = error
                continue
            result = self._run_alone(entry, outcome.failed)
            if result is not None:
                entries.append(entry)
                results.append(result)
        self._executing = set()
        outcome.batch, outcome.result = Batch(tuple(entries)), _merged(results)
        return outcome

    def _run_alone(self, entry: ScheduledSequence, failed: dict[RequestId, BaseException]) -> StepResult | None:
        """Run one sequence, and if that fails once for each of its samples; None if the sequence itself failed."""
        try:
            return self._run(Batch((entry,)))
        except BaseException as error:
            _raise_unless_isolable(error)
            if len(entry.samples) <= 1:
                failed[entry.request_id] = error
                return None
        results = []
        for sample in entry.samples:
            try:
                results.append(self._run(Batch((entry._replace(samples=(sample,)),))))
            except BaseException as error:
                _raise_unless_isolable(error)
                failed[sample.request_id] = error
        return None if entry.request_id in failed else _merged(results)

    def _run(self, batch: Batch) -> StepResult:
        self._executing = {entry.request_id for entry in batch.sequences}
        self._executing |= {sample.request_id for entry in batch.sequences for sample in entry.samples}
        result = self._execute_batch(batch)
        self._executing = set()
        return result

    def _reads(self, entry: ScheduledSequence, targets: set[BlockId]) -> bool:
        return bool(targets) and not targets.isdisjoint((entry.slots // self._block_size).tolist())


def _raise_unless_isolable(error: BaseException) -> None:
    """Panics of libraries written in Rust are no `Exception`, and end one request like any other error."""
    if is_device_loss(error) or isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error


def _merged(results: list[StepResult]) -> StepResult:
    """One result with the entries of all."""
    names = [one.name for one in fields(StepResult) if one.name != "non_finite"]
    parts = {name: {k: v for one in results for k, v in getattr(one, name).items()} for name in names}
    return StepResult(**parts, non_finite=frozenset().union(*(one.non_finite for one in results)))
