"""A tiny Llama without dropout, its marks, and sequences of tokens."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import transformers

import torchgspmd as gspmd

transformers.logging.set_verbosity_error()
VOCABULARY, LENGTH = 61, 12
EPSILON = 1e-3  # of AdamW: gradients that are nothing but rounding move no weight
RULES = {
    "**.embed_tokens.weight": "_ {0}",
    "**.q_proj.weight": "{0} _",
    "**.k_proj.weight": "{0} _",
    "**.v_proj.weight": "{0} _",
    "**.o_proj.weight": "_ {0}",
    "**.gate_proj.weight": "{0} _",
    "**.up_proj.weight": "{0} _",
    "**.down_proj.weight": "_ {0}",
    "lm_head.weight": "{0} _",
}


def llama(**options) -> transformers.LlamaForCausalLM:
    """The same weights at each call, whatever was drawn before."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
        pad_token_id=0,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return transformers.LlamaForCausalLM(config)


def marked(mesh: gspmd.Mesh, **options) -> transformers.LlamaForCausalLM:
    """The weights are sharded over the last axis: tensor parallel, or ZeRO-like on data alone."""
    return mark(llama(**options), mesh)


def mark(model, mesh):
    names = {name for name, _ in model.named_parameters()}
    rules = {glob: spec.format(mesh.names[-1]) for glob, spec in RULES.items()}
    gspmd.annotate(model, mesh, {g: s for g, s in rules.items() if g in names or "**" in g})
    return model


class Tokens(torch.utils.data.Dataset):
    """Sequences of one length with labels, of which some are left out of the loss."""

    def __init__(self, count: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator)
        self.masked = torch.rand(count, LENGTH, generator=generator) < 0.2

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        labels = self.rows[i].masked_fill(self.masked[i], -100)
        return {"input_ids": self.rows[i], "labels": labels}


class Read(Tokens):
    """Sequences that note which of them are read."""

    def __init__(self, count: int, seed: int = 0):
        super().__init__(count, seed)
        self.read: list[int] = []

    def __getitem__(self, i):
        self.read.append(int(i))
        return super().__getitem__(i)


def shared_folder(name: str = "run") -> str:
    """A new folder that all ranks see."""
    names = [tempfile.mkdtemp(prefix=name) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return names[0]


def whole(model) -> dict[str, torch.Tensor]:
    return gspmd.full_state_dict(model, rank0_only=False)


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float = 1e-4) -> None:
    """Weights after some steps in float32."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=rtol, atol=1e-5, msg=name)
