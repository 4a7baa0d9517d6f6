"""The TOML file of a run: what it may say, what is refused and how, and what may differ at a resume."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from helpers.checkpoints import model, write_model
from helpers.decoders import CASES

from d9d_ckpt.errors import CkptError, LayoutError, MissingError, UsageError
from d9d_train.config import Config, ContextConfig, changes, load_config, model_config
from d9d_train.models.config import read_config
from d9d_train.models.keys import DecoderKeys, DenseKeys, SparseKeys
from d9d_train.models.registry import FAMILIES
from d9d_train.parallel.context import KINDS
from d9d_train.typed import read

EXAMPLE = """
[model]
family = "qwen3_moe"            # or hf = URL of a Hugging Face checkpoint: sizes and weights from there
vocab_size = 512
hidden_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 32
[mesh]                          # missing axes are 1
pp = 2
dp_shard = 2
tp = 2
ep = 4
[context]
kind = "all_gather"             # the default; ulysses, ring
[pipeline]
schedule = "1f1b"               # gpipe, 1f1b, interleaved, looped_bfs, zb1p, zbv, dualpipev, or csv = FILE
microbatches = 4
[train]
steps = 6
global_batch = 8                # sequences per step over the whole world
seq_len = 64
dtype = "float64"               # float32, bfloat16 (with float32 masters)
seed = 0
deterministic = true
[data]
kind = "synthetic"              # a fixed bigram chain, two successors a token (0.9, 0.1), from (seed, global sample): learnable, endless; tokens, text
[optim]
lr = 1e-3
schedule = "constant"           # the default, without warm-up; wsd, cosine over optim.total_steps (default train.steps, kept from the first start)
[checkpoint]                    # without a url, no checkpoints
url = "runs/tiny"
every = 3
keep_last = 2
resume = "auto"                 # never, or a step
export = ""                     # URL of a Hugging Face directory written at the end
[metrics]
jsonl = "metrics.jsonl"         # written by one rank
"""


@pytest.fixture
def example(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(EXAMPLE)
    return str(path)


def refused(path: str, *overrides: str) -> str:
    with pytest.raises(UsageError) as error:
        load_config(path, overrides)
    return str(error.value)


def test_the_example_of_the_interface_loads(example):
    config = load_config(example)
    assert config.topology.world == 8
    assert (config.train.steps, config.train.dtype, config.train.deterministic) == (
        6,
        "float64",
        True,
    )
    assert (config.pipeline.schedule, config.pipeline.microbatches) == ("1f1b", 4)
    assert (config.checkpoint.url, config.checkpoint.keep_last) == ("runs/tiny", 2)
    assert config.metrics.jsonl == "metrics.jsonl"
    assert model_config(config.model)["model_type"] == "qwen3_moe"
    assert read_config(model_config(config.model)).sizes.experts == 8


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optim.max_norm=inf", "optim.betas=[0.9, 0.99]", "mesh.stages=[3, 1]"],
        [
            "data.kind=mixture",
            'data.mixture=[{weight=1, kind="synthetic"}, {weight=2, kind="text", text={files=["a"]}}]',
        ],
        ["data.kind=text", 'data.text.files=["*.py"]', "validation.every=2"],
        ["checkpoint.storage_options.client.endpoint=http://x", "metrics.profile_steps=[2, 3]"],
        ['model.rope_parameters={rope_type="yarn", factor=4.0}'],
    ],
)
def test_a_resolved_config_comes_back_from_json(example, overrides):
    config = load_config(example, overrides).resolved(None)
    text = json.dumps(config.to_json(), allow_nan=False)
    assert read(Config, json.loads(text), "") == config
    assert changes(json.loads(text), config.to_json()) == {}


# -- keys --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "train.stepz: unknown key; nearest: steps"),
        ("trian.steps=3", "trian: unknown key; nearest: train"),
        ("model.hiden_size=3", "model.hiden_size: unknown key; nearest: hidden_size"),
        ("data.tokenz.files=a", "data.tokenz: unknown key; nearest: tokens"),
        ("train.steps=many", "train.steps: expected a whole number, found str 'many'"),
        (
            "model.hidden_size=64.0",
            "model.hidden_size: expected a whole number, found float 64.0",
        ),
        ("model.family=gpt2", "model.family: gpt2 is not trained here; known: llama, qwen3, "),
        ("model.hf=x", "model: expected either family = NAME with its sizes, or hf = URL"),
        ("context.kind=rign", "context.kind: expected one of all_gather, ulysses, ring, found"),
        ("checkpoint.allow_changes=[lr]", "checkpoint.allow_changes: expected a list, found str"),
        (
            'checkpoint.allow_changes=["optin.lr"]',
            "checkpoint.allow_changes: optin.lr is in no section; nearest: optim",
        ),
    ],
)
def test_keys_and_values_that_are_not_known_are_refused(example, override, message):
    assert refused(example, override).startswith(message)


def test_a_dense_family_has_no_experts(example):
    message = refused(example, "model.family=llama", "model.intermediate_size=8")
    assert message.startswith("model.num_experts: unknown key")


def test_sizes_that_a_family_needs_are_missed(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(EXAMPLE.replace("num_experts_per_tok = 2\n", ""))
    assert refused(str(path)) == "model.num_experts_per_tok: missing, and it has no default"


def test_a_checkpoint_of_a_model_brings_its_sizes(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nhf = "x"\n[train]\nsteps = 1\nglobal_batch = 1\nseq_len = 8\n')
    assert load_config(str(path)).model == {"hf": "x"}
    message = "model.head_dim: model.hf brings its own config.json"
    assert refused(str(path), "model.head_dim=8") == message
    assert refused(str(path), "model.hf=3") == "model.hf: expected a string, found 3"


def test_the_config_of_a_checkpoint_is_the_model(tmp_path):
    source = write_model(tmp_path / "hf", model("qwen3_moe"))
    found = model_config({"hf": str(source)})
    assert found == json.loads((source / "config.json").read_text())
    (source / "config.json").unlink()
    with pytest.raises(MissingError, match=r"hf: has no config\.json"):
        model_config({"hf": str(source)})


class Recorder(dict[str, object]):
    """A config.json that notes what is asked of it."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> object:
        self.asked.add(key)
        return super().__getitem__(key)


