"""marks: each family's weights are divided, by the parameter names of small configurations."""

import pytest
import torch
from torch import nn

import torchgspmd as gspmd
from torchgspmd.layout.family_marks import FAMILIES
from torchgspmd.runtime.module_proxy import mark_on

MESH = gspmd.Mesh(model=2, expert=2)
WORDS = """model.embed_tokens.weight 64,16 model _
           lm_head.weight 64,16 model _
           model.norm.weight 16 -"""
HEADS = """model.layers.0.self_attn.q_proj.weight 16,16 model _
           model.layers.0.self_attn.k_proj.weight 8,16 model _
           model.layers.0.self_attn.v_proj.weight 8,16 model _
           model.layers.0.self_attn.o_proj.weight 16,16 _ model
           model.layers.0.input_layernorm.weight 16 -"""
GATED = """model.layers.0.mlp.gate_proj.weight 24,16 model _
           model.layers.0.mlp.up_proj.weight 24,16 model _
           model.layers.0.mlp.down_proj.weight 16,24 _ model"""
EXPERTS = """model.layers.1.mlp.experts.gate_up_proj 4,48,16 expert _ _
             model.layers.1.mlp.experts.down_proj 4,16,24 expert _ _
             model.layers.1.mlp.gate.weight 4,16 -"""
BIASES = """model.layers.0.self_attn.q_proj.bias 16 model
            model.layers.0.self_attn.k_proj.bias 8 model
            model.layers.0.self_attn.v_proj.bias 8 model"""
TIMM = """blocks.0.attn.qkv.weight 48,16 model _
          blocks.0.attn.qkv.bias 48 model
          blocks.0.attn.proj.weight 16,16 _ model
          blocks.0.attn.proj.bias 16 -
          blocks.0.mlp.fc1.weight 64,16 model _
          blocks.0.mlp.fc1.bias 64 model
          blocks.0.mlp.fc2.weight 16,64 _ model"""
T5 = """{0}.block.0.layer.0.SelfAttention.q.weight 16,16 model _
        {0}.block.0.layer.0.SelfAttention.o.weight 16,16 _ model
        {0}.block.0.layer.0.SelfAttention.relative_attention_bias.weight 32,4 _ model
        {0}.block.0.layer.1.DenseReluDense.{1}.weight 24,16 model _
        {0}.block.0.layer.1.DenseReluDense.wo.weight 16,24 _ model"""
SPEECH = """model.{0}.layers.0.{1}.k_proj.weight 16,16 model _
            model.{0}.layers.0.{1}.v_proj.bias 16 model
            model.{0}.layers.0.{1}.out_proj.weight 16,16 _ model
            model.{0}.layers.0.{1}.out_proj.bias 16 -
            model.{0}.layers.0.fc1.weight 24,16 model _
            model.{0}.layers.0.fc1.bias 24 model
            model.{0}.layers.0.fc2.weight 16,24 _ model"""
GPT2 = """transformer.wte.weight 64,16 model _
          transformer.wpe.weight 32,16 -
          transformer.h.0.attn.c_attn.weight {0} {1}
          transformer.h.0.attn.c_attn.bias 48 model
          transformer.h.0.attn.c_proj.weight 16,16 {2}
          transformer.h.0.mlp.c_fc.weight {3} {1}
          transformer.h.0.mlp.c_fc.bias 64 model
          transformer.h.0.mlp.c_proj.weight {4} {2}"""
MODELS = [  # the family, and its parameters: name, shape, mark
    ("gpt2", GPT2.format("16,48", "_ model", "model _", "16,64", "64,16")),
    ("nanogpt", GPT2.format("48,16", "model _", "_ model", "64,16", "16,64")),
    ("llama", f"{WORDS}\n{HEADS}\n{GATED}"),
    ("llama", f"{HEADS}\n{GATED}".replace("model.layers", "layers")),  # without a head
    ("llama", f"{HEADS}\n{BIASES}\n{GATED}"),
    ("qwen3", f"{WORDS}\n{HEADS}\n{GATED}\nmodel.layers.0.self_attn.q_norm.weight 4 -"),
    ("qwen3", f"{WORDS}\n{HEADS}\n{EXPERTS}"),
    ("mixtral", f"{WORDS}\n{HEADS}\n{EXPERTS}"),
    (
        "mixtral",
        f"""{HEADS}
        model.layers.0.block_sparse_moe.gate.weight 4,16 -
        model.layers.0.block_sparse_moe.experts.3.w1.weight 24,16 model _
        model.layers.0.block_sparse_moe.experts.3.w2.weight 16,24 _ model
        model.layers.0.block_sparse_moe.experts.3.w3.weight 24,16 model _""",
    ),
    (
        "deepseek-v3",
        f"""{WORDS}\n{GATED}\n{EXPERTS}
        model.layers.1.mlp.shared_experts.down_proj.weight 16,8 _ model
        model.layers.0.self_attn.q_a_proj.weight 8,16 -
        model.layers.0.self_attn.q_b_proj.weight 32,8 model _
        model.layers.0.self_attn.kv_a_proj_with_mqa.weight 12,16 -
        model.layers.0.self_attn.kv_b_proj.weight 32,8 model _
        model.layers.0.self_attn.o_proj.weight 16,16 _ model""",
    ),
    (
        "gpt-oss",
        f"""{WORDS}\n{HEADS}\n{BIASES}\n{EXPERTS}
        model.layers.0.self_attn.sinks 4 model
        model.layers.0.mlp.router.weight 4,16 -
        model.layers.0.mlp.experts.gate_up_proj_bias 4,48 expert _
        model.layers.0.mlp.experts.down_proj_bias 4,16 expert _""",
    ),
    (
        "vit",
        """vit.layers.0.attention.q_proj.weight 16,16 model _
        vit.layers.0.attention.q_proj.bias 16 model
        vit.layers.0.attention.o_proj.weight 16,16 _ model
        vit.layers.0.mlp.fc1.weight 24,16 model _
        vit.layers.0.mlp.fc1.bias 24 model
        vit.layers.0.mlp.fc2.weight 16,24 _ model
        classifier.weight 6,16 -""",
    ),
    (
        "vit",
        """vit.encoder.layer.0.attention.attention.query.weight 16,16 model _
        vit.encoder.layer.0.attention.attention.key.weight 16,16 model _
        vit.encoder.layer.0.attention.attention.value.weight 16,16 model _
        vit.encoder.layer.0.attention.output.dense.weight 16,16 _ model
        vit.encoder.layer.0.intermediate.dense.weight 24,16 model _
        vit.encoder.layer.0.intermediate.dense.bias 24 model
        vit.encoder.layer.0.output.dense.weight 16,24 _ model""",
    ),
    ("vit", TIMM),
    ("dit", f"{TIMM}\nblocks.0.adaLN_modulation.1.weight 96,16 _ model"),
    ("t5", "shared.weight 64,16 model _\n" + T5.format("encoder", "wi")),
    ("t5", "shared.weight 64,16 model _\n" + T5.format("decoder", "wi_1")),
    (
        "whisper",
        f"""model.decoder.embed_tokens.weight 64,16 model _
        model.encoder.conv1.weight 16,8,3 -
        {SPEECH.format("encoder", "self_attn")}\n{SPEECH.format("decoder", "encoder_attn")}""",
    ),
]


