"""Pages of docs/integrations show the very text of their examples. Needs none of the packages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {  # by page
    "accelerate": ["accelerate_gpt"],
    "lightning": ["lightning_fabric", "lightning_trainer"],
    "peft": ["peft_lora"],
    "pipelining": ["pipelining"],
    "torch_checkpoint": ["checkpoint_state_dict"],
    "torchao": ["torchao_low_bit"],
    "torchtitan": ["torchtitan_parallelize"],
    "torchtune": ["torchtune_distributed"],
    "transformers": ["transformers_trainer"],
}


@pytest.mark.parametrize("page", EXAMPLES)
def test_page_shows_its_examples(page: str) -> None:
    """As they are in their files, to the letter."""
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "integrations" / f"{page}.md").read_text(), re.DOTALL)
    for example in EXAMPLES[page]:
        assert (ROOT / "examples" / f"{example}.py").read_text() in shown, example
