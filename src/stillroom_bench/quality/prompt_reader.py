"""Computes whole prompts with one model, one at a time, and returns hidden states and attention."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from stillroom.backends.prompt_builder import PromptBuilder, format_for
from stillroom.core.document import Chunk
from stillroom.core.prompt import Segment, SegmentKind
from stillroom.errors import UsageError
from stillroom.kvstore.device import DeviceStore, KVShape
from stillroom.models.loader import LoadedModel
from stillroom.models.packed import PackedInput
from stillroom.ops.attention import AttentionSpan
from stillroom.ops.attention_mass import mean_weights
from stillroom.ops.attention_observers import AttentionObserver

# T tokens, M width of the model, V vocabulary, S slots, H query heads, G key/value heads, D head dimension


class AttentionWeights(AttentionObserver):
    """Sums the attention weights of a prompt over its layers."""

    def __init__(self, num_tokens: int) -> None:
        self._sum_TT = torch.zeros((num_tokens, num_tokens))
        self._num_layers = 0

    def observe(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        """Add one layer; see `AttentionObserver`."""
        num_tokens = len(self._sum_TT)
        self._sum_TT += mean_weights(q_THD, k_SGD[:num_tokens], scale, torch.arange(num_tokens), window, softcap)
        self._num_layers += 1

    @property
    def mean_TT(self) -> NDArray[np.float32]:
        """Weights [T, T] of each token's query over all keys, mean over heads and layers; a row sums to 1."""
        mean: NDArray[np.float32] = (self._sum_TT / self._num_layers).numpy()
        return mean


class PromptReader:
    """One model with memory for the KV of one prompt."""

    def __init__(self, model: LoadedModel) -> None:
        self._model, self._decoder = model, model.decoder
        self._prompts = PromptBuilder(model.tokenizer, format_for(model.tokenizer))
        spec = self._decoder.spec
        self._shape = KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, self._decoder.dtype)
        self._store = self._new_store(1024)

    def segments(self, chunks: Sequence[Chunk], question: str) -> list[tuple[Segment, range]]:
        """Return the segments of a prompt, each with the positions of its tokens."""
        found, start = [], 0
        for segment in self._prompts.build(chunks, question, None).segments:
            found.append((segment, range(start, start + len(segment.token_ids))))
            start += len(segment.token_ids)
        return found

    def attention(self, chunks: Sequence[Chunk], question: str) -> tuple[list[range], NDArray[np.float32]]:
        """Return the positions of each chunk in the prompt, and `AttentionWeights.mean_TT`."""
        segments = self.segments(chunks, question)
        token_ids = [token for segment, _ in segments for token in segment.token_ids]
        weights = AttentionWeights(len(token_ids))
        self.hidden_states(token_ids, weights)
        return [place for segment, place in segments if segment.kind is SegmentKind.CHUNK], weights.mean_TT

    def hidden_states(self, token_ids: Sequence[int], observer: AttentionObserver | None = None) -> torch.Tensor:
        """Compute tokens from position 0; return the last hidden states [T, M].

        Raises:
            UsageError: the prompt is longer than the model's longest sequence.
        """
        size, longest = len(token_ids), self._decoder.spec.max_positions
        if size > longest:
            raise UsageError(f"a prompt has {size} tokens, and the model reads {longest}; lower --chunks or --words")
        if size > self._store.scratch_slot:
            self._store = self._new_store(2 * size)
        places = torch.arange(size)
        span = AttentionSpan(0, size, slice(0, size), size)
        packed = PackedInput(torch.tensor(token_ids), places, places, [span], list(range(size)))
        return self._decoder.hidden_states(packed, self._store.layer, observer)

    def surprisal(self, token_ids: Sequence[int]) -> NDArray[np.float64]:
        """Return -log p of each token behind those before it, in nats [T]; the first has no predecessor: 0."""
        logprobs_TV = torch.log_softmax(self._decoder.logits(self.hidden_states(token_ids)), dim=-1)
        found = np.zeros(len(token_ids))
        following = torch.tensor(list(token_ids[1:]), dtype=torch.int64)
        found[1:] = -logprobs_TV[:-1].gather(1, following[:, None])[:, 0].double().numpy()
        return found

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text without any template."""
        return self._model.tokenizer.encode_text(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._model.tokenizer.decode(tuple(token_ids))

    def _new_store(self, num_slots: int) -> DeviceStore:
        return DeviceStore(self._shape, num_slots, 1, self._decoder.device)
