"""What `fullshard train` does: train a small byte-level GPT on real text, sharded over ranks."""
