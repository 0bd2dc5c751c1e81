"""A user's file for a type checker: each public name, with the types that users rely on.

test_wheel.py runs pyright on it, against the installed wheel. It is never imported.
"""

from concurrent.futures import Future
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import torchgspmd as gspmd

mesh = gspmd.Mesh(data=2, model=4)
model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.GELU())
x = torch.randn(8, 64)

assert_type(mesh.size, int)
assert_type(gspmd.annotate(model, mesh, {"0.weight": "model _"}), nn.Sequential)
gspmd.annotate(model, mesh, gspmd.marks("llama"))
assert_type(gspmd.mark_sharding(x, mesh, "data _"), Tensor)
assert_type(gspmd.shard_batch(x, mesh, "data _"), Tensor)
gspmd.mark_sharding(x, mesh, [gspmd.UNCONSTRAINED, None])
gspmd.Layout({"batch": "data"}).on(mesh)
assert_type(gspmd.ShardSpec.parse("data _"), gspmd.ShardSpec)
gspmd.rule(torch.ops.aten.sin.default, "a -> a")

plan = gspmd.plan(model, x, mesh=mesh, in_specs="data _", out_specs="same")
assert_type(plan, gspmd.Plan)
assert_type(plan.sent_bytes, float)
assert_type(plan.text(full=True), str)
assert_type(plan.collectives[0].module, str)
gspmd.reshard(x, "data _")
for collective in plan.collectives:
    assert_type(collective, gspmd.Collective)
try:
    gspmd.plan(model, x, mesh=mesh, backend="torhc")  # pyright: ignore[reportArgumentType]
except gspmd.ShardingError as error:
    print(error)

sharded = gspmd.parallelize(model, mesh, in_specs="auto", backend="inductor", dynamic=True)
assert_type(sharded, nn.Module)
optimizer = torch.optim.AdamW(sharded.parameters())
assert_type(gspmd.save("run", sharded, optimizer, step=1), Future[None] | None)
assert_type(gspmd.load(Path("run"), sharded, optimizer), int)
gspmd.full_state_dict(sharded)
gspmd.load_full_state_dict(sharded, {})
gspmd.load_safetensors(sharded, "folder")
assert_type(gspmd.transfer(sharded, model).sent_bytes, int)

blocks = [nn.Linear(64, 64) for _ in range(4)]
assert_type(gspmd.stack(blocks), nn.Module)
assert_type(gspmd.pipeline(blocks, mesh, "model", microbatches=4), nn.Module)
whole = nn.Sequential(nn.Sequential(*blocks))
assert_type(gspmd.pipeline_model(whole, "0", mesh, "model", microbatches=4), nn.Sequential)
gspmd.train_step(model, optimizer)
gspmd.manual(torch.sin, mesh, "model _", "model _", axes=["model"])
assert_type(gspmd.collectives.all_reduce(x, "model"), Tensor)
routed = gspmd.moe.dispatch(x, torch.zeros(8, 1, dtype=torch.long), experts=2)
assert_type(routed.rows, Tensor)

gspmd.BatchSampler(1000, 8, mesh)
gspmd.StepLog()
gspmd.launch(print, 2)
gspmd.elastic(print, 2, folder="run")
assert_type(gspmd.calibrate(mesh), gspmd.Hardware)
assert_type(gspmd.Hardware.of("h100"), gspmd.Hardware)
gspmd.suggest(model, x, devices=8)[0]
gspmd.compare_with_xla(plan)
gspmd.compare(sharded, model, x)
with gspmd.debug(sharded):
    sharded(x)
assert_type(gspmd.frame_names(), dict[str, dict[str, str]])
assert_type(gspmd.name_frames({"entries": [0]}), dict[str, list[int]])
gspmd.visualize("data _", mesh, (8, 64))
gspmd.evaluation.evaluate(sharded, [(x, x)], {"top-1": gspmd.evaluation.accuracy()})
gspmd.doctor()
