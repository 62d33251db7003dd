"""Loads saved models with plain transformers and compares their logits; prints the largest differences as JSON.

reload.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

folder = Path(sys.argv[1])
expected = torch.load(folder / "expected.pt", weights_only=True)
actor = AutoModelForCausalLM.from_pretrained(folder / "actor")
critic, info = AutoModelForSequenceClassification.from_pretrained(folder / "critic", output_loading_info=True)
tokenizer = AutoTokenizer.from_pretrained(folder / "actor")
generation = GenerationConfig.from_pretrained(folder / "actor")
with torch.no_grad():
    logits = actor(expected["ids"]).logits
    scores = critic(expected["ids"]).logits.squeeze(-1)
print(
    json.dumps(
        {
            "logits": float((logits - expected["logits"]).abs().max()),
            "scores": float((scores - expected["scores"]).abs().max()),
            "size": float(expected["logits"].abs().max()),
            "labels": critic.config.num_labels,
            "missing": sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]),
            "template": tokenizer.apply_chat_template(
                [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
            ),
            "eos": [generation.eos_token_id, tokenizer.eos_token_id, actor.config.eos_token_id],
            "dtype": str(actor.dtype),
            "imports_ours": any(name.startswith("dschat_ppo") for name in sys.modules),
        }
    )
)
