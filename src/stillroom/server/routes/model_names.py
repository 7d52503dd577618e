"""Names of models in requests."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from stillroom.models.bundled_models import full_name
from stillroom.server.error_replies import model_not_served
from stillroom.server.privacy import served_name

ALIAS = "stillroom"
"""Model name that clients may use for whichever model is served."""


def check_model(model: str | None, served: Sequence[str], others: Mapping[str, str] = MappingProxyType({})) -> None:
    """Check that a request names no other model than those served.

    Args:
        others: models that other routes have -> what they do.

    Raises:
        Refused: it does.
    """
    if is_named(model, served):
        return
    names = [served_name(name) for name in served]
    does = next((does for name, does in others.items() if is_exactly(model, [name])), None)
    raise model_not_served(str(model), names, ALIAS, does)


def is_named(model: str | None, served: Sequence[str]) -> bool:
    """Whether a request without a model, or with this one, means one of those served."""
    return model in (None, ALIAS) or is_exactly(model, served)


def is_exactly(model: str | None, served: Sequence[str]) -> bool:
    """Whether a request names one of the models served."""
    return model is not None and (model in map(served_name, served) or full_name(model) in served)
