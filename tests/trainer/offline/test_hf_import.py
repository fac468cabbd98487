"""Out and in again changes nothing; little memory does; what is no such model is refused in one line."""

import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import full_disk
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import ModelConfig, RouterScoring, YarnConfig
from models.config import plain_model
from models.hf import matrices, shapes
from precision.formats import spread
from trainer.checkpoint import read
from trainer.checkpoint.state_tree import split
from trainer.checkpoint.storage import Piece, SavedTensors, finish, write_pieces
from trainer.config import load
from trainer.launch.composition import compose
from trainer.offline import row_reader
from trainer.offline.export import export_run
from trainer.offline.hf_export import ExportFormat, export
from trainer.offline.hf_fp8 import KeptQuantizer, dequantize, grid_shape
from trainer.offline.hf_import import import_hf
from trainer.offline.saved_model import open_run

ROOT = Path(__file__).parents[3]
MODEL = ModelConfig(
    vocab_size=300, hidden_size=192, num_layers=2, num_heads=3, q_lora_rank=40, kv_lora_rank=24, qk_nope_head_dim=16,
    qk_rope_head_dim=16, v_head_dim=24, intermediate_size=200, moe_intermediate_size=136, num_experts=5,
    num_mtp_layers=1, num_shared_experts=2,
    rope_scaling=YarnConfig(factor=8.0, original_max_position_embeddings=512, mscale=0.0),
)  # fmt: skip
END = "<\uff5cend\u2581of\u2581sentence\uff5c>"  # DeepSeek's
SOFTMAX = replace(
    MODEL, router_scoring=RouterScoring.softmax, router_bias_update_rate=0.0, norm_topk_prob=False, num_mtp_layers=0,
    q_lora_rank=None, rope_scaling=None,
)  # fmt: skip


def weights(model: ModelConfig) -> dict[str, Tensor]:
    """Random masters."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes(model).items()}


def saved(path: Path, model: ModelConfig, state: dict[str, Tensor], ranks: int = 1) -> Path:
    """A checkpoint of these weights, rows of each spread over so many ranks."""
    path.mkdir(parents=True)
    written = []
    for rank in range(ranks):
        pieces = []
        for name, tensor in state.items():
            begin, end = (tensor.shape[0] * r // ranks for r in (rank, rank + 1))
            offsets, rows = (begin, *(0 for _ in tensor.shape[1:])), tensor[begin:end]
            load = partial(tensor.__getitem__, slice(begin, end))
            pieces.append(Piece(f"model/{name}", tensor.dtype, tensor.shape, offsets, rows.shape, load))
        written.append(write_pieces(path / f"rank{rank:05d}.safetensors", pieces))
    text = {"step": 5, "meta": {"model": plain_model(model), "precision": "bf16"}, "state": split({"model": state})[0]}
    finish(path, written, json.dumps(text))
    return path


def imported(folder: Path) -> dict[str, Tensor]:
    """The masters of what was imported."""
    state, _ = read(folder / "checkpoints" / "step_00000000")
    return state["model"]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is torch.float32 and torch.equal(found[name], tensor), name


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix takes several steps."""
    monkeypatch.setattr(row_reader, "STEP_BYTES", 1 << 16)


@pytest.mark.parametrize(("model", "ranks"), [(MODEL, 3), (SOFTMAX, 1)], ids=["v3", "v2"])
def test_fp32_and_bf16_come_back(model: ModelConfig, ranks: int, tmp_path: Path, small_steps: None) -> None:
    state = weights(model)
    checkpoint = saved(tmp_path / "run" / "checkpoints" / "step_00000005", model, state, ranks)
    for numbers in (ExportFormat.fp32, ExportFormat.bf16):
        out = tmp_path / numbers.value
        export(checkpoint, out, model, numbers, None, mtp=True, max_file_bytes=400_000)
        made = import_hf(out, tmp_path / f"in_{numbers.value}")
        kept = replace(made.model, mtp_loss_weight=model.mtp_loss_weight)
        assert (kept, made.tokenizer, made.fp8, made.remarks) == (model, None, 0, [])
        expected = state
        if numbers is ExportFormat.bf16:
            expected = {n: t if n.endswith(".bias") else t.bfloat16().float() for n, t in state.items()}
        assert_equal(imported(made.folder), expected)


