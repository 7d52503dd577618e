"""How each exception is reported: HTTP status, error type and code, and the exit code of a command.

Standard library only, so that the command line reads the same table without importing FastAPI.
"""

from typing import NamedTuple

from stillroom.errors import (
    ChangeCancelledError,
    ConfigError,
    CorruptKnowledgeBaseError,
    DeadlineExceededError,
    DeviceLostError,
    EmptyKnowledgeBaseError,
    EngineClosedError,
    EngineRefusedError,
    EngineUnavailableError,
    IndexUnavailableError,
    KnowledgeBaseBusyError,
    KnowledgeBaseNotFoundError,
    ModelNotFoundError,
    NonFiniteError,
    NothingFoundError,
    PromptTooLongError,
    QueueFullError,
    RequestAbortedError,
    RequestTimeoutError,
    StillroomError,
    StorageError,
    UnknownDocumentError,
    UnknownRequestError,
    UsageError,
)

FAILED = 1
"""Exit code: the command failed."""
WRONG_CALL = 2
"""Exit code: only a changed call can succeed (a wrong value, or the name of something that does not exist)."""

INVALID_REQUEST = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"
_SERVER = "server_error"
_CONFLICT = "conflict_error"
_TIMEOUT = "timeout_error"
_INTERNAL = "internal error; the server's log has the details"


class ErrorKind(NamedTuple):
    """How exceptions of one class are reported."""

    exception: type[BaseException]
    status: int
    type: str
    code: str
    public_message: str | None = None
    """Message of the HTTP reply; the exception's own message, which may name paths of the server, goes to its log.
    None: the reply has the exception's message."""
    exit_code: int = FAILED


_KINDS = (
    # the first match counts, so a subclass stands before its base class
    ErrorKind(PromptTooLongError, 400, INVALID_REQUEST, "context_length_exceeded", exit_code=WRONG_CALL),
    ErrorKind(UnknownDocumentError, 404, INVALID_REQUEST, "document_not_found", exit_code=WRONG_CALL),
    ErrorKind(UnknownRequestError, 404, INVALID_REQUEST, "request_not_found", exit_code=WRONG_CALL),
    ErrorKind(UsageError, 400, INVALID_REQUEST, "invalid_value", exit_code=WRONG_CALL),
    ErrorKind(ConfigError, 500, _SERVER, "internal_error", _INTERNAL, WRONG_CALL),
    ErrorKind(ModelNotFoundError, 500, _SERVER, "internal_error", _INTERNAL, WRONG_CALL),
    ErrorKind(EmptyKnowledgeBaseError, 409, _CONFLICT, "knowledge_base_empty"),
    ErrorKind(NothingFoundError, 404, INVALID_REQUEST, "nothing_found"),
    ErrorKind(ChangeCancelledError, 409, _CONFLICT, "upload_cancelled"),
    ErrorKind(
        KnowledgeBaseNotFoundError,
        503,
        UNAVAILABLE,
        "knowledge_base_gone",
        "the folder of this knowledge base is gone; its operator finds the details in the server's log",
        WRONG_CALL,
    ),
    ErrorKind(
        KnowledgeBaseBusyError,
        503,
        UNAVAILABLE,
        "knowledge_base_busy",
        "another process is writing to this knowledge base; try again in a moment",
    ),
    ErrorKind(
        IndexUnavailableError,
        503,
        UNAVAILABLE,
        "index_unavailable",
        "the server that holds the vectors cannot be reached or refuses; try again later, or search with mode sparse",
    ),
    ErrorKind(
        StorageError,
        507,
        _SERVER,
        "storage_failed",
        "the disk of this knowledge base is full or failing; what was stored before is safe. Its operator finds the "
        "details in the server's log",
    ),
    ErrorKind(
        CorruptKnowledgeBaseError,
        500,
        _SERVER,
        "knowledge_base_damaged",
        "{part} of this knowledge base is damaged; its operator finds what to do in the server's log, and with "
        "`stillroom verify`",
    ),
    ErrorKind(EngineClosedError, 503, UNAVAILABLE, "shutting_down"),
    ErrorKind(DeviceLostError, 503, UNAVAILABLE, "device_lost"),
    ErrorKind(QueueFullError, 429, "rate_limit_error", "queue_full"),
    ErrorKind(DeadlineExceededError, 504, _TIMEOUT, "deadline_exceeded"),
    ErrorKind(RequestTimeoutError, 504, _TIMEOUT, "request_timeout"),
    ErrorKind(EngineUnavailableError, 503, UNAVAILABLE, "engine_unavailable"),
    ErrorKind(EngineRefusedError, 502, "bad_gateway_error", "engine_refused"),
    ErrorKind(RequestAbortedError, 503, UNAVAILABLE, "request_aborted"),
    ErrorKind(NonFiniteError, 500, _SERVER, "non_finite"),
    ErrorKind(StillroomError, 500, _SERVER, "internal_error", _INTERNAL),
)
_OTHER = ErrorKind(BaseException, 500, _SERVER, "internal_error", _INTERNAL)


def kind_of(error: BaseException) -> ErrorKind:
    return next((kind for kind in _KINDS if isinstance(error, kind.exception)), _OTHER)
