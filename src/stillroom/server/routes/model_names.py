"""Names of models in requests."""

from collections.abc import Sequence

from stillroom.models.bundled_models import full_name
from stillroom.server.error_replies import model_not_served
from stillroom.server.privacy import served_name

ALIAS = "stillroom"
"""Model name that clients may use for whichever model is served."""


def check_model(model: str | None, served: Sequence[str]) -> None:
    """Raises Refused: the request names another model than those served."""
    names = [served_name(name) for name in served]
    if not is_named(model, served):
        raise model_not_served(str(model), names)


def is_named(model: str | None, served: Sequence[str]) -> bool:
    """Whether a request without a model, or with this one, means one of those served."""
    return model in (None, ALIAS) or is_exactly(model, served)


def is_exactly(model: str | None, served: Sequence[str]) -> bool:
    """Whether a request names one of the models served."""
    return model is not None and (model in map(served_name, served) or full_name(model) in served)
