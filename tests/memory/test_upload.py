"""Arrays on the device are those of the host."""

from __future__ import annotations

import numpy as np
import torch

from radixkv.memory.upload import upload


def test_uploaded_arrays_begin_on_16_bytes() -> None:
    arrays = [
        np.arange(n, dtype=np.int32).reshape(shape) for n, shape in ((5, (5,)), (12, (2, 6)), (0, (0,)), (3, (3,)))
    ]
    there = upload(arrays, torch.device("cpu"))
    assert [tensor.tolist() for tensor in there] == [array.tolist() for array in arrays]
    assert all(tensor.data_ptr() % 16 == there[0].data_ptr() % 16 for tensor in there)
