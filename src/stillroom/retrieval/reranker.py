"""Scores texts for a question with a cross-encoder of sentence-transformers, which loads with the first question.

Texts are read in batches, in their order. On a CPU, batches run in parallel, one thread each (`ops/side_by_side.py`). A
time budget or a stable order can end the reading: then a beginning of the texts has scores. Thread-safe; one call
computes at a time.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from stillroom.core.clock import Clock
from stillroom.core.panics import panics_as_errors
from stillroom.errors import ModelError, ModelNotFoundError, UnsupportedModelError, UsageError
from stillroom.retrieval.model_files import OUTPUT_HEADS, ModelFiles, locate_model

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder

IsStable = Callable[[Sequence[float]], bool]
"""Scores of the first texts -> whether the rest need not be read."""

_CPU_BATCH, _GPU_BATCH = 4, 32
"""Texts per forward pass. Small batches on a CPU run in parallel and keep to the time budget."""
_SLICE = 32
"""Texts that one turn of `score_all` reads, so that searches are not kept waiting."""
_CHARS_PER_TOKEN = 32
"""Characters read of a text for each token that the model reads; no text of words has as many."""
_INSTEAD = "use one such as cross-encoder/ms-marco-MiniLM-L6-v2"


class _Weights:
    """A loaded model and its locks."""

    def __init__(self) -> None:
        self.model: CrossEncoder | None = None
        self.loading, self.running = Lock(), Lock()


class Reranker:
    def __init__(self, model: str, clock: Clock, weights_of: "Reranker | None" = None) -> None:
        """Read nothing yet.

        Args:
            model: a folder or a hub name.
            weights_of: share the weights of this reranker, which has the same model.
        """
        self.model_name = model
        self._clock = clock
        self._weights: _Weights = _Weights() if weights_of is None else weights_of._weights

    def score(
        self, query: str, texts: Sequence[str], budget_s: float = 0.0, is_stable: IsStable | None = None
    ) -> list[float]:
        """Score the first texts, in their order, until all are read, the order is stable or the time is over.

        A score is the logistic function of the model's output, from 0 to 1: that of `CrossEncoder.predict` up to
        rounding, unless the model's files name another activation. Equal calls give equal scores; only the budget makes
        their number depend on the machine.

        Args:
            budget_s: most seconds to wait and read, not counting the loading of the model; 0: no limit.
            is_stable: asked after each batch, in order.

        Raises:
            ModelNotFoundError: the model is missing or incomplete.
            UnsupportedModelError: the model is no cross-encoder with one score.
            ModelError: the model computes NaN.
        """
        model = self.load()
        began = self._clock.monotonic()
        if not self._weights.running.acquire(timeout=budget_s or -1):
            return []
        try:
            scores: list[float] = []
            with contextlib.closing(self._parts(model, query, texts)) as parts:
                for part in parts:
                    scores += part
                    is_late = budget_s and self._clock.monotonic() - began >= budget_s
                    if is_late or (is_stable is not None and is_stable(scores)):
                        break
        finally:
            self._weights.running.release()
        if not all(map(math.isfinite, scores)):
            raise ModelError(
                f"the reranker {self.model_name!r} computed NaN or an infinity; check its files, or leave "
                "search.reranker empty"
            )
        return scores

    def score_all(self, query: str, texts: Sequence[str]) -> list[float]:
        """Score every text, taking turns with other callers. Raises as `score`."""
        return [
            score
            for start in range(0, len(texts), _SLICE)
            for score in self.score(query, texts[start : start + _SLICE])
        ]

    def _parts(self, model: "CrossEncoder", query: str, texts: Sequence[str]) -> Generator[Sequence[float], None, None]:
        """Yield the scores of each batch, in order."""
        from stillroom.ops.side_by_side import side_by_side

        most = _CHARS_PER_TOKEN * (model.max_seq_length or 512)
        is_cpu = model.device.type == "cpu"
        pairs = [(query[:most], text[:most]) for text in texts]
        size = _CPU_BATCH if is_cpu else _GPU_BATCH
        batches = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        if not is_cpu:
            yield from (_scores(model, batch) for batch in batches)
            return
        finished: dict[int, Sequence[float]] = {}
        num_yielded = 0
        with contextlib.closing(side_by_side(lambda batch: _scores(model, batch), batches)) as computed:
            for position, part in computed:
                finished[position] = part
                while num_yielded in finished:
                    yield finished.pop(num_yielded)
                    num_yielded += 1

    def load(self) -> "CrossEncoder":
        """Return the model, loaded with the first call. Raises as `load_cross_encoder`."""
        with self._weights.loading:
            if self._weights.model is None:
                from stillroom.ops.thread_pools import run_in_short_lived_thread

                self._weights.model = run_in_short_lived_thread(lambda: load_cross_encoder(self.model_name))
            return self._weights.model


def load_cross_encoder(model: str) -> "CrossEncoder":
    """Load a cross-encoder onto the GPU if there is one, for threads that only read it.

    Raises:
        ModelNotFoundError: it is missing or incomplete.
        UnsupportedModelError: it is no cross-encoder with one score.
    """
    folder = locate_model(model, "search.reranker", "cross-encoder")
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} has no config.json; set search.reranker to the folder of a cross-encoder")
    files = ModelFiles(str(folder))
    if files.saved_class != "CrossEncoder" and not files.architecture.endswith(OUTPUT_HEADS):
        raise UnsupportedModelError(  # sentence-transformers would add an output layer of random weights
            f"search.reranker = {model!r} is a {files.architecture}, not a cross-encoder; {_INSTEAD}"
        )
    import torch
    from safetensors import SafetensorError

    from stillroom.retrieval.text_encoders import quiet_libraries

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with quiet_libraries():
            from sentence_transformers import CrossEncoder

            found = CrossEncoder(str(folder), device=device)
            if found.num_labels != 1:
                raise UnsupportedModelError(
                    f"search.reranker = {model!r} gives {found.num_labels} scores for a text, not one; {_INSTEAD}"
                )
            _scores(found, [("warm", "up")])  # changes the tokenizer's settings; afterwards threads only read them
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, ValueError) and not files.saved_class and files.architecture.endswith("ForCausalLM"):
            # one that ranks answers with the tokens "yes" and "no" (Qwen3-Reranker)
            raise UnsupportedModelError(
                f"search.reranker = {model!r} is a {files.architecture}, a language model and not a cross-encoder; "
                f"{_INSTEAD}"
            ) from error
        raise ModelNotFoundError(
            f"the reranker in {folder} cannot be loaded ({error}); check that the folder is a complete "
            "cross-encoder, or leave search.reranker empty"
        ) from error
    return found


@panics_as_errors("the tokenizer")
def _scores(model: "CrossEncoder", pairs: Sequence[tuple[str, str]]) -> Sequence[float]:
    """Return scores from 0 to 1, also of models whose own activation is the identity."""
    import torch

    found: list[float] = model.predict(
        list(pairs), batch_size=len(pairs), show_progress_bar=False, activation_fn=torch.nn.Sigmoid()
    ).tolist()
    return found


def score_all(reranker: Reranker | None, query: str, texts: Sequence[str]) -> list[float]:
    """As `Reranker.score_all`. Raises UsageError: there is no reranker."""
    if reranker is None:
        raise UsageError(
            "no reranker is configured; set search.reranker to a cross-encoder, such as "
            "cross-encoder/ms-marco-MiniLM-L6-v2"
        )
    return reranker.score_all(query, texts)


def is_settled(scores: Sequence[float], top_k: int, patience: int) -> bool:
    """Whether the last `patience` scores are not among the first `top_k`; never if `patience` is 0.

    Args:
        scores: of texts in the order in which equal scores stay.
    """
    num_before = len(scores) - patience
    if not patience or num_before < top_k:
        return False
    return max(by_score(scores)[:top_k]) < num_before


def by_score(scores: Sequence[float]) -> list[int]:
    """Return positions, the best score first; equal scores stay in order."""
    return sorted(range(len(scores)), key=lambda position: -scores[position])
