"""TRL's SFTTrainer on a mesh equals that of one process."""

import os

import datasets
import pytest
import tokenizers
import torch.distributed as dist
import transformers
import trl
from ranks import distributed
from tiny import EPSILON, VOCABULARY, Tokens, close, llama, marked, shared_folder, whole

from torchgspmd.integrations import batch_parts
from torchgspmd.integrations.trl import SFTTrainer

MESHES = ("data=2", "model=2", "data=2,model=2")
ROWS = 4


def made(trainer, model, folder, rows, **options):
    """A tokenizer of numbers, sequences of other lengths, which are padded."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w1")),
        pad_token="w0",
        eos_token="w2",
    )
    tokens = [row[: 4 + i % 9].tolist() for i, row in enumerate(Tokens(10).rows)]
    args = trl.SFTConfig(
        folder,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=1e-2,
        adam_epsilon=EPSILON,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    data = datasets.Dataset.from_list([{"input_ids": row} for row in tokens])
    made = trainer(model, args, train_dataset=data, processing_class=tokenizer, **options)
    made.train()
    return made


def numbers(trainer):
    names = ("loss", "grad_norm", "learning_rate", "num_tokens", "mean_token_accuracy", "entropy")
    rows = trainer.state.log_history[:-1]
    return [{name: float(row[name]) for name in names if name in row} for row in rows]


@distributed(*MESHES)
def test_fine_tuning_equals_one_process(mesh):
    folder = shared_folder()
    trainer = made(SFTTrainer, marked(mesh), folder, ROWS // batch_parts(mesh), mesh=mesh)
    weights = whole(trainer.model)
    if dist.get_rank() == 0:
        names = ("LOCAL_RANK", "WORLD_SIZE", "RANK")
        before = {name: os.environ.pop(name) for name in names}
        try:
            want = made(trl.SFTTrainer, llama(), f"{folder}/one", ROWS)
        finally:
            os.environ.update(before)
        assert len(numbers(want)) == 2
        for mine, theirs in zip(numbers(trainer), numbers(want)):
            assert mine == pytest.approx(theirs, rel=1e-4)
        close(weights, want.model.state_dict())
