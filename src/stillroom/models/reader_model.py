"""The model of the bundled reader: scores each run of tokens of a passage as the answer to a question.

BERT's encoder (`ops/bert.py`) with one linear head for the start and the end of the answer.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from stillroom.ops.bert import BertEncoder, BertSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSpec(BertSpec):
    """Sizes of the encoder and its head."""

    pair_size: int = 0
    """Size of the vectors whose product joins the start and the end of an answer; 0: they are scored alone."""


T = TypeVar("T", Tensor, NDArray[np.float32])


def span_scores(outputs: T) -> T:
    """Return the score of each answer, [tokens, tokens] by first and last token: the logits of its start and its end,
    and the product of their vectors if the model has them.

    Args:
        outputs: of `ReaderModel` for one row, [tokens, 2 + 2 * pair_size].
    """
    scores = outputs[:, None, 0] + outputs[None, :, 1]
    size = (outputs.shape[1] - 2) // 2
    if size:
        scores = scores + outputs[:, 2 : 2 + size] @ outputs[:, 2 + size :].T * size**-0.5
    return scores


class ReaderModel(BertEncoder):
    """Encoder and head."""

    def __init__(self, spec: ReaderSpec) -> None:
        super().__init__(spec)
        self.spec = spec
        self.head = nn.Linear(spec.hidden_size, 2 + 2 * spec.pair_size)

    def forward(self, token_ids: Tensor, parts: Tensor, is_token: Tensor, dropout: float = 0.0) -> Tensor:
        """Return float32 [rows, tokens, 2 + 2 * pair_size]: logits of start and end, and the vectors of `span_scores`.

        Args:
            token_ids, parts, is_token, dropout: as in `BertEncoder.encode`; the question is the first part.
        """
        outputs: Tensor = self.head(self.encode(token_ids, parts, is_token, dropout)).float()
        return outputs