EXPORTED = {"architectures", "bos_token_id", "eos_token_id", "pad_token_id"}
SPELLINGS = {"num_local_experts"}
"""Read, but only where a file of the hub says it in place of the key that we take."""


def test_the_keys_of_a_model_are_those_that_are_read():
    asked = {"use_sliding_window"}  # only beside a window, which alone is refused
    for case in CASES.values():
        recorder = Recorder(case)
        read_config(recorder)
        asked |= recorder.asked
    known = {f.name for keys in (DenseKeys, SparseKeys) for f in fields(keys)}
    assert known == asked - {"model_type"} - SPELLINGS | EXPORTED


@pytest.mark.parametrize("case", CASES)
def test_what_models_are_tested_with_can_be_written_down(case):
    given = {k: v for k, v in CASES[case].items() if k != "model_type"}
    family = CASES[case]["model_type"]
    sparse = family == "qwen3_moe"
    assert isinstance(read(SparseKeys if sparse else DenseKeys, given, "model"), DecoderKeys)
    assert family in FAMILIES


def test_flavours_of_context_parallelism_are_those_that_there_are():
    assert set(get_args(get_type_hints(ContextConfig)["kind"])) == KINDS.keys()


# -- files and overrides -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("metrics.jsonl=out.jsonl", "out.jsonl"),
        ('metrics.jsonl="out.jsonl"', "out.jsonl"),
        ("metrics.jsonl = a b ", "a b"),
        ("metrics.jsonl=s3://b/x=y", "s3://b/x=y"),
        ("metrics.jsonl=", ""),
    ],
)
def test_a_bare_word_is_a_string(example, override, value):
    assert load_config(example, [override]).metrics.jsonl == value


