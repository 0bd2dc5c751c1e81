"""Ranks that are killed, raise, leave, hang or are slow: the program of test_deaths.py.

    python deaths.py FOLDER CASE:RANKS:WHO ...       # FOLDER/CASE.RANK is what a rank wrote
    torchrun --nproc-per-node 2 deaths.py before_step:2:1

One process imports torch and forks the ranks of all cases, so that a case takes a second.
"""

import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate

import torchgspmd as gspmd
from torchgspmd import collectives
from torchgspmd.comm.kinds import WIRE_OPS
from torchgspmd.runtime import sharded_module

AT_ONCE = 9  # processes
LIMIT, SHORT = 60.0, 3.0  # seconds of waits; in the cases that wait for it
REGIONS = {  # what a region computes of its rows, and the layout of its result
    "all_reduce": (lambda x: collectives.all_reduce(x, "data"), "_ _"),
    "all_gather": (lambda x: collectives.all_gather(x, "data"), "_ _"),
    "reduce_scatter": (lambda x: collectives.reduce_scatter(x, "data"), "data _"),
    "all_to_all": (lambda x: collectives.all_to_all(x, "data", 1, 0), "_ data"),
    "permute": (lambda x: collectives.permute(x, "data", 1), "data _"),
}
PLAIN = ("plain_all_gather", "plain_reduce_scatter")  # without an exchange in their place
OPERATIONS = {  # on DTensors, that communicate
    "full_tensor": lambda p: p.full_tensor(),
    "item": lambda p: p.sum().item(),
    "softmax": lambda p: p.softmax(0),
    "redistribute": lambda p: p.redistribute(placements=[Replicate()]),
    "redistribute_async": lambda p: (
        p.redistribute(placements=[Replicate()], async_op=True).to_local().sum().item()
    ),
    "backward_of_dtensors": lambda p: p.redistribute(placements=[Replicate()]).sum().backward(),
    "setitem": lambda p: p.data.__setitem__(3, 0.0),
    "qr": lambda p: torch.linalg.qr(p),
}


