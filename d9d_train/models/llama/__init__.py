"""Llama: grouped-query attention and a dense SwiGLU, with optional biases."""

from d9d_train.models.llama.model import build as build
