"""Embeds texts as vectors of length 1 with a sentence-transformers model, which loads with the first text
(`text_encoders.py`).

Documents may be embedded in bfloat16 (cosine to float32 above 0.999), queries always in float32. Thread-safe: queries
run one at a time; on a CPU, batches of documents run in parallel with them and each other, one thread each.
"""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property, lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from stillroom.config.settings import EmbedderConfig
from stillroom.core.panics import panics_as_errors
from stillroom.errors import UnsupportedModelError, UsageError
from stillroom.retrieval.model_files import ModelFiles

if TYPE_CHECKING:
    from stillroom.retrieval.query_encoder import QueryEncoder
    from stillroom.retrieval.text_encoders import Kind, TextEncoder

Vectors = NDArray[np.float32]

_SPECIAL_TOKENS = 2
"""Tokens that a model puts around a text."""

_RESERVED_TOKENS = 8
"""Tokens left free in a part of a text: its first word may have more tokens than it had in the text."""

_MAX_TOGETHER = 512
"""Tokens of sentences that are embedded together: attention compares all of them."""

_NUM_KEPT = 1024
"""Number of cached query vectors (1.5 MB). Embedding takes eight times as long as the rest of a search."""


class _Weights:
    """A loaded model and its locks."""

    def __init__(self) -> None:
        self.model: TextEncoder | None = None
        self.loading, self.next, self.running = Lock(), Lock(), Lock()


