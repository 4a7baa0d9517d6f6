"""The optimizer step: the norm of gradients over all ranks, AdamW on local shards, the learning rate."""
