"""A stand-in for Google's sign-in, which tests let listen in a desktop. No test itself; the desktop's Python runs it.

    sign_in_page.py PORT LOG

`/drive` asks for an e-mail and then, a moment later, for a password, and leads to `/in` once it has both; `/stays` asks
the same and leads nowhere; `/in` asks nothing. What was sent goes into the log.
"""

from __future__ import annotations

import http.server
import sys

FORM = """<!doctype html><title>Sign in</title>
<form id=form method=post action=%s>
<div id=first><input type=email name=email><div id=identifierNext><div><button type=button>Next</button></div></div>
<input type=password name=hidden style="display: none"></div>
<div id=second style="display: none"><input type=password name=password>
<div id=passwordNext><div><button type=button>Next</button></div></div></div>
</form>
<script>
const at = id => document.getElementById(id);
document.querySelector("#identifierNext button").onclick = event => {
  if (!event.isTrusted || !document.querySelector("[name=email]").value) return;
  at("first").style.display = "none";
  setTimeout(() => { at("second").style.display = "block"; }, 700);
};
document.querySelector("#passwordNext button").onclick = event => { if (event.isTrusted) %s; };
</script>"""
PAGES = {
    "/drive": FORM % ("/in", "at('form').submit()"),
    "/stays": FORM % ("/in", "document.title = 'Wrong password'"),
    "/in": "<!doctype html><title>My Drive</title><p>Files</p>",
}


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        """A page."""
        content = PAGES.get(self.path, "").encode()
        self.send_response(200 if content else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        """The form."""
        with open(sys.argv[2], "ab") as log:
            log.write(self.rfile.read(int(self.headers["Content-Length"])) + b"\n")
        self.do_GET()


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
