"""A model with a loop over blocks, and the same with a pipeline of them: what tests compare."""

import copy

import torch

import torchgspmd as gspmd

EXACT = {"rtol": 1e-10, "atol": 1e-12}  # float64


def with_pipeline(alone, mesh, **options):
    """Let vectors of the blocks differ; return a copy whose blocks are stages of a pipeline."""
    with torch.no_grad():
        for parameter in alone.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model = copy.deepcopy(alone)
    if "model" in mesh.names:
        marks = {"up.weight": "model _", "down.weight": "_ model"}
        for block in model.blocks:
            gspmd.annotate(block, mesh, marks)
    if hasattr(model, "loss"):  # of a microbatch, which the pipeline computes
        options["loss"] = model.loss
    model.blocks = gspmd.pipeline(model.blocks, mesh, **options)
    return model


def check_gradients(model, gradients, alone):
    """Compare the gradients of the pipeline's stacked weights with those of each block."""
    for name, parameter in alone.named_parameters():
        gradient = gradients.get(name)
        if gradient is None:
            _, layer, of_block = name.split(".", 2)
            gradient = gradients[f"blocks.block.{of_block}"][model.blocks.place(int(layer))]
        torch.testing.assert_close(gradient, parameter.grad, **EXACT)


def check(alone, model, mesh, *args):
    """Compare loss and gradients of a plan with those of one device."""
    loss = alone(*args)
    loss.backward()
    torch.testing.assert_close(model(*args), loss, **EXACT)  # on one device: a loop
    specs = ("data _" if "data" in mesh.names else None, *[None for _ in args[1:]])
    plan = gspmd.plan(model, *args, mesh=mesh, in_specs=specs, grad=True)
    found, gradients = plan.simulate(*args)
    torch.testing.assert_close(found, loss.detach(), **EXACT)
    check_gradients(model, gradients, alone)


def check_planned(model, mesh, batch, alone, loss):
    """Compare a plan's loss and gradients, by their names in state_dict, with one device's."""
    x, labels = batch
    specs = ("data _ _", "data") if "data" in mesh.names else None
    plan = gspmd.plan(model, x, labels, mesh=mesh, in_specs=specs, grad=True)
    found, gradients = plan.simulate(x, labels)
    torch.testing.assert_close(found, loss.detach(), **EXACT)
    named = copy.deepcopy(model)
    for name, parameter in named.named_parameters():
        gradient = gradients.get(name)
        parameter.data = torch.zeros_like(parameter) if gradient is None else gradient
    named = named.state_dict()
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(named[name], parameter.grad, **EXACT, msg=name)
