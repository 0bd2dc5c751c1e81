"""torchtitan's Llama 3 by marks equals its own FSDP2 and tensor parallelism."""

import torch
import torch.distributed as dist
from ranks import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as titan
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3 import parallelize_llama as own

from torchgspmd.integrations.torchtitan import parallelize_llama

ROWS, LENGTH, WORDS, STEPS = 4, 16, 64, 4
WHOLE = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def weights():
    """The weights of one device."""
    torch.manual_seed(3)
    model = Transformer(arguments())
    with torch.no_grad():
        model.init_weights()
    return model.state_dict()


def arguments():
    return TransformerModelArgs(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=WORDS, multiple_of=8, max_seq_len=32
    )


def config(checkpoint):
    job = JobConfig()
    job.training.seq_len = LENGTH
    job.activation_checkpoint.mode = checkpoint
    job.training.mixed_precision_param = "float32"
    return job


def train(dims, job, parallelize):
    """Losses and gradient norms of torchtitan's step, and the weights after it."""
    with torch.device("meta"):
        model = Transformer(arguments())
    model = parallelize(model, dims, job)
    for each in model.modules():
        if isinstance(each, FSDPModule):
            each.set_force_sum_reduction_for_comms(True)  # gloo has no other one
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    set_model_state_dict(model, weights() if dist.get_rank() == 0 else {}, options=WHOLE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    batch = dims.get_mesh("batch") if dims.dp_enabled else None
    degree, mine = (batch.size(), batch.get_local_rank()) if batch is not None else (1, 0)
    context = titan.get_train_context(dims.tp_enabled)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        tokens, targets = torch.randint(WORDS, (2, ROWS, LENGTH))
        rows = slice(mine * ROWS // degree, (mine + 1) * ROWS // degree)
        with context():
            loss = cross_entropy_loss(model(tokens[rows]), targets[rows]) / targets.numel()
            loss.backward()
        norm = titan.clip_grad_norm_(list(model.parameters()), 0.5, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        total = total.full_tensor() if hasattr(total, "full_tensor") else total
        if batch is not None:
            total = titan.dist_sum(total, batch)
        found.append((float(total), float(norm)))
    return found, get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


@distributed("data=2,model=2", timeout=200)
def test_losses_and_weights(mesh):
    parallel_dims.device_type = "cpu"  # torchtitan takes CUDA where there is no card
    for sizes, checkpoint in (
        ({"dp_shard": 2, "tp": 2}, "full"),
        ({"dp_shard": 2, "tp": 2}, "none"),
        ({"dp_shard": 4}, "none"),
        ({"dp_replicate": 2, "dp_shard": 2}, "none"),
    ):
        degrees = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
        dims = parallel_dims.ParallelDims(**{**degrees, **sizes}, world_size=mesh.size)
        dims.build_mesh()
        expected, wanted = train(dims, config(checkpoint), own)
        found, got = train(dims, config(checkpoint), parallelize_llama)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert {*got} == {*wanted}
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
