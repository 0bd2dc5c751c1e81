"""in_specs of a model that is called with labels, and without them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchgspmd import Mesh, ShardingError, plan


class Tagger(nn.Linear):
    def forward(self, x, labels=None, weights=None):
        logits = super().forward(x)
        return logits if labels is None else F.cross_entropy(logits, labels, weight=weights)


X, LABELS = torch.randn(6, 8), torch.arange(6) % 4
FORMS = ("data _", "data"), {"x": "data _", "labels": "data", "weights": None}


@pytest.mark.parametrize("specs", FORMS, ids=["tuple", "mapping"])
@pytest.mark.parametrize("args", [(X,), (X, LABELS)], ids=["evaluation", "training"])
def test_arguments_with_a_default_may_be_left_out(specs, args):
    model = Tagger(8, 4)
    planned = plan(model, *args, mesh=Mesh(data=2), in_specs=specs)
    torch.testing.assert_close(planned.simulate(*args), model(*args))
    assert str(planned.in_specs[2]) == "data _"  # behind those of weight and bias


@pytest.mark.parametrize("specs", [("data _",) * 4, {"x": "data _", "label": "data"}])
def test_other_specs_without_an_argument_are_errors(specs):
    with pytest.raises(ShardingError):
        plan(Tagger(8, 4), X, mesh=Mesh(data=2), in_specs=specs)
