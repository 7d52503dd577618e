"""Cache-Craft's early termination as its Algorithm 1 is written (3.2.2), for `stillroom bench quality`.

While the chosen tokens are recomputed, the question's attention to each chunk is summed layer by layer. Once `window`
layers agree on the chunks in focus, at layer L*, the chosen tokens of the other chunks keep their old KV in all later
layers. The product finds the focus before it recomputes (`kvcache/chunk_reuse/focus.py`), so such tokens cost nothing.

Here the rows of these tokens are still computed and their KV is put back, which gives the same numbers as leaving them
out. So this measures answers and counts, and saves no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stillroom.core.prompt import SegmentedPrompt, SegmentKind
from stillroom.kvcache.chunk_reuse.focus import FocusFinder
from stillroom.models.causal_model import CausalModel
from stillroom.models.packed import LayerKV, PackedInput
from stillroom.ops.attention import AttentionPlan, AttentionSpan
from stillroom.ops.attention_mass import mean_weights
from stillroom.ops.attention_observers import AttentionObserver, AttentionObservers

# T packed tokens, Q question tokens, K context tokens, S slots, H query heads, G key/value heads, D head dimension

LayerTensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Termination:
    """How the last pass of one prompt ended."""

    layer: int
    """L*: layers in which all chosen tokens were recomputed; the number of layers if no `window` layers agreed."""
    num_ended: int
    """Chosen tokens that were recomputed in the first L* layers only."""
    num_layers: int

    @property
    def saved_tokens(self) -> float:
        """Recomputed tokens that early termination saves, a token in one of n layers counting as 1 / n."""
        return self.num_ended * (self.num_layers - self.layer) / self.num_layers


class TerminatingModel:
    """A model that ends the recomputation of unfocused chunks early for the prompt that it expects, and only there."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._chunks: list[range] = []
        self._question: range = range(0)
        self._window = 0
        self.termination: Termination | None = None
        """Of the last pass since `expect`; None without a pass that recomputes chosen tokens."""

    def expect(self, prompt: SegmentedPrompt | None, window: int = 0) -> None:
        """End early for this prompt from now on; None: for no prompt.

        Args:
            window: w, consecutive layers that must agree on the focus.
        """
        self.termination, self._window = None, window if prompt is not None else 0
        start, places = 0, []
        for segment in () if prompt is None else prompt.segments:
            places.append((segment.kind, range(start, start + len(segment.token_ids))))
            start += len(segment.token_ids)
        self._chunks = [place for kind, place in places if kind is SegmentKind.CHUNK]
        self._question = places[-1][1] if places else range(0)

    def hidden_states(
        self, packed: PackedInput, layer_kv: LayerKV, observer: AttentionObserver | None = None
    ) -> torch.Tensor:
        """See `CausalModel`."""
        plan = packed.plan
        spans = plan.spans if isinstance(plan, AttentionPlan) else ()
        places_T = _places(spans[0]) if len(spans) == 1 and self._window and self._chunks else None
        if places_T is None or not (places_T[0] < self._chunks[-1].stop and places_T[-1] >= self._question.start):
            return self._model.hidden_states(packed, layer_kv, observer)
        ending = _Ending(spans[0], places_T, packed.slots_T, self._chunks, self._question, self._window)
        observers = AttentionObservers([ending] if observer is None else [ending, observer])
        found = self._model.hidden_states(packed, ending.watched(layer_kv), observers)
        self.termination = Termination(ending.layer, ending.num_ended, self._model.spec.num_layers)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _places(span: AttentionSpan) -> torch.Tensor:
    """Return the index in the context of each query, [queries]."""
    if span.places is not None:
        return span.places
    return torch.arange(span.num_context_tokens - (span.query_end - span.query_start), span.num_context_tokens)


class _Ending:
    """Observes one pass, and puts old KV back where recomputation has ended."""

    def __init__(
        self,
        span: AttentionSpan,
        places_T: torch.Tensor,
        slots_T: torch.Tensor,
        chunks: Sequence[range],
        question: range,
        window: int,
    ) -> None:
        self._span, self._places_T, self._slots_T, self._chunks = span, places_T, slots_T, chunks
        self._is_question_T = (places_T >= question.start) & (places_T < question.stop)
        self._finder = FocusFinder(len(chunks), window)
        self._ended_slots: torch.Tensor | None = None
        self._kept: tuple[LayerTensors, LayerTensors] | None = None
        self.layer = 0

    @property
    def num_ended(self) -> int:
        return 0 if self._ended_slots is None else len(self._ended_slots)

    def watched(self, layer_kv: LayerKV) -> LayerKV:
        """Return `layer_kv` that remembers the old KV of ended tokens before a layer writes."""

        def layer(index: int) -> LayerTensors:
            kv_SGD = layer_kv(index)
            if self._ended_slots is not None:
                self._kept = kv_SGD, (kv_SGD[0][self._ended_slots].clone(), kv_SGD[1][self._ended_slots].clone())
            return kv_SGD

        return layer

    def observe(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, scale: float, window: int | None, softcap: float | None
    ) -> None:
        """Put old KV back, or look for the focus; see `AttentionObserver`."""
        if self._kept is not None and self._ended_slots is not None:
            for written, old in zip(*self._kept, strict=True):
                written[self._ended_slots] = old
            return
        self.layer += 1
        q_QHD, places_Q = q_THD[self._is_question_T], self._places_T[self._is_question_T]
        weights_K = mean_weights(q_QHD, k_SGD[self._span.context], scale, places_Q, window, softcap).sum(0)
        focused = self._finder.observe(
            torch.stack([weights_K[chunk.start : chunk.stop].sum() for chunk in self._chunks]).double().numpy()
        )
        if focused is not None:
            is_ended_T = torch.zeros_like(self._is_question_T)
            for number, chunk in enumerate(self._chunks):
                if number not in focused:
                    is_ended_T |= (self._places_T >= chunk.start) & (self._places_T < chunk.stop)
            self._ended_slots = self._slots_T[is_ended_T]
