"""Embeds queries without torch, for a process that searches a few times and ends (`stillroom search`)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from stillroom.core.panics import panics_as_errors
from stillroom.ops.numpy_bert import NumpyBertEncoder
from stillroom.retrieval.model_files import ModelFiles

Vectors = NDArray[np.float32]


class QueryEncoder:
    """The mean of BERT's last hidden states. Vectors are within 1e-5 of those of `BertTextEncoder`."""

    def __init__(self, files: ModelFiles) -> None:
        """Raises as `NumpyBertEncoder`."""
        config = files.config
        self._files = files
        self._model = NumpyBertEncoder(
            files.folder / "model.safetensors",
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            epsilon=config["layer_norm_eps"],
        )

    @panics_as_errors("the tokenizer")
    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return [texts, dimension], each row of length 1. A vector does not depend on the other texts."""
        means = np.stack([self._model.encode(ids).mean(axis=0) for ids in self._files.token_ids(texts)])
        vectors: Vectors = means / np.linalg.norm(means, axis=1, keepdims=True)
        return vectors


def load_query_encoder(files: ModelFiles) -> QueryEncoder | None:
    """Return None if numpy cannot compute the model: it is not plain BERT, or its weights are not in float32.

    Raises:
        ModelNotFoundError: the model's files are damaged.
    """
    if not files.is_plain_bert:
        return None
    try:
        return QueryEncoder(files)
    except TypeError:
        return None
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise files.loading_error(error) from error
