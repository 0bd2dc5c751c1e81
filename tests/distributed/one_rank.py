"""Calls that one rank makes alone, or leaves out: the program of test_one_rank.py.

    python one_rank.py FOLDER CASE:RANKS:WHO ...     # FOLDER/CASE.RANKS.RANK is what a rank wrote

One process imports torch and forks the ranks of all cases, so that a case takes a second.
"""

import gc
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Replicate

import torchgspmd as gspmd
from torchgspmd.runtime import checkpoint
from torchgspmd.runtime.peer_copies import PeerCopies
from torchgspmd.tools.evaluation import Meter, accuracy

AT_ONCE, LIMIT = 4, 60.0  # processes; seconds of waits, which no case may need


class Norm(torch.optim.Optimizer):
    """An optimizer whose step communicates: it divides by the norm of a column."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() == 2:
                    p.sub_(1e-3 * p.grad / p.grad.softmax(0))


class Run:
    """One rank's training."""

    def __init__(self, ranks):
        torch.manual_seed(0)
        mesh = gspmd.Mesh(data=ranks)
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
        gspmd.annotate(model, mesh, {"0.weight": "data _"})
        self.folder = Path(tempfile.gettempdir()) / f"one-rank-{os.environ['MASTER_PORT']}"
        self.model = gspmd.parallelize(model, mesh, in_specs="data _", timeout=LIMIT)
        self.optimizer, self.mesh = Norm(self.model.parameters()), mesh
        self.x, self.labels = torch.randn(16, 16), torch.arange(16) % 8
        self.whole = gspmd.full_state_dict(self.model)
        other = nn.Linear(16, 8)
        step = gspmd.train_step(
            other, torch.optim.SGD(other.parameters(), 0.1), lambda m, x: m(x).square().mean()
        )
        self.train = gspmd.parallelize(step, mesh, in_specs="data _", timeout=LIMIT)
        gspmd.save(self.folder, self.model, step=1)

    def backward(self):
        self.model(self.x).square().mean().backward()

    def evaluate(self):
        meter = Meter({"top-1": accuracy()})
        logits = self.model.get_parameter("0.weight")[:, :8]
        meter.update(logits, self.labels)
        meter.compute()

    def state(self):
        return {"model": self.model.state_dict()}


CALLS = {  # the call, and its name in the error
    "forward": (lambda run: run.model(run.x), "a call of the module"),
    "backward": (None, "the backward of the module"),
    "save": (lambda run: gspmd.save(run.folder, run.model, step=3), "gspmd.save"),
    "load": (lambda run: gspmd.load(run.folder, run.model), "gspmd.load"),
    "save_in_thread": (
        lambda run: gspmd.save(run.folder, run.model, step=3, asynchronous=True),
        "gspmd.save",
    ),
    "full_state": (lambda run: gspmd.full_state_dict(run.model), "full_state_dict"),
    "load_full_state": (
        lambda run: gspmd.load_full_state_dict(run.model, run.whole.items()),
        "load_full_state_dict",
    ),
    "clip": (lambda run: nn.utils.clip_grad_norm_(run.model.parameters(), 1.0), "clip_grad_norm_"),
    "full_tensor": (lambda run: run.model.get_parameter("0.weight").full_tensor(), "full_tensor"),
    "item": (lambda run: run.model.get_parameter("0.weight").sum().item(), "full_tensor"),
    "redistribute": (
        lambda run: run.model.get_parameter("0.weight").redistribute(placements=[Replicate()]),
        "redistribute",
    ),
    "softmax": (lambda run: run.model.get_parameter("0.weight").softmax(0), "softmax"),
    "optimizer": (lambda run: run.optimizer.step(), "softmax"),
    "compare": (
        lambda run: gspmd.compare(run.model, nn.Sequential(nn.Linear(16, 16)), run.x),
        "gspmd.compare",
    ),
    "evaluate": (Run.evaluate, "Meter.compute"),
    "dcp_save": (
        lambda run: dcp.save(run.state(), checkpoint_id=run.folder / "dcp"),
        "torch.distributed.",
    ),
    "async_save": (
        lambda run: dcp.async_save(run.state(), checkpoint_id=run.folder / "dcp"),
        "",
    ),
    "killed": (lambda run: gspmd.save(run.folder, run.model, step=3), ""),
    "train_step": (lambda run: run.train(run.x), "a call of the module"),
    "draw": (lambda run: run.model.get_parameter("0.weight").data.normal_(), "random numbers"),
    "copies": (
        lambda run: PeerCopies(run.folder).save(run.model, None, 3, {}),
        "in memory",
    ),
}


BEHIND = ("clip", "optimizer")  # the backward
ALL = ("killed", "async_save")  # what all ranks call


def train(name, rank, ranks, who, since):
    """Take four steps. In the third one the ranks of `who` alone make the call, or leave it out."""
    dist.init_process_group("gloo")
    base, _, left = name.partition("-")
    run, (call, _), leave = Run(ranks), CALLS[base], left == "left"
    for step in range(1, 5):
        loss = run.model(run.x).square().mean()
        if step == 3:
            dist.barrier()
            since[0] = time.time()
        makes = step == 3 and call is not None and (base in ALL or (rank in who) != leave)
        if base == "killed" and step == 3 and rank in who:
            checkpoint.failure_of = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        if makes and base not in BEHIND:
            call(run)
        if not (step == 3 and call is None and rank in who):
            loss.backward()
        if makes and base in BEHIND:
            call(run)
        if base not in (*BEHIND, "backward"):
            run.optimizer.step()
        run.optimizer.zero_grad()


def start(folder, name, ranks, who):
    """Fork the ranks of a case; return their ids."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ids = []
    for rank in range(ranks):
        if child := os.fork():
            ids.append(child)
            continue
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(address, WORLD_SIZE=str(ranks), RANK=str(rank))
        for file, end in ((1, "out"), (2, "err")):
            path = f"{folder}/{name}.{ranks}.{rank}.{end}"
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), file)
        since = [0.0]
        try:
            train(name, rank, ranks, who, since)
            row = {"error": "", "text": "no error"}
        except BaseException as error:
            row = {"error": type(error).__name__, "text": str(error)}
            sys.excepthook(*sys.exc_info())
        os.write(1, f"{json.dumps(row | {'late': time.time() - since[0]})}\n".encode())
        time.sleep(0.5)
        sys.exit()
    return ids


def wait(running, at_most, seconds):
    """Wait until at most so many processes run; kill those that run longer than that."""
    end = time.monotonic() + seconds
    while sum(map(len, running)) > at_most:
        if time.monotonic() > end:
            for child in [child for ids in running for child in ids]:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
        for ids in running:
            ids[:] = [child for child in ids if os.waitpid(child, os.WNOHANG) == (0, 0)]


def main(folder, *cases):
    nn.Linear(2, 2).weight.sum().backward()
    mesh = gspmd.Mesh(data=2)
    gspmd.plan(nn.Linear(16, 16), torch.ones(16, 16), mesh=mesh, grad=True)  # imports
    gspmd.parallelize, gspmd.save, gspmd.compare, gspmd.train_step  # noqa: B018 (imports, too)
    gc.freeze()
    running = []
    for case in cases:
        name, ranks, who = case.split(":")
        wait(running, max(AT_ONCE - int(ranks), 0), 60)
        running.append(start(folder, name, int(ranks), {int(rank) for rank in who.split(",")}))
    wait(running, 0, 60)
    Path(folder, "done").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
