"""Where shards are kept, on one rank and over all: stores, their layers, and what travels between ranks."""
