"""A tiny X client: the screen's pixels with the pointer among them, the screen's size, the pointer's place.

The display belongs to the user, so the agent may replace it with a program of its own that sends what it likes and as
slowly as it likes. Hence nothing here trusts a length, everything has a deadline, and no C library parses a reply. Each
question uses a connection of its own: none is open while a desktop is frozen.

Sources: the X protocol's encoding (x11protocol), "MIT-SHM - The MIT Shared Memory Extension", "The XFIXES Extension".
"""

import socket
import struct
import time

from guest import png, shared_memory
from PIL import Image

_TIMEOUT_S = 10.0
_MAX_REPLY = 128 << 20
_QUERY_POINTER, _QUERY_EXTENSION, _GET_GEOMETRY, _GRAB_SERVER = 38, 98, 14, 36
_FIXES_QUERY_VERSION, _FIXES_GET_CURSOR_IMAGE = 0, 4
_SHM_ATTACH, _SHM_GET_IMAGE = 1, 4
_Z_PIXMAP, _ALL_PLANES = 2, 0xFFFFFFFF
_TALLEST = 32767  # rows: their numbers are signed
_STRIP = 32  # rows: what is fetched, turned and compressed at once stays in the processor's cache


class DisplayError(Exception):
    """The display is not there, or does not answer as a display does."""


class Display:
    """One connection; a context manager."""

    def __init__(self, path="/tmp/.X11-unix/X0"):
        self._deadline = time.monotonic() + _TIMEOUT_S
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(_TIMEOUT_S)
            self._socket.connect(path)
            self._greet()
        except OSError as error:
            self._socket.close()
            raise DisplayError(f"the display does not answer: {error}") from error
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def size(self):
        """Width and height of the root window, in pixels."""
        reply, _ = self._ask(struct.pack("<BxHI", _GET_GEOMETRY, 2, self._root))
        return struct.unpack_from("<HH", reply, 16)

    def pointer(self):
        """Where the pointer is: x and y."""
        reply, _ = self._ask(struct.pack("<BxHI", _QUERY_POINTER, 2, self._root))
        return struct.unpack_from("<hh", reply, 16)

    def picture(self):
        """The root window with the pointer: width, height, and an iterator of its strips as RGB images, from the top.

        Strips share one piece of memory: fresh pages for the whole screen cost more than its pixels do. Until the
        connection ends the display serves nobody else, so that all strips are of one moment.
        """
        width, height = self.size()
        if not 0 < width * height * 4 <= _MAX_REPLY or height > _TALLEST:
            raise DisplayError(f"the display says that it has {width} by {height} pixels")
        major = self._extension(b"MIT-SHM")
        if major is None:
            raise DisplayError("the display has no shared memory (MIT-SHM)")
        return width, height, self._strips(major, width, height)

    def _strips(self, major, width, height):
        self._tell(struct.pack("<BxH", _GRAB_SERVER, 1))
        cursor = self._cursor()
        with shared_memory.segment(width * _STRIP * 4) as (number, pixels):
            # The connection's first resource; the display forgets it as the connection ends.
            self._tell(struct.pack("<BBHIIBxxx", major, _SHM_ATTACH, 4, self._resources, number, 0))
            for top in range(0, height, _STRIP):
                rows = min(_STRIP, height - top)
                area = struct.pack("<IhhHHI", self._root, 0, top, width, rows, _ALL_PLANES)
                reply, _ = self._ask(
                    struct.pack("<BBH", major, _SHM_GET_IMAGE, 8)
                    + area
                    + struct.pack("<BxxxII", _Z_PIXMAP, self._resources, 0)
                )
                size = struct.unpack_from("<I", reply, 12)[0]
                if reply[1] not in (24, 32) or size != width * rows * 4:
                    raise DisplayError(
                        f"the display has depth {reply[1]} and sent {size} bytes, not depth 24 of 4 each"
                    )
                strip = Image.frombuffer("RGB", (width, rows), pixels, "raw", "BGRX", 0, 1)
                if cursor is not None:
                    shape, (x, y) = cursor
                    strip.paste(shape, (x, y - top), shape)
                yield strip

    def _cursor(self):
        """The pointer's image and the place of its top left corner; None when the display cannot tell."""
        major = self._extension(b"XFIXES")
        if major is None:
            return None
        self._ask(struct.pack("<BBHII", major, _FIXES_QUERY_VERSION, 3, 4, 0))
        reply, pixels = self._ask(struct.pack("<BBH", major, _FIXES_GET_CURSOR_IMAGE, 1))
        x, y, width, height, hot_x, hot_y = struct.unpack_from("<hhHHHH", reply, 8)
        if width * height == 0 or len(pixels) != width * height * 4:
            return None
        # The small "a" is for colours that are multiplied by their opacity already.
        shape = Image.frombytes("RGBA", (width, height), bytes(pixels), "raw", "BGRa")
        return shape, (x - hot_x, y - hot_y)

    # --- the protocol ---

    def _extension(self, name):
        """The number of an extension's requests; None when the display does not have it."""
        padded = name.ljust(8, b"\0")
        reply, _ = self._ask(struct.pack("<BxHHxx", _QUERY_EXTENSION, 4, len(name)) + padded)
        return reply[9] if reply[8] else None

    def _greet(self):
        self._socket.sendall(struct.pack("<BxHHHHxx", ord("l"), 11, 0, 0, 0))
        status, _, words = struct.unpack("<BBxxxxH", self._read(8))
        body = self._read(words * 4)
        if status != 1:
            raise DisplayError(f"the display refuses: {bytes(body)[:200]!r}")
        try:
            self._resources = struct.unpack_from("<I", body, 4)[0]
            vendor, formats = struct.unpack_from("<H", body, 16)[0], body[21]
            self._root = struct.unpack_from("<I", body, 32 + (vendor + 3) // 4 * 4 + formats * 8)[0]
        except (struct.error, IndexError) as error:
            raise DisplayError("the display's greeting is cut short") from error

    def _tell(self, request):
        """Sends a request that has no reply."""
        try:
            self._socket.sendall(request)
        except OSError as error:
            raise DisplayError(f"the display does not answer: {error}") from error

    def _ask(self, request):
        """Sends a request and returns its reply: 32 bytes, and what follows them."""
        self._tell(request)
        try:
            while True:
                head = self._read(32)
                if head[0] == 0:
                    raise DisplayError(f"the display refuses request {request[0]}: error {head[1]}")
                if head[0] == 1:
                    return head, self._read(struct.unpack_from("<I", head, 4)[0] * 4)
                # Anything else is an event; none was asked for, but a change of the keyboard is told to everybody.
        except OSError as error:
            raise DisplayError(f"the display does not answer: {error}") from error

    def _read(self, size):
        if size > _MAX_REPLY:
            raise DisplayError(f"the display announces {size} bytes")
        data = bytearray(size)
        view = memoryview(data)
        while view:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise DisplayError(f"the display took longer than {_TIMEOUT_S:g} s")
            self._socket.settimeout(remaining)
            count = self._socket.recv_into(view)
            if count == 0:
                raise DisplayError("the display closed the connection")
            view = view[count:]
        return data


def screenshot_png():
    """The screen as PNG bytes."""
    with Display() as display:
        return png.encode(*display.picture())
