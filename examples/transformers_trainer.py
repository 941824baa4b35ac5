"""transformers' Trainer with FSDP2: training, a checkpoint, generation, and a model that from_pretrained reads.

torchrun --nproc-per-node 2 -m fullshard.dropin examples/transformers_trainer.py
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

TEXT = "the quick brown fox jumps over the lazy dog and runs away. " * 40
ROW = 32
IDS = torch.tensor(list(TEXT.encode())).unfold(0, ROW, ROW)


def model() -> LlamaForCausalLM:
    """Return a tiny Llama with bytes as tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train, save, generate, load."""
    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(
        output_dir=folder,
        fsdp=True,
        fsdp_config={"version": 2, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT"},
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_steps=30,
        logging_steps=10,
        save_steps=30,
        max_grad_norm=1.0,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    if arguments.device.type == "cpu":  # on CPUs accelerate has no FSDP, and silently uses DDP
        PartialState().distributed_type = DistributedType.MULTI_GPU
    data = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = Trainer(model=model(), args=arguments, train_dataset=data)
    trainer.train()

    places = [folder]
    dist.broadcast_object_list(places)  # where the first rank's files are
    prompt = IDS[:1, :8].to(arguments.device)
    made = trainer.model.eval().generate(prompt, max_new_tokens=16, do_sample=False)
    trainer.save_model()
    dist.barrier()
    loaded = LlamaForCausalLM.from_pretrained(places[0]).to(arguments.device).eval()
    again = loaded.generate(prompt, max_new_tokens=16, do_sample=False)
    if arguments.process_index == 0:
        print(f"sharded as {type(trainer.model).__name__}")
        print("it says", repr(bytes(made[0].tolist()).decode()))
        print("the loaded model says the same:", torch.equal(made, again))


if __name__ == "__main__":
    main()
