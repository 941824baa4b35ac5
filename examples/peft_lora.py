"""LoRA with PEFT and transformers' Trainer: a frozen base, sharded; adapters that are trained, saved and merged.

torchrun --nproc-per-node 2 -m fullshard.dropin examples/peft_lora.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

TEXT = "the quick brown fox jumps over the lazy dog and runs away. " * 40
ROW = 32
IDS = torch.tensor(list(TEXT.encode())).unfold(0, ROW, ROW)


def base() -> LlamaForCausalLM:
    """Return a tiny Llama with bytes as tokens. A real program calls from_pretrained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train, save, load, merge."""
    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(
        output_dir=folder,
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "FULL_STATE_DICT"},
        per_device_train_batch_size=4,
        learning_rate=3e-2,
        max_steps=30,
        logging_steps=10,
        save_steps=15,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    if arguments.device.type == "cpu":  # on CPUs accelerate has no FSDP, and silently uses DDP
        PartialState().distributed_type = DistributedType.MULTI_GPU
    adapters = LoraConfig(
        r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = get_peft_model(base(), adapters)
    data = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model()

    dist.barrier()
    with torch.no_grad():
        ours = trainer.model.eval()(IDS[:1].to(arguments.device)).logits.cpu()  # on all ranks
    if arguments.process_index == 0:
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        size = os.path.getsize(os.path.join(folder, "adapter_model.safetensors"))
        print(
            f"{trained} of {sum(p.numel() for p in trainer.model.parameters())} parameters trained, {size} bytes saved"
        )
        plain = PeftModel.from_pretrained(base(), folder)
        merged = plain.merge_and_unload().eval()
        with torch.no_grad():
            same = torch.allclose(merged(IDS[:1]).logits, ours, rtol=1e-3, atol=1e-3)
        print("the merged model gives the same logits:", same)


if __name__ == "__main__":
    main()
