"""A process that stands in for a long, slow or lossy wire between a host and the switch. Run as a script of its own.

What either end of the wire sends is redirected into a tap, read from there, and sent on later through a packet socket, or
not at all. So it needs no netem, which many kernels lack. Each line on stdin is a JSON object with ``delay``, ``loss``,
``rate`` and ``seed``, answered by a line; when stdin closes, the wire is as it was.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_TUNSETIFF = 0x400454CA  # linux/if_tun.h
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_SOL_PACKET = 263  # linux/socket.h
_PACKET_QDISC_BYPASS = 20  # linux/if_packet.h: past our own redirection
_MOST_WAITING = 10_000  # packets on the way in one direction; a switch drops beyond its own limit, too
_MOST_AT_A_TIME = 64  # packets read from one direction before the other has its turn


class Direction:
    """What one end of the wire sends.

    Args:
        pid: A process in the network namespace of that end.
        device: Its device there.
    """

    def __init__(self, pid: int, device: str) -> None:
        self.device = device
        self._namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._free = 0.0  # when the wire has taken in all that was sent
        self._enter()
        self.tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        tap = f"pump-{device}"
        fcntl.ioctl(self.tap, _TUNSETIFF, struct.pack("16sH", tap.encode(), _IFF_TAP | _IFF_NO_PI))
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
        self._socket.bind((device, 0))
        _run("ip", "link", "set", tap, "up")
        _run("tc", "qdisc", "add", "dev", device, "clsact")
        match = ("protocol", "all", "u32", "match", "u32", "0", "0")
        _run("tc", "filter", "add", "dev", device, "egress", *match, "action", "mirred", "egress", "redirect", "dev", tap)

    def _enter(self) -> None:
        if ctypes.CDLL(None, use_errno=True).setns(self._namespace, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")

    def remove(self) -> None:
        self._enter()
        subprocess.run(["tc", "qdisc", "del", "dev", self.device, "clsact"], check=False, stderr=subprocess.DEVNULL)

    def take_in(self, delay: float, rate: float, loss: float, chance: random.Random) -> None:
        """Read what was sent."""
        for _ in range(_MOST_AT_A_TIME):
            try:
                packet = os.read(self.tap, 1 << 16)
            except BlockingIOError:
                return
            if chance.random() < loss or len(self._waiting) >= _MOST_WAITING:
                continue
            now = time.monotonic()
            self._free = max(now, self._free) + (len(packet) / rate if rate else 0.0)
            self._waiting.append((self._free + delay, packet))

    def send_on(self) -> float | None:
        """Send what is due. Returns when the next is, None for never."""
        while self._waiting:
            due, packet = self._waiting[0]
            if due > time.monotonic():
                return due
            with contextlib.suppress(OSError):  # the queue of the device is full, or it is down: lost, as on any wire
                self._socket.send(packet)
            self._waiting.popleft()
        return None


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")


def main(ends: list[tuple[int, str]]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    delay = loss = rate = 0.0
    chance = random.Random()
    directions: list[Direction] = []
    try:
        directions += [Direction(pid, device) for pid, device in ends]
        while True:
            dues = [due for direction in directions if (due := direction.send_on()) is not None]
            wait = max(0.0, min(dues) - time.monotonic()) if dues else None
            readable = select.select([sys.stdin.fileno(), *(direction.tap for direction in directions)], [], [], wait)[0]
            for direction in directions:
                if direction.tap in readable:
                    direction.take_in(delay, rate, loss, chance)
            if sys.stdin.fileno() in readable:
                line = os.read(sys.stdin.fileno(), 4096)
                if not line:
                    return
                wish = json.loads(line)
                delay, loss, rate = wish["delay"], wish["loss"], wish["rate"]
                chance.seed(wish["seed"])
                print("ok", flush=True)
    finally:
        for direction in directions:
            direction.remove()


if __name__ == "__main__":
    main([(int(pid), device) for pid, _, device in (argument.partition(":") for argument in sys.argv[1:])])
