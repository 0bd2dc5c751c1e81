"""Tables of measured runs: what is refused, and a row of each model is planned and estimated."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from measured_rows import BadRow, Row, read_rows  # noqa: E402
from published_runs import print_rows  # noqa: E402

from torchgspmd import ShardingError  # noqa: E402
from torchgspmd.tools.decoders.config import config  # noqa: E402
from torchgspmd.tools.decoders.run_layouts import Axes  # noqa: E402
from torchgspmd.tools.decoders.run_steps import step  # noqa: E402

HEADER = (
    "source,model,system,gpus,precision,global_batch,micro_batch,sequence,fsdp,tensor,pipeline,"
    "context,virtual_stages,expert,tokens_per_second_per_gpu"
)
GOOD = "NeMo,Llama3 8B,H100,8,bf16,16,1,512,0,2,1,1,1,1,1000"


def table(path: Path, *lines: str) -> list[Row]:
    file = path / "rows.csv"
    file.write_text("\n".join(lines) + "\n")
    return read_rows(file)


def test_a_row_is_read(tmp_path: Path) -> None:
    (row,) = table(tmp_path, HEADER, GOOD)
    assert (row.precision, row.run.replicas, row.run.microbatches) == ("BF16", 4, 4)
    assert row.seconds == 16 * 512 / 8 / 1000
    assert row.run.layout == "d4 t2; 4 x 1"
    assert config(row.model).layers == 32


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",8,bf16", ",eight,bf16", "line 2: gpus is 'eight'; write a whole number from 1"),
        ("512,0,2", "512,-1,2", "fsdp is '-1'; write a whole number from 0"),
        (",1000", ",0", "tokens_per_second_per_gpu is '0'; write a positive number"),
        ("NeMo,", ",", "source is empty"),
    ],
)
def test_a_bad_row_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(BadRow) as error:
        table(tmp_path, HEADER, GOOD.replace(old, new))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bf16", "int3", "precision is 'INT3'; there are BF16, FP8, MXFP8, NVFP4"),
        ("Llama3 8B", "Lama", "there is no model 'Lama'"),
        (",16,1,512", ",18,1,512", "global_batch 18 is not a multiple of micro_batch 1 x 4"),
        ("512,0,2", "512,0,3", "8 gpus are not a multiple of tensor 3 x pipeline 1"),
        ("512,0,2", "511,0,2", "sequence 511 is not a multiple of context 1 x tensor 2"),
        ("512,0,2", "512,3,2", "fsdp 3 does not divide 4 replicas"),
    ],
)
def test_a_row_without_a_plan_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    """The rows around it are estimated."""
    assert old in GOOD
    (row,) = table(tmp_path, HEADER, GOOD.replace(old, new))
    with pytest.raises(ShardingError) as error:
        step(row.run)
    assert message in str(error.value)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRow, match="has no column context, expert"):
        table(tmp_path, HEADER.replace(",context", "").replace(",expert", ""), GOOD)


def test_experts_that_no_axis_has_are_named() -> None:
    row = Row("Qwen3 30B A3B", "H100", 8, "BF16", 24, 1, 256, 0, 2, 1, 1, 1, 3)
    with pytest.raises(
        ShardingError, match="3 parts of the experts and 1 of the weights over 4 replicas of 2"
    ):
        step(row.run)


@pytest.mark.parametrize(
    ("fsdp", "tensor", "context", "experts"),
    [(0, 4, 1, 2), (2, 2, 2, 2), (4, 1, 1, 8), (8, 1, 2, 8), (1, 2, 1, 4), (2, 2, 2, 1)],
)
def test_experts_and_weights_are_sharded_along_parts_of_axes(
    fsdp: int, tensor: int, context: int, experts: int
) -> None:
    row = Row("qwen330ba3b", "H100", 8, "BF16", 8, 1, 512, fsdp, tensor, 1, context, 1, experts)
    chosen = config(row.model)
    axes = Axes.of(row.run, chosen)
    assert axes.mesh.size == 8
    assert axes.count(axes.owners) == (experts if experts > 1 else 1)
    assert axes.count(axes.shard) == max(fsdp, 1)
    if fsdp in (0, 8):
        assert step(row.run).seconds > 0


def test_an_empty_size_is_one_and_scales_name_a_format(tmp_path: Path) -> None:
    (row,) = table(tmp_path, HEADER, "NeMo,Llama3 8B,H100,8,fp8_mx,16,,512,,,,,,,1000")
    sizes = row.micro_batch, row.fsdp, row.tensor, row.pipeline, row.context, row.expert
    assert (row.precision, sizes) == ("MXFP8", (1, 0, 1, 1, 1, 1))


def test_a_row_without_a_measurement_is_estimated_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table(tmp_path, HEADER, GOOD, GOOD.removesuffix("1000"))
    print_rows(str(tmp_path / "rows.csv"))
    first, second, said = capsys.readouterr().out.splitlines()[2:]
    assert said.startswith("1 rows: median error ")
    (_, *cells), (_, *others) = (line.split("|") for line in (first, second))
    assert cells[3] == others[3]  # the estimated seconds
    assert (cells[2], others[2]) == (" 1.02 ", "  ")


@pytest.mark.parametrize("model", ["llama38b", "qwen330ba3b", "gptoss20b", "deepseekv3", "kimik2"])
def test_a_row_of_a_model_is_planned(model: str) -> None:
    """Twice as many microbatches take twice as long, but for what comes once a step."""
    experts = 4 if config(model).experts else 1
    row = Row(model, "H100", 8, "FP8", 32, 1, 512, 0, 1, 2, 1, 2, experts)
    found = step(row.run)
    assert found.parts["microbatches"] > found.parts["idle"] > 0
    assert found.memory > 0
