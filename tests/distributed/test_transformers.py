"""Generation, caches and methods of models of transformers, against one process, on every rank."""

import copy
import tempfile

import pytest
import torch
import torch.distributed as dist
from ranks import distributed
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

MESHES = ("model=2", "data=2,model=2")
VOCABULARY = {"vocab_size": 100, "pad_token_id": 0, "eos_token_id": 1}
TOKENS = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))


def pair(model, mesh, over, along):
    """The model on the mesh, with these weights sharded by rows and those by columns, and the model
    itself.
    """
    sharded, axis = copy.deepcopy(model), mesh.names[-1]
    gspmd.annotate(
        sharded,
        mesh,
        {f"**.{n}.weight": f"{axis} _" for n in over}
        | {f"**.{n}.weight": f"_ {axis}" for n in along},
    )
    return gspmd.parallelize(sharded, mesh), model


def close(a, b):
    """Up to rounding in float32: as helpers.tolerance has it for sums of 1,024 terms."""
    torch.testing.assert_close(
        a.full_tensor() if isinstance(a, DTensor) else a, b, rtol=1e-4, atol=1e-5
    )


def same_text(model, reference, *inputs, **options):
    assert torch.equal(
        model.generate(*inputs, do_sample=False, **options),
        reference.generate(*inputs, do_sample=False, **options),
    )


@distributed(*MESHES)
def test_encoder_and_decoder(mesh):
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        **VOCABULARY,
    )
    model, reference = pair(
        transformers.T5ForConditionalGeneration(config).eval(),
        mesh,
        ("q", "k", "v", "wi"),
        ("o", "wo"),
    )
    same_text(model, reference, TOKENS, max_new_tokens=6)
    same_text(model, reference, TOKENS, max_new_tokens=4, num_beams=3)
    close(model.encoder(TOKENS).last_hidden_state, reference.encoder(TOKENS).last_hidden_state)


@distributed(*MESHES)
def test_caches(mesh):
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **VOCABULARY,
    )
    model, reference = pair(
        transformers.LlamaForCausalLM(config).eval(),
        mesh,
        ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj"),
        ("o_proj", "down_proj"),
    )
    for use_cache in (True, False):
        same_text(model, reference, TOKENS, max_new_tokens=6, use_cache=use_cache)
    for make in (
        lambda: transformers.DynamicCache(config=config),
        lambda: transformers.StaticCache(config=config, max_cache_len=16),
    ):
        logits = []
        for m in (model, reference):
            cache, tokens = make(), TOKENS
            for _ in range(4):  # the cache that is passed is the one that changes
                with torch.no_grad():
                    result = m(input_ids=tokens, past_key_values=cache, use_cache=True)
                assert result.past_key_values is cache
                tokens = result.logits[:, -1:].argmax(-1)
                logits.append(result.logits)
        for mine, theirs in zip(logits[:4], logits[4:]):
            close(mine, theirs)
    cache = transformers.StaticCache(config=config, max_cache_len=16)
    cache.early_initialization(2, 2, 8, torch.float32, torch.device("cpu"))
    for layer in cache.layers:
        gspmd.mark_sharding(layer.keys, mesh, "_ model _ _")
        gspmd.mark_sharding(layer.values, mesh, "_ model _ _")
    text = model.generate(TOKENS, do_sample=False, max_new_tokens=6, past_key_values=cache)
    assert torch.equal(text, reference.generate(TOKENS, do_sample=False, max_new_tokens=6))
    assert all(layer.keys.to_local().shape[1] == 1 for layer in cache.layers)
    assert {c.kind for c in model.plan.collectives} == {"all_reduce"}
    for m in (model, reference):
        m.train()(inputs_embeds=m.get_input_embeddings()(TOKENS), labels=TOKENS).loss.backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        close(p.grad, q.grad)


@distributed(*MESHES)
def test_two_towers(mesh):
    tower = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 100, "eos_token_id": 1},
        projection_dim=16,
        vision_config={**tower, "image_size": 32, "patch_size": 8},
    )
    model, reference = pair(transformers.CLIPModel(config).eval(), mesh, ("fc1",), ("fc2",))
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for features, inputs in (("get_image_features", images), ("get_text_features", TOKENS)):
        close(*(getattr(m, features)(inputs).pooler_output for m in (model, reference)))


@distributed("data=2,model=2")
def test_vision_tower(mesh):
    """Pieces of a sequence whose lengths are values, which differ from call to call."""
    models, sizes = transformers.models.qwen2_vl, pytest.importorskip("transformers.vision_utils")
    config = models.configuration_qwen2_vl.Qwen2VLVisionConfig(
        depth=1, embed_dim=32, hidden_size=24, num_heads=4, patch_size=4, mlp_ratio=2
    )
    tower = models.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(config)
    model, reference = pair(tower, mesh, ("qkv", "fc1"), ("attn.proj", "fc2"))
    pixels = torch.randn(48, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    for grid in ([[1, 4, 4], [1, 4, 8]], [[1, 8, 4], [1, 4, 4]]):
        grid = torch.tensor(grid)
        precomputed = {
            "cu_seqlens": sizes.get_vision_cu_seqlens(grid),
            "position_ids": sizes.get_vision_position_ids(grid, 2),
        }
        results = []
        for each in (model, reference):
            each.zero_grad()
            result = each(pixels, grid, **precomputed).pooler_output
            result.square().sum().backward()
            results.append(result)
        close(*results)
        for parameter, other in zip(model.parameters(), reference.parameters()):
            close(parameter.grad, other.grad)


@distributed("model=2")
def test_files_with_one_tensor_for_each_expert(mesh):
    """transformers writes the public names, and each rank reads its experts from them."""
    config = transformers.MixtralConfig(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        **VOCABULARY,
    )
    want = transformers.MixtralForCausalLM(config).eval()
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    if dist.get_rank() == 0:
        want.save_pretrained(folders[0])
    dist.barrier()
    for marks in ({"**.experts.*_proj": "model _ _"}, {"**.experts.*_proj": "_ model _"}):
        with torch.device("meta"):
            model = transformers.MixtralForCausalLM(config)
        model = gspmd.parallelize(gspmd.annotate(model, mesh, marks), mesh)
        assert gspmd.load_safetensors(model, folders[0]) == []
        for name, value in gspmd.full_state_dict(model, rank0_only=False).items():
            assert value.equal(want.state_dict()[name]), name
