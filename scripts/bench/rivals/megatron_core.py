"""Megatron-core's side of `compare.py`: its GPT model, distributed optimizer and schedule, with its fast paths on.

On: grouped GEMMs, fused RoPE, permutation, router and cross entropy, FP32 gradients accumulated by the GEMMs and
reduced in the background, cuDNN attention. No recomputation. Two of its behaviours are changed, so that both sides do
the same work: queries of MLA without a latent get no norm of their own, and experts are assigned in turn, as
`model.force_balanced_routing` does, not by random logits.

Requires Megatron-core 0.19.2 and Transformer Engine 2.20.2.
"""

import importlib
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from work import Work

LEARNING_RATE, WEIGHT_DECAY, BETAS, CLIP = 1e-5, 0.1, (0.9, 0.95), 1.0
AMAX_HISTORY = 1024  # its own default


def main() -> None:
    work, rank, world = Work.read(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    stand_in_for_apex()
    dist.init_process_group("nccl", device_id=device)
    states = importlib.import_module("megatron.core.parallel_state")
    states.initialize_model_parallel(
        1, 1, expert_model_parallel_size=1, expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    importlib.import_module("megatron.core.tensor_parallel.random").model_parallel_cuda_manual_seed(1234)
    importlib.import_module("megatron.core.config").set_experimental_flag(True)  # the fused padding of routing maps
    plain_queries()
    round_robin(work.model["num_experts_per_token"])
    config = model_config(work)
    model, optimizer = build(config, work)
    work.measure(stepper(config, model, optimizer, work, rank, world, device), dist.barrier, rank)
    dist.barrier()
    dist.destroy_process_group()


def stand_in_for_apex() -> None:
    """Replace the kernel of APEX that adds a weight gradient to an FP32 buffer: by Transformer Engine's GEMM with beta
    = 1. Only the head uses it."""
    module: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)

    def accumulate(x: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
        gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
        gemm(x, gradient, out_dtype=total.dtype, layout="NT", out=total, accumulate=True, grad=True)

    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate
    sys.modules[module.__name__] = module


def plain_queries() -> None:
    """Remove the second norm of the query projection's input, which version 0.19 adds if queries have no latent."""
    resolver = importlib.import_module("megatron.core.transformer.mla_qk_norm_config").QKNormConfigResolver
    linear = importlib.import_module("megatron.core.extensions.transformer_engine").TEColumnParallelLinear
    resolve = resolver.resolve

    def without(self: Any) -> Any:
        return {**resolve(self), "linear_q_proj": linear}

    resolver.resolve = without


def round_robin(chosen: int) -> None:
    """Send token t to experts t K, t K + 1, ... modulo E. Scores keep a trace of the logits: the router learns."""

    class InTurn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            E = logits.shape[-1]
            flat = logits.reshape(-1, E)
            turn = torch.arange(flat.shape[0] * chosen, device=flat.device).view(-1, chosen) % E
            dealt = torch.zeros_like(flat).scatter_(1, turn, 1.0)
            return (dealt + 0.01 * flat.tanh()).view(logits.shape)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0]

    router: Any = importlib.import_module("megatron.core.transformer.moe.router")
    router.apply_random_logits = InTurn.apply


def model_config(work: Work) -> Any:
    """Return its config of our model's shape."""
    m = work.model
    enums = importlib.import_module("megatron.core.transformer.enums")
    make = importlib.import_module("megatron.core.transformer.transformer_config").MLATransformerConfig
    fp8: dict[str, Any] = {}
    if work.precision != "bf16":
        fp8 = {
            "fp8": "e4m3" if work.precision == "blockwise" else "hybrid",
            "fp8_recipe": work.precision,
            "moe_router_padding_for_quantization": True,
        }
    if work.precision == "delayed":
        fp8 |= {"fp8_amax_history_len": AMAX_HISTORY, "fp8_amax_compute_algo": "max"}
    draw = importlib.import_module("megatron.core.utils").init_method_normal(m["init_std"])  # as ours: last too
    softmax = m["router_scoring"] == "softmax"
    dense = m["num_dense_layers"]
    return make(
        num_layers=m["num_layers"], hidden_size=m["hidden_size"], num_attention_heads=m["num_heads"],
        ffn_hidden_size=m["intermediate_size"], kv_channels=m["v_head_dim"],
        q_lora_rank=m["q_lora_rank"], kv_lora_rank=m["kv_lora_rank"], qk_head_dim=m["qk_nope_head_dim"],
        qk_pos_emb_head_dim=m["qk_rope_head_dim"], v_head_dim=m["v_head_dim"],
        rope_type="yarn", rotary_scaling_factor=40, mscale=0.707, mscale_all_dim=0.707,  # fused RoPE has no other
        original_max_position_embeddings=work.length,
        normalization="RMSNorm", layernorm_epsilon=m["rms_norm_eps"], qk_layernorm=True, add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, hidden_dropout=0.0, attention_dropout=0.0,
        init_method=draw, output_layer_init_method=draw, init_method_std=m["init_std"],
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        bias_activation_fusion=True, bias_dropout_fusion=True, apply_rope_fusion=True, masked_softmax_fusion=True,
        persist_layer_norm=True, gradient_accumulation_fusion=True, cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te", attention_backend=enums.AttnBackend.fused, attention_softmax_in_fp32=True,
        num_moe_experts=m["num_experts"], moe_router_topk=m["num_experts_per_token"],
        moe_ffn_hidden_size=m["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=m["moe_intermediate_size"] * m["num_shared_experts"],
        moe_layer_freq=[0] * dense + [1] * (m["num_layers"] - dense), moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall", moe_permute_fusion=True, moe_router_fusion=True, moe_router_dtype="fp32",
        moe_router_pre_softmax=softmax, moe_router_score_function=m["router_scoring"],
        moe_router_topk_scaling_factor=m["routed_scaling_factor"], moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0, moe_router_force_load_balancing=True, **fp8,
    )  # fmt: skip


def build(config: Any, work: Work) -> tuple[Any, Any]:
    """Return model and optimizer, data parallel: ranks share masters, moments and the reduction of gradients."""
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    parallel = importlib.import_module("megatron.core.distributed")
    optimizers = importlib.import_module("megatron.core.optimizer")
    model = importlib.import_module("megatron.core.models.gpt").GPTModel(
        config, specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization="RMSNorm"),
        vocab_size=work.model["vocab_size"], max_sequence_length=work.length,
        share_embeddings_and_output_weights=False, position_embedding_type="rope",
    )  # fmt: skip
    model = importlib.import_module("megatron.core.transformer.module").Float16Module(config, model.cuda())
    shared = parallel.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True,
        average_in_collective=False, check_for_nan_in_grad=False,
    )  # fmt: skip
    model = parallel.DistributedDataParallel(config, shared, model)
    model.broadcast_params()
    settings = optimizers.OptimizerConfig(
        optimizer="adam", lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, overlap_param_gather=True,
        clip_grad=CLIP, fp8_recipe=None if work.precision == "bf16" else work.precision,
    )  # fmt: skip
    optimizer = optimizers.get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    config.grad_scale_func, config.no_sync_func = optimizer.scale_loss, model.no_sync
    config.finalize_model_grads_func = parallel.finalize_model_grads
    return model, optimizer


def stepper(config: Any, model: Any, optimizer: Any, work: Work, rank: int, world: int, device: torch.device) -> Any:
    """Return a whole training step as a function."""
    run = importlib.import_module("megatron.core.pipeline_parallel.schedules").forward_backward_no_pipelining
    batch = work.tokens(rank, world).to(device)
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    position = torch.arange(work.length, device=device)[None].expand(len(tokens), -1)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield tokens, targets

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.mean()
        return loss, {"loss": loss.detach()}

    def forward(data: Iterator, replica: Any) -> tuple[torch.Tensor, Any]:
        x, y = next(data)
        return replica(x, position, None, labels=y), loss_of

    def step() -> torch.Tensor:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        seen = run(
            forward_step_func=forward, data_iterator=batches(), model=[model], num_microbatches=1,
            seq_length=work.length, micro_batch_size=work.sequences, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        return seen[0]["loss"]

    return step


if __name__ == "__main__":
    main()
