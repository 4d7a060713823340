"""A local web server that misbehaves on request."""

import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """The server's files, its misbehaviour, and the requests that it received."""

    files: dict[str, bytes]
    url: str = ""
    cuts: list[int] = field(default_factory=list)  # the next responses end after this many bytes of content
    statuses: list[int] = field(default_factory=list)  # the next responses have these error codes
    moved: dict[str, str] = field(default_factory=dict)
    asked: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def serving(files: dict[str, bytes]):
    site = Site(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            site.asked.append({"target": self.path} | dict(self.headers))
            name = self.path.rpartition("/")[2]
            if site.statuses:
                return self.send_error(site.statuses.pop(0))
            if name in site.moved:
                self.send_response(302)
                self.send_header("Location", site.moved[name])
                return self.end_headers()
            if name not in site.files:
                return self.send_error(404)
            return self.answer(site.files[name])

        def answer(self, content):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(ConnectionError):  # the client has closed the connection
                self.wfile.write(content[: site.cuts.pop(0)] if site.cuts else content)
            return

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    site.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
