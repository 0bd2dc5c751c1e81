"""marks: which dimensions tensor parallelism divides, for models that people bring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..errors import ShardingError, did_you_mean
from .annotate import glob_pattern

Rows = Mapping[str, str]  # spec by glob; a glob that ends in "?" may match nothing

# M stands for the axis of heads and hidden units, E for that of experts.
_WORDS = {"**embed_tokens.weight?": "M _", "**lm_head.weight?": "M _"}
_HEADS = {
    "**self_attn.[qkv]_proj.weight": "M _",
    "**self_attn.[qkv]_proj.bias?": "M",
    "**self_attn.o_proj.weight": "_ M",
}
_GATED = {
    "**mlp.gate_proj.weight": "M _",
    "**mlp.up_proj.weight": "M _",
    "**mlp.down_proj.weight": "_ M",
}
_LLAMA = {**_WORDS, **_HEADS, **_GATED}
# [experts, hidden, width] and [experts, width, hidden]
_EXPERTS = {"**experts.gate_up_proj": "E _ _", "**experts.down_proj": "E _ _"}
_LATENT = {  # multi-head latent attention: the small down projections stay whole
    "**self_attn.q_b_proj.weight?": "M _",
    "**self_attn.q_proj.weight?": "M _",
    "**self_attn.kv_b_proj.weight": "M _",
    "**self_attn.o_proj.weight": "_ M",
}
_DENSE_LAYERS = {f"{glob}?": spec for glob, spec in _GATED.items()}
_SHARED = {f"{glob.replace('mlp.', 'mlp.shared_experts.')}?": spec for glob, spec in _GATED.items()}
_TIMM = {  # timm's ViT, and DiT
    "**attn.qkv.weight": "M _",
    "**attn.qkv.bias?": "M",
    "**attn.proj.weight": "_ M",
    "**mlp.fc1.weight": "M _",
    "**mlp.fc1.bias?": "M",
    "**mlp.fc2.weight": "_ M",
}
_GPT2 = {  # transformers' Conv1D: [in, out]
    "**wte.weight": "M _",
    "**lm_head.weight?": "M _",
    "**attn.c_attn.weight": "_ M",
    "**attn.c_attn.bias?": "M",
    "**attn.c_proj.weight": "M _",
    "**mlp.c_fc.weight": "_ M",
    "**mlp.c_fc.bias?": "M",
    "**mlp.c_proj.weight": "M _",
}

# Variants of one family have the same model with other names; the first that fits counts.
FAMILIES: dict[str, tuple[Rows, ...]] = {
    "deepseek-v3": (
        {**_WORDS, **_LATENT, **_DENSE_LAYERS, **_SHARED, **_EXPERTS},
        {
            **_WORDS,
            **_LATENT,
            **_DENSE_LAYERS,
            **_SHARED,
            "**mlp.experts.*.gate_proj.weight": "M _",
            "**mlp.experts.*.up_proj.weight": "M _",
            "**mlp.experts.*.down_proj.weight": "_ M",
        },
    ),
    "dit": ({**_TIMM, "**adaLN_modulation.1.weight": "_ M"},),
    "gpt-oss": (
        {
            **_WORDS,
            **_HEADS,
            "**self_attn.sinks": "M",
            **_EXPERTS,
            "**experts.gate_up_proj_bias": "E _",
            "**experts.down_proj_bias": "E _",
        },
    ),
    "gpt2": (_GPT2,),
    "llama": (_LLAMA,),
    "mixtral": (
        {**_WORDS, **_HEADS, **_EXPERTS},
        {**_WORDS, **_HEADS, "**experts.*.w[13].weight": "M _", "**experts.*.w2.weight": "_ M"},
    ),
    "nanogpt": ({g: " ".join(reversed(s.split())) if "c_" in g else s for g, s in _GPT2.items()},),
    "qwen3": (_LLAMA, {**_WORDS, **_HEADS, **_EXPERTS}),
    "t5": (
        {
            "**shared.weight": "M _",
            "**embed_tokens.weight?": "M _",
            "**lm_head.weight?": "M _",
            "**Attention.[qkv].weight": "M _",
            "**Attention.o.weight": "_ M",
            "**relative_attention_bias.weight": "_ M",
            "**DenseReluDense.wi*.weight": "M _",
            "**DenseReluDense.wo.weight": "_ M",
        },
    ),
    "vit": (
        {
            "**attention.[qkv]_proj.weight": "M _",
            "**attention.[qkv]_proj.bias?": "M",
            "**attention.o_proj.weight": "_ M",
            "**mlp.fc1.weight": "M _",
            "**mlp.fc1.bias": "M",
            "**mlp.fc2.weight": "_ M",
        },
        {
            "**attention.attention.query.weight": "M _",
            "**attention.attention.key.weight": "M _",
            "**attention.attention.value.weight": "M _",
            "**attention.attention.query.bias?": "M",
            "**attention.attention.key.bias?": "M",
            "**attention.attention.value.bias?": "M",
            "**attention.output.dense.weight": "_ M",
            "**intermediate.dense.weight": "M _",
            "**intermediate.dense.bias": "M",
            "**layer.*.output.dense.weight": "_ M",
        },
        _TIMM,
    ),
    "whisper": (
        {
            "**embed_tokens.weight?": "M _",
            "**proj_out.weight?": "M _",
            "**_attn.[qkv]_proj.weight": "M _",
            "**_attn.[qv]_proj.bias": "M",
            "**_attn.out_proj.weight": "_ M",
            "**layers.*.fc1.weight": "M _",
            "**layers.*.fc1.bias": "M",
            "**layers.*.fc2.weight": "_ M",
        },
    ),
}

# Styles of transformers' plans, by the dimension of a weight [..., out, in] that they divide.
_STYLES = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep"), -2),
    **dict.fromkeys(("packed_colwise", "embedding_rowwise"), -2),
    **dict.fromkeys(("rowwise", "rowwise_split_input", "rowwise_rep"), -1),
    **dict.fromkeys(("packed_rowwise", "embedding_colwise"), -1),
    "grouped_gemm": 0,
}
# Styles that divide no weight: they name exchanges, which follow from the layouts here.
_WHOLE = {
    *("all_reduce", "ep_dispatch_experts", "ep_router", "gather", "local_params"),
    *("local_packed_rowwise", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts"),
    *("replicate", "replicated_with_grad_allreduce", "sequence_parallel"),
}


@dataclass(frozen=True)
class FamilyMarks:
    """A family's marks, for annotate, which takes the variant that fits the model's names."""

    family: str
    model: str
    experts: str

    def __str__(self) -> str:
        return "\n".join(f"{glob}: {spec}" for glob, spec in self._specs(FAMILIES[self.family][0]))

    def of_names(self, parameters: Mapping[str, Tensor]) -> dict[str, str]:
        """Return specs by glob for a model with these parameters.

        Raises:
            ShardingError: No variant of the family fits.
        """
        names = [*parameters]
        for rows in FAMILIES[self.family]:
            if not _missing(rows, names):
                found = self._specs(rows)
                return {glob: spec for glob, spec in found if _matches(glob, names)}
        rows = min(FAMILIES[self.family], key=lambda rows: len(_missing(rows, names)))
        missing, globs = _missing(rows, names)[0], [glob for glob, _ in self._specs(rows)]
        # A weight that no glob matches may have the missing one's place under another name.
        others = [name for name in names if not any(_matches(glob, [name]) for glob in globs)]
        fitting = [name for name in FAMILIES if not all(_missing(r, names) for r in FAMILIES[name])]
        raise ShardingError.here(
            f"the marks of '{self.family}' do not fit this model: '{missing}' matches no parameter",
            fix=" or ".join(f"use gspmd.marks({name!r})" for name in fitting)
            or f"mark it by globs; its parameters are {', '.join(names[:3])}, ...; "
            + did_you_mean(
                missing.lstrip("*"), dict.fromkeys(_end(missing, name) for name in others)
            ),
        )

    def _specs(self, rows: Rows) -> list[tuple[str, str]]:
        axes = {"M": self.model, "E": self.experts}
        return [
            (glob.removesuffix("?"), " ".join(axes.get(word, word) for word in spec.split()))
            for glob, spec in rows.items()
        ]


@dataclass(frozen=True)
class PlanMarks:
    """The marks of a plan that transformers has for a model, such as `model.tp_plan`."""

    plan: Mapping[str, str]
    model: str
    experts: str

    def of_names(self, parameters: Mapping[str, Tensor]) -> dict[str, str]:
        """Return the spec of each parameter that the plan divides.

        Raises:
            ShardingError: The plan divides none.
        """
        found = {}
        for name, parameter in parameters.items():
            style = self._style(name) or self._style(name.rpartition(".")[0])
            dim, rank = _STYLES.get(style or ""), parameter.dim()
            if dim is None or (dim == -1 and rank == 1):  # the bias of a sum over shards is whole
                continue
            entries = ["_"] * rank
            entries[max(dim, -rank)] = self.model if dim else self.experts
            found[name] = " ".join(entries)
        if not found:
            raise ShardingError.here(
                "the plan divides no parameter of this model",
                fix=f"pass the plan of this model; it names {', '.join([*self.plan][:3])}",
            )
        return found

    def _style(self, name: str) -> str | None:
        return next((s for g, s in self.plan.items() if _matches(g, [name])), None)


def marks(
    family: str | Mapping[str, str], *, model: str = "model", experts: str | None = None
) -> FamilyMarks | PlanMarks:
    """Return marks for tensor parallelism, by the names of a model's parameters.

    Names are those of transformers 5, for "dit" those of its authors' code, for "nanogpt" those of
    nanoGPT. Older names of transformers, and timm's, are known for some. Any other model of
    transformers that has a plan of its own: `marks(model.tp_plan)`; with experts on an axis,
    `marks({**model.tp_plan, **model.ep_plan}, experts="expert")`.

    Args:
        family: "deepseek-v3", "dit", "gpt-oss", "gpt2", "llama", "mixtral", "nanogpt", "qwen3",
            "t5", "vit" or "whisper". Or transformers' styles by module name.
        model: The mesh axis for heads, hidden units and the vocabulary.
        experts: The mesh axis for experts. None: `model`.

    Returns:
        The marks, for annotate.

    Raises:
        ShardingError: The family, or a style of the plan, is unknown.

    Example:
        >>> import torch
        >>> from torchgspmd import Mesh, annotate, marks
        >>> layer = {"qkv": torch.nn.Linear(8, 24), "proj": torch.nn.Linear(8, 8)}
        >>> mlp = {"fc1": torch.nn.Linear(8, 32), "fc2": torch.nn.Linear(32, 8)}
        >>> model = {"attn": torch.nn.ModuleDict(layer), "mlp": torch.nn.ModuleDict(mlp)}
        >>> model = annotate(torch.nn.ModuleDict(model), Mesh(model=2), marks("vit"))
    """
    if not isinstance(family, str):
        if unknown := {*family.values()} - {*_STYLES, *_WHOLE}:
            raise ShardingError.here(
                f"the plan has styles that are not known: {', '.join(sorted(unknown))}",
                fix="leave these modules out, and mark them by globs",
            )
        return PlanMarks(family, model, experts or model)
    if family not in FAMILIES:
        raise ShardingError.here(
            f"there are no marks for '{family}'; {did_you_mean(family, list(FAMILIES))}",
            fix=f"the families are {', '.join(FAMILIES)}; gspmd.suggest finds marks for any model",
        )
    return FamilyMarks(family, model, experts or model)


def _missing(rows: Rows, names: list[str]) -> list[str]:
    """Return the globs that have to match, and match nothing."""
    return [glob for glob in rows if not glob.endswith("?") and not _matches(glob, names)]


def _matches(glob: str, names: list[str]) -> bool:
    return any(map(glob_pattern(glob).fullmatch, names))


def _end(glob: str, name: str) -> str:
    """Return the end of a name with as many parts as a glob has."""
    return ".".join(name.split(".")[-glob.count(".") - 1 :])
