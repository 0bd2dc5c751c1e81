"""peft's adapters on a mesh equal those of one device: before and after parallelize, and merged."""

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import distributed
from tiny import EPSILON, RULES, Tokens, close, llama, mark, marked, shared_folder, whole

import torchgspmd as gspmd
from torchgspmd.integrations import default_in_specs
from torchgspmd.integrations.peft import get_peft_model
from torchgspmd.integrations.transformers import Trainer

ADAPTED = ("q_proj", "o_proj", "down_proj")


def adapted(model, get=peft.get_peft_model, dora=False):
    """The same adapters at each call; their second factor is not 0, as it would be at first."""
    options = {"use_dora": dora, "init_lora_weights": False}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[*ADAPTED], **options)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return get(model, config)


def marks(mesh):
    """Those of the base model under the names that they have with adapters."""
    found = {}
    for glob, spec in RULES.items():
        name = glob if glob.startswith("**") else f"**.{glob}"
        if any(part in name for part in ADAPTED):
            name = name.replace(".weight", ".base_layer.weight")
        found[name] = spec.format(mesh.names[-1])
    return found


def before(mesh, dora):
    model = adapted(llama(), dora=dora)
    gspmd.annotate(model, mesh, marks(mesh))
    return gspmd.parallelize(model, mesh, in_specs=default_in_specs(mesh))


def after(mesh, dora):
    model = gspmd.parallelize(marked(mesh), mesh, in_specs=default_in_specs(mesh))
    return adapted(model, get_peft_model, dora)


def steps(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = torch.optim.AdamW(trained, lr=1e-2, eps=EPSILON), []
    for _ in range(3):
        loss = model(**BATCH).loss
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


BATCH = torch.utils.data.default_collate([Tokens(4)[i] for i in range(4)])


def check(model, dora):
    reference = adapted(llama(), dora=dora)
    names = [name for name, p in reference.named_parameters() if p.requires_grad]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == names
    assert steps(model) == pytest.approx(steps(reference), rel=1e-5)
    close(whole(model), reference.state_dict())
    folder = shared_folder()
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(llama(), folder)
    close(again.state_dict(), reference.state_dict())
    merged, expected = model.merge_and_unload(), reference.merge_and_unload()
    with torch.no_grad():
        loss, want = merged(**BATCH).loss, expected(**BATCH).loss
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    close(whole(merged), expected.state_dict())
    merged.save_pretrained(f"{folder}/merged")
    if dist.get_rank() == 0:
        found = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/merged")
        close(dict(found.state_dict()), expected.state_dict())


@distributed("model=2", "data=2,model=2")
def test_lora_before(mesh):
    check(before(mesh, dora=False), dora=False)


@distributed("data=2")
def test_dora_before(mesh):
    check(before(mesh, dora=True), dora=True)


@distributed("data=2")
def test_lora_after(mesh):
    check(after(mesh, dora=False), dora=False)


@distributed("model=2")
def test_dora_after(mesh):
    check(after(mesh, dora=True), dora=True)


@distributed("model=2")
def test_adapters_without_the_mesh_are_said(mesh):
    """peft makes them of the shapes of shards."""
    model = adapted(gspmd.parallelize(marked(mesh), mesh))
    with pytest.raises(gspmd.ShardingError, match="lora_A.default.weight' is a plain tensor"):
        model(**BATCH)
    with pytest.raises(gspmd.ShardingError, match="the model is on no mesh"):
        adapted(llama(), get_peft_model)


@distributed("data=2")
def test_the_trainer_saves_and_resumes_adapters(mesh):
    def run(folder, steps, resume=None):
        args = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=2,
            max_steps=steps,
            save_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            adam_epsilon=EPSILON,
            disable_tqdm=True,
            report_to="none",
        )
        model = adapted(mark(llama(), mesh))
        trainer = Trainer(model, args, mesh=mesh, train_dataset=Tokens(16))
        trainer.train(resume_from_checkpoint=resume)
        return whole(trainer.model)

    folder = shared_folder()
    want = run(folder, 4)
    close(run(folder, 4, resume=f"{folder}/checkpoint-2"), want)
    found = peft.PeftModel.from_pretrained(llama(), f"{folder}/checkpoint-4")
    close(found.state_dict(), want)
