"""Text to vectors of length 1, with a sentence-transformers model. The model loads with the first text.

Documents may be embedded in bfloat16 (cosine to float32 above 0.999), queries always in float32. Thread-safe: queries
take turns; on a CPU, batches of documents run beside them and each other, one thread each.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from stillroom.config.settings import EmbedderConfig
from stillroom.core.panics import panics_as_errors
from stillroom.errors import ModelNotFoundError
from stillroom.retrieval.model_files import ModelFiles

Vectors = NDArray[np.float32]

_NUM_KEPT = 1024
"""Vectors of questions that are kept: 1.5 MB, where embedding one takes eight times as long as all the rest of a
search."""

_TOKEN_BLOCK = 32
"""Found by trial on AVX-512: 8 gives other last bits in other batches, 32 and its multiples do not."""


class _Weights:
    """A loaded model, and whose turn it is."""

    def __init__(self) -> None:
        self.model: Any = None
        self.loading, self.next, self.running = Lock(), Lock(), Lock()


class Embedder:
    """One model; see the module's docstring."""

    def __init__(self, config: EmbedderConfig, like: "Embedder | None" = None) -> None:
        """Cheap: nothing is read before it is needed.

        Args:
            like: whose weights it uses, if they are the same; the vectors that each keeps are its own, so that none can
                tell what the other was asked.
        """
        self._config = config
        self._weights: _Weights = like._weights if like is not None and like._config == config else _Weights()
        self._kept = lru_cache(_NUM_KEPT)(self._embed_query)

    @cached_property
    def _files(self) -> ModelFiles:
        return ModelFiles(self._config.model)

    @property
    def tokenizer(self) -> Tokenizer:
        """Without truncation and padding. Does not load the model."""
        return self._files.tokenizer

    @property
    def max_seq_length(self) -> int:
        """Most tokens read of a text, special tokens included; the rest is ignored. Does not load the model."""
        return self._files.max_seq_length

    @property
    def fingerprint(self) -> str:
        """Of configuration and weights: equal fingerprints give equal vectors. Reads the weights, does not load."""
        return self._files.fingerprint

    @cached_property
    def dimension(self) -> int:
        """Length of a vector. Loads the model only where its files do not say."""
        return self._files.dimension or len(self.embed_queries(["dimension"])[0])

    @panics_as_errors("the tokenizer")
    def count_tokens(self, text: str) -> int:
        """Tokens of a text without special tokens. Does not load the model."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dimension], each row of length 1.

        Raises:
            ModelNotFoundError: the model is not there or cannot be loaded.
        """
        return self._embed(texts, "query", None)

    def embed_query(self, text: str) -> Vectors:
        """float32 [dimension] of length 1, read-only: what `embed_queries` gives for one text, which it is asked for
        once; the vectors of the last questions are kept.

        Raises:
            ModelNotFoundError: the model is not there or cannot be loaded.
        """
        return self._kept(text)

    def _embed_query(self, text: str) -> Vectors:
        vector: Vectors = self.embed_queries([text])[0]
        vector.flags.writeable = False
        return vector

    def embed_documents(self, texts: Sequence[str], on_batch: Callable[[int], None] | None = None) -> Vectors:
        """float32 [len(texts), dimension], each row of length 1, in the order of the texts.

        Args:
            on_batch: told how many more texts are done, after each batch.

        Raises:
            ModelNotFoundError: the model is not there or cannot be loaded.
        """
        return self._embed(texts, "document", on_batch)

    @panics_as_errors("the tokenizer")
    def _embed(self, texts: Sequence[str], kind: str, on_batch: Callable[[int], None] | None) -> Vectors:
        if not texts:
            return np.empty((0, self.dimension), dtype=np.float32)
        model = self._load()
        batches = list(self._batches(texts))

        def compute(batch: list[int]) -> Vectors:
            return self._forward(model, kind, [texts[index] for index in batch])

        vectors: Vectors | None = None
        with contextlib.closing(self._computed(model, kind, compute, batches)) as computed:
            for position, part in computed:
                if vectors is None:
                    vectors = np.empty((len(texts), part.shape[1]), dtype=np.float32)
                vectors[batches[position]] = part
                if on_batch is not None:
                    on_batch(len(part))
        assert vectors is not None
        return vectors

    def _computed(
        self, model: Any, kind: str, compute: Callable[[list[int]], Vectors], batches: list[list[int]]
    ) -> Generator[tuple[int, Vectors], None, None]:
        """Batches of documents side by side on a CPU; all else one after the other, each in its turn."""
        from stillroom.retrieval.side_by_side import side_by_side

        is_cpu = model.device.type == "cpu"
        if kind == "document" and is_cpu and len(batches) > 1:
            yield from side_by_side(compute, batches)
            return
        for position, batch in enumerate(batches):
            with self._turn():
                part = next(side_by_side(compute, [batch]))[1] if is_cpu else compute(batch)
            yield position, part

    def _forward(self, model: Any, kind: str, batch: list[str]) -> Vectors:
        encode = model.encode_query if kind == "query" else model.encode_document
        with self._arithmetic(kind, model):
            part = encode(
                batch,
                batch_size=len(batch),
                show_progress_bar=False,
                normalize_embeddings=True,
                convert_to_numpy=True,
                **_padding(model),
            )
        return np.asarray(part, dtype=np.float32)

    def _batches(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Positions of texts that need the same number of token blocks, so that they are padded alike whatever comes
        with them; longest first, for what is slow or big fails early."""
        encoded = self.tokenizer.encode_batch(list(texts))
        num_blocks = [-(-min(len(one.ids), self.max_seq_length) // _TOKEN_BLOCK) for one in encoded]
        order = sorted(range(len(texts)), key=lambda index: -num_blocks[index])
        for _, group in itertools.groupby(order, key=lambda index: num_blocks[index]):
            alike = list(group)
            for start in range(0, len(alike), self._config.batch_size):
                yield alike[start : start + self._config.batch_size]

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One forward pass at a time. Whoever waits holds `next`, so who has just finished cannot overtake it."""
        with self._weights.next:
            self._weights.running.acquire()
        try:
            yield
        finally:
            self._weights.running.release()

    @contextlib.contextmanager
    def _arithmetic(self, kind: str, model: Any) -> Iterator[None]:
        import torch

        dtype = _autocast_dtype(self._config, str(model.device.type)) if kind == "document" else None
        with torch.inference_mode(), torch.autocast(model.device.type, dtype, enabled=dtype is not None):
            yield

    def _load(self) -> Any:
        with self._weights.loading:
            if self._weights.model is None:
                from stillroom.ops.thread_pools import in_a_thread_that_ends

                self._weights.model = in_a_thread_that_ends(self._loaded)
            return self._weights.model

    def _loaded(self) -> Any:
        model = _load_model(self._files)
        # the tokenizer's settings change with the first text; after that, threads only read them
        self._forward(model, "document", ["warm up"])
        return model


def _padding(model: Any) -> dict[str, Any]:
    """Arguments that pad a batch to whole blocks of tokens, for sentence-transformers that take them (from 6).

    In a batch of texts of as many blocks, a text has the same vector, to the last bit, whatever else is in it: with the
    rows of a matrix product in whole tiles, its sums are done in the same order, with any number of threads. So
    documents may be added at once or one by one.
    """
    if not hasattr(model[0], "processing_kwargs"):
        return {}
    return {"processing_kwargs": {"text": {"pad_to_multiple_of": _TOKEN_BLOCK}}}


def _autocast_dtype(config: EmbedderConfig, device: str) -> Any:
    """The torch dtype of matrix products, or None for float32."""
    import torch

    if config.dtype in ("bfloat16", "float16"):
        return getattr(torch, config.dtype)
    if config.dtype == "float32":
        return None
    has_bfloat16 = torch.cuda.is_bf16_supported() if device == "cuda" else _cpu_has_bfloat16()
    return torch.bfloat16 if has_bfloat16 else None


def _cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself; emulated it is slower than float32."""
    import torch

    capabilities = getattr(torch.cpu, "get_capabilities", None)
    found: dict[str, Any] = capabilities() if capabilities is not None else {}
    names = ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16")
    if any(found.get(name) for name in names):
        return True
    older = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(older is not None and older())


def _load_model(files: ModelFiles) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries, while they are imported
        import torch
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        had_progress_bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            return SentenceTransformer(str(files.folder), device=device)
        except (OSError, ValueError, KeyError) as error:
            raise ModelNotFoundError(
                f"the embedding model in {files.folder} cannot be loaded ({error}); "
                "check that the folder is a complete sentence-transformers model"
            ) from error
        finally:
            logging.set_verbosity(verbosity)
            if had_progress_bar:
                logging.enable_progress_bar()
