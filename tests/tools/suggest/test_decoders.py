"""Published decoders: their numbers of weights, and the command that proposes a layout by name."""

import pytest
import torch

import torchgspmd as gspmd
from torchgspmd.tools.command_line import run
from torchgspmd.tools.decoders import NamedDecoder

BILLIONS = {  # as their authors state them, biases of queries and of the router aside
    "llama3-8b": 8.03,
    "Llama 3 70B": 70.6,
    "llama3.1-405b": 405.9,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "mixtral-8x7b": 46.7,
    "deepseek_v3_671b": 684.5,  # 671 and the layer of predictions
    "kimi-k2": 1026.5,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_a_decoder_has_its_weights(name: str) -> None:
    with torch.device("meta"):
        model = NamedDecoder(name, devices=8, sequence=4096)
    count = sum(p.numel() for p in model.parameters())
    assert count == pytest.approx(BILLIONS[name] * 1e9, rel=0.01)


def test_a_model_is_proposed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a precision, by operations of PyTorch and by marks alone."""
    line = "suggest --model llama3-8b --devices 2 --batch 2 --sequence 256 --seconds 1"
    assert run([*line.split(), "--hardware", "b200"]) == 0
    text = capsys.readouterr().out
    assert "of the best layout in its space" in text
    assert "model = NamedDecoder(name='llama3-8b', devices=2, sequence=256)" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--model llama9 --devices 2", "there is no model 'llama9'"),
        ("--model gpt-oss-20b --devices 2 --sequence 300", "no multiple of two windows of 128"),
        ("--devices 2", "which model?"),
    ],
)
def test_a_bad_line_is_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["suggest", *line.split()]) == 1
    assert message in capsys.readouterr().err


def test_there_is_no_such_precision() -> None:
    model, x = torch.nn.Linear(4, 4), torch.ones(4, 4)
    with pytest.raises(gspmd.ShardingError, match="there is no precision 'fp6'"):
        gspmd.suggest(model, (x,), devices=2, precision="fp6")
