"""The demonstration trainer behind `fullshard train`: a small byte-level GPT on real text, sharded over ranks."""
