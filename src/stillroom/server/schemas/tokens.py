"""Bodies of `POST /tokenize` and `POST /detokenize`, as vLLM's server has them."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from stillroom.server.schemas.replies import Reply
from stillroom.server.schemas.requests import MAX_MESSAGES, Body, ChatMessage

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]


class TokenizeRequest(Body):
    model: str | None = None
    """The model that answers, or the embedder."""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """A chat without a search, in the model's template."""
    add_special_tokens: bool | None = None
    """False: the tokens of the prompt alone. Of messages, the template has the special tokens."""
    return_token_strs: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send either prompt or messages")
        return self


class Tokenization(Reply):
    count: int
    max_model_len: int
    """Most tokens of a prompt and its answer, or most that the embedder reads."""
    tokens: list[int]
    token_strs: list[str] | None = None
    """Each token as the vocabulary writes it, if requested."""


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


class Detokenization(Reply):
    prompt: str
    """With special tokens."""
