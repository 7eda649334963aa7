"""Files named by options that would never end, or that are larger than they look, are refused at once."""

import json
import os
import subprocess
import sys
from contextlib import suppress

import pytest
from fuzzing import time_limit
from user_module import SMALL, go_to

from themis.cli import main

RUN = "run --model mine:net --data mine:data --perturb gaussian --max-tests 20 --quiet"
SUITE = "suite noise --model mine:net --data mine:data --max-tests 20 --quiet --out suite"
BOMB = "layers: &a [x, x]\nclasses: &b [*a, *a]\nmax_tests: [*b, *b]\n"
CONFIGS = {
    "aliases": (BOMB, "valid YAML, but config.yaml is not: line 2: aliases are not allowed"),
    "depth": ("layers: " + "[" * 900 + "]" * 900, "valid YAML, but config.yaml is not: it has more than 40 levels"),
    "a long number": (
        f"max_tests: {'1:' * 5000}1.0",
        "valid YAML, but config.yaml is not: it has a number that is too large",
    ),
    "size": ("#" * (2 << 20), "valid YAML, but config.yaml is not: it has more than 1,048,576 bytes"),
    "a tag": ("max_tests: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "not text": (b"\xff\xfe\xfa", "valid YAML, but config.yaml is not: 'utf-8' codec can't decode"),
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    go_to(tmp_path, monkeypatch, SMALL)
    return tmp_path


def refused(words, code, capsys):
    with time_limit(60):
        assert main(words.split()) == code
    lines = capsys.readouterr().err.splitlines(keepends=True)
    message = "".join(line for line in lines if ": imported mine from " not in line)
    assert len(message.splitlines()) == 1
    assert "please report it" not in message
    return message


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hostile_configuration_is_refused(home, capsys, name):
    content, message = CONFIGS[name]
    (home / "config.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused("run --config config.yaml", 2, capsys)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("run --config {}", 2, "the config file must be a file with valid YAML, but "),
        (f"{RUN} --weights {{}}", 3, "the weights file must exist"),
        (f"{RUN} --weights {{}}.safetensors", 3, "the weights file must exist"),
        ("run --model {}.pt --data mine:data --perturb gaussian", 3, "the model file must exist"),
        ("run --model mine:net --data npz:{} --perturb gaussian", 3, "is not a regular file"),
        ("run --model mine:net --data csv:{} --perturb gaussian", 3, "is not a regular file"),
        ("run --model mine:net --data idx:{} --perturb gaussian", 3, "is not a regular file"),
        (f"{RUN} --split 0.5,0.2,0.3 --split-by {{}}", 3, "cannot be read (it is a"),
        (f"{SUITE} --slice-by {{}}:place", 3, "is not: it is a"),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_files_that_never_end_are_refused(home, capsys, words, code, message, kind):
    name = words.partition("{}")[2].partition(" ")[0].partition(":")[0]
    path = home / f"{kind}{name}"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    assert message in refused(words.format(kind), code, capsys)


NAMES = {
    "nested too deep": (f"mine:net({'[' * 1000}{']' * 1000})", 2, "arguments must be literal values"),
    "a number of a thousand digits": (f"mine:net(1{'0' * 1000})", 2, "takes no arguments"),
    "a number of too many digits": (f"mine:net({'9' * 5000})", 2, "arguments must be literal values"),
    "a long file name": (f"{'a' * 5000}.pt", 3, "the model file must exist"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_of_a_model_is_refused(home, capsys, name):
    model, code, message = NAMES[name]
    (home / "mine.py").write_text(SMALL.replace("def net():", "def made():") + "\nnet = made()\n")
    assert message in refused(f"check --model {model} --data mine:data", code, capsys)


@pytest.mark.parametrize(
    ("option", "code", "message"),
    [
        (f"--criterion kmnc(k={'[' * 1000}{']' * 1000})", 2, "kmnc: k must be a whole number"),
        ("--criterion kmnc(k=1e999)", 2, "kmnc: k must be a whole number below 2**63"),
        (f"--max-tests 1{'0' * 1000}", 2, "max_tests must lie in -2**63"),
        (f"--data cifar:{'a' * 5000}", 3, "the data file must exist"),
        (f"--data idx:{'a' * 5000}", 3, "the data file must exist"),
        (f"--out {'a' * 5000}", 3, "cannot be read or written: File name too long; check the path"),
        (f"--perturb {'+'.join(['gaussian'] * 100)}", 2, "a combination must have at most 60 theta, got 100"),
    ],
)
def test_a_hostile_value_of_an_option_is_refused(capsys, option, code, message):
    assert message in refused(f"{RUN} {option}", code, capsys)


def test_stored_names_cannot_control_the_terminal(home, capsys):
    escape = "\x1b]0;owned\x07"
    words = [*RUN.replace(" --quiet", "").split(), "--classes", f"a{escape},[/dim]b,c", "--no-report"]
    assert main(words) == 0
    assert "\x1b" not in "".join(capsys.readouterr())
    assert main([*RUN.split(), "--oracle", escape]) == 2
    assert "\\x1b]0;owned\\x07" in capsys.readouterr().err


LOUD = SMALL.replace("def net", "def quiet").replace(
    "def data",
    """class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = quiet()

    def forward(self, x):
        print("\\x1b]0;owned\\x07 printed")
        sys.stdout.writelines(["\\x1b[2J lines\\n"])
        print("\\x1b[31m warned\\rdone", file=sys.stderr)
        return self.net(x)

def net():
    print("\\x1b[2J imported")
    return Loud()

def script():
    class Printing(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = quiet()

        def forward(self, x):
            print("\\x1b]0;owned\\x07 compiled")
            return self.net(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Printing())

def data""",
)


@pytest.mark.parametrize("model", ["mine:net", "mine:script"])
def test_what_a_model_prints_is_not_in_the_output_and_cannot_control_the_terminal(home, capfd, model):
    (home / "mine.py").write_text(f"import sys\nimport warnings\n{LOUD}")
    assert main([*RUN.replace("--quiet", "--json --no-report --out none").replace("mine:net", model).split()]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["tests"] == 20
    assert "\x1b" not in err
    shown = ["\\x1b]0;owned\\x07 printed\n", "\\x1b[2J lines\n", "\\x1b[31m warned\rdone\n", "\\x1b[2J imported\n"]
    for line in shown if model == "mine:net" else ["\\x1b]0;owned\\x07 compiled\n"]:
        assert line in err


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_what_a_model_prints_above_the_bar_cannot_control_the_terminal(home, monkeypatch):
    (home / "mine.py").write_text(f"import sys\nimport warnings\n{LOUD}")
    words = RUN.replace(" --quiet", " --no-report --out none").split()
    master, slave = os.openpty()
    command = [sys.executable, "-m", "themis", *words]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        with suppress(OSError):  # Linux reports the end of the output as an error
            while part := os.read(master, 1 << 16):
                shown += part
        os.close(master)
    assert process.returncode == 0, shown
    assert b"\\x1b]0;owned\\x07 printed" in shown
    assert b"\x1b]0" not in shown
    assert b"\x1b[31m warned" not in shown
    assert b"\x1b[2J" not in shown
