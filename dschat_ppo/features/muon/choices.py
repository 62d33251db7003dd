"""Values that this feature adds to flags."""

CHOICES = {
    "optimizer": {
        "muon": (
            "trains the matrices of the decoder layers with Muon, and embeddings, heads, norms and"
            " biases with AdamW; without LoRA, offload and fp16, at ZeRO stage 0, in bf16 also at"
            " stage 1"
        )
    }
}
