"""Software from an apt source besides Debian's: the setting, sources that are refused, and an image with it.

The image is a copy of the host's `minimal`, so that nothing is built by mmdebstrap here; all after that is real, and so
are the repository, its signature and its server.
"""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from apt_source import AptSource, apt_source, make_key, served
from click.testing import CliRunner
from desktops import make_task, run
from requires import requires
from scratch import copy, scratch_state

from drums.cli import cli
from drums.errors import ConfigError, ImageBuildError, ImageUnsuitable
from drums_core.commands import image as image_command
from drums_core.config import HostConfig, load_config
from drums_core.daemon.routes import task_document
from drums_core.image import extension
from drums_core.image import store as store_module
from drums_core.image.recipe import Recipe, load_recipe
from drums_core.image.rootfs import Progress
from drums_core.image.software import Software, images_with, recipe_with
from drums_core.image.store import ImageStore, inputs_digest
from drums_core.opening import open_host

with_image = requires("root", "criu")
LINE = "deb [signed-by=/k.asc arch=amd64] https://vendor.example/code stable main"


# --- the setting


def test_as_it_stands_in_the_file(tmp_path: Path) -> None:
    """Its applications are called like its packages, unless they are named."""
    file = tmp_path / "drums.toml"
    tables = [
        f'[[software]]\nimage = "osworld"\nsource = "{LINE}"\npackages = ["code"]\n',
        f'[[software]]\nimage = "minimal"\nsource = "{LINE}"\npackages = ["a-b"]\napplications = ["Ab"]\n',
    ]
    file.write_text("".join(tables))
    found = load_config(file, environ={}).software
    assert found == (Software("osworld", LINE, ("code",), ("code",)), Software("minimal", LINE, ("a-b",), ("Ab",)))
    assert found[0].key == Path("/k.asc")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"image": "other"}, "it must be one of minimal, osworld"),
        ({"source": "https://vendor.example stable main"}, "it must be 'deb [signed-by=KEYFILE] URL SUITE COMPONENT'"),
        ({"source": LINE.replace("https", "ssh")}, "it must be 'deb"),
        ({"source": LINE.replace(" main", "")}, "it must be 'deb"),
        ({"source": f"{LINE}\ndeb [trusted=yes] http://b.example stable main"}, "it must be 'deb"),
        ({"source": "deb http://a.example stable main"}, "it must be 'deb"),
        ({"source": LINE.replace("arch=amd64", "trusted=yes")}, "the option 'trusted', it may have 'signed-by'"),
        ({"source": LINE.replace("arch=amd64", "allow-insecure=yes")}, "the option 'allow-insecure'"),
        ({"source": LINE.replace("arch=amd64", "signed-by=/other")}, "an option twice"),
        ({"source": LINE.replace("signed-by=/k.asc", "")}, "lacks the option 'signed-by'"),
        ({"source": LINE.replace("/k.asc", "0123456789ABCDEF")}, "lacks the option 'signed-by' with the whole path"),
        ({"packages": []}, "packages is empty"),
        ({"packages": "code"}, "packages has 'c'"),
        ({"packages": ["-o"]}, "packages has '-o'"),
        ({"applications": ["a b"]}, "applications has 'a b'"),
        ({"more": 1}, "extra fields"),
    ],
)
def test_what_is_no_setting(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    """What would take unsigned packages is none, either."""
    entry = {"image": "osworld", "source": LINE, "packages": ["code"], **changed}
    file = tmp_path / "drums.toml"
    file.write_text("[[software]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items()))
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    assert said in str(caught.value) and "$.software" in str(caught.value)


def test_which_images_suit() -> None:
    """An image has what is added to it, and no other does."""
    added = (Software("osworld", LINE, ("code",)),)
    wanted = ("code", "gimp")
    assert images_with(wanted, ()) == [] and images_with(wanted, added) == ["osworld"]
    assert "code" in recipe_with("osworld", added).applications
    assert recipe_with("minimal", added) == load_recipe("minimal")
    document = attrs.evolve(make_task(), applications=wanted)
    assert task_document(document, added)["images"] == ["osworld"] and task_document(document, ())["images"] == []


def test_an_image_is_known_by_its_software(tmp_path: Path) -> None:
    """Another line, package, application or key is another image; none is the recipe's own."""
    key, other = tmp_path / "k.asc", tmp_path / "l.asc"
    key.write_text("one")
    other.write_text("one")
    one = Software("osworld", LINE.replace("/k.asc", str(key)), ("code",))
    seen = [
        inputs_digest("osworld"),
        inputs_digest("osworld", [one]),
        inputs_digest("osworld", [attrs.evolve(one, packages=("code", "more"))]),
        inputs_digest("osworld", [attrs.evolve(one, applications=("code", "more"))]),
        inputs_digest("osworld", [attrs.evolve(one, source=one.source.replace("k.asc", "l.asc"))]),
        inputs_digest("osworld", [one, one]),
    ]
    key.write_text("two")
    assert len({*seen, inputs_digest("osworld", [one])}) == 7
    store = ImageStore(tmp_path, (one,))
    of_minimal = store_module.Image("minimal", "", 0.0, "", 0, inputs_digest("minimal"), tmp_path)
    of_osworld = attrs.evolve(of_minimal, name="osworld", inputs=seen[0])
    assert store.is_current(of_minimal) and not store.is_current(of_osworld)
    key.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        store.is_current(of_osworld)


# --- sources that are refused


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AptSource]:
    """A source that is as it should be."""
    with apt_source(tmp_path_factory.mktemp("apt"), code_depends="tree") as found:
        yield found


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[AptSource]:
    """A source that a test may break."""
    with apt_source(tmp_path) as found:
        yield found


def wrong_key(source: AptSource) -> Software:
    other = source.key.with_name("other.asc")
    make_key(source.home, other)
    return Software("minimal", source.line(key=other), ("code",))


def unsigned(source: AptSource) -> Software:
    (source.release / "InRelease").unlink()
    return Software("minimal", source.line(), ("code",))


def unsigned_where_that_is_allowed(source: AptSource) -> Software:
    return unsigned(source)


def changed_after_signing(source: AptSource) -> Software:
    index = source.release / "main/binary-amd64/Packages"
    index.write_text(index.read_text().replace("1.0", "1.1"))
    return Software("minimal", source.line(), ("code",))


def other_package(source: AptSource) -> Software:
    (package,) = (source.top / "pool").glob("code_*")
    package.write_bytes(package.read_bytes()[::-1])
    return Software("minimal", source.line(), ("code",))


def unreachable(source: AptSource) -> Software:
    return Software("minimal", source.line("http://127.0.0.1:9/apt"), ("code",))


def no_such_package(source: AptSource) -> Software:
    return Software("minimal", source.line(), ("code", "no-such-thing"))


@requires("root")
@pytest.mark.parametrize(
    ("fault", "cause", "remedy"),
    [
        (wrong_key, "NO_PUBKEY", "put the key that signs this source"),
        (unsigned, "is not signed", "put the key that signs this source"),
        (unsigned_where_that_is_allowed, "is not signed", "put the key that signs this source"),
        (changed_after_signing, "Hash Sum mismatch|unexpected size", "see whether the URL is right"),
        (other_package, "Hash Sum mismatch|unexpected size", "see whether the URL is right"),
        (unreachable, "127.0.0.1:9", "see whether the URL is right"),
        (no_such_package, "Unable to locate package no-such-thing", "see what `packages` the source has"),
    ],
)
def test_a_source_is_refused_before_anything_is_built(
    broken: AptSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[AptSource], Software],
    cause: str,
    remedy: str,
) -> None:
    """With source, cause and remedy, and nothing left; also where the host's own apt takes unsigned packages."""
    if fault is unsigned_where_that_is_allowed:
        kinds = ("InsecureRepositories", "WeakRepositories", "DowngradeToInsecureRepositories")
        lines = [f'Acquire::Allow{kind} "true";\n' for kind in kinds]
        (tmp_path / "apt.conf").write_text("".join([*lines, 'APT::Get::AllowUnauthenticated "true";\n']))
        monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    monkeypatch.setattr(store_module, "build_rootfs", lambda *_, **__: pytest.fail("it is built all the same"))
    software = fault(broken)
    store = ImageStore(tmp_path / "images", (software,))
    with pytest.raises(ImageBuildError) as caught:
        store.build("minimal", mirror=None, progress=lambda text, part: None)
    assert repr(software.source) in str(caught.value) and "image 'minimal'" in str(caught.value)
    assert any(text in caught.value.facts["cause"] for text in cause.split("|")), caught.value.facts
    assert caught.value.hint.startswith(remedy) and "take the source out of the setting `software`" in caught.value.hint
    assert [*store.path.iterdir()] == []


