"""Qwen3: Llama with norms on each query and key head, and a head_dim of its own."""

from d9d_train.models.qwen3.model import build as build
