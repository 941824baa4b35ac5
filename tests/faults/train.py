"""Faults in the program behind `fullshard train`."""

from tests.faults.fault import Fault

FAULTS: list[Fault] = [
    Fault(
        "train/corpus.py",
        "    distinct = {hashlib.sha256(file.content).digest(): file for file in reversed(files)}\n",
        "    distinct = {str(file.path).encode(): file for file in reversed(files)}\n",
        "A copy of a training file is held out, and the validation is too good.",
        ("train/test_train_corpus.py",),
    ),
    Fault(
        "train/loop.py",
        "losses.cpu()[torch.from_numpy(counts)].double().sum()",
        "losses.cpu().double().sum()",
        "Windows that only fill up the last round count in the validation.",
        ("train/test_train_results.py", "train/test_train_command.py"),
    ),
    Fault(
        "train/optimizer.py",
        '"params": list(model.blocks.parameters()), PEAK: config.muon_lr, METHOD: "muon"',
        '"params": list(model.blocks.parameters()), PEAK: config.lr, METHOD: "muon"',
        "Matrices are trained with the learning rate of embeddings.",
        ("train/test_train_step.py",),
    ),
    Fault(
        "train/loop.py",
        "enumerate(rank_losses) if not math.isfinite(loss)]:\n",
        "enumerate(rank_losses) if math.isnan(loss)]:\n",
        "An infinite loss trains on.",
        ("train/test_train_results.py",),
    ),
]
