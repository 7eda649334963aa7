"""The keyword options that editors and type checkers know are those of the dataclasses."""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def writer():
    spec = importlib.util.spec_from_file_location("keywords_tool", ROOT / "tools" / "keywords.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("package", ["themis", "themis_lab"])
def test_the_written_options_are_up_to_date(writer, package):
    written = (ROOT / "src" / package / "keywords.py").read_text()
    assert written == writer.TEXTS[package](), "run python tools/keywords.py"


@pytest.mark.slow
def test_a_type_checker_knows_every_option(tmp_path):
    pytest.importorskip("mypy")
    code = """
    import themis
    themis.run(None, None, "fog", max_tests=100, split=[0.5, 0.2, 0.3])  # type: ignore[arg-type]
    themis.run(None, None, "fog", max_test=100)  # type: ignore[arg-type]
    themis.retrain("run", epochs="many")
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "script.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert 'script.py:4: error: Unexpected keyword argument "max_test"' in checked
    assert 'script.py:5: error: Argument "epochs" to "retrain" has incompatible type' in checked
    assert "Found 2 errors" in checked