def test_overrides_are_toml_and_the_last_one_counts(example):
    overrides = ["train.steps=8", "train.steps=9", "mesh.stages=[1, 3]", "train.seed=7"]
    config = load_config(example, [*overrides, "train.deterministic=false", "optim.lr=1"])
    assert (config.train.steps, config.train.seed) == (9, 7)
    assert (config.mesh.stages, config.train.deterministic) == ((1, 3), False)
    assert config.optim.lr == 1.0


@pytest.mark.parametrize("text", ["train.steps", "steps=3", ".steps=3", "train.=3", "=3"])
def test_an_override_is_a_key_of_a_section_and_a_value(example, text):
    assert refused(example, text) == f"override {text!r}: expected section.key=value"


def test_an_override_goes_into_sections_only(example):
    message = refused(example, "train.steps.x=3")
    assert message == "override 'train.steps.x=3': steps is a value, not a section"


@pytest.mark.parametrize("content", [b"[model\n", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_what_is_no_toml_is_refused(tmp_path, content):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    assert refused(str(path)).startswith(f"{path}: not TOML: ")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    missing = tmp_path / "run.toml"
    message = f"{missing}: cannot read this config: No such file or directory"
    assert refused(str(missing)) == message
    assert refused(str(tmp_path)) == f"{tmp_path}: cannot read this config: Is a directory"


# -- combinations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.global_batch=12"],
            "train.global_batch 12 does not divide over dp_replicate x dp_shard x microbatches = 1 x",
        ),
        (
            ["mesh.cp=3", "mesh.ep=1"],
            "train.seq_len 64 does not divide into 6 chunks, which all_gather needs over cp=3 (head",
        ),
        (
            ["mesh.cp=3", "mesh.ep=1", "context.kind=ulysses"],
            "train.seq_len 64 does not divide into 3 chunks, which ulysses needs over cp=3 (contig",
        ),
        (
            ["mesh.cp=2", "train.seq_len=66", "context.kind=ulysses"],
            "train.seq_len 66 over cp=2 leaves 33 tokens a rank, which do not divide over tp=2",
        ),
        (["train.seq_len=63"], "train.seq_len 63 over cp=1 leaves 63 tokens a rank, which do not"),
        (["mesh.ep=3"], "layout: ep=3 must divide dp_shard x cp x tp = 2 x 1 x 2 = 4"),
        (["mesh.stages=[1, 1, 2]"], "layout: 3 stages given for pp x virtual = 2 x 1"),
        (["mesh.tp=0"], "layout: tp=0 must be at least 1"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(example, overrides, message):
    with pytest.raises(LayoutError) as error:
        load_config(example, overrides)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("kind", "cp", "seq_len"), [("all_gather", 2, 4), ("ring", 4, 8), ("ulysses", 4, 8)]
)
def test_the_shortest_sequences_that_an_order_allows(example, kind, cp, seq_len):
    given = [f"context.kind={kind}", f"mesh.cp={cp}", "mesh.ep=1"]
    assert load_config(example, [*given, f"train.seq_len={seq_len}"]).train.seq_len == seq_len
    with pytest.raises(LayoutError):
        load_config(example, [*given, f"train.seq_len={seq_len // 2}"])


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=0",
        "train.global_batch=0",
        "train.seq_len=0",
        "train.seed=-1",
        "train.dropout=1.0",
        "train.dropout=nan",
        "train.balance_loss=-1",
        "train.balance_bias=inf",
        "train.max_bad_steps=-1",
        "train.spike=0.5",
        "pipeline.microbatches=0",
        "checkpoint.every=0",
        "checkpoint.keep_last=0",
        "validation.batches=0",
        "validation.every=-1",
        "optim.lr=-1",
    ],
)
def test_numbers_out_of_range_are_refused(example, override):
    key = override.partition("=")[0]
    assert re.fullmatch(rf"{re.escape(key)}: \S+ must be .+", refused(example, override))


def test_a_stage_without_layers_is_refused(example):
    message = "mesh.stages: (4, 0) must be at least one layer each"
    assert refused(example, "mesh.stages=[4, 0]") == message


