"""``import deepspeed`` where this directory is first on the path: DeepSpeed's names over infinity."""

from __future__ import annotations

from infinity.deepspeed.modules import dress

dress(__name__)
