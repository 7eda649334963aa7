"""What tests of the watch server share: a server in a thread, and a way to ask it."""

import threading
from contextlib import contextmanager
from http.client import HTTPConnection

from themis_integrations.browser.server import serve

ALWAYS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@contextmanager
def served(path):
    with serve(path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, target="/view.json?token={token}", method="GET", **headers):
    """Status, headers and body of an answer; `{port}` and `{token}` are the server's."""

    def filled(text):
        return text.replace("{port}", str(server.server_port)).replace("{token}", server.token)

    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, filled(target), skip_host=True, skip_accept_encoding=True)
    for name, values in {"Host": "127.0.0.1:{port}", **headers}.items():
        for value in [] if values is None else [values] if isinstance(values, str) else values:
            connection.putheader(name, filled(value))
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body
