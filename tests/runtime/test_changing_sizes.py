"""The warning for calls that differ in sizes only."""

import warnings

import pytest
import torch
import torch.distributed as dist

import torchgspmd as gspmd
from torchgspmd.runtime.changing_sizes import warn_of_sizes


def texts(sizes, keys_of):
    """The warnings of programs that are made for these sizes, one after the other."""
    keys = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in sizes:
            keys.append(keys_of(size))
            warn_of_sizes(keys[-1], keys, ["x", "cache_keys"])
    return [str(w.message) for w in caught]


def test_the_fourth_the_eighth_and_the_sixteenth_program_are_warned_of():
    def key(n):
        tensor = ((2, 1), torch.float32, False), ((2, 3, n, 8), torch.float32, False)
        return 2, (tensor[0], "'a text'", tensor[1]), 0

    found = texts(range(5, 5 + 20), key)
    assert [text.split()[0] for text in found] == ["4", "8", "16"]
    assert "differ in sizes only: dimension 2 of 'cache_keys' is 5, 6, 7, 8 (" in found[0]
    assert found[1].count(", ...") == 1


@pytest.mark.parametrize("change", ("dtype", "mode", "text", "few"))
def test_other_differences_are_none_of_sizes(change):
    def key(n):
        dtype = torch.float32 if change != "dtype" or n % 2 else torch.float64
        size = n % 3 if change == "few" else n
        text = f"'{n}'" if change == "text" else "'a'"
        return 1, (((size,), dtype, False), text), n if change == "mode" else 0

    assert not texts(range(2, 8), key)


def test_a_module_warns():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = gspmd.parallelize(torch.nn.Linear(3, 2), gspmd.Mesh(data=1), dynamic=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for size in (2, 3, 4, 5, 6):
                model(torch.ones(size, 3))
    finally:
        dist.destroy_process_group()
    (text,) = [str(w.message) for w in caught if "sizes only" in str(w.message)]
    assert "dimension 0 of 'input' is 2, 3, 4, 5 (" in text and "test_changing_sizes.py" in text
