"""A trained run, exported, is in transformers what it is here: keys, logits, text, and the FP8 it computes with."""

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composed import config_of
from safetensors import safe_open
from small import write_corpus
from tokenizers import Tokenizer
from torch import Tensor
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.utils.quantization_config import FineGrainedFP8Config

from models import DeepSeek, ModelConfig
from models.hf import matrices
from precision import GroupedLinear, Linear, Plan, PrecisionConfig, bind, refresh_weights
from precision.backends import get_backend
from precision.formats import E4M3
from trainer.checkpoint import read, read_meta
from trainer.launch.command_line import guarded
from trainer.offline.export import export_run
from trainer.offline.hf_export import ExportFormat
from trainer.offline.hf_fp8 import dequantize
from trainer.offline.saved_model import open_run, section_of
from trainer.trainer import Trainer

ROOT = Path(__file__).parents[3]
SMALL = [
    *("model.vocab_size=320", "model.hidden_size=128", "model.num_layers=2", "model.num_heads=4"),
    *("model.kv_lora_rank=32", "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=16", "model.v_head_dim=32"),
    *("model.intermediate_size=256", "model.moe_intermediate_size=128", "model.num_experts=4"),
    *("trainer.global_batch_size=4", "trainer.microbatch_size=4", "trainer.sequence_length=48", "trainer.device=cpu"),
    *("optim.warmup_steps=2", "eval.batches=1", "logging.console.enabled=false"),
    *("checkpoint.every=0", "data=text", "data.validation_fraction=0.3"),
]
YARN = (
    "model.rope_scaling={factor: 4.0, original_max_position_embeddings: 64, beta_fast: 32.0, beta_slow: 1.0, "
    "mscale: 1.0, mscale_all_dim: 0.7}"
)
Precisions = Callable[..., PrecisionConfig]
Script = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of three runs: fp32; fp8_block, which begins with its weights; fp8_delayed."""
    folder = tmp_path_factory.mktemp("hub")
    write_corpus(folder / "text", 120, factor=7919, names=65521)
    learned = [YARN, f"run.init_from={folder / 'fp32'}"]
    wanted = {
        "fp32": [YARN, "trainer.max_steps=8", "optim.lr=1e-2"],
        "fp8_block": [*learned, "trainer.max_steps=2"],
        "fp8_delayed": ["trainer.max_steps=2", "model.q_lora_rank=128", "precision.rules.last_blocks=1"],
    }
    for name, overrides in wanted.items():
        places = [f"data.path={folder / 'text'}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder}"]
        Trainer(config_of([*SMALL, *places, f"precision={name}", f"run.name={name}", *overrides])).train()
    return folder


@pytest.fixture(scope="module")
def exported(runs: Path) -> dict[str, Path]:
    """The fp8_block run in each format."""
    made = {}
    for numbers in ExportFormat:
        made[numbers.value], _ = export_run(runs / "fp8_block", runs / f"hf_{numbers.value}", numbers)
    assert made["fp8"].left == [] and 0.5 < made["fp8"].fp8_share < 1
    return {name: export.folder for name, export in made.items()}


def state_of(run: Path) -> tuple[dict[str, Any], ModelConfig]:
    """What the run's last checkpoint holds."""
    (checkpoint,) = (run / "checkpoints").iterdir()
    return read(checkpoint)[0], section_of(ModelConfig, read_meta(checkpoint)["model"], "model", checkpoint)


def ours(run: Path, precision: PrecisionConfig) -> DeepSeek:
    """The run's model, computing in `precision`, with the run's scales if it is its own."""
    state, config = state_of(run)
    plan = Plan(precision, config.num_layers)
    model = DeepSeek(config, plan)
    model.load_state_dict(state["model"])
    arena = bind(model, plan, "cpu")
    if plan.delayed:
        arena.load_state_dict(state["arena"])
    refresh_weights(model, force=True)
    return model


