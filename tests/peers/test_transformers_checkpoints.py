"""Files with the public names of every model that transformers 5 converts, onto a mesh.

transformers' conversions backwards write them. Each rank reads its shards without `rename=`. The
state is that of `from_pretrained`, 30 models compute one device's results, and save_pretrained
writes the same files again.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from importlib import import_module
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
from small_transformers import TRIED, small_model

import torchgspmd as gspmd

conversions = pytest.importorskip(
    "transformers.conversion_mapping", reason="this transformers converts no names"
)
TERMS = 1024  # sums of some layers with 16 to 64 terms
# These compute on the mesh, too. One tensor for each expert, or all renamed; names as in the files.
OURS = """Mixtral Qwen2Moe Qwen3MoeForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM
    GptOssForCausalLM OlmoeForCausalLM GraniteMoeForCausalLM JambaForCausalLM Llama GPT2 Bert T5 ViT
    BEiT Whisper GPTNeoX Gemma2 Falcon SegFormer""".split()
# Stacked, joined, split, transposed and interleaved tensors.
THEIRS = """PhimoeForCausalLM MiniMaxForCausalLM Glm4MoeForCausalLM FlexOlmoForCausalLM
    Qwen3NextForCausalLM NemotronHForCausalLM OlmoHybridForCausalLM NomicBertModel
    Dinov2Model Inkling2ForCausalLM""".split()
HEADS = ("CAUSAL_LM", "IMAGE_TEXT", "SEQ_TO_SEQ", "MODEL_MAPPING_NAMES", "MASKED_LM", "")


def converted() -> Iterator[str]:
    """Yield the class of each model type and class that transformers has a conversion for."""
    auto = import_module("transformers.models.auto.modeling_auto")
    names = [n for n in dir(auto) if n.startswith("MODEL_") and n.endswith("_MAPPING_NAMES")]
    names.sort(key=lambda name: next(i for i, head in enumerate(HEADS) if head in name))
    tables = [getattr(auto, name) for name in names]
    for kind in sorted(conversions._build_checkpoint_conversion_mapping().keys() - {"legacy"}):
        found = next((table[kind] for table in tables if kind in table), kind)
        yield found if isinstance(found, str) else found[0]


def subjects() -> list:
    public = {*MODELS, *dir(transformers)}
    lacking = pytest.mark.skip("is a part of others, with which it runs, or of a later version")
    return [
        pytest.param(name, marks=[] if name in public else [lacking])
        for name in dict.fromkeys([*OURS, *THEIRS, *converted()])
    ]


def build(name: str) -> tuple[torch.nn.Module, dict | None]:
    """Return a small model, no two weights alike, and the arguments of a call if it is called."""
    torch.manual_seed(0)
    if name in MODELS:
        family, options, make_inputs = MODELS[name]
        cls = getattr(transformers, family)
        model, inputs = cls(cls.config_class(**options)).eval(), make_inputs()
    elif name in (*OURS, *THEIRS):
        model, inputs = transformers_model(name)
    else:
        model, inputs = built(getattr(transformers, name)), None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
    return model, inputs


def built(cls: type) -> torch.nn.Module:
    for by in TRIED:
        with contextlib.suppress(Exception):  # other sizes may fit
            return small_model(cls, by)
    pytest.skip("one device cannot build it with the sizes of benchmarks/small_transformers.py")


def tensors_in(path: str) -> dict[str, torch.Tensor]:
    return {n: t for file in Path(path).glob("*.safetensors") for n, t in load_file(file).items()}


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return whole(dict(model.state_dict(keep_vars=True)))


def read(like: torch.nn.Module, path: str) -> torch.nn.Module:
    """Return what one device reads, if it reads all that it writes."""
    options = {"config": copy.deepcopy(like.config), "output_loading_info": True}
    try:
        model, found = type(like).from_pretrained(path, **options)
    except Exception:  # noqa: BLE001 (whatever it is, the files are transformers' own)
        pytest.skip("transformers itself does not read what it writes")
    if found["missing_keys"] or found["unexpected_keys"]:
        pytest.skip("transformers itself does not read what it writes")
    return model.eval()


@distributed("model=2")
@pytest.mark.parametrize("name", subjects())
def test_public_names(mesh, name):
    reference, inputs = build(name)
    # All of them, those that change a prefix too, which a model that was not loaded leaves out.
    mapping = conversions.get_model_conversion_mapping(reference, add_legacy=False)
    reference._weight_conversions = mapping
    first, second = folder(), folder()
    try:
        if dist.get_rank() == 0:
            reference.save_pretrained(first, max_shard_size="200KB")
    except Exception as error:
        if "StrictDataclass" not in type(error).__name__:
            raise
    dist.barrier()
    if not tensors_in(first):
        pytest.skip("transformers takes the small configuration for a wrong one")
    want = read(reference, first)
    other, _ = build(name)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    model = on_mesh(other, mesh)
    assert gspmd.load_safetensors(model, first) == []
    assert_same(state_of(model), state_of(want), name, terms=0)
    if inputs is not None:
        with torch.no_grad():
            assert_same(whole(model(**inputs)), whole(reference(**inputs)), name, TERMS)
    model.save_pretrained(second, max_shard_size="200KB")
    dist.barrier()
    assert_same(tensors_in(second), tensors_in(first), name, terms=0)
    index = Path(second, "model.safetensors.index.json")
    if index.exists():
        assert {*json.loads(index.read_text())["weight_map"]} == {*tensors_in(first)}
    assert_same(state_of(read(reference, second)), state_of(want), name, terms=0)
