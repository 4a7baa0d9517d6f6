"""One rank's share of a checkpoint through d9d_ckpt's Python API.

    python ours_load.py CHECKPOINT --cut tp --rank 1 --ranks 4

One slice after the other, by training names, as a user of the API would write it.
"""

import argparse
import json
import time

import torch  # imported here so that reading its files counts for neither side
from counters import bytes_read
from training_form import cut_dim, share

import d9d_ckpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--cut", required=True, choices=["tp", "columns", "rows"])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    args = parser.parse_args()

    before = bytes_read()
    start = time.perf_counter()
    loaded = read_share(args.checkpoint, args.cut, args.rank, args.ranks)
    seconds = time.perf_counter() - start
    report = {
        "seconds": seconds,
        "bytes_read": bytes_read() - before,
        "bytes_loaded": sum(tensor.nbytes for tensor in loaded.values()),
    }
    print(json.dumps(report))


def read_share(url: str, cut: str, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    ckpt = d9d_ckpt.open(url)
    loaded = {}
    for name, tensor in ckpt.tensors.items():
        shape = tuple(tensor.shape)
        region = share(shape, cut_dim(name, shape, cut), rank, ranks)
        loaded[name] = tensor[region].read()
    return loaded


if __name__ == "__main__":
    main()
