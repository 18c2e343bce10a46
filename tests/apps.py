"""The applications of the `osworld` image for tests: how each is opened on a document, and how a reaction shows.

A reaction shows outside the application: in a file, over CDP or HTTP, in the settings. `state` prints it, `react` makes
it change by input alone, and ends when it has changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from desktops import run

from drums_core.model import SetupStep
from drums_core.slot import Slot

ROOT = Path(__file__).parents[1]
OSWORLD = Path(os.environ.get("DRUMS_OSWORLD") or ROOT.parent / "shared" / "osworld")
_BASE = "https://huggingface.co/datasets/xlangai/ubuntu_osworld_file_cache/resolve/main"
_SHEET = "libreoffice_calc/1273e544-688f-496b-8d89-3e0f40aa0606/NetIncome.xlsx"
_LETTER = "libreoffice_writer/0e47de2a-32e0-456c-a366-8c607ef7a9d2/LibreOffice_Open_Source_Word_Processing.docx"
_SLIDES = "libreoffice_impress/a434992a-89df-4577-925c-0c58b747f0f4/16_2.pptx"
_WAIT = 'until_() { for i in $(seq 400); do eval "$1" && return 0; sleep 0.1; done; echo "never: $1"; return 1; }\n'
# The pixels of a window as the application drew them, whatever lies over it.
_PIXELS = """
import hashlib, sys
from Xlib import X, display
d = display.Display()
w = d.create_resource_object("window", int(sys.argv[1], 0))
g = w.get_geometry()
print(hashlib.sha256(w.get_image(0, 0, g.width, g.height, X.ZPixmap, 0xFFFFFFFF).data).hexdigest())
"""


@attrs.frozen(kw_only=True)
class App:
    """One application with a document open.

    Args:
        files: what is downloaded first: path in the desktop -> path in the mirror.
        prepare: a script that makes what the mirror does not have.
        opens: the task's steps that open it.
        title: a part of its window's title, as a regular expression of grep.
        ready: a command that succeeds once it is there besides.
        state: a script that prints what a reaction changes.
        react: a script that gives it input until the state changes.
        still: whether its window rests; a film does not.
    """

    files: Mapping[str, str] = attrs.field(factory=dict)
    prepare: str = "true"
    opens: Sequence[SetupStep]
    title: str
    ready: str = "true"
    state: str
    react: str
    still: bool = True

    def steps(self) -> tuple[SetupStep, ...]:
        """The set-up of a task with it."""
        files = [{"url": f"{_BASE}/{source}", "path": f"/home/user/{path}"} for path, source in self.files.items()]
        download = [_step("download", files=files)] if files else []
        return (*download, _step("execute", command=self.prepare, shell=True), *self.opens)

    async def wait_open(self, slot: Slot) -> None:
        """Wait until its window is there and rests."""
        await run(slot, f"{_WAIT}until_ 'wmctrl -l | grep -q -- \"{self.title}\"' && until_ '{self.ready}'")
        if not self.still:
            return
        same, last = 0, ""
        for _ in range(60):
            now = await self.pixels(slot)
            same = same + 1 if now == last else 0
            last = now
            if same == 4:
                return
            await run(slot, "sleep 0.4")
        raise AssertionError(f"window {self.title!r} does not come to rest")

    async def pixels(self, slot: Slot) -> str:
        """A hash of its window's pixels."""
        # The whole list is lost where one of its windows closes meanwhile.
        found = f'until_ \'window=$(wmctrl -l | grep -- "{self.title}" | head -n 1 | cut -d" " -f1); [ "$window" ]\''
        script = f'{_WAIT}{found}\npython3 -c "$1" "$window"'
        result = await slot.execute(["sh", "-c", script, "-", _PIXELS])
        assert result.returncode == 0, result
        return result.output

    async def reaction(self, slot: Slot) -> tuple[str, str]:
        """Have it react; the state before and afterwards."""
        before = await run(slot, self.state)
        focus = f'wmctrl -i -a $(wmctrl -l | grep -- "{self.title}" | head -n 1 | cut -d" " -f1)\nsleep 0.5\n'
        changed = 'until_ \'[ "$(state)" != "$was" ]\''
        script = f"{_WAIT}state() {{\n{self.state}\n}}\nwas=$(state)\n{focus}{self.react}\n{changed}"
        await run(slot, script)
        return before, await run(slot, self.state)


