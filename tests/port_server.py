"""What tests let listen on a port of a desktop, and which answers well or badly by the path. No test itself."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import socketserver
import struct
import sys
import time

LOG = "/tmp/port_server.log"


class Handler(http.server.BaseHTTPRequestHandler):
    """One request; all that it was sent goes into the log."""

    def do_GET(self) -> None:
        """Any request."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        told = {
            "method": self.command,
            "target": self.path,
            "headers": {k.lower(): v for k, v in self.headers.items()},
            "body": body.decode("latin-1"),
        }
        with open(LOG, "a") as log:
            log.write(json.dumps(told) + "\n")
        if "Sec-WebSocket-Key" in self.headers:
            self.websocket()
        elif self.path.startswith("/json"):
            here, out = "ws://localhost:9222/devtools/page/A1", "wss://evil.example/steal"
            self.reply([{"webSocketDebuggerUrl": here}, {"id": "B", "webSocketDebuggerUrl": out}])
        elif self.path == "/hang":
            time.sleep(3600)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            while True:
                self.wfile.write(b"x" * (1 << 16))
        elif self.path == "/headers":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(100_000)) + b"\r\n")
        elif self.path == "/nonsense":
            self.wfile.write(b"\x00\xff hello\r\n\r\n")
        elif self.path == "/redirect":
            self.send_response(307)
            for name, value in (("Location", "/v1/slots"), ("Set-Cookie", "a=b"), ("Clear-Site-Data", '"*"')):
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.reply(told, 201 if self.command == "POST" else 200)

    do_POST = do_PUT = do_DELETE = do_GET

    def reply(self, document: object, status: int = 200) -> None:
        """JSON."""
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    # --- a websocket

    def websocket(self) -> None:
        """Echo what comes, in two frames each; by the path, turn it away, or send without end."""
        if self.path == "/ws/none":
            self.reply({}, 404)
            return
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        self.close_connection = True
        while self.path == "/ws/endless":
            self.frame(0, 2, b"x" * (1 << 20))
            self.path = "/ws/more"
        while self.path == "/ws/more":
            self.frame(0, 0, b"x" * (1 << 20))
        while head := self.rfile.read(2):
            opcode, length = head[0] & 15, head[1] & 127
            if length > 125:
                length = struct.unpack(">H" if length == 126 else ">Q", self.rfile.read(2 if length == 126 else 8))[0]
            mask = self.rfile.read(4)
            data = bytes(x ^ mask[i % 4] for i, x in enumerate(self.rfile.read(length)))
            if opcode == 8:
                self.frame(0x80, 8, data)
                return
            if not self.message(opcode, data):
                return

    def message(self, opcode: int, data: bytes) -> bool:
        """One message; false ends the connection."""
        half = len(data) // 2
        self.frame(0, opcode, data[:half])
        self.frame(0x80, 0, data[half:])
        return True

    def frame(self, final: int, opcode: int, data: bytes) -> None:
        """One frame of a server's."""
        size = bytes([len(data)]) if len(data) < 126 else b"\x7f" + struct.pack(">Q", len(data))
        self.wfile.write(bytes([final | opcode]) + size + data)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """A thread per connection."""

    daemon_threads = True


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
