"""Each defect that was a wrong number is put back once: a certificate finds it, or cannot."""

import pytest

from certificate.defects import DEFECTS
from torchgspmd import ShardingError

NAMES = [f"{defect.commit} {defect.text}" for defect in DEFECTS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("defect", DEFECTS, ids=NAMES)
def test_a_defect_that_is_put_back(defect, monkeypatch):
    right = defect.program()
    assert right.verify().complete
    assert defect.is_right is None or defect.is_right(right)
    defect.put_back(monkeypatch)
    wrong = defect.program()
    if defect.is_right is None:
        with pytest.raises(ShardingError, match="one device|its value is|of rank"):
            wrong.verify()
    else:
        assert defect.unseen and wrong.verify().complete  # should it fail: the row is seen now
        assert not defect.is_right(wrong)
