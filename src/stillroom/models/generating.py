"""Refuses checkpoints that do not generate text, from `config.json` alone: before weights are read or downloaded."""

from collections.abc import Mapping
from typing import Any, NoReturn

from stillroom.errors import UnsupportedModelError

_OTHER_HEADS = (
    "ForMaskedLM",
    "ForNextSentencePrediction",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
"""Ends of the names of transformers' classes that give scores or spans of their input."""
_INSTEAD = (
    "give --model (runtime.model) a model that generates. Embedding models belong in embedder.model, cross-encoders in "
    "search.reranker"
)


def check_generates(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for an encoder, and for a model with another head than that of a language model."""
    kind = str(config.get("model_type"))
    if config.get("is_encoder_decoder"):
        _refuse(kind, "it has an encoder, and its decoder reads the encoder's output (cross attention)")
    if not config.get("is_decoder") and _is_encoder(kind):
        _refuse(kind, "an encoder reads text and does not generate any")
    name = next((str(one) for one in config.get("architectures") or () if str(one).endswith(_OTHER_HEADS)), None)
    if name is not None:
        _refuse(kind, f"a {name} does not generate text")


def _is_encoder(model_type: str) -> bool:
    """Whether transformers has a class for this type that fills gaps in a text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _refuse(model_type: str, reason: str) -> NoReturn:
    raise UnsupportedModelError(f"model_type {model_type!r} cannot run here: {reason}; {_INSTEAD}")
