"""The whole exception tree. Catch `StillroomError` for everything that is not a bug in Stillroom.

    StillroomError
    |-- ConfigError                     a setting is unknown or impossible
    |-- UsageError                      a call or request that can never work as written
    |   |-- PromptTooLongError          the prompt and its answer do not fit the model
    |   |-- UnknownDocumentError        no such document in the knowledge base
    |   |-- UnknownRequestError         no such question is remembered
    |   `-- FilterError                 a filter cannot be read, or asks for fields that no document has
    |-- ModelError                      a checkpoint could not be used
    |   |-- ModelNotFoundError          no such folder, hub name or file
    |   `-- UnsupportedModelError       the checkpoint needs something that is not implemented
    |-- KnowledgeBaseError              a knowledge base could not be used
    |   |-- KnowledgeBaseNotFoundError  there is none at that path
    |   |-- IncompatibleKnowledgeBaseError  other format version, embedder or chunker
    |   |-- CorruptKnowledgeBaseError   a file of it is damaged
    |   |-- KnowledgeBaseBusyError      another process is writing to it
    |   |-- ChangeCancelledError        an upload was cancelled before it was complete
    |   |-- StorageError                its disk is full, fails or may not be written
    |   |-- IndexUnavailableError       the server that holds its dense index cannot be reached, or refuses
    |   |-- EmptyKnowledgeBaseError     it holds no documents yet
    |   `-- NothingFoundError           no document was found for a question
    |-- DocumentError                   one document could not be read; the others go on
    |   `-- ReaderUnavailableError      nothing could read it just now; another time it may be read
    |-- EngineError                     generation failed
    |   |-- EngineClosedError           the engine was shut down
    |   |-- QueueFullError              as many requests wait already as may
    |   |-- EngineUnavailableError      the engine elsewhere cannot be reached, or has no room now
    |   |-- EngineRefusedError          the engine elsewhere refuses the key, the model or the request
    |   |-- RequestTimeoutError         the request took too long, twice
    |   |   `-- DeadlineExceededError   it took longer than it said that it may
    |   |-- NonFiniteError              the model computed NaN or an infinity; nothing of the answer is kept
    |   |-- DeviceLostError             the device has failed, and could not be recovered for this request
    |   `-- RequestAbortedError         the request was cancelled before it finished
    `-- ServerError                     the HTTP server cannot listen

A message says what is wrong and what to do about it. Asserts guard our own logic and are not errors of a user.
"""


class StillroomError(Exception):
    """Root of everything Stillroom raises on purpose."""


class ConfigError(StillroomError):
    """A setting is unknown, of the wrong type or impossible together with another."""


class UsageError(StillroomError):
    """The call can never work as written; the message says what to change."""


class PromptTooLongError(UsageError):
    """The prompt plus the tokens asked for exceed what the model or the KV pool can hold."""


class UnknownDocumentError(UsageError):
    """The knowledge base holds no document of that name."""


class UnknownRequestError(UsageError):
    """The question was never asked here, or so long ago that others have taken its place."""


class FilterError(UsageError):
    """A filter cannot be read; the message says at which character, and what is missing."""


class ModelError(StillroomError):
    """A checkpoint could not be used."""


class ModelNotFoundError(ModelError):
    """There is no such folder or hub name, or a file of the checkpoint is missing."""


class UnsupportedModelError(ModelError):
    """The checkpoint needs an architecture or a feature that Stillroom does not have."""


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
    """A change of documents was cancelled between two of its pieces: by a client, or because the server stops."""


class StorageError(KnowledgeBaseError):
    """The disk of the knowledge base is full, fails or may not be written. What was committed before is kept."""


class IndexUnavailableError(KnowledgeBaseError):
    """The server that holds the dense index cannot be reached or refuses; nothing is answered from less."""


class EmptyKnowledgeBaseError(KnowledgeBaseError):
    """The knowledge base holds no documents yet."""


class NothingFoundError(KnowledgeBaseError):
    """No document was found for a question, so there is nothing to answer from."""


class DocumentError(StillroomError):
    """One document could not be read."""


class ReaderUnavailableError(DocumentError):
    """Nothing could read the document just now, which says nothing about it; adding it again can help."""


class EngineError(StillroomError):
    """Generation failed."""


class EngineClosedError(EngineError):
    """The engine was shut down while, or before, the request ran."""


class QueueFullError(EngineError):
    """As many requests wait as `runtime.max_waiting` allows; asking again later can help."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineUnavailableError(EngineError):
    """The engine elsewhere cannot be reached, failed, or has no room now; asking again later can help."""


class EngineRefusedError(EngineError):
    """The engine elsewhere refuses the key, the model or the request, or is no such engine."""


class RequestTimeoutError(EngineError):
    """The request took longer than `runtime.request_timeout_s`, and again after it was started anew."""


class DeadlineExceededError(RequestTimeoutError):
    """The request's own deadline passed before its answer was complete. It is not started again."""


class DeviceLostError(EngineError):
    """The device that the model runs on has failed. Requests end with it only where the device could not be recovered,
    or failed again and again while they ran; asking again later can help."""


class NonFiniteError(EngineError):
    """The model computed NaN or an infinity for this request. The kept KV that the request used is dropped."""

    def __init__(self) -> None:
        super().__init__(
            "the model computed numbers that are not finite, so there is no answer; kept KV that was used is dropped. "
            "Ask again; if this error comes back, check the model's files and runtime.dtype"
        )


class RequestAbortedError(EngineError):
    """The request was cancelled before it finished."""


class ServerError(StillroomError):
    """The HTTP server cannot listen where it was told to."""
