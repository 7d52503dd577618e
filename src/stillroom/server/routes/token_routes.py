"""Routes of the tokenizers: `POST /tokenize` and `POST /detokenize` as vLLM has them, and `POST /v1/embeddings`."""

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Request

from stillroom.errors import UsageError
from stillroom.server.auth.tenants import stillroom_of
from stillroom.server.limits.workers import Workers
from stillroom.server.privacy import served_name
from stillroom.server.routes.chat import CHAT_ALIAS, check_continuation, conversation_options, read_question
from stillroom.server.routes.json_body import JsonRoute
from stillroom.server.routes.model_names import check_model, is_exactly
from stillroom.server.schemas.replies import Embedding, EmbeddingList, EmbeddingUsage
from stillroom.server.schemas.requests import EmbeddingRequest
from stillroom.server.schemas.tokens import Detokenization, DetokenizeRequest, Tokenization, TokenizeRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stillroom.rag.prompt_tokens import PromptTokens
    from stillroom.rag.stillroom import Stillroom
    from stillroom.retrieval.embedder import Embedder


class TokenRoutes:
    """Encodes, decodes and embeds in threads."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def router(self) -> APIRouter:
        router = APIRouter(route_class=JsonRoute)
        router.add_api_route(
            "/v1/embeddings", self.embeddings, methods=["POST"], response_model=EmbeddingList, tags=["search"]
        )
        router.add_api_route(
            "/tokenize", self.tokenize, methods=["POST"], response_model=Tokenization, tags=["answers"]
        )
        router.add_api_route(
            "/detokenize", self.detokenize, methods=["POST"], response_model=Detokenization, tags=["answers"]
        )
        return router

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Tokenization:
        """Encode a prompt, or the messages of a chat without a search, with the tokenizer of a served model.

        Without `model`, it needs a model here that reads prompts. The bundled reader and engines elsewhere read none
        here; name the embedder then.
        """
        stillroom = stillroom_of(request)
        if _means_embedder(body.model, stillroom):
            found = await self._workers.run(None, _embedder_tokens, stillroom, body)
        else:
            found = await self._prompt_tokens(stillroom, body)
        if not body.return_token_strs:
            found.token_strs = None
        return found

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Detokenization:
        """Decode tokens with the tokenizer of a served model. Without `model`, it needs what `/tokenize` needs."""
        stillroom = stillroom_of(request)
        if _means_embedder(body.model, stillroom):
            decode = (await self._embedder(stillroom)).text_of
        else:
            decode = (await stillroom.aprompt_tokenizer()).text_of
        return Detokenization(prompt=await self._workers.run(None, decode, body.tokens, keeps_special=True))

    async def embeddings(self, body: EmbeddingRequest, request: Request) -> EmbeddingList:
        """Embed texts, given as such or as tokens, with the knowledge base's embedder."""
        stillroom = stillroom_of(request)
        check_model(body.model, [stillroom.embedder_name])
        texts = await self._texts(stillroom, body)
        if not all(text.strip() for text in texts):
            raise UsageError("input holds an empty text; every text needs at least one word", param="input")
        vectors = await self._workers.run(self._workers.embeddings, stillroom.embed, texts)
        name = stillroom.embedder_name  # read now: another process may have changed it before this request
        vectors = _shortened(vectors, body.dimensions, served_name(name))
        data = [
            Embedding(index=index, embedding=_encode(vector, body.encoding_format))
            for index, vector in enumerate(vectors)
        ]
        return EmbeddingList(data=data, model=served_name(name), usage=EmbeddingUsage())

    async def _prompt_tokens(self, stillroom: "Stillroom", body: TokenizeRequest) -> Tokenization:
        tokenizer = await stillroom.aprompt_tokenizer()
        if body.messages is None:
            adds_special = body.add_special_tokens is not False
            found = await self._workers.run(None, tokenizer.tokens_of_prompt, body.prompt, adds_special=adds_special)
            return _tokenization(found)
        conversation = read_question(body.messages)
        check_continuation(body, conversation)
        if body.add_generation_prompt is False and not conversation.answer_start:
            raise UsageError(
                "add_generation_prompt: false needs a last message with role 'assistant'; leave it out: an answer "
                "always follows the other messages",
                param="add_generation_prompt",
            )
        options = conversation_options(conversation)
        return _tokenization(await self._workers.run(None, tokenizer.tokens_of_chat, conversation.question, options))

    async def _texts(self, stillroom: "Stillroom", body: EmbeddingRequest) -> list[str]:
        given = body.inputs
        if all(isinstance(one, str) for one in given):
            return [one for one in given if isinstance(one, str)]
        embedder = await self._embedder(stillroom)

        def decode() -> list[str]:
            return [one if isinstance(one, str) else embedder.text_of_exactly(one) for one in given]

        return await self._workers.run(self._workers.embeddings, decode)

    async def _embedder(self, stillroom: "Stillroom") -> "Embedder":
        return await self._workers.run(None, lambda: stillroom.embedder)  # the first use reads its files


def _means_embedder(model: str | None, stillroom: "Stillroom") -> bool:
    """Raises Refused: the request names a model that is not served."""
    embedder, generator = stillroom.embedder_name, stillroom.model_name
    if model != CHAT_ALIAS:
        check_model(model, [generator, embedder])
    return is_exactly(model, [embedder]) and not is_exactly(model, [generator])


def _embedder_tokens(stillroom: "Stillroom", body: TokenizeRequest) -> Tokenization:
    if body.prompt is None:
        raise UsageError("an embedder reads no messages; send prompt", param="messages")
    embedder = stillroom.embedder
    ids = embedder.token_ids(body.prompt, adds_special=body.add_special_tokens is not False)
    names = [embedder.tokenizer.id_to_token(one) or "" for one in ids]
    return Tokenization(count=len(ids), max_model_len=embedder.max_seq_length, tokens=ids, token_strs=names)


def _tokenization(found: "PromptTokens") -> Tokenization:
    return Tokenization(
        count=len(found.token_ids),
        max_model_len=found.max_model_len,
        tokens=list(found.token_ids),
        token_strs=list(found.names),
    )


def _shortened(vectors: "NDArray[np.float32]", dimensions: int | None, name: str) -> "NDArray[np.float32]":
    """Return the first `dimensions` numbers of each vector [n, dimension], scaled to length 1 again.

    Raises:
        UsageError: the vectors have fewer.
    """
    most = vectors.shape[1]
    if dimensions is None or dimensions == most:
        return vectors
    if dimensions > most:
        raise UsageError(
            f"dimensions={dimensions}, but {name!r} has {most}; ask for at most {most}, or leave it out",
            param="dimensions",
        )
    head = vectors[:, :dimensions]
    lengths = np.linalg.norm(head, axis=1, keepdims=True)
    shortened: NDArray[np.float32] = head / np.maximum(lengths, np.finfo(np.float32).tiny)
    return shortened


def _encode(vector: "NDArray[Any]", encoding_format: str) -> list[float] | str:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    numbers: list[float] = vector.tolist()
    return numbers