class Embedder:
    def __init__(self, config: EmbedderConfig, weights_of: "Embedder | None" = None) -> None:
        """Read nothing yet.

        Args:
            weights_of: Share the weights of this embedder, if the configurations are equal. The cached query vectors
                are not shared, so that no tenant can learn another's questions.
        """
        self._config = config
        is_shared = weights_of is not None and weights_of._config == config
        self._weights: _Weights = weights_of._weights if weights_of is not None and is_shared else _Weights()
        self._avoids_torch = False
        self._cached = lru_cache(_NUM_KEPT)(self._embed_query)

    @cached_property
    def _files(self) -> ModelFiles:
        files = ModelFiles(self._config.model)
        files.check_embeds()
        return files

    def check(self) -> None:
        """Load the model and embed a text, so that a model that cannot be used is refused before work depends on it.

        Raises:
            ModelNotFoundError: The model is missing or cannot be loaded.
            UnsupportedModelError: It is no embedding model, or gives vectors of another length than its files state.
        """
        length = len(self.embed_documents(["length"])[0])
        if length != self.dimension:
            raise UnsupportedModelError(
                f"{self._config.model} gives vectors of {length} dimensions, but its files state {self.dimension}; "
                "check that the folder is a complete sentence-transformers model"
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer without truncation and padding. Does not load the model."""
        return self._files.tokenizer

    @property
    def max_seq_length(self) -> int:
        """Maximum number of tokens read, including special tokens. Does not load the model."""
        return self._files.max_seq_length

    @cached_property
    def num_prompt_tokens(self) -> int:
        """Number of tokens that the model puts before a document, such as `passage: `. Does not load the model."""
        return self.count_tokens(self._files.prompts.get("document", ""))

    @property
    def fingerprint(self) -> str:
        """Hash of configuration and weights: equal fingerprints give equal vectors. Reads the files only."""
        return self._files.fingerprint

    @cached_property
    def dimension(self) -> int:
        """Length of a vector. Loads the model only if its files do not state it."""
        return self._files.dimension or len(self.embed_queries(["dimension"])[0])

    @panics_as_errors("the tokenizer")
    def count_tokens(self, text: str) -> int:
        """Count the tokens of a text without special tokens. Does not load the model."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @panics_as_errors("the tokenizer")
    def token_ids(self, text: str, *, adds_special: bool = True) -> list[int]:
        """Encode a text. Does not load the model."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=adds_special).ids
        return ids

    @panics_as_errors("the tokenizer")
    def text_of(self, token_ids: Sequence[int], *, keeps_special: bool = False) -> str:
        """Decode tokens; `keeps_special`: with special ones. Does not load the model.

        Raises:
            UsageError: there is no such token.
        """
        vocab_size = self.tokenizer.get_vocab_size()
        unknown = next((one for one in token_ids if not 0 <= one < vocab_size), None)
        if unknown is not None:
            raise UsageError(f"there is no token {unknown}; {self._config.model} has 0 to {vocab_size - 1}")
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=not keeps_special))

    def text_of_exactly(self, token_ids: Sequence[int]) -> str:
        """Decode tokens to a text of which the tokenizer makes these tokens, apart from special ones.

        Refuses tokens that no text has. It does not tell whose tokens they are: lists of another model's tokens often
        have a text too, and it is meaningless.

        Raises:
            UsageError: there is no such text.
        """
        text = self.text_of(token_ids)
        special = {one for one, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        if self.token_ids(text, adds_special=False) != [one for one in token_ids if one not in special]:
            raise UsageError(
                f"these tokens are not what the tokenizer of {self._config.model} makes of a text; send texts, or the "
                "tokens that POST /tokenize returns for this model"
            )
        return text

    def avoid_torch(self) -> None:
        """Embed queries in numpy from now on, if it can compute the model (`query_encoder.py`); not thread-safe.

        For a process that embeds few texts and ends. Vectors differ from those of torch by rounding.
        """
        self._avoids_torch = True

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """Return float32 [len(texts), dimension], each row of length 1.

        Raises:
            ModelNotFoundError: The model is missing or cannot be loaded.
        """
        encoder = self._query_encoder if self._avoids_torch and texts else None
        return self._embed(texts, "query", None) if encoder is None else encoder.encode(texts)

    def embed_sentences(self, texts: Sequence[str]) -> Vectors:
        """As `embed_queries`, for sentences that are compared with each other: in the number type of documents, all
        together, and no search waits for them. Their last bits may depend on the other sentences. Raises as
        `embed_queries`."""
        encoder = self._query_encoder if self._avoids_torch and texts else None
        return self._embed(texts, "sentence", None) if encoder is None else encoder.encode(texts)

    def embed_query(self, text: str) -> Vectors:
        """Return float32 [dimension] of length 1, read-only. The vectors of the latest queries are cached. Raises as
        `embed_queries`."""
        return self._cached(text)

    @cached_property
    def _query_encoder(self) -> "QueryEncoder | None":
        from stillroom.retrieval.query_encoder import load_query_encoder

        return load_query_encoder(self._files)

    def _embed_query(self, text: str) -> Vectors:
        vector: Vectors = self.embed_queries([text])[0]
        vector.flags.writeable = False
        return vector

    def embed_documents(self, texts: Sequence[str], on_batch: Callable[[int], None] | None = None) -> Vectors:
        """Return float32 [len(texts), dimension], each row of length 1, in the order of the texts.

        Args:
            on_batch: Called with the number of texts of each finished batch.

        Raises:
            ModelNotFoundError: The model is missing or cannot be loaded.
        """
        return self._embed(texts, "document", on_batch)

    def embed_whole(self, texts: Sequence[str], on_batch: Callable[[int], None] | None = None) -> Vectors:
        """As `embed_documents`, for chunks that were cut for another model: a text that is longer than this model reads
        is embedded in parts, and its vector is the mean of theirs, of length 1.

        Args:
            on_batch: called after each batch with the number of texts that it stands for.
        """
        parts = [self._parts(text) for text in texts]
        num_parts, num_done = max(1, sum(map(len, parts))), 0

        def on_parts(num: int) -> None:
            nonlocal num_done
            before, num_done = num_done, num_done + num
            if on_batch is not None:
                on_batch(num_done * len(texts) // num_parts - before * len(texts) // num_parts)

        vectors = self.embed_documents([part for some in parts for part in some], on_parts)
        if len(vectors) == len(texts):
            return vectors
        starts = np.cumsum([0, *(len(some) for some in parts[:-1])])
        sums: Vectors = np.add.reduceat(vectors, starts, axis=0)
        is_cut = np.array([len(some) > 1 for some in parts])
        sums[is_cut] /= np.linalg.norm(sums[is_cut], axis=1, keepdims=True)
        return sums

    @panics_as_errors("the tokenizer")
    def _parts(self, text: str) -> list[str]:
        """Cut a text between tokens into parts of nearly equal length that the model reads completely."""
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        most = max(1, self.max_seq_length - self.num_prompt_tokens - _RESERVED_TOKENS)
        if len(offsets) <= most + _RESERVED_TOKENS - _SPECIAL_TOKENS:
            return [text]
        num = -(-len(offsets) // most)
        cuts = [offsets[len(offsets) * part // num][0] for part in range(1, num)]
        return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]

    @panics_as_errors("the tokenizer")
    def _embed(self, texts: Sequence[str], kind: "Kind", on_batch: Callable[[int], None] | None) -> Vectors:
        if not texts:
            return np.empty((0, self.dimension), dtype=np.float32)
        model = self._load()
        batches = list(self._batches(texts, kind, model.token_block(kind)))

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
        self, model: "TextEncoder", kind: "Kind", compute: Callable[[list[int]], Vectors], batches: list[list[int]]
    ) -> Generator[tuple[int, Vectors], None, None]:
        """Compute batches of documents on a CPU in parallel, all other batches one after the other, and those of
        queries one at a time in the process."""
        from stillroom.ops.side_by_side import side_by_side

        is_cpu = model.device_type == "cpu"
        if kind == "document" and is_cpu and len(batches) > 1:
            yield from side_by_side(compute, batches)
            return
        for position, batch in enumerate(batches):
            with contextlib.nullcontext() if kind == "sentence" and is_cpu else self._forward_lock():
                part = next(side_by_side(compute, [batch]))[1] if is_cpu else compute(batch)
            yield position, part

    def _forward(self, model: "TextEncoder", kind: "Kind", batch: list[str]) -> Vectors:
        with self._arithmetic(kind, model):
            return model.encode(batch, kind)

    def _batches(self, texts: Sequence[str], kind: "Kind", token_block: int) -> Iterator[list[int]]:
        """Yield indexes of texts with the same number of token blocks, the model's prompt included, so that padding
        does not depend on the other texts. The longest come first: slow or oversized batches fail early."""
        prompt = self._files.prompts.get("query" if kind == "sentence" else kind, "")
        encoded = self.tokenizer.encode_batch([prompt + text for text in texts])
        if kind == "sentence":
            yield from _runs([min(len(encoding.ids), self.max_seq_length) for encoding in encoded], _MAX_TOGETHER)
            return
        num_blocks = [-(-min(len(encoding.ids), self.max_seq_length) // token_block) for encoding in encoded]
        order = sorted(range(len(texts)), key=lambda index: -num_blocks[index])
        for _, group in itertools.groupby(order, key=lambda index: num_blocks[index]):
            same_length = list(group)
            for start in range(0, len(same_length), self._config.batch_size):
                yield same_length[start : start + self._config.batch_size]

    @contextlib.contextmanager
    def _forward_lock(self) -> Iterator[None]:
        """Run one forward pass at a time, first come, first served: the next waiting thread holds `next`."""
        with self._weights.next:
            self._weights.running.acquire()
        try:
            yield
        finally:
            self._weights.running.release()

    @contextlib.contextmanager
    def _arithmetic(self, kind: "Kind", model: "TextEncoder") -> Iterator[None]:
        import torch

        dtype = None if kind == "query" else _autocast_dtype(self._config, model.device_type)
        with torch.inference_mode(), torch.autocast(model.device_type, dtype, enabled=dtype is not None):
            yield

    def _load(self) -> "TextEncoder":
        with self._weights.loading:
            if self._weights.model is None:
                from stillroom.ops.thread_pools import run_in_short_lived_thread
                from stillroom.retrieval.text_encoders import load_text_encoder

                self._weights.model = run_in_short_lived_thread(lambda: load_text_encoder(self._files))
            return self._weights.model


def _runs(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield runs of indexes whose lengths add up to at most `most`, or that are alone."""
    run, total = list[int](), 0
    for index, length in enumerate(lengths):
        if run and total + length > most:
            yield run
            run, total = [], 0
        run.append(index)
        total += length
    yield run


def _autocast_dtype(config: EmbedderConfig, device: str) -> Any:
    """Return the torch dtype of matrix products, or None for float32."""
    import torch

    if config.dtype in ("bfloat16", "float16"):
        return getattr(torch, config.dtype)
    if config.dtype == "float32":
        return None
    from stillroom.ops.bfloat16 import has_bfloat16

    return torch.bfloat16 if has_bfloat16(device) else None
