"""Errors as problem details (RFC 9457), and the errors that only the wire has."""

from __future__ import annotations

import json
import uuid
from typing import Any

import structlog

from drums.errors import DesktopFileNotFound, DrumsError, FileUnsuitable, GuestError

MEDIA_TYPE = "application/problem+json"
_log = structlog.get_logger("drums.http")


class MalformedJson(DrumsError):
    """The body is no JSON object."""

    code = "malformed_json"
    status = 400


class NotFound(DrumsError):
    """No such route."""

    code = "not_found"
    status = 404


class MethodNotAllowed(DrumsError):
    """The route does not take this method."""

    code = "method_not_allowed"
    status = 405


class PayloadTooLarge(DrumsError):
    """The body is larger than the route takes."""

    code = "payload_too_large"
    status = 413


class RequestTimeout(DrumsError):
    """The body did not come in time."""

    code = "request_timeout"
    status = 408


class IdempotencyConflict(DrumsError):
    """The key was used for another request."""

    code = "idempotency_conflict"
    status = 409


class ConnectionLimit(DrumsError):
    """As many clients are connected as the daemon takes."""

    code = "connection_limit"
    status = 503


class ShuttingDown(DrumsError):
    """The daemon stops; what was asked for was cancelled and has left nothing."""

    code = "shutting_down"
    status = 503


class InternalError(DrumsError):
    """A defect of drums; the daemon's log has the traceback under this `.incident`."""

    code = "internal_error"
    status = 500


def translated(error: BaseException) -> DrumsError:
    """The error that a client is told of; what nobody foresaw is logged, and named by an incident number."""
    if isinstance(error, DrumsError):
        return error
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return translated(error.exceptions[0])
    incident = uuid.uuid4().hex[:12]
    _log.error("a request failed unexpectedly", incident=incident, exc_info=error)
    return InternalError(
        f"{type(error).__name__} in the daemon", hint=f"see the daemon's log, incident {incident}", incident=incident
    )


def of_file(error: GuestError, path: str) -> DrumsError:
    """A guest server's refusal to read or write a file."""
    status = error.facts.get("guest_status")
    if status == 404:
        return DesktopFileNotFound(f"the desktop has no file {path!r}", path=path)
    if status in (400, 500):
        return FileUnsuitable(f"the desktop's file {path!r} cannot be used: {error.message}", path=path)
    return error


def problem(error: DrumsError) -> dict[str, Any]:
    """The document."""
    facts = {k: v for k, v in error.facts.items() if k not in ("errors", "reward")}
    document = {
        "type": "about:blank",
        "title": (type(error).__doc__ or "").partition("\n")[0].rstrip("."),
        "status": error.status,
        "detail": error.message,
        "code": error.code,
        "hint": error.hint,
        "facts": json.loads(json.dumps(facts, default=str)),
    }
    if "errors" in error.facts:
        document["errors"] = error.facts["errors"]
    return document
