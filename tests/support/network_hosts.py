"""Hosts with addresses of their own on this machine: network namespaces, each with a cable to the machine that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest


class Host:
    """A network namespace.

    Args:
        number: differs from other hosts'.

    Attributes:
        address: of the host, as this machine reaches it.
        command: what a command begins with to run there.
    """

    def __init__(self, number: int) -> None:
        self.address = f"10.77.{number}.2"
        self._name = f"radixkv-{os.getpid()}-{number}"
        self._cable = f"rk{os.getpid()}-{number}"
        self._machine = f"10.77.{number}.1"
        self.command = ["ip", "netns", "exec", self._name]

    def add(self) -> None:
        """Make it, and connect it to this machine."""
        _run("ip", "netns", "add", self._name)
        _run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        _run("ip", "address", "add", f"{self._machine}/24", "dev", self._cable)
        _run("ip", "link", "set", self._cable, "up")
        _run(*self.command, "ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _run(*self.command, "ip", "link", "set", device, "up")

    def remove(self) -> None:
        """Nothing must be running there."""
        for what in (("link", "delete", self._cable), ("netns", "delete", self._name)):
            subprocess.run(["ip", *what], check=False, capture_output=True)

    def cut_off(self) -> None:
        """From now on nothing that it sends arrives, and nobody is told."""
        _run(*self.command, "ip", "route", "add", "blackhole", f"{self._machine}/32")

    def connect(self) -> None:
        """Undo `cut_off`."""
        _run(*self.command, "ip", "route", "delete", "blackhole", f"{self._machine}/32")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts; where they cannot be made, the test is skipped."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs `ip` (on Debian: iproute2) and root")
    with ExitStack() as stack:
        made = [Host(number) for number in range(1, count + 1)]
        for host in made:
            stack.callback(host.remove)
            try:
                host.add()
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield made


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