def theirs(folder: Path, **how: Any) -> Any:
    """The folder as transformers loads it, every key accounted for."""
    if "quantization_config" in json.loads((folder / "config.json").read_text()):
        how["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(folder, output_loading_info=True, experts_implementation="eager", **how)
    assert not any(report.values()), report
    return model.eval()


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, checked against its index."""
    found = {}
    for name, file in json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].items():
        with safe_open(folder / file, framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


@pytest.fixture(scope="module")
def prompt(runs: Path, exported: dict[str, Path]) -> Tensor:
    """[8, 48] tokens of the text."""
    tokenizer = Tokenizer.from_file(str(exported["fp32"] / "tokenizer.json"))
    ids = tokenizer.encode((runs / "text" / "file3.txt").read_text()).ids
    return torch.tensor(ids[: 8 * 48]).view(8, 48)


def test_fp32_gives_our_logits_and_our_text(
    runs: Path, exported: dict[str, Path], recipe: Precisions, prompt: Tensor
) -> None:
    model, twin = ours(runs / "fp8_block", recipe("fp32")), theirs(exported["fp32"], dtype=torch.float32)
    assert twin.config.rope_parameters["rope_type"] == "yarn"
    settings = {"do_sample": False, "max_new_tokens": 40, "min_new_tokens": 40}
    text = twin.generate(prompt[:, :8], **settings)
    with torch.no_grad():
        for tokens in (prompt, text):
            logits, seen = model.logits(model.hidden(tokens)), twin(tokens).logits
            assert (seen - logits).norm() < 1e-5 * logits.norm()
    chosen = logits[:, 7:-1].gather(2, text[:, 8:, None])[..., 0]
    # ours would have chosen them, too; where two are as likely, within the rounding above, either may come
    assert (chosen >= logits[:, 7:-1].amax(-1) - 1e-4 * logits.std()).all()


def test_a_server_of_the_exported_fp8_multiplies_as_the_run_does(
    runs: Path, exported: dict[str, Path], recipe: Precisions
) -> None:
    """Layer by layer, from the same input: x in blocks of 1 x 128, weights as transformers reads them. Both round one
    FP32 sum of the same products to BF16, so that they differ by a rounding at the most."""
    model, twin = ours(runs / "fp8_block", recipe("fp8_block")), theirs(exported["fp8"], dtype=torch.float32)
    weights, reference, checked = dict(twin.named_parameters()), get_backend("reference"), 0
    for matrix in matrices(model.config):
        layer = model.get_submodule(matrix.name.removesuffix(".weight")) if matrix.name.endswith(".weight") else None
        if not (isinstance(layer, Linear) and layer.recipe.is_fp8 and set(matrix.hf_names) <= weights.keys()):
            continue
        x, zero = torch.randn(37, layer.weight.shape[1]).bfloat16(), torch.zeros(())
        data, inverse = reference.quantize(x, zero, zero.clone(), E4M3, layer.recipe)
        read_back = data.float() * inverse.repeat_interleave(128, 1)[:, : data.shape[1]]
        with torch.no_grad():
            y, served = layer(x).float(), read_back @ torch.cat([weights[name] for name in matrix.hf_names]).T
        torch.testing.assert_close(y, served, rtol=2**-8, atol=1e-5)
        assert (y - x.float() @ layer.weight.T).norm() > 0.01 * y.norm(), "FP8 shows"
        checked += 1
    assert checked >= 6


def test_the_exported_bf16_is_the_rounded_master(runs: Path, exported: dict[str, Path]) -> None:
    rounded, master = tensors(exported["bf16"]), tensors(exported["fp32"])
    assert rounded.keys() == master.keys()
    for name, tensor in rounded.items():
        assert torch.equal(tensor, master[name].to(tensor.dtype)), name
    assert {tensor.dtype for tensor in rounded.values()} >= {torch.bfloat16}


@pytest.mark.parametrize("name", ["fp8_block", "fp8_delayed"])
def test_the_exported_fp8_is_what_the_run_computes_with(name: str, runs: Path, recipe: Precisions) -> None:
    out = runs / f"again_{name}"
    made, remarks = export_run(runs / name, out, ExportFormat.fp8, mtp=True, max_file_bytes=200_000)
    unfit = ["layers.0.attn.kv_b", "mtp.0.attn.kv_b"] if name == "fp8_delayed" else []  # 192 by 32 numbers
    assert made.left == unfit
    assert remarks[0].startswith(f"of {runs / name / 'checkpoints'}/step_")
    left = f"in BF16, though trained in FP8, because loaders read it so only: {', '.join(unfit)}"
    assert remarks[1:] == ([left] if unfit else [])
    assert made.files > 3 and (out / f"model-00003-of-{made.files:05d}.safetensors").is_file()
    rules = {"rules__last_blocks": 1} if name == "fp8_delayed" else {}
    model, found = ours(runs / name, recipe(name, **rules)), tensors(out)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Linear | GroupedLinear)}
    checked = 0
    for matrix in matrices(model.config):
        layer = layers.get(matrix.name.removesuffix(".weight"))
        scaled = [name for name in matrix.hf_names if f"{name}_scale_inv" in found]
        row = matrix.name.removesuffix(".weight")
        fp8 = layer is not None and layer.recipe.is_fp8 and row not in made.left
        assert scaled == (list(matrix.hf_names) if fp8 else [])
        if layer is None or not scaled:
            continue
        assert layer.operand is not None and layer.operand.scale_inv is not None
        data, inverse = layer.operand.data, layer.operand.scale_inv
        if matrix.expert is not None:
            data, inverse = data[matrix.expert], inverse[matrix.expert]
        for part, theirs_name in zip(data.chunk(len(matrix.hf_names)), matrix.hf_names, strict=True):
            assert torch.equal(part.view(torch.uint8), found[theirs_name].view(torch.uint8)), theirs_name
            checked += 1
        scales = torch.cat([found[f"{name}_scale_inv"] for name in matrix.hf_names])
        assert torch.equal(scales, inverse.expand(scales.shape)), matrix.name
    assert checked > 20


def test_loaders_of_fp8_find_scales_where_they_look_for_them(runs: Path) -> None:
    """The model that transformers builds for FP8 GEMMs, on a GPU, has the exported tensors and no others."""
    out = runs / "fp8_for_loaders"
    export_run(runs / "fp8_delayed", out, ExportFormat.fp8)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert "scale_fmt" not in settings, "the scales of fp8_delayed are no powers of two"
    assert "model.layers.1.mlp.experts" in settings["modules_to_not_convert"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
    replace_with_fp8_linear(model, settings["modules_to_not_convert"], FineGrainedFP8Config(**settings), True)
    wanted = {name for name, _ in model.named_parameters() if name.endswith("scale_inv")}
    assert wanted == {name for name in tensors(out) if name.endswith("scale_inv")}


def test_the_tokenizer_is_the_runs(runs: Path, exported: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported["bf16"])
    raw = Tokenizer.from_file(str(runs / "fp8_block" / "tokenizer.json"))
    text = "def  f7(x):\n    return é + 'x'\n"
    assert tokenizer(text)["input_ids"] == raw.encode(text).ids
    assert tokenizer.decode(raw.encode(text).ids) == text
    end = raw.token_to_id("<|endoftext|>")
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.bos_token_id) == ("<|endoftext|>", end, end)
    twin = theirs(exported["bf16"])
    assert twin.dtype is torch.bfloat16, "dtype of config.json"
    assert twin.generation_config.eos_token_id == end == twin.config.eos_token_id


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Script:
    """Run a script in this process: exit code, and what it said."""

    def call(name: str, *arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        code = guarded(runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))["run"])
        said = capsys.readouterr()
        return code, (said.out + said.err).strip()

    return call


def test_mtp_goes_along_when_asked_for(runs: Path, tmp_path: Path, script: Script) -> None:
    code, said = script("export_hf", runs / "fp32", tmp_path / "out", "--mtp", "--dtype", "fp32", "--step", "8")
    made = f"{tmp_path / 'out'}: {len(tensors(tmp_path / 'out'))} tensors, 0.004 GB in 1 file"
    assert (code, said) == (0, f"{made}\nof {runs / 'fp32' / 'checkpoints' / 'step_00000008'}")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    found, (state, _) = tensors(tmp_path / "out"), state_of(runs / "fp32")
    assert torch.equal(found["model.layers.2.eh_proj.weight"], state["model"]["mtp.0.proj.weight"])
    assert torch.equal(found["model.layers.2.shared_head.head.weight"], state["model"]["lm_head.weight"])
    assert torch.equal(found["model.layers.2.embed_tokens.weight"], state["model"]["embed.weight"])


def test_what_cannot_be_exported_is_refused_in_one_line(runs: Path, tmp_path: Path, script: Script) -> None:
    out = tmp_path / "out"
    for arguments, why in {
        (runs / "fp32", out, "--dtype", "fp8"): "trained as fp32: nothing ran in FP8; use --dtype bf16",
        (runs / "none", out): "no such folder",
        (runs / "fp32", out, "--step", 7): "step_00000007: no such checkpoint; the run has those of steps 8",
        (runs / "fp32", runs): f"{runs}: exists",
        (runs / "fp32", "."): ".: exists",
        (runs / "fp32" / "checkpoints" / "step_00000008", out, "--step", 7): "--step 7: it is a checkpoint already",
        (runs / "fp32", tmp_path / "new" / ".."): "exists",
        (runs / "fp32", out, "--max-shard-size", "5 apples"): "--max-shard-size 5 apples: not a size",
        (runs / "fp32", out, "--max-shard-size", 400 * "9"): f"--max-shard-size {400 * '9'}: not a size",
        (runs / "fp32", out, "--tokenizer", "no.json"): "no.json: no such file",
        (runs, out): "no checkpoint there",
    }.items():
        code, said = script("export_hf", *arguments)
        assert code == 2 and why in said and "\n" not in said, said
    assert not list(tmp_path.iterdir())


def test_the_checkpoint_records_its_training_and_not_the_run_folder(runs: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    (copied / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "tokenizer.json"):
        (copied / name).write_text((runs / "fp32" / name).read_text())
    (checkpoint,) = (runs / "fp8_delayed" / "checkpoints").iterdir()
    (copied / "checkpoints" / checkpoint.name).symlink_to(checkpoint)
    config = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(config.replace("end_of_text: ", "end_of_text: x"))
    export_run(copied, tmp_path / "out", ExportFormat.fp8)
    export_run(runs / "fp8_delayed", tmp_path / "expected", ExportFormat.fp8)
    for path in (tmp_path / "expected").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    (copied / "tokenizer.json").write_text((copied / "tokenizer.json").read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer\.json: was altered"):
        export_run(copied, tmp_path / "other", ExportFormat.bf16)


def test_an_earlier_step_is_exported_under_the_config_that_made_it(runs: Path, tmp_path: Path) -> None:
    """The run resumes with a block in BF16, under the same recipe's name."""
    shutil.copytree(runs / "fp8_block", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "expected", ExportFormat.fp8)
    places = [f"data.path={runs / 'text'}", f"data.cache_dir={runs / 'cache'}", f"run.dir={tmp_path}", "run.name=run"]
    changed = ["precision=fp8_block", "precision.rules.last_blocks=1", "run.resume=auto", "trainer.max_steps=4"]
    Trainer(config_of([*SMALL, YARN, f"run.init_from={runs / 'fp32'}", *places, *changed])).train()
    export_run(tmp_path / "run", tmp_path / "earlier", ExportFormat.fp8, step=2)
    for path in (tmp_path / "expected").iterdir():
        assert (tmp_path / "earlier" / path.name).read_bytes() == path.read_bytes(), path.name
    export_run(tmp_path / "run", tmp_path / "later", ExportFormat.fp8, step=4)
    assert tensors(tmp_path / "later").keys() < tensors(tmp_path / "earlier").keys(), "the last block has no scales"


def test_an_altered_end_of_text_is_not_exported_nor_evaluated(runs: Path, tmp_path: Path) -> None:
    """config.yaml's is not asked; the checkpoint's is covered by its manifest."""
    shutil.copytree(runs / "fp32", run := tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("end_of_text: <|endoftext|>", "end_of_text: def"))
    assert (run / "config.yaml").read_text() != config
    assert open_run(run).config.data.end_of_text == "<|endoftext|>"
    (checkpoint,) = (run / "checkpoints").iterdir()
    state = (checkpoint / "state.json").read_text()
    (checkpoint / "state.json").write_text(state.replace('"end_of_text": "<|endoftext|>"', '"end_of_text": "def"'))
    assert (checkpoint / "state.json").read_text() != state
    for name in (run, checkpoint):
        with pytest.raises(ValueError, match=r"damaged|state\.json"):
            export_run(name, tmp_path / "other", ExportFormat.bf16)
        with pytest.raises(ValueError, match=r"damaged|state\.json"):
            open_run(name)
    assert not (tmp_path / "other").exists()


def test_dequantised_fp8_is_what_transformers_reads(exported: dict[str, Path]) -> None:
    found = tensors(exported["fp8"])
    name = "model.layers.0.mlp.gate_proj.weight"
    twin = theirs(exported["fp8"], dtype=torch.float32)
    expected = dequantize(found[name], found[f"{name}_scale_inv"])
    assert torch.equal(twin.model.layers[0].mlp.gate_proj.weight, expected)