def model_of(rows: str) -> tuple[nn.Module, dict[str, str]]:
    """Return a model with such parameters, and their marks."""
    model, specs = nn.Module(), {}
    for name, shape, spec in (row.split(maxsplit=2) for row in rows.splitlines()):
        *path, last = name.split(".")
        module = model
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        sizes = tuple(map(int, shape.split(",")))
        module.register_parameter(last, nn.Parameter(torch.empty(sizes, device="meta")))
        specs[name] = spec
    return model, specs


@pytest.mark.parametrize("family, rows", MODELS, ids=lambda x: x if x in FAMILIES else "")
def test_the_weights_of_a_family_are_divided(family, rows):
    model, specs = model_of(rows)
    gspmd.annotate(model, MESH, gspmd.marks(family, experts="expert"))
    for name, parameter in model.named_parameters():
        mark = mark_on(parameter, MESH)
        assert (str(mark) if mark else "-") == specs[name], name


def test_every_family_is_tested():
    assert {family for family, _ in MODELS} == {*FAMILIES}


def test_other_axes():
    model, _ = model_of(f"{HEADS}\n{EXPERTS}")
    mesh = gspmd.Mesh(tp=2)
    gspmd.annotate(model, mesh, gspmd.marks("mixtral", model="tp"))
    experts = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    assert str(mark_on(experts, mesh)) == "tp _ _"


def test_mistakes():
    with pytest.raises(gspmd.ShardingError, match="no marks for 'lama'; did you mean 'llama'"):
        gspmd.marks("lama")
    model, _ = model_of(GPT2.format("16,48", "_", "_", "16,64", "64,16"))
    with pytest.raises(gspmd.ShardingError, match=r"(?s)do not fit.*gspmd\.marks\('gpt2'\)"):
        gspmd.annotate(model, MESH, gspmd.marks("llama"))
    model, _ = model_of(HEADS.replace("o_proj", "o_projection"))
    with pytest.raises(gspmd.ShardingError) as error:
        gspmd.annotate(model, MESH, gspmd.marks("mixtral"))
    assert "'**self_attn.o_proj.weight' matches no parameter" in str(error.value)
    assert "did you mean 'self_attn.o_projection.weight'?" in str(error.value)


PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise_gather_output",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.experts.down_proj": "rowwise",
    "model.layers.*.mlp.experts": "moe_tp_experts",
}


def test_the_plan_of_a_model():
    bias = "model.layers.0.self_attn.o_proj.bias 16 -"
    words = "model.embed_tokens.weight 64,16 model _"
    whole, specs = model_of("\n".join([words, HEADS, EXPERTS, BIASES, bias]))
    gathered = {f"model.layers.*.mlp.experts.{n}_proj": "grouped_gemm" for n in ("gate_up", "down")}
    gspmd.annotate(whole, MESH, gspmd.marks({**PLAN, **gathered}, experts="expert"))
    for name, parameter in whole.named_parameters():
        mark = mark_on(parameter, MESH)
        assert (str(mark) if mark else "-") == specs[name], name

    model, _ = model_of(EXPERTS)
    gspmd.annotate(model, MESH, gspmd.marks(PLAN))
    marks = [str(mark_on(p, MESH)) for p in model.parameters()]
    assert marks == ["_ model _", "_ _ model", "None"]


def test_mistakes_in_a_plan():
    with pytest.raises(gspmd.ShardingError, match="not known: diagonal"):
        gspmd.marks({"layers.*": "diagonal"})
    model, _ = model_of(GATED)
    with pytest.raises(gspmd.ShardingError, match="divides no parameter"):
        gspmd.annotate(model, MESH, gspmd.marks({"layers.*.q_proj": "colwise"}))
