"""Its place puts this directory on the path, so that tests import `helpers`."""

import os

import torch

if not torch.cuda.is_available():
    # Triton reads it once, when it is imported; transformers' models import Triton as well.
    os.environ.setdefault("TRITON_INTERPRET", "1")