def test_a_key_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Without what the URL has of credentials."""
    line = LINE.replace("//vendor", "//user:secret@vendor")
    store = ImageStore(tmp_path / "images", (Software("minimal", line, ("code",)),))
    with pytest.raises(ConfigError, match=r"the key of the source .*//vendor.example.* cannot be read") as caught:
        store.build("minimal", mirror=None, progress=lambda text, part: None)
    assert "put the key there" in caught.value.hint and not store.path.exists()
    assert "secret" not in f"{caught.value} {caught.value.facts}"


@requires("root")
def test_what_it_needs_and_nobody_has(broken: AptSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dependency that is neither Debian's nor named is told, and no half image stays."""
    broken.add("needy", "1.0", "no-such-library")
    broken.sign()
    real = load_config().state_dir / "images/minimal/rootfs"

    def build(recipe: Recipe, target_dir: Path, *, mirror: str | None, progress: Progress) -> None:
        for name in ("etc/apt", "var/lib/dpkg"):
            (target_dir / name).parent.mkdir(parents=True)
            shutil.copytree(real / name, target_dir / name, ignore=shutil.ignore_patterns("info"), symlinks=True)

    monkeypatch.setattr(store_module, "build_rootfs", build)
    store = ImageStore(tmp_path / "images", (Software("minimal", broken.line(), ("needy",)),))
    with pytest.raises(ImageBuildError, match="needy : Depends: no-such-library") as caught:
        store.build("minimal", mirror=None, progress=lambda text, part: None)
    assert "what they need must be there, too, or in Debian" in caught.value.hint
    assert [*store.path.iterdir()] == []


