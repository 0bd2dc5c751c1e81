"""Numbers at run time: parallelize(audit=k), and gspmd.compare on processes."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import distributed, on_cpu
from torch import nn

import torchgspmd as gspmd
from torchgspmd.comm.value_check import hash_of_bits

EVERY = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 1))


def flip(tensor, bit=20):
    local = getattr(tensor, "_local_tensor", tensor).detach()
    if dist.get_rank() == dist.get_world_size() - 1:
        local.view(torch.int32).flatten()[-1:].bitwise_xor_(1 << bit)


def first_error(model):
    """Return the error of the next EVERY calls, and the number of calls."""
    for call in range(1, EVERY + 1):
        try:
            model(torch.ones(4, 8))
        except gspmd.ShardingError as error:
            return str(error), call
    return "", EVERY


@distributed("data=2,model=2")
@on_cpu
def test_a_flipped_bit_is_named_with_its_rank(mesh):
    model = net()
    gspmd.mark_sharding(model[0].weight, mesh, "model _")
    gspmd.mark_sharding(model[2].weight, mesh, "_ data+model")
    model = gspmd.parallelize(model, mesh, in_specs="data _", check={"audit": EVERY})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    state = optimizer.state[model[2].bias]
    cases = {
        "'1.weight' has other bits on rank 3 than on ranks 0, 1, 2": model[1].weight,
        "'0.weight' has other bits on rank 3 than on rank 1": model[0].weight,
        "'exp_avg of 2.bias' has other bits on rank 3 than on": state["exp_avg"],
        "'step of 2.bias' has other bits on rank 3 than on": state["step"],
    }
    for said, tensor in cases.items():
        assert first_error(model)[0] == ""
        flip(tensor)
        error, calls = first_error(model)
        first, _, why, fix = error.splitlines()
        assert first.startswith(said) and calls <= EVERY, (error, calls)
        call = model._audit.calls
        assert f"audit of call {call}: these ranks hold one value, and did at {call - 3}" in why
        assert "; element [" in why and "on rank 3 and" in why, why
        assert ("either may be right" in why) == ("0.weight" in first), why
        assert f"checkpoint before call {call - 2}, and test the memory of" in fix, fix
        flip(tensor)
    flip(model[2].weight)  # of which no other rank has a replica
    flip(model[1].bias)
    error, _ = first_error(model)
    assert error.startswith("'1.bias'") and "2.weight" not in error, error


@distributed("data=2")
@on_cpu
def test_other_harm(mesh):
    """NaN on all ranks, a loss that differs, an optimizer that one rank has."""
    model = gspmd.parallelize(net(), mesh, in_specs="data _", check={"audit": 1})
    model(torch.ones(4, 8)).sum().backward()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model[0].bias.fill_(torch.nan)
    with pytest.raises(gspmd.ShardingError, match=r"'0\.bias' has NaN on rank 0\n"):
        model(torch.ones(4, 8))
    copied(torch.ones(4, 8)).sum().backward()
    audit = copied._audit
    assert audit is not model._audit and audit.model is copied._model
    audit._loss[0].add_(dist.get_rank())
    with pytest.raises(gspmd.ShardingError, match="^the loss differs between ranks: .* on rank 1"):
        copied(torch.ones(4, 8))
    copied(torch.ones(4, 8)).sum().backward()
    audit._norms[1].mul_(1 + dist.get_rank())
    with pytest.raises(gspmd.ShardingError, match=r"^the gradient of 0.weight differs"):
        copied(torch.ones(4, 8))
    optimizer = torch.optim.Adam(copied.parameters())
    copied(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if dist.get_rank():
        audit.optimizers.clear()
    with pytest.raises(gspmd.ShardingError, match=r"numbers of tensors: \[\d+, 13\]"):
        copied(torch.ones(4, 8))


@distributed("data=2")
def test_compare_knows_the_layout_of_a_model(mesh):
    """Marks that name dimensions."""
    model, x = net(), torch.ones(4, 8)
    gspmd.mark_sharding(model[0].weight, "hidden _")
    reference = copy.deepcopy(model)
    layout = gspmd.Layout({"hidden": "data"}).on(mesh)
    assert gspmd.compare(gspmd.parallelize(model, layout), reference, x)


@distributed("data=2")
def test_compare_leaves_a_model_as_it_was(mesh):
    reference = nn.Sequential(nn.Linear(8, 13), nn.BatchNorm1d(13), nn.Linear(13, 1))
    model = copy.deepcopy(reference)
    gspmd.mark_sharding(model[0].weight, mesh, "data _")
    model = gspmd.parallelize(model, mesh, in_specs="data _")
    x = torch.randn(5, 8)
    model(x).sum().backward()
    reference(x)
    before = [t.full_tensor().clone() for t in model.state_dict().values()]
    gradients = [p.grad.full_tensor().clone() for p in model.parameters()]
    found = gspmd.compare(model, reference, x)
    assert found and found.compared > 20, found
    for was, now in zip(before, model.state_dict().values()):
        assert torch.equal(was, now.full_tensor())
    for was, p in zip(gradients, model.parameters()):
        assert torch.equal(was, p.grad.full_tensor())
    with torch.no_grad():
        model[2].weight._local_tensor[0, 3] += 1.0
    found = gspmd.compare(model, reference, x)
    assert str(found).startswith("2.weight, parameter: [0, 3] is "), found
    assert found.first.ranks == (0, 1) and found.others[0].startswith("%"), found
    with torch.no_grad():
        model[2].weight._local_tensor[0, 3] -= 1.0 * (dist.get_rank() == 0)
    found = gspmd.compare(model, reference, (x,))
    assert found.first.ranks == (1,), found  # one of the replicas


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 1030),
        torch.randn(2, 4096).bfloat16(),
        torch.randn(5000, dtype=torch.complex64),
        torch.randn(70).double()[1:],
        torch.randn(4100)[3:],
        torch.ones(9, dtype=torch.bool),
        torch.randn(64, 64).t(),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_every_bit_counts(tensor):
    before = int(hash_of_bits(tensor))
    flat = tensor.contiguous().flatten().view(torch.uint8).clone()
    places = range(0, len(flat), max(1, len(flat) // 20))
    for at in places:
        for bit in (0, 7):
            other = flat.clone()
            other[at] ^= 1 << bit
            assert int(hash_of_bits(other.view(tensor.dtype).view(tensor.shape))) != before


def test_an_audit_of_no_call_is_refused():
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(gspmd.ShardingError, match="audit is"):
            gspmd.parallelize(nn.Linear(2, 2), gspmd.Mesh(data=1), check={"audit": wrong})