def _step(kind: str, **parameters: Any) -> SetupStep:
    return SetupStep(kind, parameters)


def _opened(path: str) -> list[SetupStep]:
    return [_step("open", path=f"/home/user/{path}")]


def _launched(*command: str) -> list[SetupStep]:
    return [_step("launch", command=list(command))]


_DRAWN = "convert -size 640x480 gradient:red-blue ~/picture.png"
_PAPER = """python3 -c "
import cairo, os
surface = cairo.PDFSurface(os.path.expanduser('~/paper.pdf'), 400, 300)
context = cairo.Context(surface)
context.move_to(50, 50)
context.show_text('paper')
surface.finish()"
"""
_MAIL = r"""
mkdir -p ~/.thunderbird/test
sed 's/^\([^ ]*\) \(.*\)/user_pref("mail.\1", \2);/' > ~/.thunderbird/test/prefs.js <<'END'
accountmanager.accounts "account1,account2"
accountmanager.defaultaccount "account1"
accountmanager.localfoldersserver "server2"
account.account1.identities "id1"
account.account1.server "server1"
account.account2.server "server2"
identity.id1.fullName "Test"
identity.id1.useremail "test@localhost"
identity.id1.valid true
identity.id1.draft_folder "mailbox://nobody@Local%20Folders/Drafts"
server.server1.type "pop3"
server.server1.hostname "localhost"
server.server1.userName "test"
server.server1.check_new_mail false
server.server1.login_at_startup false
server.server1.directory-rel "[ProfD]Mail/localhost"
server.server2.type "none"
server.server2.hostname "Local Folders"
server.server2.userName "nobody"
server.server2.directory-rel "[ProfD]Mail/Local Folders"
END
"""
_FILM = "ffmpeg -v error -f lavfi -i testsrc=s=640x360:r=10:d=600 -preset ultrafast -pix_fmt yuv420p ~/film.mp4"
_PLAYER = _launched("vlc", "--no-audio", "--no-video-title-show", "/home/user/film.mp4")
_STATUS = "curl -s -u :password http://127.0.0.1:8080/requests/status.xml"
_HTML = "<title>A page</title><h1>Hello</h1>"
_CDP = "curl -s http://127.0.0.1:1337/json"

