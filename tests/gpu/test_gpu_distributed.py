"""On GPUs, through NCCL: the checks of `test_distributed_data.py` and `test_sharding.py`.

Run by `make test-gpu` on a machine with two GPUs or more; NVLink multicast stays off.
"""

import pytest
import test_distributed_data
import test_sharding
import torch
from ranks import launch

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_gradients_are_those_of_one_process(world, tmp_path):
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    names = [*test_distributed_data.CHECKS, *(test_distributed_data.SLOW if world == 2 else ())]
    launch(test_distributed_data.__file__, world, names, tmp_path, backend="nccl", seconds=500)


@pytest.mark.parametrize("world", [2, 4])
def test_dtensors(world, tmp_path):
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    launch(test_sharding.__file__, world, test_sharding.CHECKS, tmp_path, backend="nccl", seconds=500)