def test_a_script_of_the_package_that_fails() -> None:
    """What it said last is the cause; the log is dpkg's own."""
    log = [
        "Setting up code (1.0) ...",
        "it breaks here",
        "dpkg: error processing package code (--configure):",
        " installed code package post-installation script subprocess returned error exit status 3",
        "Errors were encountered while processing:",
        " code",
        "E: Sub-process /usr/bin/dpkg returned an error code (1)",
    ]
    software = Software("minimal", LINE, ("code",))
    with pytest.raises(ImageBuildError) as caught, extension._told(software):
        raise ImageBuildError("'unshare' ended with 100", log="\n".join(log))
    assert caught.value.facts["cause"] == "; ".join(line.strip() for line in log[1:4])
    assert caught.value.hint.startswith("name a version of the package that installs")


# --- an image with it


@attrs.frozen
class Built:
    """An image with the stand-in, in a state folder of its own."""

    config: HostConfig
    root: Path
    plain_inputs: str


def copied_from(rootfs: Path) -> Callable[..., None]:
    """In place of `build_rootfs`: the host's image `minimal` once more."""

    def build(recipe: Recipe, target_dir: Path, *, mirror: str | None, progress: Progress) -> None:
        copy(rootfs, target_dir)

    return build


@pytest.fixture(scope="module")
def built(source: AptSource) -> Iterator[Built]:
    """From a source that is served over HTTP, and gone when the first desktop starts."""
    with scratch_state() as config, pytest.MonkeyPatch.context() as patch:
        images = config.state_dir / "images"
        with served(source.top) as url:
            config = attrs.evolve(config, software=(Software("minimal", source.line(url), ("code",)),))
            store = ImageStore(images, config.software)
            plain = store.load("minimal")
            assert not store.is_current(plain)
            patch.setattr(store_module, "build_rootfs", copied_from((plain.path / "rootfs").resolve()))
            image = store.build("minimal", mirror=None, progress=lambda text, part: None)
        assert store.is_current(image) and image.digest != plain.digest
        yield Built(config, image.path / "rootfs", plain.inputs)


