"""transformers' Trainer on a mesh equals the Trainer of one process."""

import os

import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import distributed
from tiny import EPSILON, Read, Tokens, close, llama, marked, shared_folder, whole
from torch.distributed.tensor import DTensor

import torchgspmd as gspmd
from torchgspmd.integrations import batch_parts
from torchgspmd.integrations.transformers import Trainer

MESHES = ("data=2", "model=2", "data=2,model=2")
ROWS = 4  # of a step on all devices together


def arguments(folder, rows=ROWS, **options):
    return transformers.TrainingArguments(
        **{
            "output_dir": folder,
            "use_cpu": True,
            "per_device_train_batch_size": rows,
            "per_device_eval_batch_size": rows,
            "learning_rate": 1e-2,
            "adam_epsilon": EPSILON,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "max_grad_norm": 0.5,
            "num_train_epochs": 2,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_strategy": "no",
            "disable_tqdm": True,
            "report_to": "none",
            **options,
        }
    )


def one_process(folder, **options):
    """The Trainer itself, in a process that sees no others."""
    rank = os.environ.pop("LOCAL_RANK"), os.environ.pop("WORLD_SIZE"), os.environ.pop("RANK")
    try:
        args = arguments(f"{folder}/one", **options)
        args.device  # noqa: B018
        trainer = transformers.Trainer(
            llama(), args, train_dataset=Tokens(22), eval_dataset=Tokens(10, 1)
        )
        trainer.train()
    finally:
        os.environ.update(dict(zip(("LOCAL_RANK", "WORLD_SIZE", "RANK"), rank)))
    assert trainer.args.world_size == 1
    return trainer


