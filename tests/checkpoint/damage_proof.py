"""Damages files of checkpoints at random, and loads them: the values are those that were saved, or it is an error.

    cd tests && python -m checkpoint.damage_proof 10000 [SEED]

Half of them are in our format, half in torch's. A crash, another exception or other values end it.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from checkpoint.contents import fill, read
from checkpoint.test_hostile import entries, save, save_torch, targets
from fullshard import CheckpointError
from fullshard.checkpoint.format.reader import CheckpointReader


def damage(data: bytearray, chance: random.Random) -> None:
    """Flip, overwrite, cut, move, double or add bytes."""
    at, size = chance.randrange(max(len(data), 1)), chance.choice((1, 2, 8, 100, 5000))
    kind = chance.randrange(6)
    if kind == 0 and data:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        data[at : at + size] = chance.randbytes(size)
    elif kind == 2:
        del data[at : at + size]
    elif kind == 3:
        data[at:at] = data[:size]
    elif kind == 4:
        data[at : at + size] = bytes(len(data[at : at + size]))
    else:
        data[at:at] = chance.choice((b"9" * 20, b"[" * 3000, b"\xff" * 8, b"-1", b"\x80\x04."))


def main() -> None:
    """Damage as many as the command line says."""
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    chance, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="damage-proof-"))
    torch.manual_seed(0)
    save(folder / "0")
    save_torch(folder / "1")
    wanted = []
    for number in ("0", "1"):
        wanted.append(targets())
        read(folder / number, wanted[-1])
    refused = 0
    warnings.simplefilter("ignore")
    for number in range(count):
        original, path = folder / str(number % 2), folder / "damaged"
        shutil.copytree(original, path)
        for _ in range(chance.choice((1, 1, 3))):
            file = chance.choice(sorted(each for each in path.rglob("*") if each.is_file()))
            data = bytearray(file.read_bytes())
            damage(data, chance)
            file.write_bytes(data)
        found = targets()
        try:
            reader = CheckpointReader.open(str(path))
            if not entries().keys() <= {*reader.index.tensors, *reader.index.values}:
                raise CheckpointError("as load says, which compares names first")
            fill(reader, found)
        except CheckpointError:
            refused += 1
            assert found["extra.n"] is None and all(bool((found[key] == 7.0).all()) for key in ("model.w", "model.b"))
        else:
            assert found["extra.n"] == wanted[number % 2]["extra.n"], number
            for key in entries().keys() - {"extra.n"}:
                assert torch.equal(found[key], wanted[number % 2][key]), (number, key)
        shutil.rmtree(path)
    shutil.rmtree(folder)
    print(f"{count} damaged checkpoints (seed {seed}): {refused} refused, the others have what was saved")


if __name__ == "__main__":
    main()