def published(folder: Path, power_of_two: bool, sources: dict[str, torch.dtype]) -> tuple[dict[str, Tensor], dict]:
    """A folder as DeepSeek publishes FP8: everything in blocks but embedding, head, norms, routers and eh_proj.
    sources: formats of other tensors. Returns its tensors and config.json."""
    checkpoint = saved(folder.parent / "made" / "checkpoints" / "step_00000000", MODEL, weights(MODEL))
    export(checkpoint, folder, MODEL, ExportFormat.fp32, None, mtp=True)
    tensors, generator = dict[str, Tensor](), torch.Generator().manual_seed(4)
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            if tensor.dim() == 2 and ("proj" in name) and "eh_proj" not in name:
                scale = torch.rand(grid_shape((tensor.shape[0], tensor.shape[1])), generator=generator) * 1e-3 + 1e-4
                scale = torch.exp2(scale.log2().round()) if power_of_two else scale
                tensors[name] = (tensor / spread(scale, *tensor.shape)).clamp(-448, 448).to(torch.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = scale
            else:
                tensors[name] = tensor.to(sources.get(name, torch.float32 if name.endswith("bias") else torch.bfloat16))
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    for key in ("rope_parameters", "dtype", "torch_dtype"):
        del config[key]
    how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    config["quantization_config"] = how
    return tensors, config


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """One file without an index."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("power_of_two", [True, False])
def test_fp8_is_dequantised_and_comes_out_as_the_same_bytes(
    power_of_two: bool, tmp_path: Path, small_steps: None
) -> None:
    folder = tmp_path / "published"
    tensors, config = published(folder, power_of_two, {"model.norm.weight": torch.float16})
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    write(folder, tensors, config)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    made = import_hf(folder, tmp_path / "in")
    assert made.fp8 == sum(t.dtype == torch.float8_e4m3fn for t in tensors.values()) > 40
    with pytest.raises(ValueError, match=r"in: an imported model, and no run; .* run\.init_from="):
        open_run(made.folder)
    masters = imported(made.folder)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    exact = tensors[name].double() * spread(tensors[f"{name}_scale_inv"], 136, 192).double()
    part = masters["layers.1.moe.experts.gate_up.weight"][3, 136:]
    assert torch.equal(part, exact.float())
    if power_of_two:
        assert torch.equal(part.double(), exact)
        assert torch.equal(part.bfloat16().float(), part), "the compute weight is the same"

    checkpoint = made.folder / "checkpoints" / "step_00000000"
    quantizer = KeptQuantizer(SavedTensors(checkpoint), checkpoint)
    out = tmp_path / "again"
    export(checkpoint, out, made.model, ExportFormat.fp8, None, quantizer=quantizer, mtp=True, max_file_bytes=300_000)
    again: dict[str, Tensor] = {}
    for file in out.glob("*.safetensors"):
        again |= load_file(file)
    del tensors["model.layers.0.self_attn.rotary_emb.inv_freq"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float().bfloat16()
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8)), name
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    apart = ["lm_head", "model.layers.2.eh_proj", "model.layers.2.shared_head.head"]
    assert settings["modules_to_not_convert"] == apart
    assert ("scale_fmt" in settings) == power_of_two
    matrix = next(one for one in matrices(made.model) if len(one.hf_names) == 2 and quantizer.is_fp8(one))
    del quantizer._scales[matrix.hf_names[1]]
    assert not quantizer.is_fp8(matrix), "both parts, or none"


def test_experts_of_which_one_came_in_bf16_leave_in_bf16(tmp_path: Path) -> None:
    """A loader reads a layer's experts in one format."""
    folder, out, name = tmp_path / "published", tmp_path / "out", "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors, config = published(folder, True, {})
    tensors[name] = dequantize(tensors[name], tensors.pop(f"{name}_scale_inv")).bfloat16()
    write(folder, tensors, config)
    export_run(import_hf(folder, tmp_path / "in").folder, out, ExportFormat.fp8, mtp=True)
    experts: dict[str, set[torch.dtype]] = {"model.layers.1.mlp": set(), "model.layers.2.mlp": set()}
    for file in out.glob("*.safetensors"):
        for each, tensor in load_file(file).items():
            if ".experts." in each and each.endswith(".weight"):
                experts[each.partition(".experts.")[0]].add(tensor.dtype)
    assert list(experts.values()) == [{torch.bfloat16}, {torch.float8_e4m3fn}]
    apart = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert [module for module in apart if module.endswith("experts")] == ["model.layers.1.mlp.experts"]


def test_token_ids_that_only_config_json_has_come_back(tmp_path: Path) -> None:
    folder, ids = tmp_path / "published", {"bos_token_id": 3, "eos_token_id": [7, 9], "pad_token_id": 0}
    tensors, config = published(folder, True, {})
    write(folder, tensors, config | ids)
    export_run(import_hf(folder, tmp_path / "in").folder, tmp_path / "out", ExportFormat.bf16)
    for name in ("config.json", "generation_config.json"):
        assert ids.items() <= json.loads((tmp_path / "out" / name).read_text()).items()


@pytest.mark.parametrize(("ends", "with_tokenizer"), [(7, True), ([7, 9], False)])
def test_the_tokens_that_begin_and_end_a_text_come_back(ends: object, with_tokenizer: bool, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    write(folder, *published(folder, True, {}))
    ids = {"bos_token_id": 3, "eos_token_id": ends}
    (folder / "generation_config.json").write_text(json.dumps({**ids, "temperature": 0.6}))
    if with_tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    made = import_hf(folder, tmp_path / "in")
    _, remarks = export_run(made.folder, tmp_path / "out", ExportFormat.bf16)
    out = tmp_path / "out"
    config, generation = (json.loads((out / f"{n}.json").read_text()) for n in ("config", "generation_config"))
    assert {key: config[key] for key in ids} == ids and generation == {**ids, "temperature": 0.6}
    assert ("without a tokenizer: the imported folder had none" in remarks) is not with_tokenizer


def test_a_run_can_start_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "published"
    tensors, config = published(folder, True, {})
    write(folder, tensors, config)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    made = import_hf(folder, tmp_path / "it's in (here), $HOME")  # quoted for the shell and for Hydra
    monkeypatch.setattr(sys, "argv", ["train.py", *shlex.split(" ".join(made.overrides)), "+recipe=fp8_block"])
    (job,) = compose(ROOT / "configs")
    config = load(job.tree)
    assert config.model == made.model and config.run.init_from == str(made.folder)
    assert config.data.tokenizer == str(made.folder / "tokenizer.json")
    assert config.data.end_of_text == END


def test_mtp_that_config_json_promises_and_the_files_lack_is_left_out(tmp_path: Path) -> None:
    state = weights(MODEL)
    checkpoint = saved(tmp_path / "run" / "checkpoints" / "step_00000005", MODEL, state)
    export(checkpoint, tmp_path / "out", MODEL, ExportFormat.fp32, None)
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 1}))
    made = import_hf(tmp_path / "out", tmp_path / "in")
    assert made.model.num_mtp_layers == 0 and "num_nextn_predict_layers=1" in made.remarks[0]
    assert_equal(imported(made.folder), {name: t for name, t in state.items() if not name.startswith("mtp.")})


