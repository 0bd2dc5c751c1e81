"""Files with public names of 30 models, from transformers 5's conversions backwards, onto a mesh.

Each rank reads its shards without `rename=`; the model computes one device's results, and
save_pretrained writes the same files again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from architectures import MODELS
from every_model import transformers_model
from families import folder, on_mesh, transformers, whole
from helpers import assert_same
from ranks import distributed
from safetensors.torch import load_file

import torchgspmd as gspmd

TERMS = 1024  # sums of some layers with 16 to 64 terms
# One tensor for each expert, or all renamed; and names as in the files.
OURS = """Mixtral Qwen2Moe Qwen3MoeForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM
    GptOssForCausalLM OlmoeForCausalLM GraniteMoeForCausalLM JambaForCausalLM Llama GPT2 Bert T5 ViT
    BEiT Whisper GPTNeoX Gemma2 Falcon SegFormer""".split()
# Stacked, joined, split, transposed and interleaved tensors.
THEIRS = """PhimoeForCausalLM MiniMaxForCausalLM Glm4MoeForCausalLM FlexOlmoForCausalLM
    Qwen3NextForCausalLM NemotronHForCausalLM OlmoHybridForCausalLM NomicBertModel
    LaraMiniForCausalLM Inkling2ForCausalLM""".split()


def build(name: str) -> tuple[torch.nn.Module, dict]:
    torch.manual_seed(0)
    if name not in MODELS:
        return transformers_model(name)
    family, options, inputs = MODELS[name]
    cls = getattr(transformers, family)
    return cls(cls.config_class(**options)).eval(), inputs()


def tensors_in(path: str) -> dict[str, torch.Tensor]:
    return {n: t for file in Path(path).glob("*.safetensors") for n, t in load_file(file).items()}


@distributed("model=2")
@pytest.mark.parametrize(
    "name",
    [
        *OURS,
        *(
            pytest.param(
                name,
                marks=pytest.mark.skipif(
                    not hasattr(transformers, name),
                    reason=f"transformers {transformers.__version__} lacks it",
                ),
            )
            for name in THEIRS
        ),
    ],
)
def test_public_names(mesh, name):
    reference, inputs = build(name)
    paths = folder(), folder()
    if dist.get_rank() == 0:
        reference.save_pretrained(paths[0], max_shard_size="20KB")
    dist.barrier()
    other, _ = build(name)
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    model = on_mesh(other, mesh)
    assert gspmd.load_safetensors(model, paths[0]) == []
    state = whole(dict(model.named_parameters(remove_duplicate=False)))
    want = whole(dict(reference.named_parameters(remove_duplicate=False)))
    assert_same(state, want, name, terms=0)
    with torch.no_grad():
        assert_same(whole(model(**inputs)), whole(reference(**inputs)), name, TERMS)
    model.save_pretrained(paths[1], max_shard_size="20KB")
    if dist.get_rank() == 0:
        written, again = tensors_in(paths[0]), tensors_in(paths[1])
        assert_same(again, written, name, terms=0)
        index = Path(paths[1], "model.safetensors.index.json")
        assert {*json.loads(index.read_text())["weight_map"]} == {*written}
