"""Free ports for processes that tests start."""

import contextlib
import random
import socket

RANGE = range(10_000, 32_000)  # below the ports that Linux and macOS give to connections and to port 0


def free_ports(count):
    """Ports of 127.0.0.1 on which nobody listens; no connection takes them before a test does."""
    ports = []
    while len(ports) < count:
        port = random.SystemRandom().choice(RANGE)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports += [port] * (port not in ports)
    return ports
