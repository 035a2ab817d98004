"""DeepSpeed's public names over infinity: ``import infinity.deepspeed as deepspeed``.

Everything here is infinity's own surface under the names and with the calls that DeepSpeed's users know; there is no
second engine. ``tree`` says which name stands in which module, ``absent`` what is not served and what to do instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infinity.deepspeed.delivery import install
from infinity.deepspeed.modules import dress

__all__ = ["install"]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


dress(__name__)
