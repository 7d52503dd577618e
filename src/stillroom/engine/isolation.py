"""Executes batches so that a failing sequence ends without ending the others.

After a failure the sequences of the batch run one by one. That is sound because a sequence writes KV to its own slots
only, and the same KV each time. Proposed tokens are left out, since one of them may have made the step fail. Two things
cannot be repeated: a deviation pass compares KV with what it overwrites, and the source of a block copy may have been
written to since. Sequences with either start again from their tokens.

A device can be lost without an error that names a sequence. So while there are suspects, every step that has one runs
its sequences one by one, until each suspect has got a token or has ended.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from stillroom.core.batch import Batch, ScheduledSequence, StepResult, StepStopped
from stillroom.core.ids import BlockId, RequestId
from stillroom.runner.device_errors import is_device_loss

logger = logging.getLogger(__name__)

MAX_FAILURES = 2
"""Number of failures without a token between them after which a request ends."""


class Suspects:
    """Requests that were running when a step failed, and have got no token since."""

    def __init__(self) -> None:
        self._failures: Counter[RequestId] = Counter()

    def are_in(self, batch: Batch) -> bool:
        return any(entry.request_id in self._failures for entry in batch.sequences)

    def blame(self, request_ids: Iterable[RequestId]) -> list[RequestId]:
        """Count a failure of each request, and return those that have failed `MAX_FAILURES` times."""
        request_ids = list(request_ids)
        self._failures.update(request_ids)
        return [one for one in request_ids if self._failures[one] >= MAX_FAILURES]

    def clear(self, request_id: RequestId) -> None:
        """Remove a request that has got a token or has ended."""
        self._failures.pop(request_id, None)


@dataclass(slots=True)
class BatchOutcome:
    """Result of executing a batch."""

    batch: Batch
    """The sequences that ran."""
    result: StepResult
    failed: dict[RequestId, BaseException] = field(default_factory=dict)
    """Requests that failed when their sequence ran alone."""
    interrupted: dict[RequestId, BaseException] = field(default_factory=dict)
    """Requests that must start again from their tokens, with the error that interrupted them."""


class Isolation:
    def __init__(self, execute: Callable[[Batch], StepResult], block_size: int) -> None:
        self._execute_batch = execute
        self._block_size = block_size
        self._executing: set[RequestId] = set()

    def take_executing(self) -> list[RequestId]:
        """Return and clear the requests that ran when the device was lost; none if it was lost between two steps."""
        executing, self._executing = sorted(self._executing), set()
        return executing

    def execute(self, batch: Batch, *, one_by_one: bool = False) -> BatchOutcome:
        """Run a batch; if that fails, run each sequence alone.

        Args:
            one_by_one: run each sequence alone from the beginning.

        Raises:
            BaseException: the device is lost; see `is_device_loss`.
            StepStopped: as `Runner.execute`.
        """
        if one_by_one:
            return self._execute_one_by_one(batch, self._copy(batch))
        try:
            return BatchOutcome(batch, self._run(batch))
        except BaseException as error:
            _raise_unless_isolable(error)
            logger.exception("a step failed; its sequences run one by one")
            return self._execute_one_by_one(batch, error)

    def _copy(self, batch: Batch) -> BaseException | None:
        """Make the block copies of a batch that has not run; returns the error if that fails."""
        try:
            if batch.copies:
                self._run(Batch((), batch.copies))
        except BaseException as error:
            _raise_unless_isolable(error)
            return error
        return None

    def _execute_one_by_one(self, batch: Batch, error: BaseException | None) -> BatchOutcome:
        """
        Args:
            error: error of the batch or of its copies; None if only its copies have run.
        """
        targets = {copy.target for copy in batch.copies} if error is not None else set()
        outcome = BatchOutcome(batch, StepResult({}))
        entries, results = [], []
        for entry in (one.without_proposed for one in batch.sequences):
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
        """Run one sequence; if that fails, once for each of its samples. None if the sequence itself failed."""
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
    """Raise device losses, interrupts and stopped steps. Panics of Rust libraries, which are no `Exception`, end one
    request only."""
    if is_device_loss(error) or isinstance(error, (KeyboardInterrupt, SystemExit, StepStopped)):
        raise error


def _merged(results: list[StepResult]) -> StepResult:
    names = [one.name for one in fields(StepResult) if one.name != "non_finite"]
    parts = {name: {k: v for one in results for k, v in getattr(one, name).items()} for name in names}
    return StepResult(**parts, non_finite=frozenset().union(*(one.non_finite for one in results)))
