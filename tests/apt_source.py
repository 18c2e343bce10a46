"""An apt source for tests: a small repository, signed with a key of its own, and served on the loopback.

Its package `code` stands in for VS Code. It does what the vendor's does as it is installed: it makes the link in
`/usr/bin`, removes `/usr/local/bin/code`, brings an apt source and a key, and has a set-uid helper.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import attrs

_PROGRAM = """#!/bin/sh
printf '%s\\n' "$@" >"$HOME/code-arguments"
"""
_ENTRY = "[Desktop Entry]\nType=Application\nName=Visual Studio Code\nExec=/usr/share/code/code %F\n"
_INSTALLED = """#!/bin/sh
set -e
# A network would show as a second interface.
test "$(grep -c : /proc/net/dev)" = 1
echo text >/dev/null
ln -sf /usr/share/code/bin/code /usr/bin/code
rm -f /usr/local/bin/code
echo 'deb [trusted=yes] http://127.0.0.1:9 stable main' >/etc/apt/sources.list.d/vendor.list
echo key >/etc/apt/trusted.gpg.d/vendor.gpg
"""


@attrs.frozen
class AptSource:
    """The repository.

    Args:
        top: its folder, with `dists/stable` and `pool`.
        key: the file of the key that signs it.
        home: gpg's folder.
    """

    top: Path
    key: Path
    home: Path

    @property
    def release(self) -> Path:
        """The folder with the signed list."""
        return self.top / "dists/stable"

    def line(self, url: str = "", *, key: Path | None = None) -> str:
        """The line of sources.list(5); by `file:` unless a URL is given."""
        return f"deb [signed-by={key or self.key}] {url or f'file:{self.top}'} stable main"

    def sign(self) -> None:
        """Write the lists anew from what is in `pool`, and sign them."""
        index = self.release / "main/binary-amd64/Packages"
        index.parent.mkdir(parents=True, exist_ok=True)
        index.write_text("".join(self._entry(path) for path in sorted((self.top / "pool").glob("*.deb"))))
        content = index.read_bytes()
        (self.release / "Release").write_text(
            "Suite: stable\nCodename: stable\nComponents: main\nArchitectures: amd64\n"
            "Date: Wed, 01 Jan 2025 00:00:00 UTC\n"
            f"SHA256:\n {hashlib.sha256(content).hexdigest()} {len(content)} main/binary-amd64/Packages\n"
        )
        _gpg(self.home, "--yes", "--output", str(self.release / "InRelease"), "--clearsign", f"{self.release}/Release")

    def _entry(self, path: Path) -> str:
        fields = subprocess.run(["dpkg-deb", "--field", str(path)], check=True, capture_output=True, text=True).stdout
        content = path.read_bytes()
        place = path.relative_to(self.top)
        return f"{fields}Filename: {place}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n\n"

    def add(self, name: str, version: str, depends: str = "", files: dict[str, str] | None = None) -> None:
        """Build a package into `pool`; `files` by their path, those of `DEBIAN` among them; scripts are executable."""
        tree = self.top.parent / f"tree-{name}-{version}"
        control = f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: test <test@example.test>\n"
        control += (f"Depends: {depends}\n" if depends else "") + "Description: a stand-in\n"
        for path, text in {"DEBIAN/control": control, **(files or {})}.items():
            file = tree / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            file.chmod(0o4755 if "sandbox" in path else 0o755 if text.startswith("#!") else 0o644)
        for folder in (tree, *(path for path in tree.rglob("*") if path.is_dir())):
            folder.chmod(0o755)
        target = self.top / f"pool/{name}_{version}_amd64.deb"
        target.parent.mkdir(exist_ok=True)
        command = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(target)]
        subprocess.run(command, check=True, capture_output=True)


@contextmanager
def apt_source(folder: Path, *, code_depends: str = "") -> Iterator[AptSource]:
    """A source with the packages `code` and a `bash` newer than Debian's; its gpg agent ends with the block.

    Args:
        folder: empty; the caller's.
        code_depends: what `code` depends on.
    """
    home = folder / "gpg"
    home.mkdir(mode=0o700)
    found = AptSource(folder / "repository", folder / "key.asc", home)
    found.top.mkdir()
    try:
        make_key(home, found.key)
        files = {
            "DEBIAN/postinst": _INSTALLED,
            "usr/share/code/bin/code": _PROGRAM,
            "usr/share/code/chrome-sandbox": "#!/bin/sh\n",
            "usr/share/applications/code.desktop": _ENTRY,
        }
        found.add("code", "1.0", code_depends, files)
        found.add("bash", "99.0", files={"usr/share/planted": "not Debian's\n"})
        found.sign()
        yield found
    finally:
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False, capture_output=True)


def make_key(home: Path, target: Path) -> None:
    """Make a signing key in gpg's folder, and write its public part, which is also what `--clearsign` takes first."""
    name = f"{target.stem}@example.test"
    _gpg(home, "--passphrase", "", "--quick-generate-key", name, "ed25519", "sign", "never")
    _gpg(home, "--yes", "--armor", "--output", str(target), "--export", name)


def _gpg(home: Path, *arguments: str) -> None:
    command = ["gpg", "--homedir", str(home), "--batch", "--pinentry-mode", "loopback", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0, done.stderr


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder over HTTP on the loopback; the URL."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
