"""DeepSpeed's public names over infinity: ``import infinity.deepspeed as deepspeed``.

Everything here is infinity's own surface under the names and with the calls that DeepSpeed's users know; there is no
second engine. ``tree`` says which name stands in which module, ``absent`` what is not served and what to do instead.
"""

from __future__ import annotations

from infinity.deepspeed.delivery import install
from infinity.deepspeed.modules import dress

__all__ = ["install"]

dress(__name__)