def test_a_model_without_experts_comes_back(tmp_path: Path) -> None:
    """Its config.json has their number, larger than that of the tensors."""
    dense = replace(MODEL, num_dense_layers=MODEL.num_layers, num_mtp_layers=0, num_experts=64)
    state = weights(dense)
    checkpoint = saved(tmp_path / "run" / "checkpoints" / "step_00000005", dense, state)
    export(checkpoint, tmp_path / "out", dense, ExportFormat.fp32, None)
    made = import_hf(tmp_path / "out", tmp_path / "in")
    assert made.model.num_experts == 64
    assert_equal(imported(made.folder), state)


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "run" / "checkpoints" / "step_00000005", MODEL, weights(MODEL))
    with full_disk(1 << 16), pytest.raises(OSError, match=rf"File too large: '{tmp_path}/out'"):
        export(checkpoint, tmp_path / "out", MODEL, ExportFormat.fp32, None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_of_another_process_is_left_alone(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "run" / "checkpoints" / "step_00000005", MODEL, weights(MODEL))
    export(checkpoint, tmp_path / "made", MODEL, ExportFormat.fp32, None)
    (tmp_path / "out.partial").mkdir()
    said = r"out\.partial: exists: .*; remove it, or choose another folder than .*out$"
    with pytest.raises(ValueError, match=said):
        export(checkpoint, tmp_path / "out", MODEL, ExportFormat.fp32, None)
    with pytest.raises(ValueError, match=said):
        import_hf(tmp_path / "made", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "out.partial", "run"]


Change = Callable[[dict[str, Tensor], dict[str, Any]], None]
O_PROJ = "model.layers.0.self_attn.o_proj.weight"
WRONG: dict[str, tuple[Change, str]] = {
    "missing tensor": (lambda t, c: t.__delitem__("model.norm.weight"), "lacks model.norm.weight"),
    "missing scale": (lambda t, c: t.__delitem__(f"{O_PROJ}_scale_inv"), f"lacks {O_PROJ}_scale_inv"),
    "unknown tensor": (lambda t, c: t.update(lora=torch.ones(2)), "has lora"),
    "scale without FP8": (lambda t, c: t.update({O_PROJ: t[O_PROJ].float()}), f"has {O_PROJ}_scale_inv"),
    "wrong shape": (
        lambda t, c: t.update({"model.norm.weight": torch.ones(7)}),
        r"model.norm.weight is F32 \[7\], by config.json it is \[192\]",
    ),
    "wrong scales": (lambda t, c: t.update({f"{O_PROJ}_scale_inv": torch.ones(3, 3)}), r"is F32 \[3, 3\]"),
    "not finite": (
        lambda t, c: t.update({"model.norm.weight": torch.full((192,), math.nan)}),
        "model.norm.weight has numbers that are not finite",
    ),
    "integers": (lambda t, c: t.update({O_PROJ: torch.ones(192, 72, dtype=torch.int8)}), "I8 .* only F32, BF16"),
    "MTP's own head": (
        lambda t, c: t.update({"model.layers.2.shared_head.head.weight": torch.ones(300, 192)}),
        "model.layers.2.shared_head.head.weight differs from lm_head.weight",
    ),
    "YaRN by halves": (lambda t, c: c["rope_scaling"].__delitem__("factor"), "lacks factor"),
    "other blocks": (lambda t, c: c["quantization_config"].update(weight_block_size=[1, 32]), "weight_block_size"),
    "another method": (lambda t, c: c["quantization_config"].update(quant_method="awq"), "quant_method=awq"),
    "a billion experts": (
        lambda t, c: c.update(num_hidden_layers=4096, n_routed_experts=2**18),
        "layers and their experts have 1,073,745,920 tensors or more, and the files",
    ),
    "half a layer": (lambda t, c: c.update(num_hidden_layers=1.5), "num_layers=1.5: must be a whole number"),
    "text for a number": (lambda t, c: c.update(n_group="1"), "n_group='1': a text; write it without quotes"),
    "no config": (lambda t, c: c.clear(), "model_type=None"),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """A folder that can be imported, its tensors and its config.json."""
    folder = tmp_path_factory.mktemp("good") / "published"
    tensors, config = published(folder, True, {})
    write(folder, tensors, config)
    return folder, tensors, config


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_such_model_is_refused(
    what: str, good: tuple[Path, dict[str, Tensor], dict[str, Any]], tmp_path: Path
) -> None:
    change, message = WRONG[what]
    folder, tensors, config = tmp_path / "wrong", dict(good[1]), json.loads(json.dumps(good[2]))
    folder.mkdir()
    change(tensors, config)
    write(folder, tensors, config)
    with pytest.raises(ValueError, match=message) as refused:
        import_hf(folder, tmp_path / "in")
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]


def test_folders_that_are_not_there_or_not_whole_are_refused(
    good: tuple[Path, dict[str, Tensor], dict[str, Any]], tmp_path: Path
) -> None:
    def refused(why: str, source: Path, out: Path = tmp_path / "in") -> None:
        with pytest.raises(ValueError, match=why):
            import_hf(source, out)

    refused("no such folder", tmp_path / "nothing")
    folder = tmp_path / "folder"
    folder.mkdir()
    refused("no config.json", folder)
    (folder / "config.json").write_text("{")
    refused("not JSON", folder)
    shutil.copy(good[0] / "config.json", folder)
    refused("neither model.safetensors.index.json nor model.safetensors", folder)
    (folder / "model.safetensors").write_bytes((good[0] / "model.safetensors").read_bytes()[:1000])
    refused("model.safetensors: cannot be read", folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "gone.safetensors"}}')
    refused("gone.safetensors is missing", folder)
    refused("exists", good[0], folder)
    whole = shutil.copytree(good[0], tmp_path / "whole")
    (whole / "tokenizer_config.json").write_text("no")
    refused("tokenizer_config.json: not JSON", whole)
    (whole / "tokenizer.json").write_text("{}")
    for token in ("${oc.env:HOME}", "a\nb", {"content": 7}, ["x"]):
        (whole / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        refused("eos_token=.* is not the text of a token", whole)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux reports the peak since a given moment"
)
def test_memory_is_that_of_some_rows(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    """80 MB of masters pass through 20 MB, both ways. In a process of its own: what others left is not measured."""
    done = run_python(__file__, tmp_path)
    assert done.returncode == 0, done.stderr
    exported, imported, whole = json.loads(done.stdout.splitlines()[-1])
    assert exported < 20e6 and imported < 20e6
    assert whole >= 80e6, "it is measured"


def measure_memory(folder: Path) -> None:
    """Prints by how many bytes the process grew at the most: in an export, an import, and a read of everything."""
    row_reader.STEP_BYTES = 1 << 21
    model = replace(MODEL, vocab_size=20_000, hidden_size=256, moe_intermediate_size=512, num_experts=12)
    state = weights(model)
    assert sum(tensor.nbytes for tensor in state.values()) > 80e6
    checkpoint = saved(folder / "run" / "checkpoints" / "step_00000005", model, state, 2)
    del state

    def memory(what: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(what))

    def growth(work: Callable[[], object]) -> int:
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        work()
        return memory("VmHWM") - before

    bf16, back = folder / "bf16", folder / "back"
    exported = growth(lambda: export(checkpoint, bf16, model, ExportFormat.bf16, None, mtp=True))
    imported = growth(lambda: import_hf(bf16, back))
    print(json.dumps([exported, imported, growth(lambda: read(checkpoint))]))


if __name__ == "__main__":
    measure_memory(Path(sys.argv[1]))