@with_image
def test_what_is_in_the_image(built: Built) -> None:
    """The package, what it depends on, and the files that drums has for it; of the source nothing."""
    root = built.root
    query = ["dpkg-query", f"--admindir={root}/var/lib/dpkg", "--show", "--showformat=${db:Status-Status} ${Version}"]
    found = {x: subprocess.check_output([*query, x], text=True).split() for x in ("code", "tree", "bash")}
    assert found["code"] == ["installed", "1.0"] and found["tree"][0] == "installed"
    assert found["bash"][1] != "99.0" and not (root / "usr/share/planted").exists()
    settings = root / "home/user/.config/Code/User/settings.json"
    document = json.loads(settings.read_text())
    assert document["update.mode"] == "none" and document["telemetry.telemetryLevel"] == "off"
    assert document["security.workspace.trust.enabled"] is False and document["workbench.startupEditor"] == "none"
    for path in (settings, *list(settings.parents)[:4]):
        assert (path.stat().st_uid, path.stat().st_gid) == (1000, 1000), path
    assert "\nExec=/usr/local/bin/code %F\n" in (root / "usr/share/applications/code.desktop").read_text()
    assert not (root / "usr/share/code/chrome-sandbox").stat().st_mode & stat.S_ISUID
    assert [*(root / "etc/apt/sources.list.d").iterdir()] == []
    assert not (root / "etc/apt/trusted.gpg.d/vendor.gpg").exists()
    assert "deb" not in (root / "etc/apt/sources.list").read_text().replace("drums", "")
    assert [*(root / "dev").iterdir()] == [] and not (root / "opt/drums/build").exists()
    (software,) = built.config.software
    url = re.findall(r"http://\S+", software.source)[0]
    left = subprocess.run(["grep", "-rlF", url, *(str(root / x) for x in ("etc", "usr", "var"))], capture_output=True)
    assert (left.returncode, left.stdout) == (1, b"")
    assert not (root.parent / "fetched").exists()


@with_image
def test_an_application_that_no_package_brings(built: Built) -> None:
    """It is looked for, as what a recipe promises is."""
    software = attrs.evolve(built.config.software[0], applications=("absent",))
    with pytest.raises(ImageBuildError, match="absent: no such program") as caught, extension._told(software):
        extension._configure("absent", "minimal", built.root, lambda text, part: None)
    assert caught.value.hint.startswith("name in `applications` the executables")


@with_image
def test_ensure_takes_the_configuration_that_it_is_given(built: Built, tmp_path: Path, monkeypatch: Any) -> None:
    """It finds the image current with it, and would build it anew without."""
    (software,) = built.config.software
    file = tmp_path / "drums.toml"
    file.write_text(f"[[software]]\nimage = 'minimal'\nsource = '{software.source}'\npackages = ['code']\n")
    monkeypatch.setenv("DRUMS_STATE_DIR", str(built.config.state_dir))
    building: list[object] = []
    monkeypatch.setattr(image_command, "_build", lambda *arguments: building.append(arguments))
    monkeypatch.setattr(image_command, "_make_golden", golden_stand_in)
    command = ["image", "ensure", "minimal", "--json"]
    done = CliRunner().invoke(cli, [*command, "--config", str(file)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert json.loads(done.stdout)["name"] == "minimal" and building == []
    assert CliRunner().invoke(cli, command).exit_code == 0 and len(building) == 1


async def golden_stand_in(*_: object) -> None:
    """No desktop for it."""


@with_image
def test_its_desktop_and_its_tasks(built: Built) -> None:
    """A task that needs `code` begins in a desktop with it, and in no other; what is started there has no sandbox."""
    task = attrs.evolve(make_task(), applications=("code",))
    plain = attrs.evolve(built.config, software=())

    async def main() -> str:
        async with open_host(plain) as host:
            with pytest.raises(ImageUnsuitable, match="needs code, which image 'minimal' lacks") as lacks:
                await host.create(task)
            assert "the setting `software`" in lacks.value.hint
            # And an image that was built for another setting is not used.
            with pytest.raises(ImageUnsuitable, match="or for another setting `software`"):
                await host.create()
        async with open_host(built.config) as host, await host.create(task) as slot:
            await slot.wait_valid()
            await run(slot, "code --list-extensions")
            return await run(slot, "cat ~/code-arguments; command -v code")

    lines = trio.run(main).split()
    assert lines[0] == "--no-sandbox" and lines[-2:] == ["--list-extensions", "/usr/local/bin/code"]


def test_what_is_told_of_a_wrong_source_has_no_password() -> None:
    """Whatever characters it holds."""
    with pytest.raises(ValueError, match="source is") as info:
        Software("osworld", "deb [signed-by=/k] https://me:SEC@RET@host.example stable", ("code",))
    assert "RET" not in str(info.value) and "host.example" in str(info.value)
