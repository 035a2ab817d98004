from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_process_group_stays() -> Iterator[None]:
    """The dialect's ``initialize`` makes a group, as DeepSpeed's does; the next test of this process wants none."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
