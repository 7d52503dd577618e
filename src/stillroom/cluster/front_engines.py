"""The engines of one front: which of them may get requests, which one gets the next, and what each did.

Pure bookkeeping: every method gets the time. `FrontBeliefs` has what the engines hold; here are their information,
their problems, and the requests under way.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from stillroom.cluster.front_beliefs import EngineReport, FrontBeliefs
from stillroom.cluster.front_engine import NOT_ASKED, EngineCounts, FrontEngine, Sent
from stillroom.cluster.prediction import predict
from stillroom.cluster.routed_request import routed_request
from stillroom.cluster.routers import MAX_AGE_SECONDS, CostRouter, LeastLoaded, Router
from stillroom.cluster.wire_state import EngineInfo, EngineState
from stillroom.core.kv import Tier
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.reuse import PromptReuse
from stillroom.errors import EngineRefusedError, EngineUnavailableError
from stillroom.kvcache.tree.pieces import PrefixKeys

logger = logging.getLogger(__name__)

_SHOWN_DIGITS = 12
"""Of a fingerprint in messages."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a front expects of its engines: all must have the same vocabulary and knowledge base."""

    model: str
    """Name of the front's model. Engines with it are used in place of engines with another one."""
    vocabulary: bytes
    """Digest of the front's tokenizer (`Tokenizer.vocabulary_digest`)."""
    knowledge_base: str
    """Identity of the default tenant's knowledge base."""


class Totals(TypedDict):
    """Sums over the engines that may get requests."""

    num_waiting: int
    num_running: int
    num_blocks: int
    num_free_blocks: int