@pytest.mark.parametrize(
    ("name", "virtual", "order"),
    [
        ("1f1b", 1, "loop"),
        ("zb1p", 1, "loop"),
        ("interleaved", 2, "loop"),
        ("looped_bfs", 2, "loop"),
        ("zbv", 2, "v"),
        ("dualpipev", 2, "v"),
    ],
)
def test_a_schedule_puts_stages_on_ranks(example, name, virtual, order):
    topology = load_config(example, [f"pipeline.schedule={name}"]).topology
    assert (topology.virtual, topology.order) == (virtual, order)


def test_interleaved_takes_any_number_of_stages_a_rank(example):
    wanted = ["pipeline.schedule=interleaved", "pipeline.stages_per_rank=4"]
    assert load_config(example, wanted).topology.virtual == 4
    message = "pipeline.stages_per_rank: 0 must be at least 1"
    assert refused(example, *wanted[:1], "pipeline.stages_per_rank=0") == message


def test_layers_are_given_for_every_stage(example):
    wanted = ["pipeline.schedule=interleaved", "mesh.stages=[1, 1, 1, 1]"]
    assert load_config(example, wanted).topology.stages == (1, 1, 1, 1)
    message = "layout: 4 stages given for pp x virtual = 2 x 1"
    with pytest.raises(LayoutError, match=re.escape(message)):
        load_config(example, wanted[1:])


def test_stages_are_balanced_by_what_layers_and_head_take(example):
    wide = ["model.vocab_size=100000", "model.num_hidden_layers=6", "mesh.balance_stages=true"]
    made = load_config(example, wide)
    assert made.topology.stages is None
    raw = model_config(made.model)
    assert made.balanced(raw).topology.stages == (5, 1)
    plain = load_config(example, wide[1:2])
    assert plain.balanced(raw) is plain
    message = "mesh.balance_stages: mesh.stages is given as well; leave one out"
    assert refused(example, *wide, "mesh.stages=[3, 3]") == message


def test_a_schedule_of_ones_own_says_where_stages_are(example, tmp_path):
    path = tmp_path / "my.csv"
    path.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    wanted = [f"pipeline.csv={path}", "pipeline.microbatches=1"]
    made = load_config(example, wanted)
    assert (made.topology.virtual, made.topology.order) == (2, "v")
    assert made.pipeline.program(made.topology).microbatches == 1
    other = load_config(example, [*wanted[:1], "pipeline.microbatches=2"])
    message = f"pipeline.csv {path}: is for 2 ranks and 1 micro-batches; the run has pp=2 and "
    with pytest.raises(LayoutError, match=re.escape(message)):
        other.pipeline.program(other.topology)
    assert refused(example, "pipeline.csv=absent").startswith("pipeline.csv absent: No such file")


def test_a_step_to_resume_from_is_one_of_a_run(example):
    message = "checkpoint.resume: 3 is a step, but checkpoint.url is empty"
    assert refused(example, "checkpoint.url=", "checkpoint.resume=3") == message
    assert load_config(example, ["checkpoint.resume=3"]).checkpoint.resume == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ['data.tokens.files=["a"]'],
            'data.tokens: is not read, since data.kind is "synthetic"',
        ),
        (
            ["data.kind=tokens", 'data.tokens.files=["a"]', 'data.text.files=["a"]'],
            'data.text: is not read, since data.kind is "tokens"',
        ),
        (
            ["data.kind=tokens", 'data.tokens.files=["a"]', "data.synthetic.vocab_size=9"],
            'data.synthetic: is not read, since data.kind is "tokens"',
        ),
        (
            [
                "data.kind=mixture",
                'data.mixture=[{weight=1, kind="synthetic", text={files=["a"]}}]',
            ],
            'data.mixture[0].text: is not read, since data.mixture[0].kind is "synthetic"',
        ),
        (
            ['validation.data.text.files=["a"]'],
            'validation.data.text: is not read, since validation.data.kind is "synthetic"',
        ),
        (["data.kind=text"], "data.kind is text: its settings data.text are missing"),
    ],
)
def test_data_settings_are_those_of_the_kind(example, overrides, message):
    assert refused(example, *overrides) == message


# -- resumes -----------------------------------------------------------------------------------


def differing(example: str, *overrides: str) -> dict[str, tuple[object, object]]:
    before = load_config(example).resolved(None).to_json()
    return changes(before, load_config(example, overrides).resolved(before).to_json())


