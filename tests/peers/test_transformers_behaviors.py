"""Behaviors that transformers' common model tests check, on two processes, against one device.

Small models of ten families, without dropout, each parameter with a random layout.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from families import FAMILIES, folder, gradients, on_mesh, subjects, transformers, whole
from helpers import assert_same
from ranks import distributed

import torchgspmd as gspmd

TERMS = 4096  # two layers with sums over 16 to 64 terms, forward and backward
MESH = distributed("model=2")


def pair(family: str, mesh: gspmd.Mesh, **options):
    alone = FAMILIES[family].make(**options)
    return on_mesh(alone, mesh), alone


def same(model, alone, terms: int = TERMS, **kwargs) -> None:
    """Compare all tensors of the results, and all gradients if there is a loss."""
    results = []
    for each in (model, alone):
        each.zero_grad()
        result = each(**kwargs)
        if getattr(result, "loss", None) is not None:
            result.loss.backward()
        results += [whole(result), gradients(each)]
    assert_same(results[0], results[2], type(alone).__name__, terms)
    assert_same(results[1], results[3], type(alone).__name__, terms)


def trained(model, batches, optimizer=None) -> dict:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in gspmd_state(model).items()}


def gspmd_state(model) -> dict:
    return whole(dict(model.state_dict(keep_vars=True)))


@MESH
@subjects("training")
def test_loss_with_labels(mesh, family):
    same(*pair(family, mesh), **FAMILIES[family].batch())


@MESH
@subjects("training")
def test_training_steps(mesh, family):
    batches = [FAMILIES[family].batch(seed) for seed in range(2)]
    got, want = (trained(each.train(), batches) for each in pair(family, mesh))
    assert_same(got, want, family, TERMS)


@MESH
@subjects("saving")
def test_saving_and_loading(mesh, family):
    """The files are those of one device; the class reads them, and is wrapped again."""
    model, alone = pair(family, mesh)
    batch, path = FAMILIES[family].batch(), folder()
    trained(model, [batch])
    trained(alone, [batch])
    model.save_pretrained(path)
    again = type(alone).from_pretrained(path, attn_implementation="eager").eval()
    assert_same(whole(dict(again.state_dict())), gspmd_state(model), family, terms=0)
    same(on_mesh(again, mesh), again, **batch)  # it may train weights that the class freezes
    other = on_mesh(FAMILIES[family].make(), mesh)
    gspmd.load_safetensors(other, path)
    assert_same(gspmd_state(other), gspmd_state(model), family, terms=0)


@MESH
@subjects("checkpointing")
def test_gradient_checkpointing(mesh, family):
    """Switched on before the wrap, on the wrapped model, and off again."""
    model, alone = pair(family, mesh)
    batch = FAMILIES[family].batch()
    before = copy.deepcopy(alone)
    before.gradient_checkpointing_enable()
    same(on_mesh(before.train(), mesh), alone.train(), **batch)
    model.train().gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    same(model, alone, **batch)
    model.gradient_checkpointing_disable()
    same(model, alone, **batch)


@MESH
@subjects("embeddings")
def test_resized_embeddings(mesh, family):
    """More tokens and fewer, before the wrap; after it an error says so."""
    for size in (70, 50):
        alone = FAMILIES[family].make()
        alone.resize_token_embeddings(size, mean_resizing=False)
        batch = FAMILIES[family].batch()
        for name in ("input_ids", "labels"):
            if name in batch:
                batch[name] = batch[name].clamp(max=size - 1)
        model = on_mesh(alone, mesh)
        assert model.get_input_embeddings().weight.shape[0] == size
        same(model, alone, **batch)
    with pytest.raises(gspmd.ShardingError, match="shapes before the model is wrapped"):
        model.resize_token_embeddings(70, mean_resizing=False)


@MESH
@subjects("tied weights")
def test_tied_weights(mesh, family):
    """One parameter with one gradient, that stays one, and that is written once."""
    model, alone = pair(family, mesh, tie_word_embeddings=True)
    batches = [FAMILIES[family].batch(seed) for seed in range(2)]
    assert_same(trained(model, batches), trained(alone, batches), family, TERMS)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in alone.named_parameters()]
    path = folder()
    model.save_pretrained(path)
    again = type(alone).from_pretrained(path)
    assert again.get_input_embeddings().weight is again.get_output_embeddings().weight
    assert_same(whole(dict(again.state_dict())), gspmd_state(model), family, terms=0)


def prompt(family: str) -> dict:
    batch = FAMILIES[family].batch()
    return {name: value for name, value in batch.items() if name not in ("labels",)}


@MESH
@subjects("generation")
def test_generation(mesh, family):
    """Greedy with a cache and without, sampled, with beams, with scores."""
    model, alone = pair(family, mesh)
    for options in (
        {},
        {"use_cache": False},
        {"do_sample": True, "top_k": 20},
        {"num_beams": 2},
        {"return_dict_in_generate": True, "output_scores": True, "output_hidden_states": True},
    ):
        results = []
        for each in (model, alone):
            torch.manual_seed(5)
            options = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, **options}
            result = each.generate(**prompt(family), **options)
            if not isinstance(result, torch.Tensor):
                result.past_key_values = None
            results.append(whole(result))
        assert_same(*results, str(options), TERMS)


@MESH
@subjects("padding on the left")
def test_padding_on_the_left(mesh, family):
    """The logits of a padded row are its own, and the text that follows is."""
    model, alone = pair(family, mesh)
    ids = FAMILIES[family].batch()["input_ids"]
    padded = torch.cat([torch.zeros(2, 3, dtype=ids.dtype), ids], 1)
    mask = (torch.arange(10) >= 3).long().expand(2, -1).clone()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        got = model(padded, attention_mask=mask, position_ids=positions).logits[:, 3:]
        assert_same(got, alone(ids).logits, family, TERMS)
    options = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4}
    text = model.generate(padded, attention_mask=mask, **options)
    assert torch.equal(text[:, 3:], alone.generate(ids, **options))


@MESH
@subjects("attentions")
def test_attentions_and_hidden_states(mesh, family):
    """By arguments, as tuples, and by the configuration after the wrap."""
    model, alone = pair(family, mesh)
    batch = FAMILIES[family].batch()
    both = {"output_attentions": True, "output_hidden_states": True}
    got = model(**batch, **both)
    names = [name for name in got if "attentions" in name or "hidden_states" in name]
    assert names or family == "CLIP", [*got]
    same(model, alone, **batch, **both)
    same(model, alone, **batch, **both, return_dict=False)
    for each in (model, alone):
        each.config.output_hidden_states = each.config.output_attentions = True
    same(model, alone, **batch)


@MESH
@subjects("hidden states")
def test_gradients_of_hidden_states(mesh, family):
    """Hooks in forward get them; retain_grad on what forward returns is an error that says so."""
    results = []
    for each in pair(family, mesh):
        layers = [m for m in each.modules() if type(m).__name__.endswith(("Layer", "Block"))]
        kept: list[torch.Tensor] = []
        for layer in layers:
            layer.register_forward_hook(partial(keep_gradient, kept))
        each(**FAMILIES[family].batch()).loss.backward()
        results.append(whole(kept))
    assert results[1]
    assert_same(*results, family, TERMS)
    model = on_mesh(FAMILIES[family].make(), mesh)
    result = model(**FAMILIES[family].batch(), output_hidden_states=True)
    for name, values in result.items():
        if name.endswith("hidden_states"):
            values[-2].retain_grad()
            with pytest.raises(gspmd.ShardingError, match="in forward, or in a forward hook"):
                result.loss.backward()


def keep_gradient(kept: list, module, args, output) -> None:
    (output[0] if isinstance(output, tuple) else output).register_hook(kept.append)


@MESH
@subjects("freezing")
def test_freezing(mesh, family):
    """Half of the parameters, before the wrap; others on the wrapped model; none again."""
    alone = FAMILIES[family].make()
    names = [name for name, _ in alone.named_parameters()]
    for name in names[::2]:
        alone.get_parameter(name).requires_grad_(False)
    model, batch = on_mesh(alone, mesh), FAMILIES[family].batch()
    same(model, alone, **batch)
    assert gradients(model).keys() <= {*names[1::2]}
    for each in (model, alone):
        for name in names:
            each.get_parameter(name).requires_grad_(name in names[::3])
    same(model, alone, **batch)
    for each in (model, alone):
        each.requires_grad_(True)
    same(model, alone, **batch)


@MESH
@subjects("inputs that require gradients")
def test_inputs_that_require_gradients(mesh, family):
    """enable_input_require_grads, with which adapters train beside checkpointed frozen layers."""
    model, alone = pair(family, mesh)
    for each in (model, alone):
        each.train().requires_grad_(False)
        [*each.parameters()][-1].requires_grad_(True)
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable()
    same(model, alone, **FAMILIES[family].batch())


@MESH
@subjects("inputs_embeds")
def test_inputs_embeds(mesh, family):
    """In place of tokens: the same results, and the gradient of the embeddings."""
    model, alone = pair(family, mesh)
    batch = FAMILIES[family].batch()
    ids, grads = batch.pop("input_ids"), []
    embeddings = alone.get_input_embeddings()(ids).detach()
    for each in (model, alone):
        given = embeddings.clone().requires_grad_()
        each(inputs_embeds=given, **batch).loss.backward()
        grads.append(given.grad)
    assert_same(*grads, family, TERMS)
    with torch.no_grad():
        same_ids, same_rows = (
            model(input_ids=ids, **batch),
            model(inputs_embeds=embeddings, **batch),
        )
    assert_same(same_rows.logits, same_ids.logits, family, TERMS)


@MESH
@subjects("attention")
def test_attention_implementations(mesh, family):
    """set_attn_implementation on the wrapped model."""
    model, alone = pair(family, mesh)
    batch = FAMILIES[family].batch()
    same(model, alone, **batch)
    for each in (model, alone):
        each.set_attn_implementation("sdpa")
    same(model, alone, **batch)


@MESH
@subjects("dtypes")
def test_dtypes_and_counts(mesh, family):
    """float64 by double(), and what a model says of itself."""
    model, alone = pair(family, mesh)
    assert model.num_parameters() == alone.num_parameters()
    assert model.dtype == alone.dtype and model.device == alone.device
    assert model.get_memory_footprint() == alone.get_memory_footprint()
    batch = FAMILIES[family].batch()
    batch = {
        k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
        for k, v in batch.items()
    }
    # transformers computes losses in float32.
    single = round(TERMS * torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps)
    same(model.double(), alone.double(), single, **batch)
    assert model.dtype == torch.float64


@MESH
@subjects("heads")
def test_another_head(mesh, family):
    """from_pretrained of the base model reads what a model with a head has saved."""
    model, alone = pair(family, mesh)
    path = folder()
    model.save_pretrained(path)
    base = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    ours = on_mesh(base, mesh)
    batch = {k: v for k, v in FAMILIES[family].batch().items() if k not in ("labels",)}
    if family in ("T5", "Whisper"):
        batch["decoder_input_ids"] = FAMILIES[family].batch()["labels"]
    with torch.no_grad():
        assert_same(whole(ours(**batch)), whole(base(**batch)), family, TERMS)
