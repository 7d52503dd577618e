"""How each exception is reported: HTTP status, error type and code, and the exit code of a command.

Standard library only, so that the command line reads the same table without importing FastAPI.
"""

from typing import NamedTuple

from stillroom import errors

FAILED = 1
"""Exit code: the command failed."""
WRONG_CALL = 2
"""Exit code: only a changed call can succeed (a wrong value, or the name of something that does not exist)."""

INVALID_REQUEST = "invalid_request_error"
_UNAVAILABLE = "service_unavailable_error"
_SERVER = "server_error"
_CONFLICT = "conflict_error"
_TIMEOUT = "timeout_error"

_PUBLIC_MESSAGES = {
    "internal_error": "internal error; the server's log has the details",
    "knowledge_base_gone": "this knowledge base was removed or replaced; the server's log has the details",
    "knowledge_base_busy": "another process is writing to this knowledge base; try again in a moment",
    "index_unavailable": "the server that holds the vectors cannot be reached or refuses; try again later, or search "
    "with mode sparse",
    "database_unavailable": "the database of this knowledge base cannot be reached or refuses; documents cannot be "
    "changed, and searches go on. Try again later",
    "storage_failed": "the disk of this knowledge base is full or failing; what was stored before is safe. The "
    "server's log has the details",
    "knowledge_base_damaged": "{part} of this knowledge base is damaged; the server's log and `stillroom verify` say "
    "what to do",
}
"""By code: the message of the HTTP reply where the exception's own may name paths of the server."""


class ErrorKind(NamedTuple):
    """How exceptions of one class are reported."""

    exception: type[BaseException]
    status: int
    type: str
    code: str
    exit_code: int = FAILED

    @property
    def public_message(self) -> str | None:
        """None: the exception's own message may be sent to clients."""
        return _PUBLIC_MESSAGES.get(self.code)


_KINDS = (
    # the first match counts, so a subclass comes before its base class
    ErrorKind(errors.PromptTooLongError, 400, INVALID_REQUEST, "context_length_exceeded", WRONG_CALL),
    ErrorKind(errors.UnknownDocumentError, 404, INVALID_REQUEST, "document_not_found", WRONG_CALL),
    ErrorKind(errors.UnknownRequestError, 404, INVALID_REQUEST, "request_not_found", WRONG_CALL),
    ErrorKind(errors.SeveralDocumentsError, 400, INVALID_REQUEST, "several_documents", WRONG_CALL),
    ErrorKind(errors.UsageError, 400, INVALID_REQUEST, "invalid_value", WRONG_CALL),
    ErrorKind(errors.TenantNotServedError, 403, "permission_error", "tenant_not_served", WRONG_CALL),
    ErrorKind(errors.ConfigError, 500, _SERVER, "internal_error", WRONG_CALL),
    ErrorKind(errors.ModelNotFoundError, 500, _SERVER, "internal_error", WRONG_CALL),
    ErrorKind(errors.EmptyKnowledgeBaseError, 409, _CONFLICT, "knowledge_base_empty"),
    ErrorKind(errors.NothingFoundError, 404, INVALID_REQUEST, "nothing_found"),
    ErrorKind(errors.ChangeCancelledError, 409, _CONFLICT, "upload_cancelled"),
    ErrorKind(errors.KnowledgeBaseNotFoundError, 503, _UNAVAILABLE, "knowledge_base_gone", WRONG_CALL),
    ErrorKind(errors.KnowledgeBaseBusyError, 503, _UNAVAILABLE, "knowledge_base_busy"),
    ErrorKind(errors.IndexUnavailableError, 503, _UNAVAILABLE, "index_unavailable"),
    ErrorKind(errors.DatabaseUnavailableError, 503, _UNAVAILABLE, "database_unavailable"),
    ErrorKind(errors.StorageError, 507, _SERVER, "storage_failed"),
    ErrorKind(errors.CorruptKnowledgeBaseError, 500, _SERVER, "knowledge_base_damaged"),
    ErrorKind(errors.OriginalGoneError, 410, INVALID_REQUEST, "file_gone"),
    ErrorKind(errors.ReaderUnavailableError, 503, _UNAVAILABLE, "reader_unavailable"),
    ErrorKind(errors.DocumentError, 422, INVALID_REQUEST, "document_unreadable"),
    ErrorKind(errors.EngineClosedError, 503, _UNAVAILABLE, "shutting_down"),
    ErrorKind(errors.DeviceLostError, 503, _UNAVAILABLE, "device_lost"),
    ErrorKind(errors.QueueFullError, 429, "rate_limit_error", "queue_full"),
    ErrorKind(errors.DeadlineExceededError, 504, _TIMEOUT, "deadline_exceeded"),
    ErrorKind(errors.RequestTimeoutError, 504, _TIMEOUT, "request_timeout"),
    ErrorKind(errors.EngineUnavailableError, 503, _UNAVAILABLE, "engine_unavailable"),
    ErrorKind(errors.EngineRefusedError, 502, "bad_gateway_error", "engine_refused"),
    ErrorKind(errors.WireError, 502, "bad_gateway_error", "engine_refused"),
    ErrorKind(errors.RequestAbortedError, 503, _UNAVAILABLE, "request_aborted"),
    ErrorKind(errors.NonFiniteError, 500, _SERVER, "non_finite"),
    ErrorKind(BaseException, 500, _SERVER, "internal_error"),
)


def kind_of(error: BaseException) -> ErrorKind:
    return next(kind for kind in _KINDS if isinstance(error, kind.exception))