def test_a_resume_may_differ_in_where_and_how_long(example):
    overrides = ["mesh.pp=1", "mesh.tp=1", "mesh.ep=2", "pipeline.schedule=gpipe"]
    overrides += ["pipeline.microbatches=2", "context.kind=ring", "train.steps=12"]
    overrides += ["checkpoint.every=1", "metrics.jsonl=other", "validation.every=2"]
    assert differing(example, *overrides) == {}


@pytest.mark.parametrize(
    ("override", "key", "before", "now"),
    [
        ("train.seq_len=32", "train.seq_len", 64, 32),
        ("train.seed=1", "train.seed", 0, 1),
        ("optim.lr=0.5", "optim.lr", 1e-3, 0.5),
        ("optim.total_steps=12", "optim.total_steps", 6, 12),
        ("model.head_dim=32", "model.head_dim", 16, 32),
        ("model.rms_norm_eps=1e-5", "model.rms_norm_eps", None, 1e-5),
        ("data.seed=3", "data.seed", None, 3),
        ("data.synthetic.vocab_size=9", "data.synthetic.vocab_size", None, 9),
    ],
)
def test_all_else_is_named_with_both_values(example, override, key, before, now):
    assert differing(example, override) == {key: (before, now)}


def test_a_key_that_older_code_did_not_know_had_its_default(example):
    before = load_config(example).resolved(None).to_json()
    del before["train"]["spike"], before["train"]["dropout"], before["optim"]["min_factor"]
    same = load_config(example).resolved(before).to_json()
    assert changes(before, same) == {}
    other = load_config(example, ["train.spike=2.0"]).resolved(before).to_json()
    assert changes(before, other) == {"train.spike": (0.0, 2.0)}


def test_a_key_that_is_gone_is_a_change(example):
    now = load_config(example).resolved(None).to_json()
    before = now | {"train": now["train"] | {"momentum": 0.5}}
    assert changes(before, now) == {"train.momentum": (0.5, None)}


def test_a_longer_run_keeps_the_schedule_of_its_first_start(example):
    schedule = ["optim.schedule=cosine", "optim.warmup_steps=2"]
    first = load_config(example, schedule).resolved(None)
    assert first.optim.total_steps == first.train.steps == 6
    again = load_config(example, [*schedule, "train.steps=60"]).resolved(first.to_json())
    assert (again.train.steps, again.optim.total_steps) == (60, 6)
    third = load_config(example, [*schedule, "train.steps=90"]).resolved(again.to_json())
    assert third.optim.total_steps == 6
    assert changes(first.to_json(), third.to_json()) == {}


def test_a_total_that_is_set_is_kept(example):
    config = load_config(example, ["optim.total_steps=50"])
    assert config.resolved(None) is config
    assert config.resolved(load_config(example).resolved(None).to_json()) is config


def test_a_warm_up_longer_than_the_run_is_refused_at_its_start(example):
    config = load_config(example, ["optim.schedule=cosine", "optim.warmup_steps=7"])
    with pytest.raises(UsageError, match="warmup_steps 7"):
        config.resolved(None)


def test_gathered_parameters_are_freed_where_each_is_used_once(example):
    config = load_config(example)
    assert not config.reshards
    once = replace(config.pipeline, microbatches=1)
    alone = replace(config, pipeline=once, mesh=replace(config.mesh, pp=1))
    assert alone.reshards
    assert not replace(config, pipeline=once).reshards
    kept = replace(alone.train, reshard_after_forward=False)
    assert not replace(alone, train=kept).reshards


def test_masters_are_wide(example):
    for dtype, stored in (("bfloat16", 4), ("float32", 4), ("float64", 8)):
        config = load_config(example, [f"train.dtype={dtype}"])
        assert str(config.train.compute) == f"torch.{dtype}"
        assert config.train.stored.itemsize == stored


def test_every_refusal_is_one_that_the_command_line_knows(example):
    with pytest.raises(CkptError) as error:
        load_config(example, ["mesh.ep=3"])
    assert error.value.exit_code == 4