def on_mesh(mesh, folder, model=None, **options):
    parts = batch_parts(mesh)
    return Trainer(
        model or marked(mesh),
        arguments(folder, ROWS // parts, **options),
        mesh=mesh,
        train_dataset=Tokens(22),
        eval_dataset=Tokens(10, 1),
    )


def logged(trainer):
    """What was logged, without times."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")
    return [
        {name: row[name] for name in names if name in row} for row in trainer.state.log_history[:-1]
    ]


def on_first(check):
    """Run a comparison on rank 0: transformers writes files where the rank is 0, alone too."""
    if dist.get_rank() == 0:
        check()


def same_logs(got, want, rel=1e-4):
    assert [row.keys() for row in got] == [row.keys() for row in want]
    for mine, theirs in zip(got, want):
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=rel, abs=1e-7), (name, mine, theirs)


@distributed(*MESHES)
def test_training_equals_one_process(mesh):
    """Uneven last batches, shuffled rows, accumulation, clipping, a schedule, evaluation."""
    folder, options = shared_folder(), {"gradient_accumulation_steps": 2}
    trainer = on_mesh(mesh, folder, **options)
    trainer.train()
    weights, rows = whole(trainer.model), Tokens(10, 1)
    logits = trainer.predict(rows).predictions
    with torch.no_grad():
        result = trainer.model(**torch.utils.data.default_collate([rows[i] for i in range(ROWS)]))
    assert isinstance(result.logits, DTensor)  # which training leaves where they are

    @on_first
    def _():
        want = one_process(folder, **options)
        assert logits == pytest.approx(want.predict(rows).predictions, rel=1e-3, abs=1e-4)
        assert trainer.state.global_step == want.state.global_step == 6
        same_logs(logged(trainer), logged(want))
        close(weights, want.model.state_dict())


@distributed("data=2", "data=2,model=2")
def test_each_rank_reads_its_rows(mesh):
    """Labels that are left out of the loss are counted over the rows of all ranks."""
    folder, options = shared_folder(), {"gradient_accumulation_steps": 2, "eval_strategy": "no"}
    data = Read(22)
    trainer = Trainer(
        marked(mesh),
        arguments(folder, ROWS // 2, **options),
        mesh=mesh,
        own_rows=True,
        train_dataset=data,
        eval_dataset=Tokens(10, 1),
    )
    trainer.train()
    assert len(data.read) == 22  # in two epochs: half of each batch
    others = [None] * mesh.size
    dist.all_gather_object(others, data.read)
    first = others[:: mesh.size // 2]
    assert {*first[0][:11]} | {*first[1][:11]} == {*range(22)}
    weights = whole(trainer.model)

    @on_first
    def _():
        want = one_process(folder, **options)
        same_logs(logged(trainer), logged(want))
        close(weights, want.model.state_dict())


SAVES = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 2, "eval_steps": 4}


@distributed()
def written(mesh, folder):
    """A run that is killed behind its second checkpoint, as far as its files tell."""
    trainer = on_mesh(mesh, folder, **SAVES)
    trainer.train()
    assert trainer.state.global_step == 12


@distributed()
def resumed(mesh, folder):
    """It goes on from step 8 as if it had run on one process from the start."""
    trainer = on_mesh(mesh, folder, **SAVES)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-8")
    weights = whole(trainer.model)

    @on_first
    def _():
        want = one_process(folder)
        own = [row for row in logged(trainer) if row["step"] > 8]
        same_logs(own, [row for row in logged(want) if row["step"] > 8])
        close(weights, want.model.state_dict())
        found = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/checkpoint-12")
        close(dict(found.state_dict()), want.model.state_dict())


@pytest.mark.distributed
@pytest.mark.xdist_group("ranks")
def test_a_run_of_four_processes_goes_on_on_two(tmp_path):
    written("data=2,model=2", folder=str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} >= {"checkpoint-8", "checkpoint-12"}
    assert not (tmp_path / "checkpoint-4").exists()
    resumed("model=2", folder=str(tmp_path))


@distributed("data=2,model=2")
def test_the_best_model_comes_back(mesh):
    """A rate at which the loss rises again, and checkpoints of the model alone."""
    folder, options = (
        shared_folder(),
        dict(
            SAVES,
            save_only_model=True,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            save_total_limit=1,
        ),
    )
    trainer = on_mesh(mesh, folder, **options)
    trainer.train()
    best, weights = trainer.state.best_model_checkpoint, whole(trainer.model)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)
    assert "optimizer" not in os.listdir(best)

    @on_first
    def _():
        want = one_process(folder, **options)
        assert os.path.basename(best) == os.path.basename(want.state.best_model_checkpoint)
        assert trainer.state.best_metric == pytest.approx(want.state.best_metric, rel=1e-3)
        close(weights, want.model.state_dict(), rtol=1e-2)


@distributed("data=2,model=2")
def test_bfloat16_rounds_as_one_process(mesh):
    """The numbers of both differ by roundings of bfloat16: 8 bits, on sums of 16 terms."""
    folder, options = shared_folder(), {"bf16": True, "num_train_epochs": 1, "eval_steps": 3}
    trainer = on_mesh(mesh, folder, **options)
    trainer.train()
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert "bf16" in str(trainer.model.plan)

    @on_first
    def _():
        same_logs(logged(trainer), logged(one_process(folder, **options)), rel=4 * 2.0**-8)


@distributed("data=2,model=2")
def test_traps(mesh):
    """What is easily multiplied by the processes, and the rows that each of them reads."""
    seen, folder = [], shared_folder()

    class Recording(Tokens):
        def __getitem__(self, i):
            seen.append(int(i))
            return super().__getitem__(i)

    options = {"num_train_epochs": 1, "gradient_accumulation_steps": 3, "eval_strategy": "no"}
    args = arguments(folder, ROWS // 2, train_sampling_strategy="sequential", **options)
    trainer = Trainer(marked(mesh), args, mesh=mesh, train_dataset=Recording(22))
    assert trainer.args.world_size == 1 and trainer.get_total_train_batch_size(trainer.args) == 12
    trainer.train()
    assert seen == list(range(22))  # each row once, in the order that the sampler gives
    assert trainer.lr_scheduler.last_epoch == trainer.state.global_step == 2
    assert args.per_device_train_batch_size == ROWS // 2  # the caller's arguments are as they were


@distributed("data=2")
def test_mistakes_lead_to_the_adapter(mesh):
    model, options = gspmd.parallelize(marked(mesh), mesh), {"eval_strategy": "no", "max_steps": 1}
    args = arguments(shared_folder(), **options)
    with pytest.raises(gspmd.ShardingError, match="torchgspmd.integrations"):
        transformers.Trainer(model, args, train_dataset=Tokens(8)).train()
    args = arguments(shared_folder(), bf16=True, **options)
    with pytest.raises(gspmd.ShardingError, match="mixed precision 'bf16' is set for a model"):
        Trainer(model, args, mesh=mesh, train_dataset=Tokens(8))
    trainer = Trainer(
        model, arguments(shared_folder(), **options), mesh=mesh, train_dataset=Tokens(8)
    )
    trainer.train()