class FrontEngines:
    """The engines of one front. Used from one thread."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._engines: dict[str, FrontEngine] = {}
        self._beliefs = FrontBeliefs()
        self._router: Router = LeastLoaded()
        self._keys: PrefixKeys | None = None
        self._model: EngineInfo | None = None
        """Of the engine whose costs and model count for all."""
        self._num_sent = 0
        self._num_epochs = 0
        self._totals: Totals | None = None
        """Of the states now."""

    @property
    def addresses(self) -> list[str]:
        return list(self._engines)

    @property
    def preparing(self) -> list[str]:
        """Addresses of the engines that share the documents: those that fit, silent or not, and those not asked."""
        engines = list(self._engines.items())
        return [
            address
            for address, one in engines
            if one.problem == NOT_ASKED or (one.state is not None and not one.is_draining)
        ]

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Add new engines, and forget those that are not named any more; their streams go on."""
        for address in [one for one in self._engines if one not in addresses]:
            self.on_lost(address, "it is not named any more")
            del self._engines[address]
        for address in addresses:
            self._engines.setdefault(address, FrontEngine())

    # What engines say

    def asks(self, address: str) -> tuple[str, int] | None:
        """Return run and sequence of the next request for an engine's state; None: ask for its information first."""
        engine = self._engines[address]
        return None if engine.info is None else (engine.info.run, engine.sequence)

    def on_info(self, address: str, info: EngineInfo) -> None:
        """Take an engine's information, or note why it does not fit this front or its other engines."""
        engine = self._engines[address]
        try:
            self._check(address, info)
        except EngineRefusedError as error:
            self.on_misfit(address, str(error))
            return
        self._num_epochs += 1
        engine.epoch, engine.info, engine.sequence, engine.state = self._num_epochs, info, 0, None
        engine.counts.num_runs += info.run != engine.run
        engine.run = info.run
        engine.is_misfit = False
        engine.open.clear()

    def on_state(self, address: str, state: EngineState, asked_at: float) -> bool:
        """Take an engine's state; returns False if its information must be asked for again.

        An engine that takes requests is used from now on. One with the front's model replaces those with another one.

        Args:
            asked_at: when the front asked: what it sent later may be missing in the state.
        """
        engine = self._engines.get(address)
        if engine is None or engine.info is None:
            return False
        if state.run != engine.info.run:
            self.on_lost(address, "it started again")
            return False
        engine.state, engine.is_paused, engine.is_silent = state, False, False
        if not engine.is_used and not state.is_draining and not self._use(address, engine, engine.info, asked_at):
            return False
        if engine.is_used:  # else the next state must have all names
            engine.sequence = state.sequence
            self._report(address, state, asked_at)
        self._totals = None
        self._set_problem(address, engine, "it is shutting down" if state.is_draining else "")
        return True

    def _use(self, address: str, engine: FrontEngine, info: EngineInfo, now: float) -> bool:
        """Use an engine, in place of those with another model; returns False if another one is there meanwhile."""
        try:
            self._check(address, info)
        except EngineRefusedError as error:
            self.on_misfit(address, str(error))
            return False
        for other, replaced in self._others(address, info):
            self.on_misfit(other, _difference(other, replaced, address, info))
        if not any(one.is_used for one in list(self._engines.values())):
            self._use_model(info)
        self._beliefs.add_engine(address, now)
        engine.is_used = True
        return True

    def _report(self, address: str, state: EngineState, asked_at: float) -> None:
        report = EngineReport(
            at_seconds=asked_at,
            changes=state.changes if not state.is_all else self._since_all(address, state, asked_at),
            queue_seconds=state.queue_seconds,
            num_outstanding=state.num_outstanding,
        )
        self._beliefs.on_report(address, report)

    def _since_all(self, address: str, state: EngineState, now: float) -> dict[bytes, Tier | None]:
        """Return all names that an engine holds as changes."""
        believed = next(one.held for one in self._beliefs.at(now) if one.engine_id == address)
        return {**dict.fromkeys(believed), **state.changes}

    def on_misfit(self, address: str, problem: str) -> None:
        """Note that an engine does not fit this front: it gets no request until it does."""
        self.on_lost(address, problem)
        if (engine := self._engines.get(address)) is not None:
            engine.is_misfit = True

    def on_lost(self, address: str, problem: str) -> None:
        """Stop using an engine until its information is there again."""
        engine = self._engines.get(address)
        if engine is None:
            return
        engine.is_misfit = False
        if engine.is_used:
            self._beliefs.lose_engine(address)
            engine.is_used = False
        if engine.info is not None:
            engine.info = engine.state = None
            engine.counts.num_losses += not engine.is_silent
        engine.is_silent = False
        self._set_problem(address, engine, problem)

    def on_silent(self, address: str, problem: str) -> None:
        """Send nothing more to an engine until its next report; it is not lost yet."""
        engine = self._engines.get(address)
        if engine is not None:
            if engine.info is not None and not engine.is_silent:
                engine.counts.num_losses += 1
                engine.is_silent = True
            self._set_problem(address, engine, problem)

    def _check(self, address: str, info: EngineInfo) -> None:
        """Raises EngineRefusedError: an engine does not fit."""
        if info.vocabulary != self._expected.vocabulary:
            raise EngineRefusedError(
                f"the engine at {address} runs {info.model}, whose tokens are not those of this front's model; give "
                "the same --model (runtime.model) to both"
            )
        if info.knowledge_base != self._expected.knowledge_base:
            raise EngineRefusedError(
                f"the engine at {address} has another knowledge base than this front; give the same --kb to both"
            )
        for other, used in self._others(address, info):
            is_preferred = info.model == self._expected.model and used.model != self._expected.model
            if not is_preferred and not self._engines[other].is_draining:
                raise EngineRefusedError(_difference(address, info, other, used))

    def _others(self, address: str, info: EngineInfo) -> list[tuple[str, EngineInfo]]:
        """Return the engines in use whose model is another one, or computes otherwise."""
        infos = [(other, one.info) for other, one in list(self._engines.items()) if other != address and one.is_used]
        return [(other, used) for other, used in infos if used is not None and used.fingerprint != info.fingerprint]

    def _use_model(self, info: EngineInfo) -> None:
        if info.model != self._expected.model:
            logger.warning(
                "requests go to %s, as no engine with this front's own model, %s, takes requests",
                info.model,
                self._expected.model,
            )
        self._model = info
        self._keys = PrefixKeys(info.fingerprint, info.tail_tokens) if info.tail_tokens else None
        self._router = LeastLoaded() if info.costs is None else CostRouter(info.costs)
        self._beliefs = FrontBeliefs(places_computed=info.places_computed)

    def _set_problem(self, address: str, engine: FrontEngine, problem: str) -> None:
        if problem != engine.problem:
            self._totals = None
            if problem:
                logger.warning("the engine at %s gets no requests: %s", address, problem)
            else:
                logger.info("the engine at %s gets requests; answers name it %s", address, engine_name(address))
        engine.problem = problem

    # Requests

    def send(self, prompt: SegmentedPrompt, salt: str, now: float) -> Sent:
        """Choose an engine for a prompt, and note that it gets it.

        Raises:
            EngineUnavailableError: no engine may get it now.
        """
        usable = [
            one
            for one in self._beliefs.at(now)
            if one.age_seconds <= MAX_AGE_SECONDS
            and not self._engines[one.engine_id].problem
            and not self._engines[one.engine_id].is_paused
        ]
        if not usable or self._model is None:
            raise EngineUnavailableError("no engine takes requests now; ask again later")
        number, self._num_sent = self._num_sent, self._num_sent + 1
        pieces = () if self._keys is None else self._keys.pieces(prompt, salt)
        request = routed_request(number, pieces, prompt.num_tokens)
        chosen = self._router.choose(request, usable)
        engine, costs = self._engines[chosen.engine_id], self._model.costs
        prediction = None if costs is None else predict(request, chosen.held, costs)
        work = 0.0 if prediction is None else prediction.seconds
        self._beliefs.on_sent(chosen.engine_id, request, work, now)
        engine.open.add(number)
        engine.counts.num_sent += 1
        assert engine.info is not None, "beliefs know engines with information only"
        return Sent(
            chosen.engine_id,
            engine.epoch,
            number,
            now,
            engine.info.fingerprint,
            None if prediction is None else chosen.queue_seconds + work,
            0 if prediction is None else prediction.num_reused_tokens,
        )

    def on_first_token(self, sent: Sent, now: float, reuse: PromptReuse | None = None) -> None:
        """Note the first token of a stream, and what the engine reports of the prompt's KV."""
        engine = self._engines.get(sent.engine)
        if engine is None:
            return
        if reuse is not None:
            engine.counts.num_prompt_tokens += sum(segment.num_tokens for segment in reuse.segments)
            engine.counts.num_reused_tokens += reuse.num_cached_tokens
        if sent.predicted_seconds is not None:
            engine.counts.num_predicted += 1
            engine.counts.predicted_seconds += sent.predicted_seconds
            engine.counts.first_token_seconds += now - sent.at
        if self._is_open(engine, sent):
            self._beliefs.on_first_token(sent.engine, sent.number, now)

    def on_end(self, sent: Sent, now: float) -> None:
        """Note that a stream ended, whether it was complete or not."""
        engine = self._engines.get(sent.engine)
        if engine is not None and self._is_open(engine, sent):
            engine.open.remove(sent.number)
            self._beliefs.on_end(sent.engine, sent.number, now)

    def on_broken(self, sent: Sent, problem: str) -> None:
        """Note that a stream ended before its answers: its engine is lost until it answers again."""
        if (engine := self._engines.get(sent.engine)) is not None:
            engine.counts.num_broken += 1
            self._lose_epoch(engine, sent, problem)

    def on_refused(self, sent: Sent, problem: str, *, is_lost: bool) -> None:
        """Note that an engine did not take a request. It gets no other until its next report.

        Args:
            is_lost: it could not be reached.
        """
        if (engine := self._engines.get(sent.engine)) is not None:
            engine.counts.num_refused += 1
            if is_lost:
                self._lose_epoch(engine, sent, problem)
            engine.is_paused = True

    def _lose_epoch(self, engine: FrontEngine, sent: Sent, problem: str) -> None:
        if engine.epoch == sent.epoch:  # else it was lost before, and may be back
            self.on_lost(sent.engine, problem)

    def _is_open(self, engine: FrontEngine, sent: Sent) -> bool:
        return engine.info is not None and engine.epoch == sent.epoch and sent.number in engine.open

    # What the front tells

    @property
    def num_alive(self) -> int:
        """Engines that may get requests."""
        return sum(not one.problem for one in list(self._engines.values()))

    @property
    def problems(self) -> dict[str, str]:
        """Why engines get no requests, by address; only for the operator."""
        return {address: one.problem for address, one in list(self._engines.items()) if one.problem}

    @property
    def are_misfits(self) -> bool:
        """Whether every engine was asked, and none fits this front."""
        return bool(self._engines) and all(one.is_misfit for one in list(self._engines.values()))

    @property
    def is_model_chosen(self) -> bool:
        """Whether the engines in use have the front's model, or every engine was asked."""
        has_own = self._model is not None and self._model.model == self._expected.model
        return has_own or all(one.problem != NOT_ASKED for one in list(self._engines.values()))

    @property
    def infos(self) -> list[EngineInfo]:
        """Of the engines in use, lost ones excluded. They have one model."""
        return [one.info for one in list(self._engines.values()) if one.info is not None and one.is_used]

    @property
    def counts(self) -> dict[str, EngineCounts]:
        return {address: one.counts for address, one in list(self._engines.items())}

    @property
    def states(self) -> dict[str, EngineState]:
        """The last report of each engine that may get requests."""
        engines = list(self._engines.items())
        return {address: one.state for address, one in engines if one.state is not None and not one.problem}

    @property
    def totals(self) -> Totals:
        """Read for every token of every answer."""
        found = self._totals  # another thread may reset it
        if found is None:
            found = self._totals = self._sum_of_states()
        return found

    def _sum_of_states(self) -> Totals:
        states = self.states.values()
        return Totals(
            num_waiting=sum(one.num_waiting for one in states),
            num_running=sum(one.num_running for one in states),
            num_blocks=sum(one.num_blocks for one in states),
            num_free_blocks=sum(one.num_free_blocks for one in states),
        )


def engine_name(address: str) -> str:
    """Return the name of an engine in answers, whose readers need not know the address."""
    return f"engine-{hashlib.blake2b(address.encode(), digest_size=4).hexdigest()}"


def _difference(address: str, info: EngineInfo, other: str, used: EngineInfo) -> str:
    return (
        f"the engine at {address} runs {_model(info)}, and the one at {other} runs {_model(used)}; all engines need "
        "the same model, dtype and version"
    )


def _model(info: EngineInfo) -> str:
    return f"{info.model} (fingerprint {info.fingerprint.hex()[:_SHOWN_DIGITS]}, version {info.version})"