_VLC = App(
    prepare=_FILM,
    opens=_PLAYER,
    title="film.mp4 - VLC media player",
    ready=f"{_STATUS} | grep -q state.playing",
    state=f"{_STATUS} | grep -o '<state>[a-z]*'",
    react="xdotool key space",
    still=False,
)
APPS: Mapping[str, App] = {
    "terminal": App(
        opens=_launched("gnome-terminal"),
        title="user@desktop",
        state="cat ~/typed 2>/dev/null || true",
        react="xdotool type --delay 30 'echo typed > ~/typed'; xdotool key Return",
    ),
    "gedit": App(
        prepare="echo text > ~/letter.txt",
        opens=_opened("letter.txt"),
        title="letter.txt",
        state="cat ~/letter.txt",
        react="xdotool type --delay 30 more; xdotool key ctrl+s",
    ),
    "calc": App(
        files={"NetIncome.xlsx": _SHEET},
        opens=_opened("NetIncome.xlsx"),
        title="NetIncome.xlsx - LibreOffice Calc",
        state="sha256sum ~/NetIncome.xlsx",
        react="xdotool type --delay 30 more; xdotool key Return; sleep 0.5; xdotool key ctrl+s",
    ),
    "writer": App(
        files={"letter.docx": _LETTER},
        opens=_opened("letter.docx"),
        title="letter.docx - LibreOffice Writer",
        state="sha256sum ~/letter.docx",
        react="xdotool type --delay 30 more; sleep 0.5; xdotool key ctrl+s",
    ),
    "impress": App(
        files={"slides.pptx": _SLIDES},
        opens=_opened("slides.pptx"),
        title="slides.pptx - LibreOffice Impress",
        state="sha256sum ~/slides.pptx",
        # A new slide.
        react="xdotool key ctrl+m; sleep 1; xdotool key ctrl+s",
    ),
    "chromium": App(
        prepare=f"printf '{_HTML}' > ~/page.html",
        opens=_launched("google-chrome", "--remote-debugging-port=1337", "file:///home/user/page.html"),
        title="A page - Google Chrome",
        ready=f"{_CDP} | grep -q page.html",
        state=f"{_CDP} | jq '[.[] | select(.type == \"page\")] | length'",
        react="xdotool key ctrl+t",
    ),
    "vlc": _VLC,
    # A film that rests, so that its picture can be compared.
    "vlc paused": attrs.evolve(_VLC, ready=f"{_STATUS}?command=pl_forcepause | grep -q state.paused", still=True),
    "gimp": App(
        prepare=_DRAWN,
        opens=_launched("gimp", "/home/user/picture.png"),
        title="picture.*– GIMP",
        state="test -s ~/picture.xcf && echo saved || echo unsaved",
        react="xdotool key ctrl+s; until_ 'wmctrl -l | grep -q \"Save Image\"'; sleep 1; xdotool key Return",
    ),
    "thunderbird": App(
        prepare=_MAIL,
        opens=_launched("/usr/bin/thunderbird", "--profile", "/home/user/.thunderbird/test"),
        title="Mozilla Thunderbird",
        state="stat -c %s ~/.thunderbird/test/Mail/Local\\ Folders/Drafts 2>/dev/null || echo none",
        # A message, kept as a draft.
        react="xdotool key ctrl+n; until_ 'wmctrl -lx | grep -q Msgcompose'; sleep 2\n"
        "xdotool type --delay 30 me@localhost; sleep 1; xdotool key ctrl+s",
    ),
    "eog": App(
        prepare=_DRAWN,
        opens=_opened("picture.png"),
        title="picture.png",
        state="sha256sum ~/picture.png",
        # Turned, and saved so.
        react="xdotool key ctrl+r; sleep 1; xdotool key ctrl+s; sleep 1; xdotool key Return",
    ),
    "evince": App(
        prepare=_PAPER,
        opens=_opened("paper.pdf"),
        title="paper.pdf",
        state="ls ~/*.pdf",
        react="xdotool key ctrl+s; sleep 2; xdotool type --delay 30 copy.pdf; xdotool key Return",
    ),
    "file-roller": App(
        prepare="echo a > ~/a; echo b > ~/b; cd ~ && zip -q two.zip a b",
        opens=_launched("file-roller", "/home/user/two.zip"),
        title="two.zip",
        state="unzip -l ~/two.zip | tail -1",
        react="xdotool key ctrl+a; sleep 0.5; xdotool key Delete; sleep 1; xdotool mousemove 490 405 click 1",
    ),
    "gnome-control-center": App(
        opens=_launched("gnome-control-center", "notifications"),
        title="Settings",
        state="gsettings get org.gnome.desktop.notifications show-banners",
        # Do Not Disturb, where the window opens on an empty desktop.
        react="xdotool mousemove 1385 265 click 1",
    ),
    "nautilus": App(
        prepare="mkdir -p ~/Documents/work; echo text > ~/Documents/work/letter.txt",
        opens=_launched("nautilus", "/home/user/Documents/work"),
        title="work",
        state="ls ~/Documents/work",
        react="xdotool key ctrl+shift+n; sleep 1.5; xdotool type --delay 30 newfolder; sleep 0.5; xdotool key Return",
    ),
}
