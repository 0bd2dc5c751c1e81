"""A plan on a device that is registered from outside (PrivateUse1), as TorchTPU's will be."""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import torchgspmd as gspmd

_setup_privateuseone_for_python_backend("tpu")


class OnDevice(Tensor):
    """A tensor of the device, whose numbers lie in a CPU's tensor."""

    @staticmethod
    def __new__(cls, numbers: Tensor):
        empty = torch._C._acc.create_empty_tensor(numbers.shape, numbers.dtype)
        return torch.Tensor._make_subclass(cls, empty)

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers


def kernel(op, *args, **kwargs):
    args, kwargs = pytree.tree_map_only(OnDevice, lambda x: x.numbers, (args, kwargs))
    return pytree.tree_map_only(Tensor, OnDevice, op(*args, **kwargs))


library = torch.library.Library("_", "IMPL")
library.fallback(kernel, "PrivateUse1")

mesh = gspmd.Mesh(data=2, model=2)
MARKS = {"0.weight": "model _", "2.weight": "_ model"}
texts = []
for place in (lambda x: x, OnDevice):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    for module in model.modules():
        for name, parameter in [*module._parameters.items()]:
            module._parameters[name] = torch.nn.Parameter(place(parameter.data))
    gspmd.annotate(model, mesh, MARKS)
    x = place(torch.randn(8, 8))
    plan = gspmd.plan(model, x, mesh=mesh, in_specs="data _", grad=True)
    texts.append(plan.text(full=True))
assert x.device.type == "tpu"
assert texts[0] == texts[1], "\n".join(texts)
print(plan.sent_bytes)
