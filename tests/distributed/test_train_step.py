"""train_step on processes: the numbers of one process, and the bytes of the formula on the wire."""

import torch
import zero_step
from ranks import distributed
from step_cases import averaged, check, loop, pair
from torch.utils._python_dispatch import TorchDispatchMode

import torchgspmd as gspmd
from torchgspmd.comm.kinds import all_gather, all_reduce, reduce_scatter
from torchgspmd.comm.process_groups import assumes_cuda
from torchgspmd.rules.custom_ops.updates import adam_

C10D = torch.ops._c10d_functional
BY_NCCL = (all_gather, all_reduce, reduce_scatter)


class Wire(TorchDispatchMode):
    """The bytes that this process sends: over gloo in all_to_alls, for CUDA by each kind."""

    def __init__(self, ranks):
        super().__init__()
        self.rank, self.ranks, self.sent = torch.distributed.get_rank(), ranks, 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is C10D.all_to_all_single.default:
            tensor, _, sends, _ = args
            share = (sum(sends) - sends[self.rank]) / max(sum(sends), 1)
            self.sent += share * tensor.nbytes
        elif func.namespace == "_c10d_functional" and func is not C10D.wait_tensor.default:
            assert assumes_cuda(), f"over gloo {func} sends more, or can damage memory"
            (kind,) = (k for k in BY_NCCL if any(func is wire.op for wire in k.wire))
            whole = self.ranks if kind is all_gather else 1
            self.sent += kind.sent(args[0].nbytes * whole, self.ranks)
        return func(*args, **(kwargs or {}))


@distributed("data=2")
def test_bytes_of_zero_on_the_wire(mesh):
    layers = 3
    for stage in zero_step.STAGES:
        for dtype in (None, torch.bfloat16)[: 2 if stage == "3" else 1]:
            step, x, options = zero_step.case(stage, layers, dtype)
            alone, _, _ = zero_step.case(stage, layers, dtype)
            alone.load_state_dict(step.state_dict())
            step = gspmd.parallelize(step, zero_step.LAYOUT.on(mesh), **options)
            for _ in range(2):
                with Wire(mesh.size) as wire:
                    loss = step(x)
                torch.testing.assert_close(loss, alone(x))
            expected = zero_step.expected_bytes(stage, layers, mesh.size, dtype)
            assert 0 <= wire.sent - expected <= 64, stage  # the loss, and the comparison of ranks
            calls = [n for p in step._all_programs() for n in p.forward.__self__.graph.nodes]
            (update,) = [n for n in calls if n.target is adam_]
            if stage != "1":  # there a part of the weights is updated, and gathered
                assert all(x.op == "placeholder" for i in (0, 2, 3) for x in update.args[i])


@distributed("data=2")
def test_optimizers(mesh):
    """Norms are of whole tensors; clipping, averages and a schedule are in the program."""
    table = gspmd.Layout({"batch": "data", "hidden": None, "embed": "data"})
    for name in ("adafactor", "lamb"):
        model, reference, optimizer, other, x = pair(name)
        average = averaged(reference)
        step = gspmd.train_step(model, optimizer, clip=0.1, average=0.9)
        step = gspmd.parallelize(step, table.on(mesh), in_specs="batch _")
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, other)]
        for _ in range(4):
            torch.testing.assert_close(step(x), loop(reference, other, x), rtol=1e-10, atol=1e-10)
            average.update_parameters(reference)
            for schedule in schedules:
                schedule.step()
        check(step.model, reference)
        check(step.average, average.module)
        assert len(step._all_programs()) == 2, name  # of the first rate, and of all others
