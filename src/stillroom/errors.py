"""All exceptions of Stillroom. Catch `StillroomError` for everything except bugs.

A message says what is wrong and what to do. Asserts check invariants of Stillroom, not input of users.
"""


class StillroomError(Exception):
    """Base class of all exceptions of Stillroom."""


class ConfigError(StillroomError):
    """A setting is unknown, has the wrong type or conflicts with another."""


class TenantNotServedError(ConfigError):
    """The engine serves one tenant only."""


class UsageError(StillroomError):
    """The call can never succeed as written; the message says what to change."""

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        """
        Args:
            param: the option or field that is at fault, if it is one.
        """
        super().__init__(message)
        self.param = param


class PromptTooLongError(UsageError):
    """The prompt and its answer exceed the model's context or the KV pool."""


class UnknownDocumentError(UsageError):
    """The knowledge base holds no document of that name."""


class SeveralDocumentsError(UsageError):
    """A name was given for one document, and several documents have it."""


class UnknownRequestError(UsageError):
    """The request log does not hold the question: it was never asked, or its record has expired."""


class FilterError(UsageError):
    """A filter cannot be parsed; the message names the character and what is missing."""


class ModelError(StillroomError):
    """A checkpoint could not be used."""


class ModelNotFoundError(ModelError):
    """The folder or hub name does not exist, or a file of the checkpoint is missing."""


class UnsupportedModelError(ModelError):
    """The checkpoint needs an unsupported architecture or feature."""


class KnowledgeBaseError(StillroomError):
    """A knowledge base could not be used."""


class KnowledgeBaseNotFoundError(KnowledgeBaseError):
    """There is no knowledge base at that path."""


class IncompatibleKnowledgeBaseError(KnowledgeBaseError):
    """The knowledge base was made with another format version, embedder or chunker."""


class CorruptKnowledgeBaseError(KnowledgeBaseError):
    """A file of the knowledge base is damaged."""

    def __init__(self, message: str, part: str = "a file") -> None:
        """
        Args:
            part: the file's name without its folder, for callers who may not see the server's paths.
        """
        super().__init__(message)
        self.part = part


class KnowledgeBaseBusyError(KnowledgeBaseError):
    """Another process is writing to the knowledge base."""


class ChangeCancelledError(KnowledgeBaseError):
    """A client, or the stop of the server, cancelled a change of documents between two commits."""


class StorageError(KnowledgeBaseError):
    """The disk of the knowledge base is full, failed or read-only. Earlier commits are kept."""


class IndexUnavailableError(KnowledgeBaseError):
    """The server of the dense index cannot be reached, or refuses; no search runs without it."""


class DatabaseUnavailableError(KnowledgeBaseError):
    """The PostgreSQL server of a knowledge base cannot be reached, or refuses; documents cannot be changed."""


class DatabaseRefusedError(DatabaseUnavailableError):
    """The PostgreSQL server of a knowledge base refuses the user or the password, or the user lacks a right."""


class EmptyKnowledgeBaseError(KnowledgeBaseError):
    """The knowledge base holds no documents yet."""


class NothingFoundError(KnowledgeBaseError):
    """No document matches a question."""


class DocumentError(StillroomError):
    """One document could not be read."""


class OriginalGoneError(DocumentError):
    """The file of an indexed document is not there any more, or its content is not what was indexed."""


class ReaderUnavailableError(DocumentError):
    """The reader of the document could not run; adding the document again can help."""


class EngineError(StillroomError):
    """Generation failed."""


class PreparedFullError(EngineError):
    """The budgets of prepared KV have no room for a part of a document (`prepare.disk_bytes`, `prepare.host_bytes`)."""


class EngineClosedError(EngineError):
    """The engine was shut down before the request ended."""


class QueueFullError(EngineError):
    """Too many requests are waiting; asking again later can help."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineUnavailableError(EngineError):
    """The remote engine cannot be reached, failed or is full; asking again later can help."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        """
        Args:
            retry_after_seconds: when its servers want requests again; None: they did not say.
        """
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineRefusedError(EngineError):
    """The remote engine refuses the key, the model or the request, or is not an OpenAI-compatible engine."""


class WireError(EngineError):
    """A message between a front and an engine cannot be read; both need the same version of Stillroom."""


class RequestTimeoutError(EngineError):
    """The request took longer than `runtime.request_timeout_s` twice: it was restarted once."""


class DeadlineExceededError(RequestTimeoutError):
    """The request's own deadline passed before its answer was complete. It is not restarted."""


class DeviceLostError(EngineError):
    """The model's device failed and was not recovered, or failed repeatedly; asking again later can help."""


class NonFiniteError(EngineError):
    """The model computed NaN or an infinity for this request. The kept KV that the request used is dropped."""

    def __init__(self) -> None:
        super().__init__(
            "the model computed NaN or an infinity, so there is no answer; the kept KV that it used is dropped. "
            "Ask again; if the error returns, check the model's files and runtime.dtype"
        )


class RequestAbortedError(EngineError):
    """The request was cancelled before it finished."""


class ServerError(StillroomError):
    """The HTTP server cannot listen on its address."""
