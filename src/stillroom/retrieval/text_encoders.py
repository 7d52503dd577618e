"""Models that embed texts: our BERT encoder where the folder holds such a model, sentence-transformers for all others.

Both give the same vectors, up to rounding. Importing sentence-transformers takes some four seconds of a processor, more
than all the rest of `stillroom ask`.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from stillroom.ops.bert import BertEncoder, BertSpec, tensors_of_checkpoint
from stillroom.ops.steady_linear import is_packable
from stillroom.retrieval.model_files import ModelFiles

Kind = Literal["query", "document", "sentence"]
"""A sentence is encoded as a query, where that is faster together with other sentences."""
Vectors = NDArray[np.float32]

_TOKEN_BLOCK = 32
"""Texts are padded to whole blocks. Found by trial on AVX-512: with 8, the last bits of a vector depend on its batch,
unless products are steady (`ops/steady_linear.py`); with multiples of 32 not."""
_QUERY_BLOCK = 16
"""Of queries with steady products: most have fewer tokens, and come alone. Attention among 8 tokens adds in another
order on AMD (Zen 4, torch 2.13)."""


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Import and load models of sentence-transformers without its warnings and progress bars."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        had_progress_bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if had_progress_bar:
                logging.enable_progress_bar()


class TextEncoder(Protocol):
    """A loaded model. Calls in parallel are allowed after the first one."""

    device_type: str

    def token_block(self, kind: Kind) -> int:
        """Return the number of tokens to a multiple of which texts are padded."""
        ...

    def encode(self, texts: Sequence[str], kind: Kind) -> Vectors:
        """Return [texts, dimension], each row of length 1."""
        ...


def load_text_encoder(files: ModelFiles) -> TextEncoder:
    """Load the model of a folder onto the GPU if there is one.

    Raises:
        ModelNotFoundError: The folder is not a complete model.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return BertTextEncoder(files, device) if files.is_plain_bert else SentenceTransformersEncoder(files, device)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise files.loading_error(error) from error


class BertTextEncoder:
    """The mean of BERT's last hidden states."""

    def __init__(self, files: ModelFiles, device: str) -> None:
        self.device_type = device
        config = files.config
        spec = BertSpec(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            inner_size=config["intermediate_size"],
            max_positions=config["max_position_embeddings"],
            num_parts=config["type_vocab_size"],
            epsilon=config["layer_norm_eps"],
        )
        tensors = tensors_of_checkpoint(load_file(files.folder / "model.safetensors"), spec.num_layers)
        self._model = BertEncoder(spec)
        self._model.load_state_dict(tensors)
        self._model.to(device, torch.float32).eval().requires_grad_(False)
        self._files = files

    def token_block(self, kind: Kind) -> int:
        is_steady = self.device_type == "cpu" and is_packable(torch.float32)
        return _QUERY_BLOCK if kind == "query" and is_steady else _TOKEN_BLOCK

    def encode(self, texts: Sequence[str], kind: Kind) -> Vectors:
        rows, block = self._files.token_ids(texts), self.token_block(kind)
        if kind == "sentence":
            return self._encode_packed(rows)
        length = min(-(-max(map(len, rows)) // block) * block, self._model.positions.num_embeddings)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        is_token = torch.zeros(len(rows), length, dtype=torch.bool)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            is_token[number, : len(row)] = True
        ids, is_token = ids.to(self.device_type), is_token.to(self.device_type)
        hidden = self._model.encode(ids, torch.zeros_like(ids), is_token)
        vectors: Vectors = F.normalize((hidden * is_token[:, :, None]).sum(1).float(), dim=-1).cpu().numpy()
        return vectors

    def _encode_packed(self, rows: list[list[int]]) -> Vectors:
        """Encode texts without padding: each weight is read once, for all tokens."""
        lengths = [len(row) for row in rows]
        ids = torch.tensor([one for row in rows for one in row], device=self.device_type)
        hidden = self._model.encode_packed(ids, lengths).float()
        sums = torch.stack([part.sum(0) for part in torch.split(hidden, lengths)])
        vectors: Vectors = F.normalize(sums, dim=-1).cpu().numpy()
        return vectors


class SentenceTransformersEncoder:
    def __init__(self, files: ModelFiles, device: str) -> None:
        self.device_type = device
        self._prompts = files.prompts
        with quiet_libraries():
            from sentence_transformers import SentenceTransformer

            self._model = SentenceTransformer(str(files.folder), device=device)
        self._model[0].register_forward_pre_hook(self._pad_to_blocks)
        with torch.inference_mode():
            self.encode(["warm up"], "document")  # changes the tokenizer's settings; afterwards threads only read them

    def token_block(self, kind: Kind) -> int:
        return _TOKEN_BLOCK

    def encode(self, texts: Sequence[str], kind: Kind) -> Vectors:
        kind = "query" if kind == "sentence" else kind
        encode = self._model.encode_query if kind == "query" else self._model.encode_document
        found = encode(
            list(texts),
            batch_size=len(texts),
            show_progress_bar=False,
            normalize_embeddings=True,
            convert_to_numpy=True,
            prompt=self._prompts.get(kind),
        )
        return np.asarray(found, dtype=np.float32)

    def _pad_to_blocks(self, _: object, inputs: tuple[Any, ...]) -> None:
        """Pad the tokens of a batch to whole token blocks, at most to the length that the model reads.

        Then a text has the same vector, bit by bit, in every batch of texts with as many blocks and with any number of
        threads: matrix products of whole tiles add in the same order. Documents may be added together or one by one.
        (The tokenizer's own `pad_to_multiple_of` refuses models whose length is no multiple.)
        """
        features = inputs[0]
        mask = features.get("attention_mask")
        if mask is None or mask.ndim != 2:
            return
        length = mask.shape[1]
        tokenizer = self._model.tokenizer
        missing = min(-length % _TOKEN_BLOCK, max(0, (self._model.max_seq_length or length) - length))
        sides = (missing, 0) if tokenizer.padding_side == "left" else (0, missing)
        padding = {"input_ids": tokenizer.pad_token_id or 0, "attention_mask": 0, "token_type_ids": 0}
        features |= {
            name: F.pad(features[name], sides, value=value) for name, value in padding.items() if name in features
        }
