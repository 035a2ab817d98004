"""The keys of the dialect as data: one table a part of the JSON, read by ``infinity.config.dialect``."""
