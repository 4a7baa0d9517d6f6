"""A run from its config: model, data, optimizer and checkpoints put together on every rank."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import d9d_ckpt
from d9d_ckpt.checkpointer.cursor import DataCursor
from d9d_ckpt.layout.topology import Topology
from d9d_ckpt.models.config import ModelConfig
from d9d_ckpt.models.family import EMBEDDING, HEAD
from d9d_ckpt.models.registry import family_of
from d9d_ckpt.storage.opening import store_for
from d9d_train.batch import Batch
from d9d_train.checkpoint import Checkpoints, check_export, described, find_start, load_weights
from d9d_train.config import Config, model_config
from d9d_train.data.config import DataConfig
from d9d_train.data.loader import Loader
from d9d_train.data.opening import open_stream
from d9d_train.data.order import Order, Share, token_index
from d9d_train.launch import Stopping, started
from d9d_train.mesh import Axis, Mesh, mesh_of
from d9d_train.models.config import Options, read_config
from d9d_train.models.decoder import CausalLM
from d9d_train.optim.adamw import AdamW
from d9d_train.optim.shards import shard
from d9d_train.parallel import context, fsdp
from d9d_train.parallel.pipeline import sharded
from d9d_train.parallel.pipeline.run import Executor
from d9d_train.parallel.stages import (
    Parallel,
    build_stages,
    follow_tied,
    named_parameters,
    saved_tensors,
)
from d9d_train.step import Stepper
from d9d_train.telemetry import LastActions, Progress, flops_per_token, open_tracker
from d9d_train.trainer import Run, RunState, Validation

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""What transformers calls the families."""


def train(config: Config) -> None:
    """One run on all ranks, from its config to its last step and export.

    SIGTERM, to whichever rank, ends it after a whole step, which is saved; nothing is exported then.

    Raises:
        CkptError: Something that a user can act on.
    """
    with started(deterministic=config.train.deterministic) as device, ExitStack() as stack:
        stopping = stack.enter_context(Stopping())
        raw = model_config(config.model)
        config = config.balanced(raw)
        mesh = mesh_of(config.topology, device)
        progress = Progress()
        stack.enter_context(_last_actions(progress))
        check_export(config)
        run = built(config, raw, mesh, progress, stack)
        run.train(stopping)
        if config.checkpoint.export and run.over:
            progress.at("export")
            _export(config, raw, mesh.topology, run.saved())


def built(
    config: Config, raw: Mapping[str, Any], mesh: Mesh, progress: Progress, stack: ExitStack
) -> Run:
    """A run at the step from which it goes on; what has to be closed goes on ``stack``."""
    start = find_start(config)
    config, sizes = start.config, read_config(raw)
    stages = build_stages(raw, mesh, _options(config), _parallel(config), seed=config.train.seed)
    if "hf" in config.model and start.step is None:
        padded = _padded(sizes.sizes, mesh.topology)
        load_weights(config.model["hf"], saved_tensors(stages), padded)
    checkpoints = None
    if config.checkpoint.url:
        saver = _saver(config.checkpoint.url, config, raw, mesh.topology)
        checkpoints = stack.enter_context(Checkpoints(start, saver))
    stepper = _stepper(config, stages, mesh, progress, checkpoints)
    loader, cursor = _opened(config, config.data, sizes.sizes.vocab, mesh)
    run = Run(
        config=config,
        mesh=mesh,
        stages=stages,
        stepper=stepper,
        loader=stack.enter_context(loader),
        cursor=cursor,
        state=RunState(),
        validation=_validation(config, sizes.sizes.vocab, mesh, stepper),
        checkpoints=checkpoints,
        tracker=None,
        progress=progress,
        flops=flops_per_token(
            sizes.sizes, experts_per_token=sizes.experts_per_token, seq_len=config.train.seq_len
        ),
        parameters=_most_parameters(stages, mesh),
    )
    if checkpoints is not None:
        checkpoints.resume(run.saved())
    follow_tied(stages)
    if dist.get_rank():
        return run
    tracker = open_tracker(
        config.metrics,
        resumed=start.step or 0,
        steps=config.train.steps,
        settings=described(config),
    )
    stack.callback(tracker.close)
    return replace(run, tracker=tracker)


def _options(config: Config) -> Options:
    train = config.train
    return Options(dropout=train.dropout, seed=train.seed, balance_bias=train.balance_bias > 0)


def _parallel(config: Config) -> Parallel:
    train = config.train
    return Parallel(
        context=config.context.kind,
        stored=train.stored,
        compute=train.compute,
        reshard=config.reshards,
        recompute=train.recompute,
        compile=train.compile,
        balance=train.balance_loss / train.global_batch,
    )


def _padded(sizes: ModelConfig, topology: Topology) -> dict[str, int]:
    """Rows without padding, by glob, of the tensors that have some."""
    if not sizes.vocab % (topology.vocab_multiple * topology.tp):
        return {}
    names = [EMBEDDING] if sizes.tied else [EMBEDDING, HEAD]
    return {f"*{name}": sizes.vocab for name in names}


