"""Hosts in one machine: network namespaces, joined by links of a known rate.

    python benchmarks/wire/hosts.py --hosts 2 --rate 50mbit --processes 1 train.py --steps 10

Needs root, `ip` and `tc`. Each host is a namespace with one interface; with more than two hosts a
bridge in a namespace of its own is the switch. A token bucket limits what an interface sends. The
program runs under torchrun with one node per host, which finds in the environment:

    WIRE                  the interface, whose counters are in /sys/class/net/$WIRE/statistics
    GLOO_SOCKET_IFNAME    the same, for torch
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

ADDRESS, PORT = "10.77.0.{}", 29533
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # as tc has them
PAYLOAD = 1448 / 1514  # of TCP over Ethernet
BURST, QUEUE = "256kb", "400ms"  # of the token bucket; a longer queue is dropped


def missing() -> str:
    """Return why this machine cannot have hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(absent)} are not installed"
    name = f"probe{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this system has no network namespaces"
    _ip("netns", "del", name)
    return ""


class Wire:
    """Hosts and their links, within a `with` block.

    count: hosts. rate: of each link in each direction, as `tc` has it ("50mbit"); None: unlimited.
    """

    def __init__(self, count: int, rate: str | None) -> None:
        self.count, self.rate = count, rate
        self.names = [f"tg{os.getpid()}h{i}" for i in range(count)]
        self.devices = [f"w{os.getpid()}h{i}" for i in range(count)]
        self._stack = ExitStack()

    def __enter__(self) -> Wire:
        with ExitStack() as stack:
            switch = f"tg{os.getpid()}s"
            for name in (*self.names, *([switch] if self.count > 2 else [])):
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)  # and with it its interfaces
                _ip("-n", name, "link", "set", "lo", "up")
            if self.count == 2:
                self._link(*self.devices)
                _ip("link", "set", self.devices[1], "netns", self.names[1])
            else:
                _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
                _ip("-n", switch, "link", "set", "bridge", "up")
            for i, (name, device) in enumerate(zip(self.names, self.devices)):
                if self.count > 2:
                    self._link(device, f"{device}s")
                    _ip("link", "set", f"{device}s", "netns", switch)
                    _ip("-n", switch, "link", "set", f"{device}s", "master", "bridge", "up")
                if self.count > 2 or i == 0:
                    _ip("link", "set", device, "netns", name)
                _ip("-n", name, "addr", "add", f"{ADDRESS.format(i + 1)}/24", "dev", device)
                _ip("-n", name, "link", "set", device, "up")
            self._stack = stack.pop_all()
        for host in range(self.count):
            self.set_rate(host, self.rate)
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(self.count):
            self.stop(host)  # torchrun's processes outlive a torchrun that was killed
        self._stack.close()

    @property
    def payload(self) -> float:
        """Return the payload's bytes per second: the bucket counts the headers of each frame."""
        return self.bits_per_second / 8 * PAYLOAD

    @property
    def bits_per_second(self) -> int:
        """Return the rate as a number."""
        unit = next(unit for unit in UNITS if self.rate is not None and self.rate.endswith(unit))
        return int(float(str(self.rate).removesuffix(unit)) * UNITS[unit])

    def set_rate(self, host: int, rate: str | None) -> None:
        """Set the rate at which a host sends."""
        if rate is not None:
            bucket = f"root tbf rate {rate} burst {BURST} latency {QUEUE}".split()
            _run(
                "tc", "-n", self.names[host], "qdisc", "replace", "dev", self.devices[host], *bucket
            )

    def set_up(self, host: int, up: bool) -> None:
        """Take a host's link down, or up again."""
        _ip("-n", self.names[host], "link", "set", self.devices[host], "up" if up else "down")

    def stop(self, host: int) -> None:
        """Kill all processes of a host."""
        for process in _ip("netns", "pids", self.names[host]).split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)

    def vanish(self, host: int) -> None:
        """Take a host away: its link first, so that nobody hears of the end of its processes."""
        self.set_up(host, False)
        self.stop(host)

    def start(
        self, host: int, command: Sequence[str], log: Path, **variables: str
    ) -> subprocess.Popen:
        """Start a command on a host. log: for its output. variables: of its environment."""
        environment = os.environ | {
            **variables,
            "WIRE": self.devices[host],
            "GLOO_SOCKET_IFNAME": self.devices[host],
            "OMP_NUM_THREADS": "1",
        }
        whole = ["ip", "netns", "exec", self.names[host], *command]
        with log.open("w") as out:
            return subprocess.Popen(whole, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def torchrun(self, processes: int, program: Sequence[str], limit: float) -> str:
        """Run a program under torchrun on all hosts, and return the first host's output.

        processes: on each host. limit: seconds. Raises RuntimeError if it fails or takes longer.
        """
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder, f"{host}.log") for host in range(self.count)]
            nodes = []
            for host, log in enumerate(logs):
                flags = f"--nnodes {self.count} --nproc-per-node {processes} --node-rank {host}"
                flags += f" --master-addr {ADDRESS.format(1)} --master-port {PORT}"
                command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
                nodes.append(self.start(host, [*command, *flags.split(), *program], log))
            try:
                codes = [node.wait(limit) for node in nodes]
            except subprocess.TimeoutExpired:
                codes = [-1]
                for host in range(self.count):
                    self.stop(host)
            texts = [log.read_text() for log in logs]
        if any(codes):
            raise RuntimeError("\n".join(text[-3000:] for text in texts))
        return texts[0]

    def _link(self, one: str, other: str) -> None:
        _ip("link", "add", one, "type", "veth", "peer", "name", other)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--processes", type=int, default=1, help="on each host")
    parser.add_argument("--limit", type=float, default=600, help="seconds")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if why := missing():
        parser.error(why)
    with Wire(args.hosts, args.rate) as wire:
        print(wire.torchrun(args.processes, args.program, args.limit), end="")


if __name__ == "__main__":
    main()
