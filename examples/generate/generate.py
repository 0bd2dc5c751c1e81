"""SmolLM2-135M continues prompts of different lengths, on one process or on a mesh of them.

python generate.py                                          one process, plain PyTorch
torchrun --nproc-per-node 3 generate.py --mesh model=3
torchrun --nproc-per-node 4 generate.py --mesh model=2,seq=2 --plan out/plan.txt
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import NextTokens, layouts, load, new_cache
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd

PROMPTS = ("The capital of France is", "Water boils at", "Once upon a time, in a small village,")
FOLDER = Path(__file__).resolve().parent / "out"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("prompts", nargs="*", default=PROMPTS)
    add("--mesh", type=gspmd.Mesh.parse, help='axes "model", and "seq" for rows of the cache')
    add("--tokens", type=int, default=32, help="tokens that each text gets (default: %(default)s)")
    add("--json", type=Path, help="write the tokens")
    add("--plan", type=Path, help="write the plan of a token")
    add("--weights", type=Path, default=FOLDER / "smollm2", help="where the converted weights are")
    return parser.parse_args()


@torch.no_grad()
def generate(
    model: NextTokens, cache: object, prompts: torch.Tensor, mask: torch.Tensor, count: int
) -> tuple[torch.Tensor, list[float]]:
    """The tokens [batch, count] that follow, and the seconds that each of them took."""
    tokens, positions = prompts, (mask[:, : prompts.shape[1]].cumsum(1) - 1).clamp(min=0)
    texts, seconds = [], []
    for _ in range(count):
        start = time.perf_counter()
        texts.append(model(tokens, positions, mask, cache))  # [b]
        seconds.append(time.perf_counter() - start)
        tokens, positions = texts[-1][:, None], positions[:, -1:] + 1
    return torch.stack(texts, 1), seconds


def main() -> None:
    args = arguments()
    if args.mesh:
        dist.init_process_group("gloo")
    is_first = int(os.environ.get("RANK", 0)) == 0
    tokenizer, language_model = load(args.weights)
    tokenizer.padding_side = "left"
    batch = tokenizer(list(args.prompts), return_tensors="pt", padding=True)
    shortest = batch.input_ids.shape[1] + args.tokens
    length = -(-shortest // 8) * 8  # rows of the cache, which the mesh divides
    mask = torch.ones(len(args.prompts), length, dtype=torch.long)  # later rows: by causality
    mask[:, : batch.input_ids.shape[1]] = batch.attention_mask

    model: Any = language_model
    if args.mesh:
        gspmd.annotate(model, args.mesh, layouts(args.mesh)[0])
        model = gspmd.parallelize(model, args.mesh)
    cache = new_cache(language_model, len(args.prompts), length, args.mesh)
    texts, seconds = generate(model, cache, batch.input_ids, mask, args.tokens)

    if is_first:
        ends = [(text == tokenizer.eos_token_id).nonzero() for text in texts]
        for prompt, text, end in zip(args.prompts, texts, ends):
            print(f"{prompt}|{tokenizer.decode(text[: int(end[0]) if len(end) else None])}\n")
        rate = len(texts) * len(seconds[2:]) / sum(seconds[2:])
        print(f"{args.mesh or 'one process'}: {rate:.1f} tokens/s after the first two of a text")
        stored = {"weights": model.parameters(), "cache": cache_tensors(cache)}
        kept = {name: sum(map(local_bytes, tensors)) / 2**20 for name, tensors in stored.items()}
        print("a device keeps", ", ".join(f"{mb:.1f} MiB of {name}" for name, mb in kept.items()))
        if args.mesh:
            print(model.plan.summary())
        if args.plan:
            args.plan.write_text(f"{model.plan}\n")
        if args.json:
            args.json.write_text(json.dumps(texts.tolist()))
    if args.mesh:
        dist.destroy_process_group()


def cache_tensors(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


if __name__ == "__main__":
    main()
