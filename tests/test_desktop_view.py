"""A verifier's view of a desktop: the fake and the real one pass one suite; and who scores an episode, on real ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from desktops import Played, play, run, start_daemon, write
from requires import requires
from test_verifiers import install

from drums.errors import VerifierNotFound
from drums_core.host import Host
from drums_core.model import Task
from drums_core.testing import conformance_desktop
from drums_core.testing.conformance_desktop import CALLS, PREPARE, TARGET, desktop_suite
from drums_core.testing.conformance_verifiers import desktop_suite_state
from drums_core.testing.end_state import EndState, Entry, file, link
from drums_core.testing.fake_desktop import FakeDesktop, Unanswered

pytestmark = requires("root", "criu")

BROWSER = f"""
import base64, hashlib, http.server, json, struct
TARGET, CALLS = {TARGET!r}, {CALLS!r}

class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/json/list":
            url = "ws://127.0.0.1:9222/devtools/page/" + TARGET["id"]
            body = json.dumps([{{**TARGET, "webSocketDebuggerUrl": url}}]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        first, second = self.rfile.read(2)
        length = second & 127
        if length > 125:
            length = struct.unpack(">H" if length == 126 else ">Q", self.rfile.read(2 if length == 126 else 8))[0]
        mask = self.rfile.read(4)
        asked = json.loads(bytes(x ^ mask[i % 4] for i, x in enumerate(self.rfile.read(length))))
        self.frame({{"method": "An.event", "params": {{}}}})  # events come in between
        self.frame({{"id": asked["id"], **CALLS[asked["method"]], "padding": "x" * 70000}})
        self.close_connection = True

    def frame(self, document):
        data = json.dumps(document).encode()
        half = len(data) // 2  # in two parts, as a browser may
        for opcode, part in ((1, data[:half]), (0x80, data[half:])):
            size = bytes([len(part)]) if len(part) < 126 else b"\\x7f" + struct.pack(">Q", len(part))
            self.wfile.write(bytes([opcode]) + size + part)

server = http.server.HTTPServer(("127.0.0.1", 9222), Page)
open("/tmp/browser.ready", "w").close()
server.serve_forever()
"""
VERSION = "def which(desktop, task): return {score}\n"
Installer = Any


def task(verifier: str, function: str) -> Task:
    evaluator = {"func": "drums_verifier", "verifier": verifier, "function": function}
    return Task("0" * 36, "do", (), evaluator, "os", "0" * 64)


async def suite(host: Host) -> Mapping[str, Any]:
    """The suite's own module, as a verifier, in its sandboxed worker."""
    async with await host.create(task("suite", "desktop_suite"), ttl_s=600) as slot:
        await slot.wait_valid()
        await write(slot, "/tmp/prepare.sh", PREPARE)
        await run(slot, "sh /tmp/prepare.sh")
        await start_daemon(slot, "browser", BROWSER)
        await slot.step("DONE")
        reward = await slot.verify(strict=False)
        return {"score": reward.score, "error": reward.checker_error, **reward.provenance}


async def _changing(host: Host, site: Path, name: str) -> Mapping[str, Any]:
    async with await host.create(task(name, "which"), ttl_s=600) as slot:
        began = {r.name: r for r in await trio.to_thread.run_sync(host.plugin_records)}[name]
        (site / f"{name}.py").write_text(VERSION.format(score=0.75) + "# another length\n")
        old = await slot.verify()
        await slot.reset()
        new = await slot.verify()
        (site / f"{name}.py").unlink()
        now = {r.name: r for r in await trio.to_thread.run_sync(lambda: host.plugin_records(anew=True))}[name]
        kept = await slot.verify()  # of an episode that began before
        try:
            await slot.reset()
            gone = ""
        except VerifierNotFound as e:
            gone = e.message
    hashes = [r.provenance["checker"]["sha256"] for r in (old, new, kept)]
    return {"scores": [old.score, new.score, kept.score], "hashes": hashes, "began": began, "now": now, "gone": gone}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    """All scenarios on one host, with verifiers that are installed in a folder of this test's."""
    top = tmp_path_factory.mktemp("view")
    for folder in (top, *top.parents[:2]):
        folder.chmod(0o755)
    source = Path(conformance_desktop.__file__).read_text()
    install(top, "desktop-suite", {"suite": "desktop_suite"}, {"desktop_suite.py": source})
    install(top, "changing", {"changing": "changing"}, {"changing.py": VERSION.format(score=0.25)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(top)])

        async def changing(host: Host) -> Mapping[str, Any]:
            return await _changing(host, top, "changing")

        yield play({"suite": suite, "changing": changing})


def test_the_real_view_passes_the_suite(played: Played) -> None:
    """Every rule, in a worker, on a desktop that its user has prepared."""
    found = played["suite"]
    assert found["error"] is None
    evidence = found["findings"]["evidence"]
    assert {rule: fault for rule, fault in evidence.items() if fault} == {} and found["score"] == 1.0
    assert set(evidence) == set(desktop_suite(FakeDesktop(desktop_suite_state()), {}).evidence)


def test_an_episode_is_scored_by_what_it_began_with(played: Played) -> None:
    """A package that changes, or goes, meanwhile scores the next episode; the reward has the hash of what scored."""
    found = played["changing"]
    assert found["scores"] == [0.25, 0.75, 0.75]
    assert found["hashes"][0] == found["began"].sha256 != found["hashes"][1] == found["hashes"][2]
    assert found["began"].ok and (found["began"].distribution, found["began"].version) == ("changing", "1.0")
    assert "there is no module 'changing'" in found["now"].error
    assert "there is no module 'changing'" in found["gone"]


def test_nothing_is_left(played: Played) -> None:
    """Of the desktops."""
    assert played.left == []


# --- the fake


def test_the_fake_view_passes_the_suite() -> None:
    """The same rules, on the same state as recorded."""
    result = desktop_suite(FakeDesktop(desktop_suite_state()), {})
    assert {rule: fault for rule, fault in result.evidence.items() if fault} == {} and result.score == 1.0
    assert len(result.evidence) > 50


def with_file(state: EndState, path: str, entry: Entry) -> EndState:
    return attrs.evolve(state, files={**state.files, path: entry})


FAULTS: dict[str, tuple[Any, str]] = {
    "a file's content": (
        lambda s: attrs.evolve(s, files={**s.files, "suite/text": file("hello\n", mode=0o640)}),
        "a file is read",
    ),
    "a mode": (lambda s: attrs.evolve(s, files={**s.files, "suite/text": file("héllo\n")}), "stat has the mode"),
    "a link": (lambda s: attrs.evolve(s, files={**s.files, "suite/link": link("empty")}), "through a link"),
    "the clipboard": (lambda s: attrs.evolve(s, clipboard=None), "the clipboard"),
    "the browser": (lambda s: attrs.evolve(s, targets=[]), "a browser's pages"),
    "the last action": (lambda s: attrs.evolve(s, last_action=None), "the last action"),
}


@pytest.mark.parametrize(("plant", "rule"), FAULTS.values(), ids=FAULTS)
def test_the_suite_sees_a_planted_fault(plant: Any, rule: str) -> None:
    """One thing that is otherwise: the rule about it is broken, and the score is 0."""
    result = desktop_suite(FakeDesktop(plant(desktop_suite_state())), {})
    assert result.evidence[rule] and result.score == 0.0


def test_links_in_a_recorded_state_stay_in_it() -> None:
    """Round in circles, out at the top, and to what the machine that runs the test has."""
    state = EndState(
        "wrong",
        "f",
        0.0,
        files={"a": link("b"), "b": link("a"), "up": link("../../../../etc/passwd"), "/x": file("in")},
    )
    desktop = FakeDesktop(attrs.evolve(state, files={**state.files, "out": link("/x")}))
    assert not desktop.exists("a") and not desktop.exists("up") and desktop.read_file("out") == b"in"


def test_a_desktop_that_does_not_answer() -> None:
    """What is raised is no Exception; parts may be silent."""
    state = EndState("damaged", "f", "error", unanswered=["windows"], files={"a": file("x")})
    assert FakeDesktop(state).read_file("a") == b"x"
    with pytest.raises(Unanswered):
        FakeDesktop(state).windows()
    assert not issubclass(Unanswered, Exception)
    assert json.dumps(FakeDesktop(state).list_directory("~/"))
