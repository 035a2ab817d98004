"""Collectives of torch.distributed, with the keywords that DeepSpeed's take beside torch's: how a call is logged.

``comms_logger`` of the configuration counts what the engine sends; calls of a script's own are not logged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, prof: bool = False, log_name: str = "", debug: str = "", **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


all_gather = _logged(dist.all_gather)
all_gather_into_tensor = _logged(dist.all_gather_into_tensor)
all_reduce = _logged(dist.all_reduce)
all_to_all_single = _logged(dist.all_to_all_single)
barrier = _logged(dist.barrier)
broadcast = _logged(dist.broadcast)
gather = _logged(dist.gather)
irecv = _logged(dist.irecv)
isend = _logged(dist.isend)
monitored_barrier = _logged(dist.monitored_barrier)
recv = _logged(dist.recv)
reduce = _logged(dist.reduce)
reduce_scatter = _logged(dist.reduce_scatter)
reduce_scatter_tensor = _logged(dist.reduce_scatter_tensor)
scatter = _logged(dist.scatter)
send = _logged(dist.send)
