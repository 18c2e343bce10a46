"""Signed requests and proven replies: each side shows that it knows the desktop's secret, which never travels.

The agent may listen on the server's port while the server is dead, so a request must not teach whoever reads it how to
make another, and a reply must show who made it. The host's half is drums_core/guest_client.py; the two must agree to
the byte.

A request has three header fields besides what it says:

    X-Drums-Nonce        32 lower-case hexadecimal digits, new for each request
    X-Drums-Body-SHA256  the body's SHA-256, in lower-case hexadecimal
    X-Drums-Signature    HMAC("drums-request", nonce, method, target, content type, body's SHA-256)

The reply to it ends with one trailer field:

    X-Drums-Proof        HMAC("drums-reply", nonce, status, content type, body's SHA-256)

HMAC is HMAC-SHA256 in lower-case hexadecimal. Its key is the secret file's 64 bytes; its message is each field as a
netstring, one after the other: the length in bytes as decimal digits, a colon, the bytes, a comma. Text is latin-1, the
target is what the request line says, the status is three digits, and a content type that is not there is empty. So a
reply's message begins `11:drums-reply,32:`.

The body's digest is a field of its own so that the head can be judged before the body was read. A request that was not
verified, head and body, gets a reply without a proof: nothing here signs for strangers.
"""

import collections
import dataclasses
import hashlib
import hmac
import re

from guest.wire import HttpError

_NONCES_REMEMBERED = 4096


def signature(secret, nonce, method, target, content_type, body_sha256):
    """A request's signature; the secret is bytes, all else text."""
    return _sign(secret, "drums-request", nonce, method, target, content_type, body_sha256)


def proof(secret, nonce, status, content_type, body_sha256):
    """A reply's proof; the secret is bytes, the status a number, all else text."""
    return _sign(secret, "drums-reply", nonce, str(status), content_type, body_sha256)


def _sign(secret, *fields):
    encoded = [field.encode("latin-1") for field in fields]
    return hmac.digest(secret, b"".join(b"%d:%s," % (len(field), field) for field in encoded), "sha256").hex()


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What is left to do for a request whose head was verified.

    It keeps the secret that the head was verified with: the reply must be proven with that one.
    """

    secret: bytes
    nonce: str
    body_sha256: str

    def check_body(self, body):
        """Compares the body with the digest that the head's signature covers.

        Raises:
            HttpError: it is another body.
        """
        if hashlib.sha256(body).hexdigest() != self.body_sha256:
            raise HttpError(401, "the body is not the one that was signed")

    def proof(self, status, content_type, body_sha256):
        """The proof of a reply to the request."""
        return proof(self.secret, self.nonce, status, content_type, body_sha256)


class Gate:
    """Lets each signed request in once; single-threaded.

    A nonce is remembered for the next 4096 requests. Only those of verified requests are: a stranger cannot have any
    forgotten.

    Args:
        secret: reads the desktop's secret.
    """

    def __init__(self, secret):
        self._secret = secret
        self._nonces = collections.OrderedDict()

    def admit(self, request):
        """Verifies a request's head.

        Raises:
            HttpError: it is not signed with the secret, or was let in before.
        """
        secret = self._secret()
        nonce = request.headers.get("x-drums-nonce", "")
        body_sha256 = request.headers.get("x-drums-body-sha256", "")
        given = request.headers.get("x-drums-signature", "").encode("latin-1")
        content_type = request.headers.get("content-type", "")
        wanted = signature(secret, nonce, request.method, request.target, content_type, body_sha256)
        if not hmac.compare_digest(given, wanted.encode()) or not re.fullmatch("[0-9a-f]{32}", nonce):
            raise HttpError(401, "the request is not signed with this desktop's secret")
        if nonce in self._nonces:
            raise HttpError(401, "the request was made before")
        self._nonces[nonce] = None
        if len(self._nonces) > _NONCES_REMEMBERED:
            self._nonces.popitem(last=False)
        return Exchange(secret, nonce, body_sha256)