def _stepper(
    config: Config,
    stages: Mapping[int, CausalLM],
    mesh: Mesh,
    progress: Progress,
    checkpoints: Checkpoints | None,
) -> Stepper:
    optim, pipeline, topology, reshard = (
        config.optim,
        config.pipeline,
        mesh.topology,
        config.reshards,
    )
    optimizer = AdamW(
        named_parameters(stages),
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        exempt=() if optim.decay_embeddings else (EMBEDDING,),
    )
    executor = Executor(
        stages,
        pipeline.program(topology),
        mesh.axis("pp"),
        partial(_transferred, stages, mesh.axis("tp"), config.train.compute),
        on_action=lambda action: progress.at(str(action), action.microbatch),
        on_first=lambda stage: fsdp.synchronise(stages[stage], last=False, reshard=reshard),
        on_last_backward=lambda stage: fsdp.synchronise(stages[stage], last=True, reshard=reshard),
        on_weights=lambda stage, last: sharded.weights(stages[stage], last=last, reshard=reshard),
        on_stage=lambda action: sharded.perform(stages[action.stage], action),
    )
    return Stepper(
        stages=stages,
        executor=executor,
        optimizer=optimizer,
        mesh=mesh,
        max_norm=optim.max_norm,
        balance_rate=config.train.balance_bias,
        before_update=_nothing if checkpoints is None else checkpoints.wait_snapshot,
    )


def _transferred(
    stages: Mapping[int, CausalLM], tp: Axis, dtype: torch.dtype, batch: Batch
) -> tuple[tuple[int, ...], torch.dtype]:
    """What goes from stage to stage: the residual stream of this rank's tokens."""
    hidden = next(iter(stages.values())).config.sizes.hidden
    sequences, tokens = batch.tokens.shape
    return (sequences, tokens // tp.size, hidden), dtype


def _nothing() -> None:
    """Nothing is saved: nobody reads what is to be written to."""


def _opened(
    config: Config, data: DataConfig, vocab: int, mesh: Mesh, first: int = 0
) -> tuple[Loader, DataCursor]:
    """This rank's micro-batches from sample ``first`` on, and the cursor that they follow."""
    train, dp, cp = config.train, mesh.axis("dp"), mesh.axis("cp")
    stream = open_stream(data, seq_len=train.seq_len, vocab_size=vocab, seed=train.seed)
    seed = train.seed if data.seed is None else data.seed
    cursor = DataCursor(length=stream.length, seed=seed, consumed=first)
    order: Order = context.KINDS[config.context.kind].order if cp.size > 1 else "contiguous"
    loader = Loader(
        stream,
        cursor,
        share=Share(train.global_batch, config.pipeline.microbatches, dp.size, dp.rank),
        index=token_index(train.seq_len, cp.size, cp.rank, order),
        device=mesh.torch_device,
    )
    return loader, cursor


def _validation(config: Config, vocab: int, mesh: Mesh, stepper: Stepper) -> Validation | None:
    want = config.validation
    if not want.every:
        return None
    loader, cursor = _opened(config, want.data, vocab, mesh, want.first)
    return Validation(want.every, want.batches, loader, cursor, stepper)


def _saver(
    url: str, config: Config, raw: Mapping[str, Any], topology: Topology
) -> d9d_ckpt.Checkpointer:
    want = config.checkpoint
    return d9d_ckpt.Checkpointer(
        url,
        keep_last=want.keep_last,
        keep_every=want.keep_every,
        check_finite=True,
        unpadded=_padded(read_config(raw).sizes, topology),
        layout=topology,
        family=family_of(raw).name,
        config=_stated(raw, config),
        files=_companions(config.model),
        storage_options=want.storage_options,
    )


def _export(
    config: Config, raw: Mapping[str, Any], topology: Topology, state: Mapping[str, Any]
) -> None:
    """Write the model as a Hugging Face directory, experts as a Hugging Face source had them."""
    url, source = config.checkpoint.export, config.model.get("hf")
    experts = d9d_ckpt.open(source).opened.experts if source else ""
    with _saver(url, config, raw, topology) as saver:
        saver.export_hf(url, state, experts=experts or None)


def _companions(model: Mapping[str, Any]) -> dict[str, bytes]:
    """Tokenizer and whatever else goes along with the weights of a Hugging Face source."""
    if "hf" not in model:
        return {}
    opened = d9d_ckpt.open(model["hf"]).opened
    store = store_for(opened.url, {})
    try:
        places = {name: opened.place(name) for name in opened.small if name != "config.json"}
        return {name: store.read(at, 0, store.size(at)) for name, at in places.items()}
    finally:
        store.close()


def _stated(raw: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The config.json of what is trained: the dtype that is stored, and nothing left to a default.

    Defaults of transformers are those of one model of a family (Qwen3's head_dim is 128, whatever the
    others are), and differ from version to version.
    """
    dtype = str(config.train.stored).removeprefix("torch.")
    if "hf" in config.model:
        spelt = "dtype" if "dtype" in raw else "torch_dtype"
        return {**raw, spelt: dtype}
    model = read_config(raw)
    sizes = model.sizes
    stated = {
        "architectures": [_ARCHITECTURES[family_of(raw).name]],
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": config.train.seq_len,
        "rms_norm_eps": model.eps,
        "initializer_range": model.initializer_range,
        "attention_bias": sizes.attention_bias,
        "mlp_bias": sizes.mlp_bias,
        "tie_word_embeddings": sizes.tied,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if not raw.keys() & {"rope_parameters", "rope_theta"}:
        stated["rope_theta"] = model.rope.theta
    if sizes.experts:
        stated["norm_topk_prob"] = model.norm_topk_prob
        stated["decoder_sparse_step"] = 1
        stated["mlp_only_layers"] = []
    return {**stated, **raw}


def _last_actions(progress: Progress) -> LastActions:
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way to it
    return LastActions(store, progress, rank=dist.get_rank(), world=dist.get_world_size())


def _most_parameters(stages: Mapping[int, CausalLM], mesh: Mesh) -> int:
    """Parameters of the rank that holds most."""
    own = sum(shard(parameter).numel() for parameter in named_parameters(stages).values())
    most = torch.tensor(own, device=mesh.torch_device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)
