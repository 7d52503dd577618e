"""Turns a front's request for answers into requests of this process's engine, and starts them.

Everything that a front sends is checked here or in `cluster.wire`: tokens against the model, the tenant against the
knowledge base, generated tokens against the grammar. Nothing runs if any of it is refused.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stillroom.cluster.wire import AnswerRequest, WireSample
from stillroom.core.ids import ChunkId, RequestId
from stillroom.core.prompt import SegmentedPrompt
from stillroom.core.request import FinishReason, Request, TokenConstraint
from stillroom.engine.events import Listener
from stillroom.errors import KnowledgeBaseNotFoundError, UsageError, WireError
from stillroom.server.auth.tenants import DEFAULT_TENANT, Tenants
from stillroom.server.error_replies import Refused

if TYPE_CHECKING:
    from stillroom.backends.local import LocalBackend

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """A sample of a front's request."""

    request: Request | None
    """None: the answer is complete with the tokens that the front has."""
    end: FinishReason | None = None
    """Why it is complete; None: it is not."""


def backend_of(asked: AnswerRequest, tenants: Tenants) -> "LocalBackend":
    """Return the backend of the request's tenant; opens the tenant's knowledge base the first time.

    Raises:
        Refused: there is no such tenant here, or its knowledge base is not the front's.
    """
    from stillroom.backends.local import LocalBackend

    name = DEFAULT_TENANT if asked.tenant is None else asked.tenant
    if not tenants.is_servable(name):
        raise Refused(404, "tenant_not_served", "this engine serves no tenants; start it with --tenants DIR", "tenant")
    try:
        backend = tenants.stillroom(name).load_backend()
    except UsageError as error:
        raise Refused(400, "invalid_value", str(error), "tenant") from error
    except KnowledgeBaseNotFoundError as error:
        message = f"there is no knowledge base of the tenant {name!r} on this engine; it needs the front's folders"
        raise Refused(404, "tenant_not_found", message, "tenant") from error
    assert isinstance(backend, LocalBackend)
    if backend.salt != asked.salt:
        message = (
            f"the knowledge base of the tenant {name!r} is another one here than at the front; give both the same "
            "--kb and --tenants"
        )
        raise Refused(409, "other_knowledge_base", message, "salt")
    return backend


def plan_samples(asked: AnswerRequest, backend: "LocalBackend", now: float) -> list[PlannedSample]:
    """Check a request against the model and return what runs for each sample. Compiling a grammar takes time.

    Args:
        now: seconds on the engine's monotonic clock, when the request was received.

    Raises:
        WireError: a token is none of the model, or generated tokens cannot be continued.
        UsageError: the grammar cannot be used.
    """
    asked.check_tokens(backend.model.decoder.spec.vocab_size)
    constraint = None if asked.grammar is None else backend.constraints.compile_grammar(asked.grammar)
    prompt = asked.prompt
    return [
        _planned(sample, f"samples[{index}]", prompt, asked, backend, constraint, now)
        for index, sample in enumerate(asked.samples)
    ]


def _planned(  # noqa: PLR0913  the parts of a request
    sample: WireSample,
    where: str,
    prompt: SegmentedPrompt,
    asked: AnswerRequest,
    backend: "LocalBackend",
    constraint: TokenConstraint | None,
    now: float,
) -> PlannedSample:
    stop_token_ids = backend.model.stop_token_ids
    if not stop_token_ids.isdisjoint(sample.generated):
        raise WireError(f"the request's {where}.generated holds a stop token; the answer ended before it")
    if _completes(constraint, sample.generated, where):
        return PlannedSample(None, FinishReason.STOP)
    if len(sample.generated) == sample.sampling.max_tokens:
        return PlannedSample(None, FinishReason.LENGTH)
    return PlannedSample(
        Request(
            request_id=RequestId(f"{sample.request_id}.{next(_numbers)}"),
            sampling=sample.sampling,
            priority=sample.priority,
            deadline=None if sample.seconds_left is None else now + sample.seconds_left,
            may_see=_sees_own_only if asked.only_own_chunks else None,
            prompt=prompt,
            stop_token_ids=stop_token_ids,
            cache_salt=backend.salt,
            may_place=asked.may_place,
            generated=sample.generated,
            constraint=constraint,
        )
    )


def _completes(constraint: TokenConstraint | None, generated: Sequence[int], where: str) -> bool:
    """Whether generated tokens complete their grammar. Raises WireError: it does not allow them."""
    if constraint is None or not generated:
        return False
    state = constraint.copy()
    for index, token_id in enumerate(generated):
        if state.is_complete or not state.allows(token_id):
            raise WireError(f"the request's {where}.generated[{index}] is {token_id}, which the grammar does not allow")
        state.advance(token_id)
    return state.is_complete


def _sees_own_only(_: Collection[ChunkId]) -> bool:
    """Allow no chunk outside a request's own prompt."""
    return False


def start(backend: "LocalBackend", planned: Sequence[PlannedSample], listeners: Sequence[Listener]) -> list[RequestId]:
    """Start the samples that are not complete; returns the ids of their requests.

    Samples without generated tokens share their prefill; each of the others is a request of its own.

    Raises: as `AsyncEngine.submit`; then none of them runs.
    """
    both = zip(planned, listeners, strict=True)
    running = [(one.request, listener) for one, listener in both if one.request is not None]
    groups = [[one for one in running if not one[0].generated], *([one] for one in running if one[0].generated)]
    started: list[RequestId] = []
    try:
        for first, *others in filter(None, groups):
            backend.engine.submit(*first, *others)
            started += [request.request_id for request, _ in (first, *others)]
    except BaseException:
        for request_id in started:
            backend.cancel(request_id)
        raise
    return started
