"""A whole training script: torchrun --nproc-per-node 4 train.py --mesh data=2,model=2"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchgspmd as gspmd

WORDS, WIDTH, LENGTH, LAYERS, HEADS = 96, 64, 32, 2, 4
MARKS = {  # which dimension of a weight an axis divides; "_" for none
    "blocks.*.qkv.weight": "_ model _",  # [q, k or v; heads; width]
    "blocks.*.out.weight": "_ model",
    "blocks.*.up.weight": "model _",
    "blocks.*.down.weight": "_ model",
    "head.weight": "model _",
}


class QKV(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x):
        y = torch.einsum("bsm,knm->kbsn", x, self.weight)
        return y.unflatten(-1, (HEADS, -1)).transpose(2, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.qkv = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), QKV()
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = F.scaled_dot_product_attention(*self.qkv(self.norm1(x)), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens, targets):  # the loss is part of the model: no logits are gathered
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--mesh", default="data=4", help="data=N, and model=M or not; N * M processes"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="rows on all devices together")
    parser.add_argument("--folder", default="run", help="of the checkpoints")
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if on_gpus else "cpu"

    torch.manual_seed(0)  # the same weights, and the same dropout, on every mesh
    mesh = gspmd.Mesh.parse(args.mesh)
    model = GPT().to(device)
    if "model" in mesh.names:
        gspmd.annotate(model, mesh, MARKS)
    model = gspmd.parallelize(model, mesh, in_specs="auto")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    states = {"scheduler": scheduler}
    step = gspmd.load(args.folder, model, optimizer, states=states) if has_run(args.folder) else 0

    words = torch.randint(WORDS, (1024, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    words[:, 1::2] = words[:, :LENGTH:2]  # something to be learned
    rows = gspmd.BatchSampler(words, args.batch, mesh)  # each process loads its rows alone
    rows.resume(step)
    loader = DataLoader(TensorDataset(words), batch_sampler=rows, pin_memory=on_gpus)

    with gspmd.StepLog(model, total=args.steps, tokens=args.batch * LENGTH) as log:
        log.count = step
        while step < args.steps:
            for (mine,) in loader:  # an epoch, or the rest of one
                mine = mine.to(device, non_blocking=True)
                batch = gspmd.shard_batch(mine, mesh, "data _")
                loss = model(batch[:, :-1], batch[:, 1:])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step += 1
                log.step(loss=loss, lr=scheduler.get_last_lr()[0])
                if step % args.save_every == 0 or step == args.steps:
                    folder = f"{args.folder}/step-{step}"
                    gspmd.save(folder, model, optimizer, step=step, states=states, keep=2)
                if step == args.steps:
                    break
    dist.destroy_process_group()


def has_run(folder):
    return os.path.isdir(folder) and any(name.startswith("step-") for name in os.listdir(folder))


if __name__ == "__main__":
    main()
