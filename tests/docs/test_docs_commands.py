"""Every `bash` block in the documents runs, in order, in a folder with the files of the document."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCUMENTS, FILE, assert_printed, blocks
from warm_python import warm_folder

ELSEWHERE = ("ci.md",)
"""Documents whose commands are tested elsewhere."""


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if blocks(path, "bash") and path.name not in ELSEWHERE],
    ids=lambda path: path.name,
)
def test_the_commands_run(path, tmp_path, trained):
    for block in blocks(path, "python"):
        if found := FILE.match(block):
            (tmp_path / found[1]).write_text(block)
    commands = os.pathsep.join([warm_folder(), str(Path(sys.executable).parent), os.environ["PATH"]])
    outputs = [block for block in blocks(path, "") if block.startswith("Under ")]
    for block in blocks(path, "bash"):
        how = {"cwd": tmp_path, "env": {**os.environ, "PATH": commands}, "capture_output": True, "text": True}
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], timeout=300, **how)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        if path.name in SHOWN and outputs:
            assert_printed(outputs.pop(0), done.stdout, SHOWN[path.name])


SHOWN = {"quickstart.md": 0.5}
"""Documents that show what their first command prints, and how far its numbers may be off: it trains a model."""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_two_commands_write_to_the_same_folder(path):
    commands = re.findall(r"^themis run (?:.*\\\n)*.*", path.read_text(), re.M)
    folders = [found[1] for command in commands if (found := re.search(r"--out (\S+)", command))]
    assert len(folders) == len(set(folders))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_file_has_commands_that_use_it(path):
    for block in blocks(path, "python"):
        if (found := FILE.match(block)) and not found[1].startswith("test_"):  # those are run by pytest
            assert any(f"{found[1].removesuffix('.py')}:" in commands for commands in blocks(path, "bash"))
