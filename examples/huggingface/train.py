"""A Llama of transformers: train, stop at any time, go on on another mesh, evaluate, export.

torchrun --nproc-per-node 4 train.py --mesh data=2,model=2
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import torchgspmd as gspmd

WORDS, LENGTH, ROWS = 64, 16, 8  # ROWS: of a batch, on all devices together
MARKS = {  # which dimension of a weight the axis `model` divides
    "**.[qkv]_proj.weight": "model _",
    "**.o_proj.weight": "_ model",
    "**.gate_proj.weight": "model _",
    "**.up_proj.weight": "model _",
    "**.down_proj.weight": "_ model",
    "lm_head.weight": "model _",
}


def make_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 80}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def make_optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def batch(seed):
    """The same rows on every rank; a real script reads them from a file."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    words[:, 1::2] = words[:, ::2]  # something to be learned
    return {"input_ids": words, "labels": words}


def train_step(model, optimizer, scheduler, step, device="cpu"):
    loss = model(**{name: t.to(device) for name, t in batch(step).items()}).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model, device="cpu"):
    model.eval()
    losses = [
        model(**{name: t.to(device) for name, t in batch(-1 - i).items()}).loss.item()
        for i in range(2)
    ]
    model.train()
    return sum(losses) / len(losses)


def export(model, folder):
    model.save_pretrained(folder)  # on every rank; LlamaForCausalLM.from_pretrained reads it


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="data=4")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("run"))
    args = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if on_gpus else "cpu"
    is_first = dist.get_rank() == 0

    mesh, model = gspmd.Mesh.parse(args.mesh), make_model().to(device)
    if "model" in mesh.names:
        gspmd.annotate(model, mesh, MARKS)
    model = gspmd.parallelize(model, mesh, in_specs="auto" if "data" in mesh.names else None)
    optimizer, scheduler = make_optimizer(model)
    states, step = {"scheduler": scheduler}, 0
    if any(args.folder.glob("step-*/gspmd.json")):
        step = gspmd.load(args.folder, model, optimizer, states=states)

    while step < args.steps:
        loss = train_step(model, optimizer, scheduler, step, device)
        step += 1
        if is_first:
            print(f"step {step} loss {loss:.7f}", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            folder = args.folder / f"step-{step}"
            gspmd.save(folder, model, optimizer, step=step, states=states, keep=2)
    loss = evaluate(model, device)
    export(model, args.folder / "export")
    if is_first:
        print(f"evaluation {loss:.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