class Model(nn.Module):
    def __init__(self, mesh, case):
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.mesh, self.region = mesh, REGIONS.get(case.removeprefix("plain_"))

    def forward(self, x):
        x = self.up(x).relu()
        if self.region is not None:
            function, layout = self.region
            x = gspmd.manual(function, self.mesh, "data _", layout, axes=("data",))(x)
        return self.down(x).square().mean()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Rank:
    """One process of a case. who: the ranks to which it happens."""

    def __init__(self, case, rank, ranks, who):
        self.case, self.rank, self.ranks, self.who = case, rank, ranks, who
        self.is_one, self.since = rank in who, time.time()

    def say(self, **row):
        os.write(1, f"{json.dumps(row | {'time': time.time()})}\n".encode())

    def die(self, case, place=""):
        """Kill this process if it is the case, and the process to which it happens."""
        if self.case == case and self.is_one:
            self.say(dies=place or case)
            os.kill(os.getpid(), signal.SIGKILL)

    def inside(self, function):
        """Let the next collective of a program be the place of death, or call a function there."""

        def instead(name):
            def run(*_, **__):
                self.die(self.case, name) if function is None else function()

            return run

        ops = torch.ops._c10d_functional
        if self.case in PLAIN:  # weights are gathered before
            name = "all_gather_into_tensor" if "gather" in self.case else "reduce_scatter_tensor"
            getattr(ops, name).default = instead(name)
            return
        for name in ("all_reduce", "all_reduce_", "all_to_all_single", "all_gather_into_tensor"):
            getattr(ops, name).default = instead(name)
        ops.reduce_scatter_tensor.default = instead("reduce_scatter_tensor")
        dist.batch_isend_irecv = instead("batch_isend_irecv")  # of a pipeline

    def model(self):
        if self.case in PLAIN:
            WIRE_OPS.update({op: replace(row, over_gloo=None) for op, row in WIRE_OPS.items()})
        mesh = gspmd.Mesh(**{"stage" if self.case == "pipeline" else "data": self.ranks})
        if self.case == "pipeline":
            blocks = nn.ModuleList([Block() for _ in range(self.ranks)])
            model = gspmd.pipeline(blocks, mesh, microbatches=4, loss=lambda y: y.square().mean())
            return gspmd.parallelize(model, mesh, timeout=LIMIT)
        model = Model(mesh, self.case)
        gspmd.annotate(model, mesh, {"up.weight": "data _"})
        limit = SHORT if self.case in ("stuck", "stopped") else LIMIT
        return gspmd.parallelize(model, mesh, in_specs="data _", timeout=limit)

    def train(self):
        """Take four steps. In the third one it happens."""
        torch.manual_seed(0)
        dist.init_process_group("gloo")
        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        if self.case == "planning" and self.is_one:
            sharded_module.shared_plan = lambda *_: self.die("planning")
        for step in range(1, 5):
            if step == 3:
                self.before_step(model)
            self.since = time.time()
            loss = model(torch.ones(144, 12))
            if step == 3:
                self.die("after_forward")
                if self.is_one and self.case == "backward":
                    self.inside(None)
            loss.backward()
            if step == 3:
                self.die("optimizer")
            if step == 3:
                optimizer.register_step_pre_hook(lambda *_: self.die("optimizer_step"))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step == 3 and self.case in ("computing", "two", "rank_0"):
                self.die(self.case)
                torch.cumsum(torch.ones(10), 0)
                time.sleep(1.5 * (self.case == "computing"))

    def before_step(self, model):
        self.die("before_step")
        if self.case in OPERATIONS:
            self.die(self.case)
            OPERATIONS[self.case](model.up.weight)
            time.sleep(30)
        if not self.is_one:
            return
        if self.case in (*REGIONS, *PLAIN, "pipeline"):
            self.inside(None)
        elif self.case in ("raised", "raised_in_child"):
            self.say(dies=self.case)
            raise LookupError("no such batch")
        elif self.case == "left":
            self.say(dies=self.case)
            sys.exit()
        elif self.case == "stuck":
            read_a_batch()
        elif self.case == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.case == "slow":
            time.sleep(4.5)
        elif self.case == "raised_in_call":
            self.inside(self.fail)

    def fail(self):
        self.say(dies=self.case)
        raise MemoryError("out of memory")

    def run(self):
        try:
            self.train()
            self.say(done=True)
        except gspmd.ShardingError as error:
            row = {"error": type(error).__name__, "text": str(error)}
            self.say(**row, seconds=time.time() - self.since)
        except MemoryError:
            time.sleep(30)  # It was caught, and the process lives on.


def read_a_batch():
    time.sleep(60)


def start(folder, case, ranks, who):
    """Fork the ranks of a case; return their ids. Return none in a rank, which ends as usual."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    ids = []
    for rank in range(ranks):
        if child := os.fork():
            ids.append(child)
            continue
        os.environ.update(address, RANK=str(rank))
        for file, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{case}.{rank}.{name}", os.O_CREAT | os.O_WRONLY), file)
        one = Rank(case, rank, ranks, who)
        if case != "raised_in_child":
            one.run()
        else:
            process = multiprocessing.get_context("fork").Process(target=one.run)
            process.start()
            process.join()
        return None
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
    mesh, alone = gspmd.Mesh(data=2), Model(gspmd.Mesh(data=2), "")
    torch.optim.SGD(alone.parameters())
    gspmd.plan(alone, torch.ones(144, 12), mesh=mesh, grad=True)  # imports what it needs
    gc.freeze()  # A collection in a rank has only what came later.
    running = []
    for case in cases:
        name, ranks, who = case.split(":")
        wait(running, AT_ONCE - int(ranks), 60)
        ids = start(folder, name, int(ranks), {int(rank) for rank in who.split(",")})
        if ids is None:
            return
        running.append(ids)
    wait(running, 0, 30)
    Path(folder, "done").touch()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        name, count, one = sys.argv[1].split(":")
        Rank(name, int(os.environ["RANK"]), int(count), {int(one)}).run()
    else:
        main(*sys.argv[1:])
