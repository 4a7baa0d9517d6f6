"""Qwen3-MoE: Qwen3's attention, and experts but for the layers that the config keeps dense."""

from d9d_train.models.qwen3_moe.model import build as build
