"""A small MoE trained over six axes' worth of code: killed while saving, resumed elsewhere, exported.

    python tools/demo_train.py [--keep DIR]

Eight processes train over pipeline, FSDP, tensor and expert parallelism and save after every step, until
all of them are killed in the middle of a save. Four processes resume on another topology, finish, and
export to Hugging Face, where transformers loads the model. The losses of both parts are then compared
with those of one process that nobody interrupts.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from showing import failed, in_folder, show

CONFIG = """\
[model]
family = "qwen3_moe"
vocab_size = 512
hidden_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 32
norm_topk_prob = true

[train]
steps = 60
global_batch = 8
seq_len = 64
dtype = "float64"
deterministic = true

[optim]
lr = 1e-2

[checkpoint]
url = "run"
every = 1
keep_last = 3

[metrics]
jsonl = "metrics.jsonl"
"""

FIRST = "mesh.pp=2 mesh.dp_shard=2 mesh.tp=2 mesh.ep=4 pipeline.microbatches=2"
SECOND = "mesh.dp_replicate=2 mesh.cp=2 mesh.ep=2 checkpoint.every=20 checkpoint.export=hf"
ALONE = "checkpoint.url= metrics.jsonl=alone.jsonl"

SAVES_BEFORE = 5
PATIENCE = 240.0
"""Seconds; starting eight interpreters takes some twenty of them on two cores."""


def main() -> int:
    return in_folder(__doc__, demo)


def demo(folder: Path) -> int:
    """Train, kill, resume, export and compare in ``folder``; 0 when all of it holds."""
    os.environ["OMP_NUM_THREADS"] = "1"
    (folder / "tiny.toml").write_text(CONFIG)
    show(f"cd {shlex.quote(str(folder))}; cat tiny.toml")
    print(CONFIG)
    saved = killed_while_saving(folder, trainer(8, FIRST))
    if saved is None:
        print("FAILED: no save could be interrupted", file=sys.stderr)
        return 1
    print(f"killed all processes while step {saved} was being saved")
    for command in (
        "d9d-ckpt list run",
        trainer(4, SECOND),
        "d9d-ckpt inspect hf",
        trainer(1, ALONE),
    ):
        if code := failed(folder, command):
            return code
    wrong, proven = compared(folder)
    for line in wrong:
        print(f"FAILED: {line}", file=sys.stderr)
    print("" if wrong else f"proven: {proven}")
    return int(bool(wrong))


def trainer(processes: int, settings: str) -> str:
    start = "python" if processes == 1 else f"torchrun --nproc-per-node {processes}"
    return f"{start} -m d9d_train train tiny.toml {settings}"


def killed_while_saving(folder: Path, command: str) -> int | None:
    """Kill a run when some step lies there without its manifest; that step, None if none was seen."""
    show(command)
    process = subprocess.Popen(shlex.split(command), cwd=folder)  # noqa: S603
    deadline = time.monotonic() + PATIENCE
    try:
        while process.poll() is None and time.monotonic() < deadline:
            steps = sorted((folder / "run").glob("step-*"))
            if steps and being_saved(steps[-1]):
                return int(steps[-1].name[5:])
            time.sleep(0.0005)
        return None
    finally:
        for pid in (*workers(process.pid), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def workers(launcher: int) -> list[int]:
    """The processes that torchrun started; it gives each a session of its own."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def being_saved(step: Path) -> bool:
    """Whether something of a step is there, but not what makes it a checkpoint."""
    late = int(step.name[5:]) > SAVES_BEFORE
    return late and any(step.iterdir()) and not (step / "manifest.json").exists()


def compared(folder: Path) -> tuple[list[str], str]:
    """What differs between the two parts and the run of one process, and in words what was found equal."""
    parts, alone = losses(folder / "metrics.jsonl"), losses(folder / "alone.jsonl")
    wrong = []
    if parts.keys() != alone.keys():
        wrong.append(f"steps {sorted(parts.keys() ^ alone.keys())} are in one of the metrics only")
    far = max(abs(parts[step] / alone[step] - 1) for step in parts.keys() & alone.keys())
    if far > 1e-9:
        wrong.append(f"losses differ by {far:.1e}")
    wrong += unfilled(folder / "hf")
    first, last = alone[1], alone[max(alone)]
    return wrong, (
        f"the losses of all {len(alone)} steps, {first:.3f} to {last:.3f}, equal those of one process "
        f"within {far:.0e}; transformers loads the export"
    )


def losses(path: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def unfilled(url: Path) -> list[str]:
    """Parameters of the model in ``url`` that transformers does not find there, and others."""
    import transformers

    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(url, output_loading_info=True)
    return [f"{url.name}: {what} {names}" for what, names in loaded[1].items() if names]


if __name__ == "__main__":
    sys.exit(main())
