"""The main job on a small Hugging Face model, shown command by command and then proven bit by bit.

    python tools/demo.py [--keep DIR]

A Qwen3-MoE with random weights is written by transformers, sharded, verified, resharded and brought
back. Everything happens in a temporary directory, unless `--keep` names one to leave it in.
"""

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from showing import failed, in_folder, show

LAYOUT = "pp=2,dp_shard=2,tp=2,ep=4"
OTHER = "pp=3,tp=4,ep=2"  # stages of 2, 1 and 1 layers; more tp ranks than KV heads
SHARD = "400KB"
COMMANDS = f"""
d9d-ckpt inspect hf
d9d-ckpt graph hf --tensor model.layers.0.self_attn.qkv_proj.weight
d9d-ckpt convert hf sharded --to sharded --layout {LAYOUT}
d9d-ckpt inspect sharded
d9d-ckpt verify sharded
d9d-ckpt plan sharded --load --layout {OTHER}
d9d-ckpt reshard sharded resharded --layout {OTHER}
d9d-ckpt diff sharded resharded
d9d-ckpt diff hf resharded
d9d-ckpt convert resharded back --to huggingface --max-shard-size {SHARD} --verify
"""
MAKER = Path(__file__).resolve().with_name("make_checkpoint.py")
MAKE = f"qwen3_moe hf --real --dtype bfloat16 --max-shard-size {SHARD}"


def main() -> int:
    return in_folder(__doc__, demo)


def demo(folder: Path) -> int:
    """Run the commands in ``folder`` and compare what came back; 0 when every bit is the same."""
    if shutil.which("d9d-ckpt") is None:
        print("d9d-ckpt is not installed beside this Python; run `make demo`", file=sys.stderr)
        return 2
    show(f"cd {shlex.quote(str(folder))}")
    for command in (f"python {shlex.quote(str(MAKER))} {MAKE}", *COMMANDS.split("\n")[1:-1]):
        if code := failed(folder, command):
            return code
    show("# and now without d9d-ckpt: safetensors and transformers read both ends")
    wrong, proven = compared(folder / "hf", folder / "back")
    for line in wrong:
        print(f"FAILED: {line}", file=sys.stderr)
    if wrong:
        return 1
    print(f"proven: after hf -> {LAYOUT} -> {OTHER} -> hf, {proven}.")
    return 0


def compared(a: Path, b: Path) -> tuple[list[str], str]:
    """What differs between two Hugging Face directories, and in words what was found equal."""
    ours, theirs = stored(a), stored(b)
    wrong = [f"tensor {name} is on one side only" for name in sorted(ours.keys() ^ theirs.keys())]
    wrong += [
        f"tensor {name} differs"
        for name in sorted(ours.keys() & theirs.keys())
        if not same_bits(ours[name], theirs[name])
    ]
    files = [small_files(side) for side in (a, b)]
    wrong += [f"{name} differs" for name in {n for n, _ in files[0].items() ^ files[1].items()}]
    logits = [logits_of(side, wrong) for side in (a, b)]
    if not same_bits(*logits):
        wrong.append("the logits of transformers differ")
    nbytes = sum(tensor.nbytes for tensor in ours.values())
    return wrong, (
        f"all {len(ours)} tensors ({nbytes:,} bytes), {len(files[0])} config and tokenizer files and "
        f"the {logits[0].numel():,} logits that transformers computes are equal bit for bit"
    )


def stored(url: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = [load_file(path) for path in sorted(url.glob("*.safetensors"))]
    return {name: tensor for content in files for name, tensor in content.items()}


def small_files(url: Path) -> dict[str, bytes]:
    """Everything beside the weights and their index: config.json, the tokenizer."""
    files = (path for path in url.iterdir() if "safetensors" not in path.name)
    return {path.name: path.read_bytes() for path in files}


def same_bits(a: Any, b: Any) -> bool:
    import torch

    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def logits_of(url: Path, wrong: list[str]) -> Any:
    """The logits of the model in ``url``; parameters that its files do not fill go to ``wrong``."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        url, dtype="auto", output_loading_info=True
    )
    model, info = loaded
    wrong += [f"{url.name}: {what} {names}" for what, names in info.items() if names]
    for parameter in model.parameters():
        # Mapped files differ in alignment, and the order in which kernels sum depends on it.
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        return model.eval()(torch.arange(32).reshape(2, 16) * 11 % model.config.vocab_size).logits


if __name__ == "__main__":
    sys.exit(main())
