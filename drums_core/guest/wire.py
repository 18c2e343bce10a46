"""HTTP/1.1 as the guest server speaks it: one request and one reply per connection."""

import dataclasses
import hashlib
import json
import os
import re
import socket
import urllib.parse

MAX_HEAD = 32 << 10
MAX_BODY = 256 << 20
_BODY_TIMEOUT_S = 30.0
_REPLY_TIMEOUT_S = 60.0
_CHUNK = 1 << 20
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    411: "Length Required",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


class HttpError(Exception):
    """Answers the request with this status and an OSWorld error object."""

    def __init__(self, status, message, **more):
        super().__init__(message)
        self.status = status
        self.more = more


@dataclasses.dataclass
class Request:
    """A request's head, and its body once it was read. Header names are in lower case."""

    method: str
    target: str
    headers: dict
    body: bytearray = dataclasses.field(default_factory=bytearray)

    @property
    def path(self):
        """The target without its query."""
        return urllib.parse.urlsplit(self.target).path

    @property
    def query(self):
        """What follows the target's question mark."""
        return urllib.parse.urlsplit(self.target).query

    def json(self):
        """The body as a JSON object.

        Raises:
            HttpError: it is none.
        """
        try:
            value = json.loads(self.body)
        except ValueError as error:
            raise HttpError(400, f"the body is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise HttpError(400, "the body is not a JSON object")
        return value

    def form(self):
        """The body's fields, of either kind of form; values are bytes."""
        kind = self.headers.get("content-type", "")
        if kind.lower().startswith("multipart/form-data"):
            return _multipart(self.body, kind)
        # Latin-1 there and back keeps every byte; given bytes, the parser encodes its results as ASCII.
        pairs = urllib.parse.parse_qsl(self.body.decode("latin-1"), keep_blank_values=True, encoding="latin-1")
        return {name.encode("latin-1").decode("utf-8", "replace"): value.encode("latin-1") for name, value in pairs}


@dataclasses.dataclass
class Reply:
    """A status, a type and a body: bytes, or an open regular file that is closed after it was sent."""

    body: bytes = b""
    status: int = 200
    content_type: str = "text/html; charset=utf-8"
    file: int | None = None
    headers: dict = dataclasses.field(default_factory=dict)


def json_reply(value, status=200):
    """A JSON reply; text that is no UTF-8 keeps its place as replacement characters."""
    return Reply(json.dumps(value).encode(), status, "application/json")


def error_reply(error):
    """What OSWorld's server answers to a request that failed: some of its routes have `message`, others `error`."""
    text = str(error)
    return json_reply({"status": "error", "message": text, "error": text, **error.more}, error.status)


def parse_head(data):
    """The request whose head is in `data`, and where its body begins; None while the head is not complete.

    Raises:
        HttpError: it is not a request's head.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > MAX_HEAD:
            raise HttpError(431, f"the head is longer than {MAX_HEAD} bytes")
        return None
    first, *lines = bytes(data[:end]).decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise HttpError(400, "the request line is malformed")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise HttpError(400, "a header line is malformed")
        headers[name.lower()] = value.strip()
    return Request(parts[0], parts[1], headers), end + 4


def read_body(connection, request, begun):
    """Reads the rest of the request's body from the connection into `request.body`.

    Args:
        begun: what came with the head.

    Raises:
        HttpError: the length is missing, wrong or too much.
        OSError: the connection broke.
    """
    if "transfer-encoding" in request.headers:
        raise HttpError(411, "the body needs a Content-Length")
    text = request.headers.get("content-length", "0")
    if not re.fullmatch(r"\d{1,12}", text):
        raise HttpError(400, "Content-Length is malformed")
    length = int(text)
    if length > MAX_BODY:
        raise HttpError(413, f"the body has {length} bytes, {MAX_BODY} at most are taken")
    connection.settimeout(_BODY_TIMEOUT_S)
    if request.headers.get("expect", "").lower() == "100-continue" and len(begun) < length:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = bytearray(begun[:length])
    while len(body) < length:
        data = connection.recv(min(_CHUNK, length - len(body)))
        if not data:
            raise HttpError(400, f"the body ended after {len(body)} of {length} bytes")
        body += data
    request.body = body


def encode(reply, prove=None):
    """All bytes of a reply whose body is in memory; `prove` as for `send_reply`."""
    chunk = _chunk(reply.body) if reply.body else b""
    return b"".join((_head(reply), chunk, _tail(reply, hashlib.sha256(reply.body), prove)))


def send_reply(connection, reply, prove=None):
    """Sends a reply, and closes its file.

    The proof comes after the body, so that it is about the bytes that were sent: the agent may write to a file while
    it is read.

    Args:
        prove: makes the proof from status, content type and the body's SHA-256 in hexadecimal; None for no proof.

    Raises:
        OSError: the connection broke, or the file could not be read: the client sees a reply cut short.
    """
    connection.settimeout(_REPLY_TIMEOUT_S)
    if reply.file is None:
        connection.sendall(encode(reply, prove))
        return
    digest = hashlib.sha256()
    with open(reply.file, "rb", buffering=0) as file:
        connection.sendall(_head(reply))
        # What grows meanwhile must still come to an end.
        remaining = os.fstat(file.fileno()).st_size
        while data := file.read(min(_CHUNK, remaining)):
            digest.update(data)
            connection.sendall(_chunk(data))
            remaining -= len(data)
    connection.sendall(_tail(reply, digest, prove))


def _head(reply):
    lines = [
        f"HTTP/1.1 {reply.status} {_REASONS.get(reply.status, 'Unknown')}",
        f"Content-Type: {reply.content_type}",
        "Transfer-Encoding: chunked",
        *(f"{name}: {value}" for name, value in reply.headers.items()),
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def _chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def _tail(reply, digest, prove):
    if prove is None:
        return b"0\r\n\r\n"
    return b"0\r\nX-Drums-Proof: %s\r\n\r\n" % prove(reply.status, reply.content_type, digest.hexdigest()).encode()


def close(connection):
    """Closes a connection so that the client gets the reply even when it is still sending."""
    try:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(0.5)
        # Data that is not read at a close makes the kernel reset the connection, and the reply with it.
        for _ in range(64):
            if not connection.recv(65536):
                break
    except OSError:
        pass
    finally:
        connection.close()


def _multipart(body, content_type):
    found = re.search(r'boundary=(?:"([^"]+)"|([^\s;]+))', content_type)
    if found is None:
        raise HttpError(400, "the form has no boundary")
    # What follows a delimiter tells it from content that merely begins like one.
    delimiter = re.compile(rb"(?:^|\r\n)--" + re.escape((found[1] or found[2]).encode("latin-1")) + rb"(--|\r\n)")
    fields = {}
    here = delimiter.search(body)
    while here is not None:
        if here[1] == b"--":
            return fields
        head_end = body.find(b"\r\n\r\n", here.end() - 2)
        # A part without content has its delimiter right after the head's empty line.
        here, start = delimiter.search(body, head_end + 2), here.end()
        if head_end < 0 or here is None:
            break
        name = re.search(rb'(?i)content-disposition:[^\r\n]*[;\s]name="([^"]*)"', body[start : head_end + 2])
        if name is not None:
            fields[name[1].decode("utf-8", "replace")] = bytes(body[head_end + 4 : here.start()])
    raise HttpError(400, "the form is cut short")
