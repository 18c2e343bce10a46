"""What of a `sudo` command line is sudo's, and which commands call it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drums_core.setup import calls_sudo
from drums_core.sys.sudo_server import parse_sudo

CASES = [
    # arguments, user, password from standard input, assignments, operand
    ("id -u", "root", False, {}, ["id", "-u"]),
    ("-S id", "root", True, {}, ["id"]),
    ("-kS id", "root", True, {}, ["id"]),
    ("--stdin id", "root", True, {}, ["id"]),
    ("-n -E -H id -S", "root", False, {}, ["id", "-S"]),
    ("-u user id", "user", False, {}, ["id"]),
    ("-uuser id", "user", False, {}, ["id"]),
    ("-Su user id", "user", True, {}, ["id"]),
    ("-nu user id", "user", False, {}, ["id"]),
    ("--user user id", "user", False, {}, ["id"]),
    ("--user=user id", "user", False, {}, ["id"]),
    ("-u #1000 id", "#1000", False, {}, ["id"]),
    ("-g users id", "root", False, {}, ["id"]),
    ("-gusers id", "root", False, {}, ["id"]),
    ("--group users id", "root", False, {}, ["id"]),
    ("--group=users id", "root", False, {}, ["id"]),
    ("-p Password: -S id", "root", True, {}, ["id"]),
    ("-pSay id", "root", False, {}, ["id"]),
    ("--prompt Say id", "root", False, {}, ["id"]),
    ("-C 4 id", "root", False, {}, ["id"]),
    ("-D /tmp id", "root", False, {}, ["id"]),
    ("--chdir /tmp id", "root", False, {}, ["id"]),
    ("-- id", "root", False, {}, ["id"]),
    ("-S -- -x", "root", True, {}, ["-x"]),
    ("A=1 B=c=d id X=2", "root", False, {"A": "1", "B": "c=d"}, ["id", "X=2"]),
    ("-E A=1 id", "root", False, {"A": "1"}, ["id"]),
    ("/opt/a=b run", "root", False, {}, ["/opt/a=b", "run"]),
    ("-i", "root", False, {}, ["/bin/sh"]),
    ("-s", "root", False, {}, ["/bin/sh"]),
    ("-v", "root", False, {}, []),
    ("-k", "root", False, {}, []),
    ("", "root", False, {}, []),
    ("bash -c id", "root", False, {}, ["bash", "-c", "id"]),
]


@pytest.mark.parametrize(("line", "user", "stdin", "assignments", "operand"), CASES, ids=[c[0] for c in CASES])
def test_parse_sudo(line: str, user: str, stdin: bool, assignments: dict[str, str], operand: list[str]) -> None:
    """Options as sudo(8) has them, short ones in clusters or with their value attached; then the operand."""
    assert parse_sudo(line.split()) == (user, stdin, assignments, operand)


@given(st.lists(st.text(st.characters(exclude_characters="\0"), max_size=8), max_size=6))
def test_the_operand_is_what_stands_last(words: list[str]) -> None:
    """For any words: nothing is lost or invented after `--`, and nothing raises without it."""
    parse_sudo(words)
    assert parse_sudo(["-S", "--", "/bin/x", *words])[3] == ["/bin/x", *words]


CALLS: list[tuple[str | list[str], bool]] = [
    ("sudo id", True),
    ("echo password | sudo -S chmod 700 /x", True),
    ("cd /; sudo id", True),
    ("true && sudo id", True),
    ("(sudo id)", True),
    ("echo $(sudo id)", True),
    ("echo `sudo id`", True),
    ("if sudo id; then :; fi", True),
    ("/usr/bin/sudo id", True),
    ("A=1 sudo id", True),
    ("echo\nsudo id", True),
    ("sudo", True),
    ("sudo\tid", True),
    (["sudo", "id"], True),
    (["/usr/bin/sudo", "id"], True),
    (["bash", "-c", "echo x | sudo -S id"], True),
    (["python", "-c", "import os; os.system('sudo id')"], True),
    (["python", "-c", 'import os; os.system("sudo id")'], True),
    ("true;sudo id", True),
    ("sudo;id", True),
    ("sudo&", True),
    ("echo $(sudo)", True),
    (["python", "-c", "import subprocess; subprocess.run(['sudo', 'id'])"], True),
    (["python", "-c", 'import subprocess; subprocess.run(["sudo", "id"])'], True),
    ("sudo>/dev/null id", True),
    ("sudo 2>&1 id", True),
    ('"sudo" id', True),
    ("pseudo id", False),
    ("sudoku", False),
    ("gnome-sudoku", False),
    ("visudo -c", False),
    ("my-sudo id", False),
    ("cat /etc/sudoers", False),
    ("", False),
    ([], False),
    (["pseudo", "sudoers"], False),
]


@pytest.mark.parametrize(("command", "calls"), CALLS, ids=[str(c[0]) for c in CALLS])
def test_calls_sudo(command: str | list[str], calls: bool) -> None:
    """The word where a command may stand: in a shell line, in a list, and in a program text that a list carries."""
    assert calls_sudo(command) is calls
