"""Every `bash` block in the documents runs, in order, in a folder with the files of the document."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documents import DOCUMENTS, FILE, blocks
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
    for block in blocks(path, "bash"):
        how = {"cwd": tmp_path, "env": {**os.environ, "PATH": commands}, "capture_output": True, "text": True}
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], timeout=300, **how)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_file_has_commands_that_use_it(path):
    for block in blocks(path, "python"):
        if (found := FILE.match(block)) and not found[1].startswith("test_"):  # those are run by pytest
            assert any(f"{found[1].removesuffix('.py')}:" in commands for commands in blocks(path, "bash"))
