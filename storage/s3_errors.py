"""What the errors of the S3 client mean: try again, a lost condition, or one of ours."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

import aiohttp
from botocore.exceptions import (
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from storage.stall import StallError
from storage.store import ClockError, CorruptError, NotFoundError, StoreError, StoreUnavailableError

TRANSPORT = (HTTPClientError, BotoConnectionError, IncompleteReadError, aiohttp.ClientError, TimeoutError, OSError)
"""Whatever a broken connection is called, by the client or by the HTTP library below it."""

DIGEST_CODES = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
AGAIN_CODES = DIGEST_CODES | {
    "SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ConditionalRequestConflict",
    "OperationAborted", "Throttling", "ThrottlingException", "RequestTimeoutException", "IncompleteBody",
}  # fmt: skip
"""The server was busy, or what arrived there is not what was sent."""
MISSING_CODES = {"NoSuchKey", "404", "NotFound", "NoSuchUpload"}
SKEW_CODES = {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
SKEW_S = 300.0
"""A refused request is put down to the clock from here on; S3 itself allows 15 minutes."""


class AgainError(Exception):
    """An attempt failed in a way that the next one may not; `corrupt` says that the bytes themselves were wrong."""

    def __init__(self, text: str, *, corrupt: bool = False) -> None:
        super().__init__(text)
        self.corrupt = corrupt


class PreconditionError(Exception):
    """412, or 404 to IfMatch: somebody else's object is there, or none; or our own, whose reply was lost."""


def gave_up(
    url: str, what: str, key: str, cause: str, tries: int, *, corrupt: bool = False, unsure: bool = False
) -> StoreError:
    """The error after the last attempt. `unsure`: a conditional write, whose outcome nobody knows."""
    text = f"{url}: {what} {key}: {cause}; gave up after {tries} attempts"
    if corrupt:
        return CorruptError(text, key=key, hint="the stored object is damaged; use an older checkpoint or a copy")
    if unsure:
        text += "; it may or may not have been stored"
    return StoreUnavailableError(text, key=key, hint="check that the store runs and can be reached, then try again")


def explain(url: str, what: str, key: str, error: Exception, *, moved_bytes: int = 0) -> Exception:
    """AgainError, PreconditionError, or the StoreError to raise for an error of the client's."""
    if isinstance(error, ClientError):
        return _explain_answer(url, what, key, error)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        return StoreUnavailableError(f"{url}: no credentials for S3", key=key, hint=hint)
    if isinstance(error, StallError):
        return AgainError(f"no answer: {error}, after {moved_bytes} bytes")
    if isinstance(error, TRANSPORT):
        return AgainError(f"{type(error).__name__}: {str(error)[:300] or 'no answer in time'}")
    return StoreUnavailableError(f"{url}: {what} {key}: {error}", key=key, hint="check the store URL")


def code_of(error: ClientError) -> str:
    """The code of a server's refusal, "" if it gave none."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _explain_answer(url: str, what: str, key: str, error: ClientError) -> Exception:
    code = code_of(error)
    said = str(error.response.get("Error", {}).get("Message", ""))[:300]
    metadata = error.response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    text = f"{url}: {what} {key}: {code} {said} (HTTP {status})"
    if status == 412 or code == "PreconditionFailed":
        return PreconditionError(text)
    if code == "NoSuchBucket":
        return StoreUnavailableError(f"{url}: there is no such bucket", key=key, hint="create it")
    if code in MISSING_CODES or status == 404:
        return PreconditionError(text) if what == "put" else NotFoundError(f"{url}: there is no {key}", key=key)
    if status in (400, 401, 403) and (wrong := wrong_clock(url, key, code, metadata.get("HTTPHeaders", {}))):
        return wrong
    if code in AGAIN_CODES or status in (408, 409, 429) or (status >= 500 and status != 501):
        return AgainError(f"{code} {said} (HTTP {status})")
    hint = "check the credentials and their rights" if status in (401, 403) else "does this server support it?"
    return StoreUnavailableError(text, key=key, hint=hint)


def wrong_clock(url: str, key: str, code: str, headers: Mapping[str, str]) -> ClockError | None:
    """The error if a refusal is due to this machine's clock: its own code, or the server's is far from ours."""
    ahead_s = 0.0
    with contextlib.suppress(ValueError, TypeError):
        ahead_s = time.time() - parsedate_to_datetime(str(headers.get("date"))).timestamp()
    if code not in SKEW_CODES and abs(ahead_s) < SKEW_S:
        return None
    return ClockError(url, key, ahead_s if abs(ahead_s) >= 60 else 0.0)
