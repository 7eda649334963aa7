"""A Python that has imported torch already: processes of their own for tests, without the seconds of a cold start.

`warm_python()` returns the path of a program that takes `-m MODULE`, `-c CODE` or a file, as `python` does. A server
forks a process for each call, which gets the caller's folder, environment, open files and signals, and ends with the
program. Tests that look at imports, limits or threads start a real interpreter instead.
"""

import atexit
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
signals = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until there is a process to pass them on to
words = [*{words!r}, *sys.argv[1:]]
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps({{"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}})
    socket.send_fds(server, [len(request.encode()).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(request.encode())
    process = int.from_bytes(server.recv(8), "big")
    for number in signals:
        signal.signal(number, lambda number, frame: os.kill(process, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    answer = server.recv(8)
sys.exit(int(answer or b"70"))
"""

IMPORTED = (
    *("matplotlib.backends.backend_agg", "matplotlib.figure", "rich.progress", "safetensors.torch", "sqlite3", "yaml"),
    *("scipy.cluster.hierarchy", "scipy.optimize", "scipy.special", "scipy.stats"),
    *("themis.campaign.loop", "themis.cli.run", "themis.report.page", "themis.runs.display.figure"),
)
"""What most commands need."""


@cache
def _server() -> Path:
    """Start the server of this test process; its folder has the programs."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    address = str(folder / "socket")
    for name, words in {"python": (), "themis": ("-m", "themis")}.items():
        (folder / name).write_text(CLIENT.format(python=sys.executable, words=words, address=address))
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def stop() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return folder


def warm_python() -> str:
    """Return the path of the program, to be used instead of `sys.executable`."""
    return str(_server() / "python")


def warm_folder() -> str:
    """Return a folder for PATH in which `python` and `themis` are warm."""
    return str(_server())


def _serve(listener: socket.socket) -> None:
    for name in IMPORTED:
        import_module(name)
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that answer
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _answer(connection)
        connection.close()


def _answer(connection: socket.socket) -> None:
    """Run what the client asks for in a child, and send the number of its process and its exit code."""
    header, files, _, _ = socket.recv_fds(connection, 8, 3)
    size, content = int.from_bytes(header, "big"), b""
    while len(content) < size:
        content += connection.recv(size - len(content))
    child = os.fork()
    if child == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os._exit(_run(json.loads(content)))
    with suppress(OSError):  # the client was killed
        connection.sendall(child.to_bytes(8, "big"))
    child_end = os.pidfd_open(child)
    ended, _, _ = select.select([child_end, connection], [], [])  # a client says no more: it has ended
    if child_end not in ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with suppress(OSError):
        connection.sendall(str(os.waitstatus_to_exitcode(status) % 256).encode())
    os._exit(0)


def _run(request: dict) -> int:
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    kind, *words = request["words"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *paths, *[path for path in sys.path[1:] if path not in paths]]
    try:
        if kind == "-c":
            sys.argv = ["-c", *words[1:]]
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        elif kind == "-m":
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(kind))
            sys.argv = [kind, *words]
            runpy.run_path(kind, run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
