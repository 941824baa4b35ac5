"""QLoRA with torchtune: a Llama 3 whose frozen base is packed to four bits, sharded, on CPU ranks.

torchrun --nproc-per-node 2 -m fullshard.dropin examples/torchtune_distributed.py
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torchtune import training
from torchtune.models.llama3 import llama3, lora_llama3
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.peft import LoRALinear, get_adapter_params, set_trainable_params

SIZES = {"num_layers": 4, "num_heads": 8, "num_kv_heads": 4, "embed_dim": 256, "intermediate_dim": 512}
LORA = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 8, "lora_alpha": 16}
LENGTH, BATCH, STEPS, WORDS = 64, 4, 5, 512

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
cpu = torch.device("cpu")

torch.manual_seed(0)
base = llama3(vocab_size=WORDS, max_seq_len=LENGTH, **SIZES).state_dict()  # in a real program, read from a checkpoint

with torch.device("meta"):
    model = lora_llama3(vocab_size=WORDS, max_seq_len=LENGTH, **SIZES, **LORA, quantize_base=True)
set_trainable_params(model, get_adapter_params(model))
training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
training.shard_model(
    model,
    [partial(training.get_shard_conditions, names_to_match=["tok_embeddings"])],
    cpu_offload=False,
    reshard_after_forward=True,
)
for module in model.modules():
    if isinstance(module, LoRALinear):
        module.to_empty(device=cpu)
        module.initialize_parameters()
    if hasattr(module, "rope_init"):
        with cpu:
            module.rope_init()
training.load_from_full_model_state_dict(model, base, cpu)
training.validate_no_params_on_meta_device(model)

trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
torch.manual_seed(rank)
text = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
for step in range(STEPS):
    loss = cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trained, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    whole = loss.detach()
    dist.all_reduce(whole)
    norm = norm.full_tensor()  # the norm over all ranks
    if rank == 0:
        print(f"step {step}: loss {whole / ranks:.4f}, gradient norm {norm:.4f}", flush=True)

adapters = training.gather_cpu_state_dict(model, rank == 0, cpu, adapter_weights_only=True)
if rank == 0:
    print(f"{len(adapters)} adapter tensors, {sum(value.numel() for value in adapters.values()):,} values gathered")
dist.destroy_process_group()
